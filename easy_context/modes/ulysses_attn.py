"""Ulysses: trade the split of the sequence for a split of the heads (https://arxiv.org/abs/2309.14509).

Outside attention every rank holds a contiguous piece of the sequence and all heads. One all-to-all turns that into the
whole sequence and a share of the heads, attention runs locally, a second all-to-all turns its output back. The backward
does the same with the gradients: dout there, dq, dk and dv back. Whose heads are whose, and how a message looks, is in
`deal.py`.

Sent per rank and layer, N ranks, n = B * S/N * D elements a head: two all-to-alls forward, (N-1)/N * n * (H + 2 H_kv)
* itemsize bytes and (N-1)/N * n * H * itemsize; backward the same two in reverse order. A KV head counts once for
every rank that needs it; cross-attention sends q and k, v apart. `restore` is one all-to-all of (N-1)/N * n *
(2 H + 2 H_kv) * itemsize.

What hides them: nothing where messages are short, since attention needs all tokens of a head, and its output comes
last. Large ones (`deal.CHUNK_BYTES`) are cut into c chunks of heads, c times as many all-to-alls: while a chunk is
computed, the next one arrives and the one before goes home, and 1/c of the bytes shows. Held besides: one chunk's
output, forward. Choose Ulysses where links are fast and there are no more ranks than heads; beyond that, ranks without
a head idle (`usp_attn` splits the rest by a ring).
"""

import torch

from ..comm import Comm, ProcessGroupComm
from ..layout import Layout
from .base import AttentionContext, Gradients, Residuals
from .deal import Deal, count_chunks, joined
from .ring import RingMode


class HeadsMode(RingMode):
    """A mode that trades sequence for heads within one group, and whose ring, another group, computes on these: a
    subclass says which groups. The residuals are q, k, v, out of the own heads, all tokens of the group, and their
    lse, each with a leading dimension of chunks."""

    def heads(self, ctx: AttentionContext) -> Comm:
        """The group whose ranks hold neighbouring pieces of the sequence, in their order."""
        raise NotImplementedError

    def forward(self, q, k, v, ctx: AttentionContext):
        comm = self.heads(ctx)
        if comm.size == 1:
            return super().forward(q, k, v, ctx)
        deal = Deal(comm, q.shape[2], k.shape[2], self._chunks(q, k, ctx))
        qkv, arriving = deal.to_heads(q=[q], kv=[k, v])
        outs, lses, leaving = _Stack(len(arriving)), _Stack(len(arriving)), []
        for chunk, pending in enumerate(arriving):
            pending.wait()
            own_q, *own_kv = (t[chunk] for t in qkv)
            out, residuals = super().forward(own_q, *deal.paired(*own_kv), ctx)
            lses.put(chunk, residuals.lse)
            leaving.append(deal.to_sequence(chunk, q=[outs.put(chunk, out)]))
            del out, residuals
        (local_out,) = map(joined, zip(*leaving, strict=True))
        return local_out, Residuals(*qkv, outs.whole, lses.whole, k.shape[2])

    def backward(self, dout, residuals: Residuals, ctx: AttentionContext) -> Gradients:
        comm = self.heads(ctx)
        if comm.size == 1:
            return super().backward(dout, residuals, ctx)
        *tensors, kv_heads = residuals
        deal = Deal(comm, dout.shape[2], kv_heads, len(residuals.lse))
        (douts,), arriving = deal.to_heads(q=[dout])
        leaving = []
        for chunk, pending in enumerate(arriving):
            pending.wait()
            q, k, v, out, lse = (t[chunk] for t in tensors)
            own = Residuals(q, *deal.paired(k, v), out, lse, kv_heads)
            dq, dk, dv = super().backward(douts[chunk], own, ctx)
            leaving.append(deal.to_sequence(chunk, q=[dq], kv=deal.unpaired(dk, dv)))
            del dq, dk, dv
        return tuple(map(joined, zip(*leaving, strict=True)))

    def restore(self, q, k, v, out, lse, ctx: AttentionContext) -> Residuals:
        comm = self.heads(ctx)
        if comm.size == 1:
            return super().restore(q, k, v, out, lse, ctx)
        deal = Deal(comm, q.shape[2], k.shape[2], len(lse))
        (q, out, own_k, own_v), arriving = deal.to_heads(q=[q, out], kv=[k, v])
        for pending in arriving:
            pending.wait()
        return Residuals(q, own_k, own_v, out, lse, k.shape[2])

    def _chunks(self, q: torch.Tensor, k: torch.Tensor, ctx: AttentionContext) -> int:
        """One where a ring computes, whose calls are many already and whose messages would be in flight at the same
        time; and one for cross-attention, whose q travels apart from k and v."""
        ranks = self.heads(ctx).size
        if self.ring(ctx).size > 1 or q.shape[1] != k.shape[1]:
            return 1
        return count_chunks(k.shape[2], ranks, (q.nbytes + 2 * k.nbytes) * (ranks - 1) // ranks)


class UlyssesAttention(HeadsMode):
    name = "ulysses_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ulysses=sp_size)

    def heads(self, ctx: AttentionContext) -> Comm:
        return ctx.sequence

    def ring(self, ctx: AttentionContext) -> Comm:
        return ProcessGroupComm(None)


class _Stack:
    """`count` tensors of one shape in one: a single one as a view, several by a copy each as soon as they are there."""

    def __init__(self, count: int):
        self.count = count
        self.whole: torch.Tensor | None = None

    def put(self, at: int, part: torch.Tensor) -> torch.Tensor:
        """Returns the part as it lies in the whole."""
        if self.count == 1:
            self.whole = part[None]
            return part
        if self.whole is None:
            self.whole = part.new_empty(self.count, *part.shape)
        return self.whole[at].copy_(part)


MODE = UlyssesAttention()
