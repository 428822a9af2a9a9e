"""Attention between pieces of one sequence: first which blocks exist, then their sum.

A rank holds some spans of the sequence's queries and, at a given moment, some spans of its keys. `plan_blocks` is a
pure function that lists the kernel calls, in local indices: spans before a query span are attended whole, the span
itself causally, later ones not at all. Documents (packed sequences) and sliding windows only cut these rectangles
smaller. Of two different spans exactly one document can touch both, the one that runs across the border, so such a
block stays a plain rectangle; of a window, the rectangle's corner that no query sees is left to the kernel.

`Partial` then adds up block results in float32 (float64 for float64 inputs) through their log-sum-exp, the merge of
blockwise attention (https://arxiv.org/abs/2310.01889) in the sigmoid form, which neither overflows nor loses the
smaller part when partial maxima differ by hundreds. The backward of a block takes the *global* output and
log-sum-exp, hence gradients of blocks are summed without any rescaling (`Sum`). What is one block alone is handed on
as the kernel wrote it.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from .kernels import choose
from .kernels.merge import merge
from .layout import Span

Documents = tuple[tuple[int, ...], ...]  # per row the documents' borders: 0 < ... < sequence length


@dataclass(frozen=True)
class Block:
    """One kernel call, in local indices: rows `batch`, queries `q`, keys `k`; masks as in `kernels.base.Kernel`."""

    batch: slice
    q: slice
    k: slice
    causal: bool
    window_left: int | None = None
    borders: tuple[int, ...] | None = None


def plan_blocks(
    q_spans: Sequence[Span],
    k_spans: Sequence[Span],
    *,
    causal: bool,
    window: int | None = None,
    documents: Documents | None = None,
) -> list[Block]:
    """The blocks between query spans and key spans of one sequence, both in the order of the local tensors.

    A query span and a key span are equal, or they do not overlap. `window` w: a query sees the keys q - w < k <= q."""
    assert window is None or causal, "windows are causal"
    if documents is None and window is None:
        if list(q_spans) == list(k_spans) or not causal:  # local order is the sequence's: one call does it
            return [Block(_ALL, slice(0, _length(q_spans)), slice(0, _length(k_spans)), causal)]
        return merged(list(_pairs(q_spans, k_spans, causal, None, None, _ALL)))
    if documents is None or documents.count(documents[0]) == len(documents):
        return list(_pairs(q_spans, k_spans, causal, window, documents and documents[0], _ALL))
    return [
        block
        for row, borders in enumerate(documents)
        for block in _pairs(q_spans, k_spans, causal, window, borders, slice(row, row + 1))
    ]


_ALL = slice(None)


def _length(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in spans)


def _local(spans: Sequence[Span]):
    """Each span with the local index of its first token."""
    offset = 0
    for start, end in spans:
        yield start, end, offset
        offset += end - start


def _pairs(q_spans, k_spans, causal: bool, window: int | None, borders: tuple[int, ...] | None, batch: slice):
    for q_start, q_end, q_at in _local(q_spans):
        for k_start, k_end, k_at in _local(k_spans):
            if (q_start, q_end) == (k_start, k_end):
                cut = _borders_within(borders, q_start, q_end)
                left = None if window is None or window >= q_end - q_start else window - 1
                q, k = slice(q_at, q_at + q_end - q_start), slice(k_at, k_at + k_end - k_start)
                yield Block(batch, q, k, causal, left, cut)
                continue
            assert k_end <= q_start or q_end <= k_start, (q_spans, k_spans)
            if causal and k_start > q_start:
                continue
            cut = _rectangle((q_start, q_end), (k_start, k_end), window, borders)
            if cut is not None:
                (q_low, q_high), (k_low, k_high), left = cut
                q = slice(q_at + q_low - q_start, q_at + q_high - q_start)
                k = slice(k_at + k_low - k_start, k_at + k_high - k_start)
                yield Block(batch, q, k, False, left)


def _borders_within(borders: tuple[int, ...] | None, start: int, end: int) -> tuple[int, ...] | None:
    """Document borders inside a span, counted from its start; None where it lies within one document."""
    inner = [b - start for b in borders or () if start < b < end]
    return (0, *inner, end - start) if inner else None


def _rectangle(q: Span, k: Span, window: int | None, borders: tuple[int, ...] | None):
    """`(q, k, window_left)`: the part of two spans of which one lies before the other that sees anything, or None."""
    earlier, later = (k, q) if k < q else (q, k)
    (q_low, q_high), (k_low, k_high), left = q, k, None
    if borders is not None:
        index = bisect_right(borders, earlier[1] - 1)
        first, last = borders[index - 1], borders[index]  # the document of the earlier span's last token
        if last <= later[0]:
            return None
        (q_low, q_high), (k_low, k_high) = [(max(low, first), min(high, last)) for low, high in (q, k)]
    if window is not None:
        k_low = max(k_low, q_low - window + 1)
        q_high = min(q_high, k_high - 1 + window)
        if k_low >= k_high or q_low >= q_high:
            return None
        if q_high - 1 - k_low >= window:
            left = window - 1 + k_high - q_high
    return (q_low, q_high), (k_low, k_high), left


def merged(blocks: list[Block]) -> list[Block]:
    """Fewer, larger blocks: of plain rectangles that follow one another in the list, first neighbours along the keys
    become one, then neighbours along the queries."""
    for side in ("k", "q"):
        larger: list[Block] = []
        for block in blocks:
            if larger and _makes_one(larger[-1], block, side):
                start = getattr(larger[-1], side).start
                larger[-1] = replace(block, **{side: slice(start, getattr(block, side).stop)})
            else:
                larger.append(block)
        blocks = larger
    return blocks


def _makes_one(a: Block, b: Block, side: str) -> bool:
    """Whether `b` goes on along `side` where `a` ends, and nothing else tells them apart."""
    if any(block.causal or block.window_left is not None or block.borders for block in (a, b)):
        return False
    return getattr(a, side).stop == getattr(b, side).start and a == replace(b, **{side: getattr(a, side)})


@dataclass(frozen=True)
class Scores:
    """How a layer turns q and k into scores, and which kernel computes them (None: the fastest that can)."""

    scale: float
    softcap: float | None = None
    kernel: str | None = None


class Parts(NamedTuple):
    """What will be added up: how many results, and how many of them the row that gets most. With two, each row is
    rounded once even if the sum is held in the results' own dtype; with more, it is held in a wide one."""

    count: float
    on_a_row: float

    @classmethod
    def of(cls, rows: Iterable[slice], length: int) -> "Parts":
        """Of results of these `rows`, each in every row of the batch, where there are `length` tokens."""
        limits = [row.indices(length)[:2] for row in rows]
        changes = sorted([(start, 1) for start, _ in limits] + [(stop, -1) for _, stop in limits])
        return cls(len(limits), max(accumulate(change for _, change in changes), default=0))

    @property
    def narrow(self) -> bool:
        return self.on_a_row <= 2


