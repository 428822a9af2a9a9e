"""Layers that follow a memory plan equal the model as transformers wrote it: loss and every gradient."""

import copy
import inspect
import os
import pickle
import sys

import pytest
import torch
from harness import error, free_port, spawn, tiny_model
from test_models import SCALED_QUERIES
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import easy_context as ec
from easy_context.memory.gradients import Gradients
from easy_context.memory.layer import PlannedLayer, apply_memory_plan, remove_memory_plan
from easy_context.memory.plan import LayerPlan, MemoryPlan
from easy_context.memory.rows import _say_uncompiled, tile_rows, tiles
from easy_context.mesh import reset_mesh
from easy_context.modes import deal

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


@pytest.mark.parametrize("keep", ["everything", "attention"])
def test_hooks_inside_layers_are_not_compiled_away(keep, caplog):
    """Those of layers that have been compiled without them, too, and of one layer among others like it."""
    model = tiny_model(dtype=torch.float32)
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, keep, "gpu", compile=True))
    gradients(model, batch())
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, result: result * 1.5)
    _say_uncompiled.cache_clear()
    found = gradients(model, batch())
    assert "Linear has hooks" in caplog.text
    remove_memory_plan(model)
    assert worst(found, gradients(model, batch())) < 1e-5


def _saved(model) -> list[torch.Tensor]:
    """What autograd saves in a forward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _loss(model, batch())
    return saved


@pytest.mark.parametrize("of", [lambda decoder: decoder.layers[1], lambda decoder: decoder.norm], ids=["layer", "norm"])
def test_a_forward_that_is_somebody_elses_is_refused(of):
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    module = of(model.model)
    module.forward = module.forward
    with pytest.raises(ValueError, match="replaced by somebody else"):
        apply_memory_plan(model, MemoryPlan.uniform(2))
    assert "forward" in vars(module)


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


def _hook(model, inputs):
    held = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, y: y.register_hook(held.append) and None)
    _loss(model, inputs).backward()
    return held


def _hook_detaching(model, inputs):
    held = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, y: y.register_hook(lambda g: held.append(g.detach())) and None)
    _loss(model, inputs).backward()
    return held


def _full_backward_hook(model, inputs):
    held = []
    for layer in model.model.layers:
        layer.register_full_backward_hook(lambda layer, dx, dy: held.extend([*dx, *dy]))
    _loss(model, inputs).backward()
    return held


def _captured(model, inputs):
    ids, positions, _ = inputs
    out = model(ids, position_ids=positions, output_hidden_states=True)
    return torch.autograd.grad(out.logits.square().sum(), [*out.hidden_states, *model.parameters()])


def _loss_of_hidden_states(model, inputs):
    ids, positions, _ = inputs
    out = model(ids, position_ids=positions, output_hidden_states=True)
    for h in out.hidden_states:
        h.retain_grad()
    (out.logits.square().sum() + sum(h.pow(3).sum() for h in out.hidden_states)).backward()
    return [h.grad for h in out.hidden_states]


def _skip_connection(model, inputs):
    """The sum hands one gradient to both of its terms, of which the embedding's is used last."""
    skipped = []
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: skipped.append(args[0]))
    model.model.layers[1].register_forward_hook(
        lambda layer, args, y: y.flatten(1).add(skipped[0].flatten(1)).view_as(y)
    )
    _loss(model, inputs).backward()
    return []


def _two_forwards(model, inputs):
    losses = [_loss(model, inputs), _loss(model, batch(1, 5))]
    model.eval()
    with torch.no_grad():
        _loss(model, batch(3, 9))
    sum(losses).backward()
    return []


def _a_failed_forward(model, inputs):
    handle = model.lm_head.register_forward_pre_hook(lambda head, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _loss(model, inputs)
    handle.remove()
    _loss(model, batch(2, 3)).backward()
    return []


def _embeddings_in(model, inputs):
    ids, positions, _ = inputs
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded, position_ids=positions).logits.square().sum().backward()
    return [embedded.grad]


