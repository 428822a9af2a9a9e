"""Where the time of one forward and backward goes, from torch.profiler: for a system that misses its goal.

On CUDA every kernel and copy has a place: attention (on the compute stream), merges of partial results, other work on
that stream, and exchange (NCCL, or the copies that stand in for it, on streams of their own). `hidden` is the part of
the exchange during which the compute stream works, `idle` what the compute stream waits. Where several GPUs take part,
it is a run that all began together, once the system had run. On CPU, operators by the time spent in themselves.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from measure import Inputs, start_together
from systems import System
from torch.profiler import ProfilerActivity, profile

ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
BEFORE = ("spin_kernel", "AllReduce")  # the kernels of `start_together`
TOP = 12


class Span(NamedTuple):
    """Something that ran on a stream of the GPU, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


def timelines(systems: list[System], inputs: Inputs, device: torch.device, rank: int) -> str:
    """A section of markdown for each system that runs on this rank. Every rank takes part."""
    sections = []
    for system in systems:
        if system.failure is None and (system.threads is None or rank == 0):
            text = timeline(system, *inputs.of(system), device)
            sections.append(f"## {system.name}, {system.mode}, {system.kernel}\n\n{text}\n")
    return "\n".join(sections)


def timeline(system: System, leaves: list[torch.Tensor], dout: torch.Tensor, device: torch.device) -> str:
    """Markdown for one forward and backward of a system that has run before."""
    cuda = device.type == "cuda"
    together = cuda and dist.get_backend() == "nccl"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler, system.around():
        if cuda:
            system.attend(*leaves).backward(dout)
        start_together(device, together)
        for leaf in leaves:
            leaf.grad = None
        system.attend(*leaves).backward(dout)
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        operators = sorted(profiler.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
        return _top([(e.key, e.count, e.self_cpu_time_total) for e in operators])
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        spans = last_run(spans_of(json.loads(trace.read_text())["traceEvents"]))
    return f"{shares(spans)}\n\n{_top(_by_name(spans))}" if spans else "The profiler saw nothing on the GPU."


def spans_of(events: list[dict]) -> list[Span]:
    """The spans of a chrome trace."""
    found = [event for event in events if event.get("cat") in ON_GPU]
    return [Span(e["name"], e["args"]["stream"], e["ts"], e["ts"] + e["dur"]) for e in found]


def last_run(spans: list[Span]) -> list[Span]:
    """Those behind the common start."""
    marks = [min((span.end for span in spans if word in span.name), default=0) for word in BEFORE]
    return [span for span in spans if span.start >= max(marks)]


def kind(span: Span, compute: int) -> str:
    name = span.name.lower()
    if span.stream != compute or "nccl" in name:
        return "exchange"
    if any(word in name for word in ("flash", "fmha", "sdpa", "mha_")):
        return "attention"
    return "merge" if "_merge" in name else "other"


def shares(spans: list[Span]) -> str:
    """One line: how long it took, and who had how much of it."""
    by_stream = defaultdict(float)
    for span in spans:
        by_stream[span.stream] += (span.end - span.start) * (kind(span, span.stream) == "attention")
    compute = max(by_stream, key=by_stream.get)
    of_kind = defaultdict(list)
    for span in spans:
        of_kind[kind(span, compute)].append((span.start, span.end))
    busy = _union([pair for name in ("attention", "merge", "other") for pair in of_kind[name]])
    exchange = _union(of_kind["exchange"])
    total = max(span.end for span in spans) - min(span.start for span in spans)
    parts = {name: _length(_union(of_kind[name])) for name in ("attention", "merge", "other")}
    parts["idle"] = total - _length(busy)
    text = ", ".join(f"{name} {part / 1e3:.2f} ms ({100 * part / total:.1f}%)" for name, part in parts.items())
    moved, both = _length(exchange), _length(exchange) + _length(busy) - _length(_union(exchange + busy))
    hidden = f", {100 * both / moved:.0f}% hidden" if moved else ""
    return f"{total / 1e3:.2f} ms: {text}; exchange {moved / 1e3:.2f} ms{hidden}"


def _union(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(pairs):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(pairs: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in pairs)


def _by_name(spans: list[Span]) -> list[tuple[str, int, float]]:
    rows = defaultdict(list)
    for span in spans:
        rows[span.name].append(span.end - span.start)
    return sorted(((name, len(times), sum(times)) for name, times in rows.items()), key=lambda row: -row[2])


def _top(rows: list[tuple[str, int, float]]) -> str:
    """The longest of `(name, calls, microseconds)`."""
    total = sum(time for _, _, time in rows)
    lines = ["| what | calls | ms | % |", "| --- | ---: | ---: | ---: |"]
    for name, calls, time in rows[:TOP]:
        lines.append(f"| {name[:100].replace('|', '/')} | {calls} | {time / 1e3:.2f} | {100 * time / total:.1f} |")
    return "\n".join(lines)
