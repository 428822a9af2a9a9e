"""Heads dealt to ranks: who has which, how they are cut into chunks, that they arrive and return bit by bit."""

import threading

import pytest
import torch
from test_modes import MASKS, error, forward_backward_restore, inputs, one_process

from easy_context.kernels.base import Kernel
from easy_context.modes import AttentionContext, deal, get_mode
from easy_context.modes.deal import Deal, count_chunks, deal_heads, kv_of_each_query
from easy_context.virtual import VirtualComm, run_ranks


@pytest.mark.parametrize("heads, kv_heads, ranks", [(6, 6, 4), (14, 7, 2), (14, 2, 4), (9, 3, 2), (8, 2, 8), (3, 1, 4)])
def test_heads_are_dealt_once_with_the_kv_heads_they_use(heads, kv_heads, ranks):
    group = heads // kv_heads
    deals = deal_heads(heads, kv_heads, ranks)
    assert [h for (start, end), _ in deals for h in range(start, end)] == list(range(heads))
    sizes = [end - start for (start, end), _ in deals]
    assert max(sizes) - min(sizes) <= 1
    for share in deals:
        (start, end), (kv_start, kv_end) = share
        pairing = kv_of_each_query(share, group)
        if pairing is None and end > start:
            per_kv = (end - start) // (kv_end - kv_start)
            pairing = [i // per_kv for i in range(end - start)]
        assert [kv_start + p for p in pairing or []] == [h // group for h in range(start, end)]


MIB = 2**20


@pytest.mark.parametrize(
    "kv_heads, ranks, sent, chunks",
    [
        (8, 2, 48 * MIB, 1),
        (8, 2, 192 * MIB, 2),  # 3 do not come out even
        (8, 2, 256 * MIB, 4),
        (8, 2, 1024 * MIB, 4),  # as many as a rank has KV heads
        (8, 4, 1024 * MIB, 2),
        (8, 8, 1024 * MIB, 1),
        (6, 2, 192 * MIB, 3),
        (8, 3, 1024 * MIB, 1),
        (2, 4, 1024 * MIB, 1),
    ],
)
def test_heads_are_cut_where_they_come_out_even_and_messages_stay_large(kv_heads, ranks, sent, chunks):
    assert count_chunks(kv_heads, ranks, sent) == chunks


CHUNKED = [  # mode, world, ring degree, heads, KV heads
    ("ulysses_attn", 2, None, 4, 4),
    ("ulysses_attn", 2, None, 18, 6),
    ("ulysses_attn", 3, None, 12, 6),
    ("ulysses_attn", 4, None, 16, 8),
    ("usp_attn", 2, 1, 8, 4),
    ("usp_attn", 4, 1, 8, 8),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode, world, ring_degree, heads, kv_heads", CHUNKED)
def test_heads_in_chunks(mode, world, ring_degree, heads, kv_heads, batch, mask, monkeypatch):
    monkeypatch.setattr(deal, "CHUNK_BYTES", 0)
    masks = {**MASKS[mask]}
    if "documents" in masks:
        masks["documents"] = masks["documents"][:batch]
    data = inputs(batch=batch, heads=heads, kv_heads=kv_heads)
    of_ranks = forward_backward_restore(mode, world, ring_degree, *data, **masks)
    layout = get_mode(mode).layout(world, ring_degree)
    order = layout.inverse(48, "cpu")
    for at in range(3):
        whole = [torch.cat(parts, 1)[:, order] for parts in zip(*(ways[at] for ways in of_ranks), strict=True)]
        for got, truth in zip(whole, one_process(*data, **masks), strict=True):
            assert error(got, truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head_size", [8, 6])  # bf16: with and without whole words of eight bytes
@pytest.mark.parametrize("lie", ["dense", "heads last", "every second element"])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_arrive_and_return_bit_by_bit_however_they_lie(batch, lie, head_size, dtype):
    q, k, *_ = inputs(batch, 48, 8, 4, head_size, dtype)
    if lie == "heads last":
        q, k = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k))
    if lie == "every second element":
        q, k = (t.repeat_interleave(2, 3)[..., ::2] for t in (q, k))

    def work(rank, groups):
        comm = groups["sequence"]
        dealt, own = Deal(comm, 8, 4, chunks=2), slice(24 * rank, 24 * rank + 24)
        (q_own, k_own), arriving = dealt.to_heads(q=[q[:, own]], kv=[k[:, own]])
        for pending in arriving:
            pending.wait()
        assert torch.equal(torch.cat([*q_own], 2), q[:, :, 4 * rank : 4 * rank + 4])
        assert torch.equal(torch.cat([*k_own], 2), k[:, :, 2 * rank : 2 * rank + 2])
        leaving = [dealt.to_sequence(chunk, q=[q_own[chunk]], kv=[k_own[chunk]]) for chunk in range(2)]
        back = map(deal.joined, zip(*leaving, strict=True))
        assert all(torch.equal(a, b[:, own]) for a, b in zip(back, (q, k), strict=True))

    run_ranks(get_mode("ulysses_attn").layout(2), work)


IN_CHUNKS = ["start"] * 2 + ["arrive", "compute", "start"] * 2 + ["arrive"] * 2
WHOLE = ["start", "arrive", "compute", "start", "arrive"]


@pytest.mark.parametrize(
    "mode, ring_degree, chunk_bytes, events",
    [
        ("ulysses_attn", None, 0, IN_CHUNKS),
        ("ulysses_attn", None, 2**40, WHOLE),
        ("usp_attn", 1, 0, IN_CHUNKS),
        ("usp_attn", 2, 0, ["start", "arrive", "compute", "compute", "start", "arrive"]),  # the ring hides its own
    ],
)
def test_chunks_travel_while_others_are_computed(mode, ring_degree, chunk_bytes, events, monkeypatch):
    """In what order a rank starts messages, waits for them and computes, forward and backward."""
    monkeypatch.setattr(deal, "CHUNK_BYTES", chunk_bytes)
    world, seen, start = 4, {}, VirtualComm.all_to_all
    layout, data = get_mode(mode).layout(world, ring_degree), inputs(heads=8, kv_heads=8)

    def note(what: str) -> None:
        seen.setdefault(threading.get_ident(), []).append(what)

    class Noted:
        def __init__(self, pending):
            self.pending = pending

        def wait(self) -> None:
            if self.pending is not None:
                note("arrive")
                self.pending.wait()
            self.pending = None

    def all_to_all(*args):
        note("start")
        return Noted(start(*args))

    def noting(compute):
        return lambda *args, **how: (note("compute"), compute(*args, **how))[1]

    monkeypatch.setattr(VirtualComm, "all_to_all", all_to_all)
    for name in ("forward", "backward"):
        monkeypatch.setattr(Kernel, name, noting(getattr(Kernel, name)))

    def work(rank, groups):
        ctx, own = AttentionContext(layout, 48, **groups), layout.indices(48, rank)
        shards = [t[:, own] for t in data]
        _, residuals = get_mode(mode).forward(*shards[:3], ctx)
        forward = seen.pop(threading.get_ident())
        get_mode(mode).backward(shards[3], residuals, ctx)
        return forward, seen.pop(threading.get_ident())

    for forward, backward in run_ranks(layout, work):
        assert forward == backward == events
