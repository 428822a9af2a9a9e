"""`sequence_parallel_attention` in models that are not from transformers: not causal, windows, soft caps, documents,
cross-attention, and a tiny video transformer that trains on sharded frames."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import error, spawn
from torch import nn

from easy_context import attention, sequence_parallel_attention, shard_sequence, unshard_sequence
from easy_context.mesh import current_mesh
from easy_context.modes import base

MODES = ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"]
EXACT = 1e-12


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def definition(q, k, v, *, causal=False, window=None, softcap=None, documents=None, scale=None):
    """Attention with the whole matrix of scores."""
    groups, (lq, lk) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(lq)[:, None] - torch.arange(lk)[None, :]
    allowed = torch.ones(q.shape[0], lq, lk, dtype=torch.bool)
    if causal:
        allowed &= distance >= 0
    if window:
        allowed &= distance < window
    for row, borders in enumerate(documents or ()):
        number = torch.bucketize(torch.arange(lq), torch.tensor(borders[1:]), right=True)
        allowed[row] &= number[:, None] == number[None, :]
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1), v)


def one_rank(rank, world, modes, heads, kv_heads, length, options, context_length=None):
    """Per mode: out, dq, dk, dv, gathered."""
    q, dout = draw(2, length, heads, 8), draw(2, length, heads, 8, seed=1)
    k, v = (
        draw(2, context_length or length, kv_heads, 8, seed=2),
        draw(2, context_length or length, kv_heads, 8, seed=3),
    )
    results = {}
    for mode in modes:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        shards = [shard_sequence(mode, leaf) for leaf in leaves]
        if options.get("context") == "replicated":
            shards[1:] = leaves[1:]
        valid = {"length": k.shape[1]} if options.get("context") != "replicated" else {}
        out = sequence_parallel_attention(*shards, seq_algo=mode, **valid, **options)
        whole = unshard_sequence(mode, out, length=length)
        whole.backward(dout)
        for leaf in leaves:  # each rank holds the gradient of its own shard; the sum over ranks is the whole
            dist.all_reduce(leaf.grad)
        results[mode] = [whole.detach(), *[leaf.grad for leaf in leaves]]
    return results


def check(world, heads, kv_heads, length, options, context_length=None, modes=MODES):
    q, dout = draw(2, length, heads, 8), draw(2, length, heads, 8, seed=1)
    k, v = (
        draw(2, context_length or length, kv_heads, 8, seed=2),
        draw(2, context_length or length, kv_heads, 8, seed=3),
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = definition(*leaves, **{name: value for name, value in options.items() if name != "context"})
    out.backward(dout)
    truth = [out.detach(), *[leaf.grad for leaf in leaves]]
    for results in spawn(one_rank, world, modes, heads, kv_heads, length, options, context_length):
        for mode, got in results.items():
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, truth, strict=True):
                assert error(a, b) < EXACT, (mode, name)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_not_causal_with_padding_that_nobody_sees(world):
    check(world, 6, 2, 37, {"causal": False})


@pytest.mark.parametrize("world, heads, kv_heads", [(4, 6, 6), (2, 14, 7), (4, 3, 1), (3, 4, 2)])
def test_any_number_of_heads(world, heads, kv_heads):
    check(world, heads, kv_heads, 24, {"causal": True})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("window", [1, 5, 11, 30, 200])
def test_windows_smaller_and_larger_than_a_shard(world, window):
    check(world, 4, 2, 45, {"causal": True, "window": window})


@pytest.mark.parametrize("world", [2, 4])
def test_soft_cap(world):
    check(world, 4, 2, 32, {"causal": True, "softcap": 1.5, "scale": 1.0})


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal):
    check(4, 4, 2, 45, {"causal": causal, "documents": ((0, 1, 2, 30, 45), (0, 22, 45))})


def test_documents_with_windows():
    check(3, 4, 2, 45, {"causal": True, "window": 4, "documents": ((0, 3, 30, 45), (0, 22, 45))})


def test_layers_share_what_is_found_out_about_a_sequence(monkeypatch):
    """Which blocks there are is found once for calls over the same sequence and mask, and forgotten in the end."""
    found, q = [], draw(1, 64, 2, 8)
    plan = base.plan_blocks
    monkeypatch.setattr(base, "plan_blocks", lambda *spans, **masks: found.append(masks) or plan(*spans, **masks))
    for documents in [None, ((0, 10, 64),), [[0, 10, 64]], ((0, 11, 64),), None]:
        for causal, length in [(True, 64), (False, 64), (False, 60)]:
            if documents is None or length == 64:
                sequence_parallel_attention(q, q, q, causal=causal, length=length, documents=documents)
    assert [(masks["causal"], masks["documents"]) for masks in found] == [
        (True, None),
        (False, None),
        (False, ((0, 60, 64),)),
        (True, ((0, 10, 64),)),
        (False, ((0, 10, 64),)),
        (True, ((0, 11, 64),)),
        (False, ((0, 11, 64),)),
    ]
    for border in range(1, 60):
        sequence_parallel_attention(q, q, q, documents=((0, border, 64),))
    assert len(attention._plans[current_mesh()]) <= attention.SEQUENCES


def test_plans_are_found_by_numbers_of_any_integer_type(monkeypatch):
    found, q = [], draw(1, 48, 2, 8)
    plan = base.plan_blocks
    monkeypatch.setattr(base, "plan_blocks", lambda *spans, **masks: found.append(masks) or plan(*spans, **masks))
    truth = definition(q, q, q, causal=True, window=5, documents=((0, 7, 48),))
    for number in (int, torch.tensor, np.int64):
        documents = [[number(border) for border in (0, 7, 48)]]
        out = sequence_parallel_attention(q, q, q, length=number(48), window=number(5), documents=documents)
        assert error(out, truth) < EXACT
    assert len(found) == 1


def calls_of_two(rank, world):
    """What the rank calls of torch.distributed in two calls of attention, where ranks 0 and 1 alone have messages."""
    calls, q = [], shard_sequence("zigzag_ring_attn", draw(1, 64, 2, 8))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("barrier", "batch_isend_irecv"):
            patch.setattr(dist, name, counted(getattr(dist, name), calls))
        for _ in range(2):
            sequence_parallel_attention(q, q, q, documents=((0, 6, 10, 16, 24, 32, 40, 48, 56, 64),))
    return calls


def counted(function, calls: list):
    def call(*args, **how):
        calls.append(function.__name__)
        return function(*args, **how)

    return call


def test_all_ranks_of_a_group_take_part_in_its_first_call():
    """Without which NCCL waits for ever for those that have nothing to send."""
    pair, idle = ["barrier", "batch_isend_irecv", "batch_isend_irecv"], ["barrier"]
    assert spawn(calls_of_two, 4) == [pair, pair, idle, idle]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("context, context_length", [("sharded", 5), ("sharded", 41), ("replicated", 7)])
def test_cross_attention(world, context, context_length):
    check(world, 4, 2, 29, {"causal": False, "context": context}, context_length)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"context": "other"}, "context must be"),
        ({"context": "sharded", "causal": True}, "cross-attention"),
        ({"causal": False, "window": 4}, "causal=True"),
        ({"length": 99}, "length=99"),
        ({"documents": ((0, 3),)}, "documents must ascend"),
        ({"documents": ((),)}, "documents must ascend"),
        ({"documents": ((-1, 8),)}, "documents must ascend"),
        ({"documents": ((0, 8), (0, 3, 8))}, "documents of 2 rows, q of 1"),
        ({"documents": ()}, "documents of 0 rows"),
        ({"documents": ((0.0, 3.0, 8.0),)}, "documents counts tokens.*0.0"),
        ({"length": 7.0, "causal": False}, "length counts tokens.*7.0"),
        ({"window": 3.0}, "window counts tokens.*3.0"),
        ({"seq_algo": "ring"}, "unknown mode"),
        ({"seq_algo": "ring", "context": "replicated", "causal": False}, "unknown mode"),
    ],
)
def test_arguments_that_do_not_fit(options, text):
    q = draw(1, 8, 2, 8)
    with pytest.raises(ValueError, match=text):
        sequence_parallel_attention(q, q, q, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_self_attention_needs_a_key_for_each_query(causal):
    q, k = draw(1, 8, 2, 8), draw(1, 4, 2, 8)
    with pytest.raises(ValueError, match="8 queries, 4 keys"):
        sequence_parallel_attention(q, k, k, causal=causal)


def there_and_back(rank, world, mode, dim):
    whole = draw(*[11 if d == dim % 4 else 3 for d in range(4)])
    return torch.equal(unshard_sequence(mode, shard_sequence(mode, whole, dim), dim, 11), whole)


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_the_sequence_may_lie_along_any_dimension(dim):
    assert spawn(there_and_back, 2, "zigzag_ring_attn", dim) == [True, True]


# --- a tiny diffusion transformer over video ------------------------------------------------------------------------


class VideoBlock(nn.Module):
    """Self-attention over all patches of all frames, cross-attention to a text, and an MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.q, self.kv = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1))

    def forward(self, x, text, attend):
        x = x + attend(*map(self.split, self.qkv(x).chunk(3, -1)), "self").flatten(2)
        x = x + attend(self.split(self.q(x)), *map(self.split, self.kv(text).chunk(2, -1)), "replicated").flatten(2)
        return x + self.mlp(x)


class VideoTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(VideoBlock(24, 3) for _ in range(2))
        self.double()

    def forward(self, x, text, attend):
        for block in self.blocks:
            x = block(x, text, attend)
        return x


def train_video(attend, shard, gather, reduce):
    """Losses of four steps of denoising 5 frames of 9 patches under a text of 6 tokens."""
    model, video, text = VideoTransformer(), draw(2, 45, 24), draw(2, 6, 24, seed=4)
    noise = draw(2, 45, 24, seed=5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        predicted = gather(model(shard(video + noise), text, attend))
        loss = (predicted - noise).square().mean()
        loss.backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded_video(rank, world, mode):
    def attend(q, k, v, context):
        length = {"length": 45} if context == "self" else {}
        return sequence_parallel_attention(q, k, v, seq_algo=mode, causal=False, context=context, **length)

    def reduce(model):
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return train_video(
        attend, lambda t: shard_sequence(mode, t), lambda t: unshard_sequence(mode, t, length=45), reduce
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_video_transformer_trains_on_sharded_frames(mode):
    truth = train_video(lambda q, k, v, _: definition(q, k, v), lambda t: t, lambda t: t, lambda _: None)
    assert truth[-1] < truth[0]
    for losses in spawn(train_sharded_video, 4, mode):
        assert torch.allclose(torch.tensor(losses), torch.tensor(truth), rtol=1e-9, atol=0)
