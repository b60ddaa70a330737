"""The scorer on real photographs with controlled degradations, and how fast it scores.

    pip download --no-deps scikit-image==0.26.0 scikit-learn==1.9.1, and unzip both below FOLDER
    python benchmarks/aesthetics.py --photographs FOLDER [--seeds 0 1 2] [--json PATH]
    python benchmarks/aesthetics.py --quick

Crops of 15 photographs are blurred, made noisy, tinted and so on; a leaf's score is 1 less its strength,
every other dimension the mean of its parts. Strengths are half a picture's own and half each fault's own
(`related`), as bad photographs are bad in many ways, or every fault's own alone (`independent`), where
faults hide each other. Half of the rows have the score of the whole alone. Three photographs are only tested
on, others with every seed. No person scored anything here: what is shown is that the heads learn what can be
seen, of photographs that they have not seen.
"""

import argparse
import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from harness import finish, median_row, row
from PIL import Image, ImageEnhance, ImageFilter
from pyarrow import parquet

from atoll.curate.aesthetics.labels import Labels, read_labels
from atoll.curate.aesthetics.scale import Scale
from atoll.curate.aesthetics.scorer import HEADS, Scorer, Training
from atoll.curate.aesthetics.stages import evaluate_stage

PHOTOGRAPHS = (
    "astronaut brick camera chelsea coffee coins grass gravel hubble_deep_field ihc moon motorcycle_left "
    "rocket china flower"
)
NAMES = PHOTOGRAPHS.split()
TREE = {
    "Sharpness": "Detail",
    "Quiet": "Detail",
    "Resolution": "Detail",
    "Compression": "Detail",
    "Brightness": "Light",
    "Contrast": "Light",
    "Colour": "Light",
    "Detail": "Whole",
    "Light": "Whole",
    "Whole": None,
}
SCALE = Scale.parse({"dimensions": [{"name": n, "parent": p} for n, p in TREE.items()]}, "the benchmark")
BACKBONE = "efficientnet-lite2@128"
CASES = {"related": 0.5, "independent": 0.0}
"""How much of a fault's strength is the picture's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path, help="folder with the photographs, at any depth")
    parser.add_argument("--crops", type=int, default=400, help="of every photograph")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="tiny, on pictures of noise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.quick and not options.photographs:
        parser.error("give --photographs FOLDER, or --quick")
    photographs = noise() if options.quick else opened(options.photographs)
    seeds, crops = ([0], 12) if options.quick else (options.seeds, options.crops)
    training = Training(epochs=2) if options.quick else Training()
    rows, notes = [], {}
    for case, shared in CASES.items():
        found: list[dict[str, dict[str, float]]] = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                train, test = written(photographs, crops, seed, Path(folder), shared)
                torch.manual_seed(seed)
                scorer = Scorer(SCALE, BACKBONE)
                scorer.fit(train, replace(training, seed=seed))
                found.append(evaluate_stage(scorer, test))
                speed = throughput(scorer, [test.open(n) for n in range(min(256, len(test)))])
        for name in found[0]:
            for value in ("SRCC", "PLCC", "KRCC", "MSE", "MAE", "accuracy"):
                asked = (case, name, value) == ("related", "Whole", "SRCC")
                target = {"target": (">=", 0.8)} if asked else {}
                values = [one[name][value] for one in found]
                rows.append(median_row(f"{case}: {name}", value, values, **target))
        best = [max(one[n]["SRCC"] for n in (*HEADS[:2], "Whole")) for one in found]
        gaps = [one["MetaVoter"]["SRCC"] - best for one, best in zip(found, best, strict=True)]
        rows.append(median_row(f"{case}: MetaVoter less the best", "SRCC", gaps, target=(">=", -0.01)))
        notes[case] = found
    rows.append(row("scoring", "backbone's throughput", speed[0], "", speed[1], target=(">=", 0.9)))
    finish("aesthetics", rows, options.json, {"seeds": notes})


def opened(folder: Path) -> dict[str, Image.Image]:
    """The photographs by name, at most 512 px wide and high."""
    found = {path.stem: path for path in sorted(folder.rglob("*")) if path.stem in NAMES}
    if missing := set(NAMES) - found.keys():
        raise SystemExit(f"{folder} lacks {', '.join(sorted(missing))}")
    pictures = {name: Image.open(path).convert("RGB") for name, path in found.items()}
    for picture in pictures.values():
        picture.thumbnail((512, 512))
    return pictures


def noise() -> dict[str, Image.Image]:
    """Six pictures of random blocks."""
    random = np.random.default_rng(0)
    blocks = (random.integers(0, 256, (12, 12, 3), dtype=np.uint8) for _ in range(6))
    return {str(n): Image.fromarray(one).resize((200, 200)) for n, one in enumerate(blocks)}


def degraded(picture: Image.Image, strengths: dict[str, float], random: np.random.Generator) -> Image.Image:
    """A crop with every fault in the strength given."""
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


def written(
    photographs: dict[str, Image.Image],
    crops: int,
    seed: int,
    folder: Path,
    shared: float,
    side: int = 128,
) -> tuple[Labels, Labels]:
    """Labels to train on, and those of three photographs that are not among them."""
    random = np.random.default_rng(seed)
    unseen = set(random.permutation(sorted(photographs))[:3].tolist())
    tables: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for name, picture in photographs.items():
        for number in range(crops):
            left, top = (int(random.integers(0, edge - side + 1)) for edge in picture.size)
            common = random.uniform()
            strengths = {
                leaf: float(shared * common + (1 - shared) * random.uniform())
                for number, leaf in enumerate(SCALE.names)
                if not SCALE.parts[number]
            }
            scores = {leaf: 1 - strength for leaf, strength in strengths.items()}
            for node in SCALE.upwards:
                if parts := SCALE.parts[node]:
                    scores[SCALE.names[node]] = float(np.mean([scores[SCALE.names[part]] for part in parts]))
            crop = picture.crop((left, top, left + side, top + side))
            degraded(crop, strengths, random).save(folder / f"{name}-{number}.png")
            told = name in unseen or random.uniform() < 0.5
            whole = [None if n != SCALE.root and not told else scores[d] for n, d in enumerate(SCALE.names)]
            tables[name in unseen].append({"image": f"{name}-{number}.png", "scores": whole, "group": name})
    found = []
    for kind, table in tables.items():
        parquet.write_table(pa.Table.from_pylist(table), folder / f"{kind}.parquet")
        found.append(read_labels(folder / f"{kind}.parquet", SCALE))
    return found[0], found[1]


def throughput(scorer: Scorer, pictures: list[Image.Image], rounds: int = 5) -> tuple[float, list[float]]:
    """Median and range of the backbone's time over the scorer's, one after the other."""
    backbone = scorer.reader.encoder.encode
    ratios = []
    for _ in range(rounds):
        times = []
        for act in (backbone, scorer.scores):
            start = time.perf_counter()
            act(pictures)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return float(np.median(ratios)), [min(ratios), max(ratios)]


if __name__ == "__main__":
    main()
