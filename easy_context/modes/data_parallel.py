"""Plain data parallel: the base line. Every rank holds whole sequences, attention crosses no ranks, 0 bytes moved."""

from ..comm import ProcessGroupComm
from ..layout import Layout
from .base import AttentionContext, Mode
from .ring import ring_attention


class DataParallel(Mode):
    name = "data_parallel"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout()

    def attention(self, q, k, v, ctx: AttentionContext):
        return ring_attention(q, k, v, ctx, ProcessGroupComm(None), ctx.ring_spans())


MODE = DataParallel()
