"""Ranks that help each other under documents and windows: nothing is left out, nobody has much more than the others,
and results stay those of one process."""

import numpy as np
import pytest
from test_modes import error, inputs, one_process, sharded

from easy_context.modes import AttentionContext, balance, get_mode, tasks
from easy_context.modes.dist_flash_attn import schedule
from easy_context.modes.tasks import rotation

PLAIN = {"zigzag_ring_attn": rotation, "dist_flash_attn": schedule}


class Case:
    """A mode's shards under a mask, and the pairs that every token has with the keys of every rank."""

    def __init__(self, mode: str, world: int, length: int, *, documents=None, window=None, causal=True):
        self.layout, self.world = get_mode(mode).layout(world), world
        mask = {"documents": documents, "window": window, "causal": causal}
        self.ctx = AttentionContext(self.layout, length, None, None, None, **mask)
        self.plain = PLAIN[mode] if causal else rotation
        self.rows = [self.layout.indices(length, rank).numpy() for rank in range(world)]
        self.pairs = [np.zeros(length, dtype=np.int64) for _ in range(world)]
        positions = np.arange(length)
        for borders in documents or ((0, length),):
            document = np.searchsorted(borders, positions, side="right")
            first = np.array(borders)[document - 1]
            last = positions + 1 if causal else np.array(borders)[document]
            if window is not None:
                first = np.maximum(first, last - window)
            for key, total in enumerate(self.pairs):
                held = np.zeros(length + 1, dtype=np.int64)
                held[self.rows[key] + 1] = 1
                up_to = np.cumsum(held)
                total += up_to[last] - up_to[first]

    def balanced(self):
        return balance.rebalanced(self.ctx, self.plain, self.ctx.ring_spans())

    def unevenness(self, steps) -> float:
        """Largest load over mean load."""
        loads = np.zeros(self.world)
        for task in (task for step in steps for task in step):
            loads[task.worker] += self.pairs[task.key][self.rows[task.query][task.rows(len(self.rows[0]))]].sum()
        assert loads.sum() == sum(pairs.sum() for pairs in self.pairs)
        return loads.max() / loads.mean()


def eight_documents(length: int, seed: int) -> tuple[int, ...]:
    inner = np.random.default_rng(seed).choice(np.arange(1, length // 64), size=7, replace=False) * 64
    return (0, *sorted(int(border) for border in inner), length)


def half_and_many(length: int, short: int) -> tuple[int, ...]:
    """One document of half the sequence, and many short ones."""
    return (0, *range(length // 2, length, short), length)


def masks(length: int) -> dict[str, dict]:
    half, reverse = half_and_many(length, 5), tuple(length - b for b in reversed(half_and_many(length, 7)))
    return {
        "documents": {"documents": (half, half)},
        "of each row": {"documents": (half, (0, 1, length // 3, length - 2, length))},
        "window": {"window": length // 5},
        "both": {"documents": (reverse, half), "window": length // 4},
        "padding": {"documents": ((0, length - 3, length),), "window": length // 3},
        "all": {"documents": (reverse, (0, length // 2 + 3, length)), "causal": False},
    }


@pytest.mark.parametrize("mask", masks(96))
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("mode", PLAIN)
def test_every_pair_is_computed_once(mode, world, mask):
    for length in (96, 96 * 64):
        case = Case(mode, world, length, **masks(length)[mask])
        steps = case.balanced() or case.plain(world)
        times = np.zeros((world, length), dtype=int)
        for task in (task for step in steps for task in step):
            assert task.worker in (task.query, task.key)
            times[task.key, case.rows[task.query][task.rows(length // world)]] += 1
        for pairs, of_key in zip(case.pairs, times, strict=True):
            assert of_key.max() == 1 and of_key[pairs > 0].min() == 1
        assert sorted(steps[0], key=lambda task: task.worker) == rotation(world)[0]
        assert case.unevenness(steps) <= case.unevenness(case.plain(world))


@pytest.mark.parametrize(
    "mode, mask, before, after",
    [
        ("zigzag_ring_attn", {"documents": (eight_documents(2**18, 0),)}, 1.7, 1.05),
        ("dist_flash_attn", {"documents": (eight_documents(2**18, 0),)}, 1.55, 1.12),
        ("zigzag_ring_attn", {"documents": (half_and_many(2**18, 1000),)}, 1.8, 1.02),
        ("dist_flash_attn", {"documents": (half_and_many(2**18, 1000),)}, 3.4, 2.0),  # it reaches half of the ranks
        ("zigzag_ring_attn", {"documents": tuple(eight_documents(2**18, seed) for seed in range(4))}, 1.4, 1.25),
        ("zigzag_ring_attn", {"documents": (half_and_many(2**18, 1000),), "window": 2**16}, 1.3, 1.03),
    ],
)
def test_loads_of_eight_ranks(mode, mask, before, after):
    case = Case(mode, 8, 2**18, **mask)
    assert case.unevenness(case.plain(8)) > before
    steps = case.balanced()
    assert case.unevenness(steps) < after
    ends = {task.rows(2**15).stop for step in steps for task in step if not task.keys_travel}
    for task in (task for step in steps[1:] for task in step):
        rows = task.rows(2**15)
        assert rows.stop - rows.start >= balance.LEAST_ROWS
        if task.keys_travel and rows.start:  # the owner of the keys computes the rows before
            assert rows.start % 64 == 0 and rows.start in ends


@pytest.mark.parametrize("mode", PLAIN)
def test_loads_within_a_tenth_of_the_mean_stay_as_they_are(mode):
    case = Case(mode, 8, 2**18, window=2**15)
    assert 1.06 < case.unevenness(case.plain(8)) < balance.UNEVEN and case.balanced() is None


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("mode", PLAIN)
def test_what_is_even_stays_as_it_is(mode, world):
    length = 48 * world
    for mask in ({}, {"causal": False}, {"window": length}, {"documents": ((0, length - 1, length),)}):
        assert Case(mode, world, length, **mask).balanced() is None
    case = Case(mode, world, length)
    assert balance.balance(case.plain(world), case.ctx.ring_spans(), case.ctx.blocks) is None


@pytest.mark.parametrize("joined_bytes", [0, 2**40], ids=["step by step", "joined"])
@pytest.mark.parametrize("mask", masks(96))
@pytest.mark.parametrize(
    "mode, world, ring_degree",
    [
        *[(mode, world, None) for mode in PLAIN for world in (2, 3, 4, 8)],
        *[("usp_attn", *split) for split in ((4, 2), (6, 3), (8, 4))],
    ],
)
def test_equals_one_process(mode, world, ring_degree, mask, joined_bytes, monkeypatch):
    monkeypatch.setattr(tasks, "JOINED_BYTES", joined_bytes)
    mask = masks(96)[mask]
    data = inputs(batch=len(mask.get("documents", "12")), length=96, heads=4, kv_heads=2)
    truth = one_process(*data, **mask)
    for got, wanted in zip(sharded(mode, world, ring_degree, *data, **mask), truth, strict=True):
        assert error(got, wanted) < 1e-12
