"""What a layer's exchange adds to its computation, for each mode of sequence parallelism: bytes, and the seconds that
computing cannot hide.

A ring step computes while the next keys and values are on their way: only what takes longer than the computation
shows, and in the backward the last gradients' way home. The same holds for steps of a schedule (dist_flash_attn, rings
of short shards or of two ranks), of which several may be joined. Ulysses' all-to-alls come before and after attention,
so all of them show. Head groups exchange one after the other, in messages that many times smaller.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from ..modes.deal import deal_heads, most_heads
from ..modes.dist_flash_attn import schedule
from ..modes.tasks import joined, most_joined, passes_on, rotation
from .setting import Setting

Link = Callable[[float, int], float]  # bytes of a message, ranks among whom it goes around -> seconds


class Part(NamedTuple):
    """What a rank does in a step of a schedule, counted in shards.

    Attributes:
        keys_out, queries_out: keys (with values) and queries that it sends to those who compute on them.
        keys_back, queries_back: keys and queries of others, whose gradients and results it sends back.
        computed: how much of what it computes in all steps it computes in this one, from 0 to 1.
    """

    keys_out: float = 0.0
    queries_out: float = 0.0
    keys_back: float = 0.0
    queries_back: float = 0.0
    computed: float = 0.0


@dataclass(frozen=True)
class Shard:
    """What one of the ranks that share a sequence holds of it: `rows` tokens of all heads."""

    rows: float
    heads: float
    kv_heads: float
    head_size: int
    itemsize: int = 2

    @property
    def wide(self) -> int:
        """Bytes of an element of a log-sum-exp, and of the sums of gradients that travel around a ring."""
        return max(4, self.itemsize)

    @property
    def pair(self) -> float:
        """Bytes of keys and values."""
        return 2 * self.rows * self.kv_heads * self.head_size * self.itemsize

    @property
    def most(self) -> int:
        """How many steps are joined at the most."""
        return most_joined(int(self.pair))

    def in_ring(self, ulysses: int) -> "Shard":
        """What travels the ring: in USP more tokens, and as many fewer heads, those of the rank with most."""
        heads, _, kv_heads = most_heads(self.heads, self.kv_heads, ulysses)
        return replace(self, rows=self.rows * ulysses, heads=heads, kv_heads=kv_heads)

    def of_heads(self, ranks: int) -> tuple[float, float]:
        """What the first rank sends in the all-to-all of q, k and v, and in that of the output."""
        element = self.rows * self.head_size * self.itemsize
        (((first, last), _), *others) = deal_heads(self.heads, self.kv_heads, ranks)
        q = sum(end - start for (start, end), _ in others)
        kv = sum(end - start for _, (start, end) in others)
        return element * (q + 2 * kv), element * (last - first) * (ranks - 1)

    def sent(self, part: Part, backward: bool) -> tuple[float, float]:
        """Bytes for others to compute, and bytes back: each share in the inputs' dtype, log-sum-exps wide."""
        q, lse = self.rows * self.heads * self.head_size * self.itemsize, self.rows * self.heads * self.wide
        out = part.keys_out * self.pair + part.queries_out * (3 * q + lse if backward else q)
        back = part.keys_back * self.pair * backward + part.queries_back * (q if backward else q + lse)
        return out, back


def parts(mode: str, world: int, most: int) -> list[list[Part]]:
    """Per step and rank, under a causal mask: of dist_flash_attn, or of a zigzag ring whose ranks fetch from owners, in
    steps of at most `most`."""
    zigzag, steps = mode != "dist_flash_attn", []
    for tasks in joined(rotation(world), most) if zigzag else schedule(world):
        sums = [defaultdict(float) for _ in range(world)]
        for task in tasks:
            worker, supplier = sums[task.worker], sums[task.supplier]
            rows = float(task.stop - task.start)
            pairs = 0.5 if zigzag or task.key == task.query else rows
            worker["computed"] += pairs / (world / 2)
            if worker is supplier:
                continue
            if task.keys_travel:
                keys = 0.5 if zigzag and task.key < task.query else 1  # of an earlier rank, whose 2nd chunk comes later
                supplier["keys_out"] += keys
                worker["keys_back"] += keys
            else:
                supplier["queries_out"] += rows
                worker["queries_back"] += rows
        steps.append([Part(**of_rank) for of_rank in sums])
    return steps


@cache
def _kinds(mode: str, world: int, most: int) -> list[set[Part]]:
    """Per step, the different parts that its ranks have."""
    return [set(of_ranks) for of_ranks in parts(mode, world, most)]


def exposed(
    mode: str, shard: Shard, world: int, ring: int, computed: float, link: Link, *, backward: bool, again: bool = False
) -> float:
    """Seconds, forward or backward, that a rank waits which computes for `computed` seconds.

    `again`: the backward also brings q, k, v and out back into the arrangement of the mode (`Mode.restore`)."""
    if mode == "dist_flash_attn":
        return _scheduled(mode, shard, world, world, computed, link, backward)
    heads = _heads(shard, world // ring, link, backward and again)
    shard = shard.in_ring(world // ring)
    if ring == 1:
        return heads
    how = _ring if passes_on(ring, shard.most) else partial(_scheduled, mode)
    return heads + how(shard, world, ring, computed, link, backward)


def _ring(shard: Shard, world: int, ring: int, computed: float, link: Link, backward: bool) -> float:
    pair, grads, step = shard.pair, shard.pair * shard.wide / shard.itemsize, computed / ring
    keys, sums, both = link(pair, world), link(grads, world), link(pair + grads, world)
    if not backward:
        return (ring - 1) * max(0.0, keys - step)
    home = keys  # the complete gradients, in the dtype in which they are returned
    return max(0.0, keys - step) + (ring - 2) * max(0.0, both - step) + max(0.0, sums - step) + home


def _scheduled(mode: str, shard: Shard, world: int, ring: int, computed: float, link: Link, backward: bool) -> float:
    """While a step computes, what the next one needs and what the previous one produced are on their way."""
    steps = _kinds(mode, ring, shard.most)
    bytes_of = [[shard.sent(part, backward) for part in step] for step in steps]
    fetched, given = ([max(sizes[way] for sizes in step) for step in bytes_of] for way in (0, 1))
    total = link(given[-1], world)
    for at, step in enumerate(steps):
        travelling = (fetched[at + 1] if at + 1 < len(steps) else 0) + (given[at - 1] if at else 0)
        total += max(0.0, link(travelling, world) - computed * min(part.computed for part in step))
    return total


def _heads(shard: Shard, ranks: int, link: Link, again: bool) -> float:
    """q, k, v there and out back; backward dout there and dq, dk, dv back, whose sums are the same."""
    if ranks == 1:
        return 0.0
    there, back = shard.of_heads(ranks)
    return link(there, ranks) + link(back, ranks) + (link(there + back, ranks) if again else 0.0)


def seconds(setting: Setting, groups: int, computed: float, *, backward: bool, again: bool) -> float:
    """Of one layer on one rank, whose attention computes for `computed` seconds in `groups` of heads."""
    if setting.sp_size == 1:
        return 0.0
    s = setting.shape
    shard = Shard(setting.rows, s.heads // groups, max(1, s.kv_heads // groups), s.head_size)

    def link(size: float, ranks: int) -> float:
        return setting.hardware.message(size, crosses_nodes=ranks > setting.gpus_per_node)

    how = {"backward": backward, "again": again}
    return groups * exposed(setting.mode, shard, setting.sp_size, setting.ring, computed / groups, link, **how)
