"""Ulysses: trade the split of the sequence for a split of the heads (https://arxiv.org/abs/2309.14509).

Outside attention every rank holds a contiguous piece of the sequence and all heads. One all-to-all turns that into the
whole sequence and a share of the heads, attention runs locally, a second all-to-all turns its output back. The backward
does the same with the gradients: dout there, dq, dk and dv back.

Query heads are dealt out in contiguous, nearly equal ranges, whatever their number (6 heads on 4 ranks: 2, 2, 1, 1);
each rank receives exactly the KV heads that its query heads use, so a KV head that several ranks need is replicated,
and its gradient is summed when it comes back. Nothing is padded.

A message holds one token after the other, and of each token the heads of q, k and v side by side. So what arrives from
all ranks is, at B = 1, `[S, own heads of q, k and v, D]` already: q, k and v are views of it, which kernels read as
they are. Copies: one on the way out, none on arrival (one for B > 1); back to the sequence one on arrival, and one on
the way out (none for the output at B = 1, which is a single tensor).

Sent per rank and layer, N ranks, n = B * S/N * D elements a head: two all-to-alls forward, (N-1)/N * n * (H + 2 H_kv)
* itemsize bytes and (N-1)/N * n * H * itemsize; backward the same two in reverse order. A KV head counts once for
every rank that needs it; cross-attention sends q and k, v apart. `restore` is one all-to-all of (N-1)/N * n *
(2 H + 2 H_kv) * itemsize. They hide behind nothing: the exchange and the attention of one layer wait for each other.
Choose it where links are fast and there are no more ranks than heads; beyond that, ranks without a head idle
(`usp_attn` splits the rest by a ring).
"""

from collections.abc import Sequence

import torch

from ..comm import Comm, ProcessGroupComm
from ..kernels.base import lse_dtype
from ..layout import Layout
from .base import AttentionContext, Gradients, Residuals
from .ring import RingMode

HeadRange = tuple[int, int]


class HeadsMode(RingMode):
    """A mode that trades sequence for heads within one group, and whose ring, another group, computes on these: a
    subclass says which groups. The residuals are q, k, v, out of the own heads, all tokens of the group, and their
    lse."""

    def heads(self, ctx: AttentionContext) -> Comm:
        """The group whose ranks hold neighbouring pieces of the sequence, in their order."""
        raise NotImplementedError

    def forward(self, q, k, v, ctx: AttentionContext):
        deal = Deal(self.heads(ctx), q.shape[2], k.shape[2])
        qkv = deal.to_heads(q=[q], kv=[k, v])
        out, residuals = super().forward(qkv[0], *deal.paired(*qkv[1:]), ctx)
        (local_out,) = deal.to_sequence(q=[out])
        return local_out, Residuals(*qkv, out, residuals.lse, k.shape[2])

    def backward(self, dout, residuals: Residuals, ctx: AttentionContext) -> Gradients:
        deal = Deal(self.heads(ctx), dout.shape[2], residuals.kv_heads)
        (dout,) = deal.to_heads(q=[dout])
        k, v = deal.paired(residuals.k, residuals.v)
        dq, dk, dv = super().backward(dout, residuals._replace(k=k, v=v), ctx)
        return tuple(deal.to_sequence(q=[dq], kv=deal.unpaired(dk, dv)))

    def restore(self, q, k, v, out, lse, ctx: AttentionContext) -> Residuals:
        deal = Deal(self.heads(ctx), q.shape[2], k.shape[2])
        q, out, k_own, v_own = deal.to_heads(q=[q, out], kv=[k, v])
        return Residuals(q, k_own, v_own, out, lse, k.shape[2])


class UlyssesAttention(HeadsMode):
    name = "ulysses_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ulysses=sp_size)

    def heads(self, ctx: AttentionContext) -> Comm:
        return ctx.sequence

    def ring(self, ctx: AttentionContext) -> Comm:
        return ProcessGroupComm(None)


