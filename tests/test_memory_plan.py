"""Layers that follow a memory plan equal the model as transformers wrote it: loss and every gradient."""

import copy
import inspect

import pytest
import torch
from harness import error, tiny_model
from test_models import SCALED_QUERIES

import easy_context as ec
from easy_context.memory.gradients import Gradients
from easy_context.memory.layer import apply_memory_plan, remove_memory_plan
from easy_context.memory.plan import LayerPlan, MemoryPlan
from easy_context.memory.rows import tile_rows, tiles

LENGTH = 37  # divides by no number of ranks


def batch(rows: int = 2, length: int = LENGTH):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (rows, length), generator=generator)
    return ids, torch.arange(length)[None].expand(rows, -1), ids.roll(-1, 1)


def gradients(model, inputs, mode: str = "data_parallel", rank: int = 0, world: int = 1):
    """Loss and gradients by name of the whole batch; over a group of ranks, as an engine would average them."""
    model.zero_grad()
    local = ec.prepare_seq_parallel_inputs(mode, *inputs, rank, world, "cpu")
    loss, reported = ec.CausalLMWithLoss(model)(**{k.removeprefix("local_"): v for k, v in local.items()})
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    if world > 1:
        for gradient in found.values():
            torch.distributed.all_reduce(gradient)
            gradient /= world
    return reported.item(), found


def worst(found, truth) -> float:
    assert found[1].keys() == truth[1].keys()
    errors = [error(gradient, truth[1][name]) for name, gradient in found[1].items()]
    return max(*errors, abs(found[0] - truth[0]) / abs(truth[0]))


def compared(model, plan: MemoryPlan, inputs=None) -> float:
    """Worst relative error of a planned step against the plain one."""
    inputs = inputs or batch()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    truth = gradients(model, inputs)
    apply_memory_plan(model, plan)
    planned = worst(gradients(model, inputs), truth)
    assert worst(gradients(model, inputs), truth) == planned, "a second step is another one"
    remove_memory_plan(model)
    assert worst(gradients(model, inputs), truth) == 0.0, "the plan is still followed"
    ec.remove_seq_parallel_monkey_patch()
    return planned


PLANS = {
    "attention": {"keep": "attention"},
    "input": {"keep": "input"},
    "groups": {"head_groups": 2},
    "groups of shared KV heads": {"head_groups": 4},
    "tiles": {"tile_size": 10},
    "tiles of one row": {"tile_size": 1},
    "all": {"head_groups": 2, "tile_size": 7, "prefetch": True},
    "all, input": {"keep": "input", "head_groups": 4, "tile_size": 7, "prefetch": True},
}


@pytest.mark.parametrize("settings", PLANS.values(), ids=PLANS.keys())
def test_every_technique_alone_and_all_together(settings):
    assert compared(tiny_model(), MemoryPlan.uniform(2, **settings)) < 1e-12


def test_layers_of_different_plans(tmp_path):
    layers = (LayerPlan("everything", "gpu"), LayerPlan("attention", "gpu"), LayerPlan("input"), LayerPlan(tier="disk"))
    plan = MemoryPlan(layers, head_groups=2, tile_size=16, disk=str(tmp_path))
    assert compared(tiny_model(num_hidden_layers=4), plan) < 1e-12
    assert not list(tmp_path.iterdir())


