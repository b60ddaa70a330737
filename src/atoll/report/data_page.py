"""The page of a data set: what it holds, with pictures of its rows, of duplicates and of rejects."""

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from atoll.base.errors import AtollError
from atoll.base.pictures import png
from atoll.base.rng import generator
from atoll.base.text import size
from atoll.campaign.folder import Campaign
from atoll.campaign.prepare import PAIRS
from atoll.data.contents import Contents, Tally
from atoll.data.decode import BadImageError, decode
from atoll.data.duplicates import COLUMN
from atoll.data.formats import Reject
from atoll.data.formats import clean as clean_key
from atoll.data.records import Record
from atoll.data.sources import open_sources
from atoll.report.facts import Facts, Picture, pixelated
from atoll.report.page import environment, write_page
from atoll.report.text import clean

SHOWN, PAIRED, REJECTED = 60, 24, 24
"""Rows, pairs of duplicates, and rejected positions that are shown."""
SIDE = 128
"""Longest side of a picture on the page, in pixels."""
SEARCHED = 50_000
"""Positions of the source in which rejected pictures are looked for."""
BARS = 32


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: what it counts, and how high it is, of 1."""

    name: str
    height: float


def write_data_page(campaign: Campaign, found: Contents, path: Path) -> None:
    """Write the page of a campaign's data set. Pictures that cannot be read are left out.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_page(path, render(campaign, found), "--page")


def render(campaign: Campaign, found: Contents) -> str:
    """The page as text."""
    rows = _rows(found)
    pairs = _pairs(found)
    manifest = found.dataset.manifest
    rejects = _rejects(campaign, found)
    pictures = [picture for _, picture in rows]
    tallies = (("Width", found.widths), ("Height", found.heights), ("Width over height", found.aspects))
    return (
        environment()
        .get_template("data.html")
        .render(
            name=clean("/".join(found.dataset.store.location.rstrip("/").split("/")[-2:])),
            found=found,
            source=clean(manifest.source.get("name", "")),
            total=len(found.dataset),
            manifest=manifest,
            bytes=[(kind, found.bytes(kind)) for kind in ("rows", "images")],
            licences=_most(found.licences),
            sources=_most(found.sources),
            captions=[(clean(text), count) for text, count in found.captions if count > 1],
            histograms=[
                (title, bars(one), one)
                for title, one in (*tallies, ("Words of a caption", found.words))
                if one
            ],
            columns=[(one, clean(one.form), clean(one.producer)) for one in found.columns],
            problems=[clean(problem) for problem in found.problems],
            rows=rows,
            pairs=pairs,
            doubtful=Facts(campaign.store).picture(PAIRS),
            rejects=rejects,
            size=size,
            pixelated=pixelated(pictures),
            colours="",
        )
    )


def bars(tally: Tally, most: int = BARS) -> list[Bar]:
    """A histogram of numbers: one bar each where they are few, else ranges; of equal ratios if wide."""
    values = sorted(tally)
    if len(values) <= most:
        edges = [(f"{value:g}", tally[value]) for value in values]
    else:
        low, high = values[0], values[-1]
        ratios = low > 0 and high / low > 8
        ends = np.geomspace(low, high, most + 1) if ratios else np.linspace(low, high, most + 1)
        counts, _ = np.histogram(values, ends, weights=[tally[value] for value in values])
        edges = [(f"{a:.3g} to {b:.3g}", int(n)) for a, b, n in zip(ends[:-1], ends[1:], counts, strict=True)]
    top = max(count for _, count in edges)
    # Roots, so that a rare value is seen beside one that most rows have.
    return [Bar(f"{name}: {count:,} rows", math.sqrt(count / top)) for name, count in edges]


def _most(counts: Mapping[str, int], shown: int = 20) -> list[tuple[str, int]]:
    """The most frequent of some texts, and how often all others occur."""
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = sum(count for _, count in ranked[shown:])
    named = [(clean(name), count) for name, count in ranked[:shown]]
    return [*named, *([(f"{len(ranked) - shown:,} others", rest)] if rest else [])]


def _rows(found: Contents) -> list[tuple[str, Picture]]:
    """Captions and pictures of rows drawn by a seed."""
    shown = [(_caption(found, row), _picture(found, row)) for row in _drawn(len(found.dataset), SHOWN)]
    return [(caption, picture) for caption, picture in shown if picture is not None]


def _pairs(found: Contents) -> list[tuple[str, Picture, Picture]]:
    """Captions of rows that are left out, their pictures, and those of what is kept in their place."""
    if found.duplicates is None:
        return []
    of = found.dataset.column(COLUMN).read(np.arange(len(found.dataset))).numpy()
    again = np.flatnonzero(of != np.arange(len(of)))
    shown = []
    for row in again[_drawn(len(again), PAIRED)].tolist():
        one, other = _picture(found, row), _picture(found, int(of[row]))
        if one is not None and other is not None:
            shown.append((f"{_caption(found, row)} / {_caption(found, int(of[row]))}", one, other))
    return shown


def _rejects(campaign: Campaign, found: Contents) -> list[tuple[Reject, Picture | None]]:
    """Some rejected positions, of every reason, with their pictures where the source still has them."""
    store, key = found.dataset.store, "rejects.jsonl"
    try:
        text = store.get(key).decode("utf-8", "replace") if store.exists(key) else ""
        named = [Reject.model_validate_json(line) for line in text.splitlines()[: 100 * REJECTED]]
    except (AtollError, ValueError):
        return []
    of_reason = Counter[str]()
    chosen = []
    for one in named:
        of_reason[one.reason] += 1
        if of_reason[one.reason] <= REJECTED // min(REJECTED, len({other.reason for other in named})):
            chosen.append(one)
    pictures = dict(_found_again(campaign, {one.key for one in chosen}))
    return [(one, pictures.get(one.key)) for one in chosen]


def _found_again(campaign: Campaign, keys: set[str]) -> Iterator[tuple[str, Picture]]:
    """Pictures of the source's positions of these keys, as far as it has them and they can be read."""
    named = campaign.config.source(campaign.store.location)
    if not keys or named is None or named == "glyphs":
        return
    try:
        source = open_sources(named, campaign.config.data.ingest)
        for item in source.records(0, min(len(source), SEARCHED)):
            if isinstance(item, Record) and clean_key(item.key) in keys and isinstance(item.image, bytes):
                with suppress(BadImageError):
                    yield clean_key(item.key), _thumbnail(decode(item.image))
    except AtollError:
        return


def _picture(found: Contents, row: int) -> Picture | None:
    """The picture of a row; None where it cannot be read or there are none."""
    try:
        return _thumbnail(found.dataset.image(row))
    except AtollError:
        return None


def _thumbnail(image: Image.Image) -> Picture:
    image = image.copy()
    image.thumbnail((SIDE, SIDE))
    uri = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    return Picture(uri, image.width, image.height)


def _caption(found: Contents, row: int) -> str:
    try:
        return clean(found.dataset.take([row])["caption"][0].as_py())
    except AtollError:
        return "cannot be read"


def _drawn(count: int, most: int) -> list[int]:
    """Numbers up to `count`, drawn by a seed, ascending."""
    chosen: list[int] = torch.randperm(count, generator=generator(0, "data page"))[:most].sort()[0].tolist()
    return chosen
