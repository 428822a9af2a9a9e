"""From times to rows, and from rows to a markdown table, a JSON file and a picture."""

import argparse
import json
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from measure import PERIOD
from systems import MODES, System
from workload import Workload, limit, link_time

PACKAGES = ("easy_context", "torch", "triton", "flash-attn-4", "ring-flash-attn", "yunchang", "deepspeed")


@dataclass
class Row:
    """One system on one mask, as measured on `rank` (virtual ranks), or on the slowest process of all."""

    system: str
    mode: str
    kernel: str
    mask: str
    rank: int
    tokens_per_rank: int
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    tflops_forward: float | None = None
    tflops_forward_backward: float | None = None
    percent_forward: float | None = None  # of one call of the same kernel
    percent_forward_backward: float | None = None
    limit_percent: float | None = None  # what exchange that nothing can hide leaves of 100
    speedup: float | None = None  # of forward + backward, against ring-flash-attn's zigzag
    failure: str | None = None


def rows_of(systems: list[System], times: list, work: Workload, rank: int, world: int, ring: int, link, device):
    """One row a system; shares and speedups are filled in by `compare`, once all ranks are there."""
    rows = []
    for system, seconds in zip(systems, times, strict=True):
        row = Row(system.name, system.mode, system.kernel, work.mask, rank, system.tokens, failure=system.failure)
        if seconds is not None:
            forward, both = seconds
            row.forward_ms, row.forward_backward_ms = forward * 1e3, both * 1e3
            row.tflops_forward, row.tflops_forward_backward = (
                system.flops / forward / 1e12,
                3.5 * system.flops / both / 1e12,
            )
        rows.append(row)
    seconds_of = link_time(link, device)
    if seconds_of is not None and work.mask == "causal":
        for row, system in zip(rows, systems, strict=True):
            call = _yardstick(row, rows)
            if row.mode in MODES and call is not None:
                compute = system.flops / call.tflops_forward / 1e12
                _, least = limit(row.mode, work, world, ring, compute, seconds_of)
                row.limit_percent = 100 * 3.5 * compute / least
    return rows


def _yardstick(row: Row, rows: list[Row]) -> Row | None:
    """The call of the row's kernel in one process, measured beside it."""
    calls = [r for r in rows if r.mode == "one process" and r.kernel == row.kernel and r.rank == row.rank]
    return next((call for call in calls if call.mask == row.mask), None)


def compare(rows: list[Row]) -> list[Row]:
    """Fill in the shares; then of every system keep the slowest rank."""
    for row in rows:
        call = _yardstick(row, rows)
        if call is not None and row.failure is None:
            row.percent_forward = 100 * row.tflops_forward / call.tflops_forward
            row.percent_forward_backward = 100 * row.tflops_forward_backward / call.tflops_forward_backward
    slowest: dict[tuple, Row] = {}
    for row in rows:
        key = row.mask, row.system, row.mode, row.kernel
        if key not in slowest or (row.forward_backward_ms or 0) > (slowest[key].forward_backward_ms or 0):
            slowest[key] = row
    for row in slowest.values():
        peers = [r for r in slowest.values() if r.system.startswith("ring-flash-attn") and r.mode == "zigzag"]
        peer = next((r for r in peers if r.mask == row.mask and r.failure is None), None)
        if peer is not None and row.failure is None and row.mode != "one process":
            row.speedup = peer.forward_backward_ms / row.forward_backward_ms
    return list(slowest.values())


def write(rows: list[Row], profiles: list[str], args: argparse.Namespace) -> None:
    """Print the table; write the files that `args` asks for."""
    table = compare(rows)
    about = _about(args)
    text = "\n".join([*(f"{name}: {value}  " for name, value in about.items()), "", *_markdown(table), ""])
    print(text)
    if args.output:
        output = Path(args.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_name(output.name + ".md").write_text(text)
        content = {**about, "rows": [asdict(row) for row in table], "ranks": [asdict(row) for row in rows]}
        output.with_name(output.name + ".json").write_text(json.dumps(content, indent=1) + "\n")
        if args.picture:
            from picture import draw

            draw(table, about, output.with_name(output.name + ".png"))
        if args.profile:
            output.with_name(output.name + "_profile.md").write_text("".join(profiles))


def _about(args: argparse.Namespace) -> dict[str, str]:
    heads = f"{args.heads} query and {args.kv_heads} KV heads of {args.head_size}"
    return {
        "Command": shlex.join(["python", *sys.argv]),
        "Date": date.today().isoformat(),
        "Device": device_name("cpu" if args.backend == "gloo" or not torch.cuda.is_available() else "cuda"),
        "Method": _method(args),
        "Work": f"{args.seq_length} tokens, {heads}, {args.dtype}",
        "Versions": ", ".join(f"{name} {found}" for name in PACKAGES if (found := package_version(name))),
    }


def device_name(kind: str) -> str:
    """What a "cpu" or "cuda" device calls itself."""
    if kind == "cpu":
        name = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
        return name.partition(":")[2].strip() or platform.machine()
    cudnn = torch.backends.cudnn.version()
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}"


def _method(args: argparse.Namespace) -> str:
    samples = f"medians of {args.repeats} samples, systems in turns"
    if torch.cuda.is_available() and args.backend != "gloo":
        samples += f", each {PERIOD} s (or one run) behind as much of the same system, untimed"
    if args.virtual_ranks:
        return (
            f"ranks of a world of {args.virtual_ranks} played on one device with copies as messages, all systems "
            f"alike; everything is measured but the wire; the slowest rank; {samples}"
        )
    if args.backend == "gloo":
        return (
            f"{args.processes} gloo processes of one thread against one process of {args.processes} threads on torch's "
            f"scaled_dot_product_attention; TFLOP/s are those of a thread; {samples}"
        )
    return f"NCCL, the slowest process; one call: one GPU on as many FLOPs as each process has; {samples}"


def package_version(name: str) -> str:
    """Empty where it is not installed."""
    try:
        return torch.__version__ if name == "torch" else version(name)
    except PackageNotFoundError:
        return ""


def _markdown(rows: list[Row]) -> list[str]:
    head = ["system", "mode", "kernel", "mask", "tokens/rank", "forward ms", "forward+backward ms", "TFLOP/s forward"]
    head += ["TFLOP/s forward+backward", "% of one call", "limit %", "x ring-flash-attn"]
    lines = [head, ["---"] * 4 + ["---:"] * 8]
    for row in rows:
        cells = [row.system, row.mode, row.kernel, row.mask, str(row.tokens_per_rank)]
        if row.failure is not None:
            cells += [f"does not run here: {row.failure}".replace("|", "/"), *[""] * 6]
        else:
            figures = (row.forward_ms, row.forward_backward_ms, row.tflops_forward, row.tflops_forward_backward)
            cells += [*map(_figure, figures), _figure(row.percent_forward_backward), _figure(row.limit_percent)]
            cells.append(_figure(row.speedup, ".2f"))
        lines.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _figure(value: float | None, how: str = ".1f") -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if how == ".1f" and value < 1 else f"{value:{how}}"