FAMILIES = {
    "mistral": ({"sliding_window": 9}, 2, 1e-12),
    "qwen2": ({}, 2, 1e-12),
    "qwen3": ({}, 2, 1e-12),
    "phi3": ({}, 1, 1e-12),
    "olmo2": ({}, 1, 1e-12),
    "granite": ({"residual_multiplier": 0.3, "attention_multiplier": 0.2}, 2, 1e-12),
    "cohere": ({}, 2, 1e-6),
    "gemma2": ({"sliding_window": 9}, 2, 1e-6),
    "gemma3_text": ({"sliding_window": 9}, 2, 1e-6),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    overrides, groups, tolerance = FAMILIES[family]
    assert (
        compared(tiny_model(family, **overrides), MemoryPlan.uniform(2, head_groups=groups, tile_size=10)) < tolerance
    )


def test_queries_scaled_by_their_positions():
    model = tiny_model("ministral3", **SCALED_QUERIES)
    if "cache_position" in inspect.signature(type(model.model).forward).parameters:
        pytest.skip("an older transformers counts every shard from 0, and is refused")
    assert compared(model, MemoryPlan.uniform(2, head_groups=2, tile_size=10)) < 1e-12


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts(family):
    model = tiny_model(family, torch.float32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert compared(model, MemoryPlan.uniform(2, head_groups=2, tile_size=16)) < 1e-5


def test_biases():
    model = tiny_model(attention_bias=True, mlp_bias=True)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    assert compared(model, MemoryPlan.uniform(2, head_groups=2, tile_size=10)) < 1e-12


def test_lora_and_frozen_weights():
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(tiny_model(), lora).double()
    assert compared(model, MemoryPlan.uniform(2, head_groups=2, tile_size=10)) < 1e-12


def test_adapters_whose_weights_are_not_rows_of_heads_are_not_grouped():
    from peft import VeraConfig, get_peft_model

    model = get_peft_model(tiny_model(), VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).double()
    assert compared(model, MemoryPlan.uniform(2, tile_size=10)) < 1e-12
    with pytest.raises(ValueError, match="vera_lambda_d.* does not have a row for each of 64 outputs: head_groups=1"):
        apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=2))


def test_packed_documents():
    ids, _, targets = batch()
    positions = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])[None].expand(2, -1)
    assert compared(tiny_model(), MemoryPlan.uniform(2, tile_size=10), (ids, positions, targets)) < 1e-12


def test_compiled():
    model = tiny_model(dtype=torch.float32)
    assert compared(model, MemoryPlan.uniform(2, tile_size=37, compile=True)) < 1e-5


def test_layers_that_keep_everything_are_compiled():
    model = tiny_model(dtype=torch.float32)
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    truth, plain = gradients(model, batch()), sum(map(torch.numel, _saved(model)))
    first, second = model.model.layers
    tile_rows(second.mlp, 10)  # somebody's own choice, which stays
    apply_memory_plan(model, MemoryPlan.uniform(2, "everything", "gpu", compile=True))
    assert worst(gradients(model, batch()), truth) < 1e-5
    saved = _saved(model)
    assert sum(map(torch.numel, saved)) < 0.7 * plain
    activations = (2 * LENGTH, model.config.intermediate_size)
    assert sum(t.shape == activations for t in saved) == 2  # the first layer's gate and up, and not their product
    remove_memory_plan(model)
    assert "forward" in vars(second.mlp) and "forward" not in vars(first.mlp)
    assert worst(gradients(model, batch()), truth) < 1e-6


def _saved(model) -> list[torch.Tensor]:
    """What autograd saves in a forward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_of(model, batch())
    return saved


def test_autocast():
    model = tiny_model(dtype=torch.float32)
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    exact = gradients(model, batch())
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(model, batch())
        apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=2, tile_size=10))
        planned = gradients(model, batch())
    for name, truth in exact[1].items():
        assert error(planned[1][name], truth) < 2 * error(plain[1][name], truth), name


def test_without_gradients_layers_compute_in_tiles_and_keep_nothing():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    ids, positions, _ = batch()
    truth = model(ids, position_ids=positions).logits
    apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=2, tile_size=10))
    with torch.no_grad():
        assert error(model(ids, position_ids=positions).logits, truth) < 1e-12
    assert error(copy.deepcopy(model)(ids, position_ids=positions).logits, truth) < 1e-12


def loss_of(model, inputs):
    ids, positions, targets = inputs
    logits = model(ids, position_ids=positions).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_tiled_mlp_alone():
    model = tiny_model(mlp_bias=True)
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    truth = gradients(model, batch())
    for layer in model.model.layers:
        tile_rows(layer.mlp, 10)
    assert worst(gradients(model, batch()), truth) < 1e-12


def test_weight_gradients_are_summed_in_float32():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    sums = Gradients()
    for _ in range(256):
        sums.add([(weight, ..., torch.full((4,), 1 + 2**-7, dtype=torch.bfloat16))])
    assert (sums.of([weight])[0] == 258).all()  # in bfloat16 the sum would stop growing at 256


@pytest.mark.parametrize("rows, size", [(0, 4), (1, 4), (8, 4), (9, 4), (37, 10), (100, 1000)])
def test_tiles_cover_all_rows_once(rows, size):
    parts = tiles(rows, size)
    assert [i for t in parts for i in range(t.start, t.stop)] == list(range(rows))
    assert all(0 < t.stop - t.start <= size for t in parts)
