"""The one seam to transformers, for every model family that resolves attention through its attention interface.

What is patched, and only while a patch is in force:

* `AttentionInterface` and `AttentionMaskInterface` get an entry named `easy_context`.
* A patched model carries that name in its config, and a hook on its decoder that runs once per forward: it refuses
  what sharded attention cannot honour, learns the borders of packed documents from the positions of all ranks, and
  hands an `AttentionContext` to the layers as a keyword argument (so recomputation sees the same one).
* Patching a family additionally wraps its base class: models made later accept any attention name, installed or not,
  and models of the family, made before or after, are patched when first called.

Source: https://huggingface.co/docs/transformers/main/en/attention_interface
"""

import inspect
import logging
import sys
import weakref
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from .agreement import describe_run, documents_of, gather_sequence
from .kernels import KERNELS
from .mesh import current_mesh
from .modes import AttentionContext, Mode, get_mode
from .modes.base import groups_of
from .refusals import CACHES, WindowMask, fault_of_head, fault_of_mask, refuse_arguments, refuse_decoder, refuse_layer
from .rope import GlobalLength, restore_frequencies, rotary_modules

logger = logging.getLogger("easy_context")
NAME = "easy_context"
CONTEXT = "seq_parallel_context"  # the keyword argument that carries the AttentionContext through the layers


@dataclass(frozen=True)
class Patch:
    """What one call of `apply_seq_parallel_monkey_patch` asked for."""

    mode: Mode
    ring_degree: int | None = None
    kernel: str | None = None


class Attachment:
    """The hook of one patched decoder. Copies and pickles keep it, and stay patched while a patch is in force."""

    def __init__(self, decoder: nn.Module):
        self.patch: Patch | None = None  # None: that of its family
        self.rotary = [(module, GlobalLength(module)) for module in rotary_modules(decoder)]
        self.handles = [decoder.register_forward_pre_hook(self, with_kwargs=True)]

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict):
        _attached.setdefault(decoder, self)
        return _enter(decoder, self, args, kwargs)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        for _, length in self.rotary:
            length.detach()


_families: dict[type, Patch] = {}
_attached: "weakref.WeakKeyDictionary[nn.Module, Attachment]" = weakref.WeakKeyDictionary()
_asked_for: "weakref.WeakKeyDictionary[nn.Module, str | None]" = weakref.WeakKeyDictionary()  # attention names


def apply_seq_parallel_monkey_patch(
    seq_algo: str, model: str | nn.Module = "llama", *, ring_degree: int | None = None, kernel: str | None = None
) -> str:
    """Make transformers models run attention over a sequence that the mode `seq_algo` splits over processes.

    Args:
        seq_algo: name of a mode (`easy_context.modes.available_modes()`), or "auto" (`modes.get_mode` says what it is).
        model: a family name such as "llama", "mistral" or "qwen2", which patches present and future models of that
            family in this process; or a transformers model (PEFT, DDP and DeepSpeed wrappers are looked through),
            which patches that one alone. Before or after loading: both orders work.
        ring_degree: degree of the ring in `usp_attn`, where `init_seq_parallel` does not say it.
        kernel: name of the attention kernel to use; None takes the fastest that can (`easy_context.kernels`).

    Returns a line that says what was patched (also logged). Applying again with another mode switches;
    `remove_seq_parallel_monkey_patch` undoes it all.
    Raises ValueError for an unknown mode, family or kernel, and for models that bypass the attention interface.
    """
    known = [k.name for k in KERNELS]
    if kernel is not None and kernel not in known:
        raise ValueError(f"unknown kernel {kernel!r}: one of {known}")
    patch = Patch(get_mode(seq_algo), ring_degree, kernel)
    if isinstance(model, str):
        bases = _family_bases(model)
        for base in bases:
            if base not in _families:
                _wrap(base)
            _families[base] = patch
        what = f"the {model} family ({', '.join(base.__name__ for base in bases)})"
    else:
        decoder = decoder_of(model)
        _attach(decoder).patch = patch
        if model is not decoder and _refuse_head not in model._forward_pre_hooks.values():
            _attached[decoder].handles.append(model.register_forward_pre_hook(_refuse_head, with_kwargs=True))
        what = f"one {type(decoder).__name__}"
    attention, mask = _interfaces()
    attention.register(NAME, attention_forward)
    mask.register(NAME, mask_forward)
    report = f"easy_context: {patch.mode.name} patched into {what}"
    logger.info(report)
    return report


