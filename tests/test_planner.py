"""The planner: memory and time follow settings; which plan it chooses, and what it says where none fits."""

from dataclasses import replace

import pytest
import torch
from harness import tiny_model

import easy_context
from easy_context.memory.plan import LayerPlan, MemoryPlan
from easy_context.planner import HARDWARE, ModelShape, exchange, for_training, plan
from easy_context.planner.flags import size
from easy_context.planner.measure import measure_here
from easy_context.planner.memory import host_items, kept_bytes, peak, phases
from easy_context.planner.picture import durations
from easy_context.planner.search import EQUAL, MARGIN
from easy_context.planner.setting import Setting
from easy_context.planner.timing import step_time

GIB = 2**30


# --- memory and time ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("again", [False, True])
def test_all_to_alls_show_whole(again):
    """However long attention computes; `restore` brings q, k, v and out once more."""
    shard = exchange.Shard(32768, 32, 8, 128)
    sent = 32768 * (2 * 32 + 2 * 8) * 128 * 2 / 2
    for backward in (False, True):
        how = {"backward": backward, "again": again}
        shown = exchange.exposed("ulysses_attn", shard, 2, 1, 9.0, lambda size, _: 7 + size, **how)
        assert shown == 2 * 7 + sent + (again and backward) * (7 + sent)


@pytest.mark.parametrize("heads, kv_heads, ulysses, travelling", [(32, 8, 2, 4), (8, 2, 4, 1), (40, 8, 3, 14)])
def test_kv_heads_that_travel_the_ring_of_usp(heads, kv_heads, ulysses, travelling):
    """Of 40 query heads three ranks have 14, 13 and 13, in groups of uneven size: each with a KV head of its own."""
    assert exchange.Shard(1024, heads, kv_heads, 128).in_ring(ulysses).kv_heads == travelling


@pytest.mark.parametrize("world, forward, backward", [(2, 1, 2), (3, 2, 7)])
def test_two_ranks_fetch_long_shards_which_three_pass_on(world, forward, backward):
    """Pairs of keys and values that show where nothing hides them; three ranks' gradients, in float32, count twice."""
    shard = exchange.Shard(1 << 20, 32, 8, 128)
    for pairs, way in ((forward, False), (backward, True)):
        sent = exchange.exposed("zigzag_ring_attn", shard, world, world, 0.0, lambda size, _: size, backward=way)
        assert sent == pairs * shard.pair


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


def test_phases_take_the_time_of_the_step():
    for keep in ("attention", "input"):
        made = replace(plan("llama-3.2-1b", seq_length=65536), setting=base().with_plan(layers=(LayerPlan(keep),) * 32))
        assert sum(durations(made)) == pytest.approx(made.time.total - made.time.optimizer)


def test_measuring_here():
    found = measure_here(torch.device("cpu"), tokens=256, side=128, mib=1)
    assert found.matmul > 0 and found.bandwidth > 0 and found.host_link > 0
    name, forward, backward = found.kernel(None, 128)
    assert name == "cpu_flash" and forward > 0 and backward > 0
