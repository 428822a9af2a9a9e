"""The memory plan that fits and is fastest, for one split of the GPUs; the longest sequence that fits at all.

Layers are filled from the top: those that are used first in the backward leave the GPU first. From the top down as
many as possible keep everything; the others keep attention's output, in host memory, and on the GPU or the disk where
the host is full; only what still does not fit keeps its input alone. Head groups, tile size and prefetch are tried in
turn. All of it is arithmetic: thousands of plans a second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from easy_context.memory.plan import LayerPlan

from .memory import disk_bytes, host_items, kept_bytes, peak
from .setting import Setting
from .timing import step_time

TILES = (16384, 8192, 4096)  # the first costs next to nothing against larger ones
STEP = 1024  # tokens a rank, to which the longest sequence is rounded down
EQUAL = 1.01  # settings whose times differ less are equally fast: the one that leaves more memory is taken
LONGEST = 1 << 28  # tokens; nobody has asked for more


@dataclass(frozen=True)
class Limits:
    """Of a node: bytes of host memory and of disk that may be used; None is boundless, disk 0 is none."""

    host: float | None = None
    disk: float | None = 0.0


def fits(setting: Setting, limits: Limits) -> bool:
    if limits.host is not None and sum(host_items(setting).values()) > limits.host:
        return False
    if limits.disk is not None and disk_bytes(setting) > limits.disk:
        return False
    return peak(setting).total <= setting.usable


def best(setting: Setting, limits: Limits) -> Setting | None:
    """`setting` with the fastest memory plan that fits; None where none does. Keeps what its plan says of compression,
    disk and host memory."""
    timed = [(step_time(made).total, made) for made in _candidates(setting, limits)]
    fastest = min((seconds for seconds, _ in timed), default=0.0)
    return min((m for t, m in timed if t <= EQUAL * fastest), key=lambda m: fullness(m, limits), default=None)


def fullness(setting: Setting, limits: Limits) -> float:
    """Share of GPU or host memory in use, whichever is more."""
    host = sum(host_items(setting).values()) / limits.host if limits.host else 0.0
    return max(host, peak(setting).total / setting.usable)


def thriftiest(setting: Setting) -> Setting:
    """`setting` with the plan that takes least of both memories."""
    groups, tile = max(head_groups(setting)), min(TILES)
    return setting.with_plan(
        layers=_column(setting, 0, setting.shape.layers), head_groups=groups, tile_size=tile, prefetch=False
    )


def longest(setting: Setting, limits: Limits) -> int:
    """Tokens of the longest sequence that fits with some plan; 0 where not even `STEP` a rank do."""
    thrifty, step = thriftiest(setting), STEP * setting.sp_size

    def short_enough(steps: int) -> bool:
        made = replace(thrifty, seq_length=steps * step)
        return _placed(made, limits, 0, made.shape.layers) is not None

    return step * _last(short_enough, LONGEST // step)


def head_groups(setting: Setting) -> list[int]:
    """Numbers of groups that leave whole KV heads to each, and equal shares to all ranks of an all-to-all."""
    heads, kv, ranks = setting.shape.heads, setting.shape.kv_heads, setting.ulysses
    return [g for g in range(1, kv + 1) if kv % g == 0 and (g == 1 or heads // g % ranks == 0)]


def _candidates(setting: Setting, limits: Limits) -> Iterator[Setting]:
    for groups in head_groups(setting):
        for tile in TILES:
            streamed = _filled(setting.with_plan(head_groups=groups, tile_size=tile, prefetch=False), limits)
            yield from streamed
            if any(step_time(made).host_copies for made in streamed):  # else there is nothing to gain
                yield from _filled(setting.with_plan(head_groups=groups, tile_size=tile, prefetch=True), limits)
            if streamed and all(layer.keep != "input" for made in streamed for layer in made.plan.layers):
                break  # smaller tiles would save memory that is not needed


def _last(good: Callable[[int], bool], most: int) -> int:
    """The largest n <= `most` with good(n), where good(n) for all smaller ones; 0 where none is."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _filled(setting: Setting, limits: Limits) -> list[Setting]:
    """Assignments of layers under the plan's other settings: the fastest, and one that may be as fast with less."""
    layers, plain = setting.shape.layers, _placed(setting, limits, 0, 0)
    if plain is None:
        bare = layers - _last(lambda n: _placed(setting, limits, 0, layers - n) is not None, layers)
        return [made for made in [_placed(setting, limits, 0, bare)] if made]
    whole = _placed(setting, limits, _last(lambda n: _placed(setting, limits, n, 0) is not None, layers), 0)
    found = {plain.plan.layers: plain, whole.plan.layers: whole}.values()
    return [_copies_spared(made, limits) if step_time(made).host_copies else made for made in found]


def _placed(setting: Setting, limits: Limits, whole: int, bare: int) -> Setting | None:
    """With `whole` layers that keep everything and `bare` ones that keep their input alone; None if it cannot be."""
    rest = setting.shape.layers - whole
    free = _host_free(setting, limits)
    on_host = {}
    for keep, count in (("input", bare), ("attention", rest - bare)):
        size = kept_bytes(setting, LayerPlan(keep, "host")) * setting.gpus_per_node
        on_host[keep] = count if free is None else max(0, min(count, int(free // size)))
        free = free if free is None else free - on_host[keep] * size

    def with_disk(count: int) -> Setting:
        return setting.with_plan(layers=_column(setting, whole, bare, on_host["input"], on_host["attention"], count))

    made = with_disk(0)
    if not fits(made, limits) and setting.plan.disk:
        homeless = rest - bare - on_host["attention"]
        made = with_disk(homeless - _last(lambda n: fits(with_disk(homeless - n), limits), homeless))
    return made if fits(made, limits) else None


def _column(setting: Setting, whole: int, bare: int, bare_host=None, attention_host=None, disk: int = 0):
    """Layers from the bottom: inputs, attention outputs on disk, on the host, on the GPU, everything. Without numbers
    the host takes all."""
    others = setting.shape.layers - whole - bare
    bare_host = bare if bare_host is None else bare_host
    attention_host = others if attention_host is None else attention_host
    return (
        (LayerPlan("input", "host"),) * bare_host
        + (LayerPlan("input", "gpu"),) * (bare - bare_host)
        + (LayerPlan("attention", "disk"),) * disk
        + (LayerPlan("attention", "host"),) * attention_host
        + (LayerPlan("attention", "gpu"),) * (others - attention_host - disk)
        + (LayerPlan("everything", "gpu"),) * whole
    )


def _host_free(setting: Setting, limits: Limits) -> float | None:
    if limits.host is None:
        return None
    bare = setting.with_plan(layers=())
    return limits.host - sum(host_items(bare).values())


def _copies_spared(setting: Setting, limits: Limits) -> Setting:
    """Layers whose copies nothing hides stay on the GPU, as many as fit."""
    on_host = [i for i, layer in enumerate(setting.plan.layers) if layer == LayerPlan("attention", "host")]

    def moved(count: int) -> Setting:
        layers = list(setting.plan.layers)
        for i in on_host[len(on_host) - count :]:
            layers[i] = LayerPlan("attention", "gpu")
        return setting.with_plan(layers=tuple(layers))

    most = moved(_last(lambda n: fits(moved(n), limits), len(on_host)))
    return min(setting, most, key=lambda made: step_time(made).total)
