"""README's picture from a finished quickstart: a real picture, the monolith and the ensemble, per prompt.

python docs/quickstart_picture.py campaigns/quickstart docs/quickstart.png
"""

import sys
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.image import imread

from atoll.store.store import Store


def main(folder: str, target: Path) -> None:
    """Draw the picture of a finished campaign."""
    store = Store.open(folder)
    found = store.get_json("reports/compare.json")
    prompts, default = found["prompts"][:10], found["default"]
    rows = {"data": "real", "monolith": "monolith", default: f"ensemble\n({default})"}
    figure = Figure(figsize=(1.05 * len(prompts), 4.1), dpi=100)
    axes = figure.subplots(len(rows), len(prompts))
    for line, (name, label) in zip(axes, rows.items(), strict=True):
        for number, cell in enumerate(line):
            cell.imshow(
                imread(store.path(f"reports/compare/{name}/{number:02d}.png")), cmap="gray", vmin=0, vmax=1
            )
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_color("#cccccc")
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=10)
    for cell, prompt in zip(axes[-1], prompts, strict=True):
        cell.set_xlabel(fill(prompt, 15), fontsize=7)
    figure.subplots_adjust(left=0.1, right=0.995, top=0.99, bottom=0.13, wspace=0.08, hspace=0.06)
    figure.savefig(target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
