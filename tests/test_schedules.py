"""Schedules as pure functions: every block once, loads even, both sides of a message in one order; joined steps."""

import threading
from collections import Counter

import pytest
from test_modes import MASKS, error, inputs, one_process, sharded

from easy_context.blocks import Block, merged, plan_blocks
from easy_context.kernels.base import Kernel
from easy_context.modes import AttentionContext, get_mode, tasks
from easy_context.modes.dist_flash_attn import HALF, schedule
from easy_context.modes.tasks import Steps, Task, joined, rotation
from easy_context.virtual import run_ranks


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
    "world, rank, queries, keys", [(2, 0, (1, 1), (3, 3)), (2, 1, (3, 2), (1, 1)), (4, 3, (5, 4), (1, 1))]
)
def test_which_results_meet_in_a_row_of_dist_flash(world, rank, queries, keys):
    """Of two ranks the second one's queries have two halves computed at two places: no row is merged twice."""
    spans = [[(96 * r, 96 * r + 96)] for r in range(world)]
    steps = Steps(rank, schedule(world), spans, lambda q, k: plan_blocks(q, k, causal=True))
    assert (steps.query_parts, steps.key_parts) == (queries, keys)


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


def test_zigzag_gives_every_rank_the_same_work():
    for world in (2, 3, 5):
        layout = get_mode("zigzag_ring_attn").layout(world)
        pairs = [int((layout.indices(20 * world, rank) + 1).sum()) for rank in range(world)]
        assert len(set(pairs)) == 1
