"""The planner: sizes against real models, figures against measured and published ones, choices, the command.

Measured: this project on H200 (`MEASURED`). Published: EasyContext's Llama-2-7B on 8 A100 80GB, and two other systems
on H100 80GB.
"""

from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import easy_context
from easy_context import train_flags
from easy_context.memory.plan import LayerPlan, MemoryPlan
from easy_context.metrics import flops_per_token
from easy_context.planner import HARDWARE, ModelShape, exchange, for_training, plan, settle
from easy_context.planner.cli import main, parser
from easy_context.planner.costs import ORDINARY_LAYERS
from easy_context.planner.flags import flags_of, keep_flag, parse_keep, size, tokens
from easy_context.planner.known_models import KNOWN_MODELS
from easy_context.planner.measure import measure_here
from easy_context.planner.memory import host_items, kept_bytes, peak, phases
from easy_context.planner.picture import durations
from easy_context.planner.search import EQUAL, MARGIN
from easy_context.planner.setting import Setting
from easy_context.planner.timing import step_time

GIB = 2**30
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


# --- sizes ----------------------------------------------------------------------------------------


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"]
FAMILIES += ["starcoder2", "arcee", "apertus", "jais2", "nanochat"]  # MLPs without a gate


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_models(family):
    model = tiny_model(family, sliding_window=None) if family != "llama" else tiny_model()
    shape = ModelShape.of(model)
    real = sum(weight.numel() for weight in model.parameters())
    assert shape.parameters == pytest.approx(real, rel=0.02)  # biases and further norms aside
    assert shape.linear_weights == sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert ModelShape.of(model.config) == replace(shape, name=type(model.config).__name__)


@pytest.mark.parametrize("family", ["cohere2", "granite", "glm4", "olmo2", "opt", "gpt2"])
def test_families_without_an_entry_are_compared_with_their_model(family):
    """A config.json leaves out what transformers fills in, such as tied embeddings."""
    config = AutoConfig.for_model(family)
    shape = ModelShape.from_dict({"model_type": family}, "a file")
    assert shape == replace(ModelShape.of(config), name="a file")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # which transformers 5.0 leaves undone without memory
    assert shape.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.03)


def test_the_comparison_takes_no_part_in_zero3():
    """The first rank plans alone, when DeepSpeed is set up already: a collective would wait for ever."""
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed")
    pytest.importorskip("deepspeed")
    told = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert deepspeed.is_deepspeed_zero3_enabled()
    assert ModelShape.of(AutoConfig.for_model("granite")).layers == 32
    del told


@pytest.mark.parametrize(
    ("family", "why"),
    [("falcon", "beside embeddings"), ("bloom", "beside embeddings"), ("hal9000", "no model_type 'hal9000'")],
)
def test_families_of_another_arithmetic_are_refused(family, why):
    with pytest.raises(ValueError, match=f"a file: .*{why}.*: not modelled"):
        ModelShape.from_dict({"model_type": family}, "a file")


def test_flops_are_those_of_the_metrics():
    model = tiny_model()
    setting = Setting(ModelShape.of(model), HARDWARE["H200"], 1024, MemoryPlan.uniform(2))
    assert setting.flops == pytest.approx(1024 * flops_per_token(model, 1024))


def test_lora_parameters_are_pefts():
    peft = pytest.importorskip("peft")
    model = tiny_model()
    shape = ModelShape.of(model)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapters = peft.get_peft_model(model, lora)
    assert shape.lora_parameters(4) == sum(w.numel() for w in adapters.parameters() if w.requires_grad)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-2-13b", 13.016), ("llama-3.1-8b", 8.030), ("llama-3.2-1b", 1.236)],
)
def test_known_models(name, billions):
    assert ModelShape.of(name).parameters / 1e9 == pytest.approx(billions, abs=0.001)


