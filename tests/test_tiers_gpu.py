"""Tiers on a GPU: copies beside compute, late, interrupted, failed; bit-identical, and nothing leaks."""

import gc
import os
import signal
import time

import pytest
import test_tiers
import torch
from test_tier_slots import no_space
from test_tiers import CHUNK, ROWS, WIDTH, cuda, needs_gpu, normal

from easy_context.memory import disk as disk_module
from easy_context.memory import host_pool as host_pool_module
from easy_context.memory.host_pool import HostPool
from easy_context.memory.tiers import TIERS, Store

pool = test_tiers.pool
store = test_tiers.store


BYTES = ROWS * WIDTH * 2
SECOND = 2_000_000_000  # cycles, about


@pytest.fixture
def gpu_store(tmp_path):
    return Store("cuda", disk=str(tmp_path))


def gpu_rows(seed):
    return normal(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda", seed=seed)


def garbage():
    """Work on the compute stream whose memory, full of NaN, is the next one to be handed out."""
    torch.cuda._sleep(300_000)
    torch.full((ROWS, WIDTH), float("nan"), dtype=torch.bfloat16, device="cuda").mul_(2)


@cuda
@needs_gpu
@pytest.mark.parametrize("late", ["compute", "copies"])
@pytest.mark.parametrize("tier, compress", [(tier, None) for tier in TIERS] + [("host", "int8"), ("disk", "int8")])
def test_twenty_rounds_beside_garbage_are_bit_identical(tmp_path, tier, compress, late):
    """What any copy reads too early or too late is NaN; nothing here makes the host wait for the GPU."""
    store = Store("cuda", disk=str(tmp_path), compress=compress)
    truth = [gpu_rows(seed) for seed in range(3)]
    if compress:
        truth = [Store("cuda", compress=compress).keep(rows, "host", ROWS).tensor() for rows in truth]
        torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def delay(lane):
        if late == "copies":
            with lane.running():
                torch.cuda._sleep(1_000_000)

    for _ in range(20):
        kept = []
        for seed in range(3):
            delay(store.out)
            garbage()
            rows = gpu_rows(seed)
            kept.append(store.keep(rows, tier, CHUNK))
            garbage()
            store.settle()
            if tier != "gpu":
                rows.fill_(float("nan"))
            del rows
            garbage()
        while kept:
            delay(store.into)
            garbage()
            store.fetch(*kept[-2:])  # one ahead
            garbage()
            for stop in range(CHUNK, ROWS + CHUNK, CHUNK):
                part = slice(stop - CHUNK, stop)
                wrong += (kept[-1].tensor(stop)[part] != truth[len(kept) - 1][part]).sum()
            kept[-1].tensor().fill_(float("nan"))
            kept.pop().release()
    assert wrong.item() == 0


@cuda
@needs_gpu
def test_the_host_does_not_wait_for_the_host_tier(gpu_store):
    for sleep in (1, SECOND):  # the first round page-locks
        torch.cuda._sleep(sleep)
        kept = gpu_store.keep(gpu_rows(0), "host", CHUNK)
        gpu_store.settle()
        kept.fetch()
        kept.tensor(CHUNK)
        kept.tensor()
        under_way = not torch.cuda.current_stream().query()
        del kept
    assert under_way


@cuda
@needs_gpu
def test_compute_waits_for_the_rows_it_needs_alone(gpu_store, monkeypatch):
    rows, own = gpu_rows(0), HostPool.read

    def late(self, lease, offset, part, codec):
        if offset:
            with self.into.running():
                torch.cuda._sleep(SECOND // (ROWS // CHUNK))
        return own(self, lease, offset, part, codec)

    monkeypatch.setattr(HostPool, "read", late)
    kept = gpu_store.keep(rows, "host", CHUNK)
    gpu_store.settle()
    first = kept.tensor(CHUNK)[:CHUNK].clone()
    torch.cuda.current_stream().synchronize()
    assert not gpu_store.into.stream.query()  # others are still to come
    assert torch.equal(first, rows[:CHUNK])
    assert torch.equal(kept.tensor(), rows)


@cuda
@needs_gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("when", ["leaving", "returning"])
def test_released_in_the_middle_of_a_copy(gpu_store, tier, when):
    for seed in range(5):
        rows, other = gpu_rows(seed), gpu_rows(seed + 100)
        kept = gpu_store.keep(other, tier, CHUNK)
        gpu_store.settle()
        with (gpu_store.out if when == "leaving" else gpu_store.into).running():
            torch.cuda._sleep(50_000_000)
        if when == "leaving":
            kept = gpu_store.keep(rows, tier, CHUNK)
        else:
            kept.fetch()
        del rows, other
        kept.release()
        sevens = [torch.full((ROWS, WIDTH), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        again = gpu_store.keep(sevens[0], tier, CHUNK)  # into the buffer that was given back
        gpu_store.settle()
        assert all((seven == 7).all() for seven in [again.tensor(), *sevens])
        torch.cuda.synchronize()
        assert all((seven == 7).all() for seven in sevens)


@cuda
@needs_gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_memory_does_not_grow_with_what_is_kept(gpu_store, tier, monkeypatch):
    locked, own = [], host_pool_module.page_lock
    monkeypatch.setattr(host_pool_module, "page_lock", lambda memory: (locked.append(memory.nbytes), own(memory)))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        kept = []
        for _ in range(8):
            kept.append(gpu_store.keep(torch.full((ROWS, WIDTH), 3.0, device="cuda").bfloat16(), tier, CHUNK))
            gpu_store.settle()
        while kept:
            kept[-1].tensor()
            kept.pop().release()
    assert torch.cuda.max_memory_allocated() - before <= 4 * BYTES  # rows, and once more in float32
    assert torch.cuda.memory_allocated() == before
    if tier == "host":
        assert locked == [BYTES] * 8
    else:
        assert sorted(locked, reverse=True)[0] == CHUNK * WIDTH * 2 and len(locked) <= 4


@cuda
@needs_gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_failed_step_leaks_nothing(gpu_store, tier):
    def step(fail):
        kept = [gpu_store.keep(gpu_rows(0), tier, CHUNK)]
        gpu_store.settle()
        kept.append(gpu_store.keep(gpu_rows(1), tier, CHUNK))
        if fail == "forward":
            raise FloatingPointError("on purpose")
        gpu_store.settle()
        gpu_store.fetch(*kept)
        if fail == "backward":
            raise FloatingPointError("on purpose")
        return torch.stack([mine.tensor() for mine in kept])

    truth = step(None).cpu()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for fail in ("forward", "backward") * 3:
        with pytest.raises(FloatingPointError):
            step(fail)
        gc.collect()
        assert torch.equal(step(None).cpu(), truth)
    torch.cuda.synchronize()
    pool = gpu_store.host if tier == "host" else gpu_store.disk
    deadline = time.monotonic() + 10  # threads may still be writing what a failed step kept
    while len(pool.idle) < len(pool._made) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool.idle) == len(pool._made) <= 4
    torch.zeros(1, device="cuda")  # lets the allocator look at what was protected
    assert torch.cuda.memory_allocated() == before


@cuda
@needs_gpu
def test_a_full_disk_ends_the_step_without_a_hang(gpu_store, monkeypatch):
    monkeypatch.setattr(disk_module.os, "pwrite", no_space)
    kept = gpu_store.keep(gpu_rows(0), "disk", CHUNK)
    with pytest.raises(OSError, match="disk tier: No space left"):
        gpu_store.settle()
    monkeypatch.undo()
    del kept
    kept = gpu_store.keep(gpu_rows(1), "disk", CHUNK)
    gpu_store.settle()
    assert torch.equal(kept.tensor(), gpu_rows(1))


@cuda
@needs_gpu
def test_a_forked_child_changes_nothing():
    """While a child lives, as a data loader's workers do, the GPU reads what the parent writes."""
    memory = host_pool_module.HostMemory(4 * 2**20, torch.device("cuda")).bytes
    rows = torch.empty(memory.nbytes, dtype=torch.uint8, device="cuda")
    rows.copy_(memory, non_blocking=True)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        memory.fill_(7)
        rows.copy_(memory, non_blocking=True)
        assert bool((rows == 7).all())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
