"""The merge of partial results, in torch and in one Triton kernel, against its definition in float64."""

from itertools import permutations

import pytest
import torch

from easy_context.blocks import Partial, Parts, Sum
from easy_context.kernels.merge import merge

SPLIT = 7  # keys of the first part
LENGTH, OFFSET = 70, 30  # merged rows, and where they begin in the tensors that hold them


def scores_and_values(spread: float):
    """Scores `[B, H, S, keys]` of which some rows see no key of one part, or none at all; values `[B, H, keys, D]`."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, LENGTH, 12, generator=generator, dtype=torch.float64) * spread
    scores[:, :, 10:20, :SPLIT] = -torch.inf
    scores[:, :, 15:25, SPLIT:] = -torch.inf
    return scores, torch.randn(2, 3, 12, 24, generator=generator, dtype=torch.float64)


def attention(scores, values):
    """`(out [B, S, H, D], lse [B, H, S])` by definition; out 0 and lse -inf in rows without keys."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return (weights @ values).transpose(1, 2), lse


def check(device: str, dtype: torch.dtype, spread: float) -> None:
    """A second part whose out is of `dtype`, merged in float32 (float64), as the log-sum-exps are."""
    scores, values = scores_and_values(spread)
    first = attention(scores[..., :SPLIT], values[:, :, :SPLIT])
    second = attention(scores[..., SPLIT:], values[:, :, SPLIT:])
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.full((2, LENGTH + OFFSET, 3, 24), 7.0, dtype=wide, device=device)
    lse = torch.full((2, 3, LENGTH + OFFSET), 7.0, dtype=wide, device=device)
    rows = slice(OFFSET, None)
    out[:, rows], lse[:, :, rows] = first[0], first[1]
    block_out = second[0].transpose(1, 2).to(device, dtype, copy=True).contiguous().transpose(1, 2)
    merge(out[:, rows], lse[:, :, rows], block_out, second[1].to(device, wide))

    tolerance = (1e-12 if wide == torch.float64 else 5e-6) * max(1.0, spread / 10)  # large scores are rounded, too
    rounding = 0.0 if dtype == wide else 2 * torch.finfo(dtype).eps  # of values up to 4
    true_out, true_lse = attention(scores, values)
    assert (out[:, rows].double().cpu() - true_out).abs().max() < tolerance + rounding
    found, nothing = lse[:, :, rows].double().cpu(), true_lse == -torch.inf
    assert torch.equal(found == -torch.inf, nothing)
    assert (found[~nothing] - true_lse[~nothing]).abs().max() < 10 * tolerance
    assert (out[:, :OFFSET] == 7).all()
    assert (lse[:, :, :OFFSET] == 7).all()


CASES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


@CASES
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_equals_attention_over_all_keys(dtype, spread):
    check("cpu", dtype, spread)


