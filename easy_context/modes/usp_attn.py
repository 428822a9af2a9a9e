"""USP: Ulysses inside a ring (https://arxiv.org/abs/2405.07719).

A group of `ring * ulysses` ranks. An all-to-all over the `ulysses` neighbours trades sequence for heads (fast links,
at most as many ranks as heads), a zigzag ring over the `ring` groups does the rest (slow links, exchange hidden behind
compute, any number of ranks). ring = 1 is Ulysses, ulysses = 1 is zigzag ring attention.

Bytes per layer: those of `ulysses_attn.py` with N = ulysses, plus those of `ring.py` with N = ring and the KV heads of
one rank: H_kv / ulysses, or, where uneven heads are paired by copying, one for every query head. Choose it when there
are more ranks than heads, or several nodes: `ring_degree` = number of nodes.
"""

from ..comm import Comm
from ..layout import Layout
from ..mesh import split_degrees
from .base import AttentionContext
from .ulysses_attn import HeadsMode


class UspAttention(HeadsMode):
    name = "usp_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        ring, ulysses = split_degrees(sp_size, ring_degree)
        return Layout(ring=ring, ulysses=ulysses, zigzag=True)

    def heads(self, ctx: AttentionContext) -> Comm:
        return ctx.ulysses

    def ring(self, ctx: AttentionContext) -> Comm:
        return ctx.ring


MODE = UspAttention()
