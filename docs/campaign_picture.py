"""A picture of a finished campaign: what its models make of the same prompts and the same noise.

python docs/campaign_picture.py campaigns/quickstart quickstart.png
python docs/campaign_picture.py campaigns/emoji emoji.png monolith student once
"""

import sys
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.image import imread

from atoll.store.store import Store


def main(folder: str, target: Path, names: list[str]) -> None:
    """Draw the models of these names as `compare.json` has them; by default real, monolith, ensemble."""
    store = Store.open(folder)
    found = store.get_json("reports/compare.json")
    prompts, default = found["prompts"][:10], found["default"]
    labels = {"data": "real", default: f"ensemble\n({default})"}
    rows = {name: labels.get(name, name) for name in names or ("data", "monolith", default)}
    captions = 0.56
    height = 1.18 * len(rows) + captions
    figure = Figure(figsize=(1.05 * len(prompts), height), dpi=100)
    axes = figure.subplots(len(rows), len(prompts), squeeze=False)
    for line, (name, label) in zip(axes, rows.items(), strict=True):
        for number, cell in enumerate(line):
            image = imread(store.path(f"reports/compare/{name}/{number:02d}.png"))
            cell.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_color("#cccccc")
        line[0].set_ylabel(fill(label, 14), rotation=0, ha="right", va="center", fontsize=10)
    for cell, prompt in zip(axes[-1], prompts, strict=True):
        cell.set_xlabel(fill(prompt, 15, max_lines=5, placeholder=" …"), fontsize=7)
    below = captions / height
    figure.subplots_adjust(left=0.1, right=0.995, top=0.99, bottom=below, wspace=0.08, hspace=0.06)
    figure.savefig(target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
