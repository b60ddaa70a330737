"""Faults put into pictures on purpose: whether a scorer sees them, and what a filter by its scores buys.

No person scored anything here: what is shown is that the heads learn what can be seen, of pictures that they
have not seen, and that models gain by leaving out what scores badly.
"""

import argparse
import io
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from entries import ALONE, APART, SPLIT, Entry, islands, single, train
from experiment import Protocol
from harness import TINY, finish, flags, median_row, paired, ratios, row, run_command
from PIL import Image, ImageEnhance, ImageFilter
from pyarrow import parquet
from variants import SMALL

from atoll.campaign.folder import Campaign
from atoll.curate.aesthetics.scale import HEADS, Labels, Scale, read_labels
from atoll.curate.aesthetics.scorer import Scorer, Training
from atoll.curate.aesthetics.stages import evaluate_stage

PHOTOGRAPHS = (
    "astronaut brick camera chelsea coffee coins grass gravel hubble_deep_field ihc moon motorcycle_left "
    "rocket china flower"
)
TREE = {
    **dict.fromkeys(("Sharpness", "Quiet", "Resolution", "Compression"), "Detail"),
    **dict.fromkeys(("Brightness", "Contrast", "Colour"), "Light"),
    "Detail": "Whole",
    "Light": "Whole",
    "Whole": None,
}
SCALE = Scale.parse({"dimensions": [{"name": n, "parent": p} for n, p in TREE.items()]}, "the benchmark")
LEAVES = [name for number, name in enumerate(SCALE.names) if not SCALE.parts[number]]
CASES = {"related": 0.5, "independent": 0.0}
"""How much of a fault's strength is the picture's."""
LABELS, SEED = 400, 3
BACKBONE, FILTER_BACKBONE = "efficientnet-lite2@128", "efficientnet-lite0@64"
"""The filter's is not the network whose features judge."""


def opened(folder: Path) -> dict[str, Image.Image]:
    """The photographs by name, at most 512 px wide and high."""
    names = PHOTOGRAPHS.split()
    paths = {path.stem: path for path in sorted(folder.rglob("*")) if path.stem in names}
    if missing := set(names) - paths.keys():
        raise SystemExit(f"{folder} lacks {', '.join(sorted(missing))}")
    pictures = {name: Image.open(path).convert("RGB") for name, path in paths.items()}
    for picture in pictures.values():
        picture.thumbnail((512, 512))
    return pictures


def noise() -> dict[str, Image.Image]:
    """Six pictures of random blocks."""
    random = np.random.default_rng(0)
    blocks = (random.integers(0, 256, (12, 12, 3), dtype=np.uint8) for _ in range(6))
    return {str(number): Image.fromarray(block).resize((200, 200)) for number, block in enumerate(blocks)}


def degraded(picture: Image.Image, strengths: dict[str, float], random: np.random.Generator) -> Image.Image:
    """A picture with every fault in the strength given."""
    side = picture.width
    cast = np.array([1 + 0.6 * strengths["Colour"], 1.0, 1 - 0.6 * strengths["Colour"]])
    picture = Image.fromarray((np.asarray(picture) * cast).clip(0, 255).astype(np.uint8))
    picture = ImageEnhance.Contrast(picture).enhance(1 - 0.8 * strengths["Contrast"])
    picture = ImageEnhance.Brightness(picture).enhance(1 - 0.75 * strengths["Brightness"])
    picture = picture.filter(ImageFilter.GaussianBlur(3 * strengths["Sharpness"]))
    small = round(side / (1 + 4 * strengths["Resolution"]))
    picture = picture.resize((small, small)).resize((side, side), Image.Resampling.NEAREST)
    pixels = np.asarray(picture, dtype=np.float32)
    pixels = pixels + random.normal(0, 40 * strengths["Quiet"], pixels.shape)
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if strengths["Compression"] > 0:
        kept = io.BytesIO()
        picture.save(kept, "JPEG", quality=round(60 - 57 * strengths["Compression"]))
        picture = Image.open(kept).convert("RGB")
    return picture


