"""Draw the CSV files of eval_ppl.py: perplexity by context length, one line a model.

    python plot.py ppl.csv [more.csv ...] --output ppl.png

The x axis is logarithmic. Where the first header cell of a CSV is not empty, as in `.segments.csv`, it is the label of
the axis, which is then linear.
"""

import argparse
import csv
import math
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from easy_context.evaluation.heatmap import INK, tokens
from easy_context.script import run

COLORS = ["#2a6f97", "#c8553d", "#3f9360", "#8d5a97", "#d19a2a", "#5c6b73"]
MARKERS = "osD^vP"
LENGTH = "context length (tokens)"
Line = tuple[str, list[float], list[float]]  # name, x, y


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("csv", nargs="+", type=Path, help="written by eval_ppl.py")
    add("--xmin", type=float)
    add("--xmax", type=float)
    add("--ymin", type=float)
    add("--ymax", type=float)
    add("--title")
    add("--output", type=Path, help="PNG to write (default: the first CSV's name with .png)")
    return parser.parse_args()


def read_lines(path: Path) -> tuple[str, list[Line]]:
    """`(label of the x axis, lines)`; cells without a number are left out."""
    try:
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        x = [float(cell) for cell in header[1:]]
        lines = [(name, *_points(x, [float(cell or "nan") for cell in cells])) for name, *cells in rows]
    except ValueError as error:
        raise ValueError(f"{path}: not a table of eval_ppl.py: {error}") from None
    if not any(points for _, points, _ in lines):
        raise ValueError(f"{path}: no perplexities in it")
    return header[0] or LENGTH, lines


def _points(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    return [a for a, _ in points], [b for _, b in points]


def shorten(lines: list[Line]) -> list[Line]:
    """Models by the last part of their path, where that tells them apart."""
    short = [(Path(name).name, x, y) for name, x, y in lines]
    return short if len({name for name, _, _ in short}) == len(lines) else lines


def draw(lines: list[Line], label: str, args: argparse.Namespace, path: Path) -> None:
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, x, y), color, marker in zip(lines, cycle(COLORS), cycle(MARKERS), strict=False):
        axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.8, label=name)
    lengths = sorted({x for _, xs, _ in lines for x in xs})
    if label == LENGTH:
        axes.set_xscale("log", base=2)
    if len(lengths) <= 12:
        axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(round(x))))
    axes.xaxis.set_minor_locator(NullLocator())
    values = [y for _, _, ys in lines for y in ys]
    if max(values) > 10 * min(values):  # a model beyond its length would flatten all others
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(args.xmin, args.xmax)
    axes.set_ylim(args.ymin, args.ymax)
    axes.set_xlabel(label, color=INK)
    axes.set_ylabel("perplexity", color=INK)
    axes.set_title(args.title or "", color=INK, fontsize=12)
    axes.grid(color="#e3e6e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab1b6")
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path, dpi=160)


def main() -> None:
    args = arguments()
    tables = [read_lines(path) for path in args.csv]
    if len({label for label, _ in tables}) > 1:
        raise ValueError("the CSV files have different x axes: draw them apart")
    output = args.output or args.csv[0].with_suffix(".png")
    lines = [line for _, lines in tables for line in lines]
    draw(shorten(lines), tables[0][0], args, output)
    print(f"wrote {output}")


if __name__ == "__main__":
    run(main)
