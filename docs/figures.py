"""Draw docs/results.svg, README's figure of results, from benchmarks/results.

python docs/figures.py
"""

import json
import statistics
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
        20,
        "single, bf16, batch 8, rate 0.002, 400,000 images",
        "single, batch 8, rate 0.002, 800,000 images",
        "single, batch 8, rate 0.002, 2,228,480 images",
    ),
    ("isolated experts", ISLANDS, "o", -18, SHORT.split(":")[0], LONG.split(":")[0]),
)
"""Label, colour, mark, the label's height over the last point, and what was trained."""
HALF = "single, batch 8, rate 0.001, 400,000 images"
HALF_LONG = "single, batch 8, rate 0.001, 2,228,480 images"
PRETRAINED = "islands after shared pretraining, rate 0.001, 400,000 images"
OTHERS = (
    ("128 channels", SINGLE, -1, "single, bf16, 128 channels, batch 8, rate 0.0015, 1,296,924 images"),
    ("192 channels", SINGLE, -8, "single, bf16, 192 channels, batch 8, rate 0.001, 597,089 images"),
    ("192 channels", ISLANDS, 7, "islands that share nothing, bf16, 192 channels, 597,089 images"),
    ("batches of 64", SINGLE, -3, "single, bf16, batch 64, rate 0.004, 2,228,480 images"),
    ("half the rate", SINGLE, None, HALF),
    ("half the rate", SINGLE, -6, HALF_LONG),
    ("half the rate,\npretrained", ISLANDS, None, PRETRAINED),
)
"""Label, colour, its height over the point (None: left of it), and the entry; of seeds the median."""
RATIOS = (
    (0.2, "icons", "left", "icons.json", "cut by features", "distance of top-1 / single"),
    (1.3, "icons", "left", "icons-longer.json", "cut by features", "distance of top-1 / single"),
    (
        29,
        "emoji, 3 seeds",
        "right",
        "headline.json",
        SHORT,
        OVER.format("bf16, ", "400,000", ", 95 % unpaired"),
    ),
    (
        29,
        "half the rate",
        "left",
        "headline.json",
        "islands that share nothing, rate 0.001, 400,000 images: top-1",
        f"{JUDGE}, over {HALF}",
    ),
    (
        34,
        "half the rate, pretrained",
        "below",
        "headline.json",
        f"{PRETRAINED}: top-1",
        f"{JUDGE}, over {HALF}, 95 % unpaired",
    ),
    (
        25,
        "half the rate for one",
        "right",
        "headline.json",
        SHORT,
        f"{JUDGE}, over {HALF}, 95 % unpaired",
    ),
    (175, "half the rate\n         for one", "under", "headline.json", LONG, f"{JUDGE}, over {HALF_LONG}"),
    (43, "twice as wide", "left", "headline.json", f"{OTHERS[2][3]}: top-1", f"{JUDGE}, over {OTHERS[1][3]}"),
    (160, "emoji, 3 seeds", "right", "headline.json", LONG, OVER.format("", "2,228,480", ", 95 % unpaired")),
    (160, "paper (FID)", "left", "paper.json", "eight experts, 800k steps", None),
)
"""Epochs, label, the side of the label that is at the point, and the file, case and metric of the ratio.

Those of 29 epochs stand a little apart, so that their intervals are seen."""
PLACES = {"left": (9, 0, "left"), "right": (-9, 0, "right")}
PLACES |= {"below": (-9, -10, "right"), "under": (6, -15, "left")}
"""Of labels: points to the right, points up, and the side that is there."""


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
        middle, spent = [statistics.median(each) for each in values], [each[0]["flops"] for each in seeds]
        for at, each in zip(spent, values, strict=True):
            axes.plot([at] * 2, [each[0], each[-1]], color=colour, lw=2.4, solid_capstyle="round")
        axes.plot(spent, middle, mark + "-", color=colour, lw=1.4, ms=7)
        place = {"xytext": (-7, height), "textcoords": "offset points", "ha": "right", "color": colour}
        axes.annotate(label, (spent[-1], middle[-1]), **place)
    for label, colour, height, name in OTHERS:
        mark, model = ("s", "monolith") if colour == SINGLE else ("o", "top-1")
        seeds = known["points"][name][model].values()
        at = next(iter(seeds))["flops"]
        value = statistics.median(point["test"][JUDGE] for point in seeds)
        axes.plot([at], [value], mark, color=colour, mfc="white", ms=6)
        place = {"textcoords": "offset points", "color": colour, "ha": "right" if height is None else "left"}
        offset = (-8, -3) if height is None else (8, height)
        axes.annotate(label, (at, value), fontsize=8, xytext=offset, **place)
    axes.axhline(known["floor"][JUDGE], color=QUIET, lw=1.2, ls=":")
    axes.text(5.6e14, known["floor"][JUDGE] + 9, "real training images", ha="right", color=QUIET)
    axes.set(xscale="log", xlim=(3.4e13, 9.5e14), ylim=(0, 640))
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("Fréchet distance (emoji)")
    axes.set_xticks([1e14, 2e14, 5e14], ["1e14", "2e14", "5e14"])


def ratios(axes: Any) -> None:
    """Over epochs."""
    axes.axhline(1, color=SINGLE, lw=1.2, ls="--")
    axes.text(2_400, 1.03, "one network", ha="right", color=SINGLE)
    small = json.loads((RESULTS / "isolation.json").read_text())["facts"].values()
    axes.plot([each["epochs"] for each in small], [each["ratio"] for each in small], "o", color=QUIET, ms=4)
    axes.text(8, 1.62, f"{len(small)} small campaigns", color=QUIET)
    for epochs, label, side, file, case, metric in RATIOS:
        (found,) = [row for row in rows(file) if (row["case"], row.get("metric")) == (case, metric)]
        ratio = found.get("value") or found["over the monolith's"]
        spread = found.get("spread")
        if spread:
            axes.plot([epochs] * 2, spread, color=ISLANDS, lw=2.4, solid_capstyle="round")
        inside = "white" if file == "paper.json" else ISLANDS
        axes.plot([epochs], [ratio], "o", color=ISLANDS, ms=8, mfc=inside)
        *offset, end = PLACES[side]
        place = {"textcoords": "offset points", "xytext": offset, "va": "center", "ha": end}
        axes.annotate(f"{ratio:.2f}  {label}", (epochs, ratio), **place)
    axes.set(xscale="log", xlim=(0.1, 3_000), ylim=(0.4, 1.85))
    axes.set_xlabel("epochs")
    axes.set_ylabel("ratio to one network")
    axes.set_xticks([0.1, 1, 10, 100, 1_000], ["0.1", "1", "10", "100", "1,000"])


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