class Deal:
    """The heads of one call, dealt to the ranks of `comm`. Messages hold, token by token, the heads of all tensors."""

    def __init__(self, comm: Comm, heads: int, kv_heads: int):
        self.comm = comm
        self.ranges = deal_heads(heads, kv_heads, comm.size)
        self.pairing = kv_of_each_query(self.ranges[comm.rank], heads // kv_heads)

    def to_heads(self, q=(), kv=()) -> list[torch.Tensor]:
        """All heads of a piece of the sequence, `[B, S_local, H | H_kv, D]`, to own heads of it all, `[B, S, own, D]`:
        one copy out, one message, and no copy in but for B > 1. What arrives are views of one tensor."""
        if self.comm.size == 1:
            return [*q, *kv]
        if _of_two_sequences(q, kv):
            return [*self.to_heads(q=q), *self.to_heads(kv=kv)]
        tensors, ranges = [*q, *kv], self._ranges(q, kv)
        batch, length, _, head_size = tensors[0].shape
        numbers = [sum(end - start for start, end in of_rank) for of_rank in ranges]
        sizes = [batch * length * number * head_size for number in numbers]
        send = tensors[0].new_empty(sum(sizes))
        for message, number, of_rank in zip(send.split(sizes), numbers, ranges, strict=True):
            parts = [t[:, :, slice(*r)] for t, r in zip(tensors, of_rank, strict=True)]
            torch.cat(parts, dim=2, out=message.view(batch, length, number, head_size))
        rank, size = self.comm.rank, self.comm.size
        received = self.comm.all_to_all(send, sizes, [sizes[rank]] * size)
        whole = received.view(size, batch, length, numbers[rank], head_size).transpose(0, 1).flatten(1, 2)
        return list(whole.split([end - start for start, end in ranges[rank]], dim=2))

    def to_sequence(self, q=(), kv=()) -> list[torch.Tensor]:
        """The transpose of `to_heads`: one copy out (none of a single contiguous tensor with B = 1), one message, one
        copy in. Heads that several ranks computed are summed, in float32 or more."""
        if self.comm.size == 1:
            return [*q, *kv]
        if _of_two_sequences(q, kv):
            return [*self.to_sequence(q=q), *self.to_sequence(kv=kv)]
        tensors, ranges = [*q, *kv], self._ranges(q, kv)
        rank, size = self.comm.rank, self.comm.size
        batch, length, head_size = tensors[0].shape[0], tensors[0].shape[1] // size, tensors[0].shape[3]
        pieces = [t.unflatten(1, (size, length)).transpose(0, 1) for t in tensors]
        send = (torch.cat(pieces, dim=3) if len(pieces) > 1 else pieces[0]).reshape(-1)
        numbers = [sum(end - start for start, end in of_rank) for of_rank in ranges]
        sizes = [batch * length * number * head_size for number in numbers]
        received = self.comm.all_to_all(send, [sizes[rank]] * size, sizes)
        messages = [m.view(batch, length, n, head_size) for m, n in zip(received.split(sizes), numbers, strict=True)]
        parts = [
            message.split([end - start for start, end in of_rank], dim=2)
            for message, of_rank in zip(messages, ranges, strict=True)
        ]
        return [_joined(*args) for args in zip(zip(*ranges, strict=True), zip(*parts, strict=True), strict=True)]

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
        return [[of_q] * len(q) + [of_kv] * len(kv) for of_q, of_kv in self.ranges]


def deal_heads(heads: int, kv_heads: int, ranks: int) -> list[tuple[HeadRange, HeadRange]]:
    """Per rank the range of query heads that it computes, and the range of KV heads that these use. Pure."""
    group = heads // kv_heads
    deals, start = [], 0
    for rank in range(ranks):
        end = start + heads // ranks + (rank < heads % ranks)
        deals.append(((start, end), (start // group, -(-end // group)) if end > start else (0, 0)))
        start = end
    return deals


def kv_of_each_query(deal: tuple[HeadRange, HeadRange], group: int) -> list[int] | None:
    """For each own query head the local index of its KV head, where the own heads do not form equal groups of
    neighbours (then a kernel's own grouping would pair them wrongly); None where they do."""
    (q_start, q_end), (kv_start, kv_end) = deal
    pairing = [head // group - kv_start for head in range(q_start, q_end)]
    count = kv_end - kv_start
    even = (
        count and len(pairing) % count == 0 and pairing == [i // (len(pairing) // count) for i in range(len(pairing))]
    )
    return None if even or not pairing else pairing


def _of_two_sequences(q, kv) -> bool:
    """Cross-attention: a message holds tokens of one sequence."""
    return bool(q and kv) and q[0].shape[1] != kv[0].shape[1]


def _joined(ranges: Sequence[HeadRange], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`parts[r]` are the heads `ranges[r]`, ranges ascending: `[B, S_local, heads, D]`, of which each may come
    several times."""
    batch, length, _, head_size = parts[0].shape
    heads = max(end for _, end in ranges)
    if sum(end - start for start, end in ranges) == heads:
        return torch.cat(list(parts), dim=2, out=parts[0].new_empty(batch, length, heads, head_size))
    total = parts[0].new_empty(batch, length, heads, head_size, dtype=lse_dtype(parts[0]))
    done = 0
    for (start, end), part in zip(ranges, parts, strict=True):
        again = max(min(done, end) - start, 0)
        total[:, :, start : start + again].add_(part[:, :, :again])
        total[:, :, start + again : end].copy_(part[:, :, again:])
        done = max(done, end)
    return total.to(parts[0].dtype)


def _summed(grad: torch.Tensor, pairing: list[int]) -> torch.Tensor:
    """`[B, S, len(pairing), D]` -> `[B, S, own KV heads, D]`, the sum over the query heads that share one."""
    total = grad.new_zeros(*grad.shape[:2], pairing[-1] + 1, grad.shape[3], dtype=lse_dtype(grad))
    for head, shared in enumerate(pairing):
        total[:, :, shared].add_(grad[:, :, head])
    return total.to(grad.dtype)


MODE = UlyssesAttention()
