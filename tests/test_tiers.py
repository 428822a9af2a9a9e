"""Rows that wait in any tier come back as they were; what runs out is named; nothing is left behind."""

import errno
import gc
import os
import threading
import time

import pytest
import torch

from easy_context.memory import disk as disk_module
from easy_context.memory import host_pool as host_pool_module
from easy_context.memory.compress import Codec, choose_codec, stored_bytes
from easy_context.memory.host_pool import HostPool
from easy_context.memory.lanes import Lane
from easy_context.memory.tiers import TIERS, Store

cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def normal(*shape, dtype=torch.float32, device=CPU, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, device=device, generator=generator) * 3).to(dtype)


def relative_error(got, truth):
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.fixture
def store(tmp_path):
    return Store(CPU, disk=str(tmp_path))


# Every tier


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, chunk", [((10,), 3), ((9, 4), 3), ((7, 2, 5), 100), ((1, 130), 1)])
def test_rows_come_back_as_they_were(store, tier, dtype, shape, chunk):
    rows = normal(*shape, dtype=dtype)
    kept = store.keep(rows, tier, chunk)
    store.settle()
    kept.fetch()
    kept.fetch()  # nothing: they are under way
    back = kept.tensor()
    assert back.dtype == rows.dtype and torch.equal(back, rows)
    kept.drop()
    assert torch.equal(kept.tensor(), rows)


@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize("tier", TIERS)
def test_rows_before_stop_are_there(tmp_path, tier, compress):
    store = Store(CPU, disk=str(tmp_path), compress=compress)
    rows = normal(100, 128)
    kept = store.keep(rows, tier, chunk=16)
    store.settle()
    for stop in (0, 1, 16, 17, 64, 100):
        assert relative_error(kept.tensor(stop)[:stop], rows[:stop]) < 0.01 or stop == 0
    assert kept.tensor(5) is kept.tensor()


@pytest.mark.parametrize("tier", TIERS)
def test_several_return_in_turn(store, tier):
    several = [normal(n, 8, seed=n) for n in (10, 3, 25)]
    kept = [store.keep(rows, tier, 4) for rows in several]
    store.settle()
    store.fetch(*kept)
    assert all(torch.equal(mine.tensor(), rows) for mine, rows in zip(kept, several, strict=True))


@pytest.mark.parametrize("tier", TIERS)
def test_no_rows(store, tier):
    kept = store.keep(torch.empty(0, 8), tier, 4)
    store.settle()
    assert kept.tensor().shape == (0, 8)


def test_a_kept_tensor_has_no_graph(store):
    x = torch.ones(4, 4, requires_grad=True)
    for tier in TIERS:
        assert not store.keep(x * 2, tier, 2).tensor().requires_grad


def test_settings_that_are_not_known_are_named(store):
    with pytest.raises(ValueError, match="tier='tape'"):
        store.keep(torch.ones(2), "tape", 1)
    with pytest.raises(ValueError, match="disk="):
        Store(CPU).keep(torch.ones(2), "disk", 1)
    with pytest.raises(ValueError, match="disk="):
        Store(CPU).require(0, 1)
    with pytest.raises(ValueError, match="compress='zip'"):
        Store(CPU, compress="zip")


# Host memory


@pytest.fixture
def pool(monkeypatch):
    """A pool for a GPU that is not there; `pool.locked` holds the sizes of the page-locked memory alive."""
    locked = []
    monkeypatch.setattr(host_pool_module, "page_lock", lambda memory: locked.append(memory.nbytes))
    monkeypatch.setattr(host_pool_module, "page_unlock", lambda memory, device: locked.remove(memory.nbytes))
    pool = HostPool(torch.device("cuda", 0), Lane(CPU), Lane(CPU), None)
    pool.locked = locked
    return pool


def test_host_buffers_are_exact_and_used_again(pool):
    for sizes in ([3000, 3000, 10], [3000, 3000, 10], [10, 3000, 3000], [2000, 9, 2999]):
        leases = [pool.take(size) for size in sizes]
        assert all(lease.slot.size >= size for lease, size in zip(leases, sizes, strict=True))
        del leases
        assert sorted(pool.locked) == [10, 3000, 3000]
        assert len(pool.idle) == 3


