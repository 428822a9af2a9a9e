"""Host buffers and files as slots: exact sizes, used again, and a message where there is no room."""

import ctypes
import errno
import gc
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
import test_tiers
import torch
from test_tiers import CPU, normal

from easy_context.memory import disk as disk_module
from easy_context.memory import host_pool as host_pool_module
from easy_context.memory.tiers import Store

pool = test_tiers.pool
store = test_tiers.store


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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what it does with memory")
@pytest.mark.parametrize("size", [1, 12_345, 5 * 2**20 + 1])
def test_what_is_page_locked_is_there_and_no_childs(pool, size):
    """All pages made before they are locked, large ones if the system has them, and none of them in a forked child."""
    lease = pool.take(size)
    assert not lease.slot.bytes.any()
    made, flags = mapping_of(lease.slot.bytes)
    assert made >= size
    assert "dc" in flags  # do not copy on fork
    assert ("hg" in flags) == host_pool_module.HUGE_PAGES.exists()


def mapping_of(memory):
    """Of the mapping that holds `memory`: bytes that are there, and the kernel's flags (proc_pid_smaps(5))."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    ranges = [(i, [int(end, 16) for end in line.split()[0].split("-")]) for i, line in enumerate(lines) if "-" in line]
    first = next(i for i, (low, high) in ranges if low <= memory.data_ptr() < high)
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("VmFlags"))
    fields = dict(line.split(":", 1) for line in lines[first + 1 : last + 1])
    return int(fields["Rss"].split()[0]) * 1024, fields["VmFlags"].split()


def test_a_forked_child_frees_nothing_of_its_own(pool):
    """What a child maps may lie where the parent's page-locked memory is. When the child's Python gives up that memory,
    its own must stay, and nothing is unlocked."""
    lease = pool.take(2**20)
    child = os.fork()
    if not child:
        try:
            own = (ctypes.c_char * 2**20).from_address(map_at(lease.slot.bytes.data_ptr(), 2**20))
            del lease
            pool.idle.clear()
            gc.collect()
            own.value = b"here"
            os._exit(pool.locked != [2**20])
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    del lease
    pool.idle.clear()
    assert pool.locked == []


def map_at(address, size):
    """mmap(2) of private memory at an address that is free."""
    system = ctypes.CDLL(None, use_errno=True).mmap
    system.restype, system.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    fixed = 0x10  # MAP_FIXED
    return system(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)


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