def aesthetics(options: argparse.Namespace, scratch: Path) -> None:
    """The scorer on real photographs with controlled faults, and how fast it scores."""
    if not options.quick and not options.photographs:
        options.error("give --photographs FOLDER, or --quick")
    photographs = noise() if options.quick else opened(options.photographs)
    seeds, crops = ([0], 12) if options.quick else (options.seeds, options.crops)
    training = Training(epochs=2) if options.quick else Training()
    rows, notes = [], {}
    for case, shared in CASES.items():
        found: list[dict[str, dict[str, float]]] = []
        for seed in seeds:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                seen, unseen = written(photographs, crops, seed, Path(folder), shared)
                torch.manual_seed(seed)
                scorer = Scorer(SCALE, BACKBONE)
                trained = scorer.fit(seen, replace(training, seed=seed))
                found.append(evaluate_stage(scorer, unseen, trained))
                pictures = [unseen.open(n) for n in range(min(256, len(unseen)))]
                backbone = scorer.reader.encoder.encode
                speeds = ratios(*paired([partial(backbone, pictures), partial(scorer.scores, pictures)], 5))
        for name in found[0]:
            for value in ("SRCC", "PLCC", "KRCC", "MSE", "MAE", "accuracy"):
                asked = (case, name, value) == ("related", "Whole", "SRCC")
                values = [each[name][value] for each in found]
                target = (">=", 0.8) if asked else None
                rows.append(median_row(f"{case}: {name}", value, values, target=target))
        best = [max(each[n]["SRCC"] for n in (*HEADS[:2], "Whole")) for each in found]
        gaps = [each["MetaVoter"]["SRCC"] - b for each, b in zip(found, best, strict=True)]
        rows.append(median_row(f"{case}: MetaVoter less the best", "SRCC", gaps, target=(">=", -0.01)))
        notes[case] = found
    rows.append(median_row("scoring", "backbone's throughput", speeds, target=(">=", 0.9)))
    finish("aesthetics", rows, options, {"seeds": notes})


def written(
    photographs: dict[str, Image.Image], crops: int, seed: int, folder: Path, shared: float, side: int = 128
) -> tuple[Labels, Labels]:
    """Labels to train on, and those of three photographs that are not among them."""
    random = np.random.default_rng(seed)
    unseen = set(random.permutation(sorted(photographs))[:3].tolist())
    tables: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for name, picture in photographs.items():
        for number in range(crops):
            left, top = (int(random.integers(0, edge - side + 1)) for edge in picture.size)
            common = random.uniform()
            strengths = {leaf: float(shared * common + (1 - shared) * random.uniform()) for leaf in LEAVES}
            scores = {leaf: 1 - strength for leaf, strength in strengths.items()}
            for node in SCALE.upwards:
                if parts := SCALE.parts[node]:
                    scores[SCALE.names[node]] = float(np.mean([scores[SCALE.names[part]] for part in parts]))
            crop = picture.crop((left, top, left + side, top + side))
            degraded(crop, strengths, random).save(folder / f"{name}-{number}.png")
            # Half of the rows have the score of the whole alone, as people rarely score every dimension.
            told = name in unseen or random.uniform() < 0.5
            whole = [None if n != SCALE.root and not told else scores[d] for n, d in enumerate(SCALE.names)]
            tables[name in unseen].append({"image": f"{name}-{number}.png", "scores": whole, "group": name})
    labels = []
    for kind, table in tables.items():
        parquet.write_table(pa.Table.from_pylist(table), folder / f"{kind}.parquet")
        labels.append(read_labels(folder / f"{kind}.parquet", SCALE))
    return labels[0], labels[1]


