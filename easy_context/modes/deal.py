"""Heads dealt to the ranks of a group, and the messages that trade sequence for heads and back.

Query heads are dealt out in contiguous, nearly equal ranges, whatever their number (6 heads on 4 ranks: 2, 2, 1, 1);
each rank receives exactly the KV heads that its query heads use, so a KV head that several ranks need is replicated,
and its gradient is summed when it comes back. Nothing is padded.

A message holds one token after the other, and of each token the heads of q, k and v side by side. So what arrives from
all ranks is, at B = 1, `[S, own heads of q, k and v, D]` already: q, k and v are views of it, which kernels read as
they are. Copies: one on the way out, none on arrival (one for B > 1); back to the sequence one on arrival, and one on
the way out (none for the output at B = 1, which is a single tensor).

Where messages are large, every rank's own heads are cut into equal chunks of whole KV heads with their query heads, and
each chunk has a message of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..comm import Comm, Pending
from ..kernels.base import lse_dtype

# Bytes of q, k and v that a rank sends of a chunk, at least. Two H200 exchange 64 MiB at 264 GB/s, 256 MiB at 301: of
# the 192 MiB of 32K tokens a GPU (32 query and 8 KV heads of 128 in bf16) 0.7 ms show whole and 0.4 ms in two chunks,
# and again as much of each of the three other exchanges of a layer. Each chunk costs the host 3 ms of launches a layer:
# at 32K two chunks take as long as one on NVLink, four 2% longer, and at 8K two take a fifth longer than one
# (benchmarks/results/h200x2_nccl_chunks.md).
CHUNK_BYTES = 2**26

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


def count_chunks(kv_heads: int, ranks: int, sent: int) -> int:
    """Into how many chunks all ranks cut their own heads, where each of them sends `sent` bytes of q, k and v: one
    where KV heads do not come out even. Pure."""
    own, uneven = divmod(kv_heads, ranks)
    if uneven:
        return 1
    return max(n for n in range(1, own + 1) if n == 1 or (own % n == 0 and sent >= n * CHUNK_BYTES))


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


class Coming(NamedTuple):
    """Heads of a piece of the sequence on their way: `parts[r]`, `[B, S_local, heads, D]`, are the heads `ranges[r]`,
    to be read behind `pending`."""

    pending: Pending
    ranges: Sequence[HeadRange]
    parts: Sequence[torch.Tensor]


class Deal:
    """The heads of one call, dealt to the ranks of `comm`, two or more, and cut into `chunks`."""

    def __init__(self, comm: Comm, heads: int, kv_heads: int, chunks: int):
        self.comm = comm
        shares = deal_heads(heads, kv_heads, comm.size)
        self.chunks = [[_cut(share, at, chunks) for share in shares] for at in range(chunks)]
        self.pairing = kv_of_each_query(shares[comm.rank], heads // kv_heads)

    def to_heads(self, q=(), kv=()) -> tuple[list[torch.Tensor], list[Pending]]:
        """All heads of a piece of the sequence, `[B, S_local, H | H_kv, D]`, to own heads of it all: one copy out, a
        message a chunk, and no copy in but for B > 1.

        Returns tensors `[chunks, B, S, own / chunks, D]`, views of one, and what to wait for before reading their first
        chunk, before the second, and so on: all are on their way."""
        if _of_two_sequences(q, kv):
            (own_q, of_q), (own_kv, of_kv) = self.to_heads(q=q), self.to_heads(kv=kv)
            return own_q + own_kv, [_Both(*pair) for pair in zip(of_q, of_kv, strict=True)]
        tensors, ranges = [*q, *kv], [_ranges(shares, q, kv) for shares in self.chunks]
        batch, length, _, head_size = tensors[0].shape
        widths = [end - start for start, end in ranges[0][self.comm.rank]]
        own = tensors[0].new_empty(len(ranges), batch, self.comm.size, length, sum(widths), head_size)
        pending = [self._fetch(tensors, *chunk) for chunk in zip(ranges, own, strict=True)]
        return list(own.flatten(2, 3).split(widths, dim=3)), pending

    def _fetch(self, tensors: list[torch.Tensor], ranges: list[list[HeadRange]], own: torch.Tensor) -> Pending:
        """Send each rank its `ranges` of the tensors' heads, and receive `own`, `[B, ranks, S_local, heads, D]`."""
        batch, _, length, number, head_size = own.shape
        numbers = _numbers(ranges)
        sizes = [batch * length * n * head_size for n in numbers]
        send = own.new_empty(sum(sizes))
        for message, n, of_rank in zip(send.split(sizes), numbers, ranges, strict=True):
            parts = [t[:, :, slice(*r)] for t, r in zip(tensors, of_rank, strict=True)]
            room, *parts = _in_words(message.view(batch, length, n, head_size), *parts)
            torch.cat(parts, dim=2, out=room)
        by_rank = own.transpose(0, 1)
        received = by_rank if batch == 1 else torch.empty_like(by_rank, memory_format=torch.contiguous_format)
        pending = self.comm.all_to_all(
            send, received.view(-1), sizes, [batch * length * number * head_size] * len(sizes)
        )
        return pending if batch == 1 else _Sorted(pending, received, by_rank)

    def to_sequence(self, chunk: int, q=(), kv=()) -> list[Coming]:
        """The transpose of `to_heads`, for tensors `[B, S, own / chunks, D]` of one chunk: one copy out (none of a
        single contiguous tensor with B = 1) and one message. `joined` puts the chunks together."""
        if _of_two_sequences(q, kv):
            return self.to_sequence(chunk, q=q) + self.to_sequence(chunk, kv=kv)
        tensors, ranges, size = [*q, *kv], _ranges(self.chunks[chunk], q, kv), self.comm.size
        batch, length, head_size = tensors[0].shape[0], tensors[0].shape[1] // size, tensors[0].shape[3]
        pieces = [t.unflatten(1, (size, length)).transpose(0, 1) for t in tensors]
        whole = torch.cat(_in_words(*pieces), dim=3).view(pieces[0].dtype) if len(pieces) > 1 else pieces[0]
        send = whole.reshape(-1)
        numbers = _numbers(ranges)
        sizes = [batch * length * n * head_size for n in numbers]
        received = send.new_empty(sum(sizes))
        pending = self.comm.all_to_all(send, received, [send.numel() // size] * size, sizes)
        parts = [
            message.view(batch, length, n, head_size).split([end - start for start, end in of_rank], dim=2)
            for message, n, of_rank in zip(received.split(sizes), numbers, ranges, strict=True)
        ]
        return [
            Coming(pending, *of_one) for of_one in zip(zip(*ranges, strict=True), zip(*parts, strict=True), strict=True)
        ]

    def paired(self, k: torch.Tensor, v: torch.Tensor):
        """Own k and v as a kernel pairs them with the own query heads: repeated where these form no equal groups."""
        if self.pairing is None:
            return k, v
        return tuple(torch.stack([t[:, :, shared] for shared in self.pairing], dim=2) for t in (k, v))

    def unpaired(self, dk: torch.Tensor, dv: torch.Tensor):
        """The transpose of `paired`."""
        return (dk, dv) if self.pairing is None else [_summed(grad, self.pairing) for grad in (dk, dv)]


def joined(chunks: Sequence[Coming]) -> torch.Tensor:
    """All heads of a piece of the sequence, `[B, S_local, H | H_kv, D]`, each chunk copied behind its arrival, while
    later ones are on their way. Heads that several ranks computed are summed, in float32 or more."""
    like = chunks[0].parts[0]
    ranges = [r for chunk in chunks for r in chunk.ranges]
    heads = max(end for _, end in ranges)
    shared = sum(end - start for start, end in ranges) > heads
    if len(chunks) == 1 and not shared:
        chunks[0].pending.wait()
        return torch.cat(_in_words(*chunks[0].parts), dim=2).view(like.dtype)
    dtype = lse_dtype(like) if shared else like.dtype
    whole, done = like.new_empty(*like.shape[:2], heads, like.shape[3], dtype=dtype), set()
    for chunk in chunks:
        chunk.pending.wait()
        for (start, end), part in zip(chunk.ranges, chunk.parts, strict=True):
            again = len(done.intersection(range(start, end)))  # the first ones: within a chunk, ranges ascend
            whole[:, :, start : start + again].add_(part[:, :, :again])
            room, new = _in_words(whole[:, :, start + again : end], part[:, :, again:])
            room.copy_(new)
            done.update(range(start, end))
    return whole.to(like.dtype)


class _Both(NamedTuple):
    """Two messages of one chunk."""

    first: Pending
    second: Pending

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


class _Sorted(NamedTuple):
    """A message `received` rank by rank, which `wait` copies row by row to where it is read."""

    pending: Pending
    received: torch.Tensor
    room: torch.Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.room.copy_(self.received)


def _cut(share: Share, at: int, chunks: int) -> Share:
    """One of `chunks` equal parts of a rank's query heads, and of the KV heads that they use."""
    return tuple((s + (e - s) * at // chunks, s + (e - s) * (at + 1) // chunks) for s, e in share)


def _ranges(shares: list[Share], q, kv) -> list[list[HeadRange]]:
    """Per rank, the heads that it gets of each tensor."""
    return [[of_q] * len(q) + [of_kv] * len(kv) for of_q, of_kv in shares]


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
