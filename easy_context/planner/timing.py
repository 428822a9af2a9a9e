"""Seconds of a step, by part: what every rank computes at the kernels' speed, and what nothing hides.

attention     4 H D FLOPs a causal pair forward, 2.5 times as many backward; once more forward where only a layer's
              input is kept
linear        2 FLOPs a weight and row forward, 4 backward (2 if frozen), and again what a plan recomputes
other         elementwise passes through the GPU's memory, sums of weight gradients, merges of ring steps, small calls
exchange      what computing does not hide of the modes' messages and ZeRO-3's weights
host copies   what computing does not hide of kept tensors on their way, there and back
optimizer     the update, and gradients on their way to it
"""

from dataclasses import dataclass, fields
from itertools import groupby

from ..memory.plan import LayerPlan
from . import exchange
from .memory import kept_bytes
from .setting import BF16, Setting


@dataclass(frozen=True)
class Time:
    """Seconds."""

    attention: float = 0.0
    linear: float = 0.0
    exchange: float = 0.0
    optimizer: float = 0.0
    host_copies: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, more: "Time") -> "Time":
        return Time(*(getattr(self, field.name) + getattr(more, field.name) for field in fields(self)))

    def __mul__(self, times: float) -> "Time":
        return Time(*(getattr(self, field.name) * times for field in fields(self)))


def layer_times(setting: Setting, layer: LayerPlan, pairs: float) -> tuple[Time, Time]:
    """Forward and backward of one layer whose mask leaves `pairs` in a sequence."""
    s, hw, c, n = setting.shape, setting.hardware, setting.costs, setting.rows
    ordinary = layer.keep == "everything"
    compiled = setting.compiled(layer)
    groups = 1 if ordinary else setting.plan.head_groups

    _, fast, slow = hw.kernel(setting.kernel, s.head_size)
    heads = s.heads / groups
    uneven = -(-heads // setting.ulysses) * setting.ulysses / heads  # one rank with a head more
    flops = 4 * pairs * setting.batch_size * s.attention_size / setting.sp_size * uneven
    attention, attention_backward = flops / fast, 2.5 * flops / slow

    product = 2 * n / (hw.matmul * c.matmul_share)
    linear = product * s.layer_weights
    again = 0.0 if ordinary else product * (s.layer_weights - (s.down_weights if compiled else 0))
    linear_backward = linear * (2 if setting.lora is None else 1) + again

    def passes(of_e: float, of_m: float) -> float:
        elements = n * (of_e * s.hidden + of_m * s.intermediate)
        return elements * BF16 / hw.bandwidth * (1 if compiled else c.uncompiled)

    regrouped = c.norm_passes * (groups - 1)
    of_e, of_m = c.forward_passes
    other = passes(of_e + regrouped, of_m)
    back_e, back_m = c.backward_passes
    other_backward = passes(back_e + 2 * regrouped - ordinary * of_e, back_m - ordinary * of_m)
    if not ordinary and setting.lora is None:
        other_backward += n / setting.tile * s.layer_weights * c.accumulate_bytes / hw.bandwidth
    calls = 0 if ordinary else -(-n // setting.projection_tile) * groups
    other += calls * c.forward_call
    other_backward += calls * (c.forward_call + c.backward_call)
    merges = n * s.attention_size * (setting.ring - 1) * c.merge_bytes / hw.bandwidth
    other, other_backward = other + merges, other_backward + merges

    sent = exchange.seconds(setting, groups, attention, backward=False, again=False)
    sent_backward = exchange.seconds(setting, groups, attention_backward, backward=True, again=not ordinary)
    if layer.keep == "input":
        sent_backward += sent
        attention_backward += attention
        other_backward += calls * c.forward_call

    forward = Time(attention, linear, sent, other=other)
    backward = Time(attention_backward, linear_backward, sent_backward, other=other_backward)
    out, back = _copies(setting, layer, forward, backward)
    forward, backward = forward + Time(host_copies=out), backward + Time(host_copies=back)
    if setting.engine in ("zero3", "zero3_offload"):
        brought, spread = _weights(setting, BF16 * s.layer_weights)
        idle = max(0.0, brought + spread - forward.total), max(0.0, brought + 2 * spread - backward.total)
        forward, backward = forward + Time(exchange=idle[0]), backward + Time(exchange=idle[1])
    return forward, backward


def _copies(setting: Setting, layer: LayerPlan, forward: Time, backward: Time) -> tuple[float, float]:
    """What shows of a layer's copies out and back."""
    if layer.tier == "gpu":
        return 0.0, 0.0
    hw, size, ranks = setting.hardware, kept_bytes(setting, layer), setting.gpus_per_node
    link = min(hw.host_link, hw.host_total / ranks)
    there, here = size / link, size / link
    if layer.tier == "disk":
        there, here = max(there, size * ranks / hw.disk_write), max(here, size * ranks / hw.disk_read)
    out = max(0.0, there - forward.total)
    if setting.plan.prefetch:
        return out, max(0.0, here - backward.total)
    # tile by tile, while the tiles before it are at work
    tile = setting.tile / setting.rows
    rows = (backward.linear + backward.other) * setting.shape.finish_weights / setting.shape.layer_weights
    return out, max(here * tile, here - rows * (1 - tile))


def _weights(setting: Setting, size: float) -> tuple[float, float]:
    """ZeRO-3: seconds until a layer's `size` bytes have come from the host, and from the other ranks."""
    hw, gpus = setting.hardware, setting.gpus
    link = min(hw.host_link, hw.host_total / setting.gpus_per_node)
    brought = size / gpus / link if setting.engine == "zero3_offload" else 0.0
    if gpus == 1:
        return brought, 0.0
    outside = size * (setting.nodes - 1) / setting.nodes / setting.gpus_per_node
    return brought, max(hw.message(size * (gpus - 1) / gpus), outside / hw.between_nodes)


def _outside(setting: Setting) -> Time:
    """Loss and optimizer."""
    s, hw, c, n = setting.shape, setting.hardware, setting.costs, setting.rows
    product = 2 * n * s.head_weights / (hw.matmul * c.matmul_share)
    time = Time(linear=product * (3 if setting.lora is None else 2), other=n * s.vocab * c.loss_bytes / hw.bandwidth)
    if setting.engine in ("zero3", "ddp"):
        shards = setting.gpus if setting.engine == "zero3" else 1
        return time + Time(optimizer=setting.trainable / shards * c.gpu_adam_bytes / hw.bandwidth)
    if setting.engine == "zero3_offload":
        link = min(hw.host_link, hw.host_total / setting.gpus_per_node)
        gradients = 4 * setting.trainable / setting.gpus / link
        return time + Time(optimizer=gradients + setting.trainable / setting.nodes / hw.adam * c.cpu_adam_passes)
    return time


def step_time(setting: Setting) -> Time:
    total = _outside(setting)
    kinds = sorted(zip(setting.plan.layers, setting.shape.pairs(setting.seq_length), strict=True), key=repr)
    for (layer, pairs), alike in groupby(kinds):
        forward, backward = layer_times(setting, layer, pairs)
        total += (forward + backward) * sum(1 for _ in alike)
    return total