def test_configuration_files(tmp_path):
    config = tiny_model().config
    config.save_pretrained(tmp_path)
    shape = ModelShape.of(str(tmp_path))
    assert shape == ModelShape.of(tmp_path / "config.json") == replace(ModelShape.of(config), name=tmp_path.name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixtral is a mixture of experts"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
    ],
)
def test_what_is_not_modelled_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        ModelShape.from_dict({**tiny_model().config.to_dict(), **changes}, "some")


def test_windows_leave_fewer_pairs():
    shape = replace(ModelShape.of(tiny_model()), windows=(None, 128))
    assert shape.pairs(1024) == [1024**2 / 2, 128 * 1024 - 128**2 / 2]


# --- accuracy -------------------------------------------------------------------------------------

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
    ("h200x2_step_512k.md", "llama-3.1-8b", 4, 1 << 19, LARGE_TILES, TWO_GPUS, 22.7, 30.26),
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


# --- memory and time ------------------------------------------------------------------------------


def base(**changes) -> Setting:
    plain = Setting(ModelShape.of("llama-3.1-8b"), HARDWARE["H200"], 131072, MemoryPlan.uniform(32), kernel="cudnn")
    return replace(plain, **changes)


def test_memory_follows_settings():
    def most(**changes) -> float:
        return peak(base().with_plan(**changes)).total

    assert most(head_groups=4) < most(head_groups=1)
    assert most(prefetch=True) > most(prefetch=False)
    on_gpu = base().with_plan(layers=(LayerPlan("attention", "gpu"),) * 32)
    assert peak(on_gpu).total - peak(base()).total == pytest.approx(31 * kept_bytes(base(), LayerPlan()), rel=0.01)
    assert host_items(on_gpu)["kept for backward"] == 0
    assert host_items(base())["kept for backward"] == 32 * kept_bytes(base(), LayerPlan())


def test_the_peak_is_the_highest_phase_of_all_layers():
    kinds = [LayerPlan("input", "host"), LayerPlan("attention", "gpu"), LayerPlan("everything", "gpu")]
    for prefetch in (False, True):
        setting = base().with_plan(layers=tuple(k for k in kinds for _ in range(5)) + (LayerPlan(),), prefetch=prefetch)
        assert peak(setting).total == max(phase.total for phase in phases(setting))


def test_time_follows_settings():
    def seconds(*layers: LayerPlan) -> float:
        return step_time(base().with_plan(layers=layers * 32)).total

    everything, attention, bare = (LayerPlan(k, "gpu") for k in ("everything", "attention", "input"))
    assert seconds(attention) < seconds(bare)
    assert step_time(base().with_plan(layers=(everything,) * 32)).linear < step_time(base()).linear
    assert step_time(base()).attention < step_time(base().with_plan(layers=(bare,) * 32)).attention


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"])
def test_slow_links_show(mode):
    ring = {"ulysses_attn": 1, "usp_attn": 2}.get(mode, 8)
    near = base(gpus=8, sp_size=8, ring=ring, mode=mode)
    far = replace(near, nodes=2)
    assert 0 < step_time(near).exchange < 0.05 * step_time(near).total
    assert step_time(far).exchange > step_time(near).exchange
    assert step_time(near).attention == pytest.approx(step_time(base()).attention / 8)


@pytest.mark.parametrize("tokens, kv_heads, chunks", [(8192, 8, 1), (32768, 8, 2), (65536, 8, 4), (65536, 2, 1)])
def test_of_long_all_to_alls_one_chunk_shows(tokens, kv_heads, chunks):
    """Over a link of 100 GB/s, where chunks compute long enough to hide the others, and where they take no time."""
    shard = exchange.Shard(tokens, 32, kv_heads, 128)
    sent = sum(shard.of_heads(2)) / 100e9
    for computed, shown in ((1.0, sent / chunks), (0.0, sent)):
        for backward in (False, True):
            seconds = exchange.exposed(
                "ulysses_attn", shard, 2, 1, computed, lambda size, _: size / 100e9, backward=backward
            )
            assert seconds == pytest.approx(shown)


# --- choices --------------------------------------------------------------------------------------


