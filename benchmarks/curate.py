"""Curation: whether concepts, scores, filters, duplicates and the long tail are what they are said to be.

    python benchmarks/curate.py concepts [--published FOLDER] [--icons PACKAGE]
    python benchmarks/curate.py aesthetics --photographs FOLDER [--seeds 0 1 2]
    python benchmarks/curate.py filter --source emoji64 --to FOLDER [--samples 100000]
    python benchmarks/curate.py dedupe --photographs FOLDER --emoji emoji64 --icons icons64 [--sheet PNG]
    python benchmarks/curate.py tail --to headline

Each has `--quick` and `--json PATH`, and writes a result of its own name. Photographs are those of two
wheels, unzipped below FOLDER: `pip download --no-deps scikit-image==0.26.0 scikit-learn==1.9.1`.

`concepts`: how quickly captions of the embedded glyphs are searched, and names of icons, if the unpacked npm
package @iconify/json is given. With FOLDER also the published figures of frequency and performance: it holds
`counts.parquet`, `accuracy.parquet`, `let_it_wag.json` and `misalignment.json`, re-tabled from the authors'
repository (bethgelab/frequency_determines_performance at 11ef009, MIT).

`aesthetics`: crops of 15 photographs are blurred, made noisy, tinted and so on; a leaf's score is 1 less its
strength, every other dimension the mean of its parts. Strengths are half a picture's own and half each
fault's own (`related`), as bad photographs are bad in many ways, or every fault's own alone (`independent`),
where faults hide each other. Three photographs are only tested on, others with every seed.

`filter`: half of the training pictures get such faults. A scorer learns from 400 training rows and scores
all, and `atoll data filter --keep "score >= q0.5"` draws the better half: of all rows, since spoiled pictures
have clusters of their own. A single network and islands train on all rows and on those that are kept, and are
measured as in `examples/emoji/experiment.py`, on clean test pictures.

`dedupe`: every original stands in one data set with its plants: the same picture encoded, resized, brightened
or cropped. `found` is the share of plants of a kind for which and the original one row is kept; `lost` are
originals that another original stands for. Emoji are drawn in series, so a bound that finds every encoding
loses some of them: `--emoji` counts rows that are left out for nearly the same pixels under several bounds,
and held-out pictures that are in training before and after. `--sheet` draws 200 pairs of icons, the nearest
to the bounds, to be judged by eye; `--wrong N` writes down how many show two things.

`tail`: rare and common concepts by single network and ensemble, as they are and drawn by weight (a concept
in more than 20 rows counts for 20, MetaCLIP's rule), at the same FLOPs, prompts and noise. Its campaigns are

    python examples/emoji/experiment.py train --source emoji64 --to headline --seeds 3 --only \\
        "batch 8, rate 0.002, 400,000" "share nothing, 400,000" "drawn by weight"
"""

import argparse
import io
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from harness import ROOT, Row, case, finish, median_row, parsed, row
from PIL import Image, ImageEnhance
from pyarrow import parquet
from scipy import stats

sys.path.append(str(ROOT / "examples/emoji"))  # filter and tail train what the emoji experiment trains

from entries import APART, ENTRIES, EVEN, SPLIT, Entry, names, published, train
from faults import aesthetics, filter, noise, opened
from variants import SMALL

from atoll.base.pictures import grid, png
from atoll.base.text import words_of
from atoll.campaign.folder import Campaign
from atoll.curate.audit import audit_stage, index_stage
from atoll.curate.concepts import Finder, Vocabulary
from atoll.curate.fit import fit
from atoll.curate.tail import KINDS, REAL, RESULTS, TailPrompts, evaluate_stage, tail_stage
from atoll.data.dataset import DataSet
from atoll.data.duplicates import LOOKS, fingerprint_job
from atoll.data.duplicates import dedupe as left_out
from atoll.data.ingest import IngestJob
from atoll.data.settings import DedupeConfig, GlyphOptions, IngestConfig
from atoll.data.sources.glyphs import GlyphSource
from atoll.data.sources.record import Record
from atoll.data.sources.several import open_source
from atoll.store.store import Store


