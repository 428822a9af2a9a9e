"""Attention of every mode, operator level: out, dq, dk and dv on every rank equal one process's, in float64."""

import pytest
import torch

from easy_context.blocks import Parts
from easy_context.comm import ProcessGroupComm
from easy_context.kernels import KERNELS
from easy_context.modes import AttentionContext, Mode, available_modes, get_mode, tasks
from easy_context.virtual import run_ranks

SPLITS = [  # mode, world, ring degree
    *[
        (mode, world, None)
        for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn")
        for world in (1, 2, 3, 4, 5, 6, 8)
    ],
    *[
        ("usp_attn", *split)
        for split in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2))
    ],
    ("data_parallel", 1, None),
]


def inputs(batch=2, length=48, heads=6, kv_heads=2, head_size=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(h):
        return torch.randn(batch, length, h, head_size, dtype=dtype, generator=generator)

    return draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)


def dense_attention(q, k, v, scale, causal=True, documents=None, window=None):
    """The definition, with the whole matrix of scores."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    allowed = torch.ones(q.shape[0], length, length, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    if documents is not None:
        for row, borders in enumerate(documents):
            document = torch.bucketize(torch.arange(length), torch.tensor(borders[1:]), right=True)
            allowed[row] &= (document[:, None] == document[None, :]).to(q.device)
    weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def one_process(q, k, v, dout, **mask):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = dense_attention(*leaves, scale=0.3, **mask)
    out.backward(dout)
    return out.detach(), *[leaf.grad for leaf in leaves]


def sharded(mode_name, world, ring_degree, q, k, v, dout, *, kernel=None, **mask):
    """out, dq, dk, dv of the mode, put together from all ranks."""
    mode = get_mode(mode_name)
    layout = mode.layout(world, ring_degree)
    length = q.shape[1]

    def work(rank, groups):
        ctx = AttentionContext(layout=layout, seq_len=length, scale=0.3, kernel=kernel, **groups, **mask)
        own = layout.indices(length, rank).to(q.device)
        leaves = [t[:, own].clone().requires_grad_() for t in (q, k, v)]
        out = mode.attention(*leaves, ctx)
        out.backward(dout[:, own])
        return out.detach(), *[leaf.grad for leaf in leaves]

    order = layout.inverse(length, q.device)
    return [torch.cat(parts, 1)[:, order] for parts in zip(*run_ranks(layout, work), strict=True)]


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(params=["joined", "step by step"])
def either_way(request, monkeypatch):
    """Shards so short that steps are joined, and so long that they are not."""
    monkeypatch.setattr(tasks, "JOINED_BYTES", 2**40 if request.param == "joined" else 0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mode, world, ring_degree", SPLITS)
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 4), (7, 1), (10, 5)])
def test_equals_one_process(mode, world, ring_degree, heads, kv_heads):
    length = get_mode(mode).layout(world, ring_degree).padded_length(40)
    data = inputs(heads=heads, kv_heads=kv_heads, length=length)
    for got, truth in zip(sharded(mode, world, ring_degree, *data), one_process(*data), strict=True):
        assert error(got, truth) < 1e-12


@pytest.mark.parametrize("mode, world, ring_degree", [s for s in SPLITS if s[1] in (1, 3, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_documents(mode, world, ring_degree, causal):
    data = inputs()
    documents = ((0, 1, 7, 30, 48), (0, 24, 25, 26, 48))
    truth = one_process(*data, causal=causal, documents=documents)
    for got, wanted in zip(
        sharded(mode, world, ring_degree, *data, causal=causal, documents=documents), truth, strict=True
    ):
        assert error(got, wanted) < 1e-12


@pytest.mark.parametrize("mode, world, ring_degree", [s for s in SPLITS if s[1] == 4])
def test_hundreds_of_documents(mode, world, ring_degree):
    data = inputs(batch=1, length=640)
    borders = sorted({0, 640, *torch.randint(1, 640, (250,), generator=torch.Generator().manual_seed(0)).tolist()})
    documents = (tuple(borders),)
    truth = one_process(*data, documents=documents)
    for got, wanted in zip(sharded(mode, world, ring_degree, *data, documents=documents), truth, strict=True):
        assert error(got, wanted) < 1e-12


@pytest.mark.parametrize("mode, world, ring_degree", [s for s in SPLITS if s[1] in (2, 3, 4)])
def test_not_causal(mode, world, ring_degree):
    data = inputs()
    truth = one_process(*data, causal=False)
    for got, wanted in zip(sharded(mode, world, ring_degree, *data, causal=False), truth, strict=True):
        assert error(got, wanted) < 1e-12


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mode, world, ring_degree", [s for s in SPLITS if s[1] in (2, 4)])
def test_partial_maxima_far_apart(mode, world, ring_degree):
    """Scores that differ by hundreds between blocks: a merge with a plain exp overflows."""
    q, k, v, dout = inputs()
    k = k * torch.linspace(0.0, 400.0, k.shape[1], dtype=k.dtype)[:, None, None]
    truth = one_process(q, k, v, dout)
    for got, wanted in zip(sharded(mode, world, ring_degree, q, k, v, dout), truth, strict=True):
        assert torch.isfinite(got).all()
        assert error(got, wanted) < 1e-9


def forward_backward_restore(mode_name, world, ring_degree, q, k, v, dout, **mask):
    """Of every rank: out, dq, dk, dv of `attention`, of `forward` and `backward`, and with residuals restored."""
    mode = get_mode(mode_name)
    layout = mode.layout(world, ring_degree)
    length = q.shape[1]

    def work(rank, groups):
        ctx = AttentionContext(layout=layout, seq_len=length, scale=0.3, **groups, **mask)
        own = layout.indices(length, rank)
        leaves = [t[:, own].requires_grad_() for t in (q, k, v)]
        attended = mode.attention(*leaves, ctx)
        attended.backward(dout[:, own])
        local = [leaf.detach() for leaf in leaves]
        out, residuals = mode.forward(*local, ctx)
        grads = mode.backward(dout[:, own], residuals, ctx)
        restored = mode.restore(*local, out, residuals.lse, ctx)
        assert all(torch.equal(a, b) for a, b in zip(restored[:5], residuals[:5], strict=True))
        return [
            [attended.detach(), *[leaf.grad for leaf in leaves]],
            [out, *grads],
            [out, *mode.backward(dout[:, own], restored, ctx)],
        ]

    return run_ranks(layout, work)


@pytest.mark.parametrize("mode, world, ring_degree", [s for s in SPLITS if s[1] <= 4])
@pytest.mark.parametrize(
    "heads, kv_heads, mask",
    [
        (6, 2, {}),
        (3, 1, {}),
        (4, 4, {"causal": False}),
        (7, 7, {"window": 9}),
        (9, 3, {"documents": ((0, 1, 7, 30, 48), (0, 24, 25, 26, 48))}),
    ],
)
def test_backward_of_kept_and_of_restored_residuals_is_that_of_attention(
    mode, world, ring_degree, heads, kv_heads, mask
):
    data = inputs(heads=heads, kv_heads=kv_heads)
    for attended, kept, restored in forward_backward_restore(mode, world, ring_degree, *data, **mask):
        for a, b, c in zip(attended, kept, restored, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(b, c)


@pytest.mark.parametrize("mode, world, ring_degree", [s for s in SPLITS if s[1] == 4])
def test_restored_residuals_in_bf16_give_the_same_bits(mode, world, ring_degree):
    data = [t.bfloat16() for t in inputs(heads=9, kv_heads=3)]
    for attended, _, restored in forward_backward_restore(mode, world, ring_degree, *data):
        assert all(torch.equal(a, b) for a, b in zip(attended, restored, strict=True))
        assert all(t.dtype == torch.bfloat16 for t in restored)


def test_a_mode_of_ones_own_may_define_attention_alone():
    class Own(Mode):
        name = "own"

        def attention(self, q, k, v, ctx):
            return dense_attention(q, k, v, ctx.scale)

    q, k, v, dout = inputs(batch=1, length=8)
    ctx = AttentionContext(get_mode("data_parallel").layout(1), 8, *[ProcessGroupComm(None)] * 3, scale=0.3)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = Own().attention(*leaves, ctx)
    out.backward(dout)
    for got, truth in zip((out, *[leaf.grad for leaf in leaves]), one_process(q, k, v, dout), strict=True):
        assert torch.equal(got, truth)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"])
def test_bf16_error_does_not_grow_with_the_world(mode):
    data = inputs(length=128, heads=8, kv_heads=2, head_size=32)
    truth = one_process(*data)
    low = [t.bfloat16() for t in data]
    alone = [error(t.double(), w) for t, w in zip(sharded("data_parallel", 1, None, *low), truth, strict=True)]
    for world in (2, 8):
        errors = [error(t.double(), w) for t, w in zip(sharded(mode, world, None, *low), truth, strict=True)]
        assert all(e <= 2 * a for e, a in zip(errors, alone, strict=True)), (world, errors, alone)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "all"])
@pytest.mark.parametrize(
    "mode, world, ring_degree",
    [s for s in SPLITS if s[1] in (2, 4) and s[0] not in ("ulysses_attn", "data_parallel")],
)
def test_sums_held_in_bf16_are_bit_by_bit_those_held_in_float32(mode, world, ring_degree, mask, monkeypatch):
    """A row that gets two results is rounded once either way; held in bf16, one that gets more would be twice."""
    data = [t.bfloat16() for t in inputs()]
    got = sharded(mode, world, ring_degree, *data, **MASKS[mask])
    monkeypatch.setattr(Parts, "narrow", False)
    wide = sharded(mode, world, ring_degree, *data, **MASKS[mask])
    assert all(torch.equal(a, b) for a, b in zip(got, wide, strict=True))


MASKS = {
    "causal": {},
    "documents": {"documents": ((0, 1, 7, 30, 48), (0, 24, 25, 26, 48))},
    "window": {"window": 19},
    "both": {"window": 9, "documents": ((0, 3, 40, 48),) * 2},
    "all": {"causal": False},
}


def test_unknown_mode_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="zigzag_ring_attn"):
        get_mode("zigzag")
    assert get_mode("auto") is get_mode("usp_attn")
    assert "usp_attn" in available_modes()


# --- on a GPU: every kernel that can be chosen, all ranks of a world on one device ------------------------------------


KERNELS_ON_CUDA = ["flash_attn_4", "cudnn", "torch_flash", "flash_attn_2"]
SPLITS_ON_CUDA = [
    *[(mode, world, None) for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn") for world in (2, 3, 8)],
    *[("usp_attn", *split) for split in ((2, 2), (3, 3), (4, 2), (8, 4))],
]


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS_ON_CUDA)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("mode, world, ring_degree", SPLITS_ON_CUDA)
def test_bf16_on_cuda_within_twice_the_error_of_one_call(mode, world, ring_degree, head_size, kernel):
    assert_exact_on_cuda(mode, world, ring_degree, head_size, kernel)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS_ON_CUDA)
@pytest.mark.parametrize("mask", ["documents", "window"])
@pytest.mark.parametrize("mode, world, ring_degree", SPLITS_ON_CUDA)
def test_bf16_masks_on_cuda_within_twice_the_error_of_one_call(mode, world, ring_degree, mask, kernel):
    if (kernel, mask) == ("cudnn", "window"):
        pytest.skip("cuDNN takes no windows")
    masks = {"documents": {"documents": ((0, 160, 864, 928, 1536),)}, "window": {"window": 300}}
    assert_exact_on_cuda(mode, world, ring_degree, 128, kernel, **masks[mask])


def assert_exact_on_cuda(mode, world, ring_degree, head_size, kernel, **mask):
    if reason := cuda_kernel_missing(kernel):
        pytest.skip(reason)
    length = get_mode(mode).layout(world, ring_degree).padded_length(1536)
    assert length == 1536
    low = [t.cuda().bfloat16() for t in inputs(batch=1, length=length, heads=16, kv_heads=4, head_size=head_size)]
    truth = one_process(*(t.double() for t in low), **mask)
    alone = sharded("data_parallel", 1, None, *low, kernel=kernel, **mask)
    split = sharded(mode, world, ring_degree, *low, kernel=kernel, **mask)
    for name, got, one_call, wanted in zip(("out", "dq", "dk", "dv"), split, alone, truth, strict=True):
        assert error(got.double(), wanted) <= 2 * error(one_call.double(), wanted), name


def cuda_kernel_missing(name: str) -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    kernel = next(k for k in KERNELS if k.name == name)
    q = torch.zeros(1, 16, 16, 128, dtype=torch.bfloat16, device="cuda")
    return kernel.why_not(q, q, causal=True)
