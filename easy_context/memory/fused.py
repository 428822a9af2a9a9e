"""Layers that keep everything, with norms and MLP compiled: elementwise work is fused, and autograd saves half of what
the operations save one by one. Of an MLP these are its input, gate and up; their product, which one product of the
backward needs, is made again there by an elementwise pass.
"""

import torch
import torch._functorch.config as partitioning
from torch import Tensor, nn

from ..fusion import compiled
from . import phases
from .leaf import is_zero3
from .rows import worth_compiling


def fuse_rows(layer: nn.Module, compile: bool | None) -> None:
    """From now on the layer's norms and MLP are a graph each. Under DeepSpeed ZeRO-3, whose hooks gather weights in
    the middle of them, nothing is done. `compile` as in `MemoryPlan`."""
    if compile is False or is_zero3():
        return
    for name, module in layer.named_children():
        if name != "self_attn" and "forward" not in vars(module):
            module.forward = FusedRows(module, compile)


def unfuse_rows(layer: nn.Module) -> None:
    for module in layer.children():
        if isinstance(vars(module).get("forward"), FusedRows):
            del module.forward


class FusedRows:
    """The forward of a module of rows. Called with more than rows, or with hooks inside, it runs as it was written."""

    def __init__(self, module: nn.Module, compile: bool | None):
        self.module, self.compile = module, compile

    @torch.compiler.disable
    def __call__(self, x: Tensor, *args, **kwargs):
        half = phases.twin(self.module)
        if args or kwargs or not worth_compiling(half, x, self.compile):
            return type(self.module).forward(self.module, x, *args, **kwargs)
        function = compiled(phases.call, f"{type(self.module).__name__}_whole")
        with partitioning.patch(ban_recompute_materialized_backward=False):  # read where a graph is compiled
            return function(half, (x,), (), dict(half.named_parameters()))
