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


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("mode, world, ring, joined_bytes", [*ZIGZAG, *DIST, *ULYSSES, *USP])
def test_what_attention_holds_at_the_most(mode, world, ring, joined_bytes, heads, kv_heads, monkeypatch):
    """Counted is what it takes, and not much more than the rank that takes most."""
    monkeypatch.setattr(tasks, "JOINED_BYTES", joined_bytes)
    monkeypatch.setattr(Kernel, "forward", forward)
    monkeypatch.setattr(Kernel, "backward", backward)
    monkeypatch.setattr(blocks, "merge", lambda *tensors: None)  # one pass on a GPU, several with copies in torch
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    group = importlib.import_module("virtual_group")
    monkeypatch.setattr(group.VirtualGroup, "_arrive", lambda self, tensors: group._Copy(tensors))
    of_ranks = [held(group, rank, world, ring, mode, heads, kv_heads) for rank in range(world)]
    plan = MemoryPlan.uniform(1, "attention", "gpu")
    shape = replace(ModelShape.of("llama-3.1-8b"), heads=heads, kv_heads=kv_heads, head_size=HEAD_SIZE)
    split = {"gpus": world, "mode": mode, "sp_size": world, "ring": ring}
    setting = Setting(shape, HARDWARE["H200"], TOKENS * world, plan, **split)
    items = {phase.part: phase.items for phase in memory.phases(setting)}
    for most, part in zip(map(max, *of_ranks), ("forward attention", "backward attention"), strict=True):
        counted = items[part]["attention"] + items[part]["exchange"]
        assert most <= 1.05 * counted
    assert counted <= 1.75 * most


def held(group, rank: int, world: int, ring: int, mode_name: str, heads: int, kv_heads: int) -> list[int]:
    """Bytes that forward and backward of one rank hold at the most, besides a layer's hidden states: the output, its
    log-sum-exp and its gradient."""
    group.become(rank, world)
    try:
        mode, groups = get_mode(mode_name), groups_of(init_seq_parallel(world, ring))
        ctx = AttentionContext(mode.layout(world, ring), TOKENS * world, **groups)
        q, k, v, dout = (torch.zeros(1, TOKENS, h, HEAD_SIZE).bfloat16() for h in (heads, kv_heads, kv_heads, heads))
        with Peak(q, k, v) as of_forward:
            out, residuals = mode.forward(q, k, v, ctx)
        hidden = dout.nbytes + residuals.lse.nbytes + (residuals.out is out) * out.nbytes
        del out
        with Peak(dout, *residuals[:5]) as of_backward:
            mode.backward(dout, residuals, ctx)
        return [of_forward.peak, of_backward.peak - hidden]
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
