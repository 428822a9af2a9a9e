"""Attention by a schedule of tasks: who computes which block, and who sends what for it.

A task is one rank's queries against one rank's keys, computed by one of the two. The other one, its supplier, sends
what is missing, keys and values or queries, and gets back what belongs to it. Modes differ only in their lists of
tasks: `dist_flash_attn` balances a causal mask by letting idle ranks help, a ring whose mask leaves whole blocks empty
(sliding windows, short documents) fetches the pieces it needs from their owners (`rotation`).

What step t + 1 needs is on its way during step t, and results travel during the step after theirs. All ranks start
these exchanges in the same order, hence no order of sends and receives can deadlock. A task without blocks is neither
sent nor computed, and of keys only the range that the task's blocks touch is sent.
"""

from dataclasses import dataclass, replace

import torch

from ..blocks import Block, Partial, add_gradients, attend, attend_backward
from ..comm import Comm, pack, unpack
from ..layout import Span
from .base import AttentionContext


@dataclass(frozen=True)
class Task:
    """`worker` computes queries of rank `query` against keys of rank `key`; one of the two is its own. `half` is None
    for all of the queries, 0 or 1 for the first or second half of them (of a shard that is one span)."""

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


Schedule = list[list[Task]]  # steps; in a step a rank works on at most one task and supplies at most one


def rotation(world: int) -> Schedule:
    """Every rank's queries against every rank's keys, computed where the queries are."""
    return [[Task(r, r, (r - t) % world) for r in range(world)] for t in range(world)]


def scheduled_attention(q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]], steps: Schedule):
    """Differentiable attention of this rank's queries over all that the ranks of `comm` hold together.

    q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`; `spans[r]` says which tokens rank r of `comm` holds;
    `steps` starts with every rank's own queries and keys. Returns `[B, S_local, H, D]`."""
    return _ScheduledAttention.apply(q, k, v, ctx, comm, spans, steps)


class _ScheduledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *how):
        out, lse = _Forward(q, k, v, *how).run().partial.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = how
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        done = _Backward(q, k, v, *ctx.how, dout, out, lse).run()
        return done.dq.to(q.dtype), done.dk.to(k.dtype), done.dv.to(v.dtype), None, None, None, None


class _Pass:
    """Walks the schedule, forward or backward. A subclass says, for a task, what its supplier sends (`supply`), what
    the worker computes and sends back (`compute`), what room the results take (`room`), and what the supplier does
    with them (`take`). The shapes of both messages are the same on every rank."""

    def __init__(self, q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]], steps: Schedule):
        self.q, self.k, self.v, self.ctx, self.comm, self.spans = q, k, v, ctx, comm, spans
        self.steps = [[task for task in step if self.blocks(task)] for step in steps]
        self.wide = torch.promote_types(q.dtype, torch.float32)

    def run(self):
        arrived, fetching = self._fetch(self.steps[0])
        collect = None
        for number, step in enumerate(self.steps):
            fetching.wait()
            supplied = arrived
            if number + 1 < len(self.steps):
                arrived, fetching = self._fetch(self.steps[number + 1])
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

    def supply(self, task: Task) -> list[torch.Tensor]:
        raise NotImplementedError

    def compute(self, task: Task, supplied: list[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError

    def room(self, task: Task) -> list[torch.Tensor]:
        raise NotImplementedError

    def take(self, task: Task, results: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def blocks(self, task: Task) -> list[Block]:
        """Of a task: queries counted from its first row, keys from the first key of the shard."""
        spans = self.spans[task.query]
        if task.half is not None:
            ((start, end),) = spans
            rows = task.rows(end - start)
            spans = [(start + rows.start, start + rows.stop)]
        return self.ctx.blocks(spans, self.spans[task.key])

    def rows_of(self, task: Task, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, task.rows(tensor.shape[1])].contiguous()

    def keys(self, task: Task) -> slice:
        """The range of the shard's keys that the task's blocks touch."""
        return slice(min(b.k.start for b in self.blocks(task)), max(b.k.stop for b in self.blocks(task)))

    def own_keys(self, task: Task) -> list[torch.Tensor]:
        return [t[:, self.keys(task)] for t in (self.k, self.v)]

    def blocks_in_range(self, task: Task) -> list[Block]:
        """The task's blocks with keys counted from the first one that is sent."""
        first = self.keys(task).start
        return [replace(b, k=slice(b.k.start - first, b.k.stop - first)) for b in self.blocks(task)]

    def is_mine(self, task: Task) -> bool:
        """Whether the task's queries are this rank's."""
        return task.query == self.comm.rank


class _Forward(_Pass):
    """Keys and values come without anything going back; query rows come and `(out, lse)` goes back."""

    def __init__(self, *args):
        super().__init__(*args)
        self.partial = Partial(self.q)

    def supply(self, task):
        return [pack(*self.own_keys(task))] if task.query == task.worker else [self.rows_of(task, self.q)]

    def compute(self, task, supplied):
        q, (k, v) = self.rows_of(task, self.q), self.own_keys(task)
        if supplied and self.is_mine(task):
            k, v = unpack(supplied[0], k.shape, v.shape)
        elif supplied:
            (q,) = supplied
        part = Partial(q)
        attend(q, k, v, self.blocks_in_range(task), part, self.ctx.scores)
        if self.is_mine(task):
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
    """For keys and values their gradients go back; q, dout, out and lse of query rows come and dq goes back."""

    def __init__(self, *args):
        *args, self.dout, self.out, self.lse = args
        super().__init__(*args)
        self.dq, self.dk, self.dv = (t.new_zeros(t.shape, dtype=self.wide) for t in (self.q, self.k, self.v))

    def supply(self, task):
        if task.query == task.worker:
            return [pack(*self.own_keys(task))]
        lse = self.lse[:, :, task.rows(self.q.shape[1])].contiguous()
        return [*(self.rows_of(task, t) for t in (self.q, self.dout, self.out)), lse]

    def compute(self, task, supplied):
        rows, keys = task.rows(self.q.shape[1]), self.keys(task)
        q, dout, out = (self.rows_of(task, t) for t in (self.q, self.dout, self.out))
        lse, dq = self.lse[:, :, rows], self.dq[:, rows]
        k, v = self.own_keys(task)
        dk, dv = self.dk[:, keys], self.dv[:, keys]
        back = []
        if supplied and self.is_mine(task):
            grads = supplied[0].new_zeros(supplied[0].shape, dtype=self.wide)
            (k, v), (dk, dv), back = unpack(supplied[0], k.shape, v.shape), unpack(grads, k.shape, v.shape), [grads]
        elif supplied:
            q, dout, out, lse = supplied
            dq = q.new_zeros(q.shape, dtype=self.wide)
            back = [dq]
        add_gradients(attend_backward(dout, q, k, v, out, lse, self.blocks_in_range(task), self.ctx.scores), dq, dk, dv)
        return back

    def room(self, task):
        if task.query == task.worker:
            size = sum(t.numel() for t in self.own_keys(task))
            return [self.k.new_empty(size, dtype=self.wide)]
        return [torch.empty_like(self.rows_of(task, self.q), dtype=self.wide)]

    def take(self, task, results):
        if task.query == task.worker:
            keys, shapes = self.keys(task), [t.shape for t in self.own_keys(task)]
            for total, grad in zip((self.dk, self.dv), unpack(results[0], *shapes), strict=True):
                total[:, keys].add_(grad)
        else:
            self.dq[:, task.rows(self.q.shape[1])].add_(results[0])


def _only(tasks) -> Task | None:
    found = list(tasks)
    assert len(found) <= 1, found
    return found[0] if found else None
