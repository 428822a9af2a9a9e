"""The planner against what was measured and what others published.

Measured: this project on H200 (`MEASURED`). Published: EasyContext's Llama-2-7B on 8 A100 80GB, and two other systems
on H100 80GB."""

from dataclasses import replace
from pathlib import Path

import pytest

from easy_context.memory.plan import MemoryPlan
from easy_context.planner import HARDWARE, ModelShape, plan
from easy_context.planner.costs import ORDINARY_LAYERS
from easy_context.planner.flags import parse_keep
from easy_context.planner.memory import host_items, peak
from easy_context.planner.setting import Setting
from easy_context.planner.timing import step_time

GIB = 2**30
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


LEAN = {"keep": "attention:host", "head_groups": 4}  # memory plans of benchmarks/train_step.py
FAST = {"keep": "attention:host", "prefetch": True}
ON_GPU = {"keep": "attention:gpu"}
LARGE_TILES = {**LEAN, "tile_size": 32768}
WHOLE = {"keep": "everything:gpu"}
MOSTLY_WHOLE = {"keep": "1xattention:gpu,3xeverything:gpu", "tile_size": 32768}
STEP = {"engine": "plain"}  # forward and backward alone, as it measures them
TWO_GPUS = {**STEP, "gpus": 2, "mode": "zigzag_ring_attn", "sp_size": 2, "ring": 2}
TRAIN = {"engine": "zero3_offload"}
SEVEN_ON_GPU = {"keep": "9xattention:host,7xattention:gpu", "head_groups": 4}
INPUTS = {"keep": "2xinput:host,29xinput:gpu,1xattention:gpu", "head_groups": 8}

# Of this project on H200 with flash-attn-4. Table in benchmarks/results; model, layers, tokens; memory plan; setting;
# GiB of tensors on a GPU at the most, seconds of a step (None: the only one was the first, with compilation in it).
MEASURED = [
    ("h200_step_32k.md", "llama-3.1-8b", 4, 1 << 15, WHOLE, STEP, 25.5, 0.68),
    ("h200_step_32k.md", "llama-3.1-8b", 4, 1 << 15, FAST, STEP, 13.0, 0.74),
    ("h200_step_128k.md", "llama-3.1-8b", 4, 1 << 17, LEAN, STEP, 15.5, 5.38),
    ("h200_step_128k.md", "llama-3.1-8b", 4, 1 << 17, FAST, STEP, 20.1, 5.29),
    ("h200_step_128k.md", "llama-3.1-8b", 4, 1 << 17, ON_GPU, STEP, 24.1, 5.29),
    ("h200_step_128k_whole.md", "llama-3.1-8b", 4, 1 << 17, WHOLE, STEP, 76.4, 5.11),
    ("h200_step_256k.md", "llama-3.1-8b", 4, 1 << 18, LARGE_TILES, STEP, 22.7, 17.07),
    ("h200_step_256k_whole.md", "llama-3.1-8b", 4, 1 << 18, MOSTLY_WHOLE, STEP, 122.5, 16.72),
    ("h200_step_1m_2_layers.md", "llama-3.1-8b", 2, 1 << 20, LEAN, STEP, 54.3, None),
    ("h200x2_step_256k.md", "llama-3.1-8b", 4, 1 << 18, LARGE_TILES, TWO_GPUS, 18.6, 8.94),
    ("h200x2_step_512k.md", "llama-3.1-8b", 4, 1 << 19, LARGE_TILES, TWO_GPUS, 22.7, 30.55),
    ("h200_llama_7b_480k.md", "llama-2-7b", 32, 491520, INPUTS, TRAIN, 130.7, 518.9),
    ("h200_llama_1b_1m.md", "llama-3.2-1b", 16, 1 << 20, SEVEN_ON_GPU, TRAIN, 75.6, 492.9),
]


@pytest.mark.parametrize(("source", "model", "layers", "seq_length", "how", "where", "memory", "seconds"), MEASURED)
def test_measured_steps(source, model, layers, seq_length, how, where, memory, seconds):
    shape = replace(ModelShape.of(model), layers=layers)
    memory_plan = MemoryPlan(parse_keep(how["keep"], layers), **{k: v for k, v in how.items() if k != "keep"})
    setting = Setting(shape, HARDWARE["H200"], seq_length, memory_plan, kernel="flash_attn_4", **where)
    assert peak(setting).total / GIB == pytest.approx(memory, rel=0.10)
    table = (RESULTS / source).read_text()
    assert f"| {memory} |" in table
    if seconds is not None:
        assert step_time(setting).total == pytest.approx(seconds, rel=0.15)
        assert f"| {seconds} |" in table


