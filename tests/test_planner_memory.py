"""What the planner counts for attention and its exchange, against the tensors that a rank of a virtual world holds."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from easy_context import blocks
from easy_context.kernels.base import Kernel
from easy_context.memory.plan import MemoryPlan
from easy_context.mesh import init_seq_parallel, reset_mesh
from easy_context.modes import AttentionContext, get_mode, tasks
from easy_context.modes.base import groups_of
from easy_context.planner import HARDWARE, ModelShape, memory
from easy_context.planner.setting import Setting

TOKENS, HEAD_SIZE = 256, 128  # of a rank
LONG, SHORT = 0, 2**27  # JOINED_BYTES

ZIGZAG = [("zigzag_ring_attn", world, world, joined) for world, joined in ((2, LONG), (4, LONG), (8, SHORT))]
DIST = [("dist_flash_attn", world, world, LONG) for world in (2, 3, 4, 5, 8)]
ULYSSES = [("ulysses_attn", world, 1, LONG) for world in (2, 3, 4, 8)]
USP = [("usp_attn", world, ring, joined) for world, ring in ((4, 2), (8, 4)) for joined in (LONG, SHORT)]
COPIES = [("ulysses_attn", 3, 1, LONG), ("ulysses_attn", 5, 1, LONG)]  # of KV heads, to pair them
COPIES += [("usp_attn", 6, 2, LONG), ("usp_attn", 12, 4, LONG), ("usp_attn", 12, 4, SHORT)]
CASES = [(*case, *heads) for case in (*ZIGZAG, *DIST, *ULYSSES, *USP) for heads in ((8, 8), (8, 2), (8, 1))]
CASES += [(*case, *heads) for case in COPIES for heads in ((28, 4), (40, 8))]
CASES = [(1, *case) for case in CASES] + [(2, *ULYSSES[0], *heads) for heads in ((8, 8), (8, 2))]


@pytest.mark.parametrize("batch, mode, world, ring, joined_bytes, heads, kv_heads", CASES)
def test_what_attention_holds_at_the_most(batch, mode, world, ring, joined_bytes, heads, kv_heads, monkeypatch):
    """Counted is what it takes, and not much more than the rank that takes most."""
    monkeypatch.setattr(tasks, "JOINED_BYTES", joined_bytes)
    monkeypatch.setattr(Kernel, "forward", forward)
    monkeypatch.setattr(Kernel, "backward", backward)
    monkeypatch.setattr(blocks, "merge", lambda *tensors: None)  # one pass on a GPU, several with copies in torch
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    group = importlib.import_module("virtual_group")
    monkeypatch.setattr(group.VirtualGroup, "_arrive", lambda self, tensors: group._Copy(tensors))
    of_ranks = [held(group, rank, world, ring, mode, batch, heads, kv_heads) for rank in range(world)]
    for most, counted in zip(map(max, *of_ranks), planned(mode, world, ring, heads, kv_heads), strict=True):
        assert most <= 1.05 * counted
    assert counted <= 1.75 * most


@pytest.mark.parametrize("mode, ring, copies", [("zigzag_ring_attn", 2, 2), ("ulysses_attn", 1, 0)])
def test_head_groups_are_held_one_at_a_time(mode, ring, copies):
    """As a layer with so many heads; a ring copies a group's part of the output and its gradient."""
    of_a_group = planned(mode, 2, ring, 8, 2)
    q = 2 * TOKENS * 8 * HEAD_SIZE
    assert planned(mode, 2, ring, 32, 8, head_groups=4) == [of_a_group[0], of_a_group[1] + copies * q]


def planned(mode: str, world: int, ring: int, heads: int, kv_heads: int, **how) -> list[float]:
    """Bytes that the planner counts for attention and exchange, forward and backward."""
    shape = replace(ModelShape.of("llama-3.1-8b"), heads=heads, kv_heads=kv_heads, head_size=HEAD_SIZE)
    split = {"gpus": world, "mode": mode, "sp_size": world, "ring": ring}
    plan = MemoryPlan.uniform(1, "attention", "gpu", **how)
    setting = Setting(shape, HARDWARE["H200"], TOKENS * world, plan, **split)
    items = {phase.part: phase.items for phase in memory.phases(setting)}
    return [items[way]["attention"] + items[way]["exchange"] for way in ("forward attention", "backward attention")]


def held(group, rank: int, world: int, ring: int, mode_name: str, batch: int, heads: int, kv_heads: int) -> list[int]:
    """Bytes that forward and backward of one rank hold at the most, besides a layer's hidden states: the output, its
    log-sum-exp and its gradient."""
    group.become(rank, world)
    try:
        mode, groups = get_mode(mode_name), groups_of(init_seq_parallel(world, ring))
        length = TOKENS // batch
        ctx = AttentionContext(mode.layout(world, ring), length * world, **groups)
        counts = heads, kv_heads, kv_heads, heads
        q, k, v, dout = (torch.zeros(batch, length, h, HEAD_SIZE, dtype=torch.bfloat16) for h in counts)
        with Peak(q, k, v) as of_forward:
            out, residuals = mode.forward(q, k, v, ctx)
        lse = residuals.lse
        del residuals
        with Peak(q, k, v, out, lse, dout) as of_backward:
            residuals = mode.restore(q, k, v, out, lse, ctx)
            del q, k, v
            mode.backward(dout, residuals, ctx)
        return [of_forward.peak, of_backward.peak - out.nbytes - lse.nbytes - dout.nbytes]
    finally:
        dist.destroy_process_group()
        reset_mesh()


class Peak(MemTracker):
    """The most bytes alive within, those of the tensors `given` included."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self.track_external(*given)

    @property
    def peak(self) -> int:
        return self.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def forward(self, q, k, v, **how):
    return torch.empty_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def backward(self, dout, q, k, v, out, lse, **how):
    """As a kernel on a GPU: dq is summed in float32, dk and dv, too, where heads share them."""
    shared = [k, v] if k.shape[2] < q.shape[2] else []
    _sums = [torch.empty_like(t, dtype=torch.float32) for t in (q, *shared)]
    return tuple(map(torch.empty_like, (q, k, v)))
