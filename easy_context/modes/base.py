"""What a mode is: a layout, and attention over the shards of that layout.

A mode states its forward and its backward as plain functions of tensors, and what must be held between them as
`Residuals`. `Mode.attention` makes one autograd function out of the two. Who wants to keep less calls them directly:
of the residuals only `out` (local) and `lse` have cost an attention to compute, `Mode.restore` gets the others back.

`AttentionContext` is everything a mode may know about one attention call besides q, k and v. It is made once per model
forward, in which all layers share its plans, and serves recomputation too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..blocks import Block, Documents, Scores, plan_blocks
from ..comm import Comm, ProcessGroupComm
from ..layout import Layout, Span
from ..mesh import SeqParallelMesh
from ..refusals import once_differentiable


@dataclass(frozen=True)
class AttentionContext:
    """One layer's attention over one sequence (or one batch of sequences of equal length).

    Attributes:
        layout: who holds which tokens; ranks count within the sequence-parallel group.
        seq_len: padded length of the whole sequence, in tokens.
        sequence, ring, ulysses: the three groups.
        causal: whether a token sees only itself and earlier ones.
        documents: borders of packed documents per row, or None where every row is one document.
        window: sliding window w, q - k < w, or None.
        scale, softcap: scores are `scale * q.k`, then `softcap * tanh(score / softcap)` if there is a soft cap.
        kernel: name of the attention kernel, or None for the fastest that can.
    """

    layout: Layout
    seq_len: int
    sequence: Comm
    ring: Comm
    ulysses: Comm
    causal: bool = True
    documents: Documents | None = None
    window: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    kernel: str | None = None
    _plans: dict = field(default_factory=dict, compare=False, repr=False)  # shared by the layers of a forward

    def for_layer(self, **changes) -> "AttentionContext":
        """The same sequence for a layer of its own scale, soft cap or window; plans stay shared."""
        return replace(self, **changes)

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.softcap, self.kernel)

    def ring_spans(self) -> list[list[Span]]:
        """What each rank of the ring holds."""
        return [self.layout.ring_spans(self.seq_len, rank) for rank in range(self.layout.ring)]

    @property
    def cuts_blocks(self) -> bool:
        """Whether documents or a window leave less than a causal mask, or than all."""
        return self.documents is not None or self._window is not None

    def blocks(self, q_spans: list[Span], k_spans: list[Span]) -> list[Block]:
        """`plan_blocks` under this context's masks, computed once per forward."""
        masks = {"causal": self.causal, "window": self._window, "documents": self.documents}
        return self.once((*q_spans, None, *k_spans), lambda: plan_blocks(q_spans, k_spans, **masks))

    def is_dense(self, spans: list[list[Span]]) -> bool:
        """Whether every rank's queries see some keys of every rank."""
        return self.once(("dense",), lambda: all(self.blocks(mine, theirs) for mine in spans for theirs in spans))

    def once(self, what: tuple, find: Callable):
        """`find()`, which depends on `what` and on the masks, computed once per forward."""
        key = (self.causal, self._window, *what)
        if key not in self._plans:
            self._plans[key] = find()
        return self._plans[key]

    @property
    def _window(self) -> int | None:
        return None if self.window is None or self.window >= self.seq_len else self.window


def groups_of(mesh: SeqParallelMesh) -> dict[str, Comm]:
    """The three `Comm`s of this rank, as keyword arguments of `AttentionContext`."""
    return {
        "sequence": ProcessGroupComm(mesh.sp_group),
        "ring": ProcessGroupComm(mesh.ring_group),
        "ulysses": ProcessGroupComm(mesh.ulysses_group),
    }


class Residuals(NamedTuple):
    """What a mode's backward needs, in the arrangement in which the mode computes (its own choice of tokens and heads).

    q, out `[B, S, H, D]`, k and v `[B, S, H_kv, D]`, lse `[B, H, S]` in float32 or more; `kv_heads` counts the heads
    of the local shards k and v, of which a mode that trades sequence for heads holds a part here."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    kv_heads: int


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Mode:
    """One way to split a sequence: a subclass defines `name`, `layout`, and `forward` with `backward` (and `restore`,
    where its residuals are not the local shards), or, if it needs no more than autograd, `attention` alone.

    Shapes: q, out, dout, dq `[B, S_local, H, D]`; k, v, dk, dv `[B, S_local, H_kv, D]`, H a multiple of H_kv."""

    name: str

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        """Who holds which tokens in a sequence-parallel group of `sp_size` ranks. Pure."""
        raise NotImplementedError

    def validate(self, ctx: AttentionContext, heads: int, kv_heads: int) -> None:
        """Raise ValueError, before any communication and on every rank alike, for what this mode cannot do."""

    def forward(self, q, k, v, ctx: AttentionContext) -> tuple[torch.Tensor, Residuals]:
        """Attention of this rank's tokens over the whole sequence, in q's dtype, and what its backward needs. Called
        without autograd."""
        raise NotImplementedError

    def backward(self, dout, residuals: Residuals, ctx: AttentionContext) -> Gradients:
        """`(dq, dk, dv)` of the local shards, in the dtypes of q, k, v. Called without autograd."""
        raise NotImplementedError

    def restore(self, q, k, v, out, lse, ctx: AttentionContext) -> Residuals:
        """The residuals of a forward that returned `out`, from the local shards and its `residuals.lse`, without
        computing attention. Every rank of the group calls it."""
        return Residuals(q, k, v, out, lse, k.shape[2])

    def attention(self, q, k, v, ctx: AttentionContext) -> torch.Tensor:
        """Attention of this rank's tokens over the whole sequence, differentiable once."""
        return _Attention.apply(q, k, v, self, ctx)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mode: Mode, context: AttentionContext):
        out, residuals = mode.forward(q, k, v, context)
        *tensors, kv_heads = residuals
        ctx.save_for_backward(*tensors)
        ctx.call = mode, context, kv_heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        mode, context, kv_heads = ctx.call
        with torch.autocast(dout.device.type, enabled=False):
            return *mode.backward(dout, Residuals(*ctx.saved_tensors, kv_heads), context), None, None
