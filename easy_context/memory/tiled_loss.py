"""The negative log likelihood straight from the last hidden states: the logits never exist whole.

A million tokens times a vocabulary of 128K are 512 GB of float32 logits. Here the rows (tokens) pass in tiles: a
tile's logits give its loss and, while they exist, its gradients, so that the head is multiplied once forward and
twice backward, as without tiles. Transient memory is a few times `TILE_BYTES`, whatever the sequence; the weight's
gradient is accumulated in float32 (float64 for float64) and lives from the forward to the backward. Nothing is
communicated.

All of it is *one* call of the head module, whose forward is substituted for that call: an engine that gathers
parameters by module hooks (DeepSpeed ZeRO-3) sees an ordinary call and gathers the weight once, on every rank
alike. The number of tiles depends on shapes only, hence is equal on all ranks as well.

A head that is a plain `nn.Linear` takes the fused path (gradients in the forward, as in Liger Kernel,
https://arxiv.org/abs/2410.10989). Any other (LoRA-wrapped, quantized, sharded by FSDP2) runs its own forward tile
by tile under activation checkpointing: the same memory, at the price of one more forward of the head.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..fusion import compiled, why_no_triton
from ..refusals import once_differentiable
from .rows import tiles

IGNORE_INDEX = -100
TILE_BYTES = 2**29  # one tile of float32 logits
TILE_BYTES_CUDA = 2**31  # the same on a GPU (bfloat16 takes half): large enough to pay for adding up in float32

LogitsTransform = Callable[[Tensor], Tensor]


def tiled_nll_sum(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    logits_transform: LogitsTransform | None = None,
    tile_size: int | None = None,
) -> Tensor:
    """Sum of the negative log likelihoods of all valid targets; without gradients enabled, none is computed.

    Args:
        hidden: `[B, S, E]`, what the head is called with.
        head: the output projection E -> V.
        targets: `[B, S]` int64, already shifted; -100 where nothing is to be predicted.
        logits_transform: what the model does to the logits after the head, on rows `[T, V]`; differentiable.
        tile_size: rows of a tile; None takes as many as keep a float32 tile within
            `TILE_BYTES`, on CUDA `TILE_BYTES_CUDA`.

    Returns:
        A scalar, differentiable once, float32 (float64 for float64 hidden states); 0 where no target is valid.

    Raises:
        ValueError: targets that do not fit, or a head of unknown vocabulary size while `tile_size` is None.
    """

    def nll_sum(own_forward: Callable, hidden: Tensor, targets: Tensor, rows: int) -> Tensor:
        if type(head) is nn.Linear and torch.is_grad_enabled():
            return _LinearNll.apply(hidden, head.weight, head.bias, targets, logits_transform, rows)
        return _tiles(head, own_forward, hidden, targets, logits_transform, rows).sum()

    return _in_one_call(head, nll_sum, hidden, targets, tile_size)


@torch.no_grad()
def tiled_token_nll(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    logits_transform: LogitsTransform | None = None,
    tile_size: int | None = None,
) -> Tensor:
    """The terms of `tiled_nll_sum`, `[B, S]`, 0 where the target is -100; without gradients."""

    def nll(own_forward: Callable, hidden: Tensor, targets: Tensor, rows: int) -> Tensor:
        return _tiles(head, own_forward, hidden, targets, logits_transform, rows)

    return _in_one_call(head, nll, hidden, targets, tile_size).view(targets.shape)


def nll_sum_from_logits(logits: Tensor, targets: Tensor, tile_size: int | None = None) -> Tensor:
    """`tiled_nll_sum` from logits `[B, S, V]` that exist already: their float32 copy and their softmax are made tile
    by tile, in the forward and again in the backward, and never kept."""
    _check_targets(logits, targets)
    rows = _rows_per_tile(logits.shape[-1], tile_size, logits.device)
    return _LogitsNll.apply(logits.flatten(0, -2), targets.flatten(), rows)


def _rows_per_tile(vocab_size: int, tile_size: int | None, device: torch.device) -> int:
    if tile_size is None:
        return max(1, (TILE_BYTES_CUDA if device.type == "cuda" else TILE_BYTES) // (4 * vocab_size))
    if tile_size < 1:
        raise ValueError(f"tile_size must be at least 1, got {tile_size}")
    return tile_size


def _check_targets(rows: Tensor, targets: Tensor) -> None:
    found = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
    if found != torch.int64:
        raise ValueError(f"targets must be int64, not {found}: give target_ids to prepare_seq_parallel_inputs")
    if targets.shape != rows.shape[:-1]:
        raise ValueError(f"targets {tuple(targets.shape)} must have the leading shape of {tuple(rows.shape)}")
    if targets.device != rows.device:
        raise ValueError(f"targets are on {targets.device}, the model's output on {rows.device}: shard to that device")


@torch.compiler.disable  # a compiled call would run on without the substituted forward
def _in_one_call(head: nn.Module, function: Callable, hidden: Tensor, targets: Tensor, tile_size: int | None):
    """`function(head's own forward, hidden [N, E], targets [N], rows of a tile)` as one call of `head`."""
    _check_targets(hidden, targets)
    vocab_size = getattr(head, "out_features", None)
    if vocab_size is None and tile_size is None:
        raise ValueError(f"{type(head).__name__} has no out_features: pass tile_size, the rows of a tile")
    rows = _rows_per_tile(vocab_size, tile_size, hidden.device)
    own_forward = head.forward
    with _substituted_forward(head, lambda hidden, targets: function(own_forward, hidden, targets, rows)):
        return head(hidden.flatten(0, -2), targets.flatten())


@contextmanager
def _substituted_forward(module: nn.Module, forward: Callable):
    """Let `module(...)`, hooks and all, run `forward` instead of its own."""
    instance_forward = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if instance_forward is None:
            del module.forward
        else:
            module.forward = instance_forward


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of losses and sums: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(head, own_forward, hidden, targets, transform, rows) -> Tensor:
    """nll `[N]`, differentiable for heads that are not a plain linear map."""
    if type(head) is nn.Linear:
        return _linear_tiles(hidden, head.weight, head.bias, targets, transform, rows)[0]
    return _module_tiles(own_forward, hidden, targets, transform, rows)


def _module_tiles(forward, hidden, targets, transform, rows) -> Tensor:
    """nll `[N]` by whatever the head's own forward does, each tile recomputed in the backward."""

    def tile_nll(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = forward(hidden)
        logits = logits.to(_exact_dtype(logits.dtype))
        if transform is not None:
            logits = transform(logits)
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")

    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([checkpoint(tile_nll, *pair, use_reentrant=False) for pair in pairs])


def _linear_tiles(hidden, weight, bias, targets, transform, rows, wants=(False, False, False)):
    """nll `[N]`, and the gradients of its sum by hidden `[N, E]`, weight `[V, E]` and bias, None if unwanted."""
    device, kind = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device) and kind != torch.float64:
        kind = torch.get_autocast_dtype(device)
        weight, bias = weight.to(kind), None if bias is None else bias.to(kind)
    exact = _exact_dtype(kind)
    nll = hidden.new_empty(len(hidden), dtype=exact)
    d_hidden = torch.empty_like(hidden) if wants[0] else None
    d_weight = torch.zeros_like(weight, dtype=exact) if wants[1] else None
    d_bias = torch.zeros_like(bias, dtype=exact) if wants[2] else None
    with torch.autocast(device, enabled=False):
        for tile in tiles(len(hidden), rows):
            tile_hidden = hidden[tile].to(kind)
            logits = F.linear(tile_hidden, weight, bias)
            nll[tile], d_logits = _tile_nll(logits, targets[tile], transform, any(wants))
            if any(wants):
                d_logits = d_logits.to(kind)
            if wants[2]:
                d_bias += d_logits.sum(0, dtype=exact)
            if wants[0]:
                d_hidden[tile] = d_logits @ weight
            if wants[1]:
                _add_product(d_weight, d_logits.t(), tile_hidden)
            del logits, d_logits  # before the next tile's are made
    return nll, d_hidden, d_weight, d_bias