def tiers(made) -> list[str]:
    return [layer.tier for layer in made.memory_plan.layers]


def test_short_sequences_keep_everything():
    made = plan("llama-3.2-1b", seq_length=32768, host_memory=125 * GIB)
    assert {layer.keep for layer in made.memory_plan.layers} == {"everything"}
    assert 0.2 < made.mfu < 0.6 and made.longest >= made.setting.seq_length


def test_long_ones_fill_the_gpu_then_the_host_and_leave_a_margin():
    made = plan("llama-3.2-1b", seq_length=1 << 20, host_memory=125 * GIB, gpu_memory=139 * GIB)
    on_gpu = tiers(made).count("gpu")
    assert {layer.keep for layer in made.memory_plan.layers} == {"attention"} and 8 <= on_gpu < 16
    assert tiers(made) == ["host"] * (16 - on_gpu) + ["gpu"] * on_gpu  # the last ones are needed first
    assert made.memory_plan.head_groups == 1 and not made.memory_plan.prefetch
    gpu, host = sum(made.memory.gpu.values()), sum(made.memory.host.values())
    assert gpu <= (1 - MARGIN) * made.memory.gpu_usable < gpu + kept_bytes(made.setting, LayerPlan())
    assert host <= (1 - MARGIN) * made.memory.host_limit


def test_margins_are_given_up_before_sequences():
    given = {"host_memory": 125 * GIB, "gpu_memory": 139 * GIB}
    tight = plan("llama-3.2-1b", seq_length=plan("llama-3.2-1b", seq_length=1 << 20, **given).longest, **given)
    assert sum(tight.memory.gpu.values()) > (1 - MARGIN) * tight.memory.gpu_usable
    assert sum(tight.memory.gpu.values()) <= tight.memory.gpu_usable
    assert sum(tight.memory.host.values()) <= tight.memory.host_limit


def test_prefetch_and_groups_of_heads_where_they_bring_something():
    slow = replace(HARDWARE["H100"], host_link=4e9, host_total=32e9)
    made = plan("llama-3.1-8b", seq_length=131072, gpu=slow, engine="zero3_offload")
    assert made.memory_plan.prefetch and made.memory_plan.head_groups == 1
    short = plan("llama-3.1-8b", seq_length=1 << 20, gpu="H100")
    assert short.memory_plan.head_groups > 1


def test_a_full_host_sends_layers_to_the_disk_or_computes_attention_again():
    small = {"seq_length": 1 << 19, "gpu_memory": 80 * GIB, "host_memory": 300 * GIB}
    bare, disk = plan("llama-3.1-8b", **small), plan("llama-3.1-8b", disk="/scratch", **small)
    assert "input" in {layer.keep for layer in bare.memory_plan.layers}
    away = tiers(disk)
    assert away == sorted(away, key=["disk", "host", "gpu"].index) and set(away) == {"disk", "host", "gpu"}
    assert disk.memory_plan.disk == "/scratch" and disk.time.total < bare.time.total


