"""Schedules of attention: in which step who computes which block, and who sends what for it. Pure.

A task is one rank's queries against one rank's keys, computed by one of the two. The other one, its supplier, sends
what is missing, keys and values or queries, and gets back what belongs to it. Modes differ only in their lists of
tasks: `dist_flash_attn` balances a causal mask by letting idle ranks help, a ring fetches what its ranks see straight
from the owners (`rotation`).

Where shards are short, a kernel call ends before the GPU was full for long, and merging its result, adding its
gradients and starting its messages take a noticeable part of its time. `joined` makes few large steps of many small
ones, and a rank's tasks in a step whose queries are its own become one job over all their keys, laid end to end: one
kernel call where the mask allows, one merge, one addition to dq. `Steps` is a schedule as one rank sees it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from ..blocks import Block, Parts, merged
from ..layout import Span

# Keys and values that a step of several tasks may bring to a rank. What is alive of two such steps at once, gradients
# included, stays below half a GiB. Larger shards have long calls anyway: with 32 query and 8 KV heads of 128 in bf16, a
# shard of 2**27 bytes has 32K tokens, and at 669 TFLOP/s (H200) a step of the ring takes 13 ms forward.
JOINED_BYTES = 2**27


@dataclass(frozen=True)
class Task:
    """`worker` computes queries of rank `query` against keys of rank `key`; one of the two is its own. Which of the
    queries: those from `start` to `stop`, exact parts of the shard, whatever its length."""

    worker: int
    query: int
    key: int
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)

    @property
    def supplier(self) -> int:
        """Who sends the worker the other side of the block and gets the results that belong to it."""
        return self.key if self.keys_travel else self.query

    @property
    def keys_travel(self) -> bool:
        """Whether the worker's queries stay, and keys come to them (of a rank's own block, nothing moves)."""
        return self.query == self.worker

    def rows(self, length: int) -> slice:
        """Which of the `length` queries of a shard."""
        rounded_up = (-(-part.numerator * length // part.denominator) for part in (self.start, self.stop))
        return slice(*rounded_up)


Schedule = list[list[Task]]  # steps; the first one has every rank's own queries and keys, and nothing else


def rotation(world: int) -> Schedule:
    """Every rank's queries against every rank's keys, computed where the queries are."""
    return [[Task(r, r, (r - t) % world) for r in range(world)] for t in range(world)]


def joined(steps: Schedule, most: int) -> Schedule:
    """The same tasks in fewer steps: the first as it is, since it needs nothing and hides the first exchange, then
    `most` at a time, but never more than half of those left, rounded up: what a step sends home hides behind the
    steps that follow, and that of the last one behind nothing. Eight steps become groups of 1, 4, 2, 1."""
    groups, left = [steps[0]], steps[1:]
    while left:
        size = min(most, (len(left) + 1) // 2)
        groups.append([task for step in left[:size] for task in step])
        left = left[size:]
    return groups


def most_joined(shard_bytes: int) -> int:
    """How many steps `joined` may make one of, where so many bytes of a shard travel."""
    return max(1, JOINED_BYTES // max(1, shard_bytes))


def passes_on(world: int, most: int) -> bool:
    """Whether shards go around a ring of `world` ranks whole, rather than that each rank fetches what it sees of them,
    `most` at a time: long ones do. Between two ranks both go the same way, and what is fetched is less."""
    return world > 2 and most == 1


@dataclass(frozen=True)
class Job:
    """What a rank computes in one go: one task, or several whose queries are its own and whose keys are others'.

    `blocks` index the rank's own queries, or those that were sent, and its own keys, or those that were sent laid end
    to end; `pieces[i]` is the place of the keys of `tasks[i]` among the latter."""

    tasks: list[Task]
    blocks: list[Block]
    pieces: list[slice]


@dataclass(frozen=True)
class Step:
    """One rank's part of a step. Messages between two ranks are in the order of these lists on both sides."""

    jobs: list[Job]
    supplied: list[Task]  # of other ranks, for which it sends