def test_sizes_that_no_longer_fit_are_replaced(pool):
    for sizes in ([3000, 10], [4000, 20], [50, 1], [5000, 30]):
        leases = [pool.take(size) for size in sizes]
        del leases
        assert sorted(pool.locked) == sorted(sizes)
    pool.idle.clear()
    assert pool.locked == []


def test_a_small_request_does_not_take_a_large_buffer(pool):
    large = pool.take(10_000)
    del large
    small = pool.take(100)
    assert small.slot.size == 100


def test_the_host_memory_figure_wins(pool, monkeypatch):
    class Nothing:
        available = 0

    monkeypatch.setattr(host_pool_module.psutil, "virtual_memory", lambda: Nothing)
    with pytest.raises(MemoryError, match="host tier"):
        pool.take(100)
    pool.limit = 250
    leases = [pool.take(100), pool.take(100)]
    with pytest.raises(MemoryError, match='0.00 GiB available.*keep="input".*tier="disk".*host_memory='):
        pool.take(100)
    leases.pop()
    leases.append(pool.take(150))  # the idle buffer makes room
    assert sorted(pool.locked) == [100, 150]
    leases.clear()
    leases.append(pool.take(240))  # both have to go
    assert pool.locked == [240]
    pool.require(250)
    with pytest.raises(MemoryError, match="host tier"):
        pool.require(251)


def test_memory_that_cannot_be_page_locked_is_named(pool, monkeypatch):
    def fail(memory):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host_pool_module, "page_lock", fail)
    with pytest.raises(MemoryError, match="host tier"):
        pool.take(100)


def test_host_memory_that_is_not_there_is_named_before_the_step(store):
    store.require(2**20, 2**20)
    with pytest.raises(MemoryError, match="host tier.*GiB of host memory needed"):
        store.require(2**60, 0)
    small = Store(CPU, host_memory=1000, compress="int8")
    small.require(1000, 0)
    with pytest.raises(MemoryError, match="host_memory="):
        small.require(1001, 0)
    with pytest.raises(MemoryError, match="host_memory="):
        small.keep(normal(10, 128), "host", 1)


# Disk


def test_files_have_no_names_and_are_used_again(store, tmp_path):
    several = [normal(64, 8, seed=i) for i in range(3)]
    files = None
    for _ in range(3):
        kept = [store.keep(rows, "disk", 5) for rows in several]
        store.settle()
        assert os.listdir(tmp_path) == []
        assert all(torch.equal(mine.tensor(), rows) for mine, rows in zip(kept, several, strict=True))
        del kept
        gc.collect()
        now = {file.descriptor for file in store.disk.idle}
        assert len(now) == 3 and files in (None, now)
        files = now
    del store.disk
    gc.collect()
    for descriptor in files:
        with pytest.raises(OSError, match="[Bb]ad file"):
            os.fstat(descriptor)


def no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_and_the_next_step_works(store, tmp_path, monkeypatch):
    rows = normal(64, 8)
    own, calls = os.pwrite, []
    monkeypatch.setattr(
        disk_module.os, "pwrite", lambda *args: no_space() if len(calls) > 2 else calls.append(1) or own(*args)
    )
    kept = store.keep(rows, "disk", 8)
    with pytest.raises(OSError, match='disk tier: No space left.*disk=.*tier="host"') as caught:
        store.settle()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path)
    with pytest.raises(OSError, match="disk tier"):
        kept.tensor()
    monkeypatch.undo()
    del caught, kept
    store.settle()
    kept = store.keep(rows, "disk", 8)
    store.settle()
    assert torch.equal(kept.tensor(), rows)


def test_a_disk_that_cannot_be_read_is_named(store, monkeypatch):
    kept = store.keep(normal(64, 8), "disk", 8)
    store.settle()
    monkeypatch.setattr(disk_module.os, "preadv", lambda *args: 0)
    with pytest.raises(OSError, match="disk tier: a file is shorter"):
        kept.tensor()


