"""Every attention kernel against textbook attention in float64: out, lse and all three gradients.

The kernels for GPUs are skipped where there is none; `pytest -m cuda -rs tests/test_kernels.py` says what ran.
"""

import math

import pytest
import torch
from kernel_cases import (
    BY_NAME,
    CUDA,
    SCALE,
    anywhere,
    assert_as_good_as_torch,
    assert_exact,
    blockwise,
    error,
    on_cpu,
    on_cuda,
    one_call,
    tensors,
    truth,
)

from easy_context import kernels


def ring(name, q, k, v, dout, causal):
    """The same as `one_call` from blocks of half the queries and keys."""
    q_halves, k_halves = ([slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, x.shape[1])] for x in (q, k))
    pairs = [(i, j) for i in range(2) for j in range(2) if not causal or i >= j]
    blocks = [(q_halves[i], k_halves[j], {"causal": causal and i == j}) for i, j in pairs]
    return blockwise(name, blocks, q, k, v, dout)


LENGTHS = [(37, 37, True), (37, 37, False), (23, 61, False), (61, 23, False), (1, 1, True), (5, 1, False)]


@on_cpu
@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("q_length, k_length, causal", LENGTHS)
@pytest.mark.parametrize("head_size", [16, 64])
def test_float64(name, heads, q_length, k_length, causal, head_size):
    inputs = tensors(name, q_length, k_length, heads, head_size, torch.float64)
    assert_exact(one_call(name, *inputs, causal), truth(*inputs, causal), 1e-12)


@on_cpu
def test_float32_and_longer_than_a_tile(name, monkeypatch):
    monkeypatch.setattr(kernels.reference, "TILE", 1 << 14)
    inputs = tensors(name, 301, 301, (4, 2), 20, torch.float32)
    for causal in (True, False):
        assert_exact(one_call(name, *inputs, causal), truth(*inputs, causal), 1e-5)


@on_cpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gap", [0.0, 400.0, -400.0])
def test_blocks_add_up_in_float64(name, causal, gap):
    """Block-wise calls with the global out and lse; `gap` sets the scores of the two key halves apart, by a component
    of queries and of keys alike: that of keys alone, 1,333, would amplify rounding in dq to 3e-11."""
    q, k, v, dout = tensors(name, 42, 42, (6, 3), 16, torch.float64)
    root = (abs(gap) / SCALE) ** 0.5
    q[..., 0], k[:, 21:, :, 0] = root, math.copysign(root, gap)
    assert_exact(ring(name, q, k, v, dout, causal), truth(q, k, v, dout, causal), 1e-11)


@anywhere
@pytest.mark.parametrize("compute", [one_call, ring])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("q_length, k_length, causal", [(258, 258, True), (258, 258, False), (130, 388, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name, compute, head_size, q_length, k_length, causal, dtype):
    factor, heads = (4, (32, 8)) if name in CUDA else (1, (8, 2))
    inputs = tensors(name, factor * q_length, factor * k_length, heads, head_size, dtype)
    assert_as_good_as_torch(compute(name, *inputs, causal), *inputs, causal)


@anywhere
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_far_apart_in_bfloat16(name, causal):
    inputs = tensors(name, 256, 256, (8, 2), 64, torch.bfloat16)
    inputs[0][..., 0], inputs[1][:, 128:, :, 0] = 1.0, 300 / SCALE
    assert_as_good_as_torch(ring(name, *inputs, causal), *inputs, causal)


@pytest.mark.parametrize("name", BY_NAME)  # the base answers before any backend is asked
@pytest.mark.parametrize("batch, q_length, k_length, heads", [(2, 0, 5, 4), (2, 5, 0, 4), (0, 5, 5, 4), (2, 5, 5, 0)])
def test_nothing_to_attend_to(name, batch, q_length, k_length, heads):
    q = torch.randn(batch, q_length, heads, 8)
    k = torch.randn(batch, k_length, heads // 2, 8)
    out, lse = BY_NAME[name].forward(q, k, k, causal=False, scale=SCALE)
    grads = BY_NAME[name].backward(q, q, k, k, out, lse, causal=False, scale=SCALE)
    assert torch.equal(out, torch.zeros_like(q))
    assert lse.dtype == torch.float32 and torch.equal(lse, torch.full((batch, heads, q_length), -torch.inf))
    assert all(torch.equal(grad, torch.zeros_like(x)) for grad, x in zip(grads, (q, k, k), strict=True))


@anywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_without_any_key_get_no_gradient(name, dtype):
    """Their lse is -inf; the others' gradients are those that they would be without such rows."""
    q, k, v, dout = tensors(name, 64, 64, (4, 2), 64, dtype)
    out, lse = BY_NAME[name].forward(q, k, v, causal=False, scale=SCALE)
    silenced = dout.index_fill(1, torch.arange(5, 20, device=q.device), 0.0)
    expected = BY_NAME[name].backward(silenced, q, k, v, out, lse, causal=False, scale=SCALE)
    out[:, 5:20], lse[:, :, 5:20] = 0.0, -torch.inf
    grads = BY_NAME[name].backward(dout, q, k, v, out, lse, causal=False, scale=SCALE)
    assert grads[0][:, 5:20].count_nonzero() == 0
    assert all(error(a, b) < 1e-2 if name in CUDA else torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@anywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_strides(name, dtype):
    """The same numbers, first contiguous, then in memory orders and slices that they can come in."""
    inputs = tensors(name, 64, 64, (4, 2), 64, dtype)
    out, lse = BY_NAME[name].forward(*inputs[:3], causal=True, scale=SCALE)
    plain = [*inputs, out, lse.contiguous()]
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain[:5]]
    size_first = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in plain[:5]]
    slices = [torch.cat([x, x], 1)[:, : x.shape[1]] for x in plain[:5]]
    lse_slice = torch.cat([lse, lse], 2)[:, :, : lse.shape[2]]
    constant = torch.ones((), dtype=dtype, device=out.device).expand(out.shape)  # the gradient of out.sum()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    for dout in (plain[3], constant):
        expected = None
        for q, k, v, gradient, o, logs in [
            plain,
            [*heads_first, lse],
            [*size_first, lse],
            [*slices, lse_slice],
            [*plain[:3], *slices[3:], lse_slice],
        ]:
            gradient = gradient if dout is plain[3] else constant
            out, _ = BY_NAME[name].forward(q, k, v, causal=True, scale=SCALE)
            results = [out, *BY_NAME[name].backward(gradient, q, k, v, o, logs, causal=True, scale=SCALE)]
            expected = expected or results
            assert all(error(a, b) < tolerance for a, b in zip(results, expected, strict=True))


@on_cuda
def test_reproducible_where_torch_asks_for_it(name):
    torch.use_deterministic_algorithms(True)
    try:
        inputs = tensors(name, 2048, 2048, (32, 8), 128, torch.bfloat16)  # skips a kernel that cannot
        first = one_call(name, *inputs, True)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(one_call(name, *inputs, True), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
