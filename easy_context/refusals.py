"""What the seam to transformers does not understand, it refuses by name.

Everything here raises ValueError from what all ranks see alike, before any communication; the one thing that a rank
may see alone, a wrong mask, is returned as text for `agreement.gather_sequence` to raise on all of them.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

CACHES = ("past_key_values", "cache")
_MIXES_TOKENS = re.compile(r"Mamba|SSM|DeltaNet|LinearAttention|LightningAttention|ShortConv|Recurrent|RWKV|RGLRU")
_MIXING_SETTINGS = ("attn_temperature_tuning", "keep_window_size")  # Llama 4's; Doge's masks that depend on values
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


class WindowMask(int):
    """Stands where a sliding-window mask would be: the window w, q - k < w."""


def refuse_decoder(decoder: nn.Module) -> None:
    """Refuse decoders that do anything along the sequence that the attention interface does not see."""
    config, name = decoder.config, type(decoder).__name__
    takes = inspect.signature(type(decoder).forward).parameters
    if config.is_encoder_decoder or "position_ids" not in takes:
        raise ValueError(f"{name} takes no position_ids: it would count every shard from 0, and is not supported")
    if "cache_position" in takes and (getattr(config, "rope_parameters", None) or {}).get("llama_4_scaling_beta"):
        raise ValueError(
            f"{name} scales queries by cache_position, which would count every shard from 0, in this transformers: "
            "install a newer one, in which it is position_ids"
        )
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    strange |= {type(m).__name__ for m in decoder.modules() if _MIXES_TOKENS.search(type(m).__name__)}
    strange |= {type(m).__name__ for m in decoder.modules() if isinstance(m, (nn.Conv1d, nn.RNNBase))}
    strange |= {name for name in _MIXING_SETTINGS if getattr(config, name, None)}
    if strange:
        raise ValueError(
            f"{name} mixes tokens outside full or sliding-window attention ({', '.join(sorted(strange))}): not "
            "supported, because those layers would see their own shard only"
        )


def refuse_arguments(decoder: nn.Module, kwargs: dict) -> None:
    """What a call asks for that sharded attention cannot honour and that every rank sees alike."""
    filled = any(kwargs.get(name) is not None and kwargs[name].get_seq_length() for name in CACHES)
    if filled or kwargs.get("use_cache"):
        raise ValueError(
            "decoding against a KV cache is not supported while patched: pass use_cache=False, or call "
            "remove_seq_parallel_monkey_patch() before generating"
        )
    if kwargs.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        raise ValueError("output_attentions is not supported: no attention matrix is ever built")
    if kwargs.get("output_router_logits") or getattr(decoder.config, "output_router_logits", False):
        raise ValueError(
            "router losses (output_router_logits) are not supported: they count over all tokens, a rank holds some"
        )
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is not supported: packed documents are told by position_ids that fall to 0")


def fault_of_head(model: nn.Module, kwargs: dict) -> str | None:
    """What a model would do around its decoder that is wrong where ranks share a sequence."""
    if kwargs.get("labels") is not None:
        return (
            "labels are not supported: the model shifts them inside its own shard, where borders lose their targets. "
            "Pass the next tokens as target_ids to prepare_seq_parallel_inputs, and use seq_parallel_loss or "
            "CausalLMWithLoss"
        )
    if type(model).__name__.endswith("ForSequenceClassification"):
        return f"{type(model).__name__} reads the last token of a sequence, which one rank alone holds: not supported"
    return None


def fault_of_mask(mask: torch.Tensor | None, shape: tuple[int, int]) -> str | None:
    """What one rank's mask may have that the others' have not."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return "only 2-D attention masks are supported, not additive or 4-D ones"
    if mask.shape != shape:
        return f"attention_mask {tuple(mask.shape)} does not fit a shard of {shape}: shard it, or leave it out"
    return None


def refuse_layer(module, query, key, value, mask, kwargs: dict) -> None:
    """What a layer asks of its attention that no kernel here computes."""
    faults = {
        "dropout in attention (set attention_dropout=0)": kwargs.get("dropout"),
        "attention sinks": kwargs.get("s_aux") is not None,
        "a bias on attention scores": kwargs.get("position_bias") is not None or kwargs.get("alibi") is not None,
        "an additive attention mask": mask is not None and not isinstance(mask, WindowMask),
        "attention that is not causal": not kwargs.get("is_causal", getattr(module, "is_causal", True)),
        "keys from a cache": key.shape[2] != query.shape[2],
        "values of another head size than keys": value.shape[3] != key.shape[3],
    }
    for what, present in faults.items():
        if present:
            raise ValueError(f"{type(module).__name__}: {what} is not supported by sharded attention")


def once_differentiable(backward: Callable) -> Callable:
    """Decorates the `backward` of a `torch.autograd.Function` whose gradients are numbers, no functions of the inputs.

    torch's own decorator refuses second derivatives through the gradient that a backward is handed; those through what
    the forward saved it takes for zero (a gradient penalty, a Hessian times a vector)."""

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise ValueError("create_graph=True: second derivatives of sharded or tiled parts are not supported")
        return backward(ctx, *gradients)

    return checked


def refuse_dropout(module: nn.Module) -> None:
    """Where a module is computed again, refuse dropout that would differ from the forward's."""
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Dropout)]
    on = [name for name, part in parts if part.p > 0 and part.training]
    if on:
        raise ValueError(f"dropout ({', '.join(on)}) would differ between forward and recomputation: set it to 0")


@contextmanager
def refusing_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Refuse what `refuse_dropout` does not see: random numbers that a module draws inside this context, by
    `nn.functional.dropout` or as a router's jitter."""
    state = torch.cuda.get_rng_state if device.type == "cuda" else lambda _: torch.get_rng_state()
    before = state(device)
    yield
    if not torch.equal(before, state(device)):
        raise ValueError(
            f"{type(module).__name__} draws random numbers, which would differ between forward and recomputation: set "
            "dropout and jitter in the model's config to 0"
        )