def test_every_split_is_among_the_alternatives():
    made = plan("llama-3.1-8b", gpus=4, gpu="H100", seq_length=262144, host_memory=1e12)
    found = {(other.mode, other.seq_parallel_size, other.ring_degree) for other in made.alternatives}
    rings = {(mode, size, None) for size in (2, 4) for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn")}
    assert rings | {("usp_attn", 4, 2)} <= found
    assert made.tokens_per_second * EQUAL >= max(other.tokens_per_second for other in made.alternatives)
    one = plan("llama-3.1-8b", gpus=4, gpu="H100", seq_length=262144, mode="usp_attn", seq_parallel_size=4)
    assert (one.mode, one.ring_degree, one.seq_parallel_size) == ("usp_attn", 2, 4)


def test_asked_for_modes_and_degrees_are_kept():
    for gpus, mode, ring in [(1, "zigzag_ring_attn", None), (2, "usp_attn", 2), (8, "usp_attn", 4)]:
        made = plan("llama-3.2-1b", gpus=gpus, seq_length=65536, mode=mode, seq_parallel_size=gpus, ring_degree=ring)
        assert (made.mode, made.ring_degree, made.seq_parallel_size) == (mode, ring, gpus)


def test_the_longest_is_the_longest():
    given = {"gpu": "A100", "host_memory": 256e9, "engine": "zero3_offload"}
    reach = plan("llama-2-7b", seq_length=4096, **given).longest
    assert plan("llama-2-7b", seq_length=reach, **given)
    with pytest.raises(ValueError, match=f"--seq-length {reach} "):
        plan("llama-2-7b", seq_length=reach + 1024, **given)


@pytest.mark.parametrize(
    ("model", "asked", "named"),
    [
        ("llama-3.1-8b", {"seq_length": 4096, "host_memory": 100e9}, "host memory runs out first, at optimizer"),
        ("llama-3.1-8b", {"seq_length": 4096, "gpu_memory": 8e9, "engine": "plain"}, "GPU memory .*, at weights"),
        ("llama-2-13b", {"seq_length": 32768, "gpu_memory": 8e9, "host_memory": 1e12}, r"GPU memory .*\(loss\)"),
        ("llama-2-7b", {"seq_length": 32768, "host_memory": 22e9}, "host memory .*, at gradients"),
        ("llama-2-7b", {"seq_length": 4096, "host_memory": 22e9, "gpu_memory": 6e9}, "host memory .*, at gradients"),
        ("llama-2-7b", {"seq_length": 100 << 20, "host_memory": 125 * GIB}, "GPU memory .*, at hidden states"),
        ("llama-2-7b", {"seq_length": 1 << 19, "host_memory": 125 * GIB}, "host memory .*, at kept for backward"),
    ],
)
def test_the_impossible_names_what_runs_out_and_what_would_do(model, asked, named):
    with pytest.raises(ValueError, match=named) as raised:
        plan(model, **asked)
    ways = str(raised.value).split("Nearest that fits: ")[1].split(", or ")
    for way in ways:
        words, _, mode = way.partition(" (")
        words = words.replace(" with ", " ").replace("--", "").replace("-", "_").split()
        nearest = dict(zip(words[::2], words[1::2], strict=True))
        nearest = {name: size(text) if "memory" in name else int(text) for name, text in nearest.items()}
        assert plan(model, **{**asked, **nearest, "mode": mode.rstrip(")").partition(",")[0] or None})
        for name in nearest.keys() & {"gpu_memory", "host_memory"}:
            with pytest.raises(ValueError, match="do not fit"):  # and no less would do
                plan(model, **{**asked, **nearest, name: nearest[name] - GIB})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kernel": "flash_attn_9"}, "flash_attn_9"),
        ({"gpu": "B9000"}, "B9000"),
        ({"engine": "zero9"}, "zero9"),
        ({"gpus": 3, "nodes": 2}, "--nodes"),
        ({"mode": "mega_attn", "gpus": 2}, "mega_attn"),
        ({"mode": "mega_attn"}, "mega_attn"),
        ({"mode": "usp_attn", "gpus": 4, "ring_degree": 3}, "ring_degree=3"),
        ({"gpus": 8, "ring_degree": 3}, "ring_degree=3"),
        ({"gpus": 8, "ring_degree": 4, "seq_parallel_size": 2}, "ring_degree=4"),
        ({"gpus": 8, "ring_degree": 0}, "ring_degree must"),
        ({"gpus": 8, "seq_parallel_size": 0}, "seq_parallel_size must"),
        ({"lora": 0}, "lora must"),
        ({"batch_size": 1.5}, "batch_size must"),
        ({"gpus": 1_000_000}, "gpus=1000000"),
        ({"gpu_memory": "80GB"}, "gpu_memory must"),
        ({"disk_memory": 1e12}, "disk_memory"),
    ],
)
def test_wrong_settings(wrong, named):
    with pytest.raises(ValueError, match=named):
        plan("llama-3.1-8b", seq_length=4096, **wrong)


