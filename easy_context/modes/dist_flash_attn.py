"""Distributed flash attention: contiguous shards, a balanced causal schedule, asynchronous exchange.

After LightSeq / DistFlashAttn (https://arxiv.org/abs/2310.03294). Rank r holds the r-th contiguous piece. Under a
causal mask rank r needs r + 1 blocks (its queries against each piece up to its own), so the first ranks would idle
while the last ones work. `schedule` evens that out: in step t, ranks r >= t compute their own queries against piece
r - t, and the ranks r < t, which have no such piece, compute the block that lies farthest ahead for the rank t places
before them on the circle, world + r - t: they receive its queries, use their own keys, and send `(out, lse)` back to
be merged. For an even world the last step has two ranks for each block left; here they share it, half of the queries
each (LightSeq lets one of them idle), so that every world is balanced exactly: world / 2 blocks of compute each.

What step t + 1 needs is on its way during step t, and results of helpers travel during the step after theirs. All
ranks start these exchanges in the same order, hence no order of sends and receives can deadlock.

Bytes sent per rank and layer, N ranks, q = B * S/N * H * D and kv = 2 * B * S/N * H_kv * D elements: about N/2 messages
forward, each kv (own keys to a later rank) or, for a helped rank, q out and q * 4 bytes (float32) + lse back. Backward:
kv out and kv * 4 bytes back, or 3 q out and q * 4 bytes back. With few KV heads and many ranks that is half of what a
ring moves. Choose it when contiguous shards matter (convolutions, local windows, data that arrive in order).
"""

from dataclasses import dataclass

import torch

from ..blocks import Partial, attend, attend_backward
from ..comm import Comm, pack, unpack
from ..layout import Layout
from .base import AttentionContext, Mode


@dataclass(frozen=True)
class Task:
    """`worker` computes queries of rank `query` against keys of rank `key`; one of the two is its own. `half` is None
    for all of the queries, 0 or 1 for the first or second half of them."""

    worker: int
    query: int
    key: int
    half: int | None = None

    @property
    def supplier(self) -> int:
        """Who sends the worker the other side of the block and gets the results that belong to it."""
        return self.key if self.query == self.worker else self.query

    def rows(self, length: int) -> slice:
        """Which of the `length` queries of a shard."""
        middle = (length + 1) // 2
        return {None: slice(0, length), 0: slice(0, middle), 1: slice(middle, length)}[self.half]