UNKNOWN = Parts(math.inf, math.inf)


class Partial:
    """Attention of queries shaped like `q` `[B, S, H, D]` over blocks, added one by one. lse is `[B, H, S]`.

    A first block that covers all rows is kept as it comes, merges are written in float32 (float64), the last one, and
    all where no row is merged twice, in the dtype of `q`: none of the conversions is a pass of its own where the
    merged block covers all rows."""

    def __init__(self, q: torch.Tensor, parts: Parts):
        self.shape, self.dtype, self.parts, self.missing = q.shape, q.dtype, parts, parts.count
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, batch: slice = slice(None), q: slice = slice(None)) -> None:
        """Merge a block's `(out, lse)` into rows `batch`, queries `q`."""
        self.missing -= 1
        whole = out.shape == self.shape
        if self.out is None and whole:
            self.out, self.lse = out, lse
            return
        meanwhile = self.dtype if self.parts.narrow else lse.dtype
        if self.out is None:
            self.out = out.new_zeros(self.shape, dtype=meanwhile)
            self.lse = lse.new_full((self.shape[0], self.shape[2], self.shape[1]), -torch.inf)
        into = _room(self.out, meanwhile if self.missing else self.dtype, whole)
        merge(self.out[batch, q], self.lse[batch, :, q], out, lse, into[batch, q])
        self.out = into

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)`, out in the dtype of `q`. At least one block was added."""
        assert self.out is not None, "no block reached these queries"
        assert self.missing == 0, self.missing
        return self.out, self.lse


def attend(q, k, v, blocks: Sequence[Block], partial: Partial, scores: Scores) -> None:
    """Compute `blocks` of q `[B, S_q, H, D]` against k, v `[B, S_k, H_kv, D]` and merge them into `partial`."""
    for b in blocks:
        qkv = q[b.batch, b.q], k[b.batch, b.k], v[b.batch, b.k]
        kernel, how = _call(b, *qkv[:2], scores)
        partial.add(*kernel.forward(*qkv, scale=scores.scale, **how), b.batch, b.q)


BlockGradients = tuple[Block, tuple[torch.Tensor, ...]]  # dq, dk, dv of a block's queries and keys


def attend_backward(dout, q, k, v, out, lse, blocks: Sequence[Block], scores: Scores) -> list[BlockGradients]:
    """The gradients of each of `blocks`; `out` and `lse` are global. `add_gradients` puts them where they belong."""
    return [_block_backward(b, dout, q, k, v, out, lse, scores) for b in blocks]


def _block_backward(b: Block, dout, q, k, v, out, lse, scores: Scores) -> BlockGradients:
    rows = b.batch, b.q
    qkv = q[rows], k[b.batch, b.k], v[b.batch, b.k]
    kernel, how = _call(b, *qkv[:2], scores)
    return b, kernel.backward(dout[rows], *qkv, out[rows], lse[b.batch, :, b.q], scale=scores.scale, **how)


class Sum:
    """Parts of a gradient, shaped like `like` `[B, S, heads, D]`, added up in float32 (float64 for float64), in place
    in `total` where there is one. A first part that covers all of it is kept as it comes; the last of `parts`, and all
    where no row is added to twice, are added into the dtype of `like` right away. Without `parts` the sum stays wide
    until `result`."""

    def __init__(self, like: torch.Tensor, parts: Parts = UNKNOWN, total: torch.Tensor | None = None):
        self.like, self.parts, self.missing, self.total = like, parts, parts.count, total

    def add(self, part: torch.Tensor, batch: slice = slice(None), rows: slice = slice(None)) -> None:
        """Add `part` to rows `batch`, tokens `rows`."""
        self.missing -= 1
        whole = part.shape == self.like.shape
        if self.total is None and whole:
            self.total = part
            return
        narrow = self.like.dtype
        meanwhile = narrow if self.parts.narrow else torch.promote_types(narrow, torch.float32)
        if self.total is None:
            self.total = self.like.new_zeros(self.like.shape, dtype=meanwhile)
        if self.missing:
            self.total = self.total.to(meanwhile)  # two halves would be added as halves
        into = _room(self.total, meanwhile if self.missing else narrow, whole)
        torch.add(self.total[batch, rows], part, out=into[batch, rows])
        self.total = into

    def result(self) -> torch.Tensor:
        """In the dtype of `like`; zeros where nothing was added."""
        assert self.missing in (0, math.inf), self.missing
        return torch.zeros_like(self.like) if self.total is None else self.total.to(self.like.dtype)


def _room(total: torch.Tensor, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """Memory in `dtype` for the next step of a running result: that of `total` itself where it has this dtype. Else new
    memory, into which `total` is copied, unless the next step writes the `whole` of it."""
    if total.dtype == dtype:
        return total
    return torch.empty_like(total, dtype=dtype) if whole else total.to(dtype)


def add_gradients(gradients: list[BlockGradients], dq: Sum, dk: Sum, dv: Sum) -> None:
    """Put the gradients of blocks of q, k, v where they belong."""
    for b, parts in gradients:
        for total, rows, part in zip((dq, dk, dv), (b.q, b.k, b.k), parts, strict=True):
            total.add(part, b.batch, rows)


def _call(b: Block, q: torch.Tensor, k: torch.Tensor, scores: Scores):
    masks = {"window_left": b.window_left, "softcap": scores.softcap, "borders": b.borders}
    how = {"causal": b.causal, **{name: value for name, value in masks.items() if value is not None}}
    return choose(q, k, name=scores.kernel, **how), how
