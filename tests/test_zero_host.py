"""Host memory of ZeRO-3 offload: 18 bytes a trained parameter before the first step, and the same training."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from harness import free_port, tiny_model

from easy_context.memory import host_pool, zero_host
from easy_context.memory.zero_host import exact_pinning, hold_once, let_go

WORLD, STEPS, MICRO_STEPS = 2, 4, 2
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What `_train` found on each rank, by its variant."""
    pytest.importorskip("deepspeed")
    path = tmp_path_factory.mktemp("zero_host")
    torch.multiprocessing.spawn(_train, (free_port(), path), nprocs=WORLD)
    return [torch.load(path / f"rank{rank}", weights_only=False) for rank in range(WORLD)]


def test_training_is_bit_equal(trained):
    for rank in trained:
        norms = rank["deepspeed"]["norms"]
        assert min(norms) > 0.1 and len(set(norms)) == STEPS  # clipped at 0.1 every time
        for name in ("losses", "norms"):
            assert rank["once"][name] == rank["deepspeed"][name]
        for name in ("gradients", "weights"):
            mine, theirs = rank["once"][name], rank["deepspeed"][name]
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_a_parameter_takes_18_bytes_from_the_start(trained):
    for rank in trained:
        size, groups = rank["once"]["share"], rank["once"]["groups"]
        assert groups > 2
        assert (rank["once"]["before"], rank["once"]["after"]) == (18 * size, 18 * size)
        assert (rank["deepspeed"]["before"], rank["deepspeed"]["after"]) == (14 * size, 22 * size)


def test_what_is_page_locked_is_exact_and_freed(trained):
    """Weights and sums of gradients; the masters' own gradients and what weights were loaded into are gone."""
    for rank in trained:
        assert rank["once"]["locked"] == 6 * rank["once"]["share"]
        assert rank["once"]["locked_at_most"] == 10 * rank["once"]["share"]


def test_a_checkpoint_is_loaded_over_the_states(trained):
    """As DeepSpeed alone goes on from it (its Adam rounds a power of beta otherwise than a product)."""
    for rank in trained:
        for name in ("losses", "norms"):
            assert rank["resumed"][name] == rank["deepspeed resumed"][name]
        mine, theirs = rank["resumed"]["weights"], rank["deepspeed resumed"]["weights"]
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_states_that_do_not_fit_are_refused_by_all_before_the_step(trained):
    for rank in trained:
        assert "0.00 GiB of host memory needed for Adam's states, 0.00 GiB there" in rank["shortage"]


def test_a_host_that_shows_less_than_it_may_use_is_believed_the_figure_given(trained):
    for rank in trained:
        assert rank["told"] == 8 * rank["once"]["share"]


def test_what_only_training_needs_can_go_before_the_model_is_saved(trained):
    for rank in trained:
        before, after = rank["let go"]["before"], rank["let go"]["after"]
        assert rank["let go"]["bytes"] == 2 * rank["once"]["share"]
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert trained[0]["let go"]["before"]  # rank 0 gathers the model


def test_offloaded_sums_come_back_and_are_copied_again(trained):
    for rank in trained:
        assert rank["moved"]["losses"] == rank["deepspeed"]["losses"]
        assert rank["moved"]["norms"] == rank["deepspeed"]["norms"]


def _train(rank: int, port: int, path) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # ninja, as pip installs it
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    found = {"deepspeed": _run(rank), "once": _run(rank, once=True, save=path / "checkpoint")}
    found["deepspeed resumed"] = _run(rank, load=path / "checkpoint")
    found["resumed"] = _run(rank, once=True, load=path / "checkpoint")
    found["moved"] = _run(rank, once=True, move=True)
    engine = _engine()
    if rank == 1:
        zero_host.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1000, total=5000))
    with pytest.raises(MemoryError) as error:
        hold_once(engine)
    found["shortage"] = str(error.value)
    hold_once(engine, host_memory=2**40)
    states = engine.optimizer.optimizer.state
    found["told"] = sum(t.nbytes for state in states.values() for t in (state["exp_avg"], state["exp_avg_sq"]))
    before = _model(engine)
    let_go(engine)
    after, left = _model(engine), _bytes(engine.optimizer)
    torch.save({**found, "let go": {"before": before, "after": after, "bytes": left}}, path / f"rank{rank}")