class NarrowProjections(MemoryPlan):
    projection_rows = property(lambda self: self.tile_size)


def test_a_whole_model_that_filled_gpu_and_host():
    """Projections' tiles were still as narrow as the others. Of the host, `free` showed 122.6 GiB."""
    how = NarrowProjections(parse_keep("1xinput:host,31xinput:gpu", 32), head_groups=32, tile_size=4096)
    setting = Setting(ModelShape.of("llama-2-7b"), HARDWARE["H200"], 497664, how, kernel="flash_attn_4", **TRAIN)
    assert peak(setting).total / GIB == pytest.approx(132.3, rel=0.10)
    assert step_time(setting).total == pytest.approx(616.8, rel=0.15)
    assert sum(host_items(setting).values()) / GIB == pytest.approx(122.6, rel=0.02)
    assert plan("llama-2-7b", seq_length=497664, host_memory=125 * GIB).longest == 497664
    table = (RESULTS / "h200_llama_7b_486k.md").read_text()
    assert all(figure in table for figure in ("| 132.3 |", "| 616.8 |", "at most 122.6 |"))


def test_a_whole_model_at_a_million_tokens_on_two_gpus():
    """As `--parallel_mode auto --keep auto` chose."""
    how = MemoryPlan(parse_keep("15xinput:host,8xinput:gpu,9xattention:gpu", 32), head_groups=4)
    split = {"gpus": 2, "mode": "ulysses_attn", "sp_size": 2, "kernel": "flash_attn_4", **TRAIN}
    setting = Setting(ModelShape.of("llama-2-7b"), HARDWARE["H200"], 1 << 20, how, **split)
    assert peak(setting).total / GIB == pytest.approx(129.2, rel=0.10)
    assert step_time(setting).total == pytest.approx(1115.7, rel=0.15)
    assert sum(host_items(setting).values()) / GIB == pytest.approx(244.7, rel=0.02)
    table = (RESULTS / "h200x2_llama_7b_1m.md").read_text()
    assert all(figure in table for figure in ("| 129.2 |", "| 1115.7 |", "at most 244.7 |"))


@pytest.mark.parametrize(("seq_length", "speed"), [(512 * 1024, 2133), (700 * 1024, 1603)])
def test_the_originals_throughput(seq_length, speed):
    how = MemoryPlan.uniform(32, "input", "host", tile_size=seq_length, compile=False)
    setting = Setting(
        shape=ModelShape.of("llama-2-7b"),
        hardware=HARDWARE["A100"],
        seq_length=seq_length,
        plan=how,
        gpus=8,
        mode="zigzag_ring_attn",
        sp_size=8,
        ring=8,
        kernel="flash_attn_2",
        engine="zero3_offload",
        costs=ORDINARY_LAYERS,
    )
    assert seq_length / step_time(setting).total == pytest.approx(speed, rel=0.20)
    assert peak(setting).total < setting.usable


@pytest.mark.parametrize(
    ("model", "seq_length", "gpus", "kernel", "seconds"),
    [
        ("llama-3.1-8b", 500_000, 1, "torch_flash", 1010),  # ALST, https://arxiv.org/abs/2506.13996
        ("qwen3-8b", 1 << 20, 8, "cudnn", 380),  # TRL with accelerate's context parallelism
    ],
)
def test_others_published_step_times(model, seq_length, gpus, kernel, seconds):
    shape = ModelShape.of(model)
    setting = Setting(
        shape=shape,
        hardware=HARDWARE["H100"],
        seq_length=seq_length,
        plan=MemoryPlan.uniform(shape.layers, "input", "host", compile=False),
        gpus=gpus,
        mode="zigzag_ring_attn",
        sp_size=gpus,
        ring=gpus,
        kernel=kernel,
        engine="zero3_offload",
        costs=ORDINARY_LAYERS,
    )
    assert step_time(setting).total == pytest.approx(seconds, rel=0.20)
