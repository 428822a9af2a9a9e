"""A plan as tables: memory by item and tier, time by part, all splits, and the flags to take."""

from collections import Counter
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from .flags import flags_of
from .hardware import GIB
from .planning import Plan
from .timing import Time

PARTS = [field.name for field in fields(Time)]


def show(plan: Plan, console: Console) -> None:
    setting, hardware = plan.setting, plan.setting.hardware
    kernel = hardware.kernel(setting.kernel, setting.shape.head_size)[0]
    where = f"{setting.gpus} x {hardware.name}" + (f" on {setting.nodes} nodes" if setting.nodes > 1 else "")
    what = f"{setting.shape.name}, {setting.shape.parameters / 1e9:.2f}e9 parameters"
    console.print(
        f"{what}; {setting.seq_length:,} tokens x {setting.batch_size}; {where}, {kernel}, {setting.engine}\n"
    )
    console.print(memory_table(plan))
    console.print(f"(the GPU's: {plan.memory.phase})\n")
    console.print(time_table(plan))
    console.print(splits_table(plan))
    console.print(f"longest sequence that fits on this split: {plan.longest:,} tokens")
    furthest = max(plan.alternatives, key=lambda other: other.longest)
    if furthest.longest > plan.longest:
        console.print(f"on any split: {furthest.longest:,} tokens ({_split(furthest)})")
    console.print("\ntrain.py flags:")
    console.print("  " + " ".join(flags_of(plan)), soft_wrap=True, highlight=False)


def memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(title="Memory at its highest, GiB", title_justify="left")
    table.add_column("item")
    for tier in ("a GPU", "a host", "a host's disk"):
        table.add_column(tier, justify="right")
    disk = {"kept for backward": memory.disk} if memory.disk else {}
    for item in dict.fromkeys([*memory.gpu, *memory.host]):
        table.add_row(item, *(_gib(tier.get(item)) for tier in (memory.gpu, memory.host, disk)))
    table.add_section()
    table.add_row("sum", _gib(sum(memory.gpu.values())), _gib(sum(memory.host.values())), _gib(memory.disk or None))
    table.add_row("usable", _gib(memory.gpu_usable), _gib(memory.host_limit), "")
    return table


def time_table(plan: Plan) -> Table:
    table = Table(title="Time of a step", title_justify="left")
    for name in ("part", "seconds", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part in PARTS:
        seconds = getattr(plan.time, part)
        table.add_row(part.replace("_", " "), f"{seconds:.2f}", f"{seconds / plan.time.total:.1%}")
    table.add_section()
    table.add_row("sum", f"{plan.time.total:.2f}", "")
    return table


def splits_table(plan: Plan) -> Table:
    table = Table(title="Splits, each with its best memory plan", title_justify="left")
    columns = ("mode", "groups x GPUs", "ring", "step s", "tokens/s", "MFU", "GPU GiB", "host GiB", "longest", "layers")
    for name in columns:
        table.add_column(name, justify="left" if name in ("mode", "layers") else "right")
    for other in plan.alternatives:
        setting, chosen = other.setting, other.setting == plan.setting
        table.add_row(
            other.mode,
            f"{setting.gpus // setting.sp_size} x {setting.sp_size}",
            str(other.ring_degree or ""),
            f"{other.time.total:.1f}",
            f"{other.tokens_per_second:,.0f}",
            f"{other.mfu:.1%}",
            _gib(sum(other.memory.gpu.values())),
            _gib(sum(other.memory.host.values())),
            f"{other.longest:,}",
            _layers(other),
            style="bold" if chosen else None,
        )
    return table


def _layers(plan: Plan) -> str:
    chosen = plan.memory_plan
    kinds = Counter(f"{layer.keep} on {layer.tier}" for layer in chosen.layers)
    kept = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{kept}; groups {chosen.head_groups}, tile {chosen.tile_size}" + (", prefetch" if chosen.prefetch else "")


def _split(plan: Plan) -> str:
    degree = f", ring {plan.ring_degree}" if plan.ring_degree else ""
    return f"{plan.mode}, {plan.seq_parallel_size} GPUs a sequence{degree}"


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"
