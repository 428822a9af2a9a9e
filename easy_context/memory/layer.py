"""Decoder layers that follow a `MemoryPlan`: what they hold falls from hundreds of KiB a token to about 50.

A planned layer is one autograd function. N rows (tokens times batch) of hidden size E, H query heads of size D:

    forward   x -> [q, k, v of a group of heads -> attention]*groups -> a -> [output projection, norms, MLP]*tiles -> y
              x `[N, E]`, a `[N, H * D]` and attention's log-sum-exp leave for their tier as soon as they exist
    backward  dy -> [rows of x, a arrive; vjp of the second half -> dx, da]*tiles
                 -> [q, k, v again -> attention's backward -> vjp of the first half, added to dx]*groups

Attention's forward runs once (`keep="attention"`) or once more in the backward (`keep="input"`). The gradient dx is
written over dy, unless somebody else holds dy as well (a hook, another consumer of a sum). Alive at once are x, a, da
and dx, what a group's attention needs, and a tile's activations: 8 N E bytes in bf16 plus two terms that settings make
small. Gradients of weights are summed over tiles and groups in float32. Hooks on a layer run as ever; those on modules
inside it run for every tile, group and recomputation, without gradients.

Communication is that of the mode, group by group: the same bytes in more messages; Ulysses exchanges q, k, v and the
attention output once more in the backward. Tiles depend on shapes only: all ranks of a group make equally many calls.
Under DeepSpeed ZeRO-3 a planned layer is a leaf module: its weights are gathered once forward and once backward.

After the attention-output checkpoints of DistFlashAttn (https://arxiv.org/abs/2310.03294), tiled computation of ALST
(https://arxiv.org/abs/2506.13996) and head groups of Untied Ulysses (UPipe).
"""

import inspect
import logging

import torch
from torch import Tensor, nn

from ..modes import Mode
from ..monkey_patch import CONTEXT, decoder_of, layer_context
from ..refusals import once_differentiable, refuse_dropout
from . import phases
from .checkpoints import Checkpoint, PlannedModel
from .fused import fuse_rows, unfuse_rows
from .gradients import Gradients, references, references_to_a_gradient
from .leaf import gather_apart, gather_whole, gradients_held_unread
from .plan import LayerPlan, MemoryPlan
from .rows import TiledRows, autocast_of, pull_back, run, tile_rows, tiles, trainable

logger = logging.getLogger("easy_context")
_CHECKED_ROWS = 8  # of the real input, on which a layer is compared with its two halves


def apply_memory_plan(model: nn.Module, plan: MemoryPlan) -> str:
    """Make a patched transformers model (wrappers and PEFT are looked through) follow `plan` from its next forward on.

    Before `accelerator.prepare`, after `get_peft_model` and `apply_seq_parallel_monkey_patch` of that model or its
    family. Another plan replaces the one before, unless it is refused. Without gradients, too, layers compute in tiles.
    Returns a line that says what was planned (also logged).

    Raises:
        ValueError: a plan of another number of layers, gradient checkpointing enabled at the same time, or layers
            whose structure, head groups or dropout a plan cannot honour; under ZeRO-3, a model prepared already.
        MemoryError, OSError: (in a forward) when host memory or disk do not suffice for what the plan keeps there.
    """
    decoder = _planned_decoder(model)
    if len(plan.layers) != len(decoder.layers):
        raise ValueError(f"the plan is for {len(plan.layers)} layers, the model has {len(decoder.layers)}")
    planned = [layer for layer, how in zip(decoder.layers, plan.layers, strict=True) if how.keep != "everything"]
    for module in [*planned, decoder.norm]:
        if not isinstance(vars(module).get("forward"), PlannedLayer | TiledRows | None):
            raise ValueError(f"{type(module).__name__}'s forward was replaced by somebody else, who would be overruled")
    for layer in planned:
        refuse_checkpointing(layer)
        if reason := phases.why_not(layer, plan.head_groups):
            raise ValueError(reason)
    remove_memory_plan(model)
    shared = PlannedModel(plan)
    for layer, how in zip(decoder.layers, plan.layers, strict=True):
        if how.keep == "everything":
            fuse_rows(layer, plan.compile)
        else:
            layer.forward = PlannedLayer(layer, how, shared)
            gather_whole(layer)
    tile_rows(decoder.norm, plan.tile_size, plan.compile)
    report = f"easy_context: {plan}"
    logger.info(report)
    return report


def remove_memory_plan(model: nn.Module) -> None:
    """Let the model's layers run as transformers wrote them, and free the plan's page-locked memory and files: at once,
    or with the last graph that still uses them."""
    decoder = _planned_decoder(model)
    for module in [*decoder.layers, decoder.norm]:
        planned = vars(module).get("forward")
        if isinstance(planned, PlannedLayer):
            planned.shared.stores.clear()  # plan and layers hold each other
        if isinstance(planned, PlannedLayer | TiledRows):
            del module.forward
            gather_apart(module)
        unfuse_rows(module)