def main() -> None:
    """Do what the case asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = parser.add_subparsers(required=True, metavar="CASE")
    one = case(cases, concepts, "2,000 captions")
    one.add_argument("--published", type=Path, metavar="FOLDER", help="the authors' counts and accuracies")
    one.add_argument("--icons", type=Path, metavar="PACKAGE", help="@iconify/json, unpacked")
    one = case(cases, aesthetics, "tiny, on pictures of noise")
    one.add_argument("--photographs", type=Path, help="folder with the photographs, at any depth")
    one.add_argument("--crops", type=int, default=400, help="of every photograph")
    one.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    one = case(cases, filter, "tiny campaigns, whose distances mean nothing")
    one.add_argument("--source", type=Path, help="folder of parquet files")
    one.add_argument("--to", type=Path, help="folder of the campaigns")
    one.add_argument("--samples", type=int, default=100_000, help="training images of a single network")
    one = case(cases, dedupe, "few pictures of noise")
    one.add_argument("--photographs", type=Path, help="folder with the photographs, at any depth")
    one.add_argument("--emoji", type=Path, help="folder of examples/emoji/prepare.py, or with code points")
    one.add_argument("--icons", type=Path, help="folder of examples/icons/prepare.py")
    one.add_argument("--originals", type=int, default=200, help="of emoji and icons each")
    one.add_argument("--sheet", type=Path, help="PNG of pairs of icons to be judged by eye")
    one.add_argument("--wrong", type=int, help="how many of them show two things")
    one = case(cases, tail, "two tiny campaigns of its own")
    one.add_argument("--to", type=Path, help="folder of the campaigns")
    one.add_argument("--seed", type=int, default=3, help="of the campaigns")
    one.add_argument("--n", type=int, default=60, help="rare concepts")
    one.add_argument("--each", type=int, default=1, help="pictures of a prompt, of four for each concept")
    options = parsed(parser)
    with tempfile.TemporaryDirectory() as scratch:
        options.run(options, Path(scratch))


# Concepts.

FIGURES = [
    ("cc3m", "image", "RN50", 0.9751, 7.110),
    ("cc3m", "image", "ViT-B-16", 0.9723, 6.045),
    ("cc3m", "integrated", "RN50", 0.9659, 9.891),
    ("laion400m", "integrated", "ViT-B-32", 0.9676, 4.477),
]
"""Counts, accuracies, the correlation of bins that the authors print, and the slope of all points."""
LET_IT_WAG = (0.6030, 1.5776, 22.74)
MISALIGNED = {
    "cc3m": 0.16806,
    "cc12m": 0.17256,
    "yfcc15m": 0.36487,
    "laion400m": 0.05312,
    "laion_aesthetics": 0.14341,
}


def concepts(options: argparse.Namespace, scratch: Path) -> None:
    """How quickly captions are searched, and the published figures of frequency and performance."""
    rows = speed("glyphs", glyph_captions(2_000 if options.quick else None))
    if options.icons:
        rows += icons(options.icons)
    if options.published:
        rows += [*figures(options.published), *shares(options.published)]
    finish("concepts", rows, options)


def speed(name: str, captions: list[str]) -> list[Row]:
    """Captions a second."""
    vocabulary = Vocabulary.of_captions(captions, least=2)
    finder, each = Finder(vocabulary), []
    for _ in range(5):
        start = time.process_time()
        for caption in captions:
            finder(caption)
        each.append(len(captions) / (time.process_time() - start))
    name = f"{len(captions):,} {name}, {len(vocabulary):,} concepts"
    return [median_row(name, "captions a second", each, "/s", target=(">=", 100_000))]


def glyph_captions(limit: int | None) -> list[str]:
    """Captions of the embedded glyphs."""
    source = GlyphSource(GlyphOptions(limit=limit) if limit else None)
    return [record.caption for record in source.records(0, len(source)) if isinstance(record, Record)]


def icons(package: Path) -> list[Row]:
    """Names of all icons: how many words, how quickly they are searched, and whether anything is missed."""
    captions = []
    for path in sorted((package / "json").glob("*.json")):
        of = json.loads(path.read_bytes())["icons"]
        captions += [name.replace("-", " ") for name, icon in of.items() if not icon.get("hidden")]
    words = Counter(word for caption in captions for word in words_of(caption))
    once, name = sum(count == 1 for count in words.values()), f"{len(captions):,} icons"
    vocabulary = Vocabulary.of_captions(captions, least=2)

    def searched(caption: str) -> list[int]:
        """Concepts of a caption, by looking for every form of each."""
        text = f" {' '.join(words_of(caption))} "
        every = enumerate(vocabulary.units)
        return [n for n, units in every if all(any(f" {form} " in text for form in unit) for unit in units)]

    finder, some = Finder(vocabulary), np.random.default_rng(0).choice(captions, 1000).tolist()
    wrong = sum(finder(caption) != searched(caption) for caption in some)
    return [
        row(name, "words", len(words)),
        row(name, "words that stand there once", once),
        row(name, "of 1,000 unlike a search word by word", wrong, target=("<=", 0)),
        *speed("icons", captions),
    ]


def figures(folder: Path) -> list[Row]:
    """The published correlations and slopes, and what the paper does not give: intervals."""
    counted, accuracies = (
        parquet.read_table(folder / f"{name}.parquet").to_pylist() for name in ("counts", "accuracy")
    )

    def chosen(table: list[dict[str, Any]], key: str, **where: str) -> dict[tuple[str, str], float]:
        """Values by what both tables are joined, less the one data set that the authors leave out."""
        values = {}
        for one in table:
            if one["downstream"] != "imagenet-r" and all(one[name] == value for name, value in where.items()):
                concept = one["concept"].lower().replace("_", " ")
                plane = one["downstream"] == "cifar10" and concept == "plane"
                values[one["downstream"], "airplane" if plane else concept] = one[key]
        return values

    rows = []
    for pretraining, search, backbone, binned, rise in FIGURES:
        counts = chosen(counted, "count", pretraining=pretraining, search=search)
        results = chosen(accuracies, "accuracy", pretraining=pretraining, backbone=backbone)
        both = np.array([(counts[key], accuracy) for key, accuracy in results.items() if key in counts])
        found, name = fit(both[:, 0], both[:, 1]), f"{pretraining}, {search}, {backbone}"
        rows += [
            row(name, "correlation of 12 bins", found.binned),
            row(name, "off the published one", abs(found.binned - binned), target=("<=", 5e-4)),
            row(name, "points for ten times the examples", found.slope.value, spread=found.slope[1:]),
            row(name, "off the published slope", abs(found.slope.value - rise), target=("<=", 0.01)),
            row(name, "correlation of all concepts", found.pearson.value, spread=found.pearson[1:]),
            row(name, "of the ranks", found.spearman.value, spread=found.spearman[1:]),
        ]
    return rows


def shares(folder: Path) -> list[Row]:
    """Let It Wag!, and shares of misaligned rows, from the authors' counts."""
    models = json.loads((folder / "let_it_wag.json").read_text())["models"]
    common, rare = (np.array([model[key] for model in models]) for key in ("imagenet", "let_it_wag"))
    few = common < 50
    slopes = [stats.linregress(common[part], rare[part]).slope for part in (few, ~few)]
    found = [*slopes, float((common - rare).mean())]
    metrics = ("slope under 50 %", "slope from 50 % on", "mean drop, points")
    rows = [
        row("Let It Wag!", f"{metric}, off the published", float(abs(a - b)), target=("<=", 0.005))
        for metric, a, b in zip(metrics, found, LET_IT_WAG, strict=True)
    ]
    counts = json.loads((folder / "misalignment.json").read_text())
    for set_, share in MISALIGNED.items():
        of = counts[set_]["misaligned"] / counts[set_]["size"]
        rows.append(row(set_, "misaligned, off the published", abs(of - share), target=("<=", 5e-6)))
    return rows


