"""Shards of a batch: each token once, and back."""

import pytest
import torch
from harness import spawn
from test_models import batch_of

from easy_context import (
    init_seq_parallel,
    prepare_seq_parallel_inputs,
    unshard_sequence,
)
from easy_context.modes import get_mode


@pytest.mark.parametrize(
    "mode, world", [("zigzag_ring_attn", 3), ("dist_flash_attn", 4), ("usp_attn", 4), ("data_parallel", 2)]
)
def test_shards_without_a_process_group_cover_the_sequence_once(mode, world):
    ids, targets = batch_of(37)
    shards = [prepare_seq_parallel_inputs(mode, ids, None, targets, rank, world, "cpu") for rank in range(world)]
    if mode == "data_parallel":
        for shard in shards:
            assert torch.equal(shard["local_input_ids"], ids) and torch.equal(shard["local_target_ids"], targets)
        return
    assert len({shard["local_input_ids"].shape for shard in shards}) == 1
    names = ("local_position_ids", "local_input_ids", "local_target_ids")
    seen = torch.cat([torch.stack([shard[name][0] for name in names]) for shard in shards], 1)
    kept = seen[:, seen[2] != -100]
    order = kept[0].argsort()
    assert torch.equal(kept[0][order], torch.arange(36))
    assert torch.equal(kept[1][order], ids[0, :36])
    assert torch.equal(kept[2][order], targets[0, :36])
    assert prepare_seq_parallel_inputs(mode, ids, None, None, 0, world, "cpu")["local_target_ids"] is None


@pytest.mark.parametrize(
    "inputs, text",
    [
        ({"input_ids": None}, "input_ids must be a tensor of integers, not NoneType"),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor of integers, not list"),
        ({"target_ids": torch.ones(1, 4)}, "target_ids must be a tensor of integers, not torch.float32"),
        ({"input_ids": torch.ones(1, 4) > 0}, "input_ids must be a tensor of integers, not torch.bool"),
        ({"target_ids": torch.ones(1, 4) > 0}, "target_ids must be a tensor of integers, not torch.bool"),
        ({"attention_mask": [[1] * 4]}, "attention_mask must be a tensor, not list"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask \(1, 3\) do not fit input_ids \(1, 4\)"),
        ({"position_ids": torch.arange(3)[None]}, r"position_ids \(1, 3\) do not fit"),
    ],
)
def test_what_is_no_batch_is_refused(inputs, text):
    ids = torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "position_ids": None, "target_ids": None, "rank": 0, "world_size": 2, "device": "cpu"}
    with pytest.raises(ValueError, match=text):
        prepare_seq_parallel_inputs("zigzag_ring_attn", **{**batch, **inputs})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers_of_any_width_become_int64(dtype):
    ids, targets = batch_of(13)
    targets = targets.clamp(min=0)
    given = ids.to(dtype), torch.arange(13, dtype=dtype)[None], targets.to(dtype)
    for narrow, wide in zip(
        prepare_seq_parallel_inputs("zigzag_ring_attn", *given, 0, 2, "cpu").values(),
        prepare_seq_parallel_inputs("zigzag_ring_attn", ids, None, targets, 0, 2, "cpu").values(),
        strict=True,
    ):
        assert narrow.dtype == torch.int64 and torch.equal(narrow, wide)


def unshard_gradient(rank, world, mode):
    mesh = init_seq_parallel()
    layout = get_mode(mode).layout(mesh.sp_size, mesh.ring_size)
    whole = torch.arange(2 * 23 * 3, dtype=torch.float64).view(2, 23, 3)
    own = layout.indices(layout.padded_length(23), rank)
    local = whole[:, own.clamp(max=22)].requires_grad_()
    back = unshard_sequence(mode, local, length=23)
    weight = torch.arange(1.0, 24.0, dtype=torch.float64)[None, :, None]
    (back * weight).sum().backward()
    expected = weight[:, own.clamp(max=22)] * (own < 23)[None, :, None]
    return torch.equal(back, whole), torch.equal(local.grad, expected.expand(2, -1, 3))


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "dist_flash_attn", "usp_attn"])
def test_unshard_is_the_inverse_and_a_rank_gets_its_own_slice_of_the_gradient(mode):
    assert all(inverse and slice_of_gradient for inverse, slice_of_gradient in spawn(unshard_gradient, 4, mode))
