"""Attention by a schedule of tasks (`tasks.py`), whoever computes them: the executor.

What step t + 1 needs is on its way during step t, and results travel during the step after theirs. All ranks start
these exchanges in the same order, hence no order of sends and receives can deadlock. All messages of a step, one way,
are one batch. Of keys only the range that a task's blocks touch is sent.

Keys and values travel token by token, k and v side by side, `[tokens, B, 2 * H_kv, D]`. So what a rank sends of its
own is contiguous, and what it receives of several ranks for one job are contiguous pieces of one tensor, of which k
and v are views that kernels read as they are. Their gradients go home apart, `[B, tokens, H_kv, D]` each, in the
inputs' dtype: at B = 1 slices of what the kernel wrote, not copied, which the owner adds to its sums.

Held besides the shards: the pieces of two steps, in the backward the gradients of as many.
"""

from functools import cached_property

import torch

from ..blocks import Partial, Parts, Sum, add_gradients, attend, attend_backward
from ..comm import Comm, Message
from ..kernels.base import lse_dtype
from .base import AttentionContext, Gradients, Residuals
from .tasks import Job, Step, Steps, Task


def scheduled_forward(q, k, v, ctx: AttentionContext, comm: Comm, steps: Steps):
    """Attention of this rank's queries over all that the ranks of `comm` hold together.

    q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`. Returns `(out, lse)`, out in q's dtype, lse
    `[B, H, S_local]` in float32 or more."""
    return _Forward(q, k, v, ctx, comm, steps).run().partial.result()


def scheduled_backward(dout, residuals: Residuals, *how) -> Gradients:
    """Gradients `(dq, dk, dv)` of `scheduled_forward(q, k, v, *how)`, in the dtypes of q, k, v."""
    q, k, v, out, lse, _ = residuals
    done = _Backward(q, k, v, *how, dout, out, lse).run()
    return done.dq.result(), done.dk.result(), done.dv.result()