def remove_seq_parallel_monkey_patch() -> None:
    """Restore transformers, its families and all patched models to what they were."""
    for base in _families:
        del base.__call__, base._check_and_adjust_attn_implementation
    _families.clear()
    for decoder, attachment in _attached.items():
        _asked_for.setdefault(decoder, None)  # of a copy nothing is known
        attachment.detach()
    _attached.clear()
    for model, name in list(_asked_for.items()):
        if name != NAME:
            model.config._attn_implementation = _usable(model, name)
    _asked_for.clear()
    for interface in _interfaces():
        interface._global_mapping.pop(NAME, None)


def _usable(model: nn.Module, name: str | None) -> str:
    try:
        return model._check_and_adjust_attn_implementation(name)
    except (ImportError, ValueError) as error:
        logger.warning("%s gets sdpa attention, because %s cannot be had: %s", type(model).__name__, name, error)
        return "sdpa"


def _interfaces():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface, AttentionMaskInterface


def _family_bases(name: str) -> list[type]:
    """The classes of transformers' `modeling_<name>` from which all its models derive."""
    from transformers import PreTrainedModel

    try:
        module = import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"transformers has no model family {name!r}; names are like llama, mistral, qwen2") from error
    _check_interface(module)
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in classes if issubclass(c, PreTrainedModel) and PreTrainedModel in c.__bases__]


def _check_interface(module) -> None:
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(f"{module.__name__} does not resolve attention through transformers' attention interface")


def decoder_of(model: nn.Module) -> nn.Module:
    """The transformers decoder inside a model and its wrappers."""
    from transformers import PreTrainedModel

    inner = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else getattr(inner, "module", None)
    if inner is None or not isinstance(inner, PreTrainedModel):
        raise ValueError(f"model must be a family name or a transformers model, not {type(model).__name__}")
    _check_interface(sys.modules[type(inner.base_model).__module__])
    return inner.base_model


