"""Attention around a ring, for any layout: the engine of `zigzag_ring_attn` and of the ring in `usp_attn`.

Long shards go around the ring. Queries stay, keys and values travel: in step s, rank r holds those of rank r - s and
computes the blocks that exist between them and its own queries, while those of rank r - s - 1 are already on their way
(Ring Attention, https://arxiv.org/abs/2310.01889). In the backward keys and values travel once more, and the gradients
of each shard follow it around the ring in float32, every rank adding its share, until they are back home.

Sent per rank and layer, N ranks, `kv` = 2 * B * S/N * H_kv * D elements, k and v in one message: forward N-1 messages
of kv * itemsize bytes; backward the same, plus N-1 messages of kv * 4 bytes and one of kv * itemsize for gradients.
What hides them: a step's compute, 4 * B * (S/N)^2 * H * D FLOPs (half of that under a causal mask), 2.5 times as many
in the backward; it grows with the square of the shard, the bytes grow linearly. Only the gradients' last message has
nothing left to hide behind. Held besides the shards: two kv that alternate, in the backward two in float32 besides.

Short shards (`tasks.JOINED_BYTES`), those of two ranks, and those of masks that leave pairs of ranks without a block,
are fetched: a rank gets just the keys that it sees straight from their owners, of several steps at a time where they
are short, and sends each owner its share of the gradient in the inputs' dtype (`scheduled.py`). Sent by a rank with
zigzag shards under a causal mask: forward kv * itemsize to each rank before it and half of that to each one after it;
backward the same, and a share for whatever came. On average that is 3/4 of a ring's keys and values, and in bf16 3/8 of
its gradients (two ranks: 1/4), in fewer, larger batches (8 ranks: three each way), with 3 kernel calls besides the own
block's, not 7 (4, where keys of earlier and of later ranks meet in a step). The first batch hides behind the own block
alone, the last shares behind nothing.

Where documents or windows leave some ranks more than 1.1 times the mean work, shards are fetched, too, and ranks with
little to do help: they compute rows of others against keys of their own (`balance.py`). A row that is helped sends q
there and out back, and keys that only it sees stay where they are.

A ring enters and leaves a host over one pair of neighbours each; fetched keys cross once for every rank that sees
them. Where several GPUs share one network card these queue for it, which a ring would not: there `usp_attn`, its ring
over the hosts alone, sends less.
"""

from collections.abc import Iterator, Sequence

import torch

from ..blocks import Block, Partial, Parts, Sum, add_gradients, attend, attend_backward
from ..comm import Comm, pass_on
from ..layout import Span
from .balance import rebalanced
from .base import AttentionContext, Gradients, Mode, Residuals
from .scheduled import scheduled_backward, scheduled_forward
from .tasks import Steps, joined, most_joined, passes_on, rotation


class RingMode(Mode):
    """A mode whose ranks form one ring: a subclass says which."""

    def ring(self, ctx: AttentionContext) -> Comm:
        """The group around which keys and values travel; it holds what `ctx.ring_spans()` says."""
        raise NotImplementedError

    def forward(self, q, k, v, ctx: AttentionContext):
        out, lse = ring_forward(q, k, v, ctx, self.ring(ctx), ctx.ring_spans())
        return out, Residuals(q, k, v, out, lse, k.shape[2])

    def backward(self, dout, residuals: Residuals, ctx: AttentionContext) -> Gradients:
        return ring_backward(dout, residuals, ctx, self.ring(ctx), ctx.ring_spans())


def ring_forward(q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]]):
    """Attention of this rank's queries over all that the ranks of `comm` hold together.

    q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`; `spans[r]` says which tokens rank r of `comm` holds.
    Returns `(out, lse)`, out in q's dtype, lse `[B, H, S_local]` in float32 or more."""
    if steps := _fetching(q, k, ctx, comm, spans):
        return scheduled_forward(q, k, v, ctx, comm, steps)
    blocks = _blocks_by_step(ctx, comm, spans)
    partial = Partial(q, _query_parts(blocks, q))
    for step, held in zip(blocks, _passing(comm, k, v), strict=True):
        attend(q, *held, step, partial, ctx.scores)
    return partial.result()


