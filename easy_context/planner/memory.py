"""Bytes of a step by item and tier: of a GPU over the course of the step, of a host and of its disk.

A step is a row of phases: each layer forward (attention, then the rest tile by tile), the loss, each layer backward
(the rest, then attention, then its projections; with head groups the last two in turn). A phase has its items; the peak
is the phase with the largest sum. What a layer keeps for its backward stands in `kept` from its forward on. With N rows
(local tokens times batch), 2 bytes an element:

    kept            N E (input), N (E + H D) + 4 N H (attention), or what autograd saves (everything)
    hidden states   forward x, a, y; backward x, a (come back from their tier) and the gradients dy, da
    attention       a group's q, k, v; backward those, dq, dk, dv, and the kernel's float32 sums; copies of its part of
                    a and da (not with an all-to-all, whose message is one)
    exchange        ring: what it receives while it computes, and its float32 sums; joined steps and rings of two ranks
                    (`modes/tasks.py`): keys and values of two steps, and gradients of two; dist_flash_attn: of two
                    tasks, q, dout, out and dq; all-to-all: q, k, v, out of the own heads, dout backward; what goes home
                    as it was computed, is sent and arrives
    tiles           of the MLP: 6 T M backward; of the projections; of the loss
    layer gradients the layer's weights' in float32 while its tiles are at work
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from ..memory.plan import LayerPlan
from ..memory.tiled_loss import TILE_BYTES_CUDA
from ..modes.deal import most_heads
from ..modes.tasks import most_joined, passes_on
from .setting import BF16, Setting

INT8 = 0.52  # bytes of an element and its share of a scale, against bf16


@dataclass(frozen=True)
class Phase:
    """`part` of the step: "forward attention" or "forward rows" of a `layer`; "backward rows", "attention again" (where
    its input alone is kept), "backward attention" or "backward projections"; or the "loss", whose `layer` is None."""

    part: str
    layer: int | None
    items: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.items.values())

    def __str__(self) -> str:
        return self.part if self.layer is None else f"{self.part}, layer {self.layer}"


def kept_bytes(setting: Setting, layer: LayerPlan) -> float:
    """What a layer keeps in its tier."""
    s, n = setting.shape, setting.rows
    if layer.keep == "everything":
        compiled = setting.compiled(layer)
        of_e, of_m, of_heads = setting.costs.everything if compiled else setting.costs.everything_uncompiled
        heads = (2 * s.heads + 2 * s.kv_heads) * s.head_size
        mlp = s.intermediate * (of_m if s.gated else of_m / 2)
        return n * BF16 * (of_e * s.hidden + mlp + of_heads * heads)
    width = s.hidden + (s.attention_size if layer.keep == "attention" else 0)
    squeezed = INT8 if setting.plan.compress and layer.tier != "gpu" else 1
    return n * width * BF16 * squeezed + lse_bytes(setting, layer)


def lse_bytes(setting: Setting, layer: LayerPlan) -> float:
    """float32, a number per row and head."""
    return 4.0 * setting.rows * setting.shape.heads if layer.keep == "attention" else 0.0


def resident(setting: Setting) -> dict[str, float]:
    """What stays on the GPU for the whole step."""
    s, p, c = setting.shape, setting.shape.parameters, setting.costs
    inputs = setting.rows * (3 * 8 + 2 * BF16 * s.head_size)  # ids, positions, targets; cos and sin
    items = {"inputs, rotation": inputs, "workspace": c.workspace}
    frozen = p - setting.trainable if setting.lora else 0
    if setting.engine == "plain":
        return {"weights": BF16 * p, "gradients": BF16 * setting.trainable, **items}
    if setting.engine == "ddp":
        weights = BF16 * frozen + 4 * setting.trainable
        return {"weights": weights, "gradients": 4 * setting.trainable, "optimizer": 8 * setting.trainable, **items}
    largest = max(s.layer_weights, s.head_weights)
    gathered = {"weights": BF16 * min(p, c.live_parameters + largest)}
    if setting.lora is None:
        gathered["gradients"] = 2 * BF16 * largest  # as they come, and on their way to their owners
    if setting.engine == "zero3":
        gathered["optimizer"] = (BF16 * frozen + 18 * setting.trainable) / setting.gpus
    return {**gathered, **items}


def _attention(setting: Setting, layer: LayerPlan, backward: bool) -> dict[str, float]:
    """Of one group of heads."""
    s, n = setting.shape, setting.rows
    groups = 1 if layer.keep == "everything" else setting.plan.head_groups
    heads, own_kv_heads, kv_heads = most_heads(s.heads // groups, max(1, s.kv_heads // groups), setting.ulysses)
    of_a_head = n * setting.ulysses * s.head_size * BF16
    q, own_kv, kv = heads * of_a_head, 2 * own_kv_heads * of_a_head, 2 * kv_heads * of_a_head
    work = setting.costs.attention_workspace / BF16 * q
    joins = setting.ring > 1 and setting.mode != "dist_flash_attn"
    several = min(most_joined(int(kv)), setting.ring // 2) if joins else 1  # shards of keys that a step computes on
    shared = 2 * kv * several if kv_heads < heads else 0  # dk, dv of shared heads are summed in float32
    copies = 2 * q if groups > 1 and setting.ulysses == 1 else 0  # a group's part of a and of da
    computing = 2 * (q + kv) + copies + work + shared if backward else 2 * q + kv
    exchange = _in_ring(setting, q, kv, several, backward)
    if setting.ulysses > 1:
        # own heads besides the shards; then what goes home, as it was computed, is sent, and arrives
        copied = own_kv if kv_heads > own_kv_heads else 0.0
        while_computing = exchange + (2 * q + copied if backward else q + own_kv + copied)
        while_travelling = (6 * q + 4 * own_kv if backward else 5 * q + 2 * own_kv) - computing
        exchange = max(while_computing, while_travelling)
    return {"attention": computing, "exchange": exchange}


def _in_ring(setting: Setting, q: float, kv: float, several: int, backward: bool) -> float:
    """Of queries of `q` bytes and as many keys and values of `kv`; a step of joined ones computes on `several` kv."""
    if setting.ring == 1:
        return 0.0
    if setting.mode == "dist_flash_attn":  # in a world of few ranks fewer rows travel at once
        return 4 * kv + min(8, 1.5 * setting.ring) * q if backward else 3 * kv + 4 * q
    if passes_on(setting.ring, several):
        return 2 * kv + (2 * q + 6 * kv if backward else 3 * q)
    # a step's keys, half as many of the next; backward: their gradients, sent and received
    return kv * (1 + several * (3.25 if backward else 1.5)) + (2 * q if backward else 3 * q)


def _forward(setting: Setting, layer: LayerPlan) -> Iterator[tuple[str, dict[str, float]]]:
    s, n, c = setting.shape, setting.rows, setting.costs
    hidden = n * (s.hidden + s.attention_size) * BF16
    ordinary = layer.keep == "everything"
    rows = n if ordinary else setting.tile
    yield "forward attention", {"hidden states": hidden, **_attention(setting, layer, backward=False)}
    tile = rows * BF16 * (c.forward_tile[0] * s.hidden + c.forward_tile[1] * s.intermediate)
    # an ordinary layer's tensors are those that it keeps
    yield "forward rows", {"hidden states": hidden + n * s.hidden * BF16, "tiles": 0 if ordinary else tile}


def _backward(setting: Setting, layer: LayerPlan) -> Iterator[tuple[str, dict[str, float]]]:
    s, n, c = setting.shape, setting.rows, setting.costs
    gradients = n * BF16 * (s.hidden + s.attention_size)
    if layer.keep == "everything":
        transient = n * BF16 * (c.everything_backward[0] * s.hidden + c.everything_backward[1] * s.intermediate)
        yield "backward rows", {"hidden states": gradients, "tiles": transient}
        yield "backward attention", {"hidden states": gradients, **_attention(setting, layer, backward=True)}
        return
    came_back = n * (s.hidden + s.attention_size) * BF16 + lse_bytes(setting, layer)
    if layer.tier == "gpu":
        came_back -= kept_bytes(setting, layer)
    hidden = {"hidden states": gradients + came_back}
    trained = setting.lora is None
    if layer.keep == "input":
        yield "attention again", {**hidden, **_attention(setting, layer, backward=False)}
    tile = setting.tile * BF16 * (c.backward_tile[0] * s.hidden + c.backward_tile[1] * s.intermediate)
    sums = 4 * s.finish_weights + 4 * s.down_weights if trained else 0  # and the largest product that is added
    yield "backward rows", {**hidden, "tiles": tile, "layer gradients": sums}
    sums = 4 * s.layer_weights if trained else 0
    yield "backward attention", {**hidden, **_attention(setting, layer, backward=True), "layer gradients": sums}
    by_qkv = n * (s.attention_size + 2 * s.kv_heads * s.head_size) / setting.plan.head_groups * BF16
    tile = setting.projection_tile * BF16 * c.projection_tile * s.hidden
    yield "backward projections", {**hidden, "attention": by_qkv, "tiles": tile, "layer gradients": sums}


def _loss(setting: Setting) -> dict[str, float]:
    s = setting.shape
    states = 3 * setting.rows * s.hidden * BF16  # before and after the last norm, and their gradient
    return {
        "hidden states": states,
        "tiles": setting.costs.loss_tiles * BF16 * min(setting.rows * s.vocab, TILE_BYTES_CUDA // 4),
        "layer gradients": 4 * s.head_weights if setting.lora is None else 0,
    }


def phases(setting: Setting) -> Iterator[Phase]:
    """The step, in order."""
    always, kept = resident(setting), _kept(setting)
    for i, layer in enumerate(setting.plan.layers):
        own = kept[i + 1] if layer.keep == "everything" else kept[i]
        for part, items in _forward(setting, layer):
            yield Phase(part, i, {**always, "kept for backward": own, **items})
    yield from _way_back(setting, always, kept, reversed(range(len(setting.plan.layers))))


def peak(setting: Setting) -> Phase:
    """The phase that takes most. Only those of the loss and the backward are looked at, since a layer's forward takes
    less than its backward; and of neighbours with the same plan only the first and the last."""
    ends, start = [], 0
    for _, run in groupby(setting.plan.layers):
        length = sum(1 for _ in run)
        ends += [start, start + length - 1][: min(length, 2)]
        start += length
    return max(_way_back(setting, resident(setting), _kept(setting), reversed(ends)), key=lambda phase: phase.total)


def _kept(setting: Setting) -> list[float]:
    """Bytes on the GPU of what layers 0 to i - 1 keep, for i = 0 to their number."""
    own = {plan: kept_bytes(setting, plan) * (plan.tier == "gpu") for plan in set(setting.plan.layers)}
    return [0.0, *accumulate(own[plan] for plan in setting.plan.layers)]


def _way_back(setting: Setting, always: dict, kept: list[float], layers: Iterable[int]) -> Iterator[Phase]:
    """The loss, and the backward of `layers`."""
    plans = setting.plan.layers
    yield Phase("loss", None, {**always, "kept for backward": kept[-1], **_loss(setting)})
    for i in layers:
        below = plans[i - 1] if i else None
        ahead = setting.plan.prefetch and below is not None and below.tier != "gpu"
        coming = kept_bytes(setting, replace(below, tier="gpu")) if ahead else 0.0  # uncompressed
        for part, items in _backward(setting, plans[i]):
            yield Phase(part, i, {**always, "kept for backward": kept[i + 1], "prefetched": coming, **items})


def host_items(setting: Setting) -> dict[str, float]:
    """Of a node: its system and its ranks' processes, their shares of the states, and what their layers keep."""
    ranks = setting.gpus_per_node
    kept = sum(kept_bytes(setting, layer) for layer in setting.plan.layers if layer.tier == "host") * ranks
    items = {"system, processes": setting.costs.system + setting.hardware.process * ranks}
    if setting.engine == "zero3_offload":
        items["weights"] = BF16 * setting.shape.parameters / setting.nodes
        items["gradients"] = 4 * setting.trainable / setting.nodes
        items["optimizer"] = 12 * setting.trainable / setting.nodes
    return {**items, "kept for backward": kept}


def disk_bytes(setting: Setting) -> float:
    """Of a node."""
    kept = sum(kept_bytes(setting, layer) for layer in setting.plan.layers if layer.tier == "disk")
    return kept * setting.gpus_per_node