def _wrap(base: type) -> None:
    """Class-wide: any attention name will do at construction, and a decoder is attached when it is first called."""
    overridden = {"__call__", "_check_and_adjust_attn_implementation"} & set(vars(base))
    if overridden:
        raise ValueError(f"{base.__name__} defines {sorted(overridden)} itself: patch a model object instead")

    def check(self, attn_implementation, *args, **kwargs):
        _asked_for.setdefault(self, attn_implementation)
        return NAME

    def call(self, *args, **kwargs):
        if self.base_model is self:
            _attach(self)
        else:
            _refuse_head(self, args, kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    base._check_and_adjust_attn_implementation = check
    base.__call__ = call


def _attach(decoder: nn.Module) -> Attachment:
    if decoder not in _attached:
        refuse_decoder(decoder)
        held = [hook for hook in decoder._forward_pre_hooks.values() if isinstance(hook, Attachment)]
        if not held:
            _asked_for.setdefault(decoder, None if (name := decoder.config._attn_implementation) == NAME else name)
            decoder.config._attn_implementation = NAME
        _attached[decoder] = held[0] if held else Attachment(decoder)
    return _attached[decoder]


def _patch_of(decoder: nn.Module, attachment: Attachment) -> Patch:
    patch = attachment.patch or next((_families[base] for base in type(decoder).__mro__ if base in _families), None)
    if patch is None or NAME not in _interfaces()[0]._global_mapping:
        raise ValueError(f"{type(decoder).__name__}, a copy, has a patch not in force here: apply or remove it again")
    return patch


def _refuse_head(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Once per forward of the model around a patched decoder."""
    if fault := fault_of_head(model, kwargs):
        decoder = decoder_of(model)
        patch = _patch_of(decoder, _attach(decoder))
        mesh = current_mesh(patch.ring_degree)
        if patch.mode.layout(mesh.sp_size, mesh.ring_size).world > 1:
            raise ValueError(fault)


@torch.compiler.disable
def _enter(decoder: nn.Module, attachment: Attachment, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Once per forward of a patched decoder, before its layers: check, agree, and make the AttentionContext."""
    patch = _patch_of(decoder, attachment)
    kwargs = {**dict(zip(list(inspect.signature(type(decoder).forward).parameters)[1:], args, strict=False)), **kwargs}
    refuse_arguments(decoder, kwargs)
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    batch, local_length = tokens.shape[:2]

    mesh = current_mesh(patch.ring_degree)
    layout = patch.mode.layout(mesh.sp_size, mesh.ring_size)
    positions = kwargs.get("position_ids")
    if positions is None:
        if layout.world > 1:
            raise ValueError(
                "position_ids are missing: every rank would count its shard from 0. Call model(local_input_ids, "
                "position_ids=local_position_ids) with what prepare_seq_parallel_inputs returns"
            )
        positions = torch.arange(local_length, device=tokens.device)[None]
    mask = kwargs.get("attention_mask")
    fault = fault_of_mask(mask, (batch, local_length))
    visible = torch.ones_like(positions) if mask is None or fault else mask.to(positions)
    both = torch.stack([positions.expand(batch, -1), visible.expand(batch, -1)])
    running = describe_run(decoder, patch.mode, layout, tokens.device.type)
    whole, visible = gather_sequence(mesh.sp_group if layout.world > 1 else None, layout, both, running, fault)
    documents = documents_of(whole, visible)
    settings = {"layout": layout, "seq_len": whole.shape[1], "documents": documents, "kernel": patch.kernel}
    context = AttentionContext(**settings, **groups_of(mesh))
    for module, length in attachment.rotary:
        restore_frequencies(module)
        length.longest = int(whole.max())
    kwargs |= {"position_ids": positions, "attention_mask": None, "use_cache": False, CONTEXT: (patch.mode, context)}
    return (), {name: value for name, value in kwargs.items() if name not in CACHES}


def mask_forward(*, use_vmap: bool = False, local_size: int | None = None, **_) -> "WindowMask | None":
    """transformers asks for the mask of a layer type: none is built, only a window's size is handed on."""
    if use_vmap:
        raise ValueError("custom mask functions are not supported by sharded attention")
    return None if local_size is None else WindowMask(local_size)


@torch.compiler.disable
def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask=None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `[B, H | H_kv, S_local, D]` in, `([B, S_local, H, D], None)` out."""
    if CONTEXT not in kwargs:
        raise ValueError(f"{type(module).__name__} does not hand keyword arguments to its attention: not supported")
    refuse_layer(module, query, key, value, attention_mask, kwargs)
    told = {**kwargs, "scaling": scaling, "attention_mask": attention_mask}
    mode, layer = layer_context(kwargs, told, query.shape[-1])
    device = query.device.type
    if torch.is_autocast_enabled(device) and value.dtype != torch.float64:  # rotation made queries and keys float32
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    mode.validate(layer, q.shape[2], k.shape[2])
    with torch.autocast(device, enabled=False):
        return mode.attention(q, k, v, layer), None


def layer_context(carried: dict, told: dict, head_size: int) -> tuple[Mode, AttentionContext]:
    """The mode and the context of a layer, from what the decoder's hook and the layer hand to attention."""
    mode, ctx = carried[CONTEXT]
    mask, scaling = told.get("attention_mask"), told.get("scaling")
    return mode, ctx.for_layer(
        scale=head_size**-0.5 if scaling is None else scaling,
        window=told.get("sliding_window") or (mask if isinstance(mask, WindowMask) else None),
        softcap=told.get("softcap"),
    )