def check_into(device: str, before: torch.dtype, after: torch.dtype) -> None:
    """Two half-precision blocks, or what is left to merge with the last of them: widened and narrowed on the way."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, LENGTH, 3, 24)
    out, block = (torch.randn(shape, generator=generator).to(device, t) for t in (before, torch.bfloat16))
    lse, block_lse = (torch.randn(2, 3, LENGTH, generator=generator).to(device) for _ in range(2))
    wide, wide_lse, kept = out.to(torch.float32, copy=True), lse.clone(), out.clone()
    merge(wide, wide_lse, block, block_lse)
    into = torch.full((2, LENGTH + OFFSET, 3, 24), 7.0, dtype=after, device=device)
    merge(out, lse, block, block_lse, into[:, OFFSET:])
    assert torch.equal(into[:, OFFSET:], wide.to(after)) and torch.equal(lse, wide_lse)
    assert torch.equal(out, kept) and (into[:, :OFFSET] == 7).all()


FIRST_LAST_BOTH = pytest.mark.parametrize(
    "before, after",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)


@FIRST_LAST_BOTH
def test_conversions_are_those_of_the_inputs_and_the_result(before, after):
    check_into("cpu", before, after)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@FIRST_LAST_BOTH
def test_conversions_on_cuda(before, after):
    pytest.importorskip("triton")
    check_into("cuda", before, after)


@pytest.mark.parametrize(
    "batch, rows", [(slice(None), slice(None)), (slice(None), slice(30, None)), (slice(1, 2), slice(9, 50))]
)
def test_a_sum_of_blocks_is_rounded_once_and_one_block_never(batch, rows):
    """`Partial` and `Sum` over a first block of all rows, and blocks of some of them."""
    generator = torch.Generator().manual_seed(0)
    like = torch.empty(2, LENGTH, 3, 24, dtype=torch.bfloat16)
    blocks = [torch.randn(like.shape, generator=generator).bfloat16() for _ in range(3)]
    lses = [torch.randn(2, 3, LENGTH, generator=generator) for _ in range(3)]

    alone, one = Partial(like, Parts(1, 1)), Sum(like)
    alone.add(blocks[0], lses[0].clone())
    one.add(blocks[0])
    assert alone.result()[0] is blocks[0] and one.result() is blocks[0]
    assert torch.equal(Sum(like).result(), torch.zeros_like(like))

    partial, total, open_end = Partial(like, Parts(3, 3)), Sum(like, Parts(3, 3)), Sum(like)
    out, lse, wide = blocks[0].float(), lses[0].clone(), blocks[0].float()
    partial.add(blocks[0], lses[0].clone())
    total.add(blocks[0])
    open_end.add(blocks[0])
    for block, block_lse in zip(blocks[1:], lses[1:], strict=True):
        partial.add(block[batch, rows], block_lse[batch, :, rows], batch, rows)
        total.add(block[batch, rows], batch, rows)
        open_end.add(block[batch, rows], batch, rows)
        merge(out[batch, rows], lse[batch, :, rows], block[batch, rows], block_lse[batch, :, rows])
        wide[batch, rows] += block[batch, rows]
    assert torch.equal(partial.result()[0], out.bfloat16()) and torch.equal(partial.result()[1], lse)
    assert total.total.dtype == torch.bfloat16 and torch.equal(total.result(), wide.bfloat16())
    assert torch.equal(open_end.total, wide)


WHOLE, UPPER, LOWER = slice(None), slice(0, 30), slice(30, None)


@pytest.mark.parametrize("order", list(permutations([WHOLE, UPPER, LOWER])))
def test_rows_that_are_merged_once_never_pass_through_a_wide_tensor(order):
    """A result of all rows and one of each half, in any order: two a row."""
    generator = torch.Generator().manual_seed(0)
    like = torch.empty(2, LENGTH, 3, 24, dtype=torch.bfloat16)
    parts = Parts.of(order, LENGTH)
    assert parts == (3, 2) and parts.narrow
    partial, total, dtypes = Partial(like, parts), Sum(like, parts), set()
    out, lse = like.new_zeros(like.shape, dtype=torch.float32), torch.full((2, 3, LENGTH), -torch.inf)
    wide = out.clone()
    for rows in order:
        block = torch.randn(like[:, rows].shape, generator=generator).bfloat16()
        block_lse = torch.randn(2, 3, block.shape[1], generator=generator)
        merge(out[:, rows], lse[:, :, rows], block, block_lse)
        wide[:, rows] += block
        partial.add(block.clone(), block_lse, q=rows)
        total.add(block.clone(), rows=rows)
        dtypes |= {partial.out.dtype, total.total.dtype}
    assert dtypes == {torch.bfloat16}
    assert torch.equal(partial.result()[0], out.bfloat16()) and torch.equal(partial.result()[1], lse)
    assert torch.equal(total.result(), wide.bfloat16())


@pytest.mark.parametrize(
    "rows, most",
    [
        ([], 0),
        ([slice(None)], 1),
        ([slice(0, 4), slice(4, 8)], 1),
        ([slice(0, 5), slice(4, 8), slice(4, 5), slice(6, 8)], 3),
        ([slice(None)] * 4, 4),
    ],
)
def test_parts_count_what_the_row_with_most_gets(rows, most):
    parts = Parts.of(iter(rows), 8)
    assert parts == (len(rows), most) and parts.narrow == (most <= 2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@CASES
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_one_pass_on_cuda(dtype, spread):
    pytest.importorskip("triton")
    check("cuda", dtype, spread)
