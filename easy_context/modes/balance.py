"""Even loads under documents and windows: who computes which rows of which block. Pure.

Zigzag shards are even under a causal mask, and so is `dist_flash_attn.schedule`. Under packed documents neither is: who
holds the middle of a long one has several times the (query, key) pairs of who holds short ones. But a block between two
ranks can be computed at either end, where its queries are (keys travel) or where its keys are (queries travel there,
outputs back), and so can any part of its rows. LightSeq (https://arxiv.org/abs/2310.03294) does that by hand for the
causal mask; here the masks decide, from what all ranks know alike, in integers, so that all find the same schedule
without a message.

It is a flow problem: a block lets pairs flow between its two ends, and all ranks should end up with equally many. One
block after the other evens out its two ends as far as it can. Each such move lowers the sum of the squared loads, and
where that is lowest, so is the largest load. Whole blocks move first, since a block in one piece is one kernel call.
Then blocks are cut, cuts that are not worth it are taken back, and the others move once more to make up for these.
Of a cut block the first rows move: under a window they see the most keys, so the fewest queries travel.

Bytes: a row that travels is q there and out with lse back, in the backward q, dout, out, lse there and dq back, 6 * H *
D elements in all; a key that travels is 6 * H_kv * D (k, v forward and backward, dk, dv). So with grouped heads help
sends H / H_kv times as many bytes as fetching: cheap between the GPUs of a host, not on slow links between hosts. Held
by a helper: these tensors of the rows of two steps.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from ..blocks import Block
from ..layout import Span
from .base import AttentionContext
from .tasks import Schedule, Task, rotation

UNEVEN = 1.1  # largest over mean load up to which a schedule stays as it is
WORTH = 0.02  # of the mean load: what either part of a cut block has at least, to be worth a kernel call and messages
LEAST_ROWS = 256  # what it has in rows, or a sixteenth of a shard below 4096; cuts are at multiples of a quarter of it
SWEEPS = 400  # over all blocks, at the most: many where pairs flow along a chain of ranks, few where all are neighbours


def rebalanced(ctx: AttentionContext, plain: Callable[[int], Schedule], spans: list[list[Span]]) -> Schedule | None:
    """`balance` of `plain(ranks)` under the masks of `ctx`, found once per forward; None where it stays as it is."""
    if not ctx.cuts_blocks:
        return None
    return ctx.once((balance, plain), lambda: balance(plain(len(spans)), spans, ctx.blocks))


def balance(plain: Schedule, spans: list[list[Span]], plan: Callable[..., list[Block]]) -> Schedule | None:
    """A schedule of the same blocks whose loads are as even as cuts between rows can make them. None where `plain` is
    even already, or cannot be bettered.

    `spans[r]` are the tokens of rank r; `plan(q_spans, k_spans)` lists the blocks between two lists of spans. The steps
    are those of `rotation`, whoever computes their blocks, without tasks that have none."""
    world, length = len(spans), sum(end - start for start, end in spans[0])
    work, loads = {}, [0] * world  # every block where its queries are, to begin with
    for query in range(world):
        for key in range(world):
            if blocks := plan(spans[query], spans[key]):
                work[query, key] = _Work(query, key, blocks)
                loads[query] += work[query, key].pairs
    mean, before = sum(loads) / world, max(_loads(plain, work, length))
    if before <= UNEVEN * mean:
        return None
    shared = sorted((w for w in work.values() if w.query != w.key), key=lambda w: -w.pairs)
    _even_out(shared, loads, _whole)
    movable = shared
    for _ in range(2):
        _even_out(movable, loads, _any_part)
        for w in movable:
            w.settle(loads, length, WORTH * mean)
        movable = [w for w in movable if w.first < w.cut < w.last]
    if max(loads) >= before:
        return None
    return [[part for task in step for part in _parts(task, work, length)] for step in rotation(world)]


class _Work:
    """The blocks between one rank's queries and one rank's keys. `moved` of their `pairs` are computed where the keys
    are, those of the rows before `cut`; `first` and `last` enclose the rows that the blocks touch."""

    def __init__(self, query: int, key: int, blocks: list[Block]):
        self.query, self.key, self.blocks, self.moved = query, key, blocks, 0
        self.first, self.last = min(b.q.start for b in blocks), max(b.q.stop for b in blocks)
        self.cut, self.pairs = self.first, self.before(self.last)

    def before(self, row: int) -> int:
        """The pairs of the rows before `row`. Blocks are of all batch rows, or each is of one."""
        return sum(_pairs(b, min(row, b.q.stop) - b.q.start) for b in self.blocks if row > b.q.start)

    def move(self, pairs: int, loads: list[int]) -> None:
        """Let so many more of the pairs be computed where the keys are."""
        self.moved += pairs
        loads[self.query] -= pairs
        loads[self.key] += pairs

    def settle(self, loads: list[int], length: int, worth: float) -> None:
        """Cut at a row near where `moved` says, or nowhere."""
        self.cut = self._row(length, worth)
        self.move(self.before(self.cut) - self.moved, loads)

    def _row(self, length: int, worth: float) -> int:
        if self.moved < worth:
            return self.first
        if self.pairs - self.moved < worth:
            return self.last
        least = max(1, min(LEAST_ROWS, length // 16))
        unit = max(1, least // 4)
        row = bisect_left(range(self.last), self.moved, lo=self.first, key=self.before)
        row = (row + unit // 2) // unit * unit
        if row - self.first < least:
            return self.first
        return self.last if self.last - row < least else row


def _loads(schedule: Schedule, work: dict[tuple[int, int], _Work], length: int) -> list[int]:
    """Pairs that each rank computes."""
    loads = [0] * len(schedule[0])
    for step in schedule:
        for task in step:
            if w := work.get((task.query, task.key)):
                rows = task.rows(length)
                loads[task.worker] += w.before(rows.stop) - w.before(rows.start)
    return loads


def _even_out(movable: list[_Work], loads: list[int], change: Callable[[int, _Work], int]) -> None:
    """Move `change(load of the queries' owner - load of the keys' owner, work)` pairs of every work, over and over,
    until it hardly matters."""
    enough = sum(loads) // len(loads) // 1000
    for _ in range(SWEEPS):
        largest = 0
        for w in movable:
            pairs = change(loads[w.query] - loads[w.key], w)
            w.move(pairs, loads)
            largest = max(largest, abs(pairs))
        if largest <= enough:
            return


def _whole(excess: int, w: _Work) -> int:
    """All or nothing, where that brings the two ends closer together."""
    if w.moved:
        return -w.pairs if -excess > w.pairs else 0
    return w.pairs if excess > w.pairs else 0


def _any_part(excess: int, w: _Work) -> int:
    """Half of the excess, as far as this work reaches."""
    return min(max(excess // 2, -w.moved), w.pairs - w.moved)


def _parts(task: Task, work: dict[tuple[int, int], _Work], length: int) -> list[Task]:
    """A task of a rotation, in the parts that the owner of the keys and that of the queries compute."""
    w = work.get((task.query, task.key))
    if w is None:
        return []
    parts = []
    if w.cut > w.first:
        parts.append(Task(w.key, w.query, w.key, Fraction(w.first, length), Fraction(w.cut, length)))
    if w.cut < w.last:
        parts.append(replace(task, start=Fraction(w.cut, length)) if parts else task)
    return parts


def _pairs(block: Block, rows: int) -> int:
    """(query, key) pairs of the first `rows` queries of a block, in one batch row of it."""
    keys, left = block.k.stop - block.k.start, block.window_left
    if block.causal or block.borders:
        borders = block.borders or (0, keys)
        documents = zip(borders, borders[1:], strict=False)
        inside = [(min(rows, end) - start, end - start) for start, end in documents if start < rows]
        if not block.causal:
            return sum(queries * length for queries, length in inside)
        return sum(_rising(queries, length if left is None else left + 1) for queries, length in inside)
    if left is None:
        return rows * keys
    queries = block.q.stop - block.q.start  # the last one sees `left + 1` keys, each one before it a key more
    return _falling(queries, left, keys) - _falling(queries - rows, left, keys)


def _rising(rows: int, most: int) -> int:
    """1 + 2 + 3 + ..., `rows` numbers, none of them above `most`."""
    low = min(rows, most)
    return low * (low + 1) // 2 + (rows - low) * most


def _falling(rows: int, left: int, keys: int) -> int:
    """Pairs of the last `rows` queries under a window at whose end a query sees `left + 1` of `keys` keys."""
    return _rising(left + rows, keys) - _rising(left, keys)
