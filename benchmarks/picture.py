"""The picture of a table: how much of the machine's best kernel each system keeps, forward and backward.

python benchmarks/picture.py benchmarks/results/NAME.json      # draws benchmarks/results/NAME.png
"""

import json
import sys
from pathlib import Path

from report import Row

OURS, PEERS, LIMIT = "#1f5fa8", "#b3b8bf", "#222222"


def draw(rows: list, about: dict[str, str], path: Path) -> None:
    """Bars in percent of the fastest one-call kernel, on the causal mask; at their ends the share of the own kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row.mask == "causal" and row.failure is None]
    best = max((row for row in rows if row.mode == "one process"), key=lambda row: row.tflops_forward_backward)
    shown = [row for row in rows if row.mode != "one process"]
    shown.sort(key=lambda row: (row.system != "easy_context", row.forward_backward_ms), reverse=True)
    shares = [100 * row.tflops_forward_backward / best.tflops_forward_backward for row in shown]
    colors = [OURS if row.system == "easy_context" else PEERS for row in shown]

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.36 * len(shown)), layout="constrained")
    bars = axes.barh(range(len(shown)), shares, color=colors, height=0.68)
    axes.set_yticks(range(len(shown)), [f"{row.system.partition('+')[0]}  {row.mode}" for row in shown])
    for bar, row in zip(bars, shown, strict=True):
        text = f"{row.tflops_forward_backward:.3g} TFLOP/s   {row.percent_forward_backward:.0f}% of {row.kernel}"
        inside = bar.get_width() > 55
        axes.annotate(
            text,
            (bar.get_width(), bar.get_y() + bar.get_height() / 2),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            color="white" if inside and row.system == "easy_context" else LIMIT,
        )
    axes.axvline(100, color=LIMIT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xlim(0, max(104, 1.04 * max(shares)))
    axes.set_xlabel(f"% of one {best.kernel} call ({best.tflops_forward_backward:.3g} TFLOP/s), forward + backward")
    title = f"{about['Device'].partition(',')[0]}\n{about['Work']}, {shown[0].tokens_per_rank} tokens a rank"
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=200)
    plt.close(figure)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        content = json.loads(Path(name).read_text())
        draw([Row(**row) for row in content["rows"]], content, Path(name).with_suffix(".png"))
