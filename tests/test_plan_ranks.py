"""Planned layers of several ranks: every mode, DDP, FSDP2, ZeRO-3, each against one process."""

import os
import sys

import pytest
import torch
from harness import free_port, spawn, tiny_model
from test_memory_plan import LENGTH, batch, gradients, worst
from torch.distributed.fsdp import fully_shard

import easy_context as ec
from easy_context.memory.layer import apply_memory_plan
from easy_context.memory.plan import MemoryPlan
from easy_context.mesh import reset_mesh

MODES = ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_modes(world):
    truth = {length: gradients(tiny_model(), batch(length=length)) for length in (3, LENGTH)}
    for found in spawn(_steps_of_a_rank, world):
        for (mode, keep, length), step in found.items():
            assert worst(step, truth[length]) < 1e-9, (mode, keep, length)


def _steps_of_a_rank(rank, world):
    """With three tokens a rank of four has none."""
    cases = [(mode, keep, LENGTH) for mode in MODES for keep in ("attention", "input")]
    cases += [(mode, "attention", 3) for mode in MODES]
    return {case: _step(rank, world, *case) for case in cases}


def _step(rank, world, mode, keep, length):
    reset_mesh()
    ec.init_seq_parallel(world, 2 if mode == "usp_attn" and world == 4 else None)
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch(mode, model)
    apply_memory_plan(model, MemoryPlan.uniform(2, keep, head_groups=2, tile_size=5, prefetch=True))
    return gradients(model, batch(length=length), mode, rank, world)


def test_engines():
    truth = gradients(tiny_model(), batch())
    for found in spawn(_engines_of_a_rank, 2):
        for engine, step in found.items():
            assert worst(step, truth) < 1e-12, engine


def _engines_of_a_rank(rank, world):
    ec.init_seq_parallel(world)
    return {engine: _engine_step(engine, rank, world) for engine in ("ddp", "fsdp2")}


def _engine_step(engine, rank, world):
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("zigzag_ring_attn", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=2, tile_size=7))
    prepared = ec.CausalLMWithLoss(model)
    if engine == "ddp":
        prepared = torch.nn.parallel.DistributedDataParallel(prepared)
    else:
        for module in (*model.model.layers, prepared):
            fully_shard(module)
    local = ec.prepare_seq_parallel_inputs("zigzag_ring_attn", *batch(), rank, world, "cpu")
    loss, reported = prepared(**{k.removeprefix("local_"): v for k, v in local.items()})
    loss.backward()
    whole = {name: w.grad.full_tensor() if engine == "fsdp2" else w.grad for name, w in model.named_parameters()}
    return reported.item(), whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # in short: the run of train.py with head groups in test_train.py
def test_head_groups_under_zero3(tmp_path):
    """Qwen3 norms queries and keys: small weights that all groups share, beside others of which each has its rows."""
    pytest.importorskip("deepspeed")
    torch.multiprocessing.spawn(_zero3_step, (2, free_port(), tmp_path), nprocs=2)
    truth = gradients(tiny_model("qwen3", torch.float32), batch())
    for rank in range(2):
        assert worst(torch.load(tmp_path / str(rank)), truth) < 1e-5


def _zero3_step(rank, world, port, path):
    import deepspeed
    from deepspeed.utils import safe_get_full_grad
    from transformers.integrations import HfDeepSpeedConfig

    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # ninja, as pip installs it
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    ec.init_seq_parallel(world)
    model = tiny_model("qwen3", torch.float32)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    told = HfDeepSpeedConfig(config)  # as Accelerate tells transformers; in force while somebody holds it
    ec.apply_seq_parallel_monkey_patch("zigzag_ring_attn", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=2, tile_size=7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(
        model=ec.CausalLMWithLoss(model), optimizer=optimizer, config=told.config, dist_init_required=False
    )
    local = ec.prepare_seq_parallel_inputs("zigzag_ring_attn", *batch(), rank, world, "cpu")
    loss, reported = engine(**{k.removeprefix("local_"): v for k, v in local.items()})
    engine.backward(loss)
    assert all(weight.numel() == 0 for weight in model.parameters()), "a weight is whole between the passes"
    torch.save((reported.item(), {n: safe_get_full_grad(w) for n, w in model.named_parameters()}), path / str(rank))
