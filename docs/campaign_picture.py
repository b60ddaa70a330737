"""A picture of a finished campaign: what its models make of the same prompts and the same noise.

python docs/campaign_picture.py campaigns/quickstart quickstart.png
python docs/campaign_picture.py campaigns/emoji emoji.png monolith student once
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.image import imread

from atoll.store.store import Store


def main(folder: str, target: Path, names: list[str]) -> None:
    """Draw the models of these names as `compare.json` has them; by default real, monolith, ensemble."""
    store = Store.open(folder)
    found = store.get_json("reports/compare.json")
    prompts, default = found["prompts"][:10], found["default"]
    labels = {"data": "real", default: f"ensemble\n({default})"}
    rows = {
        labels.get(name, name): [
            imread(store.path(f"reports/compare/{name}/{number:02d}.png")) for number in range(len(prompts))
        ]
        for name in names or ("data", "monolith", default)
    }
    sheet(rows, prompts, target)


def sheet(rows: Mapping[str, Sequence[Any]], captions: Sequence[str], target: Path, dpi: float = 100) -> None:
    """Write rows of pictures by their label as one picture, with the captions below."""
    below = 0.56
    height = 1.02 * len(rows) + below
    figure = Figure(figsize=(1.05 * len(captions), height), dpi=dpi)
    axes = figure.subplots(len(rows), len(captions), squeeze=False)
    for line, (label, images) in zip(axes, rows.items(), strict=True):
        for cell, image in zip(line, images, strict=True):
            cell.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_color("#cccccc")
        line[0].set_ylabel(fill(label, 14), rotation=0, ha="right", va="center", fontsize=10)
    for cell, caption in zip(axes[-1], captions, strict=True):
        cell.set_xlabel(fill(caption, 15, max_lines=5, placeholder=" …"), fontsize=7)
    edges = {"left": 0.1, "right": 0.995, "top": 0.99, "bottom": below / height}
    figure.subplots_adjust(**edges, wspace=0.08, hspace=0.06)
    figure.savefig(target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
