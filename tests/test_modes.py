"""Attention of every mode, operator level: out, dq, dk and dv on every rank equal one process's, in float64."""

import threading
from collections import Counter

import pytest
import torch

from easy_context.blocks import Block, merged, plan_blocks
from easy_context.comm import ProcessGroupComm
from easy_context.kernels import KERNELS
from easy_context.kernels.base import Kernel
from easy_context.modes import AttentionContext, Mode, available_modes, deal, get_mode, tasks
from easy_context.modes.deal import Deal, count_chunks, deal_heads, kv_of_each_query
from easy_context.modes.dist_flash_attn import HALF, schedule
from easy_context.modes.tasks import Steps, Task, joined, rotation
from easy_context.virtual import VirtualComm, run_ranks

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


def test_blocks_that_no_document_or_window_reaches_are_neither_sent_nor_computed():
    layout = get_mode("zigzag_ring_attn").layout(8)
    spans = [layout.ring_spans(1600, rank) for rank in range(8)]
    by_hundreds = tuple(range(0, 1601, 100))
    for masks in ({"documents": (by_hundreds,)}, {"window": 50}):
        pairs = [(a, b) for a in range(8) for b in range(8) if plan_blocks(spans[a], spans[b], causal=True, **masks)]
        assert set(pairs) >= {(rank, rank) for rank in range(8)}
        assert all(abs(a - b) <= (0 if "documents" in masks else 1) for a, b in pairs)
    causal = [plan_blocks(spans[a], spans[b], causal=True) for a in range(8) for b in range(8)]
    assert all(len(blocks) == 1 for blocks in causal)  # one kernel call a step where nothing is masked


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


@pytest.mark.parametrize("world", range(1, 17))
def test_dist_flash_schedule_covers_every_block_once_and_is_balanced(world):
    rows_done, cost = {}, [0.0] * world
    for step in schedule(world):
        assert len({task.worker for task in step}) == len(step)
        suppliers = [task.supplier for task in step if task.supplier != task.worker]
        assert len(set(suppliers)) == len(suppliers)
        for task in step:
            assert task.worker in (task.query, task.key)
            rows = rows_done.setdefault((task.query, task.key), [0] * 8)
            for row in range(*task.rows(8).indices(8)):
                rows[row] += 1
            cost[task.worker] += 0.5 if task.query == task.key else task.stop - task.start
    assert set(rows_done) == {(q, k) for q in range(world) for k in range(q + 1)}
    assert all(rows == [1] * 8 for rows in rows_done.values())
    assert cost == [world / 2] * world
    assert len(schedule(world)) == world // 2 + 1


