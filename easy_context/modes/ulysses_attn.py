"""Ulysses: trade the split of the sequence for a split of the heads (https://arxiv.org/abs/2309.14509).

Outside attention every rank holds a contiguous piece of the sequence and all heads. One all-to-all turns that into the
whole sequence and a share of the heads, attention runs locally, a second all-to-all turns its output back. The backward
does the same with the gradients: dout there, dq, dk and dv back. Whose heads are whose, and how a message looks, is in
`deal.py`.

Sent per rank and layer, N ranks, n = B * S/N * D elements a head: two all-to-alls forward, (N-1)/N * n * (H + 2 H_kv)
* itemsize bytes and (N-1)/N * n * H * itemsize; backward the same two in reverse order. A KV head counts once for
every rank that needs it; cross-attention sends q and k, v apart. `restore` is one all-to-all of (N-1)/N * n *
(2 H + 2 H_kv) * itemsize.

What hides them: nothing, since attention needs all tokens of a head, and its output comes last. It matters little where
sequences are long: compute grows with the square of the length, bytes grow linearly. Two H200 exchange for 2% of the
time at 32K tokens a GPU, for 0.5% at 128K; hiding that behind the attention of other heads cost 4% at 128K and gained
nothing certain at 32K (`benchmarks/results/h200x2_nccl_chunks.md`). Choose Ulysses where links are fast and there are
no more ranks than heads; beyond that, ranks without a head idle (`usp_attn` splits the rest by a ring).
"""

from ..comm import Comm, ProcessGroupComm
from ..layout import Layout
from .base import AttentionContext, Gradients, Residuals
from .deal import Deal, joined
from .ring import RingMode


class HeadsMode(RingMode):
    """A mode that trades sequence for heads within one group, and whose ring, another group, computes on these: a
    subclass says which groups. The residuals are q, k, v, out and lse of the own heads, all tokens of the group."""

    def heads(self, ctx: AttentionContext) -> Comm:
        """The group whose ranks hold neighbouring pieces of the sequence, in their order."""
        raise NotImplementedError

    def forward(self, q, k, v, ctx: AttentionContext):
        comm = self.heads(ctx)
        if comm.size == 1:
            return super().forward(q, k, v, ctx)
        deal = Deal(comm, q.shape[2], k.shape[2])
        own_q, *own_kv = deal.to_heads(q=[q], kv=[k, v])
        out, residuals = super().forward(own_q, *deal.paired(*own_kv), ctx)
        residuals = Residuals(own_q, *own_kv, out, residuals.lse, k.shape[2])
        (pieces,) = deal.to_sequence(q=[out])
        return joined(pieces), residuals

    def backward(self, dout, residuals: Residuals, ctx: AttentionContext) -> Gradients:
        comm = self.heads(ctx)
        if comm.size == 1:
            return super().backward(dout, residuals, ctx)
        q, k, v, out, lse, kv_heads = residuals
        deal = Deal(comm, dout.shape[2], kv_heads)
        (own_dout,) = deal.to_heads(q=[dout])
        dq, dk, dv = super().backward(own_dout, Residuals(q, *deal.paired(k, v), out, lse, kv_heads), ctx)
        dk, dv = deal.unpaired(dk, dv)
        pieces = deal.to_sequence(q=[dq], kv=[dk, dv])
        del dq, dk, dv
        return tuple(map(joined, pieces))

    def restore(self, q, k, v, out, lse, ctx: AttentionContext) -> Residuals:
        comm = self.heads(ctx)
        if comm.size == 1:
            return super().restore(q, k, v, out, lse, ctx)
        deal = Deal(comm, q.shape[2], k.shape[2])
        own_q, own_out, own_k, own_v = deal.to_heads(q=[q, out], kv=[k, v])
        return Residuals(own_q, own_k, own_v, own_out, lse, k.shape[2])


class UlyssesAttention(HeadsMode):
    name = "ulysses_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ulysses=sp_size)

    def heads(self, ctx: AttentionContext) -> Comm:
        return ctx.sequence

    def ring(self, ctx: AttentionContext) -> Comm:
        return ProcessGroupComm(None)


MODE = UlyssesAttention()
