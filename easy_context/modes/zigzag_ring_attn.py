"""Zigzag ring attention: a ring over balanced causal shards.

Every rank holds one chunk from the front of the sequence and its mirror image from the back, so that each step costs
every rank the same under a causal mask: half a rectangle on the own shard, then in every further step either all
queries against the first half of the keys, or the second half of the queries against all keys. Bytes: see `ring.py`.
Choose it for causal training over any number of ranks: it asks nothing of the number of heads.
"""

from ..layout import Layout
from .base import AttentionContext, Mode
from .ring import ring_attention


class ZigzagRingAttention(Mode):
    name = "zigzag_ring_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ring=sp_size, zigzag=True)

    def attention(self, q, k, v, ctx: AttentionContext):
        return ring_attention(q, k, v, ctx, ctx.sequence, ctx.ring_spans())


MODE = ZigzagRingAttention()
