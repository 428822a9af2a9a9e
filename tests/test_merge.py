"""The merge of partial results, in torch and in one Triton kernel, against its definition in float64."""

import pytest
import torch

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


def check(device: str, dtype: torch.dtype, spread: float, tolerance: float) -> None:
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

    tolerance *= max(1.0, spread / 10)  # scores of that size are themselves rounded
    true_out, true_lse = attention(scores, values)
    assert (out[:, rows].double().cpu() - true_out).abs().max() < tolerance
    found, nothing = lse[:, :, rows].double().cpu(), true_lse == -torch.inf
    assert torch.equal(found == -torch.inf, nothing)
    assert (found[~nothing] - true_lse[~nothing]).abs().max() < 10 * tolerance
    assert (out[:, :OFFSET] == 7).all()
    assert (lse[:, :, :OFFSET] == 7).all()


CASES = pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)],
)


@CASES
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_equals_attention_over_all_keys(dtype, tolerance, spread):
    check("cpu", dtype, spread, tolerance)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@CASES
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_one_pass_on_cuda(dtype, tolerance, spread):
    pytest.importorskip("triton")
    check("cuda", dtype, spread, tolerance)