def test_tables_of_kernels_need_not_be_alike():
    """As measured where some are not installed, or cannot do every head size."""
    some = replace(HARDWARE["H200"], kernels={"cudnn": {64: (2e12, 1e12)}, "torch_flash": {128: (4e12, 3e12)}})
    assert some.kernel(None, 128) == ("torch_flash", 4e12, 3e12)
    assert some.kernel("cudnn", 128) == ("cudnn", 2e12, 1e12)
    assert some.kernel("flash_attn_2", 128) == ("flash_attn_2", 4e12, 3e12)
    with pytest.raises(ValueError, match="flash_attn_4: no figures on H200; one of cudnn, torch_flash"):
        some.kernel("flash_attn_4", 128)
    own = replace(some, kernels={**some.kernels, "flash_attn_2": {128: (5e12, 4e12)}})
    assert own.kernel("flash_attn_2", 128) == ("flash_attn_2", 5e12, 4e12)
    with pytest.raises(ValueError, match="no figures on H200; one of none"):
        replace(some, kernels={}).kernel(None, 128)


def test_training_on_this_machine():
    made = for_training(tiny_model().config, world_size=2, seq_length=512, device=torch.device("cpu"))
    assert made.setting.gpus == 2 and len(made.memory_plan.layers) == 2
    assert {layer.keep for layer in made.memory_plan.layers} == {"everything"}


def test_the_public_name():
    assert easy_context.plan is plan


# --- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"), [("80GB", 80e9), ("64GiB", 64 * GIB), ("1TB", 1e12), ("1.5TiB", 1.5 * 2**40), ("512e9", 512e9)]
)
def test_sizes(text, wanted):
    assert size(text) == wanted


@pytest.mark.parametrize(("text", "wanted"), [("1M", 2**20), ("512K", 2**19), ("131072", 2**17), ("1.5k", 1536)])
def test_tokens(text, wanted):
    assert tokens(text) == wanted


@pytest.mark.parametrize(("read", "text"), [(size, "a lot"), (tokens, "a lot"), (tokens, "1.5"), (size, "1e400")])
def test_unreadable_sizes(read, text):
    with pytest.raises(ArgumentTypeError, match=text):
        read(text)


@pytest.mark.parametrize("text", ["attention:host", "28xattention:host,4xeverything:gpu", "1xinput:disk,1xinput:gpu"])
def test_keep_flag_and_back(text):
    layers = {"attention:host": 7, "1xinput:disk,1xinput:gpu": 2}.get(text, 32)
    assert keep_flag(parse_keep(text, layers)) == text


@pytest.mark.parametrize("text", ["attention", "3xattention:host", "9xinput:gpu,attention:host", "everything:host", ""])
def test_unreadable_keep_flags(text):
    with pytest.raises(ValueError, match="keep"):
        parse_keep(text, 8)


def test_command_prints_tables_flags_and_picture(tmp_path, capsys):
    picture = tmp_path / "memory.png"
    asked = "plan --model llama-3.1-8b --gpus 4 --gpu H100 --gpu-memory 80GB --host-memory 1TB --seq-length 512K"
    assert main([*asked.split(), "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    for wanted in ("kept for backward", "attention", "optimizer", "tokens/s", "usp_attn", "longest", "--parallel_mode"):
        assert wanted in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_ends_in_one_line_where_nothing_fits(capsys):
    asked = "plan --model llama-3.1-8b --gpu-memory 4GB --seq-length 1M --host-memory 64GB"
    assert main(asked.split()) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: 1,048,576 tokens do not fit") and shown.err.count("\n") == 1 and not shown.out


def test_a_picture_that_cannot_be_written_is_named(tmp_path, capsys):
    picture = tmp_path / "nowhere" / "plan.png"
    assert main(f"plan --model llama-3.2-1b --seq-length 4K --picture {picture}".split()) == 1
    assert f"error: --picture {picture}" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "named"), [("root:x:0", "no config.json"), ("[1]", "a list")])