def _planned_decoder(model: nn.Module) -> nn.Module:
    decoder = decoder_of(model)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(decoder, "norm"):
        raise ValueError(phases.UNKNOWN.format(type(decoder).__name__))
    return decoder


def refuse_checkpointing(layer: nn.Module) -> None:
    if getattr(layer, "gradient_checkpointing", False):
        raise ValueError("gradient checkpointing is on beside a memory plan: model.gradient_checkpointing_disable()")


class PlannedLayer:
    """Stands in for the forward of one decoder layer."""

    def __init__(self, layer: nn.Module, how: LayerPlan, shared: PlannedModel):
        self.layer, self.how, self.shared, self.plan = layer, how, shared, shared.plan
        self.names = list(inspect.signature(type(layer).forward).parameters)[2:]
        self.told: dict[bool, tuple] = {}  # by training or not: what `check_structure` found
        shared.layers.append(self)

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor]:
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if CONTEXT not in kwargs:
            raise ValueError("a plan needs a patched model: apply_seq_parallel_monkey_patch, or remove_memory_plan")
        if kwargs.get("position_embeddings") is None:
            raise ValueError(f"{type(self.layer).__name__} is not handed its rotary embedding: no memory plan for it")
        refuse_checkpointing(self.layer)
        refuse_dropout(self.layer)
        call = _Call(self, hidden_states, kwargs)
        y = _Planned.apply(call, hidden_states, *call.weights)
        return (y,) if call.in_tuple else y

    def tell(self, x: Tensor, extras: tuple, mask) -> tuple[dict, bool]:
        """What `check_structure` finds on the first rows, once for training and once for evaluation."""
        training = self.layer.training
        if training not in self.told:
            few = [rows[:, :_CHECKED_ROWS] for rows in (x, *extras)]
            with torch.no_grad():
                self.told[training] = phases.check_structure(self.layer, mask, *few)
        return self.told[training]


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: "_Call", x: Tensor, *weights):
        ctx.call = call
        return call.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        held = references(dy) - references_to_a_gradient() - gradients_held_unread(ctx.call.planned.layer)
        dx, gradients = ctx.call.backward(dy.clone() if held > 0 or dy._is_view() else dy)
        return None, dx, *gradients


