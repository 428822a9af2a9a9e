"""Offloaded checkpointing computes what plain training computes."""

import pytest
import torch
from harness import error, tiny_model

from easy_context.memory import offload
from easy_context.memory.offload import (
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch,
    offloaded_checkpoint,
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch,
)

cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture
def patched():
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    yield
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()


@pytest.fixture
def packed(monkeypatch):
    """The shapes of the tensors handed to the host, in order."""
    shapes, own = [], offload._pack
    monkeypatch.setattr(offload, "_pack", lambda tensor: shapes.append(tuple(tensor.shape)) or own(tensor))
    return shapes


def gradients(model, tokens):
    model.zero_grad()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    model(tokens, position_ids=positions, use_cache=False).logits.logsumexp(-1).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens(length=10):
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))


def assert_same(got, truth):
    assert got.keys() == truth.keys() and truth
    assert all(error(got[name], truth[name]) < 1e-12 for name in truth)


# Any device


@pytest.mark.parametrize("enable", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_gradients_are_the_plain_ones(family, enable, patched, packed):
    model = tiny_model(family)
    if not hasattr(model, enable):
        pytest.skip("this transformers has the older name only")
    truth = gradients(model, tokens())
    getattr(model, enable)()
    model.train()
    assert_same(gradients(model, tokens()), truth)
    assert packed == [(2, 10, 64)] * 2  # each layer's input and nothing else


def test_lora_adapters_train_though_no_layer_input_needs_a_gradient(patched, packed):
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False)).double()
    truth = gradients(model, tokens())
    model.gradient_checkpointing_enable()
    model.disable_input_require_grads()
    model.train()
    assert_same(gradients(model, tokens()), truth)
    assert len(truth) == 2 * 2 * 2 and len(packed) == 2


def test_no_gradients_no_offloading(patched, packed):
    model = tiny_model()
    plain = model(tokens()).logits
    model.gradient_checkpointing_enable()
    model.eval()
    assert torch.equal(model(tokens()).logits, plain)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, plain)
    assert packed == []


def test_transformers_own_offload_is_superseded(patched, packed):
    model = tiny_model()
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no offload argument")
    truth = gradients(model, tokens())
    model.activation_checkpointing_enable(every_n_layers=2, offload=True)
    model.train()
    assert_same(gradients(model, tokens()), truth)
    assert packed == [(2, 10, 64)]


def test_removing_restores_transformers(packed):
    from transformers import PreTrainedModel

    own = PreTrainedModel._set_gradient_checkpointing
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    assert PreTrainedModel._set_gradient_checkpointing is not own
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    assert PreTrainedModel._set_gradient_checkpointing is own
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    model = tiny_model()
    model.gradient_checkpointing_enable()
    model.train()
    gradients(model, tokens())
    assert packed == []


def test_reentrant_checkpointing_is_refused(patched):
    with pytest.raises(ValueError, match="use_reentrant"):
        tiny_model().gradient_checkpointing_enable({"use_reentrant": True})


def test_disabling_works(patched, packed):
    model = tiny_model()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.train()
    gradients(model, tokens())
    assert packed == []


def block(x, scale, *, shift):
    return torch.sin(x * scale + shift).exp()


def nested(x, scale, run):
    inner = run(lambda y, s: block(y, s, shift=1.0), x, scale)
    return run(lambda y, s: block(y, s, shift=2.0), inner * 2, scale)


@pytest.mark.parametrize("case", ["twice", "nested", "arguments"])
def test_unusual_graphs(case, packed):
    def plain(function, *args):
        return function(*args)

    def offloaded(function, *args):
        return offloaded_checkpoint(function, *args, use_reentrant=False)

    def run(how):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        if case == "nested":
            out = how(lambda y, s: nested(y, s, how), x * 1.0, scale)
        elif case == "arguments":  # None, numbers and an integer tensor among them
            index = torch.tensor([2, 0, 1])
            out = how(lambda y, none, s, i, n: block(y[i], s, shift=n), x * 1.0, None, scale, index, 0.5)
        else:
            out = how(lambda y, s: block(y, s, shift=0.5), x * 1.0, scale)
            out.sum().backward(retain_graph=True)
        out.sum().backward()
        return x.grad, scale.grad

    for got, truth in zip(run(offloaded), run(plain), strict=True):
        assert error(got, truth) < 1e-12
    assert packed


def test_a_layer_that_changes_its_input_is_refused():
    x = torch.ones(3, requires_grad=True) * 1.0
    with pytest.raises(RuntimeError, match="in place"):
        offloaded_checkpoint(lambda y: y.mul_(2).sin(), x, use_reentrant=False)


# One GPU

LAYERS, LENGTH, WIDTH = 4, 2048, 512
