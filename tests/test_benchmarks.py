"""The benchmark runs, counts what it says it counts, and the table of kernels prints."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import error, spawn

from easy_context.attention import sequence_parallel_attention
from easy_context.layout import Layout
from easy_context.mesh import init_seq_parallel, reset_mesh
from easy_context.modes import tasks
from easy_context.planner.exchange import Shard, parts

ROOT = Path(__file__).parent.parent
SIZES = ["--seq-length", "512", "--heads", "4", "--kv-heads", "2", "--head-size", "16", "--dtype", "fp32"]
COLUMNS = ["system", "mode", "kernel", "mask", "tokens/rank", "forward ms", "forward+backward ms"]
COLUMNS += ["TFLOP/s forward", "TFLOP/s forward+backward", "% of one call", "limit %", "x ring-flash-attn"]
MODES = ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"]


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports a module of benchmarks/ as its scripts do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "how, masks",
    [
        (["--backend", "gloo", "--processes", "2"], ["causal"]),
        (["--virtual-ranks", "4", "--link", "1"], ["causal", "documents", "window"]),
    ],
)
def test_table_and_json(tmp_path, how, masks):
    output = tmp_path / "made" / "table"
    report = ["--peers", "--repeats", "1", "--picture", "--profile", "--output", str(output)]
    profile = tmp_path / "made" / "table_profile.md"
    if "--link" in how:
        profile.parent.mkdir()
        profile.write_text("of an earlier run")
    run("benchmarks/attention.py", *how, *SIZES, "--masks", *masks, *report)
    lines = output.with_suffix(".md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("|"))
    assert [cell.strip() for cell in head.strip("|").split("|")] == COLUMNS
    content = json.loads(output.with_suffix(".json").read_text())
    assert {"Command", "Date", "Device", "Method", "Work", "Versions"} < set(content)
    for mask in masks:
        rows = {row["mode"]: row for row in content["rows"] if row["mask"] == mask}
        assert set(rows) == {"one process", *MODES}
        for row in rows.values():
            assert row["failure"] is None
            assert 0 < row["forward_ms"] < row["forward_backward_ms"]
            assert row["percent_forward_backward"] > 0
    if "--link" in how:
        assert all(
            0 < row["limit_percent"] <= 100
            for row in content["rows"]
            if row["mode"] in MODES and row["mask"] == "causal"
        )
    assert output.with_suffix(".png").stat().st_size > 1000
    text = profile.read_text()
    assert "earlier run" not in text and all(f"# {mask}, rank 0" in text for mask in masks)
    assert all(f"easy_context, {mode}, cpu_flash" in text for mode in MODES)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in text


def test_who_computes_has_to_be_said(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention.py"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        benchmarks("attention").main()
    assert "torchrun, or give --backend gloo or --virtual-ranks" in capsys.readouterr().err.splitlines()[-1]


def test_timeline_of_a_gpu(benchmarks):
    """Milliseconds 0-4 and 6-9 attention, 9-10 merge; a message from 3 to 7, of which 2 ms lie beside attention. Before
    that, what does not count: a run that warms up, the host's head start and the common start."""
    names = [("flash_fwd", 7, 0, 4), ("flash_bwd", 7, 6, 9), ("_merge", 7, 9, 10), ("ncclDevKernel_SendRecv", 20, 3, 7)]
    names += [("flash_fwd", 7, -9, -7), ("spin_kernel(long)", 7, -6, -3), ("ncclDevKernel_AllReduce_Sum", 20, -3, 0)]
    events = [
        {"cat": "kernel", "name": n, "ts": 1e4 + 1e3 * a, "dur": 1e3 * (b - a), "args": {"stream": s}}
        for n, s, a, b in names
    ]
    timeline = benchmarks("timeline")
    spans = timeline.spans_of([*events, {"cat": "cpu_op", "name": "aten::add"}, {"ph": "M"}])
    line = timeline.shares(timeline.last_run(spans))
    assert line == (
        "10.00 ms: attention 7.00 ms (70.0%), merge 1.00 ms (10.0%), other 0.00 ms (0.0%), idle 2.00 ms (20.0%); "
        "exchange 4.00 ms, 50% hidden"
    )
    virtual = [span for span in spans if "AllReduce" not in span.name]
    assert timeline.last_run(virtual) == timeline.last_run(spans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joined_bytes", [0, 2**18, 2**27])
@pytest.mark.parametrize(
    "world, ring, rank", [(2, 2, 0), (2, 2, 1), (4, 2, 0), (8, 2, 0), (5, 5, 0), (8, 4, 0), (8, 8, 3), (8, 4, 7)]
)
def test_bytes_are_those_that_the_modes_send(benchmarks, monkeypatch, world, ring, rank, joined_bytes, dtype):
    """The bytes behind the limit, against what a virtual world counts."""
    monkeypatch.setattr(tasks, "JOINED_BYTES", joined_bytes)
    group, shard = benchmarks("virtual_group"), Shard(80, 16, 8, 16, dtype.itemsize)
    heads, inner = sum(shard.of_heads(world)), sum(shard.of_heads(world // ring))

    def of_schedule(mode: str, size: int, at: int, held: Shard) -> list[float]:
        steps = [step[at] for step in parts(mode, size, held.most)]
        return [sum(sum(held.sent(part, backward)) for part in steps) for backward in (False, True)]

    def of_ring(mode: str, size: int, at: int, held: Shard) -> list[float]:
        if size == 2 or held.most > 1:
            return of_schedule(mode, size, at, held)
        sums = held.pair * held.wide / held.itemsize  # which go home in the gradients' own dtype
        return [(size - 1) * held.pair, (size - 1) * (held.pair + sums) + held.pair]

    expected = {
        "zigzag_ring_attn": of_ring("zigzag_ring_attn", world, rank, shard),
        "dist_flash_attn": of_schedule("dist_flash_attn", world, rank, shard),
        "ulysses_attn": [heads, heads],
        "usp_attn": [
            inner + n for n in of_ring("usp_attn", ring, rank // (world // ring), shard.in_ring(world // ring))
        ],
    }
    try:
        group.become(rank, world)
        init_seq_parallel(world, ring)
        leaves = [torch.randn(1, 80, heads, 16, dtype=dtype, requires_grad=True) for heads in (16, 8, 8)]
        for mode in MODES:
            if world == 5 and mode == "ulysses_attn":
                continue  # 16 heads on 5 ranks: the first rank's share is not everybody's
            group.VirtualGroup.bytes_sent = 0
            out = sequence_parallel_attention(*leaves, seq_algo=mode)
            forward = group.VirtualGroup.bytes_sent
            out.backward(torch.ones_like(out))
            backward = group.VirtualGroup.bytes_sent - forward
            assert [forward, backward] == expected[mode], mode
    finally:
        dist.destroy_process_group()
        reset_mesh()


def test_flops_are_those_of_the_mask(benchmarks):
    work = [
        benchmarks("workload").Workload(4096, 4, 2, 16, torch.float32, mask)
        for mask in ("causal", "documents", "window")
    ]
    positions = torch.arange(4096)
    causal = positions[:, None] >= positions[None, :]
    document = torch.bucketize(positions, torch.tensor(work[1].documents[1:]), right=True)
    allowed = [
        causal,
        causal & (document[:, None] == document[None, :]),
        causal & (positions[:, None] - positions[None, :] < work[2].window),
    ]
    for w, pairs in zip(work, allowed, strict=True):
        assert w.flops == pytest.approx(4 * 16 * 4 * pairs.sum().item(), rel=5e-3)


@pytest.mark.parametrize("package", ["ring_flash_attn", "yunchang"])
def test_peers_compute_attention(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert all(worst < 0.02 for worst in spawn(errors_of_peers, 2, package.replace("_", "-")))


def errors_of_peers(rank: int, world: int, name: str) -> float:
    """The largest error of the outputs and gradients of a package's modes on this rank, in bf16."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from peers import peers
    from workload import Workload

    generator = torch.Generator().manual_seed(0)
    low = [torch.randn(1, 64, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]
    leaves = [t.float().requires_grad_() for t in low[:3]]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    truth.backward(low[3].float())
    worst = 0.0
    for system in peers(Workload(64, 4, 2, 8, torch.bfloat16), world, rank, world, torch.device("cpu"), [name]):
        own = Layout(ring=world, zigzag=system.mode in ("zigzag", "USP")).indices(64, rank)
        shards = [t[:, own].clone().requires_grad_() for t in low[:3]]
        out = system.attend(*shards)
        out.backward(low[3][:, own])
        pairs = [(out, truth), *((shard.grad, leaf.grad) for shard, leaf in zip(shards, leaves, strict=True))]
        worst = max(worst, *(error(got.detach().float(), true[:, own].detach()) for got, true in pairs))
    return worst


def test_kernels_print_their_table():
    table = run("-m", "easy_context.kernels", "--seq-length", "64").splitlines()
    head, _, *rows = [line for line in table if " | " in line]
    assert [name.strip() for name in head.split("|")[:7]] == [
        *("kernel", "here", "forward", "forward+backward", "error out", "error grads", "exact")
    ]
    found = {row.split("|")[0].strip(): [cell.strip() for cell in row.split("|")] for row in rows}
    assert found["cpu_flash"][1] == found["cpu_flash"][6] == "yes"
    assert "NVIDIA" in found["cudnn"][1]
