"""The token mean over a batch that no rank holds whole, exact in value and in every gradient.

Ranks hold different numbers of valid targets: a mean of their means is another loss. Here each rank sums over its
own targets, and one all-reduce of two float64 numbers (the sum and the count, 16 bytes) tells all the global mean.
DDP, FSDP and DeepSpeed average gradients over all W ranks of the world, sequence-parallel and data-parallel alike,
so a rank's loss is

    loss = local_sum * W / N        N: the valid targets of the whole global batch

and the mean of the ranks' gradients is the gradient of global_sum / N, which is what one process would have. A rank
without a valid target contributes an exact zero that is still connected to the graph: its engine's hooks run.
"""

from collections.abc import Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .memory.tiled_loss import (
    IGNORE_INDEX,
    LogitsTransform,
    nll_sum_from_logits,
    tiled_nll_sum,
    tiled_token_nll,
)


def seq_parallel_loss(
    logits: Tensor, local_target_ids: Tensor, num_items: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token mean over all valid targets of the global batch, over all ranks.

    Args:
        logits: `[B, S_local, V]`, any floating dtype; low precision is upcast to float32 tile by tile.
        local_target_ids: `[B, S_local]` int64, shifted by one before sharding; -100 is ignored.
        num_items: valid targets of *all* micro-batches of an accumulation on *all* ranks (`global_num_items`).
            None: those of this call on all ranks.

    Returns:
        `(loss, reported)`: `loss` is to be differentiated; `reported` is detached and the same on every rank: this
        call's global sum over N. Both float32 (float64 for float64 logits); 0 where no target is valid.

    Raises:
        ValueError: targets whose shape is not that of the logits, or that are not int64.

    Gradient accumulation: with `num_items` every micro-batch is divided by the count of all of them, so their
    gradients (and their `reported`) simply add up. The `backward` of Accelerate and of DeepSpeed divides by the
    number of accumulation steps once more, so multiply by it (plain `loss.backward()` needs no factor):

        num_items = global_num_items(targets for _, targets in micro_batches)
        for inputs, targets in micro_batches:
            with accelerator.accumulate(model):
                loss, reported = seq_parallel_loss(model(**inputs).logits, targets, num_items)
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
    """
    return _global_mean(nll_sum_from_logits(logits, local_target_ids), local_target_ids, num_items)


def seq_parallel_loss_from_hidden(
    hidden: Tensor,
    head: nn.Module,
    local_target_ids: Tensor,
    num_items: int | Tensor | None = None,
    *,
    logits_transform: LogitsTransform | None = None,
    tile_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`seq_parallel_loss` of `logits_transform(head(hidden))`, whose logits never exist whole.

    Args:
        hidden: `[B, S_local, E]`, the decoder's last hidden states (after its final norm).
        head: the module E -> V, e.g. `model.get_output_embeddings()`; may be tied, frozen or LoRA-wrapped.
        local_target_ids, num_items: as in `seq_parallel_loss`.
        logits_transform: what the model does to its logits, see `logits_transform_of`.
        tile_size: rows of a tile, the same on every rank; by default from the vocabulary.

    Returns, raises: as `seq_parallel_loss`; and ValueError for a head without `out_features` if `tile_size` is None.
    """
    local_sum = tiled_nll_sum(hidden, head, local_target_ids, logits_transform=logits_transform, tile_size=tile_size)
    return _global_mean(local_sum, local_target_ids, num_items)


def global_num_items(local_targets: Tensor | Iterable[Tensor]) -> Tensor:
    """Valid targets of these micro-batches on all ranks, an int64 scalar: one all-reduce of 8 bytes."""
    local_targets = [local_targets] if isinstance(local_targets, Tensor) else local_targets
    count = torch.stack([(targets != IGNORE_INDEX).sum() for targets in local_targets]).sum()
    if _world_size() > 1:
        dist.all_reduce(count)
    return count


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _global_mean(local_sum: Tensor, targets: Tensor, num_items: int | Tensor | None) -> tuple[Tensor, Tensor]:
    totals = torch.stack([local_sum.detach().double(), (targets != IGNORE_INDEX).sum().double()])
    if _world_size() > 1:
        dist.all_reduce(totals)
    items = totals[1] if num_items is None else torch.as_tensor(num_items, device=totals.device).double()
    items = items.clamp(min=1)
    loss = local_sum * (_world_size() / items).to(local_sum.dtype)
    return loss, (totals[0] / items).to(local_sum.dtype)


class CausalLMWithLoss(nn.Module):
    """A HuggingFace causal language model that returns its loss and never builds its logits whole.

    This is the module to hand to DDP, FSDP or DeepSpeed; its parameters, and hooks on them, are the model's own.
    PEFT models (LoRA and its kin) work as they are.

    Raises:
        ValueError: a model that is not just decoder and head, soft prompts, or a router loss that would get lost.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        _parts(model)
        self.model = model

    @property
    def config(self):
        return self.model.config

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        target_ids: Tensor,
        num_items: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ids: `[B, S_local]` int64, this rank's shard, targets already shifted. Returns `(loss, reported)` as
        `seq_parallel_loss` does. Raises ValueError without targets; for logits alone call `.model`."""
        if target_ids is None:
            raise ValueError("target_ids are missing: give them to prepare_seq_parallel_inputs; for logits call .model")
        decoder, head, transform = _parts(self.model)
        hidden = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return seq_parallel_loss_from_hidden(hidden, head, target_ids, num_items, logits_transform=transform)


@torch.no_grad()
def token_nll(model: nn.Module, input_ids: Tensor, position_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Negative log likelihood of every target, `[B, S_local]` float32 (float64 for a float64 model), 0 where the
    target is -100: for evaluation, in tiles, without gradients.

    Args and errors are those of `CausalLMWithLoss`; `model` is the HuggingFace or PEFT model itself.
    """
    decoder, head, transform = _parts(model)
    hidden = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    return tiled_token_nll(hidden, head, target_ids, logits_transform=transform)


def logits_transform_of(model: nn.Module) -> LogitsTransform | None:
    """What a HuggingFace causal LM does to its logits after the head (Gemma's soft cap, Cohere's and Granite's
    scales, ...), as a differentiable function of rows `[T, V]`; None if nothing.

    There is no list of families to keep: this is the model class's own forward, run on a stand-in whose decoder
    returns the given logits and whose head passes them on. No parameter is read and no hook runs.

    Raises:
        ValueError: a model whose logits are not those of its head, row by row.
    """
    head_name = next(name for name, child in model.named_children() if child is model.get_output_embeddings())

    def transform(logits: Tensor) -> Tensor:
        decoder = _StandIn(model.base_model, lambda *args, **kwargs: _DecoderOutput(logits[None]))
        head = _StandIn(model.get_output_embeddings(), lambda hidden: hidden)
        stand_in = _StandIn(model, **{model.base_model_prefix: decoder, head_name: head})
        ids = torch.zeros(1, len(logits), dtype=torch.long, device=logits.device)
        return type(model).forward(stand_in, input_ids=ids, position_ids=ids, use_cache=False).logits[0]

    device = next(model.parameters()).device
    device = torch.device("cpu") if device.type == "meta" else device
    probe = (torch.arange(model.config.get_text_config().vocab_size, device=device) % 201 - 100).float()[None]
    transformed = transform(probe)
    if transformed.shape != probe.shape:
        raise ValueError(f"{type(model).__name__} does more than apply its head to the last hidden states")
    return None if torch.equal(transformed.float(), probe) else transform


class _StandIn:
    """Poses as `original`, but for what is called and for the attributes given."""

    def __init__(self, original, call=None, **attributes):
        vars(self).update(attributes, _original=original, _call=call)

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._original, name)


class _DecoderOutput(SimpleNamespace):
    """A decoder's output with nothing in it but the last hidden state."""

    def __init__(self, last_hidden_state: Tensor):
        super().__init__(last_hidden_state=last_hidden_state)

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name):
        return None


def _parts(model: nn.Module) -> tuple[nn.Module, nn.Module, LogitsTransform | None]:
    """The decoder, the head, and what the model does to the head's logits."""
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ValueError("soft prompts lengthen the sequence inside the model: use LoRA or full training")
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    decoder, head = model.base_model, model.get_output_embeddings()
    children = {child for child in model.children() if any(True for _ in child.parameters())}
    if decoder is model or children != {decoder, head}:
        raise ValueError(
            f"{type(model).__name__} is not a decoder followed by one output head: compute its logits and use "
            "seq_parallel_loss"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError("the router's auxiliary loss would be left out: set config.output_router_logits=False")
    return decoder, head, logits_transform_of(model)
