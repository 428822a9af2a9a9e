"""Heads dealt to the ranks of a group, and the messages that trade sequence for heads and back.

Query heads are dealt out in contiguous, nearly equal ranges, whatever their number (6 heads on 4 ranks: 2, 2, 1, 1);
each rank receives exactly the KV heads that its query heads use, so a KV head that several ranks need is replicated,
and its gradient is summed when it comes back. Nothing is padded.

A message holds one token after the other, and of each token the heads of q, k and v side by side. So what arrives from
all ranks is, at B = 1, `[S, own heads of q, k and v, D]` already: q, k and v are views of it, which kernels read as
they are. Copies: one on the way out, none on arrival (one for B > 1); back to the sequence one on arrival, and one on
the way out (none for the output at B = 1, which is a single tensor).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from ..comm import Comm
from ..kernels.base import lse_dtype

HeadRange = tuple[int, int]
Share = tuple[HeadRange, HeadRange]  # a rank's query heads, and the KV heads that they use


def deal_heads(heads: int, kv_heads: int, ranks: int) -> list[Share]:
    """Per rank the range of query heads that it computes, and the range of KV heads that these use. Pure."""
    group = heads // kv_heads
    deals, start = [], 0
    for rank in range(ranks):
        end = start + heads // ranks + (rank < heads % ranks)
        deals.append(((start, end), (start // group, -(-end // group)) if end > start else (0, 0)))
        start = end
    return deals


def kv_of_each_query(share: Share, group: int) -> list[int] | None:
    """For each own query head the local index of its KV head, where the own heads do not form equal groups of
    neighbours (then a kernel's own grouping would pair them wrongly); None where they do."""
    (q_start, q_end), (kv_start, kv_end) = share
    pairing = [head // group - kv_start for head in range(q_start, q_end)]
    count = kv_end - kv_start
    even = (
        count and len(pairing) % count == 0 and pairing == [i // (len(pairing) // count) for i in range(len(pairing))]
    )
    return None if even or not pairing else pairing


@cache
def most_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int, int]:
    """Of the ranks with most of them: query heads, KV heads, and KV heads as kernels get them, a copy for each query
    head where some rank has to pair them so. Pure."""
    shares = deal_heads(heads, kv_heads, ranks)
    own, own_kv = (max(end - start for start, end in ranges) for ranges in zip(*shares, strict=True))
    copied = any(kv_of_each_query(share, heads // kv_heads) for share in shares)
    return own, own_kv, own if copied else own_kv


class Pieces(NamedTuple):
    """Heads of a piece of the sequence by the rank they come from: `parts[r]`, `[B, S_local, heads, D]`, are the heads
    `ranges[r]`."""

    ranges: Sequence[HeadRange]
    parts: Sequence[torch.Tensor]


class Deal:
    """The heads of one call, dealt to the ranks of `comm`, two or more."""

    def __init__(self, comm: Comm, heads: int, kv_heads: int):
        self.comm = comm
        self.shares = deal_heads(heads, kv_heads, comm.size)
        self.pairing = kv_of_each_query(self.shares[comm.rank], heads // kv_heads)

    def to_heads(self, q=(), kv=()) -> list[torch.Tensor]:
        """All heads of a piece of the sequence, `[B, S_local, H | H_kv, D]`, to own heads of it all, `[B, S, own, D]`:
        one message, a copy out, and none in but for B > 1. What is returned are views of one tensor."""
        if _of_two_sequences(q, kv):
            return self.to_heads(q=q) + self.to_heads(kv=kv)
        tensors, ranges, size = [*q, *kv], self._ranges(q, kv), self.comm.size
        batch, length, _, head_size = tensors[0].shape
        numbers = _numbers(ranges)
        sizes = [batch * length * n * head_size for n in numbers]
        received = self.comm.all_to_all(_message(tensors, ranges), sizes, [sizes[self.comm.rank]] * size)
        by_rank = received.view(size, batch, length, numbers[self.comm.rank], head_size)
        widths = [end - start for start, end in ranges[self.comm.rank]]
        return list(by_rank.transpose(0, 1).flatten(1, 2).split(widths, dim=2))

    def to_sequence(self, q=(), kv=()) -> list[Pieces]:
        """The transpose of `to_heads`: one message, a copy out (none of a single contiguous tensor with B = 1), and one
        in, which is left to `joined`: first the caller can let go of what it sent."""
        if _of_two_sequences(q, kv):
            return self.to_sequence(q=q) + self.to_sequence(kv=kv)
        tensors, ranges, size = [*q, *kv], self._ranges(q, kv), self.comm.size
        batch, length, head_size = tensors[0].shape[0], tensors[0].shape[1] // size, tensors[0].shape[3]
        pieces = [t.unflatten(1, (size, length)).transpose(0, 1) for t in tensors]
        whole = torch.cat(_in_words(*pieces), dim=3).view(pieces[0].dtype) if len(pieces) > 1 else pieces[0]
        send = whole.reshape(-1)
        numbers = _numbers(ranges)
        sizes = [batch * length * n * head_size for n in numbers]
        received = self.comm.all_to_all(send, [send.numel() // size] * size, sizes)
        parts = [
            message.view(batch, length, n, head_size).split([end - start for start, end in of_rank], dim=2)
            for message, n, of_rank in zip(received.split(sizes), numbers, ranges, strict=True)
        ]
        return [Pieces(*of_one) for of_one in zip(zip(*ranges, strict=True), zip(*parts, strict=True), strict=True)]

    def paired(self, k: torch.Tensor, v: torch.Tensor):
        """Own k and v as a kernel pairs them with the own query heads: repeated where these form no equal groups."""
        if self.pairing is None:
            return k, v
        return tuple(torch.stack([t[:, :, shared] for shared in self.pairing], dim=2) for t in (k, v))

    def unpaired(self, dk: torch.Tensor, dv: torch.Tensor):
        """The transpose of `paired`."""
        return (dk, dv) if self.pairing is None else [_summed(grad, self.pairing) for grad in (dk, dv)]

    def _ranges(self, q, kv) -> list[list[HeadRange]]:
        """Per rank, the heads that it gets of each tensor."""
        return [[of_q] * len(q) + [of_kv] * len(kv) for of_q, of_kv in self.shares]


def joined(pieces: Pieces) -> torch.Tensor:
    """All heads of a piece of the sequence, `[B, S_local, H | H_kv, D]`, side by side. Heads that several ranks
    computed are summed, in float32 or more."""
    ranges, parts = pieces
    like, heads = parts[0], max(end for _, end in ranges)
    if sum(end - start for start, end in ranges) == heads:
        return torch.cat(_in_words(*parts), dim=2).view(like.dtype)
    whole = like.new_zeros(*like.shape[:2], heads, like.shape[3], dtype=lse_dtype(like))
    for (start, end), part in zip(ranges, parts, strict=True):
        whole[:, :, start:end].add_(part)
    return whole.to(like.dtype)


def _message(tensors: Sequence[torch.Tensor], ranges: list[list[HeadRange]]) -> torch.Tensor:
    """Flat, for one rank after the other: of each token the heads `ranges[rank]` of the tensors."""
    batch, length, _, head_size = tensors[0].shape
    numbers = _numbers(ranges)
    whole = tensors[0].new_empty(batch * length * sum(numbers) * head_size)
    of_ranks = whole.split([batch * length * n * head_size for n in numbers])
    for message, n, of_rank in zip(of_ranks, numbers, ranges, strict=True):
        parts = [t[:, :, slice(*r)] for t, r in zip(tensors, of_rank, strict=True)]
        room, *parts = _in_words(message.view(batch, length, n, head_size), *parts)
        torch.cat(parts, dim=2, out=room)
    return whole


def _numbers(ranges: list[list[HeadRange]]) -> list[int]:
    """Per rank, how many heads that are."""
    return [sum(end - start for start, end in of_rank) for of_rank in ranges]


def _in_words(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same memory in elements of 8 bytes where all of the tensors can be seen so: GPUs copy strided tensors an
    element at a time."""

    def fits(t: torch.Tensor) -> bool:
        strides = [size * t.element_size() % 8 for size in (t.shape[-1], t.storage_offset(), *t.stride()[:-1])]
        return t.dtype == tensors[0].dtype and t.stride(-1) == 1 and not any(strides)

    return [t.view(torch.int64) for t in tensors] if all(map(fits, tensors)) else tensors


def _of_two_sequences(q, kv) -> bool:
    """Cross-attention: a message holds tokens of one sequence."""
    return bool(q and kv) and q[0].shape[1] != kv[0].shape[1]


def _summed(grad: torch.Tensor, pairing: list[int]) -> torch.Tensor:
    """`[B, S, len(pairing), D]` -> `[B, S, own KV heads, D]`, the sum over the query heads that share one."""
    total = grad.new_zeros(*grad.shape[:2], pairing[-1] + 1, grad.shape[3], dtype=lse_dtype(grad))
    for head, shared in enumerate(pairing):
        total[:, :, shared].add_(grad[:, :, head])
    return total.to(grad.dtype)