def ring_backward(dout, residuals: Residuals, ctx: AttentionContext, comm: Comm, spans: list[list[Span]]) -> Gradients:
    """Gradients `(dq, dk, dv)` of `ring_forward`, in the dtypes of q, k, v."""
    q, k, v, out, lse, _ = residuals
    if steps := _fetching(q, k, ctx, comm, spans):
        return scheduled_backward(dout, residuals, ctx, comm, steps)
    blocks = _blocks_by_step(ctx, comm, spans)
    dq, dk, dv = Sum(q, _query_parts(blocks, q)), Sum(k), Sum(v)
    if comm.size == 1:
        add_gradients(attend_backward(dout, *residuals[:5], *blocks, ctx.scores), dq, dk, dv)
        return dq.result(), dk.result(), dv.result()
    batch, length, kv_heads, head_size = k.shape
    grads, arriving = (k.new_empty(batch, length, 2 * kv_heads, head_size, dtype=lse.dtype) for _ in range(2))
    pending = None
    for number, (step, held) in enumerate(zip(blocks, _passing(comm, k, v), strict=True)):
        parts = attend_backward(dout, q, *held, out, lse, step, ctx.scores)
        if pending is not None:  # the other ranks' share of this shard's gradient arrives behind the shard
            pending.wait()
            grads, arriving = arriving, grads
            dk, dv = (Sum(grad, total=grad) for grad in grads.chunk(2, dim=2))
        add_gradients(parts, dq, dk, dv)
        if pending is None:
            for room, own in zip(grads.chunk(2, dim=2), (dk, dv), strict=True):
                room.copy_(own.total)
        if number + 1 == comm.size:  # complete: it goes home in the dtype in which it is returned
            grads = grads.to(k.dtype)
            arriving = torch.empty_like(grads)
        pending = pass_on(comm, grads, arriving)
    pending.wait()
    return dq.result(), *arriving.chunk(2, dim=2)


def _fetching(q, k, ctx: AttentionContext, comm: Comm, spans: list[list[Span]]) -> Steps | None:
    """The steps in which ranks fetch keys like `k` from their owners; None where these go around the ring."""
    if comm.size == 1:
        return None
    balanced = rebalanced(ctx, rotation, spans)
    travelling = max(2 * k.numel(), 3 * q.numel() if balanced else 0)  # k and v; to helpers q, dout and out
    most = most_joined(travelling * k.element_size())
    if balanced is None and passes_on(comm.size, most) and ctx.is_dense(spans):
        return None

    def steps() -> Steps:
        return Steps(comm.rank, joined(balanced or rotation(comm.size), most), spans, ctx.blocks)

    return ctx.once((Steps, most), steps)


def _blocks_by_step(ctx: AttentionContext, comm: Comm, spans: list[list[Span]]) -> list[list[Block]]:
    return [ctx.blocks(spans[comm.rank], spans[(comm.rank - step) % comm.size]) for step in range(comm.size)]


def _query_parts(blocks: list[list[Block]], q: torch.Tensor) -> Parts:
    return Parts.of((b.q for step in blocks for b in step), q.shape[1])


def _passing(comm: Comm, k: torch.Tensor, v: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Own keys and values, then those of the rank before, and so on around the ring, each while the next ones are on
    their way into the one of two buffers that is not in use."""
    if comm.size == 1:
        yield k, v
        return
    held = torch.cat([k, v], dim=2)
    arriving = torch.empty_like(held)
    for left in reversed(range(comm.size)):
        if left:
            pending = pass_on(comm, held, arriving)
        yield held.chunk(2, dim=2)
        if left:
            pending.wait()
            held, arriving = arriving, held