class _Pass:
    """Walks the schedule, forward or backward. A subclass says which tensors of its queries a supplier sends
    (`of_queries`), what the worker computes and sends back (`compute`), what room the results take (`room`), and what
    the supplier does with them (`take`). The shapes of messages are the same on both sides."""

    def __init__(self, q, k, v, ctx: AttentionContext, comm: Comm, steps: Steps):
        self.q, self.k, self.v, self.scores, self.comm, self.steps = q, k, v, ctx.scores, comm, steps

    def run(self):
        arrived, fetching = self._fetch(self.steps[0])
        collect = None
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            fetching.wait()
            supplied = arrived
            if following is not None:
                arrived, fetching = self._fetch(following)
            results = [m for job, tensors in zip(step.jobs, supplied, strict=True) for m in self.compute(job, tensors)]
            if collect is not None:
                collect()
            collect = self._give_back(step, results)
        collect()
        return self

    def _fetch(self, step: Step):
        """Start the messages from suppliers to workers; returns, per job, the tensors filled here, and the pending."""
        sends = [(t.contiguous(), task.worker) for task in step.supplied for t in self.supply(task)]
        tensors, receives = [], []
        for job in step.jobs:
            if job.pieces:
                buffer = self.kv.new_empty(job.pieces[-1].stop, *self.kv.shape[1:])
                tensors.append([buffer])
                receives += [(buffer[at], task.supplier) for at, task in zip(job.pieces, job.tasks, strict=True)]
            else:
                (task,) = job.tasks
                tensors.append([] if task.keys_travel else [t.new_empty(t.shape) for t in self.of_queries(task)])
                receives += [(t, task.supplier) for t in tensors[-1]]
        return tensors, self.comm.exchange(sends, receives)

    def _give_back(self, step: Step, results: list[Message]):
        """Start the messages from workers to suppliers; returns a function that waits for them and takes them."""
        rooms = [(task, self.room(task)) for task in step.supplied]
        pending = self.comm.exchange(results, [(t, task.worker) for task, room in rooms for t in room])

        def collect():
            pending.wait()
            for task, room in rooms:
                self.take(task, room)

        return collect

    def supply(self, task: Task) -> list[torch.Tensor]:
        return [self.kv[self.steps.keys(task)]] if task.keys_travel else self.of_queries(task)

    def of_queries(self, task: Task) -> list[torch.Tensor]:
        raise NotImplementedError

    def compute(self, job: Job, supplied: list[torch.Tensor]) -> list[Message]:
        raise NotImplementedError

    def room(self, task: Task) -> list[torch.Tensor]:
        raise NotImplementedError

    def take(self, task: Task, results: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def rows(self, task: Task) -> slice:
        """The task's part of its queries' shard."""
        return task.rows(self.q.shape[1])

    def keys_of(self, job: Job, supplied: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of a job, `[B, tokens, H_kv, D]`."""
        return supplied[0].transpose(0, 1).chunk(2, dim=2) if job.pieces else (self.k, self.v)

    @cached_property
    def kv(self) -> torch.Tensor:
        """Keys and values as they are sent, `[S_local, B, 2 * H_kv, D]`."""
        return torch.cat([self.k.transpose(0, 1), self.v.transpose(0, 1)], dim=2)


class _Forward(_Pass):
    """Keys and values come without anything going back; query rows come and `(out, lse)` goes back."""

    def __init__(self, *args):
        super().__init__(*args)
        self.partial = Partial(self.q, self.steps.query_parts)

    def of_queries(self, task):
        return [self.q[:, self.rows(task)]]

    def compute(self, job, supplied):
        k, v = self.keys_of(job, supplied)
        if job.tasks[0].keys_travel:
            attend(self.q, k, v, job.blocks, self.partial, self.scores)
            return []
        partial = Partial(supplied[0], Parts.of((b.q for b in job.blocks), supplied[0].shape[1]))
        attend(supplied[0], k, v, job.blocks, partial, self.scores)
        return [(t.contiguous(), job.tasks[0].supplier) for t in partial.result()]

    def room(self, task):
        if task.keys_travel:
            return []
        out = self.q.new_empty(self.q[:, self.rows(task)].shape)
        return [out, out.new_empty(out.shape[0], out.shape[2], out.shape[1], dtype=lse_dtype(out))]

    def take(self, task, results):
        if results:
            self.partial.add(*results, q=self.rows(task))


class _Backward(_Pass):
    """For keys and values their gradients go back; q, dout, out and lse of query rows come and dq goes back. What goes
    back is one task's share, in the dtype of what it is the gradient of."""

    def __init__(self, *args):
        *args, self.dout, self.out, self.lse = args
        super().__init__(*args)
        self.dq = Sum(self.q, self.steps.query_parts)
        self.dk, self.dv = (Sum(t, self.steps.key_parts) for t in (self.k, self.v))

    def of_queries(self, task):
        rows = self.rows(task)
        return [self.q[:, rows], self.dout[:, rows], self.out[:, rows], self.lse[:, :, rows]]

    def compute(self, job, supplied):
        k, v = self.keys_of(job, supplied)
        own = job.tasks[0].keys_travel
        q, dout, out, lse = (self.q, self.dout, self.out, self.lse) if own else supplied
        dq = self.dq if own else Sum(q)
        dk, dv = (_Shares(k, job.pieces), _Shares(v, job.pieces)) if job.pieces else (self.dk, self.dv)
        add_gradients(attend_backward(dout, q, k, v, out, lse, job.blocks, self.scores), dq, dk, dv)
        if not own:
            return [(dq.result().contiguous(), job.tasks[0].supplier)]
        if not job.pieces:
            return []
        shares = zip(job.tasks, dk.results(), dv.results(), strict=True)
        return [(t.contiguous(), task.supplier) for task, *pair in shares for t in pair]

    def room(self, task):
        if not task.keys_travel:
            return [self.q.new_empty(self.q[:, self.rows(task)].shape)]
        keys = self.steps.keys(task)
        return [t.new_empty(t[:, keys].shape) for t in (self.k, self.v)]

    def take(self, task, results):
        if task.keys_travel:
            for total, part in zip((self.dk, self.dv), results, strict=True):
                total.add(part, rows=self.steps.keys(task))
        else:
            self.dq.add(*results, rows=self.rows(task))


class _Shares:
    """The gradient of keys (or values) shaped like `like`, of which each of `pieces` is another owner's: a `Sum` each.
    A block that covers all of a piece becomes its share as a view of what the kernel wrote."""

    def __init__(self, like: torch.Tensor, pieces: list[slice]):
        self.pieces, self.sums = pieces, [Sum(like[:, at]) for at in pieces]

    def add(self, part: torch.Tensor, batch: slice, rows: slice) -> None:
        """As `Sum.add`."""
        for at, total in zip(self.pieces, self.sums, strict=True):
            low, high = max(at.start, rows.start), min(at.stop, rows.stop)
            if low < high:
                share = part[:, low - rows.start : high - rows.start]
                total.add(share, batch, slice(low - at.start, high - at.start))

    def results(self) -> list[torch.Tensor]:
        return [total.result() for total in self.sums]
