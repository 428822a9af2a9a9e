"""What the tests of attention kernels share: inputs, attention by its dense definition, and how far apart two are."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from easy_context.kernels import KERNELS

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
CPU = ("cpu_flash", "reference")
CUDA = ("flash_attn_4", "cudnn", "torch_flash", "flash_attn_2")
on_cpu = pytest.mark.parametrize("name", CPU)
on_cuda = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.cuda) for name in CUDA])
anywhere = pytest.mark.parametrize("name", [*CPU, *(pytest.param(n, marks=pytest.mark.cuda) for n in CUDA)])
SCALE = 0.3  # none of the defaults, so that a scale forgotten shows


def tensors(name, q_length, k_length, heads, head_size, dtype, batch=2, **variant):
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
    if reason := BY_NAME[name].why_not(q, k, **{"causal": q_length == k_length, **variant}):
        pytest.skip(f"{name}: {reason}")
    return q, k, v, dout


def visible(q_length, k_length, causal, window_left=None, borders=None):
    """`[S_q, S_k]`, True where a query sees a key, from the definitions."""
    i = torch.arange(q_length)[:, None] + (k_length - q_length)
    j = torch.arange(k_length)
    sees = torch.ones(q_length, k_length, dtype=torch.bool)
    if causal:
        sees &= j <= i
    if window_left is not None:
        sees &= i - j <= window_left
    if borders is not None:
        document = torch.bucketize(j, torch.tensor(borders), right=True)
        sees &= document[:, None] == document
    return sees


def dense(q, k, v, dout, softcap=None, **mask):
    """`[out, dq, dk, dv, lse]` by the definition, in the precision of the inputs, through autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    groups = q.shape[2] // k.shape[2]
    q, k, v = leaves[0], *(x.repeat_interleave(groups, 2) for x in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(*scores.shape[2:], **mask).to(scores.device), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout), scores.detach().logsumexp(-1)]


def truth(q, k, v, dout, causal, **variant):
    """`dense` in float64."""
    return dense(*(x.double() for x in (q, k, v, dout)), causal=causal, **variant)


def torch_attention(q, k, v, dout, causal, softcap=None, **mask):
    """`[out, dq, dk, dv]` of torch's fused attention in the precision of the inputs; of `dense` under a soft cap."""
    if softcap is not None:
        return dense(q, k, v, dout, softcap, causal=causal, **mask)[:4]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in leaves[1:])
    given = {"is_causal": causal}
    if mask:
        given = {"attn_mask": visible(q.shape[1], k.shape[1], causal, **mask).to(q.device)}
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (leaves[0], keys, values)), **given, scale=SCALE
        ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def one_call(name, q, k, v, dout, causal, **variant):
    """`[out, dq, dk, dv, lse]` of the kernel."""
    kernel, variant = BY_NAME[name], {"causal": causal, "scale": SCALE, **variant}
    out, lse = kernel.forward(q, k, v, **variant)
    return [out, *kernel.backward(dout, q, k, v, out, lse, **variant), lse]


def blockwise(name, blocks, q, k, v, dout):
    """The same from `blocks` (rows, keys, variant), merged through lse, as a ring does it."""
    kernel = BY_NAME[name]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for rows, keys, variant in blocks:
        part, part_lse = kernel.forward(q[:, rows], k[:, keys], v[:, keys], scale=SCALE, **variant)
        merged = torch.logaddexp(lse[:, :, rows], part_lse)
        old, new = ((x - merged).exp().transpose(1, 2)[..., None] for x in (lse[:, :, rows], part_lse))
        out[:, rows], lse[:, :, rows] = out[:, rows] * old + part * new, merged
    out = out.to(q.dtype)
    grads = [torch.zeros_like(x, dtype=dtype) for x in (q, k, v)]
    for rows, keys, variant in blocks:
        inputs = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        parts = kernel.backward(*inputs, scale=SCALE, **variant)
        for grad, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[:, where] += part
    return [out, *grads, lse]


def error(a, b):
    assert a.shape == b.shape and a.isfinite().all()
    return ((a.double() - b.double()).norm() / (b.double().norm() + 0.1)).item()  # some gradients are exactly 0


def assert_exact(results, expected, tolerance):
    for what, a, b in zip(("out", "dq", "dk", "dv", "lse"), results, expected, strict=True):
        assert error(a, b) < tolerance, what


def assert_as_good_as_torch(results, q, k, v, dout, causal, lse_tolerance=1e-4, **variant):
    """At most twice the error of torch's own attention in the same precision, each against float64. A gradient that
    vanishes is float32 noise in both, of a size that depends on the CPU."""
    expected, own = truth(q, k, v, dout, causal, **variant), torch_attention(q, k, v, dout, causal, **variant)
    for what, a, b, c in zip(("out", "dq", "dk", "dv"), results, expected, own, strict=False):
        allowed = max(2 * error(c, b), 1e-4 * (b.norm() < 1e-9))
        assert error(a, b) <= allowed, (what, error(a, b), allowed)
    assert results[4].dtype == torch.float32 and error(results[4], expected[4]) < lse_tolerance
