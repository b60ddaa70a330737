"""Draw docs/results.svg, README's figure of results, from benchmarks/results.

python docs/figures.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
PAGE = Path(__file__).with_name("results.svg")
SINGLE = "Lite2, 64 px, 64 axes, over single, {}batch 8, rate 0.002, {} images{}"
POINTS = (
    ("icons\na fifth of an epoch", 900, "icons.json", "cut by features", "distance of top-1 / single"),
    (
        "emoji\n29 epochs, 3 seeds",
        6_000,
        "headline.json",
        "islands that share nothing, rate 0.002, bf16, 400,000 images: top-1",
        SINGLE.format("bf16, ", "400,000", ", 95 % unpaired"),
    ),
    (
        "emoji\n160 epochs",
        33_000,
        "headline.json",
        "islands that share nothing, 2,228,480 images: top-1",
        SINGLE.format("", "2,228,480", ""),
    ),
)
"""Label, steps of an expert, and the file, case and metric of its ratio."""


def row(file: str, case: str, metric: str) -> dict[str, Any]:
    """The one row of a result."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    (found,) = [row for row in rows if (row["case"], row["metric"]) == (case, metric)]
    return dict(found)


def main() -> None:
    """Draw it."""
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "atoll", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8.2, 3.4), layout="constrained")
    axes.axhline(1, color="#52606d", lw=1.2, ls="--")
    axes.text(82_000, 1.04, "one network, same training FLOPs", ha="right", color="#52606d")
    for label, steps, *where in POINTS:
        result = row(*where)
        ratio = result["value"]
        if where[-1].endswith("95 % unpaired"):
            axes.plot([steps] * 2, result["spread"], color="#0f7b84", lw=2.4, solid_capstyle="round")
        axes.plot([steps], [ratio], "o", color="#0f7b84", ms=9)
        side = {"textcoords": "offset points", "va": "center"}
        axes.annotate(f"{ratio:.2f}", (steps, ratio), (-12, 0), ha="right", weight="bold", **side)
        axes.annotate(label, (steps, ratio), (12, 0), **side)
    axes.set(xscale="log", xlim=(600, 90_000), ylim=(0.4, 1.85))
    axes.set_xlabel("training steps of each expert")
    axes.set_ylabel("Fréchet distance ratio\n(below 1: Atoll is better)")
    axes.set_xticks([1_000, 3_000, 10_000, 30_000], ["1,000", "3,000", "10,000", "30,000"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