MASKS = {
    "causal": {},
    "documents": {"documents": ((0, 1, 7, 30, 48), (0, 24, 25, 26, 48))},
    "window": {"window": 19},
    "both": {"window": 9, "documents": ((0, 3, 40, 48),) * 2},
    "all": {"causal": False},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize(
    "mode, world, ring_degree",
    [
        *[("zigzag_ring_attn", world, None) for world in (2, 3, 4, 8)],
        *[("usp_attn", *split) for split in ((4, 2), (6, 3), (8, 4))],
    ],
)
def test_steps_joined_by_any_number(mode, world, ring_degree, most, mask, monkeypatch):
    data = inputs(heads=4, kv_heads=2)
    monkeypatch.setattr(tasks, "JOINED_BYTES", most * 2 * data[1].nbytes // world)
    truth = one_process(*data, **MASKS[mask])
    for got, wanted in zip(sharded(mode, world, ring_degree, *data, **MASKS[mask]), truth, strict=True):
        assert error(got, wanted) < 1e-12


@pytest.mark.parametrize(
    "world, most, sizes",
    [
        (1, 4, [1]),
        (2, 4, [1, 1]),
        (3, 4, [1, 1, 1]),
        (4, 4, [1, 2, 1]),
        (8, 100, [1, 4, 2, 1]),
        (8, 4, [1, 4, 2, 1]),
        (8, 2, [1, 2, 2, 2, 1]),
        (8, 1, [1] * 8),
        (64, 4, [1] + [4] * 14 + [4, 2, 1]),
    ],
)
def test_joined_steps_keep_every_task_and_their_order(world, most, sizes):
    steps = rotation(world)
    groups = joined(steps, most)
    assert [len(group) // world for group in groups] == sizes
    assert [task for group in groups for task in group] == [task for step in steps for task in step]
    assert groups[0] == steps[0]


OWN = [Task(0, 0, 0), Task(1, 1, 1)]
BOTH_WAYS = [OWN, [Task(0, 1, 0), Task(0, 0, 1)]]  # rank 1 sends queries, then keys
CUT = [OWN, [Task(0, 1, 0, stop=HALF), Task(1, 1, 0, HALF), Task(1, 0, 1, stop=HALF), Task(0, 0, 1, HALF)]]


@pytest.mark.parametrize(
    "steps", [rotation(8), joined(rotation(8), 4), joined(schedule(8), 4), joined(schedule(7), 9), BOTH_WAYS, CUT]
)
def test_both_sides_of_a_step_list_its_messages_in_the_same_order(steps):
    world = len(steps[0])
    spans = [[(100 * rank, 100 * rank + 100)] for rank in range(world)]
    views = [Steps(rank, steps, spans, lambda q, k: plan_blocks(q, k, causal=False)) for rank in range(world)]
    for number, step in enumerate(steps):
        pairs = Counter((task.supplier, task.worker) for task in step if task.supplier != task.worker)
        for (supplier, worker), messages in pairs.items():
            received = [t for job in views[worker][number].jobs for t in job.tasks if t.supplier == supplier]
            assert received == [t for t in views[supplier][number].supplied if t.worker == worker]
            assert len(received) == messages


@pytest.mark.parametrize(
    "mode, ring_degree, together, apart",
    [
        ("zigzag_ring_attn", None, [4, 5, 5, 5, 4, 5, 4, 4], 8),
        ("usp_attn", 4, [3, 3, 4, 4, 3, 3, 3, 3], 4),
    ],
)
def test_joined_steps_are_fewer_kernel_calls(mode, ring_degree, together, apart, monkeypatch):
    """By rank, forward and backward."""
    layout, data, calls = get_mode(mode).layout(8, ring_degree), inputs(kv_heads=2), Counter()
    for name in ("forward", "backward"):
        monkeypatch.setattr(Kernel, name, counting(getattr(Kernel, name), calls))

    def work(rank, groups):
        ctx, own = AttentionContext(layout, 48, **groups), layout.indices(48, rank)
        shards = [t[:, own] for t in data]
        _, residuals = get_mode(mode).forward(*shards[:3], ctx)
        forward = calls[threading.get_ident()]
        get_mode(mode).backward(shards[3], residuals, ctx)
        return forward, calls[threading.get_ident()] - forward

    for joined_bytes, wanted in ((2**40, together), (0, [apart] * 8)):
        monkeypatch.setattr(tasks, "JOINED_BYTES", joined_bytes)
        calls.clear()
        assert run_ranks(layout, work) == [(number, number) for number in wanted]


def counting(function, calls: Counter):
    def call(*args, **how):
        calls[threading.get_ident()] += 1
        return function(*args, **how)

    return call


def test_only_plain_rectangles_that_differ_in_one_range_become_one():
    def block(rows, keys, batch=slice(None), **how):
        return Block(batch, slice(*rows), slice(*keys), **{"causal": False, **how})

    assert merged([block((0, 4), (0, 3)), block((0, 4), (3, 9))]) == [block((0, 4), (0, 9))]
    assert merged([block((0, 4), (0, 3)), block((4, 6), (0, 3))]) == [block((0, 6), (0, 3))]
    for pair in (
        [block((0, 4), (0, 4), causal=True), block((0, 4), (4, 9))],
        [block((0, 4), (0, 3), window_left=1), block((0, 4), (3, 9), window_left=1)],
        [block((0, 4), (0, 4), borders=(0, 1, 4)), block((0, 4), (4, 8), borders=(0, 1, 4))],
        [block((0, 4), (0, 3), slice(0, 1)), block((0, 4), (3, 9), slice(1, 2))],
        [block((0, 4), (0, 3)), block((0, 4), (4, 9))],
        [block((0, 4), (0, 3)), block((1, 4), (3, 9))],
    ):
        assert merged(pair) == pair


def test_dist_flash_steps_start_nothing_that_a_later_step_supplies():
    for step in schedule(5)[1:]:
        assert all(task.supplier != task.worker for task in step)


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


MIB = 2**20


@pytest.mark.parametrize(
    "kv_heads, ranks, sent, chunks",
    [
        (8, 2, 48 * MIB, 1),
        (8, 2, 192 * MIB, 2),  # 3 do not come out even
        (8, 2, 256 * MIB, 4),
        (8, 2, 1024 * MIB, 4),  # as many as a rank has KV heads
        (8, 4, 1024 * MIB, 2),
        (8, 8, 1024 * MIB, 1),
        (6, 2, 192 * MIB, 3),
        (8, 3, 1024 * MIB, 1),
        (2, 4, 1024 * MIB, 1),
    ],
)
def test_heads_are_cut_where_they_come_out_even_and_messages_stay_large(kv_heads, ranks, sent, chunks):
    assert count_chunks(kv_heads, ranks, sent) == chunks


CHUNKED = [  # mode, world, ring degree, heads, KV heads
    ("ulysses_attn", 2, None, 4, 4),
    ("ulysses_attn", 2, None, 18, 6),
    ("ulysses_attn", 3, None, 12, 6),
    ("ulysses_attn", 4, None, 16, 8),
    ("usp_attn", 2, 1, 8, 4),
    ("usp_attn", 4, 1, 8, 8),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode, world, ring_degree, heads, kv_heads", CHUNKED)
def test_heads_in_chunks(mode, world, ring_degree, heads, kv_heads, batch, mask, monkeypatch):
    monkeypatch.setattr(deal, "CHUNK_BYTES", 0)
    masks = {**MASKS[mask]}
    if "documents" in masks:
        masks["documents"] = masks["documents"][:batch]
    data = inputs(batch=batch, heads=heads, kv_heads=kv_heads)
    of_ranks = forward_backward_restore(mode, world, ring_degree, *data, **masks)
    layout = get_mode(mode).layout(world, ring_degree)
    order = layout.inverse(48, "cpu")
    for at in range(3):
        whole = [torch.cat(parts, 1)[:, order] for parts in zip(*(ways[at] for ways in of_ranks), strict=True)]
        for got, truth in zip(whole, one_process(*data, **masks), strict=True):
            assert error(got, truth) < 1e-12


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
        dealt, own = Deal(comm, 8, 4, chunks=2), slice(24 * rank, 24 * rank + 24)
        (q_own, k_own), arriving = dealt.to_heads(q=[q[:, own]], kv=[k[:, own]])
        for pending in arriving:
            pending.wait()
        assert torch.equal(torch.cat([*q_own], 2), q[:, :, 4 * rank : 4 * rank + 4])
        assert torch.equal(torch.cat([*k_own], 2), k[:, :, 2 * rank : 2 * rank + 2])
        leaving = [dealt.to_sequence(chunk, q=[q_own[chunk]], kv=[k_own[chunk]]) for chunk in range(2)]
        back = map(deal.joined, zip(*leaving, strict=True))
        assert all(torch.equal(a, b[:, own]) for a, b in zip(back, (q, k), strict=True))

    run_ranks(get_mode("ulysses_attn").layout(2), work)


IN_CHUNKS = ["start"] * 2 + ["arrive", "compute", "start"] * 2 + ["arrive"] * 2
WHOLE = ["start", "arrive", "compute", "start", "arrive"]


@pytest.mark.parametrize(
    "mode, ring_degree, chunk_bytes, events",
    [
        ("ulysses_attn", None, 0, IN_CHUNKS),
        ("ulysses_attn", None, 2**40, WHOLE),
        ("usp_attn", 1, 0, IN_CHUNKS),
        ("usp_attn", 2, 0, ["start", "arrive", "compute", "compute", "start", "arrive"]),  # the ring hides its own
    ],
)
def test_chunks_travel_while_others_are_computed(mode, ring_degree, chunk_bytes, events, monkeypatch):
    """In what order a rank starts messages, waits for them and computes, forward and backward."""
    monkeypatch.setattr(deal, "CHUNK_BYTES", chunk_bytes)
    world, seen, start = 4, {}, VirtualComm.all_to_all
    layout, data = get_mode(mode).layout(world, ring_degree), inputs(heads=8, kv_heads=8)

    def note(what: str) -> None:
        seen.setdefault(threading.get_ident(), []).append(what)

    class Noted:
        def __init__(self, pending):
            self.pending = pending

        def wait(self) -> None:
            if self.pending is not None:
                note("arrive")
                self.pending.wait()
            self.pending = None

    def all_to_all(*args):
        note("start")
        return Noted(start(*args))

    def noting(compute):
        return lambda *args, **how: (note("compute"), compute(*args, **how))[1]

    monkeypatch.setattr(VirtualComm, "all_to_all", all_to_all)
    for name in ("forward", "backward"):
        monkeypatch.setattr(Kernel, name, noting(getattr(Kernel, name)))

    def work(rank, groups):
        ctx, own = AttentionContext(layout, 48, **groups), layout.indices(48, rank)
        shards = [t[:, own] for t in data]
        _, residuals = get_mode(mode).forward(*shards[:3], ctx)
        forward = seen.pop(threading.get_ident())
        get_mode(mode).backward(shards[3], residuals, ctx)
        return forward, seen.pop(threading.get_ident())

    for forward, backward in run_ranks(layout, work):
        assert forward == backward == events


def test_zigzag_gives_every_rank_the_same_work():
    for world in (2, 3, 5):
        layout = get_mode("zigzag_ring_attn").layout(world)
        pairs = [int((layout.indices(20 * world, rank) + 1).sum()) for rank in range(world)]
        assert len(set(pairs)) == 1


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
