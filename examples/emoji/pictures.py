"""Test pictures, and what models made of their captions from the same noise, as one PNG.

    python examples/emoji/pictures.py same-noise.png --folder headline --seed 4 [--count 12]
    python examples/emoji/pictures.py same-noise-64.png --campaign campaigns/emoji-64 --guidances 4 4 3 3 \\
        --captions examples/emoji/captions.txt

The first reads the albums that `experiment.py measure` has kept of the campaigns of 160 epochs, each at the
guidance that was best on held-out pictures, and takes the first captions: none is chosen. The second draws
what one campaign makes of held-out captions, the first or those of a file: `captions.txt` has those of the
first picture.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from entries import APART, ENTRIES, LONGEST
from guides import Bench
from judges import GUIDED, candidate_of
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))  # a script finds its own folder only

from campaign_picture import sheet

from atoll.base.errors import AtollError, ConfigError
from atoll.measure.models import Drawn, RowConditions, generation_of

SINGLE = f"single, batch 8, rate 0.002, {LONGEST:,} images"
ROWS = (
    ("one network", SINGLE, "monolith"),
    ("experts, top-1", f"{APART}, {LONGEST:,} images", "top-1"),
    ("experts, once null sample-1", f"{APART}, {LONGEST:,} images", "once-null-sample-1"),
    ("one network, autoguidance", SINGLE, "monolith-null-milestone"),
    ("experts, autoguidance", f"{APART}, {LONGEST:,} images", "once-null-own-milestone"),
)
"""Label, entry and album. Autoguidance is by what a network was after an eighth of its training."""

OWN = (
    ("one network", "monolith", None),
    ("experts, top-1", "ensemble", "top-1"),
    ("one network, autoguidance", GUIDED, "once null pretrain"),
    ("experts, autoguidance", "ensemble", "once null pretrain"),
)
"""Label, model and routing: what a campaign with shared pretraining and a single network draws."""

Rows = dict[str, list[Image.Image]]


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="the PNG")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--folder", type=Path, help="of the campaigns of 160 epochs")
    what.add_argument("--campaign", type=Path, help="the one campaign")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--guidances", type=float, nargs=len(OWN), default=[2.0] * len(OWN), help="by row")
    parser.add_argument("--captions", type=Path, help="a file of captions, one a line, for the campaign")
    parser.add_argument("--count", type=int, default=12)
    options = parser.parse_args()
    try:
        rows, captions = (of_campaign if options.campaign else of_longest)(options)
    except (AtollError, OSError) as error:
        parser.error(str(error))
    # Two to three screen pixels for each of the picture's.
    sheet(rows, captions, options.target, 100 if options.folder else 180)


def of_longest(options: argparse.Namespace) -> tuple[Rows, list[str]]:
    """Of the campaigns of 160 epochs."""
    folders = {entry.name: entry.folder(options.folder, options.seed) for entry in ENTRIES}
    conditions = Bench(folders[SINGLE], "monolith", options.count, "test").conditions
    rows = _real(conditions)
    for label, entry, album in ROWS:
        place = folders[entry] / "reports" / "album" / album / "0"
        rows[label] = [Image.open(place / f"{number:05}.png") for number in range(options.count)]
    return rows, conditions.captions()


def of_campaign(options: argparse.Namespace) -> tuple[Rows, list[str]]:
    """Of one campaign, drawn here."""
    bench = Bench(options.campaign, "monolith", options.count, "heldout")
    campaign, conditions = bench.campaign, bench.conditions
    if options.captions:
        samples, wanted = conditions.samples, options.captions.read_text().splitlines()
        known = samples.dataset.take(samples.rows).column("caption").to_pylist()
        if not wanted or (strange := {*wanted} - {*known}):
            what = f"no held-out image has the caption {min(strange)!r}" if wanted else "there is no caption"
            raise ConfigError(f"{options.captions}: {what}", "give captions of held-out images, one a line")
        rows = np.array([known.index(caption) for caption in wanted])
        clusters = campaign.clustered()[1].clusters[samples.rows[rows]]
        conditions = replace(conditions, index=rows, clusters=clusters)
    drawn = _real(conditions)
    for (label, model, routing), guidance in zip(OWN, options.guidances, strict=True):
        how = {"routing": routing} if routing else {}
        generation = generation_of(campaign).with_(steps=20, guidance=guidance, seed=0, **how)
        source = Drawn(candidate_of(campaign, model), generation, conditions)
        every = range(len(conditions))
        batches = source.batches(every, 250)  # of one expert each
        made = {n: p for batch in batches for n, p in zip(batch.numbers, batch.pictures, strict=True)}
        drawn[label] = [made[number] for number in every]
    return drawn, conditions.captions()


def _real(conditions: RowConditions) -> Rows:
    images = [conditions.samples.dataset.image(int(n)) for n in conditions.samples.rows[conditions.index]]
    return {f"{conditions.split.replace('heldout', 'held-out')} image": images}


if __name__ == "__main__":
    main()
