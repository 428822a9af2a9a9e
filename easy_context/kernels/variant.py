"""What a call computes beyond softmax(scale q k^T) v: which keys a query sees, and whether scores are capped.

Windows follow flash-attention's convention (https://github.com/Dao-AILab/flash-attention): with the last query
aligned to the last key, query i sees key j only if i + (S_k - S_q) - j <= window_left. As window_left >= 0, every
query sees at least the last key: queries that the window leaves without any have to be cut off beforehand.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Variant(NamedTuple):
    """One way of attending; None stands for "no such thing".

    Attributes:
        causal: no key after the query; last query and last key aligned.
        window_left: keys that a query sees to the left of its own, in tokens.
        softcap: scores become softcap * tanh(scale * score / softcap).
        borders: 0 = b0 < b1 < ... < bn = S of packed documents, the same in all batch rows; queries see keys of their
            own document only, where causality and window apply as in a sequence of its own.
    """

    causal: bool
    window_left: int | None = None
    softcap: float | None = None
    borders: tuple[int, ...] | None = None

    def wrong(self, q_length: int, k_length: int) -> str | None:
        """Why this makes no sense for so many queries and keys, or None."""
        if self.causal and q_length != k_length:
            return f"causal attention needs as many queries as keys, not {q_length} and {k_length}"
        if self.window_left is not None and self.window_left < 0:
            return f"window_left must be at least 0, or None for no window, not {self.window_left}"
        if self.softcap is not None and not self.softcap > 0:
            return f"softcap must be positive, or None for no cap, not {self.softcap}"
        if self.borders is None:
            return None
        if q_length != k_length:
            return f"packed documents need as many queries as keys, not {q_length} and {k_length}"
        if self.borders[:1] != (0,) or self.borders[-1] != k_length or document_lengths(self.borders)[0] < 1:
            return f"borders of documents must ascend from 0 to the {k_length} keys"
        return None

    def simplified(self, k_length: int) -> "Variant":
        """The same attention without a window that hides no key and borders of a single document."""
        borders = self.borders if self.borders is not None and len(self.borders) > 2 else None
        longest = k_length if borders is None else document_lengths(borders)[1]
        window = self.window_left if self.window_left is not None and self.window_left < longest - 1 else None
        return Variant(self.causal, window, self.softcap, borders)

    def hidden(self, q_length: int, k_length: int, device: torch.device) -> Tensor | None:
        """`[S_q, S_k]`, True where a query does not see a key, borders aside; None where it sees all."""
        if not self.causal and self.window_left is None:
            return None
        queries = torch.arange(k_length - q_length, k_length, device=device).unsqueeze(1)
        distance = queries - torch.arange(k_length, device=device)
        if self.window_left is None:
            return distance < 0
        too_far = distance > self.window_left
        return too_far | (distance < 0) if self.causal else too_far


class Piece(NamedTuple):
    """One of several calls that make up one: some rows, a range that holds all keys they see, and what hides the rest
    of it. Only here can `causal` stand with fewer rows than keys."""

    rows: slice
    keys: slice
    variant: Variant


def row_tiles(q_length: int, k_length: int, variant: Variant, step: int) -> list[Piece]:
    """Attention without borders in pieces of `step` rows, each with no more keys than its rows see."""
    ahead, window, pieces = k_length - q_length, variant.window_left, []
    for start in range(0, q_length, step):
        end = min(start + step, q_length)
        last = end + ahead if variant.causal else k_length
        first = 0 if window is None else max(0, start + ahead - window)
        left = None if window is None else window + last - (end + ahead)  # counted from the range's last key
        tile = variant._replace(window_left=left).simplified(last - first)
        pieces.append(Piece(slice(start, end), slice(first, last), tile))
    return pieces


@functools.lru_cache(maxsize=256)  # the same in every layer
def document_lengths(borders: tuple[int, ...]) -> tuple[int, int]:
    """The shortest and the longest document, in tokens."""
    lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    return min(lengths, default=0), max(lengths, default=0)
