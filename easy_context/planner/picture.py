"""Memory of a GPU over the course of a step: items stacked, phase after phase as long as they take, and the limit."""

from pathlib import Path

from .hardware import GIB
from .planning import Plan
from .timing import layer_times


def durations(plan: Plan) -> list[float]:
    """Seconds of each of `plan.phases`, in order; the optimizer's step after them aside."""
    setting, shape = plan.setting, plan.setting.shape
    rows_share = shape.finish_weights / shape.layer_weights
    pairs = shape.pairs(setting.seq_length)
    kinds = list(zip(setting.plan.layers, pairs, strict=True))
    times = {kind: layer_times(setting, *kind) for kind in set(kinds)}
    spent = {}
    for i, kind in enumerate(kinds):
        for way, time in zip(("forward", "backward"), times[kind], strict=True):
            once = times[kind][0].attention
            spent[f"{way} attention", i] = time.attention + time.exchange
            spent[f"{way} rows", i] = rest = time.linear + time.other + time.host_copies
            if kind[0].keep != "everything" and way == "backward":
                spent["backward rows", i] = rest * rows_share
                spent["backward projections", i] = rest * (1 - rows_share)
            if kind[0].keep == "input" and way == "backward":
                spent["attention again", i] = once
                spent["backward attention", i] -= once
    loss = plan.time.total - plan.time.optimizer - sum(f.total + b.total for f, b in (times[kind] for kind in kinds))
    return [loss if phase.layer is None else spent[phase.part, phase.layer] for phase in plan.phases]


def draw(plan: Plan, path: Path | str) -> None:
    from matplotlib.figure import Figure

    phases, seconds = plan.phases, durations(plan)
    items = [item for item in dict.fromkeys(i for phase in phases for i in phase.items)]
    items = [item for item in items if any(phase.items.get(item) for phase in phases)]
    edges = [0.0]
    for duration in seconds:
        edges.append(edges[-1] + duration)

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.add_subplot()
    colors = _colors(items)
    base = [0.0] * len(phases)
    for item in items:
        top = [low + phase.items.get(item, 0.0) / GIB for low, phase in zip(base, phases, strict=True)]
        axes.stairs(
            top, edges, baseline=base, fill=True, color=colors[item], label=item, linewidth=0, antialiased=False
        )
        base = top
    axes.axhline(plan.memory.gpu_usable / GIB, color="black", linestyle="--", linewidth=1)
    usable = f"usable: {plan.memory.gpu_usable / GIB:.1f} GiB"
    axes.annotate(usable, (0, plan.memory.gpu_usable / GIB), (4, 4), textcoords="offset points", fontsize=9)
    most = max(range(len(phases)), key=lambda i: phases[i].total)
    middle, height = (edges[most] + edges[most + 1]) / 2, phases[most].total / GIB
    axes.annotate(f"{height:.1f} GiB", (middle, height), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    turn = edges[next(i for i, phase in enumerate(phases) if phase.layer is None)]
    axes.axvline(turn, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1.12 * max(plan.memory.gpu_usable / GIB, height)))
    axes.set(xlabel="seconds since the step began (forward, loss, backward)", ylabel="GiB of a GPU")
    setting = plan.setting
    axes.set_title(
        f"{setting.shape.name}, {setting.seq_length:,} tokens on {setting.gpus} x {setting.hardware.name}", loc="left"
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def _colors(items: list[str]) -> dict[str, tuple]:
    from matplotlib import colormaps

    palette = colormaps["tab20c"].colors
    order = {"weights": 16, "gradients": 18, "optimizer": 17, "inputs, rotation": 19, "workspace": 19}
    order |= {"kept for backward": 0, "prefetched": 2, "hidden states": 4, "attention": 8, "exchange": 10}
    order |= {"tiles": 12, "layer gradients": 14}
    return {item: palette[order[item]] for item in items}