def schedule(world: int, causal: bool = True) -> list[list[Task]]:
    """The tasks of each step; in a step a rank works on at most one and supplies at most one. Pure; together they
    cover every needed block exactly once."""
    if not causal:
        return [[Task(r, r, (r - t) % world) for r in range(world)] for t in range(world)]
    steps = [[Task(r, r, r) for r in range(world)]]
    for t in range(1, (world + 1) // 2):
        steps.append([Task(r, world + r - t, r) for r in range(t)] + [Task(r, r, r - t) for r in range(t, world)])
    if world % 2 == 0:
        t = world // 2
        helped = [Task(r, r + t, r, half=1) for r in range(t)]
        steps.append(helped + [Task(r, r, r - t, half=0) for r in range(t, world)])
    return steps


class DistFlashAttention(Mode):
    name = "dist_flash_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ring=sp_size)

    def attention(self, q, k, v, ctx: AttentionContext, *, scale: float):
        return _DistFlashAttention.apply(q, k, v, ctx, scale)


class _DistFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context, scale):
        out, lse = _Forward(context, scale, q.contiguous(), k, v).run().partial.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = context, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        done = _Backward(*ctx.call, q.contiguous(), k, v, dout.contiguous(), out, lse).run()
        dk, dv = unpack(done.dkv, k.shape, v.shape)
        return done.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _Pass:
    """The executor: walks the schedule. A subclass says, for a task, what its supplier sends (`supply`), what the
    worker computes and sends back (`compute`), and what the supplier does with that (`take`). The shapes of both
    messages are the same on every rank: `supply` and `room` are asked for them where they arrive."""

    def __init__(self, ctx: AttentionContext, scale: float, q, k, v):
        self.ctx, self.scale, self.q, self.k, self.v = ctx, scale, q, k, v
        self.comm: Comm = ctx.sequence
        self.spans = ctx.ring_spans()
        self.pair = pack(k, v)
        self.wide = torch.promote_types(q.dtype, torch.float32)

    def supply(self, task: Task) -> list[torch.Tensor]:
        raise NotImplementedError

    def compute(self, task: Task, supplied: list[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError

    def room(self, task: Task) -> list[torch.Tensor]:
        raise NotImplementedError

    def take(self, task: Task, results: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def rows_of(self, task: Task, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, task.rows(tensor.shape[1])].contiguous()

    def unpair(self, pair: torch.Tensor) -> list[torch.Tensor]:
        return unpack(pair, self.k.shape, self.v.shape)

    def blocks(self, task: Task):
        (start, _), rows = self.spans[task.query][0], task.rows(self.q.shape[1])
        return self.ctx.blocks([(start + rows.start, start + rows.stop)], self.spans[task.key])

    def run(self):
        # A task without blocks (no document crosses from its keys to its queries) is neither sent nor computed; that
        # is known on every rank alike.
        steps = [[task for task in step if self.blocks(task)] for step in schedule(self.comm.size, self.ctx.causal)]
        arrived, fetching = self._fetch(steps[0])
        collect = None
        for number, step in enumerate(steps):
            fetching.wait()
            supplied = arrived
            if number + 1 < len(steps):
                arrived, fetching = self._fetch(steps[number + 1])
            mine = _only(task for task in step if task.worker == self.comm.rank)
            results = self.compute(mine, supplied) if mine is not None else []
            if collect is not None:
                collect()
            collect = self._give_back(step, mine, results)
        collect()
        return self

    def _fetch(self, step: list[Task]):
        """Start the messages from suppliers to workers; returns the buffers filled here, and the pending."""
        mine = _only(task for task in step if task.worker == self.comm.rank != task.supplier)
        theirs = _only(task for task in step if task.supplier == self.comm.rank != task.worker)
        buffers = [torch.empty_like(t) for t in self.supply(mine)] if mine is not None else []
        sends = [(t, theirs.worker) for t in self.supply(theirs)] if theirs is not None else []
        return buffers, self.comm.exchange(sends, [(t, mine.supplier) for t in buffers])

    def _give_back(self, step: list[Task], mine: Task | None, results: list[torch.Tensor]):
        """Start the messages from workers to suppliers; returns a function that waits for them and takes them."""
        theirs = _only(task for task in step if task.supplier == self.comm.rank != task.worker)
        buffers = self.room(theirs) if theirs is not None else []
        pending = self.comm.exchange([(t, mine.supplier) for t in results], [(t, theirs.worker) for t in buffers])

        def collect():
            pending.wait()
            if buffers:
                self.take(theirs, buffers)

        return collect


class _Forward(_Pass):
    """Helpers get query rows and return `(out, lse)`; keys and values come without anything going back."""

    def __init__(self, ctx, scale, q, k, v):
        super().__init__(ctx, scale, q, k, v)
        self.partial = Partial(q)

    def supply(self, task):
        return [self.pair] if task.query == task.worker else [self.rows_of(task, self.q)]

    def compute(self, task, supplied):
        own = task.query == self.comm.rank
        q = self.rows_of(task, self.q) if own else supplied[0]
        pair = supplied[0] if own and supplied else self.pair
        part = Partial(q)
        attend(self.ctx.kernel_of, q, *self.unpair(pair), self.blocks(task), part, scale=self.scale)
        if own:
            self.partial.add(part.out, part.lse, q=task.rows(self.q.shape[1]))
            return []
        return [t.contiguous() for t in part.result()]

    def room(self, task):
        if task.query == task.worker:
            return []
        out = torch.empty_like(self.rows_of(task, self.q))
        return [out, out.new_empty(out.shape[0], out.shape[2], out.shape[1], dtype=self.wide)]

    def take(self, task, results):
        self.partial.add(*results, q=task.rows(self.q.shape[1]))


class _Backward(_Pass):
    """Helpers get q, dout, out and lse of the rows and return dq; for keys and values their gradients go back."""

    def __init__(self, ctx, scale, q, k, v, dout, out, lse):
        super().__init__(ctx, scale, q, k, v)
        self.dout, self.out, self.lse = dout, out, lse
        self.dq = torch.zeros_like(q, dtype=self.wide)
        self.dkv = torch.zeros_like(self.pair, dtype=self.wide)

    def supply(self, task):
        if task.query == task.worker:
            return [self.pair]
        lse = self.lse[:, :, task.rows(self.q.shape[1])].contiguous()
        return [pack(*(self.rows_of(task, t) for t in (self.q, self.dout, self.out))), lse]

    def compute(self, task, supplied):
        rows = task.rows(self.q.shape[1])
        if task.query == self.comm.rank:
            q, dout, out = (self.rows_of(task, t) for t in (self.q, self.dout, self.out))
            lse, dq = self.lse[:, :, rows], self.dq[:, rows]
            pair, dkv = (supplied[0], torch.zeros_like(self.dkv)) if supplied else (self.pair, self.dkv)
            back = [dkv] if supplied else []
        else:
            shape = self.rows_of(task, self.q).shape
            q, dout, out = unpack(supplied[0], shape, shape, shape)
            lse, dq = supplied[1], torch.zeros_like(q, dtype=self.wide)
            pair, dkv, back = self.pair, self.dkv, [dq]
        attend_backward(
            self.ctx.kernel_of,
            dout,
            q,
            *self.unpair(pair),
            out,
            lse,
            self.blocks(task),
            dq,
            *self.unpair(dkv),
            scale=self.scale,
        )
        return back

    def room(self, task):
        of = self.pair if task.query == task.worker else self.rows_of(task, self.q)
        return [torch.empty_like(of, dtype=self.wide)]

    def take(self, task, results):
        if task.query == task.worker:
            self.dkv += results[0]
        else:
            self.dq[:, task.rows(self.q.shape[1])] += results[0]


def _only(tasks) -> Task | None:
    found = list(tasks)
    assert len(found) <= 1, found
    return found[0] if found else None


MODE = DistFlashAttention()
