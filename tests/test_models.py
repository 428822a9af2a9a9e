"""Parallel equals serial, through real patched transformers models: logits, reported loss and every gradient."""

import pytest
import torch
import torch.distributed as dist
from harness import error, spawn, tiny_model

from easy_context import (
    apply_seq_parallel_monkey_patch,
    prepare_seq_parallel_inputs,
    seq_parallel_loss,
    unshard_sequence,
)

MODES = ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"]
EXACT = 1e-9
LOOSE = {"gemma2": 1e-6, "gemma3_text": 1e-6}  # families that compute parts in float32 inside transformers


def batch_of(length: int, batch: int = 2, ignored=()) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    for row, start, end in ignored:
        targets[row, start:end] = -100
    return ids, targets


def serial(family: str, ids, targets, **config):
    """Loss, logits and gradients of the unpatched model on the whole batch."""
    model = tiny_model(family, **config).train()
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / (targets != -100).sum().clamp(min=1)
    loss.backward()
    return loss.item(), logits.detach(), gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def parallel(rank, world, mode, family, ids, targets, ring_degree, config, checkpointing=False):
    apply_seq_parallel_monkey_patch(mode, family.removesuffix("_text"), ring_degree=ring_degree)
    model = tiny_model(family, **config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return step(model, mode, ids, targets, rank, world, ring_degree)


def step(model, mode, ids, targets, rank, world, ring_degree=None):
    local = prepare_seq_parallel_inputs(mode, ids, None, targets, rank, world, "cpu", ring_degree=ring_degree)
    logits = model(local["local_input_ids"], position_ids=local["local_position_ids"]).logits
    loss, reported = seq_parallel_loss(logits, local["local_target_ids"])
    loss.backward()
    for p in model.parameters():  # what DDP does: the mean over ranks
        dist.all_reduce(p.grad)
        p.grad /= world
    return reported.item(), unshard_sequence(mode, logits.detach(), length=ids.shape[1]), gradients(model)


def check(results, truth, bound):
    loss, logits, grads = truth
    for reported, got_logits, got_grads in results:
        assert reported == results[0][0]
        assert abs(reported - loss) <= bound * abs(loss)
        assert error(got_logits, logits) < bound
        for name, grad in grads.items():
            assert error(got_grads[name], grad) < bound, name


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_llama_equals_one_process(mode, world):
    ids, targets = batch_of(41, ignored=[(0, 5, 20)])
    results = spawn(parallel, world, mode, "llama", ids, targets, None, {})
    check(results, serial("llama", ids, targets), EXACT)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "phi3", "gemma3_text"])
def test_families(family):
    config = {"sliding_window": None} if family == "mistral" else {}
    if family == "gemma3_text":
        config = {"sliding_window": 256, "num_hidden_layers": 6}
    ids, targets = batch_of(32)
    results = spawn(parallel, 2, "zigzag_ring_attn", family, ids, targets, None, config)
    check(results, serial(family, ids, targets, **config), LOOSE.get(family, EXACT))
