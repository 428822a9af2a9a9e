"""Zigzag ring attention: a ring over balanced causal shards.

Every rank holds one chunk from the front of the sequence and its mirror image from the back, so that each step costs
every rank the same under a causal mask: half a rectangle on the own shard, then in every further step either all
queries against the first half of the keys, or the second half of the queries against all keys. Where shards are short
the keys of several ranks come at once, and of each of the two kinds one rectangle is left. Bytes, and what hides them:
see `ring.py`. Choose it for causal training over any number of ranks: it asks nothing of the number of heads.
"""

from ..comm import Comm
from ..layout import Layout
from .base import AttentionContext
from .ring import RingMode


class ZigzagRingAttention(RingMode):
    name = "zigzag_ring_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ring=sp_size, zigzag=True)

    def ring(self, ctx: AttentionContext) -> Comm:
        return ctx.sequence


MODE = ZigzagRingAttention()
