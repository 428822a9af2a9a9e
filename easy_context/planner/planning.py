"""`plan`: what fits, how fast it is, and which split and memory plan to take. Plain arithmetic, nothing is started."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from numbers import Integral, Real
from pathlib import Path

from ..memory.plan import MemoryPlan
from ..modes import available_modes
from .hardware import GIB, Hardware, find_hardware
from .memory import Phase, disk_bytes, host_items, peak, phases
from .search import EQUAL, Limits, best, feasible, last, longest, thriftiest
from .setting import ENGINES, Setting
from .shape import ModelShape
from .timing import Time, step_time

LARGEST_GPU, LARGEST_HOST = 288, 8192  # GiB; nobody has more
LARGEST_CLUSTER = 4096  # GPUs


@dataclass(frozen=True)
class Memory:
    """Bytes by item: of a GPU in the phase that takes most, of a node's host memory and disk; and what there is."""

    gpu: dict[str, float]
    gpu_usable: float
    phase: str
    host: dict[str, float]
    host_limit: float | None
    disk: float


@dataclass(frozen=True)
class Plan:
    """One setting and what it comes to. `longest` is the longest sequence, in tokens, that fits with this split and
    some memory plan; `alternatives` are the best settings of all splits, this one among them, fastest first."""

    setting: Setting
    limits: Limits
    longest: int
    alternatives: tuple["Plan", ...] = field(default=(), repr=False)

    @property
    def mode(self) -> str:
        return self.setting.mode

    @property
    def ring_degree(self) -> int | None:
        """For `init_seq_parallel`: of usp_attn alone."""
        return self.setting.ring if self.mode == "usp_attn" else None

    @property
    def seq_parallel_size(self) -> int:
        return self.setting.sp_size

    @property
    def memory_plan(self) -> MemoryPlan:
        return self.setting.plan

    @cached_property
    def memory(self) -> Memory:
        most = peak(self.setting)
        gpu = {item: size for item, size in most.items.items() if size}
        host = host_items(self.setting)
        return Memory(gpu, self.setting.usable, str(most), host, self.limits.host, disk_bytes(self.setting))

    @cached_property
    def time(self) -> Time:
        return step_time(self.setting)

    @property
    def tokens_per_second(self) -> float:
        return self.setting.tokens / self.time.total

    @property
    def mfu(self) -> float:
        return self.setting.flops / self.time.total / self.setting.gpus / self.setting.hardware.peak

    @property
    def phases(self) -> list[Phase]:
        """Memory over the step."""
        return list(phases(self.setting))

    def picture(self, path: Path | str) -> None:
        """Draw memory over the step into a file."""
        from .picture import draw

        draw(self, path)

    def __str__(self) -> str:
        gpu, host = sum(self.memory.gpu.values()), sum(self.memory.host.values())
        return (
            f"{self.mode} on {self.setting.gpus // self.setting.sp_size} x {self.setting.sp_size} GPUs, "
            f"{self.memory_plan}: {gpu / GIB:.1f} GiB a GPU, {host / GIB:.0f} GiB a host, "
            f"{self.time.total:.1f} s a step, {self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}"
        )