def test_room_on_disk_is_named_before_the_step(store, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="disk tier.*GiB needed.*GiB free") as caught:
        store.require(0, 2**60)
    assert caught.value.filename == str(tmp_path)
    rows = normal(2**18)
    kept = store.keep(rows, "disk", 2**16)
    store.settle()
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda directory: usage)
    store.require(0, rows.nbytes)  # the files have it already
    with pytest.raises(OSError, match="disk tier"):
        store.require(0, rows.nbytes + 2**20)
    assert torch.equal(kept.tensor(), rows)


def test_a_file_is_not_used_again_while_it_is_being_written(store, monkeypatch):
    go, own = threading.Event(), os.pwrite

    def late(*args):
        go.wait()
        return own(*args)

    monkeypatch.setattr(disk_module.os, "pwrite", late)
    old = store.keep(normal(64, 8, seed=1), "disk", 4)
    old.release()
    rows = normal(64, 8, seed=2)
    new = store.keep(rows, "disk", 4)
    go.set()
    store.settle()
    assert torch.equal(new.tensor(), rows)
    assert len(store.disk._made) == 2


def test_rows_are_not_read_before_they_are_written(store, monkeypatch):
    own = os.pwrite
    monkeypatch.setattr(disk_module.os, "pwrite", lambda *args: time.sleep(0.01) or own(*args))
    rows = normal(64, 8)
    assert torch.equal(store.keep(rows, "disk", 32).tensor(), rows)


def test_a_disk_may_take_and_give_less_than_asked(store, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(disk_module.os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    monkeypatch.setattr(disk_module.os, "preadv", lambda file, data, offset: read(file, [data[0][:70]], offset))
    rows = normal(64, 8)
    assert torch.equal(store.keep(rows, "disk", 9).tensor(), rows)


def test_reads_that_nobody_wants_any_more(store, monkeypatch):
    own = os.preadv
    monkeypatch.setattr(disk_module.os, "preadv", lambda *args: time.sleep(0.01) or own(*args))
    rows = normal(64, 8)
    for _ in range(3):
        kept = store.keep(rows, "disk", 8)
        store.settle()
        kept.fetch()
        kept.release()
    kept = store.keep(rows, "disk", 8)
    assert torch.equal(kept.tensor(), rows)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Store(CPU, disk=str(tmp_path / "file" / "below"))


# Compression


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 80, 128, 192, 4096])
def test_int8_is_as_near_as_stated(tmp_path, tier, dtype, width):
    store = Store(CPU, disk=str(tmp_path), compress="int8")
    rows = normal(300, width, dtype=dtype)
    kept = store.keep(rows, tier, 128)
    store.settle()
    error = relative_error(kept.tensor(), rows)
    assert 1e-3 < error < 7e-3
    size = stored_bytes(rows.shape, dtype, "int8")
    assert size < 1.07 * rows.numel()
    pool = store.host if tier == "host" else store.disk
    assert [slot.size for slot in pool._made] == [size]


def test_int8_errs_by_half_a_step_of_the_block(tmp_path):
    rows = normal(50, 4, 128) * torch.logspace(-6, 6, 50)[:, None, None]
    rows[3, 1] = 0
    back = Store(CPU, compress="int8").keep(rows, "host", 7).tensor()
    step = rows.abs().amax(-1, keepdim=True) / 127
    assert ((back - rows).abs() <= 0.5001 * step).all()
    assert (back[3, 1] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_int8_shows_what_is_not_finite(value):
    rows = normal(4, 256)
    rows[2, 5] = value
    back = Store(CPU, compress="int8").keep(rows, "host", 2).tensor()
    assert back[2, :128].isnan().all() and back[2, 128:].isfinite().all() and back[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("rows", [normal(300), normal(300, 32), normal(300, 131), normal(300, 128).long()])
def test_int8_leaves_exact_what_it_must(store, rows):
    assert type(choose_codec(rows, "int8")) is Codec
    assert stored_bytes(rows.shape, rows.dtype, "int8") == rows.nbytes


def test_exact_rows_are_never_compressed(tmp_path):
    store = Store(CPU, disk=str(tmp_path), compress="int8")
    rows = normal(30, 128)
    assert torch.equal(store.keep(rows, "disk", 7, exact=True).tensor(), rows)


# One GPU

ROWS, WIDTH, CHUNK = 8192, 512, 1000
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
