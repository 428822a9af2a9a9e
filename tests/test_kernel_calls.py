"""How the kernels for GPUs are called, seen on any machine: their two functions are replaced by what flash-attention
documents of them (varlen layout, windows, lse), computed the slow way."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_cases import SCALE, assert_exact, one_call, truth
from test_kernel_variants import CAPPED, CASES, name_of

from easy_context.kernels import torch_flash


def sequences(q, k, q_offsets, k_offsets):
    """Slices of queries and keys of each sequence, and the tensors and lse with sequences end to end."""
    if q_offsets is None:
        batch, q_length, k_length = q.shape[0], q.shape[1], k.shape[1]
        q_offsets, k_offsets = (range(0, batch * n + 1, n) for n in (q_length, k_length))
    else:
        assert q.ndim == 3 and q_offsets.dtype == torch.int32 and q_offsets.is_contiguous()
        q_offsets, k_offsets = q_offsets.tolist(), k_offsets.tolist()
    pairs = zip(q_offsets, q_offsets[1:], k_offsets, k_offsets[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def scores_of(q, k, causal, left, right, softcap):
    """`[H, S_q, S_k]` with -inf where hidden; `left`, `right`: limits of the window, or None."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * SCALE
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    hidden = torch.zeros(ahead.shape, dtype=torch.bool)
    right = 0 if causal else right
    if left is not None:
        hidden |= -ahead > left
    if right is not None:
        hidden |= ahead > right
    return scores.masked_fill(hidden, -torch.inf)


def flat(x):
    return x if x.ndim == 3 else x.flatten(0, 1)


def forward(q, k, v, q_offsets, k_offsets, q_longest, k_longest, causal, left, right, softcap):
    packed, shape = q_offsets is not None, q.shape
    pairs = sequences(q, k, q_offsets, k_offsets)
    assert q_longest == max(rows.stop - rows.start for rows, _ in pairs)
    assert k_longest == max(keys.stop - keys.start for _, keys in pairs)
    q, k, v = map(flat, (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows, keys in pairs:
        scores = scores_of(q[rows], k[keys], causal, left, right, softcap)
        lse[:, rows] = scores.logsumexp(-1)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out.view(shape), lse if packed else lse.unflatten(1, shape[:2]).transpose(0, 1).contiguous()


def backward(dout, q, k, v, out, lse, q_offsets, k_offsets, causal, left, right, softcap):
    assert lse.is_contiguous()
    pairs = sequences(q, k, q_offsets, k_offsets)
    shapes = [x.shape for x in (q, k, v)]
    lse = lse if q_offsets is not None else lse.transpose(0, 1).flatten(1)
    dout, q, k, v, out = map(flat, (dout, q, k, v, out))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for rows, keys in pairs:
        leaves = [x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        probs = (scores_of(*leaves[:2], causal, left, right, softcap) - lse[:, rows, None]).exp()
        values = leaves[2].repeat_interleave(q.shape[1] // v.shape[1], 1)
        delta = (dout[rows] * out[rows]).sum(-1)  # softmax's own gradient, with lse held fixed
        flow = (torch.einsum("hqk,khd->qhd", probs, values) * dout[rows]).sum() - (probs.sum(-1).T * delta).sum()
        for grad, where, part in zip(grads, (rows, keys, keys), torch.autograd.grad(flow, leaves), strict=True):
            grad[where] = part
    return tuple(grad.view(shape) for grad, shape in zip(grads, shapes, strict=True))


def fa2_window(left, right, k_longest):
    """A limit of -1 or of at least all keys is none; but if only the left one remains, the right one becomes the number
    of keys, counted from the diagonal."""
    left, right = (None if x is None or not 0 <= x < k_longest else x for x in (left, right))
    return left, k_longest if left is not None and right is None else right


class FlashAttention2:
    """torch's operators, argument for argument."""

    @staticmethod
    def _flash_attention_forward(*args, scale, window_size_left=None, window_size_right=None):
        q, k, v, q_offsets, k_offsets, q_longest, k_longest, dropout, causal, debug = args
        assert (scale, dropout, debug) == (SCALE, 0.0, False)
        window = fa2_window(window_size_left, window_size_right, k_longest)
        return *forward(q, k, v, q_offsets, k_offsets, q_longest, k_longest, causal, *window, None), None, None, None

    @staticmethod
    def _flash_attention_backward(*args, scale, window_size_left=None, window_size_right=None):
        dout, q, k, v, out, lse, q_offsets, k_offsets, q_longest, k_longest, dropout, causal, _, _ = args
        assert (scale, dropout) == (SCALE, 0.0)
        window = fa2_window(window_size_left, window_size_right, k_longest)
        return backward(dout, q, k, v, out, lse, q_offsets, k_offsets, causal, *window, None)


def flash_attention_4():
    """The module `flash_attn.cute.interface`."""

    def _flash_attn_fwd(
        q, k, v, *, softmax_scale, causal, softcap, window_size_left, return_lse, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        assert softmax_scale == SCALE and return_lse
        longest = max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]
        return *forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, causal, window_size_left, None, softcap
        ), None, None, None  # fmt: skip

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, *, softmax_scale, causal, softcap, window_size_left, deterministic, cu_seqlens_q=None,
        cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        assert softmax_scale == SCALE and not deterministic
        return backward(
            dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, window_size_left, None, softcap
        )  # fmt: skip

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


def inputs_for(case):
    q_length, k_length, _ = case
    random = torch.Generator().manual_seed(q_length + k_length)
    sizes = [(q_length, 4), (k_length, 2), (k_length, 2), (q_length, 4)]
    return [torch.randn(2, n, heads, 8, dtype=torch.float64, generator=random) for n, heads in sizes]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_torch_flash(case, monkeypatch):
    monkeypatch.setattr(torch_flash, "aten", FlashAttention2)
    inputs = inputs_for(case)
    assert_exact(one_call("torch_flash", *inputs, **case[2]), truth(*inputs, **case[2]), 1e-12)


@pytest.mark.parametrize("case", [*CASES, *CAPPED], ids=name_of)
def test_flash_attn_4(case, monkeypatch):
    interface = flash_attention_4()
    modules = {"flash_attn": SimpleNamespace(), "flash_attn.cute": SimpleNamespace(interface=interface)}
    for name, module in {**modules, "flash_attn.cute.interface": interface}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    inputs = inputs_for(case)
    assert_exact(one_call("flash_attn_4", *inputs, **case[2]), truth(*inputs, **case[2]), 1e-12)
