"""What users do with a planned model: hooks, skipped and repeated passes, copies, changed inputs."""

import copy
import pickle

import pytest
import torch
from harness import error, tiny_model
from test_memory_plan import batch, gradients, loss_of, worst

import easy_context as ec
from easy_context.memory.layer import PlannedLayer, apply_memory_plan, remove_memory_plan
from easy_context.memory.plan import MemoryPlan
from easy_context.memory.rows import _say_uncompiled


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


def _hook(model, inputs):
    held = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, y: y.register_hook(held.append) and None)
    loss_of(model, inputs).backward()
    return held


def _hook_detaching(model, inputs):
    held = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, y: y.register_hook(lambda g: held.append(g.detach())) and None)
    loss_of(model, inputs).backward()
    return held


def _full_backward_hook(model, inputs):
    held = []
    for layer in model.model.layers:
        layer.register_full_backward_hook(lambda layer, dx, dy: held.extend([*dx, *dy]))
    loss_of(model, inputs).backward()
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
    loss_of(model, inputs).backward()
    return []


def _two_forwards(model, inputs):
    losses = [loss_of(model, inputs), loss_of(model, batch(1, 5))]
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(3, 9))
    sum(losses).backward()
    return []


def _a_failed_forward(model, inputs):
    handle = model.lm_head.register_forward_pre_hook(lambda head, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, inputs)
    handle.remove()
    loss_of(model, batch(2, 3)).backward()
    return []


def _embeddings_in(model, inputs):
    ids, positions, _ = inputs
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded, position_ids=positions).logits.square().sum().backward()
    return [embedded.grad]


def _a_frozen_layer(model, inputs):
    model.get_input_embeddings().weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    loss = loss_of(model, inputs)
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


def test_gradients_that_nobody_else_holds_are_written_over():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2, tile_size=10))
    places = []

    def note(module, args, y):
        y.register_hook(lambda gradient: places.append(gradient.data_ptr()))

    for module in (model.model.embed_tokens, *model.model.layers):
        module.register_forward_hook(note)
    loss_of(model, batch()).backward()
    assert len(places) == 3 and len(set(places)) == 1


def test_a_backward_runs_once():
    model = tiny_model()
    ec.apply_seq_parallel_monkey_patch("data_parallel", model)
    apply_memory_plan(model, MemoryPlan.uniform(2))
    loss = loss_of(model, batch())
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
    loss_of(torch.compile(model, backend="eager"), batch()).backward()
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
    loss = loss_of(model, batch())
    with torch.no_grad():
        seen[0][0, 0].add_(1)
    if tier == "disk":
        loss.backward()
        assert max(error(weight.grad, truth[1][name]) for name, weight in model.named_parameters()) < 1e-12
    else:
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
