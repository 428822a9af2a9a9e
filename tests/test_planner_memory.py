"""What the planner counts for attention and its exchange, against the tensors that a rank of a virtual world holds."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from easy_context import blocks
from easy_context.comm import ProcessGroupComm
from easy_context.kernels.base import Kernel
from easy_context.memory.plan import MemoryPlan
from easy_context.modes import AttentionContext, get_mode, tasks
from easy_context.planner import HARDWARE, ModelShape, memory
from easy_context.planner.setting import Setting

TOKENS, HEAD_SIZE = 256, 128  # of a rank
LONG, SHORT = 0, 2**27  # JOINED_BYTES

DIST = [("dist_flash_attn", world, LONG) for world in (2, 3, 4, 5, 8)]


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize(
    "mode, world, joined_bytes",
    [("zigzag_ring_attn", 2, LONG), ("zigzag_ring_attn", 4, LONG), ("zigzag_ring_attn", 8, SHORT), *DIST],
)
def test_what_attention_holds_at_the_most(mode, world, joined_bytes, heads, kv_heads, monkeypatch):
    """Counted is what it takes, and not much more than the rank that takes most."""
    monkeypatch.setattr(tasks, "JOINED_BYTES", joined_bytes)
    monkeypatch.setattr(Kernel, "forward", forward)
    monkeypatch.setattr(Kernel, "backward", backward)
    monkeypatch.setattr(blocks, "merge", lambda *tensors: None)  # one pass on a GPU, several with copies in torch
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    group = importlib.import_module("virtual_group")
    monkeypatch.setattr(group.VirtualGroup, "_arrive", lambda self, tensors: group._Copy(tensors))
    of_ranks = [held(group, rank, world, mode, heads, kv_heads) for rank in range(world)]
    plan = MemoryPlan.uniform(1, "attention", "gpu")
    shape = replace(ModelShape.of("llama-3.1-8b"), heads=heads, kv_heads=kv_heads, head_size=HEAD_SIZE)
    split = {"gpus": world, "mode": mode, "sp_size": world, "ring": world}
    setting = Setting(shape, HARDWARE["H200"], TOKENS * world, plan, **split)
    items = {phase.part: phase.items for phase in memory.phases(setting)}
    given = 2 * TOKENS * (heads + 2 * kv_heads) * HEAD_SIZE  # q, k, v
    for most, part in zip(map(max, *of_ranks), ("forward attention", "backward attention"), strict=True):
        counted = items[part]["attention"] + items[part]["exchange"] - given
        assert most <= 1.05 * counted
    assert counted <= 1.75 * most


def held(group, rank: int, world: int, mode_name: str, heads: int, kv_heads: int) -> list[int]:
    """Bytes that forward and backward of one rank hold at the most, besides what they are given."""
    group.become(rank, world)
    try:
        mode, comm = get_mode(mode_name), ProcessGroupComm(dist.group.WORLD)
        ctx = AttentionContext(mode.layout(world), TOKENS * world, comm, comm, ProcessGroupComm(None))
        q, k, v, dout = (torch.zeros(1, TOKENS, h, HEAD_SIZE).bfloat16() for h in (heads, kv_heads, kv_heads, heads))
        with Peak(q, k, v) as of_forward:
            _, residuals = mode.forward(q, k, v, ctx)
        with Peak(dout, *residuals[:5]) as of_backward:
            mode.backward(dout, residuals, ctx)
        return [of_forward.peak, of_backward.peak]
    finally:
        dist.destroy_process_group()


class Peak(MemTracker):
    """The most bytes alive within, besides those of the tensors `given`."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self.given = given
        self.track_external(*given)

    @property
    def peak(self) -> int:
        total = self.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        return total - sum(tensor.nbytes for tensor in self.given)


def forward(self, q, k, v, **how):
    return torch.empty_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def backward(self, dout, q, k, v, out, lse, **how):
    """As a kernel on a GPU: dq is summed in float32, dk and dv, too, where heads share them."""
    shared = [k, v] if k.shape[2] < q.shape[2] else []
    _sums = [torch.empty_like(t, dtype=torch.float32) for t in (q, *shared)]
    return tuple(map(torch.empty_like, (q, k, v)))
