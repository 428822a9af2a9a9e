"""What an extension did, in one table and one picture, from the files that the evaluations and the training wrote.

    python summary.py --perplexity "untouched=a.json" "extended=b.json" --native 8192 --needle needle.json \\
        --metrics run/metrics.jsonl --output DIR

writes `summary.md`, `summary.json` and `ppl.png` to DIR and prints the table. Perplexity files are eval_ppl.py's JSON.
With one context length and `--segments` the columns are the tokens before and past the native length of that context;
with several lengths they are these.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

INK, GRID, SHADE = "#22262b", "#e3e6e8", "#f4f6f7"
COLORS = ["#8a949b", "#c8553d", "#2a6f97"]  # from the model before to the one after


@dataclass(frozen=True)
class Curve:
    """Perplexity of one model. `points`: (context length, or middle of a segment; perplexity). `columns`: the same for
    the table, by header."""

    name: str
    points: list[tuple[float, float]]
    columns: dict[str, float]


def read_curve(name: str, report: dict, native: int) -> Curve:
    """The curve of a report of eval_ppl.py with one model."""
    (model,) = report["models"]
    lengths = model["lengths"]
    if len(lengths) > 1:
        points = [(record["length"], record["perplexity"]) for record in lengths]
        return Curve(name, points, {tokens(length): value for length, value in points})
    segments = lengths[0]["segments"]
    points = [((s["start"] + s["stop"]) / 2, s["perplexity"]) for s in segments]
    before = [s for s in segments if s["stop"] <= native]
    past = [s for s in segments if s["start"] >= native]
    if len(before) + len(past) < len(segments) or not (before and past):
        raise ValueError(f"{name}: the segments need a border at the native length {native}, and tokens on both sides")
    return Curve(name, points, {header(part): pooled(part) for part in (before, past)})


def pooled(segments: list[dict]) -> float:
    """Perplexity over all tokens of several segments."""
    return math.exp(sum(s["nll"] for s in segments) / sum(s["tokens"] for s in segments))


def header(segments: list[dict]) -> str:
    return f"tokens {tokens(segments[0]['start'])} to {tokens(segments[-1]['stop'])}"


def tokens(count: int) -> str:
    """8K for 8192; what is no multiple of 1,024 in full."""
    return f"{count // 1024}K" if count and count % 1024 == 0 else f"{count:,}"


def read_needle(report: dict) -> dict[str, str]:
    """Needles found by context length."""
    found: dict[int, list[bool]] = {}
    for trial in report["trials"]:
        found.setdefault(trial["context_length"], []).append(trial["correct"])
    return {tokens(length): f"{sum(trials)} of {len(trials)}" for length, trials in found.items()}


def read_training(stages: list[list[dict]]) -> list[str]:
    """A line for each training stage from its metrics."""
    lines = []
    for steps in stages:
        seconds = sum(step["seconds"] for step in steps)
        trained = sum(step["tokens_per_second"] * step["seconds"] for step in steps)
        lines.append(
            f"{len(steps)} steps, {trained:,.0f} tokens in {seconds:,.0f} s; "
            f"loss {steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f}; "
            f"peak memory {max(step['peak_memory_gib'] for step in steps):.1f} GiB a process"
        )
    return lines


def markdown(curves: list[Curve], needle: dict[str, str], training: list[str]) -> str:
    headers = list(curves[0].columns)
    rows = [["perplexity", *headers], ["---", *["---:"] * len(headers)]]
    rows += [[curve.name, *(f"{curve.columns[h]:,.2f}" for h in headers)] for curve in curves]
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
    text += "\nNeedles found: " + ", ".join(f"{found} at {length}" for length, found in needle.items()) + ".\n"
    return text + "".join(f"\nTraining: {line}.\n" for line in training)


def show(curves: list[Curve], needle: dict[str, str], training: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, table = Console(), Table("perplexity")
    for column in curves[0].columns:
        table.add_column(column, justify="right")
    for curve in curves:
        style = "bold green" if curve is curves[-1] else None
        table.add_row(curve.name, *(f"{value:,.2f}" for value in curve.columns.values()), style=style)
    console.print(table)
    console.print("Needles found: " + ", ".join(f"{found} at {length}" for length, found in needle.items()))
    for line in training:
        console.print(f"Training: {line}")


def draw(curves: list[Curve], native: int, by_length: bool, path: Path) -> None:
    """`by_length`: the x axis is the context length, logarithmic; otherwise the place within the context."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for curve, color, lift in zip(curves, COLORS, (0, 4, -4), strict=True):  # points by which neighbours' labels part
        x, y = zip(*curve.points, strict=True)
        axes.plot(x, y, color=color, marker="o", markersize=5, linewidth=2, label=curve.name)
        value = f"{y[-1]:,.0f}" if y[-1] >= 100 else f"{y[-1]:.1f}"
        axes.annotate(
            value, (x[-1], y[-1]), (7, lift), textcoords="offset points", color=color, fontsize=9, va="center"
        )
    places, values = zip(*(point for curve in curves for point in curve.points), strict=True)

    if by_length:
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(places) / 1.2, max(places) * 1.2)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(places))))
    else:
        axes.set_xlim(0, max(places) + min(places))
        axes.xaxis.set_major_locator(FixedLocator(range(0, round(max(places) + min(places)) + 1, 2048)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(round(x))))
    if max(values) > 5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())

    axes.axvspan(native, axes.get_xlim()[1], color=SHADE, zorder=0)
    note = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "color": INK, "fontsize": 9}
    axes.annotate(f"past the native {tokens(native)}", (native, 1), (6, -6), va="top", **note)
    axes.set_xlabel("context length (tokens)" if by_length else "place in the context (tokens)", color=INK)
    axes.set_ylabel("perplexity, held-out text", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab1b6")
    axes.tick_params(colors=INK, labelsize=9, length=3)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path, dpi=160)


def name_and_path(text: str) -> tuple[str, Path]:
    name, _, path = text.rpartition("=")
    return name, Path(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--perplexity", nargs=3, type=name_and_path, required=True, metavar="NAME=JSON", help="before, between, after")
    add("--native", type=int, required=True, help="context length of the model before, in tokens")
    add("--needle", type=Path, required=True, help="eval_needle.py's JSON")
    add("--metrics", nargs="+", type=Path, required=True, help="metrics.jsonl of each training stage")
    add("--output", type=Path, required=True)
    args = parser.parse_args()

    reports = [(name, json.loads(path.read_text())) for name, path in args.perplexity]
    curves = [read_curve(name, report, args.native) for name, report in reports]
    needle = read_needle(json.loads(args.needle.read_text()))
    training = read_training([[json.loads(line) for line in p.read_text().splitlines()] for p in args.metrics])

    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "summary.md").write_text(markdown(curves, needle, training))
    summary = {"perplexity": {c.name: c.columns for c in curves}, "needle": needle, "training": training}
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(curves, args.native, len(reports[0][1]["models"][0]["lengths"]) > 1, args.output / "ppl.png")
    show(curves, needle, training)


if __name__ == "__main__":
    main()
