"""Concepts: how quickly captions are searched, and the published figures of frequency and performance.

    python benchmarks/concepts.py [--quick] [--published FOLDER] [--icons PACKAGE] [--json PATH]

Captions are those of the embedded glyphs, and names of icons, if the unpacked npm package @iconify/json is
given (`examples/icons`); the vocabulary are their nouns. FOLDER holds `counts.parquet`, `accuracy.parquet`,
`let_it_wag.json` and `misalignment.json`, re-tabled from the authors' repository
(bethgelab/frequency_determines_performance at 11ef009, MIT). One thread.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from harness import finish, median_row, row
from scipy import stats

from atoll.curate.fit import fit
from atoll.curate.text_hits import Finder
from atoll.curate.vocabulary import Vocabulary
from atoll.data.glyphs import GlyphSource
from atoll.data.records import Record
from atoll.data.settings import GlyphOptions
from atoll.data.words import words_of

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 captions")
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="the authors' counts and accuracies")
    parser.add_argument("--icons", type=Path, metavar="PACKAGE", help="@iconify/json, unpacked")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = speed("glyphs", glyph_captions(2_000 if options.quick else None))
    if options.icons:
        rows += icons(options.icons)
    if options.published:
        rows += [*figures(options.published), *shares(options.published)]
    finish("concepts", rows, options.json)


def speed(name: str, captions: list[str]) -> list[dict[str, Any]]:
    """Captions a second."""
    vocabulary = Vocabulary.of_captions(captions, least=2)
    finder, each = Finder(vocabulary), []
    for _ in range(5):
        start = time.process_time()
        for caption in captions:
            finder(caption)
        each.append(len(captions) / (time.process_time() - start))
    case = f"{len(captions):,} {name}, {len(vocabulary):,} concepts"
    return [median_row(case, "captions a second", each, "/s", target=(">=", 100_000))]


def icons(package: Path) -> list[dict[str, Any]]:
    """Names of all icons: how many words, how quickly they are searched, and whether anything is missed."""
    captions = []
    for path in sorted((package / "json").glob("*.json")):
        of = json.loads(path.read_bytes())["icons"]
        captions += [name.replace("-", " ") for name, icon in of.items() if not icon.get("hidden")]
    words = Counter(word for caption in captions for word in words_of(caption))
    once, case = sum(count == 1 for count in words.values()), f"{len(captions):,} icons"
    rows = [row(case, "words", len(words)), row(case, "words that stand there once", once)]
    vocabulary = Vocabulary.of_captions(captions, least=2)
    finder, some = Finder(vocabulary), np.random.default_rng(0).choice(captions, 1000).tolist()
    wrong = sum(finder(caption) != searched(caption, vocabulary) for caption in some)
    rows.append(row(case, "of 1,000 unlike a search word by word", wrong, target=("<=", 0)))
    return rows + speed("icons", captions)


def searched(caption: str, vocabulary: Vocabulary) -> list[int]:
    """Concepts of a caption, by looking for every form of each."""
    text = f" {' '.join(words_of(caption))} "
    every = enumerate(vocabulary.units)
    return [n for n, units in every if all(any(f" {form} " in text for form in unit) for unit in units)]


def glyph_captions(limit: int | None) -> list[str]:
    """Captions of the embedded glyphs."""
    source = GlyphSource(GlyphOptions(limit=limit) if limit else None)
    return [one.caption for one in source.records(0, len(source)) if isinstance(one, Record)]


def figures(folder: Path) -> list[dict[str, Any]]:
    """The published correlations and slopes, and what the paper does not give: intervals."""
    rows = []
    tables = {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("counts", "accuracy")}
    for pretraining, search, backbone, binned, rise in FIGURES:
        where = {"pretraining": pretraining, "search": search}
        counts = {name(r): r["count"] for r in chosen(tables["counts"], where)}
        results = chosen(tables["accuracy"], {"pretraining": pretraining, "backbone": backbone})
        both = np.array([(counts[name(r)], r["accuracy"]) for r in results if name(r) in counts])
        found, case = fit(both[:, 0], both[:, 1]), f"{pretraining}, {search}, {backbone}"
        rows += [
            row(case, "correlation of 12 bins", found.binned),
            row(case, "off the published one", abs(found.binned - binned), target=("<=", 5e-4)),
            row(case, "points for ten times the examples", found.slope.value, spread=found.slope[1:]),
            row(case, "off the published slope", abs(found.slope.value - rise), target=("<=", 0.01)),
            row(case, "correlation of all concepts", found.pearson.value, spread=found.pearson[1:]),
            row(case, "of the ranks", found.spearman.value, spread=found.spearman[1:]),
        ]
    return rows


def chosen(rows: list[dict[str, Any]], where: dict[str, str]) -> list[dict[str, Any]]:
    """Rows with these values, less the one data set that the authors leave out."""
    return [
        r for r in rows if r["downstream"] != "imagenet-r" and all(r[key] == v for key, v in where.items())
    ]


def name(row_: dict[str, Any]) -> tuple[str, str]:
    """By what both tables are joined."""
    concept = row_["concept"].lower().replace("_", " ")
    plane = row_["downstream"] == "cifar10" and concept == "plane"
    return row_["downstream"], "airplane" if plane else concept


def shares(folder: Path) -> list[dict[str, Any]]:
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


if __name__ == "__main__":
    main()
