"""The picture of a needle evaluation: context length to the right, depth downwards, accuracy from red to green."""

from pathlib import Path

RED_TO_GREEN = ["#c8453b", "#e98b57", "#f3d27a", "#9cc57e", "#3f9360"]
INK = "#22262b"


def draw_heatmap(cells: dict[tuple[int, float], float], title: str, path: Path) -> None:
    """Write a PNG. `cells` maps (context length in tokens, depth 0..1) to accuracy 0..1 and is a full grid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    lengths, depths = sorted({length for length, _ in cells}), sorted({depth for _, depth in cells})
    grid = [[cells[length, depth] for length in lengths] for depth in depths]
    width, height = min(max(0.72 * len(lengths), 4.2), 16), min(max(0.42 * len(depths), 2.2), 10)
    figure = Figure(figsize=(width + 2.0, height + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = LinearSegmentedColormap.from_list("red to green", RED_TO_GREEN)
    mesh = axes.pcolormesh(grid, cmap=colors, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    if width / len(lengths) > 0.45 and height / len(depths) > 0.25:
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                shade = "white" if value < 0.2 or value > 0.9 else INK
                place = (column + 0.5, row + 0.5)
                axes.annotate(f"{value:.0%}", place, color=shade, fontsize=9, ha="center", va="center")
    axes.invert_yaxis()
    _ticks(axes.xaxis, [tokens(length) for length in lengths], most=24)
    _ticks(axes.yaxis, [f"{100 * depth:.4g}%" for depth in depths], most=24)
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.set_xlabel("context length (tokens)", color=INK)
    axes.set_ylabel("depth of the needle", color=INK)
    axes.set_title(title, color=INK, fontsize=12, pad=10)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(mesh, ax=axes, ticks=[0, 0.25, 0.5, 0.75, 1], fraction=0.05, pad=0.02)
    bar.ax.set_yticklabels(["0%", "25%", "50%", "75%", "100%"])
    bar.ax.tick_params(length=0, labelsize=9, colors=INK)
    bar.outline.set_visible(False)
    bar.set_label("needles found", color=INK)
    figure.savefig(path, dpi=160)


def tokens(count: int) -> str:
    """A length as people say it: 512, 4K, 128K, 1M; what is no multiple of 1,024 in full."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count:,}"


def _ticks(axis, labels: list[str], most: int) -> None:
    every = -(-len(labels) // most)
    axis.set_ticks([i + 0.5 for i in range(0, len(labels), every)], labels[::every])
