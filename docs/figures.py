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
JUDGE = "Lite2, 64 px, 64 axes"
OVER = JUDGE + ", over single, {}batch 8, rate 0.002, {} images{}"
SHORT = "islands that share nothing, rate 0.002, bf16, 400,000 images: top-1"
LONG = "islands that share nothing, 2,228,480 images: top-1"
SINGLE, ISLANDS, QUIET = "#52606d", "#0f7b84", "#8a94a0"
SIDES = (
    (
        "one network",
        SINGLE,
        "s",
        13,
        "single, bf16, batch 8, rate 0.002, 400,000 images",
        "single, batch 8, rate 0.002, 800,000 images",
        "single, batch 8, rate 0.002, 2,228,480 images",
    ),
    ("isolated experts", ISLANDS, "o", -18, SHORT.split(":")[0], LONG.split(":")[0]),
)
"""Label, colour, mark, the label's height over the last point, and what was trained."""
RATIOS = (
    (900, "icons, 0.2 epochs", "icons.json", "cut by features", "distance of top-1 / single"),
    (6_000, "emoji, 29 epochs", "headline.json", SHORT, OVER.format("bf16, ", "400,000", ", 95 % unpaired")),
    (33_000, "emoji, 160 epochs", "headline.json", LONG, OVER.format("", "2,228,480", "")),
    (800_000, "paper (FID)", "paper.json", "eight experts, 800k steps", None),
)
"""Steps of an expert, label, and the file, case and metric of the ratio."""


def rows(file: str) -> list[dict[str, Any]]:
    """Of a result."""
    return list(json.loads((RESULTS / file).read_text())["rows"])


def distances(axes: Any) -> None:
    """Over training FLOPs, with the range over seeds, and what real images have."""
    known = json.loads((RESULTS / "headline.json").read_text())
    for label, colour, mark, height, *trained in SIDES:
        models = [known["points"][name] for name in trained]
        seeds = [list(model.get("monolith", model.get("top-1")).values()) for model in models]
        values = [sorted(seed["test"][JUDGE] for seed in each) for each in seeds]
        middle, spent = [each[len(each) // 2] for each in values], [each[0]["flops"] for each in seeds]
        for at, each in zip(spent, values, strict=True):
            axes.plot([at] * 2, [each[0], each[-1]], color=colour, lw=2.4, solid_capstyle="round")
        axes.plot(spent, middle, mark + "-", color=colour, lw=1.4, ms=7)
        place = {"xytext": (0, height), "textcoords": "offset points", "ha": "right", "color": colour}
        axes.annotate(label, (spent[-1], middle[-1]), **place)
    axes.axhline(known["floor"][JUDGE], color=QUIET, lw=1.2, ls=":")
    axes.text(5.6e14, known["floor"][JUDGE] + 9, "real training images", ha="right", color=QUIET)
    axes.set(xscale="log", xlim=(8e13, 6.6e14), ylim=(0, 640))
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("Fréchet distance (emoji)")
    axes.set_xticks([1e14, 2e14, 5e14], ["1e14", "2e14", "5e14"])


def ratios(axes: Any) -> None:
    """Over the steps of an expert."""
    axes.axhline(1, color=SINGLE, lw=1.2, ls="--")
    axes.text(2.6e6, 1.04, "one network, same FLOPs", ha="right", color=SINGLE)
    for steps, label, file, case, metric in RATIOS:
        (found,) = [row for row in rows(file) if (row["case"], row.get("metric")) == (case, metric)]
        ratio = found.get("value") or found["over the monolith's"]
        if found.get("spread"):
            axes.plot([steps] * 2, found["spread"], color=ISLANDS, lw=2.4, solid_capstyle="round")
        axes.plot(
            [steps], [ratio], "o", color=ISLANDS, ms=8, mfc="white" if file == "paper.json" else ISLANDS
        )
        side = {"textcoords": "offset points", "va": "center"}
        alone = file == "paper.json"  # where there is no room beside it
        first, second = ((0, 13), (0, 26)) if alone else ((-10, 0), (10, 0))
        sides = ("center", "center") if alone else ("right", "left")
        axes.annotate(f"{ratio:.2f}", (steps, ratio), first, ha=sides[0], weight="bold", **side)
        axes.annotate(label, (steps, ratio), second, ha=sides[1], **side)
    axes.set(xscale="log", xlim=(200, 3e6), ylim=(0.4, 1.85))
    axes.set_xlabel("training steps of each expert")
    axes.set_ylabel("ratio to one network")
    axes.set_xticks([1e3, 1e4, 1e5, 1e6], ["1,000", "10,000", "100,000", "1,000,000"])


def main() -> None:
    """Draw it."""
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "atoll", "font.size": 10})
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.4), width_ratios=(4, 5), layout="constrained")
    distances(panels[0])
    ratios(panels[1])
    for axes in panels:
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
