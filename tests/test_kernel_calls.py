"""How the kernels for GPUs are called, seen on any machine: their two functions are replaced by what flash-attention
documents of them (varlen layout, windows, lse), computed the slow way."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_cases import BY_NAME, SCALE, assert_as_good_as_torch, assert_exact, one_call, tensors, truth
from test_kernel_variants import CAPPED, CASES, name_of

from easy_context.kernels import flash_attn_2, torch_flash


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


def backward(dout, q, k, v, out, lse, q_offsets, k_offsets, q_longest, k_longest, causal, left, right, softcap):
    assert lse.is_contiguous()
    pairs = sequences(q, k, q_offsets, k_offsets)
    assert (q_longest, k_longest) == tuple(max(x.stop - x.start for x in side) for side in zip(*pairs, strict=True))
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
        longest = q_longest, k_longest
        return backward(dout, q, k, v, out, lse, q_offsets, k_offsets, *longest, causal, *window, None)


def flash_attention_4():
    """The module `flash_attn.cute.interface`."""

    def _flash_attn_fwd(
        q, k, v, *, softmax_scale, causal, softcap, window_size_left, return_lse, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        assert softmax_scale == SCALE and return_lse
        longest = max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]
        return (
            *forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, causal, window_size_left, None, softcap),
            None,
            None,
            None,
        )

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, *, softmax_scale, causal, softcap, window_size_left, deterministic, cu_seqlens_q=None,
        cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        assert softmax_scale == SCALE and not deterministic
        longest = max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]
        return backward(
            dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *longest, causal, window_size_left, None, softcap
        )

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


def flash_attention_2(forward, backward) -> dict[str, ModuleType]:
    """The modules of flash-attn 2.8, whose functions fill given gradients and return `(out, lse, ...)`."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, alibi_slopes, return_softmax) == (0.0, SCALE, None, False)
        window = fa2_window(window_size_left, window_size_right, k.shape[1])
        return *forward(q, k, v, None, None, q.shape[1], k.shape[1], causal, *window, softcap), None, None

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, alibi_slopes, return_softmax) == (0.0, SCALE, None, False)
        window = fa2_window(window_size_left, window_size_right, max_seqlen_k)
        how = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, *window, softcap
        return *forward(q, k, v, *how), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, alibi_slopes, deterministic) == (0.0, SCALE, None, False)
        window = fa2_window(window_size_left, window_size_right, k.shape[1])
        how = None, None, q.shape[1], k.shape[1], causal, *window, softcap
        fill((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, *how))

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, alibi_slopes, deterministic) == (0.0, SCALE, None, False)
        window = fa2_window(window_size_left, window_size_right, max_seqlen_k)
        how = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, *window, softcap
        fill((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, *how))

    def fill(buffers, grads):
        assert all(buffer.is_contiguous() for buffer in buffers)
        for buffer, grad in zip(buffers, grads, strict=True):
            buffer.copy_(grad)

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(interface, function.__name__, function)
    package.__version__, package.flash_attn_interface = "2.8.3", interface
    return {module.__name__: module for module in (package, interface, ModuleType("flash_attn_2_cuda"))}


def torch_forward(q, k, v, q_offsets, k_offsets, q_longest, k_longest, causal, left, right, softcap):
    """The same on a GPU through torch's own FlashAttention-2, which takes no soft cap."""
    assert not softcap
    return torch.ops.aten._flash_attention_forward(
        *(q, k, v, q_offsets, k_offsets, q_longest, k_longest, 0.0, causal, False),
        **{"scale": SCALE, "window_size_left": left, "window_size_right": right},
    )[:2]


def torch_backward(dout, q, k, v, out, lse, q_offsets, k_offsets, q_longest, k_longest, causal, left, right, softcap):
    assert not softcap and lse.is_contiguous()
    unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        *(dout, q, k, v, out, lse, q_offsets, k_offsets, q_longest, k_longest, 0.0, causal, *unused),
        **{"scale": SCALE, "window_size_left": left, "window_size_right": right},
    )


@pytest.fixture
def install(monkeypatch):
    """Puts modules in the place of installed ones."""

    def put(modules):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        flash_attn_2._import_error.cache_clear()

    yield put
    flash_attn_2._import_error.cache_clear()


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
def test_flash_attn_4(case, monkeypatch, install):
    interface = flash_attention_4()
    modules = {"flash_attn": SimpleNamespace(), "flash_attn.cute": SimpleNamespace(interface=interface)}
    install({**modules, "flash_attn.cute.interface": interface})
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    inputs = inputs_for(case)
    assert_exact(one_call("flash_attn_4", *inputs, **case[2]), truth(*inputs, **case[2]), 1e-12)


@pytest.mark.parametrize("case", [*CASES, *CAPPED], ids=name_of)
def test_flash_attn_2(case, install):
    install(flash_attention_2(forward, backward))
    inputs = inputs_for(case)
    assert_exact(one_call("flash_attn_2", *inputs, **case[2]), truth(*inputs, **case[2]), 1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_flash_attn_2_on_a_gpu(case, install):
    """The package's functions over the same kernels inside torch."""
    install(flash_attention_2(torch_forward, torch_backward))
    q_length, k_length, variant = case
    inputs = tensors("flash_attn_2", q_length, k_length, (4, 2), 64, torch.bfloat16, **variant)
    assert_as_good_as_torch(one_call("flash_attn_2", *inputs, **variant), *inputs, **variant)


def test_flash_attn_2_is_told_from_version_4_in_its_namespace(install):
    kernel, gpu = BY_NAME["flash_attn_2"], torch.device("cuda")
    modules = flash_attention_2(forward, backward)
    install(modules)
    assert kernel.missing(gpu) is None
    install({"flash_attn_2_cuda": None})
    assert "flash-attn 2 cannot be imported" in kernel.missing(gpu)
    modules["flash_attn"].__version__ = "2.6.3"
    install(modules)
    assert "too old" in kernel.missing(gpu)
