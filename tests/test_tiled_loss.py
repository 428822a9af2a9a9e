"""Head and loss in tiles: equal to cross entropy, logits never whole, weight gradients summed wide."""

import pytest
import torch
import torch.nn.functional as F
from harness import error, tiny_model
from test_loss import HIDDEN, TIGHT, VOCAB, cross_entropy_sum, gradients, problem
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from easy_context.loss import (
    CausalLMWithLoss,
    seq_parallel_loss,
    seq_parallel_loss_from_hidden,
)
from easy_context.memory import tiled_loss
from easy_context.memory.tiled_loss import nll_sum_from_logits, tiled_nll_sum, tiled_token_nll


def soft_cap(logits):
    return 3 * torch.tanh(logits / 3)


class Lora(nn.Module):
    """A head with adapters, as PEFT builds one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.out_features = base.requires_grad_(False), base.out_features
        self.a = nn.Parameter(torch.randn(HIDDEN, 4, dtype=base.weight.dtype))
        self.b = nn.Parameter(torch.randn(4, VOCAB, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


@pytest.mark.parametrize("transform", [None, soft_cap])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile_size", [1, 7, 50, None])
def test_tiles_equal_cross_entropy(tile_size, bias, transform):
    hidden, head, targets = problem(bias=bias)
    logits = head(hidden) if transform is None else transform(head(hidden))
    truth = cross_entropy_sum(logits, targets)
    got = tiled_nll_sum(hidden, head, targets, logits_transform=transform, tile_size=tile_size)
    assert error(got, truth) < TIGHT
    leaves = hidden, head.weight, head.bias
    for mine, theirs in zip(gradients(3 * got, *leaves), gradients(3 * truth, *leaves), strict=True):
        assert error(mine, theirs) < TIGHT
    each = tiled_token_nll(hidden, head, targets, logits_transform=transform, tile_size=tile_size)
    assert error(each, F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")) < TIGHT
    assert not each.requires_grad


@pytest.mark.parametrize("transform", [None, soft_cap])
def test_a_head_of_any_kind_trains_tile_by_tile(transform):
    hidden, base, targets = problem()
    head = Lora(base)
    truth = cross_entropy_sum((transform or nn.Identity())(head(hidden)), targets)
    got = tiled_nll_sum(hidden, head, targets, logits_transform=transform, tile_size=7)
    assert error(got, truth) < TIGHT
    leaves = hidden, head.a, head.b
    for mine, theirs in zip(gradients(got, *leaves), gradients(truth, *leaves), strict=True):
        assert error(mine, theirs) < TIGHT


@pytest.mark.parametrize("tile_size", [1, 7, None])
def test_loss_from_logits_in_tiles(tile_size):
    hidden, head, targets = problem()
    logits = head(hidden).detach().requires_grad_()
    got, truth = nll_sum_from_logits(logits, targets, tile_size), cross_entropy_sum(logits, targets)
    assert error(got, truth) < TIGHT
    assert error(*gradients(2 * got, logits), *gradients(2 * truth, logits)) < TIGHT


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("wrap", [lambda head: head, Lora])
def test_logits_never_exist_whole(wrap):
    hidden, head, targets = problem(length=200)
    with LargestTensor() as largest:
        tiled_nll_sum(hidden, wrap(head), targets, tile_size=8).backward()
    assert largest.elements <= max(hidden.numel(), 8 * VOCAB, head.weight.numel()) < targets.numel() * VOCAB / 4


def test_weight_gradient_is_accumulated_above_bf16():
    hidden, head, targets = problem(dtype=torch.bfloat16, batch=1, length=1024, ignored=0)
    got = tiled_nll_sum(hidden, head, targets, tile_size=1)
    assert got.dtype == torch.float32
    (mine,) = gradients(got, head.weight)
    wide = head.weight.detach().double().requires_grad_()
    (truth,) = gradients(cross_entropy_sum(hidden.double() @ wide.t(), targets), wide)
    assert mine.dtype == torch.bfloat16
    assert error(mine.double(), truth) < 4e-3  # accumulated in bf16 it would be 2e-2


def test_frozen_weights_and_no_grad_cost_no_gradients(monkeypatch):
    def refuse(*args):
        raise AssertionError("a gradient was computed that nobody wants")

    hidden, head, targets = problem()
    monkeypatch.setattr(tiled_loss, "_add_product", refuse)
    head.requires_grad_(False)
    assert hidden.grad is None
    tiled_nll_sum(hidden, head, targets).backward()
    assert hidden.grad is not None and head.weight.grad is None
    head.requires_grad_(True)
    with torch.no_grad():
        assert not tiled_nll_sum(hidden, head, targets).requires_grad


def test_autocast_computes_in_bf16_and_accumulates_in_float32():
    hidden, head, targets = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tiled_nll_sum(hidden, head, targets, tile_size=7)
        truth = cross_entropy_sum(head(hidden).float(), targets)
    assert got.dtype == torch.float32
    assert error(got, truth) < 1e-5
    (mine,), (theirs,) = gradients(got, head.weight), gradients(truth, head.weight)
    assert mine.dtype == torch.float32
    assert error(mine, theirs) < 1e-2


def test_one_call_of_the_head_with_its_weight_gathered_meanwhile():
    """What an engine's hooks do: the weight exists only while its module is called."""
    hidden, head, targets = problem()
    truth = cross_entropy_sum(head(hidden), targets)
    expected = gradients(truth, hidden, head.weight)
    whole, calls = head.weight.detach().clone(), []

    def gather(module, args):
        calls.append(module)
        module.weight.data = whole

    def release(module, args, out):
        module.weight.data = whole.new_empty(0)

    release(head, None, None)
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(release)
    got = tiled_nll_sum(hidden, head, targets, tile_size=7)
    assert calls == [head] and "forward" not in vars(head)
    gather(head, None)
    for mine, theirs in zip(gradients(got, hidden, head.weight), expected, strict=True):
        assert error(mine, theirs) < TIGHT


def test_the_head_keeps_its_forward_after_an_error():
    hidden, head, targets = problem()
    with pytest.raises(RuntimeError):
        tiled_nll_sum(hidden[..., :-1], head, targets)
    assert head(hidden).shape == (*targets.shape, VOCAB)


def test_bad_targets_are_named():
    hidden, head, targets = problem()
    for wrong, found in [(None, "NoneType"), (targets.float(), "torch.float32"), (targets > 0, "torch.bool")]:
        with pytest.raises(ValueError, match=f"not {found}: give target_ids"):
            seq_parallel_loss_from_hidden(hidden, head, wrong)
        with pytest.raises(ValueError, match=f"not {found}: give target_ids"):
            seq_parallel_loss(head(hidden), wrong)
    with pytest.raises(ValueError, match="targets"):
        seq_parallel_loss_from_hidden(hidden, head, targets[:, 1:])
    with pytest.raises(ValueError, match="targets"):
        seq_parallel_loss(head(hidden), targets[:, 1:])
    with pytest.raises(ValueError, match="targets are on meta, the model's output on cpu"):
        seq_parallel_loss(head(hidden), targets.to("meta"))
    with pytest.raises(ValueError, match="targets are on meta, the model's output on cpu"):
        seq_parallel_loss_from_hidden(hidden, head, targets.to("meta"))
    with pytest.raises(ValueError, match="tile_size"):
        seq_parallel_loss_from_hidden(hidden, nn.Sequential(head), targets)
    with pytest.raises(ValueError, match="tile_size"):
        seq_parallel_loss_from_hidden(hidden, head, targets, tile_size=0)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="target_ids are missing"):
        CausalLMWithLoss(tiny_model())(ids, ids, None)
