"""Test pictures, and what models made of their captions from the same noise, as one PNG.

    python examples/emoji/pictures.py same-noise.png --folder headline --seed 4 [--count 12]

It reads the albums that `experiment.py measure` has kept of the campaigns of 160 epochs, each at the guidance
that was best on held-out pictures, and takes the first captions: none is chosen.
"""

import argparse
from pathlib import Path
from textwrap import fill

import torch
from entries import APART, ENTRIES, LONGEST
from matplotlib.figure import Figure
from PIL import Image

from atoll.campaign.folder import Campaign
from atoll.measure.models import RowConditions, published, samples_of

SINGLE = f"single, batch 8, rate 0.002, {LONGEST:,} images"
ROWS = (
    ("one network", SINGLE, "monolith"),
    ("experts, top-1", f"{APART}, {LONGEST:,} images", "top-1"),
    ("experts, once null sample-1", f"{APART}, {LONGEST:,} images", "once-null-sample-1"),
    ("one network, guided by its earlier self", SINGLE, "monolith-null-milestone"),
    ("experts, guided by their earlier selves", f"{APART}, {LONGEST:,} images", "once-null-own-milestone"),
)
"""Label, entry and album."""


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="the PNG")
    parser.add_argument("--folder", type=Path, required=True, help="of the campaigns")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--count", type=int, default=12)
    options = parser.parse_args()
    folders = {entry.name: entry.folder(options.folder, options.seed) for entry in ENTRIES}
    campaign = Campaign.open(folders[SINGLE])
    card = published(campaign, "monolith", torch.device("cpu")).model.card
    samples = samples_of(campaign, campaign.dataset(), "test", card)
    conditions = RowConditions.drawn(campaign, samples, "test", options.count, 0)
    rows = [("test image", [samples.dataset.image(int(row)) for row in samples.rows[conditions.index]])]
    for label, entry, album in ROWS:
        place = folders[entry] / "reports" / "album" / album / "0"
        rows.append((label, [Image.open(place / f"{number:05}.png") for number in range(options.count)]))

    captions = 0.62  # inches below
    height = 0.85 * len(rows) + captions
    figure = Figure(figsize=(0.85 * options.count + 1.3, height), dpi=110)
    axes = figure.subplots(len(rows), options.count, squeeze=False)
    for line, (label, pictures) in zip(axes, rows, strict=True):
        for cell, picture in zip(line, pictures, strict=True):
            cell.imshow(picture, interpolation="nearest")
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_color("#cccccc")
        line[0].set_ylabel(fill(label, 18), rotation=0, ha="right", va="center", fontsize=8)
    for cell, caption in zip(axes[-1], conditions.captions(), strict=True):
        cell.set_xlabel(fill(caption, 15, max_lines=5, placeholder=" …"), fontsize=6)
    figure.subplots_adjust(
        left=0.115, right=0.998, top=0.992, bottom=captions / height, wspace=0.06, hspace=0.06
    )
    figure.savefig(options.target)


if __name__ == "__main__":
    main()
