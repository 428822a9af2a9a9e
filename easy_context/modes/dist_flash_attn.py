"""Distributed flash attention: contiguous shards, a balanced causal schedule, asynchronous exchange.

After LightSeq / DistFlashAttn (https://arxiv.org/abs/2310.03294). Rank r holds the r-th contiguous piece. Under a
causal mask rank r needs r + 1 blocks (its queries against each piece up to its own), so the first ranks would idle
while the last ones work. `schedule` evens that out: in step t, ranks r >= t compute their own queries against piece
r - t, and the ranks r < t, which have no such piece, compute the block that lies farthest ahead for the rank t places
before them on the circle, world + r - t: they receive its queries, use their own keys, and send `(out, lse)` back to
be merged. For an even world the last step has two ranks for each block left; here they share it, half of the queries
each (LightSeq lets one of them idle), so that every world is balanced exactly: world / 2 blocks of compute each.

Sent per rank and layer, N ranks, q = B * S/N * H * D and kv = 2 * B * S/N * H_kv * D elements: about N/2 messages
forward, each kv (own keys to a later rank) or, for a helped rank, q out and q + lse back. Backward: kv out and kv
back, or 3 q + lse out and q back. All in the inputs' dtype (a share that goes home is one task's, and rounded once),
lse in float32. With few KV heads and many ranks that is half of what a ring moves. What a step needs travels during
the step before, what it yields during the step after: each hides behind a whole block of compute, 4 * B * (S/N)^2 * H
* D FLOPs forward. Steps of short shards are not joined as a ring's are: there are half as many, and the queries that
several helpers need at once would take several times what keys do.

Documents and windows upset that balance. Where they do, `balance.py` says anew who helps whom, with which rows. Between
contiguous shards less can be evened out than between zigzag ones: a rank in the middle of a document has blocks with
that document's ranks alone. Choose this mode when contiguous shards matter (convolutions, local windows, data that
arrive in order).
"""

from fractions import Fraction

from ..layout import Layout
from .balance import rebalanced
from .base import AttentionContext, Gradients, Mode, Residuals
from .scheduled import scheduled_backward, scheduled_forward
from .tasks import Schedule, Steps, Task, rotation

HALF = Fraction(1, 2)


class DistFlashAttention(Mode):
    name = "dist_flash_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ring=sp_size)

    def forward(self, q, k, v, ctx: AttentionContext):
        out, lse = scheduled_forward(q, k, v, *_who_does_what(ctx))
        return out, self.restore(q, k, v, out, lse, ctx)

    def backward(self, dout, residuals: Residuals, ctx: AttentionContext) -> Gradients:
        return scheduled_backward(dout, residuals, *_who_does_what(ctx))


def _who_does_what(ctx: AttentionContext):
    spans, plain = ctx.ring_spans(), schedule if ctx.causal else rotation

    def steps() -> Steps:
        return Steps(ctx.sequence.rank, rebalanced(ctx, plain, spans) or plain(len(spans)), spans, ctx.blocks)

    return ctx, ctx.sequence, ctx.once((Steps,), steps)


def schedule(world: int) -> Schedule:
    """The tasks of each step under a causal mask. Pure; together they cover every needed block exactly once."""
    steps = [[Task(r, r, r) for r in range(world)]]
    for t in range(1, (world + 1) // 2):
        steps.append([Task(r, world + r - t, r) for r in range(t)] + [Task(r, r, r - t) for r in range(t, world)])
    if world % 2 == 0:
        t = world // 2
        helped = [Task(r, r + t, r, stop=HALF) for r in range(t)]
        steps.append(helped + [Task(r, r, r - t, start=HALF) for r in range(t, world)])
    return steps


MODE = DistFlashAttention()