class Steps(list[Step]):
    """A schedule as `rank` sees it. A task without blocks is neither sent nor computed.

    `spans[r]` are the tokens of rank r; `plan(q_spans, k_spans)` lists the blocks between two lists of spans."""

    def __init__(self, rank: int, schedule: Schedule, spans: list[list[Span]], plan: Callable[..., list[Block]]):
        self.rank, self.spans, self.plan = rank, spans, plan
        self._keys: dict[Task, slice] = {}
        super().__init__(map(self._step, schedule))

    def keys(self, task: Task) -> slice:
        """The range of the shard's keys that the task's blocks touch: what is sent of it."""
        if task not in self._keys:
            blocks = self._blocks(task)
            self._keys[task] = slice(min(b.k.start for b in blocks), max(b.k.stop for b in blocks))
        return self._keys[task]

    @cached_property
    def query_parts(self) -> Parts:
        """The results that the rank's queries get."""
        return self._parts("query", "q", self._rows)

    @cached_property
    def key_parts(self) -> Parts:
        """The results that the rank's keys get."""
        return self._parts("key", "k", self.keys)

    def _parts(self, owner: str, side: str, rows: Callable[[Task], slice]) -> Parts:
        """One of each block computed here, one of each task elsewhere."""
        jobs = [job for step in self for job in step.jobs if getattr(job.tasks[0], owner) == self.rank]
        here = [getattr(block, side) for job in jobs for block in job.blocks]
        elsewhere = [rows(task) for step in self for task in step.supplied if getattr(task, owner) == self.rank]
        return Parts.of(here + elsewhere, self._length)

    def _step(self, tasks: list[Task]) -> Step:
        tasks = [t for t in tasks if self.rank in (t.worker, t.supplier) and self._blocks(t)]
        mine = [t for t in tasks if t.worker == self.rank]
        fetching = [t for t in mine if t.keys_travel]
        groups = [fetching] * bool(fetching) + [[t] for t in mine if not t.keys_travel]
        supplied = sorted((t for t in tasks if t.worker != self.rank), key=lambda t: not t.keys_travel)
        return Step([self._job(group) for group in groups], supplied)

    def _job(self, tasks: list[Task]) -> Job:
        if tasks[0].key == self.rank:
            (task,) = tasks
            return Job(tasks, self._blocks(task, q_at=self._rows(task).start if task.keys_travel else 0), [])
        blocks, pieces, at = [], [], 0
        for task in tasks:
            keys = self.keys(task)
            blocks += self._blocks(task, q_at=self._rows(task).start, k_at=at - keys.start)
            pieces.append(slice(at, at + keys.stop - keys.start))
            at = pieces[-1].stop
        return Job(tasks, merged(sorted(blocks, key=_place)), pieces)

    def _blocks(self, task: Task, q_at: int = 0, k_at: int = 0) -> list[Block]:
        """Of a task: queries counted from its first row, which becomes `q_at`, keys from the shard's, `k_at`."""
        blocks = self.plan(_part(self.spans[task.query], self._rows(task)), self.spans[task.key])
        if not (q_at or k_at):
            return blocks
        return [replace(b, q=_moved(b.q, q_at), k=_moved(b.k, k_at)) for b in blocks]

    def _rows(self, task: Task) -> slice:
        return task.rows(self._length)

    @cached_property
    def _length(self) -> int:
        """Of a shard; they are equally long."""
        return sum(end - start for start, end in self.spans[self.rank])


def _part(spans: list[Span], rows: slice) -> list[Span]:
    """The tokens of `rows` of a shard that holds `spans`."""
    part, at = [], 0
    for start, end in spans:
        low, high = max(start, start + rows.start - at), min(end, start + rows.stop - at)
        if low < high:
            part.append((low, high))
        at += end - start
    return part


def _place(block: Block) -> tuple[int, int, int]:
    return block.batch.start or 0, block.q.start or 0, block.k.start


def _moved(where: slice, by: int) -> slice:
    return slice(where.start + by, where.stop + by) if by else where