def _tile_nll(logits, targets, transform, with_gradient):
    """nll `[T]` in exact precision, and the gradient of its sum by the logits `[T, V]` (or None) in theirs."""
    core = _nll_and_gradient
    if logits.is_cuda and why_no_triton() is None:
        core = compiled(core)  # three passes over the logits, none in float32
    if transform is None:
        return core(logits, targets, with_gradient)
    logits = logits.detach().to(_exact_dtype(logits.dtype)).requires_grad_(with_gradient)
    with torch.set_grad_enabled(with_gradient):
        final = transform(logits)
    nll, gradient = core(final.detach(), targets, with_gradient)
    if with_gradient:
        (gradient,) = torch.autograd.grad(final, logits, gradient)
    return nll, gradient


def _nll_and_gradient(logits, targets, with_gradient: bool):
    valid = (targets != IGNORE_INDEX)[:, None]
    target = torch.where(valid, targets[:, None], 0)
    exact = logits.to(_exact_dtype(logits.dtype))
    lse = exact.logsumexp(-1, keepdim=True)
    nll = torch.where(valid, lse - exact.gather(1, target), 0)[:, 0]
    if not with_gradient:
        return nll, None
    hot = torch.arange(logits.shape[1], device=logits.device) == target
    return nll, torch.where(valid, (exact - lse).exp() - hot.to(exact.dtype), 0).to(logits.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's precision whatever the factors'."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class _LinearNll(torch.autograd.Function):
    """The fused path: the sum, its gradients made in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, rows):
        wants = ctx.needs_input_grad[:3]
        nll, *gradients = _linear_tiles(hidden, weight, bias, targets, transform, rows, wants)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.save_for_backward(*gradients)
        return nll.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        def scaled(gradient, dtype):
            if gradient is not None:
                return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))

        return *map(scaled, ctx.saved_tensors, ctx.dtypes), None, None, None


class _LogitsNll(torch.autograd.Function):
    """The sum from whole logits, which alone are saved."""

    @staticmethod
    def forward(ctx, logits, targets, rows):
        ctx.save_for_backward(logits, targets)
        ctx.rows = rows
        pairs = zip(logits.split(rows), targets.split(rows), strict=True)
        return torch.cat([_tile_nll(*pair, None, False)[0] for pair in pairs]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for tile in tiles(len(logits), ctx.rows):
            gradient[tile] = _tile_nll(logits[tile], targets[tile], None, True)[1].mul_(scale)
        return gradient, None, None