class _Call:
    """One forward of a planned layer and its backward. Rows are tokens times batch, `[1, N, ...]`."""

    def __init__(self, planned: PlannedLayer, x: Tensor, kwargs: dict):
        self.planned, self.plan, self.keep = planned, planned.plan, planned.how.keep
        self.batch, self.length, _ = x.shape
        self.tiles = tiles(self.batch * self.length, self.plan.tile_size)
        self.wide_tiles = tiles(self.batch * self.length, self.plan.projection_rows)
        self.around = autocast_of(x.device)
        extras = *kwargs["position_embeddings"], kwargs.get("position_ids")  # cos, sin, positions
        self.extras = tuple(self._rows(t.expand(self.batch, *t.shape[1:])) for t in extras if t is not None)
        self.projections = phases.Projections(planned.layer, self.plan.head_groups)
        self.finish = phases.Finish(planned.layer)
        told, self.in_tuple = planned.tell(self._rows(x), self.extras, kwargs.get("attention_mask"))
        self.mode, self.ctx = layer_context(kwargs, told, self.projections.head_size)
        if type(self.mode).forward is Mode.forward:
            raise ValueError(f"the mode {self.mode.name} defines attention alone: a memory plan needs its forward")
        self.mode.validate(self.ctx, self.projections.heads, self.projections.kv_heads)
        self.weights = trainable(planned.layer)
        self.keeping = torch.is_grad_enabled() and (x.requires_grad or bool(self.weights))
        self.checkpoint: Checkpoint | None = None

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, self._rows(x)
        checkpoint = self._checkpoint(x[0]) if self.keeping else None
        a, lses = self._attend(x)
        if self.keeping and self.keep == "attention":
            checkpoint.add_attention(a, lses)
        del lses
        y = x.new_empty(shape)  # no view, which users could not write to
        rows = self._rows(y)
        for t in self.tiles:
            rows[:, t] = run(self.finish, (x[:, t], a[:, t]), (), self.plan.compile)
        if self.keeping:
            checkpoint.store.settle()
            self.checkpoint = checkpoint
        return y

    def _checkpoint(self, x: Tensor) -> Checkpoint:
        shared = self.planned.shared
        if self.planned is shared.layers[0]:
            shared.require(x, self.projections.heads * self.plan.head_groups, self.projections.head_size)
        return Checkpoint(self.planned, x, self.tiles[0].stop)

    def backward(self, dy: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        if self.checkpoint is None:
            raise RuntimeError("a planned layer's backward runs once: what it kept is gone")
        checkpoint, self.checkpoint = self.checkpoint, None
        whole, gradients = dy.contiguous(), Gradients()
        dx = self._rows(whole)
        with self.around():
            checkpoint.fetch()
            if self.keep == "attention":
                a, lses = checkpoint.attention, checkpoint.lses()
            else:
                again, lses = self._attend(checkpoint.x(None))
                a = lambda rows: again  # noqa: E731
            da = self._finish_backward(dx, checkpoint.x, a, gradients)
            self._attention_backward(dx, da, checkpoint.x(None), a(None), lses, gradients)
        checkpoint.release()
        return whole, gradients.of(self.weights)

    def _finish_backward(self, dx: Tensor, x, a, gradients: Gradients) -> Tensor:
        """dx holds dy and becomes the part of dx that does not pass through attention; returns da."""
        da = None
        for t in self.tiles:
            rows = x(t.stop)[:, t], a(t.stop)[:, t]
            by_rows, found = pull_back(self.finish, rows, (), dx[:, t], self.plan.compile)
            gradients.add(found)
            if da is None:
                da = by_rows[1].new_empty(a(t.stop).shape)
            dx[:, t], da[:, t] = by_rows
        return da

    def _attention_backward(self, dx, da, x, a, lses, gradients: Gradients) -> None:
        for group, lse in enumerate(lses):
            own = self._heads(group)
            q, k, v = self._project(x, group)
            with torch.autocast(x.device.type, enabled=False):
                residuals = self.mode.restore(q, k, v, self._by_head(a, own), lse, self.ctx)
                del q, k, v
                by_qkv = self.mode.backward(self._by_head(da, own), residuals, self.ctx)
            del residuals
            by_qkv = [self._rows(t) for t in by_qkv]
            cut = self._cut(group)
            for t in self.wide_tiles:
                extras = tuple(rows[:, t] for rows in self.extras)
                gradient = tuple(part[:, t] for part in by_qkv)
                (by_x,), found = pull_back(self.projections, (x[:, t],), extras, gradient, self.plan.compile, cut)
                gradients.add(found)
                dx[:, t].add_(by_x)
            del by_qkv

    def _attend(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The attention output `[1, N, H * D]`, and per group what the mode calls its log-sum-exp."""
        a, lses = None, []
        for group in range(self.plan.head_groups):
            q, k, v = self._project(x, group)
            if a is None:
                a = q.new_empty(1, x.shape[1], self.plan.head_groups * q.shape[2] * q.shape[3])
            own = self._by_head(a, self._heads(group))
            with torch.autocast(x.device.type, enabled=False):
                out, residuals = self.mode.forward(q, k, v, self.ctx)
            own.copy_(out)
            lses.append(residuals.lse)
            del q, k, v, out, residuals
        return a, lses

    def _project(self, x: Tensor, group: int) -> list[Tensor]:
        """q, k, v of a group, `[B, S, heads, D]`."""
        whole = None
        for t in self.wide_tiles:
            extras = tuple(rows[:, t] for rows in self.extras)
            parts = run(self.projections, (x[:, t],), extras, self.plan.compile, self._cut(group))
            if whole is None:
                whole = [part.new_empty(1, x.shape[1], *part.shape[2:]) for part in parts]
            for tensor, part in zip(whole, parts, strict=True):
                tensor[:, t] = part
        return [tensor.view(self.batch, self.length, *tensor.shape[2:]) for tensor in whole]

    def _heads(self, group: int) -> slice:
        return slice(group * self.projections.heads, (group + 1) * self.projections.heads)

    def _cut(self, group: int):
        """Which rows of a projection's weights make the heads of a group, by the weight's name."""
        if self.plan.head_groups == 1:
            return None
        size = self.projections.head_size
        kv_heads = self.planned.layer.self_attn.config.num_key_value_heads
        first = group * kv_heads // self.plan.head_groups
        kv = slice(first * size, (first + self.projections.kv_heads) * size)
        q = slice(self._heads(group).start * size, self._heads(group).stop * size)
        rows = dict(zip(phases.PROJECTIONS, (q, kv, kv), strict=True))

        def cut(name: str):
            path = name.split(".")
            found = [rows[part] for part in path if part in rows]
            return found[0] if found and "lora_A" not in path else ...

        return cut

    def _by_head(self, a: Tensor, heads: slice) -> Tensor:
        return a.view(self.batch, self.length, -1, self.projections.head_size)[:, :, heads]

    def _rows(self, tensor: Tensor) -> Tensor:
        """`[B, S, ...] -> [1, N, ...]`"""
        return tensor.reshape(1, -1, *tensor.shape[2:])
