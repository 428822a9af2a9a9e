"""Ulysses: trade the split of the sequence for a split of the heads (https://arxiv.org/abs/2309.14509).

Outside attention every rank holds a contiguous piece of the sequence and all heads. One all-to-all turns that into the
whole sequence and a share of the heads, attention runs locally, a second all-to-all turns its output back. q, k and v
travel in one message.

Query heads are dealt out in contiguous, nearly equal ranges, whatever their number (6 heads on 4 ranks: 2, 2, 1, 1);
each rank receives exactly the KV heads that its query heads use, so a KV head that several ranks need is replicated,
and its gradient is summed when it comes back. Nothing is padded.

Bytes sent per rank and layer, N ranks, n = B * S/N * D elements a head: forward about (N-1)/N * n * (2 H + 2 H_kv)
* itemsize (a KV head counts once for every rank that needs it), backward the same. They hide behind nothing: the
exchange and the attention of one layer wait for each other. Choose it where links are fast and there are no more ranks
than heads; beyond that, ranks without a head idle (`usp_attn` splits the rest by a ring).
"""

import torch

from ..comm import Comm, ProcessGroupComm, pack, unpack
from ..layout import Layout
from .base import AttentionContext, Mode
from .ring import ring_attention

HeadRange = tuple[int, int]


class UlyssesAttention(Mode):
    name = "ulysses_attn"

    def layout(self, sp_size: int, ring_degree: int | None = None) -> Layout:
        return Layout(ulysses=sp_size)

    def attention(self, q, k, v, ctx: AttentionContext):
        def local(q, k, v):
            return ring_attention(q, k, v, ctx, ProcessGroupComm(None), ctx.ring_spans())

        return attention_over_heads(local, q, k, v, ctx.sequence)


def attention_over_heads(attention, q, k, v, comm: Comm) -> torch.Tensor:
    """`attention(q, k, v)` on a share of the heads and all the tokens that the ranks of `comm` hold together.

    q `[B, S_local, H, D]`, k and v `[B, S_local, H_kv, D]`, pieces in the order of the ranks; returns
    `[B, S_local, H, D]`."""
    if comm.size == 1:
        return attention(q, k, v)
    deal = deal_heads(q.shape[2], k.shape[2], comm.size)
    q_ranges, kv_ranges = [q for q, _ in deal], [kv for _, kv in deal]
    q_own, k_own, v_own = _SequenceToHeads.apply(comm, (q_ranges, kv_ranges, kv_ranges), q, k, v)
    shared = kv_of_each_query(deal[comm.rank], q.shape[2] // k.shape[2])
    if shared is not None:
        k_own, v_own = k_own[:, :, shared], v_own[:, :, shared]
    return _HeadsToSequence.apply(comm, (q_ranges,), (q.shape[2],), attention(q_own, k_own, v_own))


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


def _to_heads(comm: Comm, ranges, tensors) -> tuple[torch.Tensor, ...]:
    """All heads of a piece of the sequence `[B, S_local, heads, D]` -> own heads of it all `[B, S, own, D]`."""
    parts = [
        pack(*(t[:, :, slice(*r[rank])] for t, r in zip(tensors, ranges, strict=True))) for rank in range(comm.size)
    ]
    shapes = [_with_heads(t, r[comm.rank]) for t, r in zip(tensors, ranges, strict=True)]
    own_size = sum(shape.numel() for shape in shapes)
    received = comm.all_to_all(torch.cat(parts), [part.numel() for part in parts], [own_size] * comm.size)
    pieces = [unpack(part, *shapes) for part in received.split([own_size] * comm.size)]
    return tuple(torch.cat(of_all_ranks, dim=1) for of_all_ranks in zip(*pieces, strict=True))


def _to_sequence(comm: Comm, ranges, heads, tensors) -> tuple[torch.Tensor, ...]:
    """The transpose of `_to_heads`; heads that several ranks computed are summed. `heads`: their number per tensor."""
    pieces = [t.split(t.shape[1] // comm.size, dim=1) for t in tensors]
    parts = [pack(*(piece[rank] for piece in pieces)) for rank in range(comm.size)]
    shapes = [
        [_with_heads(piece[0], r[rank]) for piece, r in zip(pieces, ranges, strict=True)] for rank in range(comm.size)
    ]
    sizes = [sum(shape.numel() for shape in group) for group in shapes]
    received = comm.all_to_all(torch.cat(parts), [part.numel() for part in parts], sizes)
    totals = [
        piece[0].new_zeros(*piece[0].shape[:2], count, piece[0].shape[3])
        for piece, count in zip(pieces, heads, strict=True)
    ]
    for rank, part in enumerate(received.split(sizes)):
        for total, r, own in zip(totals, ranges, unpack(part, *shapes[rank]), strict=True):
            total[:, :, slice(*r[rank])].add_(own)
    return tuple(totals)


def _with_heads(t: torch.Tensor, heads: HeadRange) -> torch.Size:
    return torch.Size((t.shape[0], t.shape[1], heads[1] - heads[0], t.shape[3]))


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, ranges, *tensors):
        ctx.call = comm, ranges, tuple(t.shape[2] for t in tensors)
        return _to_heads(comm, ranges, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        return None, None, *_to_sequence(*ctx.call, grads)


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, ranges, heads, *tensors):
        ctx.call = comm, ranges
        out = _to_sequence(comm, ranges, heads, tensors)
        return out if len(out) > 1 else out[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        return None, None, None, *_to_heads(*ctx.call, grads)


MODE = UlyssesAttention()
