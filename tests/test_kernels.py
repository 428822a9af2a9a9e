"""Every attention kernel against textbook attention in float64: out, lse and all three gradients.

The kernels for GPUs are skipped where there is none; `pytest -m cuda -rs tests/test_kernels.py` says what ran.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from easy_context import kernels
from easy_context.kernels import KERNELS

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
CPU = ("cpu_flash", "reference")
CUDA = ("flash_attn_4", "cudnn", "torch_flash")
on_cpu = pytest.mark.parametrize("name", CPU)
on_cuda = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.cuda) for name in CUDA])
anywhere = pytest.mark.parametrize("name", [*CPU, *(pytest.param(n, marks=pytest.mark.cuda) for n in CUDA)])
SCALE = 0.3  # none of the defaults, so that a scale forgotten shows


def tensors(name, q_length, k_length, heads, head_size, dtype, batch=2):
    """`(q, k, v, dout)` with `heads` (query, KV), where the kernel called `name` lives; skips where it cannot run."""
    if name in CUDA and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    random = torch.Generator().manual_seed(q_length + 7 * k_length + head_size)
    shapes = [(q_length, heads[0]), (k_length, heads[1]), (k_length, heads[1]), (q_length, heads[0])]
    q, k, v, dout = (
        torch.randn(batch, length, count, head_size, generator=random, dtype=torch.float64).to(
            "cuda" if name in CUDA else "cpu", dtype
        )
        for length, count in shapes
    )
    if reason := BY_NAME[name].why_not(q, k, causal=q_length == k_length):
        pytest.skip(f"{name}: {reason}")
    return q, k, v, dout


def attention(q, k, v, dout, causal, *backends):
    """`[out, dq, dk, dv]` of torch's attention in the precision of the inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(list(backends)):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=causal, scale=SCALE, enable_gqa=True
        ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def truth(q, k, v, dout, causal):
    """`[out, dq, dk, dv, lse]` in float64, by torch's plain mathematics."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * SCALE
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return [*attention(q, k, v, dout, causal, SDPBackend.MATH), scores.logsumexp(-1)]


def one_call(name, q, k, v, dout, causal):
    kernel = BY_NAME[name]
    out, lse = kernel.forward(q, k, v, causal=causal, scale=SCALE)
    return [out, *kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=SCALE), lse]


def ring(name, q, k, v, dout, causal):
    """The same as `one_call` from blocks of half the queries and keys, merged through lse, as a ring does it."""
    kernel = BY_NAME[name]
    q_halves, k_halves = ([slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, x.shape[1])] for x in (q, k))
    blocks = [(i, j) for i in range(2) for j in range(2) if not causal or i >= j]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for i, j in blocks:
        rows, keys = q_halves[i], k_halves[j]
        part, part_lse = kernel.forward(q[:, rows], k[:, keys], v[:, keys], causal=causal and i == j, scale=SCALE)
        merged = torch.logaddexp(lse[:, :, rows], part_lse)
        old, new = ((x - merged).exp().transpose(1, 2)[..., None] for x in (lse[:, :, rows], part_lse))
        out[:, rows], lse[:, :, rows] = out[:, rows] * old + part * new, merged
    out = out.to(q.dtype)
    grads = [torch.zeros_like(x, dtype=dtype) for x in (q, k, v)]
    for i, j in blocks:
        rows, keys = q_halves[i], k_halves[j]
        inputs = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        parts = kernel.backward(*inputs, causal=causal and i == j, scale=SCALE)
        for grad, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[:, where] += part
    return [out, *grads, lse]


def error(a, b):
    assert a.shape == b.shape and a.isfinite().all()
    return ((a.double() - b.double()).norm() / (b.double().norm() + 0.1)).item()  # some gradients are exactly 0


def assert_exact(results, expected, tolerance):
    for what, a, b in zip(("out", "dq", "dk", "dv", "lse"), results, expected, strict=True):
        assert error(a, b) < tolerance, what


def assert_as_good_as_torch(results, q, k, v, dout, causal):
    """At most twice the error of torch's own attention in the same precision, each against float64."""
    expected = truth(q, k, v, dout, causal)
    flash = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    for what, a, b, own in zip(
        ("out", "dq", "dk", "dv"), results, expected, attention(q, k, v, dout, causal, *flash), strict=False
    ):
        assert error(a, b) <= 2 * error(own, b), (what, error(a, b), error(own, b))
    assert results[4].dtype == torch.float32 and error(results[4], expected[4]) < 1e-4


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
    """Block-wise calls with the global out and lse; `gap` sets the scores of the two key halves apart."""
    inputs = tensors(name, 42, 42, (6, 3), 16, torch.float64)
    inputs[0][..., 0], inputs[1][:, 21:, :, 0] = 1.0, gap / SCALE
    assert_exact(ring(name, *inputs, causal), truth(*inputs, causal), 1e-11)


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