def plan(
    model,
    *,
    gpus: int = 1,
    seq_length: int,
    gpu: str | Hardware = "H200",
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    disk: str | None = None,
    disk_memory: float | None = None,
    nodes: int = 1,
    batch_size: int = 1,
    kernel: str | None = None,
    engine: str = "zero3_offload",
    lora: int | None = None,
    mode: str | None = None,
    seq_parallel_size: int | None = None,
    ring_degree: int | None = None,
    compress: str | None = None,
) -> Plan:
    """The fastest setting that fits; of equally fast ones the one with which the longest sequence would.

    Args:
        model: short name (`known_models`), `config.json`, directory, hub name, configuration, model or `ModelShape`.
        gpus: in all; `nodes` hosts share them equally.
        seq_length: tokens of a sequence; `batch_size` of them per sequence-parallel group.
        gpu: name of a table entry, or a `Hardware`.
        gpu_memory: bytes of a GPU; None takes the table's.
        host_memory: bytes of a node; None sets no bound.
        disk: directory of the disk tier, with `disk_memory` bytes a node (None: no bound); None uses no disk.
        kernel: name of an attention kernel; None takes the device's fastest.
        engine: one of `setting.ENGINES`.
        lora: rank of LoRA adapters; None trains all weights.
        mode, seq_parallel_size, ring_degree: consider these alone.
        compress: None or "int8", of what is kept outside the GPU.

    Raises:
        ValueError: nothing fits (names what runs out first and the nearest setting that fits), or a wrong setting.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is one of {ENGINES}, not {engine!r}")
    counts = {"gpus": gpus, "nodes": nodes, "seq_length": seq_length, "batch_size": batch_size, "lora": lora}
    counts |= {"seq_parallel_size": seq_parallel_size, "ring_degree": ring_degree}
    for name, value in counts.items():
        if value is not None and (not isinstance(value, Integral) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    for name, value in {"gpu_memory": gpu_memory, "host_memory": host_memory, "disk_memory": disk_memory}.items():
        if value is not None and (not isinstance(value, Real) or value < 0):
            raise ValueError(f"{name} must be a number of bytes, not {value!r}")
    if gpus > LARGEST_CLUSTER:
        raise ValueError(f"gpus={gpus}: no more than {LARGEST_CLUSTER} are planned")
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs do not divide among {nodes} nodes: choose another --nodes")
    if mode not in (None, *available_modes()):
        raise ValueError(f"unknown mode {mode!r}: one of {available_modes()}, or leave it out")
    if (seq_parallel_size or gpus) % (ring_degree or 1):
        raise ValueError(f"ring_degree={ring_degree} does not divide {seq_parallel_size or gpus} GPUs a sequence")
    if disk_memory is not None and disk is None:
        raise ValueError("disk_memory bounds what the disk keeps: give disk=, a directory, as well")
    shape = ModelShape.of(model)
    a_process = host_memory and int(host_memory * nodes / gpus)
    start = Setting(
        shape=shape,
        hardware=find_hardware(gpu) if isinstance(gpu, str) else gpu,
        seq_length=seq_length,
        plan=MemoryPlan.uniform(shape.layers, compress=compress, disk=disk, host_memory=a_process),
        gpus=gpus,
        nodes=nodes,
        batch_size=batch_size,
        kernel=kernel,
        engine=engine,
        lora=lora,
        memory=gpu_memory,
    )
    limits = Limits(host_memory, disk_memory if disk else 0.0)
    splits = [s for s in _splits(start, mode, ring_degree) if seq_parallel_size in (None, s.sp_size)]
    if not splits:
        asked = f"mode={mode}, seq_parallel_size={seq_parallel_size}, ring_degree={ring_degree}"
        raise ValueError(f"{asked}: no way to split {gpus} GPUs for {shape.heads} heads")
    start.hardware.kernel(kernel, shape.head_size)  # raises for one that the device has not
    made = [best(split, limits) for split in splits]
    found = [Plan(setting, limits, longest(setting, limits)) for setting in made if setting is not None]
    if not found:
        raise ValueError(_why_not(splits, limits))
    found.sort(key=lambda p: -p.tokens_per_second)
    equal = [p for p in found if p.tokens_per_second * EQUAL >= found[0].tokens_per_second]
    return replace(max(equal, key=lambda p: p.longest), alternatives=tuple(found))


def _splits(start: Setting, mode: str | None = None, ring_degree: int | None = None) -> Iterator[Setting]:
    """All ways to share sequences among the GPUs; where a GPU has whole ones, any mode is the same."""
    for size in (n for n in range(1, start.gpus + 1) if start.gpus % n == 0):
        if size == 1:
            if mode in (None, "data_parallel") or start.gpus == 1:
                yield replace(start, mode=mode or "data_parallel")
            continue
        inner = [r for r in range(2, size) if size % r == 0] or [size] * (mode == "usp_attn")
        degrees = {"zigzag_ring_attn": [size], "dist_flash_attn": [size], "ulysses_attn": [1]}
        degrees["usp_attn"] = inner if ring_degree is None else [ring_degree] * (size % ring_degree == 0)
        for name, rings in degrees.items():
            for ring in rings if mode in (None, name) else ():
                if size // ring <= start.shape.heads:
                    yield replace(start, mode=name, sp_size=size, ring=ring)


def _why_not(splits: list[Setting], limits: Limits) -> str:
    """What runs out first, and the nearest settings that fit."""
    reach, split = max(((longest(s, limits), s) for s in splits), key=lambda found: (found[0], found[1].sp_size))
    ways = _enough_memory(split, limits)
    if reach:
        ways.insert(0, f"--seq-length {reach} ({split.mode}, {split.sp_size} GPUs a sequence)")
    if more := _enough_gpus(split, limits):
        ways.append(f"--gpus {more.gpus} --nodes {more.nodes} ({more.mode})")
    if split.lora is None and feasible(replace(split, lora=16), limits):
        ways.append("--lora 16")
    nearest = f"Nearest that fits: {', or '.join(ways)}" if ways else "Nothing near fits: take a smaller model"
    return f"{split.seq_length:,} tokens do not fit: {_shortage(split, limits)}. {nearest}"


def _shortage(split: Setting, limits: Limits) -> str:
    """In the order of a run: what the host holds from the start, the GPU in the thriftiest step, what is kept."""
    least = thriftiest(split)
    on_gpu, on_host = peak(least), host_items(least)
    states = sum(size for item, size in on_host.items() if item != "kept for backward")
    if on_gpu.total > split.usable and (limits.host is None or states <= limits.host):
        where, items, there = f"GPU memory ({on_gpu})", on_gpu.items, split.usable
    else:
        where, items, there = "host memory", on_host, limits.host
    sums = zip(items, accumulate(items.values()), strict=True)
    first = next((item for item, until in sums if until > there), "kept for backward")
    needed = sum(items.values())
    return f"{where} runs out first, at {first}: {needed / GIB:.1f} GiB needed, {there / GIB:.1f} usable"


def _enough_memory(split: Setting, limits: Limits) -> list[str]:
    """The least GPU or host memory that suffices; both where neither does alone."""

    def gpu(limits: Limits) -> int:
        short = last(lambda size: not feasible(replace(split, memory=size * GIB), limits), LARGEST_GPU)
        return (short + 1) % (LARGEST_GPU + 1)

    def host(split: Setting) -> int:
        short = last(lambda size: not feasible(split, replace(limits, host=size * GIB)), LARGEST_HOST)
        return (short + 1) % (LARGEST_HOST + 1)

    ways = [f"--gpu-memory {size}GiB"] if (size := gpu(limits)) else []
    if limits.host is not None and (size := host(split)):
        ways.append(f"--host-memory {size}GiB")
    if not ways and (size := gpu(replace(limits, host=None))) and (more := host(replace(split, memory=size * GIB))):
        ways.append(f"--gpu-memory {size}GiB with --host-memory {more}GiB")
    return ways


def _enough_gpus(split: Setting, limits: Limits) -> Setting | None:
    """As many GPUs like these as hold the sequence, in nodes of the same size or of 8."""
    gpus = split.gpus
    while (gpus := gpus * 2) <= LARGEST_CLUSTER:
        nodes = max(split.nodes, gpus // max(8, split.gpus_per_node))
        more = replace(split, gpus=gpus, nodes=nodes)
        for made in (m for m in _splits(more) if m.sp_size == gpus):
            if feasible(made, limits):
                return made
    return None