# Duplicates.

Pictures = list[Image.Image]
Change = Callable[[Image.Image], Image.Image]


def _encoded(kind: str, quality: int) -> Change:
    def again(image: Image.Image) -> Image.Image:
        image.save(data := io.BytesIO(), kind, quality=quality)
        return Image.open(data).convert("RGB")

    return again


def _resized(share: float) -> Change:
    return lambda image: image.resize([round(side * share) for side in image.size], Image.Resampling.LANCZOS)


def _cropped(share: float) -> Change:
    def inner(image: Image.Image) -> Image.Image:
        edge = max(1, round(image.width * share))
        return image.crop((edge, edge, image.width - edge, image.height - edge))

    return inner


PLANTS: dict[str, Change] = {
    **{f"JPEG {quality}": _encoded("JPEG", quality) for quality in (90, 60, 30)},
    "WebP 60": _encoded("WEBP", 60),
    "64 colours": lambda image: image.quantize(64).convert("RGB"),
    "half the size": _resized(0.5),
    "0.75 of the size": _resized(0.75),
    "1.5 of the size": _resized(1.5),
    "3 % brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.03),
    **{f"{percent} % cut off each edge": _cropped(percent / 100) for percent in (1, 5)},
}
BOUNDS = {
    "as by default": DedupeConfig(),
    "8 x 8 alone, 0.05": DedupeConfig(detail=1),
    "8 x 8 alone, 0.02": DedupeConfig(difference=0.02, detail=1),
}
NAMED = {"group": "group", "caption": "caption", "id": "id"}
"""Columns of the examples' parquet files."""
TONES = {"1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"}