def _engine():
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from transformers.integrations import HfDeepSpeedConfig

    zero = {"stage": 3, "sub_group_size": 5000, "stage3_param_persistence_threshold": 0}
    zero |= {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_STEPS, "gradient_clipping": 0.1}
    config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": zero}
    global told  # in force while somebody holds it
    told = HfDeepSpeedConfig(config)
    model = tiny_model(dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _model(engine) -> dict[str, torch.Tensor]:
    """What `accelerator.get_state_dict` gives."""
    return engine._zero3_consolidated_16bit_state_dict() or {}


def _run(rank: int, once=False, save=None, load=None, move=False) -> dict:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    locked, sizes = [], []
    host_pool.page_lock = lambda memory: (locked.append(memory.nbytes), sizes.append(sum(locked)))
    host_pool.page_unlock = lambda memory, device: locked.remove(memory.nbytes)
    with exact_pinning(CUDA) if once else nullcontext():
        engine = _engine()
    if once:
        hold_once(engine)
    optimizer = engine.optimizer
    share = sum(master.numel() for master in optimizer.fp32_partitioned_groups_flat)
    found = {"share": share, "groups": len(optimizer.fp32_partitioned_groups_flat), "before": _bytes(optimizer)}
    found |= {"losses": [], "norms": [], "locked": sum(locked), "locked_at_most": max(sizes, default=0)}
    if load:
        engine.load_checkpoint(str(load))
    for step in range(STEPS // 2 if load else 0, STEPS):
        for micro in range(MICRO_STEPS):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            ids = torch.randint(97, (1, 16), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            found["losses"].append(loss.item())
            if micro == MICRO_STEPS - 1:
                found["gradients"] = {name: safe_get_full_grad(p).clone() for name, p in engine.named_parameters()}
            engine.step()
        found["norms"].append(float(engine.get_global_grad_norm()))
        if save and step == STEPS // 2 - 1:
            engine.save_checkpoint(str(save))
        if move and step == 0:
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

            optimizer.offload_states(include=[OffloadStateTypeEnum.lp_grads])
            optimizer.reload_states()
    found["weights"] = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.named_parameters()}
    return {**found, "after": _bytes(optimizer)}


def _bytes(optimizer) -> int:
    """Of all the distinct storages that the optimizer and the one inside it refer to; scalars left out."""
    sizes, waiting = {}, [vars(optimizer), optimizer.optimizer.state]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            if storage.nbytes() > 64:
                sizes[storage.data_ptr()] = storage.nbytes()
            waiting.append(thing.grad if thing.is_leaf else None)
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple):
            waiting += thing
    return sum(sizes.values())


def test_other_engines_and_versions_are_left_alone(caplog):
    hold_once(torch.nn.Linear(2, 2))
    hold_once(SimpleNamespace(optimizer=SimpleNamespace(offload_optimizer=False)))
    assert not caplog.records
    hold_once(SimpleNamespace(optimizer=SimpleNamespace(offload_optimizer=True)))
    assert "no grad_partitions_flat_buffer" in caplog.text and "22 bytes" in caplog.text


class DeepSpeedZeroOptimizer_Stage3:
    """One with two masters of 4 and 2 elements, and a parameter in each."""

    def __init__(self, dtype=torch.float32, **overrides):
        self.offload_optimizer, self.swap_optimizer, self.zenflow = True, False, False
        self.grad_partitions_flat_buffer = torch.zeros(6, dtype=dtype)
        self.fp32_partitioned_groups_flat = [torch.zeros(size, requires_grad=True) for size in (4, 2)]
        for master in self.fp32_partitioned_groups_flat:
            master.grad = torch.zeros_like(master)
        self.fp16_groups = [[SimpleNamespace(ds_id=0)], [SimpleNamespace(ds_id=1)]]
        self.grad_position = {0: [0, 0, 4], 1: [1, 0, 2]}
        self.__param_id_to_grad_partition = dict(enumerate(self.grad_partitions_flat_buffer.split([4, 2])))
        self.optimizer = torch.optim.SGD(self.fp32_partitioned_groups_flat)
        self.__dict__.update(overrides)

    def get_param_id(self, param):
        return param.ds_id


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dtype": torch.bfloat16}, "summed in torch.bfloat16"),
        ({"swap_optimizer": True}, "NVMe"),
        ({"zenflow": True}, "ZenFlow"),
        ({"grad_position": {0: [0, 0, 4], 1: [1, 1, 2]}}, "orders sums of gradients otherwise"),
    ],
)
def test_what_cannot_be_held_once_is_left_and_said(caplog, settings, why):
    optimizer = DeepSpeedZeroOptimizer_Stage3(**settings)
    before = [master.grad for master in optimizer.fp32_partitioned_groups_flat]
    hold_once(SimpleNamespace(optimizer=optimizer))
    assert why in caplog.text
    assert all(m.grad is grad for m, grad in zip(optimizer.fp32_partitioned_groups_flat, before, strict=True))


