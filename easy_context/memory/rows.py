"""Modules that work row by row (an MLP, a norm) in tiles of rows: their activations never exist whole.

A norm of a million tokens of hidden size 4096 makes float32 copies of 16 GiB each, an MLP activations of 28 GiB. In
tiles both are a few hundred MiB. The forward runs under no_grad and keeps its input alone; the backward computes each
tile again and pulls the gradient back through it (`phases.vjp`). Gradients of weights are summed over the tiles in
float32 (float64 for float64) and rounded once.

The number of tiles follows from the number of rows, hence is the same on all ranks that hold equally many; under
DeepSpeed ZeRO-3 the module is a leaf, whose weights are gathered once per pass whatever the number of tiles. After
ALST's TiledMLP, https://arxiv.org/abs/2506.13996.
"""

import functools
import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ..fusion import compiled, why_no_triton
from ..refusals import once_differentiable, refuse_dropout, refusing_random_numbers
from . import phases
from .gradients import Gradients
from .leaf import gather_whole

logger = logging.getLogger("easy_context")


def tile_rows(module: nn.Module, tile_size: int = 16384, compile: bool | None = None) -> None:
    """From now on `module(x)`, x `[..., E]`, computes at most `tile_size` rows at a time.

    Args:
        module: maps every row of its one argument by itself, without dropout: an MLP (gated or not, with biases,
            LoRA-wrapped, partly frozen, a mixture of experts), a norm.
        tile_size: rows; the tiles of a call are made equally large.
        compile: fuse elementwise work by torch.compile; None does so on CUDA, except for mixtures of experts.

    Raises:
        ValueError: `tile_size` below 1. (In a forward) dropout that is on, or other random numbers.
    """
    if tile_size < 1:
        raise ValueError(f"tile_size is at least 1, not {tile_size}")
    module.forward = TiledRows(module, tile_size, compile)
    gather_whole(module)


class TiledRows:
    """The forward of a tiled module."""

    def __init__(self, module: nn.Module, tile_size: int, compile: bool | None):
        self.module, self.tile_size, self.compile = module, tile_size, compile
        self.checked: set[bool] = set()  # training or not

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        refuse_dropout(self.module)
        training = self.module.training
        watched = nullcontext() if training in self.checked else refusing_random_numbers(self.module, x.device)
        with watched:
            y = _Tiled.apply(self, x, *trainable(self.module))
        self.checked.add(training)
        return y


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, how: TiledRows, x: Tensor, *weights):
        half, rows, y = phases.twin(how.module), x.reshape(-1, x.shape[-1]), None
        for t in tiles(len(rows), how.tile_size):
            part = run(half, (rows[None, t],), (), how.compile)
            if y is None:
                y = part.new_empty(*x.shape[:-1], part.shape[-1])
            y.view(len(rows), -1)[t] = part
        ctx.how, ctx.weights, ctx.around = how, trainable(how.module), autocast_of(x.device)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (x,) = ctx.saved_tensors
        half = phases.twin(ctx.how.module)
        rows, gradient = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx, sums = x.new_empty(x.shape), Gradients()  # no view: the layer before may write over it
        by_row = dx.view(rows.shape)
        with ctx.around():
            for t in tiles(len(rows), ctx.how.tile_size):
                (by_row[t],), found = pull_back(half, (rows[None, t],), (), gradient[None, t], ctx.how.compile)
                sums.add(found)
        return None, dx, *sums.of(ctx.weights)


ALL_ROWS = ...  # of a weight, whatever its shape


def run(half: nn.Module, rows: tuple, extras: tuple, compile: bool | None, cut=None):
    """`half(*rows, *extras)` without gradients. `cut` maps a weight's name to the rows of it that take part."""
    function = compiled(phases.call, type(half).__name__) if worth_compiling(half, rows[0], compile) else phases.call
    weights = {name: weight.detach()[cut(name) if cut else ALL_ROWS] for name, weight in half.named_parameters()}
    with torch.no_grad():
        return function(half, rows, extras, weights)


def pull_back(half: nn.Module, rows: tuple, extras: tuple, gradient, compile: bool | None, cut=None):
    """Gradients of `rows`, as a tuple, and of the trainable weights, as `Gradients.add` takes them."""
    function = compiled(phases.vjp, type(half).__name__) if worth_compiling(half, rows[0], compile) else phases.vjp
    weights, frozen, where = {}, {}, {}
    for name, weight in half.named_parameters():
        where[name] = weight, (cut(name) if cut else ALL_ROWS)
        (weights if weight.requires_grad else frozen)[name] = weight.detach()[where[name][1]]
    with torch.no_grad():
        by_rows, by_weights = function(half, rows, extras, weights, frozen, gradient)
    return by_rows, [(*where[name], found) for name, found in by_weights.items()]


def worth_compiling(half: nn.Module, rows: Tensor, compile: bool | None) -> bool:
    """Never where `half` has hooks: those that came after its compilation would be passed over, and those that were
    there would run in its twins of other layers."""
    if compile is False or (compile is None and (not rows.is_cuda or _has_experts(half))):
        return False
    hooked = [type(part).__name__ for part in half.modules() if _hooked(part)]
    reason = f"{hooked[0]} has hooks" if hooked else None if compile else why_no_triton()
    if reason is not None:
        _say_uncompiled(reason)
    return reason is None


def _has_experts(half: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in half.named_modules())


def _hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


@functools.cache
def _say_uncompiled(reason: str) -> None:
    logger.warning("layers of a memory plan run uncompiled, more slowly: %s", reason)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def tiles(rows: int, tile_size: int) -> list[slice]:
    """As few equal tiles as have at most `tile_size` rows; the last may be smaller. Pure."""
    size = -(-rows // max(1, -(-rows // tile_size)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(1, size))]


def autocast_of(device: torch.device):
    """A function that makes the context of mixed precision that is in force now."""
    kind = device.type
    state = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}

    def around() -> AbstractContextManager:
        return torch.autocast(kind, **state)

    return around