def filter(options: argparse.Namespace, scratch: Path) -> None:
    """What a filter buys: half of the pictures spoiled, models of all rows and of the better half."""
    if not options.quick and not (options.source and options.to):
        options.error("give --source FOLDER --to FOLDER, or --quick")
    to, alone = (scratch, False) if options.quick else (options.to, True)
    pair = [single(8, 0.002, options.samples), islands(APART, options.samples, *ALONE)]
    recipe, common, protocol = "emoji", SPLIT, Protocol((1.5, 2.0, 3.0))
    if options.quick:
        pair = [Entry("single", SMALL, single=True), Entry("islands", (*SMALL, "monolith=false"))]
        recipe, common = "quickstart", (*SPLIT, *(one for one in TINY if one.startswith("data.")))
        judge = {"Lite2": {"extractor_size": 64, "components": 8}}
        protocol = Protocol((2.0,), 24, 24, 2, judge, 1, routings=("top-1",))
    good = spoil(options.source, to, recipe, common, alone)
    places = (f"data.path={(to / 'data').resolve()}", f"data.source={(to / 'spoiled').resolve()}")
    common = (*(one for one in common if "data.ingest.glyphs" not in one), *places)
    of_all, of_half = (
        [Entry(f"{e.name}, {name}", (*e.sets, *more), single=e.single) for e in pair]
        for name, more in (("all rows", ()), ("the better half", ("data.weighted=true",)))
    )
    for entry in reversed(of_all):  # the islands first, whose clusters the filter looks at
        train(entry, entry.folder(to, SEED), SEED, recipe, common, alone)
    filtered(of_all[1].folder(to, SEED), good, alone)
    for entry in of_half:
        train(entry, entry.folder(to, SEED), SEED, recipe, common, alone)
    rows, judge = [], next(iter(protocol.judges))
    for entries in zip(of_all, of_half, strict=True):
        model = "monolith" if entries[0].single else "top-1"
        values = [protocol.point(e.folder(to, SEED), model)["test"][judge] for e in entries]
        rows += [row(e.name, f"distance by {judge}", v) for e, v in zip(entries, values, strict=True)]
        rows.append(row(entries[1].name, "ratio to all rows", values[1] / values[0], target=("<=", 1)))
    finish("filter", rows, options)


def spoil(
    source: Path | None, to: Path, recipe: str, common: tuple[str, ...], alone: bool
) -> dict[str, float]:
    """Write the source again, to `spoiled` below a folder, with half of its training pictures spoiled.

    Returns how good the picture of each caption is: 1 less the mean strength of its faults.
    """
    clean, spoiled = to / "clean", to / "spoiled"
    if not (clean / "campaign.yaml").exists():
        sets = [*common, *([f"data.source={source.resolve()}"] if source else []), f"seed={SEED}"]
        sets.append(f"data.path={(to / 'data-clean').resolve()}")
        run_command("new", clean, "--recipe", recipe, *flags(sets), alone=alone)
    run_command("data", "ingest", clean, alone=alone)
    dataset, random = Campaign.open(clean).dataset(), np.random.default_rng(SEED)
    training = {*dataset.split("train").tolist()}
    good, rows = dict[str, float](), []
    pictures = (one for shard in range(len(dataset.manifest.shards)) for one in dataset.iter_images(shard))
    texts = dataset.table(["caption", "group"]).to_pylist()
    for number, (text, picture) in enumerate(zip(texts, pictures, strict=True)):
        shared, spoils = random.uniform(), number in training and random.uniform() < 0.5
        faults = {leaf: float(spoils * (shared + random.uniform()) / 2) for leaf in LEAVES}
        image, out = picture.convert("RGB"), io.BytesIO()
        (degraded(image, faults, random) if spoils else image).save(out, "PNG")
        good[text["caption"]] = 1 - float(np.mean([*faults.values()]))
        rows.append({"image": {"bytes": out.getvalue(), "path": ""}, **text})
    spoiled.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), spoiled / "rows.parquet")
    return good


def filtered(campaign: Path, good: dict[str, float], alone: bool) -> None:
    """Train a scorer on some rows, score all, and weigh those that score well."""
    dataset = Campaign.open(campaign).dataset()
    if dataset.has_column("weights"):
        return
    table = dataset.table(["id", "caption"]).to_pylist()
    some = np.random.default_rng(SEED).permutation(dataset.split("train"))[:LABELS]
    labels, scale, scorer = (campaign.parent / name for name in ("labels.parquet", "scale.yaml", "scorer"))
    known = [{"id": table[n]["id"], "score": good[table[n]["caption"]]} for n in some]
    parquet.write_table(pa.Table.from_pylist(known), labels)
    scale.write_text("dimensions: [{name: Whole, parent: null}]\n")
    how = ("--campaign", campaign, "--scale", scale, "--backbone", FILTER_BACKBONE)
    run_command("aesthetics", "train", labels, "--out", scorer, *how, alone=alone)
    run_command("aesthetics", "score", campaign, "--scorer", scorer, alone=alone)
    run_command("data", "filter", campaign, "--keep", "score >= q0.5", alone=alone)