def test_states_of_other_optimizers_are_theirs(caplog):
    optimizer = DeepSpeedZeroOptimizer_Stage3()
    hold_once(SimpleNamespace(optimizer=optimizer))
    optimizer.grad_partitions_flat_buffer.copy_(torch.arange(6.0))
    assert [m.grad.tolist() for m in optimizer.fp32_partitioned_groups_flat] == [[0, 1, 2, 3], [4, 5]]
    assert not optimizer.optimizer.state and "states of SGD" in caplog.text


def test_page_locks_are_exact_within_and_deepspeeds_own_after(monkeypatch):
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
    locked = []
    monkeypatch.setattr(host_pool, "page_lock", lambda memory: locked.append(memory.nbytes))
    monkeypatch.setattr(host_pool, "page_unlock", lambda memory, device: locked.remove(memory.nbytes))
    tensor = torch.randn(3, 1000, dtype=torch.bfloat16)
    with exact_pinning(CUDA):  # no ZeRO-3
        assert "pin_memory" not in vars(accelerator)
    monkeypatch.setattr(zero_host, "is_zero3", lambda: True)
    with exact_pinning(torch.device("cpu")):
        assert "pin_memory" not in vars(accelerator)
    with pytest.raises(KeyError), exact_pinning(CUDA):
        pinned = accelerator.pin_memory(tensor)
        assert torch.equal(pinned, tensor) and pinned.data_ptr() != tensor.data_ptr()
        assert accelerator.pin_memory(torch.empty(0)).numel() == 0
        raise KeyError
    assert locked == [6000] and "pin_memory" not in vars(accelerator)
    part = torch.nn.Parameter(pinned[1].detach())
    del pinned
    assert locked == [6000]
    part.data = torch.empty(0)
    assert locked == []


def test_weights_that_cannot_be_page_locked_are_named(monkeypatch):
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()

    def fail(memory):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host_pool, "page_lock", fail)
    monkeypatch.setattr(zero_host, "is_zero3", lambda: True)
    with pytest.raises(MemoryError, match="ZeRO-3 offload.*18 bytes"), exact_pinning(CUDA):
        accelerator.pin_memory(torch.zeros(10))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_page_locked_memory_on_a_gpu(monkeypatch):
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
    unlocked, own = [], host_pool.page_unlock
    monkeypatch.setattr(
        host_pool, "page_unlock", lambda memory, device: (unlocked.append(memory.nbytes), own(memory, device))
    )
    monkeypatch.setattr(zero_host, "is_zero3", lambda: True)
    tensor = torch.randn(2**20 + 1000)
    with exact_pinning(CUDA):
        pinned = accelerator.pin_memory(tensor)
    assert pinned.is_pinned() and pinned[5:].is_pinned() and accelerator.is_pinned(pinned)
    assert pinned.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(pinned.to(CUDA, non_blocking=True).cpu(), tensor)
    address = pinned.data_ptr()
    del pinned
    assert unlocked == [tensor.nbytes]
    again = torch.cuda.cudart().cudaHostUnregister(address)
    assert again != torch.cuda.cudart().cudaError.success  # it was no longer page-locked
