"""What a mode is: a layout, and attention over the shards of that layout.

`AttentionContext` is everything a mode may know about one forward pass besides q, k and v. It is made once per model
forward and shared by all layers, in recomputation too.
"""

from dataclasses import dataclass, field

import torch

from ..blocks import Block, Documents, plan_blocks
from ..comm import Comm, ProcessGroupComm
from ..kernels import choose
from ..layout import Layout, Span
from ..mesh import SeqParallelMesh


@dataclass(frozen=True)
class AttentionContext:
    """One forward pass over one sequence (or one batch of sequences of equal length).

    Attributes:
        layout: who holds which tokens; ranks count within the sequence-parallel group.
        seq_len: padded length of the whole sequence, in tokens.
        causal: whether a token sees only itself and earlier ones.
        documents: borders of packed documents per row, or None where every row is one document.
        kernel: name of the attention kernel, or None for the fastest that can.
        sequence, ring, ulysses: the three groups.
    """

    layout: Layout
    seq_len: int
    sequence: Comm
    ring: Comm
    ulysses: Comm
    causal: bool = True
    documents: Documents | None = None
    kernel: str | None = None
    _plans: dict = field(default_factory=dict, compare=False, repr=False)

    def blocks(self, q_spans: list[Span], k_spans: list[Span]) -> list[Block]:
        """`plan_blocks` under this context's mask, computed once per forward."""
        key = (*q_spans, None, *k_spans)
        if key not in self._plans:
            self._plans[key] = plan_blocks(q_spans, k_spans, causal=self.causal, documents=self.documents)
        return self._plans[key]

    def ring_spans(self) -> list[list[Span]]:
        """What each rank of the ring holds."""
        return [self.layout.ring_spans(self.seq_len, rank) for rank in range(self.layout.ring)]

    def kernel_of(self, q, k, *, causal: bool):
        return choose(q, k, causal=causal, name=self.kernel)


def groups_of(mesh: SeqParallelMesh) -> dict[str, Comm]:
    """The three `Comm`s of this rank, as keyword arguments of `AttentionContext`."""
    return {
        "sequence": ProcessGroupComm(mesh.sp_group),
        "ring": ProcessGroupComm(mesh.ring_group),
        "ulysses": ProcessGroupComm(mesh.ulysses_group),
    }


class Mode:
    """One way to split a sequence: a subclass defines `name`, `layout` and `attention`."""

    name: str

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        """Who holds which tokens in a sequence-parallel group of `sp_size` ranks. Pure."""
        raise NotImplementedError

    def validate(self, ctx: AttentionContext, heads: int, kv_heads: int) -> None:
        """Raise ValueError, before any communication and on every rank alike, for what this mode cannot do."""

    def attention(self, q, k, v, ctx: AttentionContext, *, scale: float) -> torch.Tensor:
        """Attention of this rank's tokens over the whole sequence, differentiable.

        q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`, H a multiple of H_kv; returns `[B, S_local, H, D]`."""
        raise NotImplementedError
