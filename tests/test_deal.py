"""Heads dealt to ranks: who has which, that they arrive and return bit by bit."""

from types import SimpleNamespace

import pytest
import torch
from test_modes import inputs

from easy_context.modes import get_mode
from easy_context.modes.deal import Deal, Pieces, deal_heads, joined, kv_of_each_query
from easy_context.virtual import run_ranks


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


def test_shares_of_one_kv_head_are_summed_in_float32():
    """In bf16 256 + 1 is 256, whatever is added afterwards."""
    ones = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    shares = [256 * ones, ones, ones]
    assert torch.equal(joined(Pieces([(0, 1)] * 3, shares)), 258 * ones)
    dealt = Deal(SimpleNamespace(rank=2, size=5), 22, 2)  # whose query heads 10 to 13 use KV heads 0, 1, 1, 1
    for grad in dealt.unpaired(*[torch.cat([ones, *shares], 2)] * 2):
        assert torch.equal(grad, torch.cat([ones, 258 * ones], 2))


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
        dealt, own = Deal(comm, 8, 4), slice(24 * rank, 24 * rank + 24)
        q_own, k_own = dealt.to_heads(q=[q[:, own]], kv=[k[:, own]])
        assert torch.equal(q_own, q[:, :, 4 * rank : 4 * rank + 4])
        assert torch.equal(k_own, k[:, :, 2 * rank : 2 * rank + 2])
        back = map(joined, dealt.to_sequence(q=[q_own], kv=[k_own]))
        assert all(torch.equal(a, b[:, own]) for a, b in zip(back, (q, k), strict=True))

    run_ranks(get_mode("ulysses_attn").layout(2), work)
