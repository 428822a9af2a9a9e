"""Rows that wait in any tier come back as they were, compressed ones as near as stated."""

import pytest
import torch

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


# Disk


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