def _a_frozen_layer(model, inputs):
    model.get_input_embeddings().weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    loss = _loss(model, inputs)
    model.model.layers[1].mlp.requires_grad_(False)
    loss.backward()
    for weight in model.model.layers[1].mlp.parameters():
        weight.grad = None  # autograd alone still makes it
    return []


USES = [_hook, _hook_detaching, _full_backward_hook, _captured, _loss_of_hidden_states, _skip_connection]
USES += [_two_forwards, _a_failed_forward, _embeddings_in, _a_frozen_layer]


@pytest.mark.parametrize("use", USES)
def test_uses_of_a_model_that_see_its_gradients_or_repeat_and_mix_passes(use):
    found = []
    for planned in (False, True):
        model = tiny_model()
        ec.apply_seq_parallel_monkey_patch("data_parallel", model)
        if planned:
            apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=2, tile_size=10, prefetch=True))
        seen = [g.clone() for g in use(model, batch())]
        found.append(seen + [w.grad for w in model.parameters() if w.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    assert max(error(got, truth) for got, truth in zip(found[1], found[0], strict=True)) < 1e-12


def _loss(model, inputs):
    ids, positions, targets = inputs
    logits = model(ids, position_ids=positions).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_gradients_that_nobody_else_holds_are_written_over():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, tile_size=10))
    places = []

    def note(module, args, y):
        y.register_hook(lambda gradient: places.append(gradient.data_ptr()))

    for module in (model.model.embed_tokens, *model.model.layers):
        module.register_forward_hook(note)
    _loss(model, batch()).backward()
    assert len(places) == 3 and len(set(places)) == 1


def test_a_backward_runs_once():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    loss = _loss(model, batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


def test_copied_pickled_and_compiled_models_follow_the_plan(tmp_path):
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    truth = gradients(model, batch())
    apply_memory_plan(model, MemoryPlan.uniform(2, tier="disk", tile_size=10, disk=str(tmp_path)))
    gradients(model, batch())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert worst(gradients(other, batch()), truth) < 1e-12
        assert all(isinstance(layer.forward, PlannedLayer) for layer in other.model.layers)
        assert other.model.layers[0].forward.layer is other.model.layers[0]
    model.zero_grad()
    _loss(torch.compile(model, backend="eager"), batch()).backward()
    assert max(error(weight.grad, truth[1][name]) for name, weight in model.named_parameters()) < 1e-12


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_an_input_that_is_changed_after_the_forward(tier, tmp_path):
    """Where it stayed in place the backward refuses, as autograd would; elsewhere it does not matter."""
    model, seen = tiny_model(), []
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    truth = gradients(model, batch())
    model.zero_grad()
    apply_memory_plan(model, MemoryPlan.uniform(2, tier=tier, tile_size=10, disk=str(tmp_path)))
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    loss = _loss(model, batch())
    with torch.no_grad():
        seen[0][0, 0].add_(1)
    if tier == "disk":
        loss.backward()
        assert max(error(weight.grad, truth[1][name]) for name, weight in model.named_parameters()) < 1e-12
    else:
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


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


def test_ulysses_in_chunks():
    """Two KV heads a rank, an all-to-all each."""
    truth = gradients(tiny_model(num_key_value_heads=4), batch())
    for found in spawn(_steps_in_chunks, 2):
        for keep, step in found.items():
            assert worst(step, truth) < 1e-9, keep


def _steps_in_chunks(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deal, "CHUNK_BYTES", 0)
        return {keep: _step_in_chunks(rank, world, keep) for keep in ("attention", "input")}


def _step_in_chunks(rank, world, keep):
    reset_mesh()
    ec.init_seq_parallel(world)
    model = tiny_model(num_key_value_heads=4)
    ec.apply_seq_parallel_monkey_patch("ulysses_attn", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, keep, "host", tile_size=5))
    return gradients(model, batch(), "ulysses_attn", rank, world)


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


