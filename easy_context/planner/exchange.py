"""What a layer's exchange adds to its computation, for each mode of sequence parallelism: bytes, and the seconds that
computing cannot hide.

A ring step computes while the next keys and values are on their way: only what takes longer than the computation
shows, and in the backward the last gradients' way home. Ulysses' all-to-alls come before and after attention, so all
of them show. Head groups exchange one after the other, in messages that many times smaller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from easy_context.modes.dist_flash_attn import schedule
from easy_context.modes.ulysses_attn import deal_heads

from .setting import Setting

Link = Callable[[float, int], float]  # bytes of a message, ranks among whom it goes around -> seconds


@dataclass(frozen=True)
class Shard:
    """What one of the ranks that share a sequence holds of it: `rows` tokens of all heads."""

    rows: float
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 2

    @property
    def wide(self) -> int:
        """Bytes of an element of a log-sum-exp, and of the sums of gradients that travel around a ring."""
        return max(4, self.itemsize)

    def of_ring(self, ulysses: int = 1) -> tuple[float, float]:
        """Of a step: keys and values, and sums of their gradients. In USP of more tokens, and as many fewer heads."""
        elements = 2 * self.rows * self.head_size * max(self.kv_heads, ulysses)
        return elements * self.itemsize, elements * self.wide

    def of_heads(self, ranks: int) -> tuple[float, float]:
        """What the first rank sends in the all-to-all of q, k and v, and in that of the output."""
        element = self.rows * self.head_size * self.itemsize
        (((first, last), _), *others) = deal_heads(self.heads, self.kv_heads, ranks)
        q = sum(end - start for (start, end), _ in others)
        kv = sum(end - start for _, (start, end) in others)
        return element * (q + 2 * kv), element * (last - first) * (ranks - 1)

    def of_schedule(self, world: int, backward: bool) -> tuple[list[float], list[float]]:
        """Per step, the most that a rank sends for others to compute, and the most that a rank sends back: each share
        in the inputs' dtype, log-sum-exps wide."""
        q, lse = self.rows * self.heads * self.head_size, self.rows * self.heads
        kv = 2 * self.rows * self.kv_heads * self.head_size
        fetched, given = [], []
        for step in _messages(world):
            sent, back = [0.0], [0.0]
            for part, keys in step:
                if keys:
                    sent.append(kv * self.itemsize)
                    back.append(kv * self.itemsize * backward)
                else:
                    sent.append(part * (q * self.itemsize * (3 if backward else 1) + lse * self.wide * backward))
                    back.append(part * (q * self.itemsize + lse * self.wide * (not backward)))
            fetched.append(max(sent))
            given.append(max(back))
        return fetched, given


@cache
def _messages(world: int) -> list[set[tuple[float, bool]]]:
    """dist_flash_attn's, by step: the share of a rank's queries that a task has, and whether keys travel to them."""
    return [
        {(1 if t.half is None else 0.5, t.query == t.worker) for t in step if t.worker != t.supplier}
        for step in schedule(world)
    ]


def exposed(
    mode: str, shard: Shard, world: int, ring: int, computed: float, link: Link, *, backward: bool, again: bool = False
) -> float:
    """Seconds, forward or backward, that a rank waits which computes for `computed` seconds.

    `again`: the backward also brings q, k, v and out back into the arrangement of the mode (`Mode.restore`)."""
    if mode == "dist_flash_attn":
        return _scheduled(shard, world, computed, link, backward)
    return _heads(shard, world // ring, link, backward and again) + _ring(shard, world, ring, computed, link, backward)


def _ring(shard: Shard, world: int, ring: int, computed: float, link: Link, backward: bool) -> float:
    if ring == 1:
        return 0.0
    pair, grads = shard.of_ring(world // ring)
    keys, sums, both, step = link(pair, world), link(grads, world), link(pair + grads, world), computed / ring
    if not backward:
        return (ring - 1) * max(0.0, keys - step)
    home = keys  # the complete gradients, in the dtype in which they are returned
    return max(0.0, keys - step) + (ring - 2) * max(0.0, both - step) + max(0.0, sums - step) + home


def _heads(shard: Shard, ranks: int, link: Link, again: bool) -> float:
    """q, k, v there and out back; backward dout there and dq, dk, dv back."""
    if ranks == 1:
        return 0.0
    there, back = shard.of_heads(ranks)
    return link(there, ranks) + link(back, ranks) + (link(there + back, ranks) if again else 0.0)


def _scheduled(shard: Shard, world: int, computed: float, link: Link, backward: bool) -> float:
    """While a step computes, what the next one needs and what the previous one produced are on their way."""
    fetched, given = shard.of_schedule(world, backward)
    total = link(given[-1], world)
    for step in range(len(fetched)):
        share = 2 if 0 < step < world / 2 else 1  # the own block is half masked, the last one shared
        travelling = (fetched[step + 1] if step + 1 < len(fetched) else 0) + (given[step - 1] if step else 0)
        total += max(0.0, link(travelling, world) - computed * share / world)
    return total


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