def test_files_that_are_no_configuration_are_named(tmp_path, content, named):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"--model {path}: .*{named}"):
        plan(str(path), seq_length=4096)


def test_phases_take_the_time_of_the_step():
    for keep in ("attention", "input"):
        made = replace(plan("llama-3.2-1b", seq_length=65536), setting=base().with_plan(layers=(LayerPlan(keep),) * 32))
        assert sum(durations(made)) == pytest.approx(made.time.total - made.time.optimizer)


@pytest.mark.parametrize(
    "asked",
    [
        "--model llama-3.2-1b --seq-length 32K --engine plain",
        "--model llama-3.2-1b --seq-length 1M --host-memory 125GiB --gpu-memory 139GiB",
        "--model llama-3.1-8b --seq-length 1M --gpus 8 --mode usp_attn --seq-parallel-size 8 --lora 8",
        "--model llama-3.2-1b --seq-length 1M --gpu H100 --host-memory 80GB --disk /scratch",
        "--model llama-3.1-8b --seq-length 256K --gpu H100 --host-memory 1.5TB --compress int8 --gpus 2",
    ],
)
def test_the_printed_flags_are_train_pys(asked, monkeypatch, capsys):
    """They make the planned split and memory plan."""
    asked = asked.split()
    assert main(["plan", *asked]) == 0
    printed = capsys.readouterr().out.splitlines()[-1].split()
    options = vars(parser().parse_args(["plan", *asked]))
    made = plan(**{name: value for name, value in options.items() if name not in ("command", "picture", "measure")})
    assert printed == flags_of(made)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("sys.argv", ["train.py", "--model=m", "--dataset=d", "--output-dir=o", *printed])
    args = train_flags.parse_args("")
    train_flags.check(args, made.setting.gpus)
    config = AutoConfig.for_model(**KNOWN_MODELS[made.setting.shape.name])
    assert settle(args, config, SimpleNamespace(num_processes=made.setting.gpus)) == made.memory_plan
    split = args.parallel_mode, args.seq_parallel_size or made.setting.gpus, args.ring_degree
    assert split == (made.mode, made.seq_parallel_size, made.ring_degree)
    assert (args.seq_length, args.batch_size, args.lora) == (
        made.setting.seq_length,
        made.setting.batch_size,
        made.setting.lora,
    )


def test_what_was_asked_for_is_not_planned_over(monkeypatch):
    """--parallel_mode auto leaves --keep as it is; settings of a plan that is not made are refused."""
    monkeypatch.setattr("sys.argv", ["train.py", "--model=m", "--dataset=d", "--output-dir=o", "--seq-length=512"])
    args, config = train_flags.parse_args(""), tiny_model().config
    args.parallel_mode, args.keep, args.head_groups, args.seq_parallel_size = "auto", "input:gpu", 2, 1
    train_flags.check(args, 1)
    state = SimpleNamespace(deepspeed_plugin=None)
    here = SimpleNamespace(num_processes=1, device=torch.device("cpu"), state=state, print=lambda text: None)
    here.distributed_type = "NO"
    monkeypatch.setattr("easy_context.planner.training.first_rank_decides", lambda choose: choose())
    assert settle(args, config, here) == MemoryPlan.uniform(2, "input", "gpu", head_groups=2)
    args.keep = "auto"
    with pytest.raises(ValueError, match="--head-groups: the planner chooses"):
        train_flags.check(args, 1)
    args.keep, args.parallel_mode = None, "usp_attn"
    with pytest.raises(ValueError, match="--head-groups are settings of a memory plan"):
        train_flags.check(args, 1)


def test_measuring_here():
    found = measure_here(torch.device("cpu"), tokens=256, side=128, mib=1)
    assert found.matmul > 0 and found.bandwidth > 0 and found.host_link > 0
    name, forward, backward = found.kernel(None, 128)
    assert name == "cpu_flash" and forward > 0 and backward > 0
