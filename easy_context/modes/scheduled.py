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
from functools import cached_property

import torch

from ..blocks import Block, Partial, Sum, add_gradients, attend, attend_backward
from ..comm import Comm
from ..kernels.base import lse_dtype
from ..layout import Span
from .base import AttentionContext, Gradients, Residuals


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


def scheduled_forward(q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]], steps: Schedule):
    """Attention of this rank's queries over all that the ranks of `comm` hold together.

    q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`; `spans[r]` says which tokens rank r of `comm` holds;
    `steps` starts with every rank's own queries and keys. Returns `(out, lse)`, out in q's dtype, lse
    `[B, H, S_local]` in float32 or more."""
    return _Forward(q, k, v, ctx, comm, spans, steps).run().partial.result()


def scheduled_backward(dout, residuals: Residuals, *how) -> Gradients:
    """Gradients `(dq, dk, dv)` of `scheduled_forward(q, k, v, *how)`, in the dtypes of q, k, v."""
    q, k, v, out, lse, _ = residuals
    done = _Backward(q, k, v, *how, dout, out, lse).run()
    return done.dq.result(), done.dk.result(), done.dv.result()


class _Pass:
    """Walks the schedule, forward or backward. A subclass says, for a task, what its supplier sends (`supply`), what
    the worker computes and sends back (`compute`), what room the results take (`room`), and what the supplier does
    with them (`take`). The shapes of both messages are the same on every rank."""

    def __init__(self, q, k, v, ctx: AttentionContext, comm: Comm, spans: list[list[Span]], steps: Schedule):
        self.q, self.k, self.v, self.ctx, self.comm, self.spans = q, k, v, ctx, comm, spans
        self.steps = [[task for task in step if self.blocks(task)] for step in steps]

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
        buffers = [t.new_empty(t.shape) for t in self.supply(mine)] if mine is not None else []
        sends = [(t.contiguous(), theirs.worker) for t in self.supply(theirs)] if theirs is not None else []
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

    def local_blocks(self, task: Task) -> list[Block]:
        """A task of this worker's in its own tensors: of a rank's own shard they hold everything, of another's what
        its supplier sent."""
        q_at = self.rows(task).start if self.has_queries(task) else 0
        k_at = 0 if self.has_keys(task) else -self.keys(task).start
        return [replace(b, q=_moved(b.q, q_at), k=_moved(b.k, k_at)) for b in self.blocks(task)]

    def has_queries(self, task: Task) -> bool:
        return task.query == self.comm.rank

    def has_keys(self, task: Task) -> bool:
        return task.key == self.comm.rank

    def rows(self, task: Task) -> slice:
        """The task's part of this rank's queries."""
        return task.rows(self.q.shape[1])

    def keys(self, task: Task) -> slice:
        """The range of the shard's keys that the task's blocks touch."""
        return slice(min(b.k.start for b in self.blocks(task)), max(b.k.stop for b in self.blocks(task)))

    def count(self, side: str) -> int:
        """How many results this rank's queries (`side` "query") or keys ("key") get: one of each block computed here,
        one of each task computed elsewhere."""
        tasks = [task for step in self.steps for task in step if getattr(task, side) == self.comm.rank]
        return sum(len(self.blocks(task)) if task.worker == self.comm.rank else 1 for task in tasks)

    @cached_property
    def kv(self) -> torch.Tensor:
        """Keys and values as they are sent, `[B, S_local, 2 * H_kv, D]`."""
        return torch.cat([self.k, self.v], dim=2)


class _Forward(_Pass):
    """Keys and values come without anything going back; query rows come and `(out, lse)` goes back."""

    def __init__(self, *args):
        super().__init__(*args)
        self.partial = Partial(self.q, self.count("query"))

    def supply(self, task):
        return [self.kv[:, self.keys(task)] if task.query == task.worker else self.q[:, self.rows(task)]]

    def compute(self, task, supplied):
        q = self.q if self.has_queries(task) else supplied[0]
        k, v = (self.k, self.v) if self.has_keys(task) else supplied[0].chunk(2, dim=2)
        blocks = self.local_blocks(task)
        partial = self.partial if self.has_queries(task) else Partial(q, len(blocks))
        attend(q, k, v, blocks, partial, self.ctx.scores)
        return [] if self.has_queries(task) else [t.contiguous() for t in partial.result()]

    def room(self, task):
        if task.query == task.worker:
            return []
        out = self.q.new_empty(self.q[:, self.rows(task)].shape)
        return [out, out.new_empty(out.shape[0], out.shape[2], out.shape[1], dtype=lse_dtype(out))]

    def take(self, task, results):
        self.partial.add(*results, q=self.rows(task))


class _Backward(_Pass):
    """For keys and values their gradients go back; q, dout, out and lse of query rows come and dq goes back. What goes
    back is one task's share, in the dtype of what it is the gradient of."""

    def __init__(self, *args):
        *args, self.dout, self.out, self.lse = args
        super().__init__(*args)
        self.dq = Sum(self.q, self.count("query"))
        self.dk, self.dv = (Sum(t, self.count("key")) for t in (self.k, self.v))

    def supply(self, task):
        if task.query == task.worker:
            return [self.kv[:, self.keys(task)]]
        rows = self.rows(task)
        return [self.q[:, rows], self.dout[:, rows], self.out[:, rows], self.lse[:, :, rows]]

    def compute(self, task, supplied):
        q, dout, out, lse = (self.q, self.dout, self.out, self.lse) if self.has_queries(task) else supplied
        k, v = (self.k, self.v) if self.has_keys(task) else supplied[0].chunk(2, dim=2)
        dq = self.dq if self.has_queries(task) else Sum(q)
        dk, dv = (self.dk, self.dv) if self.has_keys(task) else (Sum(k), Sum(v))
        parts = attend_backward(dout, q, k, v, out, lse, self.local_blocks(task), self.ctx.scores)
        add_gradients(parts, dq, dk, dv)
        if not self.has_queries(task):
            return [dq.result().contiguous()]
        return [] if self.has_keys(task) else [torch.cat([dk.result(), dv.result()], dim=2)]

    def room(self, task):
        sent = self.kv[:, self.keys(task)] if task.query == task.worker else self.q[:, self.rows(task)]
        return [sent.new_empty(sent.shape)]

    def take(self, task, results):
        if task.query == task.worker:
            for total, part in zip((self.dk, self.dv), results[0].chunk(2, dim=2), strict=True):
                total.add(part, rows=self.keys(task))
        else:
            self.dq.add(results[0], rows=self.rows(task))


def _moved(where: slice, by: int) -> slice:
    return slice(where.start + by, where.stop + by) if by else where


def _only(tasks) -> Task | None:
    found = list(tasks)
    assert len(found) <= 1, found
    return found[0] if found else None
