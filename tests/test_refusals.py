"""What the patched attention cannot honour is refused by name, on every rank, before any communication."""

import copy

import pytest
import torch
from harness import spawn, tiny_model
from test_models import batch_of
from test_seam import raised

from easy_context import (
    apply_seq_parallel_monkey_patch,
    init_seq_parallel,
    prepare_seq_parallel_inputs,
)


def test_what_sharded_attention_cannot_honour_is_refused_by_name():
    ids, positions = batch_of(12)[0], torch.arange(12)[None]

    def refused(family="llama", call=None, train=False, **config):
        apply_seq_parallel_monkey_patch("zigzag_ring_attn", family.removesuffix("_text"))
        model = tiny_model(family, **config).train(train)
        return raised(model, ids, position_ids=positions, **(call or {}))

    assert "dropout" in refused(attention_dropout=0.1, train=True)
    assert "sinks" in refused("gpt_oss")
    assert "router losses" in refused("mixtral", output_router_logits=True)
    assert "output_attentions" in refused(call={"output_attentions": True})
    assert "KV cache" in refused(call={"use_cache": True})
    assert "2-D" in refused(call={"attention_mask": torch.zeros(2, 1, 12, 12)})
    assert "hole" in refused(call={"attention_mask": torch.tensor([[1] * 3 + [0] + [1] * 8] * 2)})
    assert "does not fit" in refused(call={"attention_mask": torch.ones(2, 5)})
    assert "cu_seq_lens_q" in refused(call={"cu_seq_lens_q": torch.tensor([0, 12])})
    assert "only a fall to 0" in raised(tiny_model(), ids, position_ids=torch.tensor([[*range(6, 12), *range(2, 8)]]))


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "lfm2", "llama4_text", "bart", "falcon_h1", "doge"])
def test_models_that_mix_tokens_outside_attention_are_refused(family):
    from transformers import AutoConfig, AutoModel

    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 97, "pad_token_id": 0}
    if family == "lfm2":
        tiny["layer_types"] = ["conv", "full_attention"] * 2
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family, **tiny))
    assert "not supported" in raised(apply_seq_parallel_monkey_patch, "zigzag_ring_attn", model)
    assert not model._forward_pre_hooks


def one_rank_at_fault(rank, world, fault):
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    model, (ids, targets) = tiny_model(), batch_of(16)
    if fault == "other ids" and rank == 1:
        ids = ids.flip(0)
    if fault == "other length" and rank == 1:
        ids = ids[:, :-1]
    if fault == "empty":
        ids = ids[:, :0]
    if fault == "floats":
        ids = ids.double()
    if fault in ("other ids", "other length", "empty", "floats"):
        return raised(prepare_seq_parallel_inputs, "zigzag_ring_attn", ids, None, None, rank, world, "cpu")
    local = prepare_seq_parallel_inputs("zigzag_ring_attn", ids, None, targets, rank, world, "cpu")
    ids, positions = local["local_input_ids"], local["local_position_ids"]
    if fault == "no positions":
        return raised(model, ids)
    if fault == "hole in the mask":
        mask = torch.ones_like(ids)
        mask[0, 1] = rank
        return raised(model, ids, position_ids=positions, attention_mask=mask)
    if fault == "uneven shards":
        return raised(model, ids[:, rank:], position_ids=positions[:, rank:])
    if fault == "an odd shard":  # of zeros, whose order does not tell
        return raised(model, ids[:, 1:], position_ids=torch.zeros_like(positions[:, 1:]))
    return raised(model, ids, position_ids=torch.arange(8)[None])  # positions of a shard counted from 0


@pytest.mark.parametrize(
    "fault, text",
    [
        ("other ids", "prepare_dataloader"),
        ("other length", "prepare_dataloader"),
        ("empty", "at least one token"),
        ("floats", "input_ids must be a tensor of integers"),
        ("no positions", "position_ids are missing"),
        ("hole in the mask", "hole before position 2"),
        ("uneven shards", "different shapes"),
        ("an odd shard", "do not divide into the 4 chunks"),
        ("positions from 0", "only a fall to 0"),
    ],
)
def test_a_fault_on_one_rank_is_raised_by_all(fault, text):
    assert all(text in message for message in spawn(one_rank_at_fault, 2, fault))


def one_rank_runs_something_else(rank, world, mode, changes):
    """The others would wait for messages that never come, or receive some of another size."""
    own = {"mode": mode, "gradients": True, "frozen": False, **(changes if rank == 1 else {})}
    apply_seq_parallel_monkey_patch(own.pop("mode"), "llama")
    gradients, frozen = own.pop("gradients"), own.pop("frozen")
    model = tiny_model(**own)
    model.model.layers[0].requires_grad_(not frozen)
    with torch.set_grad_enabled(gradients):
        return raised(model, batch_of(8)[0], position_ids=torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    "mode, changes, text",
    [
        ("dist_flash_attn", {"mode": "ulysses_attn"}, "runs ulysses_attn"),
        ("zigzag_ring_attn", {"num_hidden_layers": 3}, "num_hidden_layers=3"),
        ("ulysses_attn", {"num_attention_heads": 8}, "num_attention_heads=8"),
        ("zigzag_ring_attn", {"dtype": torch.bfloat16}, "torch.bfloat16"),
        ("usp_attn", {"gradients": False}, "gradients of 0 weights"),
        ("zigzag_ring_attn", {"frozen": True}, "gradients of 11 weights"),
    ],
)
def test_ranks_that_run_different_things_are_refused(mode, changes, text):
    for message in spawn(one_rank_runs_something_else, 3, mode, changes):
        assert "rank 1" in message and text in message and "the same model" in message


def labels_given(rank, world, by, mode):
    model = tiny_model()
    apply_seq_parallel_monkey_patch(mode, "llama" if by == "family" else model)
    model = copy.deepcopy(model)
    local = prepare_seq_parallel_inputs(mode, batch_of(16)[0], None, None, rank, world, "cpu")
    ids, positions = local["local_input_ids"], local["local_position_ids"]
    if mode == "data_parallel":
        return model(ids, position_ids=positions, labels=ids).loss.item()
    return raised(model, ids, position_ids=positions, labels=ids)


def last_token_read(rank, world, by):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(tiny_model().config)
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama" if by == "family" else model)
    return raised(model, batch_of(8)[0], position_ids=torch.arange(8)[None])


@pytest.mark.parametrize("by", ["family", "object"])
def test_models_that_read_the_last_token_are_refused(by):
    assert all("LlamaForSequenceClassification" in message for message in spawn(last_token_read, 2, by))


@pytest.mark.parametrize("by", ["family", "object"])
def test_labels_that_a_model_would_shift_within_its_shard_are_refused(by):
    assert all("target_ids" in message for message in spawn(labels_given, 2, by, "zigzag_ring_attn"))
    ids = batch_of(16)[0]
    truth = tiny_model()(ids, labels=ids).loss.item()
    assert spawn(labels_given, 2, by, "data_parallel") == pytest.approx([truth, truth])


def sizes_that_do_not_fit(rank, world):
    first = raised(init_seq_parallel, 2)
    second = raised(init_seq_parallel, None, 2)
    init_seq_parallel(3, 3)
    third = raised(
        prepare_seq_parallel_inputs, "usp_attn", batch_of(8)[0], None, None, rank, world, "cpu", ring_degree=1
    )
    return first, second, third


def test_group_sizes_that_do_not_fit_are_refused():
    for first, second, third in spawn(sizes_that_do_not_fit, 3):
        assert "seq_parallel_size=2 does not divide" in first
        assert "ring_degree=2 does not divide" in second
        assert "exist already" in third
