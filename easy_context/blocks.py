"""Attention between pieces of one sequence: first which blocks exist, then their sum.

A rank holds some spans of the sequence's queries and, at a given moment, some spans of its keys. `plan_blocks` is a
pure function that lists the rectangles a kernel has to compute, in local indices: spans before a query span are
attended whole, the span itself causally, later ones not at all. Documents (packed sequences) only cut rectangles
smaller: of a query span and an earlier key span exactly one document can touch both, the one that runs across the
border, so its block is again a plain rectangle and needs no mask.

`Partial` then adds up block results in float32 (float64 for float64 inputs) through their log-sum-exp, the merge of
blockwise attention (https://arxiv.org/abs/2310.01889) in the sigmoid form, which neither overflows nor loses the
smaller part when partial maxima differ by hundreds. The backward of a block takes the *global* output and
log-sum-exp, hence gradients of blocks are summed without any rescaling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .layout import Span

Documents = tuple[tuple[int, ...], ...]  # per row: 0 = first start < ... < sequence length, the documents' borders


@dataclass(frozen=True)
class Block:
    """One kernel call: rows `batch`, queries `q` and keys `k` in local indices; causal only between equal ranges."""

    batch: slice
    q: slice
    k: slice
    causal: bool


def plan_blocks(
    q_spans: Sequence[Span], k_spans: Sequence[Span], *, causal: bool, documents: Documents | None = None
) -> list[Block]:
    """The blocks between query spans and key spans of one sequence, each ascending, in the order in which they lie in
    the local tensors. A query span and a key span are equal, or they do not overlap."""
    if documents is not None:
        rows = [(slice(None), documents[0])] if len(set(documents)) == 1 else _rows(documents)
        return [Block(batch, q, k, c) for batch, borders in rows for q, k, c in _cut(q_spans, k_spans, causal, borders)]
    if not causal:
        return [Block(slice(None), slice(0, _length(q_spans)), slice(0, _length(k_spans)), False)]
    if list(q_spans) == list(k_spans):  # local order is the order of the sequence: one causal call does it
        return [Block(slice(None), slice(0, _length(q_spans)), slice(0, _length(k_spans)), True)]
    return _merge(_rectangles(q_spans, k_spans))


def _length(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in spans)


def _rows(documents: Documents):
    return [(slice(row, row + 1), borders) for row, borders in enumerate(documents)]


def _local(spans: Sequence[Span]):
    """Each span with the local index of its first token."""
    offset = 0
    for start, end in spans:
        yield start, end, offset
        offset += end - start


def _rectangles(q_spans, k_spans) -> list[Block]:
    blocks = []
    for q_start, q_end, q_at in _local(q_spans):
        for k_start, k_end, k_at in _local(k_spans):
            same = (q_start, q_end) == (k_start, k_end)
            assert same or k_end <= q_start or k_start >= q_end, (q_spans, k_spans)
            if same or k_end <= q_start:
                q = slice(q_at, q_at + q_end - q_start)
                k = slice(k_at, k_at + k_end - k_start)
                blocks.append(Block(slice(None), q, k, same))
    return blocks


def _merge(blocks: list[Block]) -> list[Block]:
    """Fewer, larger rectangles: first neighbours along the keys, then along the queries."""
    for side, other in (("k", "q"), ("q", "k")):
        merged: list[Block] = []
        for block in blocks:
            last = merged[-1] if merged else None
            mergeable = last is not None and not (block.causal or last.causal)
            if (
                mergeable
                and getattr(last, other) == getattr(block, other)
                and getattr(last, side).stop == getattr(block, side).start
            ):
                joined = slice(getattr(last, side).start, getattr(block, side).stop)
                merged[-1] = Block(
                    block.batch,
                    joined if side == "q" else block.q,
                    joined if side == "k" else block.k,
                    False,
                )
            else:
                merged.append(block)
        blocks = merged
    return blocks


def _cut(q_spans, k_spans, causal: bool, borders: tuple[int, ...]):
    """`(q, k, causal)` of every rectangle that lies within one document."""
    for first, last in zip(borders, borders[1:], strict=False):
        for q_start, q_end, q_at in _local(q_spans):
            q_low, q_high = max(q_start, first), min(q_end, last)
            if q_low >= q_high:
                continue
            for k_start, k_end, k_at in _local(k_spans):
                k_low, k_high = max(k_start, first), min(k_end, last)
                if k_low >= k_high or (causal and k_low >= q_high):
                    continue
                q = slice(q_at + q_low - q_start, q_at + q_high - q_start)
                k = slice(k_at + k_low - k_start, k_at + k_high - k_start)
                yield q, k, causal and (k_low, k_high) == (q_low, q_high)


class Partial:
    """Attention of queries shaped like `q` `[B, S, H, D]` over the blocks added so far. lse is `[B, H, S]`."""

    def __init__(self, q: torch.Tensor):
        self.shape, self.dtype = q.shape, q.dtype
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, batch: slice = slice(None), q: slice = slice(None)) -> None:
        """Merge a block's `(out, lse)` into rows `batch`, queries `q`."""
        if self.out is None and out.shape == self.shape:  # the first block covers all rows: nothing to merge yet
            self.out, self.lse = out, lse
            return
        if self.out is None:
            self.out = out.new_zeros(self.shape, dtype=lse.dtype)
            self.lse = lse.new_full((self.shape[0], self.shape[2], self.shape[1]), -torch.inf)
        self.out = self.out.to(lse.dtype)
        merge(self.out[batch, q], self.lse[batch, :, q], out, lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)`, out in the dtype of `q`. At least one block was added."""
        assert self.out is not None, "no block reached these queries"
        return self.out.to(self.dtype), self.lse


def merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """In place: `(out, lse)` becomes the attention over both key sets. A row without keys has lse -inf, out 0."""
    weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -torch.inf, 0.0)  # [B, H, S]
    out.lerp_(block_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def attend(kernel_of, q, k, v, blocks: Sequence[Block], partial: Partial, *, scale: float) -> None:
    """Compute `blocks` of q `[B, S_q, H, D]` against k, v `[B, S_k, H_kv, D]` and merge them into `partial`."""
    for b in blocks:
        q_block, k_block, v_block = q[b.batch, b.q], k[b.batch, b.k], v[b.batch, b.k]
        kernel = kernel_of(q_block, k_block, causal=b.causal)
        partial.add(*kernel.forward(q_block, k_block, v_block, causal=b.causal, scale=scale), b.batch, b.q)


def attend_backward(kernel_of, dout, q, k, v, out, lse, blocks: Sequence[Block], dq, dk, dv, *, scale: float) -> None:
    """Add the gradients of `blocks` to dq, dk, dv (float32 or more, shapes of q, k, v); `out`, `lse` are global."""
    for b in blocks:
        q_block, k_block, v_block = q[b.batch, b.q], k[b.batch, b.k], v[b.batch, b.k]
        kernel = kernel_of(q_block, k_block, causal=b.causal)
        grads = kernel.backward(
            dout[b.batch, b.q],
            q_block,
            k_block,
            v_block,
            out[b.batch, b.q],
            lse[b.batch, :, b.q],
            causal=b.causal,
            scale=scale,
        )
        for total, where, grad in ((dq, b.q, grads[0]), (dk, b.k, grads[1]), (dv, b.k, grads[2])):
            total[b.batch, where] += grad
