"""Test pictures, and what models made of their captions from the same noise, as one PNG.

    python examples/emoji/pictures.py same-noise.png --folder headline --seed 4 [--count 12]

It reads the albums that `experiment.py measure` has kept of the campaigns of 160 epochs, each at the guidance
that was best on held-out pictures, and takes the first captions: none is chosen.
"""

import argparse
import sys
from pathlib import Path

import torch
from entries import APART, ENTRIES, LONGEST
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))  # a script finds its own folder only

from campaign_picture import sheet

from atoll.campaign.folder import Campaign
from atoll.measure.models import RowConditions, published, samples_of

SINGLE = f"single, batch 8, rate 0.002, {LONGEST:,} images"
ROWS = (
    ("one network", SINGLE, "monolith"),
    ("experts, top-1", f"{APART}, {LONGEST:,} images", "top-1"),
    ("experts, once null sample-1", f"{APART}, {LONGEST:,} images", "once-null-sample-1"),
    ("one network, autoguidance", SINGLE, "monolith-null-milestone"),
    ("experts, autoguidance", f"{APART}, {LONGEST:,} images", "once-null-own-milestone"),
)
"""Label, entry and album. Autoguidance is by what a network was after an eighth of its training."""


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
    rows = {"test image": [samples.dataset.image(int(row)) for row in samples.rows[conditions.index]]}
    for label, entry, album in ROWS:
        place = folders[entry] / "reports" / "album" / album / "0"
        rows[label] = [Image.open(place / f"{number:05}.png") for number in range(options.count)]
    sheet(rows, conditions.captions(), options.target)


if __name__ == "__main__":
    main()
