"""Gradient checkpointing that keeps each layer's input in host memory.

With checkpointing, what is left to grow with depth are the layer inputs: 8 KiB a token and layer for an 8B model,
244 GiB for a million tokens. They leave the GPU during their layer's forward and come back, one layer ahead, during
the backward: `S * hidden * 2` bytes (bf16) a layer each way, hidden behind the layer's computation.

The checkpoint is torch's non-reentrant one inside `saved_tensors_hooks`: it saves its tensor arguments as autograd
saves tensors, so the hooks see exactly the layer's inputs, while whatever the layer saves itself goes to the
checkpoint's own hooks. Nothing requires the input to need a gradient (LoRA), and keyword arguments pass untouched.

`tiers.py` does the copies and owns the memory. On CPU tensors the same path runs without them.

After the offloaded checkpoints of Unsloth, https://unsloth.ai/blog/long-context, whose copies share the compute
stream.
"""

import functools
import weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .tiers import Kept, Store

MIN_BYTES = 2**20  # smaller tensors stay where they are

_transformers_own = None


def apply_unsloth_offloaded_gradient_checkpoint_monkey_patch() -> None:
    """From now on `model.gradient_checkpointing_enable()`, by its newer name `activation_checkpointing_enable()`,
    offloads, for any HuggingFace model. Models that enabled checkpointing before keep what they have.

    Applying it again changes nothing. It supersedes transformers' own `offload=True`, whose copies
    run on the compute stream.

    Raises:
        ValueError: (when checkpointing is enabled) for `use_reentrant=True`, under which a layer whose input needs no
            gradient would train nothing.
        MemoryError: (during a forward) when the host has no memory left for a layer's input.
    """
    from transformers import PreTrainedModel

    global _transformers_own
    if _transformers_own is not None:
        return
    own = _transformers_own = PreTrainedModel._set_gradient_checkpointing

    @functools.wraps(own)
    def set_offloaded(self, enable=True, gradient_checkpointing_func=checkpoint, **kwargs):
        settings = getattr(gradient_checkpointing_func, "keywords", {})
        if settings.get("use_reentrant"):
            raise ValueError("offloaded gradient checkpointing is non-reentrant: leave out use_reentrant=True")
        offloaded = functools.partial(offloaded_checkpoint, **{**settings, "use_reentrant": False})
        own(self, enable=enable, gradient_checkpointing_func=offloaded, **kwargs)

    PreTrainedModel._set_gradient_checkpointing = set_offloaded


def remove_unsloth_offloaded_gradient_checkpoint_monkey_patch() -> None:
    """Restore transformers and free the page-locked memory: at once, or with the last graph that still uses it.
    Models that enabled checkpointing in between go on offloading until they enable it anew."""
    from transformers import PreTrainedModel

    global _transformers_own
    if _transformers_own is not None:
        PreTrainedModel._set_gradient_checkpointing = _transformers_own
        _transformers_own = None
    _inputs.cache_clear()


def offloaded_checkpoint(function, *args, **settings):
    """`torch.utils.checkpoint.checkpoint(function, *args, **settings)` with the tensors among `args` kept on the host.

    Raises:
        RuntimeError: `function` changed an argument in place, so that it could not be computed again.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions = [tensor._version for tensor in tensors]
    with saved_tensors_hooks(_pack, _unpack):
        output = checkpoint(function, *args, **settings)
    if versions != [tensor._version for tensor in tensors]:
        raise RuntimeError("a checkpointed layer changed its input in place")
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        _inputs(device).store.settle()
    return output


def _pack(tensor: Tensor) -> "Tensor | _Input":
    if tensor.is_cuda and tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES:
        return _inputs(tensor.device).keep(tensor)
    return tensor


def _unpack(packed: "Tensor | _Input") -> Tensor:
    return packed.tensor() if isinstance(packed, _Input) else packed


class _Input:
    """A layer's input on the host, and the one that left before it."""

    def __init__(self, kept: Kept, previous: "weakref.ref[_Input] | None"):
        self.kept, self.previous = kept, previous

    def tensor(self) -> Tensor:
        """The input, back on the device; the previous one starts to return as well."""
        tensor = self.kept.tensor()
        self.kept.drop()  # a graph that is run again fetches it again
        previous = self.previous and self.previous()
        if previous is not None:
            previous.kept.fetch()
        return tensor


class _Inputs:
    """One device's inputs, in the order in which they left."""

    def __init__(self, device: torch.device):
        self.store, self.newest = Store(device), None

    def keep(self, tensor: Tensor) -> _Input:
        kept = _Input(self.store.keep(tensor.contiguous(), "host", chunk=len(tensor)), self.newest)
        self.newest = weakref.ref(kept)
        return kept


_inputs = functools.cache(_Inputs)