def dedupe(options: argparse.Namespace, scratch: Path) -> None:
    """What is found of planted encodings, sizes and crops, what of series is lost, and what leaks."""
    kinds = {"noise": (list(noise().values()), 32)} if options.quick else {}
    if options.photographs:
        side, whole = 170, opened(options.photographs).values()
        corners = [
            (one, x, y)
            for one in whole
            for y in range(0, one.height - side + 1, side)
            for x in range(0, one.width - side + 1, side)
        ]
        kinds["photographs"] = ([one.crop((x, y, x + side, y + side)) for one, x, y in corners], 256)
    for name, folder in (("emoji", options.emoji), ("icons", options.icons)):
        if folder:
            kinds[name] = (sample(folder, options.originals), 32)
    if not kinds:
        options.error("give some of --photographs, --emoji and --icons, or --quick")
    rows = [line for name, kind in kinds.items() for line in planted(name, *kind, scratch)]
    if options.emoji:
        rows += series(options.emoji, scratch / "series")
    if options.icons and options.sheet:
        rows += sheet(options.icons, scratch / "sheet", options.sheet, options.wrong)
    finish("dedupe", rows, options)


def sample(folder: Path, count: int) -> Pictures:
    """Pictures of a folder of parquet files, drawn by a seed, no two with the same pixels."""
    tables = [parquet.read_table(file, columns=["image"]) for file in sorted(folder.glob("*.parquet"))]
    column = pa.chunked_array([chunk for table in tables for chunk in table["image"].chunks])
    chosen = np.random.default_rng(0).choice(len(column), min(count, len(column)), replace=False)
    pictures = [Image.open(io.BytesIO(column[int(n)]["bytes"].as_py())).convert("RGB") for n in chosen]
    return list({one.tobytes(): one for one in pictures}.values())


def _ingested(source: Path, to: Path, **config: Any) -> DataSet:
    settings = IngestConfig(mode="rgb", **config)
    return IngestJob(open_source(str(source), settings), Store.open(to, create=True), "", settings).run()


