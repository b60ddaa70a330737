"""The page of a data set: what it holds, with pictures of its rows, of duplicates and of rejects."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.base.errors import AtollError, DataError
from atoll.base.markdown import render
from atoll.base.pictures import png
from atoll.base.rng import generator
from atoll.campaign.folder import Campaign
from atoll.campaign.prepare import PAIRS
from atoll.data.columns import some_rows
from atoll.data.contents import Contents, Histogram
from atoll.data.dataset import WEIGHTS
from atoll.data.decode import BadImageError, decode
from atoll.data.formats import ClusterMap, PartitionFile, Reject
from atoll.data.formats import clean as clean_key
from atoll.data.sources.record import Record
from atoll.data.sources.several import open_sources
from atoll.data.weights import DUPLICATES
from atoll.model.folder import README
from atoll.report.facts import Facts, Picture, clean, pixelated
from atoll.report.page import rendered, write_page

SHOWN, PAIRED, REJECTED = 60, 24, 24
"""Rows, pairs of duplicates, and rejected positions that are shown."""
SIDE = 128
"""Longest side of a picture on the page, in pixels."""
SEARCHED = 50_000
"""Positions of the source in which rejected pictures are looked for."""
BARS = 32


def write_data_page(campaign: Campaign, contents: Contents, path: Path) -> None:
    """Write the page of a campaign's data set; `ConfigError` where the file cannot be written."""
    # The page is looked at because something is wrong: what cannot be read is left out, not fatal.
    dataset, manifest = contents.dataset, contents.dataset.manifest

    def caption(row: int) -> str:
        try:
            return clean(dataset.take([row])["caption"][0].as_py())
        except AtollError:
            return "cannot be read"

    def picture(row: int) -> Picture | None:
        try:
            return _thumbnail(dataset.image(row))
        except AtollError:
            return None

    def drawn(rows: NDArray[np.int64], most: int) -> list[int]:
        return [*map(int, some_rows(rows, most, generator(0, "data page")))]

    rows = [(caption(row), picture(row)) for row in drawn(np.arange(len(dataset)), SHOWN)]
    rows = [(text, shown) for text, shown in rows if shown]
    pairs = []
    if contents.duplicates is not None:
        kept = dataset.column(DUPLICATES).read(np.arange(len(dataset))).numpy()
        again = np.flatnonzero(kept != np.arange(len(kept)))
        for row, other in ((row, int(kept[row])) for row in drawn(again, PAIRED)):
            left, right = picture(row), picture(other)
            if left and right:
                pairs.append((f"{caption(row)} / {caption(other)}", left, right))
    tallies = {
        "Width": contents.widths,
        "Height": contents.heights,
        "Width over height": contents.aspects,
        "Words of a caption": contents.words,
    }
    page = rendered(
        "data.html",
        name=clean("/".join(dataset.store.location.rstrip("/").split("/")[-2:])),
        contents=contents,
        source=clean(manifest.source.get("name", "")),
        total=len(dataset),
        manifest=manifest,
        bytes=[(kind, contents.bytes(kind)) for kind in ("rows", "images")],
        licences=_most(contents.licences),
        sources=_most(contents.sources),
        captions=[(clean(text), count) for text, count in contents.captions if count > 1],
        histograms=[(title, bars(tally), tally) for title, tally in tallies.items() if tally],
        columns=[
            vars(column) | {"form": clean(column.form), "producer": clean(column.producer)}
            for column in contents.columns
        ],
        problems=[clean(problem) for problem in contents.problems],
        rows=rows,
        pairs=pairs,
        doubtful=Facts(campaign.store).picture(PAIRS),
        rejects=_rejects(campaign, contents),
        pixelated=pixelated([shown for _, shown in rows]),
        colours="",
    )
    write_page(path, page, "--page")


