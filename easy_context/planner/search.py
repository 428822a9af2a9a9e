"""The memory plan that fits and is fastest, for one split of the GPUs; the longest sequence that fits at all.

Layers keep attention's output, from the last one down: on the GPU as many as fit, for they are used first in the
backward, then in host memory, then on the disk. Where that is not enough the first layers keep their input alone;
where memory is left the last ones keep everything. Head groups, tile size and prefetch are tried in turn, from what
costs nothing to what saves most. All of it is arithmetic: thousands of plans a second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from ..memory.plan import LayerPlan
from .memory import disk_bytes, host_items, peak
from .setting import Setting
from .timing import step_time

TILES = (16384, 4096)  # the first costs next to nothing against larger ones
STEP = 1024  # tokens a rank, to which the longest sequence is rounded down
EQUAL = 1.02  # times that differ less are equal: no estimate is better
MARGIN = 0.08  # of the memory of a GPU and of the host, left free where that costs no time
LONGEST = 1 << 28  # tokens; nobody has asked for more
_layer_plan = cache(LayerPlan)  # equal ones are the same: quicker to compare


@dataclass(frozen=True)
class Limits:
    """Of a node: bytes of host memory and of disk that may be used; None is boundless, disk 0 is none. The margins are
    shares of GPU and host memory to leave free."""

    host: float | None = None
    disk: float | None = 0.0
    gpu_margin: float = 0.0
    host_margin: float = 0.0


def gpu_fits(setting: Setting, limits: Limits) -> bool:
    return peak(setting).total <= setting.usable * (1 - limits.gpu_margin)


def host_fits(setting: Setting, limits: Limits) -> bool:
    return limits.host is None or sum(host_items(setting).values()) <= limits.host * (1 - limits.host_margin)


def disk_fits(setting: Setting, limits: Limits) -> bool:
    return limits.disk is None or disk_bytes(setting) <= limits.disk


def best(setting: Setting, limits: Limits) -> Setting | None:
    """`setting` with the fastest memory plan that fits; None where none does. Of equally fast ones the first: with
    `MARGIN` left, few head groups, large tiles, no prefetch. Keeps what its plan says of compression, disk and host
    memory."""
    if not feasible(setting, limits):
        return None
    found = []
    for host_margin, gpu_margin in product((MARGIN, 0.0), repeat=2):
        found += _candidates(setting, replace(limits, gpu_margin=gpu_margin, host_margin=host_margin))
        if not all(map(_strained, found)):
            break  # tighter ones would not be faster
    seconds = [step_time(made).total for made in found]
    return next(made for made, s in zip(found, seconds, strict=True) if s <= EQUAL * min(seconds))


def thriftiest(setting: Setting) -> Setting:
    """`setting` with the plan that takes least of the GPU."""
    layers = (LayerPlan("input", "host"),) * setting.shape.layers
    return setting.with_plan(layers=layers, head_groups=max(head_groups(setting)), tile_size=min(TILES), prefetch=False)


def feasible(setting: Setting, limits: Limits) -> bool:
    """Whether any plan fits."""
    return _placed(thriftiest(setting), limits, 0, setting.shape.layers) is not None


def longest(setting: Setting, limits: Limits) -> int:
    """Tokens of the longest sequence that fits with some plan; 0 where not even `STEP` a rank do."""
    step = STEP * setting.sp_size
    return step * last(lambda steps: feasible(replace(setting, seq_length=steps * step), limits), LONGEST // step)


def head_groups(setting: Setting) -> list[int]:
    """Numbers of groups that leave whole KV heads to each, and equal shares to all ranks of an all-to-all."""
    heads, kv, ranks = setting.shape.heads, setting.shape.kv_heads, setting.ulysses
    if setting.shape.one_head_group:
        return [1]
    return [g for g in range(1, kv + 1) if kv % g == 0 and (g == 1 or heads // g % ranks == 0)]


def _candidates(setting: Setting, limits: Limits) -> Iterator[Setting]:
    for groups, tile in product(head_groups(setting), TILES):
        streamed = list(_filled(setting.with_plan(head_groups=groups, tile_size=tile, prefetch=False), limits))
        yield from streamed
        if any(step_time(made).host_copies for made in streamed):  # else there is nothing to gain
            yield from _filled(setting.with_plan(head_groups=groups, tile_size=tile, prefetch=True), limits)
        if not all(map(_strained, streamed)):
            return  # further groups and smaller tiles would bring memory that is not needed


def _strained(setting: Setting) -> bool:
    """Whether more memory would make it faster: attention is computed again, or copies show."""
    time = step_time(setting)
    return time.host_copies > (EQUAL - 1) * time.total or any(layer.keep == "input" for layer in setting.plan.layers)


def last(good: Callable[[int], bool], most: int) -> int:
    """The largest n <= `most` with good(n), where good(n) for all smaller ones; 0 where none is."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _filled(setting: Setting, limits: Limits) -> Iterator[Setting]:
    """What layers may keep under the plan's other settings, from what takes least memory."""
    layers, plain = setting.shape.layers, _placed(setting, limits, 0, 0)
    if plain is not None:
        yield plain
        if whole := last(lambda n: _placed(setting, limits, n, 0) is not None, layers):
            yield _placed(setting, limits, whole, 0)
        if not disk_bytes(plain):
            return
        limits = replace(limits, disk=0.0)  # to compute attention again may be faster than the disk
    bare = layers - last(lambda n: _placed(setting, limits, 0, layers - n) is not None, layers)
    if (made := _placed(setting, limits, 0, bare)) is not None:
        yield made


def _placed(setting: Setting, limits: Limits, whole: int, bare: int) -> Setting | None:
    """With the last `whole` layers keeping everything and the first `bare` ones their input alone; the last layers on
    the GPU, the first ones on the disk; None if it cannot be."""
    layers = setting.shape.layers
    keeps = ["input"] * bare + ["attention"] * (layers - whole - bare) + ["everything"] * whole

    def made(gpu: int, disk: int = 0) -> Setting:
        tiers = ["disk"] * disk + ["host"] * (layers - gpu - disk) + ["gpu"] * gpu
        return setting.with_plan(layers=tuple(map(_layer_plan, keeps, tiers)))

    gpu, disk = whole + last(lambda more: gpu_fits(made(whole + more), limits), layers - whole), 0
    if setting.plan.disk and not host_fits(made(gpu), limits):
        disk = layers - gpu - last(lambda host: host_fits(made(gpu, layers - gpu - host), limits), layers - gpu)
    found = made(gpu, disk)
    return found if all(fits(found, limits) for fits in (gpu_fits, host_fits, disk_fits)) else None
