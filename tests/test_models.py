"""Parallel equals serial, through real patched transformers models: logits, reported loss and every gradient."""

import inspect

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
    average_gradients(model, world)
    return reported.item(), unshard_sequence(mode, logits.detach(), length=ids.shape[1]), gradients(model)


def average_gradients(model, world: int) -> None:
    """What DDP does."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


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


SCALED_QUERIES = {
    "max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5,
    },
}


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "ulysses_attn"])
def test_queries_scaled_by_their_positions(mode):
    """Ministral 3. An older transformers scales by `cache_position`, a count of its own, and is refused."""
    model = tiny_model("ministral3", **SCALED_QUERIES)
    if "cache_position" in inspect.signature(type(model.model).forward).parameters:
        with pytest.raises(ValueError, match="cache_position"):
            apply_seq_parallel_monkey_patch(mode, model)
        return
    ids, targets = batch_of(41)
    results = spawn(parallel, 2, mode, "ministral3", ids, targets, None, SCALED_QUERIES)
    check(results, serial("ministral3", ids, targets, **SCALED_QUERIES), EXACT)


# --- batches as real training has them ------------------------------------------------------------------------------


def padded_batch(side: str):
    """Rows of 41, 17 and 2 tokens, padded to 41."""
    ids, targets = batch_of(41, batch=3)
    mask = torch.ones_like(ids)
    for row, length in enumerate((41, 17, 2)):
        hidden = slice(length, None) if side == "right" else slice(0, 41 - length)
        mask[row, hidden] = 0
        targets[row, hidden] = -100
        if side == "right":
            targets[row, length - 1] = -100
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return ids, targets, mask, positions


def padded_step(rank, world, mode, family, ids, targets, mask, positions, config):
    apply_seq_parallel_monkey_patch(mode, family.removesuffix("_text"))
    model = tiny_model(family, **config).train()
    local = prepare_seq_parallel_inputs(mode, ids, positions, targets, rank, world, "cpu", attention_mask=mask)
    logits = model(
        local["local_input_ids"],
        position_ids=local["local_position_ids"],
        attention_mask=local["local_attention_mask"],
    ).logits
    loss, reported = seq_parallel_loss(logits, local["local_target_ids"])
    loss.backward()
    average_gradients(model, world)
    whole = unshard_sequence(mode, logits.detach(), length=ids.shape[1])
    return reported.item(), whole * mask[..., None], gradients(model)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_padded_batches(mode, world, side):
    ids, targets, mask, positions = padded_batch(side)
    model = tiny_model().train()
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    truth = loss.item(), logits.detach() * mask[..., None], gradients(model)
    check(spawn(padded_step, world, mode, "llama", ids, targets, mask, positions, {}), truth, EXACT)


@pytest.mark.parametrize("window", [5, 30])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_sliding_windows(mode, world, window):
    ids, targets = batch_of(41)
    config = {"sliding_window": window}
    results = spawn(parallel, world, mode, "mistral", ids, targets, None, config)
    check(results, serial("mistral", ids, targets, **config), EXACT)


@pytest.mark.parametrize(
    "family, config",
    [
        # soft caps, which transformers' SDPA ignores, in every layer, a window in every other
        ("gemma2", {"sliding_window": 6, "attn_implementation": "eager"}),
        ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("phi3", {"sliding_window": 6}),
    ],
)
@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "usp_attn"])
def test_windows_and_soft_caps_of_families(family, config, mode):
    ids, targets = batch_of(30)
    results = spawn(parallel, 4, mode, family, ids, targets, None, config)
    check(results, serial(family, ids, targets, **config), LOOSE.get(family, EXACT))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixture_of_experts(family, mode):
    config = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config["experts_implementation"] = "eager"  # the other ones take no float64
    ids, targets = batch_of(30)
    results = spawn(parallel, 2, mode, family, ids, targets, None, config)
    check(results, serial(family, ids, targets, **config), 1e-5)  # the router computes in float32
