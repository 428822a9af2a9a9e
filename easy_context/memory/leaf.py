"""Modules whose weights DeepSpeed ZeRO-3 gathers together, once per pass: its leaf modules.

A module that computes in tiles must be one: hooks on the modules inside it would gather once per tile. DeepSpeed then
reduces the weights' gradients in a full backward hook of the module. Such a hook fires too early where no input needs
a gradient (frozen embeddings under LoRA), so a leaf's input is made to need one; and it holds, though it never reads,
the gradient of the output.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html and `create_reduce_and_remove_grad_hooks` of its stage 3.
"""

import torch
from torch import nn


def gather_whole(module: nn.Module) -> None:
    """Under ZeRO-3, make `module` a leaf; otherwise nothing.

    Raises:
        ValueError: DeepSpeed has prepared the module already, as none.
    """
    if not is_zero3():
        return
    from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

    if _prepared(module) and not z3_leaf_module(module):
        raise ValueError("DeepSpeed ZeRO-3 learns how a model is tiled before accelerator.prepare, not after")
    set_z3_leaf_module(module, True)
    module.register_forward_pre_hook(require_gradient)


def is_zero3() -> bool:
    """Whether models that are made now are DeepSpeed ZeRO-3's to partition."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled()


def gather_apart(module: nn.Module) -> None:
    """Undo `gather_whole`; a module that DeepSpeed has prepared stays a leaf."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is require_gradient]:
        del module._forward_pre_hooks[key]
    if not _prepared(module):
        vars(module).pop("_z3_leaf", None)


def require_gradient(module: nn.Module, args: tuple) -> tuple:
    """A forward pre-hook: the first input needs a gradient if any weight does."""
    x, *others = args
    if torch.is_grad_enabled() and not x.requires_grad and any(w.requires_grad for w in module.parameters()):
        x = x.detach().requires_grad_()
    return (x, *others)


def gradients_held_unread(module: nn.Module) -> int:
    """References to the gradient of the module's output that hooks hold and never read: 1 if all are DeepSpeed's."""
    hooks = module._backward_hooks.values()
    return int(bool(hooks) and all(hook.__module__.startswith("deepspeed.") for hook in hooks))


def _prepared(module: nn.Module) -> bool:
    return hasattr(module, "ds_id")