def planted(kind: str, originals: Pictures, size: int, folder: Path) -> list[Row]:
    """Shares of plants that are found, under the default bounds and the earlier ones."""
    changes: list[Change] = [lambda image: image, *PLANTS.values()]
    content = [{"bytes": png(how(one)), "path": None} for one in originals for how in changes]
    source = folder / f"{kind}-source"
    source.mkdir(parents=True)
    texts = [f"row {number}" for number in range(len(content))]
    parquet.write_table(pa.table({"image": content, "text": texts}), source / "0.parquet")
    dataset, rows = _ingested(source, folder / kind, size=size, heldout=0), []
    for name, bounds in BOUNDS.items():
        of = left_out(dataset, bounds, "none").kept_row.reshape(len(originals), len(changes))
        for number, plant in enumerate(PLANTS, 1):
            found, hard = float((of[:, number] == of[:, 0]).mean()), "cut" in plant or "64" in plant
            asked = name == "as by default" and kind == "photographs" and not hard
            target = (">=", 0.95) if asked else None
            rows.append(row(f"{kind}, {name}", f"found: {plant}", round(found, 4), target=target))
        apart = (of[:, :1] // len(changes) != np.arange(len(originals))[:, None]).mean()
        rows.append(row(f"{kind}, {name}", "lost originals", round(float(apart), 4)))
    return rows


def series(source: Path, to: Path) -> list[Row]:
    """Emoji left out under several bounds, and held-out ones that are in training."""
    to.mkdir(parents=True)
    for file in sorted(source.glob("*.parquet")):
        table = parquet.read_table(file)
        if "group" not in table.column_names:  # by code points without skin tones, as prepare.py groups rows
            points = [codes.split("-") for codes in table["codepoints"].to_pylist()]
            bare = ["-".join(one for one in codes if one.lower() not in TONES) for codes in points]
            table = table.append_column("group", pa.array(bare))
        parquet.write_table(table, to / file.name)
    dataset = _ingested(to, to / "data", size=32, heldout=0.1, **NAMED)

    def leaked() -> int:
        """Held-out rows whose looks, to the last bit of their thumbnails, a training row has."""
        fingerprint_job(dataset).run()
        seen = dataset.column(LOOKS)
        train, heldout = (seen.read(dataset.split(name)).numpy() for name in ("train", "heldout"))
        known = {one.tobytes() for one in train}
        return sum(one.tobytes() in known for one in heldout)

    rows = [row("emoji", "held out", len(dataset.split("heldout")))]
    rows.append(row("emoji", "held out and in training, before", leaked()))
    for name, bounds in BOUNDS.items():
        counts = left_out(dataset, bounds, "none").counts
        rows.append(row(f"emoji, {name}", "left out: same file", counts["same file"]))
        rows.append(row(f"emoji, {name}", "left out: pixels", counts["nearly the same pixels"]))
        rows.append(row(f"emoji, {name}", "held out and in training, after", leaked(), target=("<=", 0)))
    return rows


def sheet(source: Path, to: Path, path: Path, wrong: int | None, count: int = 200) -> list[Row]:
    """Draw pairs that are nearly the same, those nearest to the bounds, and say what was judged of them."""
    dataset = _ingested(source, to, size=32, heldout=0.1, **NAMED)
    found = left_out(dataset, DedupeConfig(), "none")
    rows = [row("icons", name, value) for name, value in found.counts.items()]
    near = np.flatnonzero(found.reason == 2)
    chosen = near[np.argsort(-found.distances[near], kind="stable")][:count].tolist()
    pictures = [dataset.image(one) for n in chosen for one in (n, int(found.kept_row[n]))]
    labels = [text for n in chosen for text in (f"{found.distances[n]:.2f}", "")]
    path.write_bytes(png(grid(pictures, 20, 4, labels=labels, scale=2)))
    if wrong is not None:
        right = 1 - wrong / count
        rows.append(row("icons, nearest to the bounds", "right by eye", right, target=(">=", 0.9)))
    return rows


# The long tail.

WEIGHTED = ", drawn by weight"
MODELS = {
    "single": ("single, batch 8, rate 0.002, 400,000 images", "monolith"),
    "islands": (f"{APART}, 400,000 images", "ensemble:top-1"),
    "islands, full": (f"{APART}, 400,000 images", "ensemble:full"),
    f"single{WEIGHTED}": (f"single{WEIGHTED}, batch 8, rate 0.002, 400,000 images", "monolith"),
    f"islands{WEIGHTED}": (f"{APART}{WEIGHTED}, 400,000 images", "ensemble:top-1"),
}
"""Entry of the emoji experiment, and the model of it."""
STYLES = ("{}, openmoji style", "{}, google style", "{}, twitter style", "{}, fluent3d style")
TINY_TEXT = (*SMALL, "monolith=false", "data.text_length=8")


def tail(options: argparse.Namespace, scratch: Path) -> None:
    """Rare and common concepts by single network and ensemble, as they are and drawn by weight."""
    if options.quick:
        models, options.n = {}, 2
        how, templates = {"steps": 2}, ("{}",)
        for name, more in (("islands", ()), (f"islands{WEIGHTED}", EVEN)):
            entry = Entry(name, (*TINY_TEXT, *more), rebalanced=bool(more))
            data = ("data.ingest.glyphs.limit=300", f"data.path={scratch / 'data'}")
            folder = entry.folder(scratch, 0)
            train(entry, folder, 0, "quickstart", (*SPLIT, *data), alone=False)
            models[name] = (folder, "ensemble:top-1")
    elif options.to:
        how, templates = {"steps": 20, "guidance": 2.0}, STYLES
        folders = {entry.name: entry.folder(options.to, options.seed) for entry in ENTRIES}
        models = {name: (folders[of], model) for name, (of, model) in MODELS.items()}
        models = {name: one for name, one in models.items() if published(one[0], one[1] == "monolith")}
    else:
        options.error("give --to FOLDER or --quick")
    found = judged(models, options.n, options.each, how, templates)

    # Means with intervals over concepts, slopes over frequency, and differences of paired concepts.
    rows = []
    for name, of in found.items():
        for value in ("hit", "rank"):
            for kind in KINDS:
                rows.append(_mean_row(f"{name}: {kind}", value, [r[value] for r in of if r["kind"] == kind]))
        for count in ("rows", "best_expert", "routed"):
            x, ranks = ([r[value] for r in of] for value in (count, "rank"))
            if len(of) > 3 and None not in x and len(set(ranks)) > 1:
                slope, told = fit(x, ranks).slope, f"{name}: rank over {count.replace('_', ' ')}"
                rows.append(row(told, "for ten times", slope.value, spread=slope[1:]))
    for name in (name for name in found if name.endswith(WEIGHTED)):
        plain = found.get(name.removesuffix(WEIGHTED), [])
        for kind in KINDS if plain else ():
            before = {r["concept"]: r["rank"] for r in plain if r["kind"] == kind}
            gains = [r["rank"] - before[r["concept"]] for r in found[name] if r["kind"] == kind]
            rows.append(_mean_row(f"{name}: {kind}", "rank gained", gains))
    finish("tail", rows, options, {"concepts": found})


def judged(
    models: Mapping[str, tuple[Path, str]], n: int, each: int, how: dict[str, Any], templates: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Rows of `tail.csv` by model; prompts are those of the first campaign's counts."""
    prompts, found = None, {}
    for name, (folder, model) in models.items():
        campaign = Campaign.open(folder)
        index_stage(campaign, names(campaign, folder), 1, "phrase")
        audit_stage(campaign, 0.7)
        if prompts is None:
            prompts = tail_stage(campaign, n, least=3, templates=templates)
        campaign.store.put_json(TailPrompts.PLACE, prompts.to_json())
        compare = campaign.config.compare
        space = (compare.extractor, compare.extractor_size)
        rows = [one.model_dump() for one in evaluate_stage(campaign, [model], space, each, generation=how)]
        (folder / RESULTS).rename(folder / RESULTS.replace(".csv", f"-{model.replace(':', '-')}.csv"))
        found.setdefault(REAL, [one for one in rows if one["model"] == REAL])
        found[name] = [one for one in rows if one["model"] != REAL]
    return found


def _mean_row(name: str, metric: str, values: Sequence[float]) -> Row:
    """The mean, with 95 % of a bootstrap over concepts."""
    draws = np.random.default_rng(0).choice(np.array(values), (1000, len(values))).mean(1)
    return row(name, metric, float(np.mean(values)), spread=np.percentile(draws, [2.5, 97.5]).tolist())


if __name__ == "__main__":
    main()
