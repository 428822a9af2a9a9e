"""Plain data parallel: the base line. Every rank holds whole sequences, attention crosses no ranks, 0 bytes moved."""

from ..comm import Comm, ProcessGroupComm
from ..layout import Layout
from .base import AttentionContext
from .ring import RingMode


class DataParallel(RingMode):
    name = "data_parallel"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout()

    def ring(self, ctx: AttentionContext) -> Comm:
        return ProcessGroupComm(None)


MODE = DataParallel()