def test_what_a_plan_cannot_do_is_refused():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    with pytest.raises(ValueError, match="3 layers, the model has 2"):
        apply_memory_plan(model, MemoryPlan.uniform(3))
    with pytest.raises(ValueError, match="head_groups=3"):
        apply_memory_plan(model, MemoryPlan.uniform(2, head_groups=3))
    with pytest.raises(ValueError, match="head_groups=1"):
        apply_memory_plan(tiny_model("phi3"), MemoryPlan.uniform(2, head_groups=2))
    with pytest.raises(ValueError, match="head_groups=1"):
        apply_memory_plan(tiny_model("olmo2"), MemoryPlan.uniform(2, head_groups=2))
    with pytest.raises(ValueError, match="OPTModel"):
        apply_memory_plan(tiny_model("opt", word_embed_proj_dim=64, ffn_dim=96), MemoryPlan.uniform(2))
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        apply_memory_plan(model, MemoryPlan.uniform(2))
    for settings in ({"keep": "all"}, {"tier": "tape"}, {"keep": "everything"}, {"tier": "disk"}, {"tile_size": 0}):
        with pytest.raises(ValueError):
            MemoryPlan.uniform(2, **settings)


def test_host_memory_that_would_not_suffice_is_told_before_the_step():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, host_memory=2 * 2 * LENGTH * (64 + 64 + 4) * 8))
    gradients(model, batch())
    apply_memory_plan(model, MemoryPlan.uniform(2, host_memory=2 * 2 * LENGTH * (64 + 64 + 4) * 8 - 1))
    with pytest.raises(MemoryError, match="host"):
        gradients(model, batch())


def test_an_unpatched_model_is_refused():
    model = tiny_model()
    apply_memory_plan(model, MemoryPlan.uniform(2))
    ids, positions, _ = batch()
    with pytest.raises(ValueError, match="apply_seq_parallel_monkey_patch"):
        model(ids, position_ids=positions)


def test_a_layer_of_unknown_structure_is_refused():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    layer = model.model.layers[1]

    class Scaled(type(layer)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) if "attention_output" in kwargs else 2 * hidden_states

    layer.__class__ = Scaled
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="a memory plan does not know"):
        gradients(model, batch())


def test_a_layer_that_gates_its_attention_output_is_refused():
    """What happens between attention and output projection is in neither half."""
    model = tiny_model("qwen3_next", torch.float32, layer_types=["full_attention"] * 2)
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="a memory plan does not know"):
        gradients(model, batch())


def test_families_of_another_structure_are_refused():
    ids = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **ids))
    ec.apply_seq_parallel_monkey_patch("data_parallel", gpt)
    with pytest.raises(ValueError, match="GPT2Model is built in a way that a memory plan does not know"):
        apply_memory_plan(gpt, MemoryPlan.uniform(2))
    config = AutoConfig.for_model("stablelm", **ids, intermediate_size=96, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="a memory plan does not know"):
        gradients(model, batch())


def test_dropout_is_refused():
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    model = get_peft_model(tiny_model(), lora).double().train()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="dropout"):
        gradients(model, batch())


RANDOM = {"starcoder2": {"residual_dropout": 1e-4}, "mixtral": {"router_jitter_noise": 1e-3, "num_local_experts": 4}}


@pytest.mark.parametrize("family", RANDOM)
def test_random_numbers_that_no_module_tells_of_are_refused(family):
    """Be they so small that a layer cannot be told from its halves."""
    model = tiny_model(family, torch.float32, **RANDOM[family], attention_dropout=0.0).train()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    with pytest.raises(ValueError, match="draws random numbers"):
        gradients(model, batch())
    model.eval()
    gradients(model, batch())
    remove_memory_plan(model)
    tile_rows(model.model.layers[0].mlp)
    gradients(model, batch())
    with pytest.raises(ValueError, match="draws random numbers"):
        gradients(model.train(), batch())


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