def write_data_card(campaign: Campaign, contents: Contents) -> str:
    """Write README.md into the data set, with the metadata that a hub reads; where it lies."""
    if not contents.finished:
        raise DataError("only a finished data set gets a card", "go on with 'atoll data ingest'")
    facts, dataset = Facts(campaign.store), contents.dataset
    text = render(
        "dataset.md",
        "atoll.report",
        name=facts.name,
        contents=contents,
        manifest=dataset.manifest,
        licences=_most(contents.licences),
        weights=dataset.column(WEIGHTS).meta.producer if dataset.is_written(WEIGHTS) else None,
        partition=facts.optional(PartitionFile.PLACE, PartitionFile),
        words=getattr(facts.optional(ClusterMap.PLACE, ClusterMap), "words", []),
    )
    dataset.store.put(README, text.encode())
    return dataset.store.name(README)


def bars(tally: Histogram, most: int = BARS) -> list[tuple[str, float]]:
    """A histogram of numbers: one bar each where they are few, else ranges; of equal ratios if wide.

    Of each bar what it counts, and its height, of 1.
    """
    values = sorted(tally)
    if len(values) <= most:
        edges = [(f"{value:g}", tally[value]) for value in values]
    else:
        low, high = values[0], values[-1]
        # Sides from 64 to 4,096 pixels would be one bar and a tail on an even scale.
        ratios = low > 0 and high / low > 8
        ends = np.geomspace(low, high, most + 1) if ratios else np.linspace(low, high, most + 1)
        counts, _ = np.histogram(values, ends, weights=[tally[value] for value in values])
        edges = [(f"{a:.3g} to {b:.3g}", int(n)) for a, b, n in zip(ends[:-1], ends[1:], counts, strict=True)]
    top = max(count for _, count in edges)
    # Roots, so that a rare value is seen beside one that most rows have.
    return [(f"{name}: {count:,} rows", math.sqrt(count / top)) for name, count in edges]


def _most(counts: Mapping[str, int], shown: int = 20) -> list[tuple[str, int]]:
    """The most frequent of some texts, and how often all others occur."""
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = sum(count for _, count in ranked[shown:])
    named = [(clean(name), count) for name, count in ranked[:shown]]
    return [*named, *([(f"{len(ranked) - shown:,} others", rest)] if rest else [])]


def _rejects(campaign: Campaign, contents: Contents) -> list[tuple[Reject, Picture | None]]:
    """Some rejected positions, of every reason, with their pictures where the source still has them."""
    store, key = contents.dataset.store, "rejects.jsonl"
    try:
        text = store.get(key).decode("utf-8", "replace") if store.exists(key) else ""
        rejects = [Reject.model_validate_json(line) for line in text.strip().split("\n")[: 100 * REJECTED]]
    except (AtollError, ValueError):
        return []
    reasons = {reject.reason for reject in rejects}
    seen, chosen = Counter[str](), list[Reject]()
    for reject in rejects:
        seen[reject.reason] += 1
        if seen[reject.reason] <= REJECTED // min(REJECTED, len(reasons)):
            chosen.append(reject)

    # A reject is in no shard: its picture is only where it was rejected from, if that can still be read.
    keys, pictures = {reject.key for reject in chosen}, dict[str, Picture]()
    source = campaign.config.source(campaign.store.location)
    if keys and source is not None and source != "glyphs":
        with suppress(AtollError):
            opened = open_sources(source, campaign.config.data.ingest)
            for item in opened.records(0, min(len(opened), SEARCHED)):
                if isinstance(item, Record) and clean_key(item.key) in keys and isinstance(item.image, bytes):
                    with suppress(BadImageError):
                        pictures[clean_key(item.key)] = _thumbnail(decode(item.image))
    return [(reject, pictures.get(reject.key)) for reject in chosen]


def _thumbnail(image: Image.Image) -> Picture:
    image = image.copy()
    image.thumbnail((SIDE, SIDE))
    picture = Picture.of_png(png(image))
    assert picture is not None
    return picture
