"""Attention around a ring, for any layout: the engine of `zigzag_ring_attn` and of the ring in `usp_attn`.

Queries stay, keys and values travel: in step s, rank r holds those of rank r - s and computes the blocks that exist
between them and its own queries, while those of rank r - s - 1 are already on their way (Ring Attention,
https://arxiv.org/abs/2310.01889). In the backward keys and values travel once more, and the gradients of each shard
follow it around the ring in float32, every rank adding its share, until they are back home.

Bytes sent per rank and layer, with N ranks, `kv` = 2 * B * S/N * H_kv * D elements: forward (N-1) * kv * itemsize;
backward the same, plus N * kv * 4 for the gradients. What hides them: step s computes B * (S/N)^2 * H * D * 2 FLOPs
on average under a causal mask (half of that masked), growing with the square of the shard where the bytes grow
linearly.
"""

import torch

from ..blocks import Partial, add_gradients, attend, attend_backward
from ..comm import Comm, pack, pass_on, unpack
from ..layout import Span
from .base import AttentionContext
from .scheduled import rotation, scheduled_attention


def ring_attention(q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]]):
    """Differentiable attention of this rank's queries over all that the ranks of `comm` hold together.

    q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`; `spans[r]` says which tokens rank r of `comm` holds.
    Returns `[B, S_local, H, D]`. Where the mask leaves whole pairs of ranks without a block, nothing travels the ring:
    ranks fetch just the keys that they see from their owners."""
    if ctx.is_dense(spans):
        return _RingAttention.apply(q, k, v, ctx, comm, spans)
    return scheduled_attention(q, k, v, ctx, comm, spans, rotation(comm.size))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context, comm, spans):
        out, lse = ring_forward(q, k, v, context, comm, spans)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = context, comm, spans
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return *ring_backward(dout, *ctx.saved_tensors, *ctx.call), None, None, None


def ring_forward(q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]]):
    """q, k, v of this rank, `[B, S_local, H | H_kv, D]`; `spans[r]` is what rank r of `comm` holds.
    Returns `(out, lse)`, out in q's dtype, lse `[B, H, S_local]` in float32 or more."""
    partial = Partial(q)
    pair = pack(k, v) if comm.size > 1 else None
    for step in range(comm.size):
        if step + 1 < comm.size:
            arriving, pending = pass_on(comm, pair)
        blocks = ctx.blocks(spans[comm.rank], spans[(comm.rank - step) % comm.size])
        attend(q, *_held(pair, k, v), blocks, partial, ctx.scores)
        if step + 1 < comm.size:
            pending.wait()
            pair = arriving
    return partial.result()


def ring_backward(dout, q, k, v, out, lse, ctx: AttentionContext, comm: Comm, spans: list[list[Span]]):
    """Gradients `(dq, dk, dv)` of `ring_forward`, in the dtypes of q, k, v."""
    wide = lse.dtype
    dq = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
    pair = pack(k, v) if comm.size > 1 else None
    travelling = None
    for step in range(comm.size):
        if step + 1 < comm.size:
            arriving, pending = pass_on(comm, pair)
        blocks = ctx.blocks(spans[comm.rank], spans[(comm.rank - step) % comm.size])
        parts = attend_backward(dout, q, *_held(pair, k, v), out, lse, blocks, ctx.scores)
        if travelling is None:
            grads = k.new_zeros(k.numel() + v.numel(), dtype=wide)
        else:  # the other ranks' share of this shard's gradient arrives behind the shard
            grads, pending_grads = travelling
            pending_grads.wait()
        add_gradients(parts, dq, *unpack(grads, k.shape, v.shape))
        if comm.size > 1:
            travelling = pass_on(comm, grads)
        if step + 1 < comm.size:
            pending.wait()
            pair = arriving
    if travelling is not None:
        travelling[1].wait()
        grads = travelling[0]
    dk, dv = unpack(grads, k.shape, v.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _held(pair: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor):
    return (k, v) if pair is None else unpack(pair, k.shape, v.shape)
