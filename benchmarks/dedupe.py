"""Duplicates: what is found of planted encodings, sizes and crops, what of series is lost, and what leaks.

    pip download --no-deps scikit-image==0.26.0 scikit-learn==1.9.1, and unzip both below FOLDER
    python benchmarks/dedupe.py --photographs FOLDER --emoji emoji64 --icons icons64 --sheet PNG [--wrong N]
    python benchmarks/dedupe.py --quick

Every original stands in one data set with its plants: the same picture encoded, resized, brightened or
cropped. A plant is found if one row is kept for both. `found` is the share of plants of a kind that are;
`lost` are originals that another original stands for. Emoji are drawn in series, so a bound that finds every
encoding loses some of them: `--emoji` counts rows that are left out for nearly the same pixels under several
bounds, and held-out pictures that are in training before and after. `--sheet` draws 200 pairs of icons, the
nearest to the bounds, to be judged by eye; `--wrong N` writes down how many show two things.
"""

import argparse
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from aesthetics import noise, opened
from harness import finish, row
from PIL import Image, ImageEnhance
from pyarrow import parquet

from atoll.base.pictures import grid, png
from atoll.data.dataset import DataSet
from atoll.data.duplicates import LOOKS, Duplicates, dedupe, fingerprint_job
from atoll.data.ingest import ingest
from atoll.data.settings import DedupeConfig, IngestConfig
from atoll.data.sources import open_source
from atoll.store.store import Store

Pictures = list[Image.Image]


def encoded(kind: str, **how: int) -> Callable[[Image.Image], Image.Image]:
    def again(image: Image.Image) -> Image.Image:
        image.save(data := io.BytesIO(), kind, **how)
        return Image.open(data).convert("RGB")

    return again


def resized(share: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.resize([round(side * share) for side in image.size], Image.Resampling.LANCZOS)


def cropped(share: float) -> Callable[[Image.Image], Image.Image]:
    def inner(image: Image.Image) -> Image.Image:
        edge = max(1, round(image.width * share))
        return image.crop((edge, edge, image.width - edge, image.height - edge))

    return inner


PLANTS = {
    "JPEG 90": encoded("JPEG", quality=90),
    "JPEG 60": encoded("JPEG", quality=60),
    "JPEG 30": encoded("JPEG", quality=30),
    "WebP 60": encoded("WEBP", quality=60),
    "64 colours": lambda image: image.quantize(64).convert("RGB"),
    "half the size": resized(0.5),
    "0.75 of the size": resized(0.75),
    "1.5 of the size": resized(1.5),
    "3 % brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.03),
    "1 % cut off each edge": cropped(0.01),
    "5 % cut off each edge": cropped(0.05),
}
BOUNDS = {
    "as by default": DedupeConfig(),
    "8 x 8 alone, 0.05": DedupeConfig(detail=1),
    "8 x 8 alone, 0.02": DedupeConfig(difference=0.02, detail=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path, help="folder with the photographs, at any depth")
    parser.add_argument("--emoji", type=Path, help="folder of examples/emoji/prepare.py, or with code points")
    parser.add_argument("--icons", type=Path, help="folder of examples/icons/prepare.py")
    parser.add_argument("--originals", type=int, default=200, help="of emoji and icons each")
    parser.add_argument("--sheet", type=Path, help="PNG of pairs of icons to be judged by eye")
    parser.add_argument("--wrong", type=int, help="how many of them show two things")
    parser.add_argument("--quick", action="store_true", help="few pictures of noise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = {"noise": (list(noise().values()), 32)} if options.quick else {}
    if options.photographs:
        kinds["photographs"] = (tiles(opened(options.photographs)), 256)
    for name, folder in (("emoji", options.emoji), ("icons", options.icons)):
        if folder:
            kinds[name] = (sample(folder, options.originals), 32)
    if not kinds:
        parser.error("give some of --photographs, --emoji and --icons, or --quick")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (originals, size) in kinds.items():
            rows += planted(name, originals, size, Path(folder))
        if options.emoji:
            rows += series(options.emoji, Path(folder) / "series")
        if options.icons and options.sheet:
            rows += sheet(options.icons, Path(folder) / "sheet", options.sheet, options.wrong)
    finish("dedupe", rows, options.json)


def tiles(photographs: dict[str, Image.Image], side: int = 170) -> Pictures:
    """Squares of photographs, none of which overlap."""
    return [
        one.crop((x, y, x + side, y + side))
        for one in photographs.values()
        for y in range(0, one.height - side + 1, side)
        for x in range(0, one.width - side + 1, side)
    ]


def sample(folder: Path, count: int) -> Pictures:
    """Pictures of a folder of parquet files, drawn by a seed, no two with the same pixels."""
    files = sorted(folder.glob("*.parquet"))
    column = pa.chunked_array(
        [chunk for file in files for chunk in parquet.read_table(file, columns=["image"])["image"].chunks]
    )
    chosen = np.random.default_rng(0).choice(len(column), min(count, len(column)), replace=False)
    pictures = [Image.open(io.BytesIO(column[int(n)]["bytes"].as_py())).convert("RGB") for n in chosen]
    return list({one.tobytes(): one for one in pictures}.values())


def planted(kind: str, originals: Pictures, size: int, folder: Path) -> list[dict]:
    """Shares of plants that are found, under the default bounds and the earlier ones."""
    pictures = [
        one for original in originals for one in (original, *(how(original) for how in PLANTS.values()))
    ]
    content = [{"bytes": png(one), "path": None} for one in pictures]
    source = folder / f"{kind}-source"
    source.mkdir(parents=True)
    parquet.write_table(
        pa.table({"image": content, "text": [f"row {n}" for n in range(len(content))]}), source / "0.parquet"
    )
    dataset = made(source, folder / kind, IngestConfig(size=size, mode="rgb", heldout=0))
    rows = []
    for name, bounds in BOUNDS.items():
        of = dedupe(dataset, bounds, "none").of.reshape(len(originals), 1 + len(PLANTS))
        for number, plant in enumerate(PLANTS, 1):
            found = float((of[:, number] == of[:, 0]).mean())
            asked = (
                name == "as by default" and kind == "photographs" and "cut" not in plant and "64" not in plant
            )
            target = {"target": (">=", 0.95)} if asked else {}
            rows.append(row(f"{kind}, {name}", f"found: {plant}", round(found, 4), **target))
        apart = (of[:, :1] // (1 + len(PLANTS)) != np.arange(len(originals))[:, None]).mean()
        rows.append(row(f"{kind}, {name}", "lost originals", round(float(apart), 4)))
    return rows


def made(source: Path, to: Path, config: IngestConfig) -> DataSet:
    return ingest(open_source(str(source), config), Store.open(to, create=True), "", config)


def series(source: Path, to: Path) -> list[dict]:
    """Emoji left out under several bounds, and held-out ones that are in training."""
    to.mkdir(parents=True)
    for file in sorted(source.glob("*.parquet")):
        table = parquet.read_table(file)
        if "group" not in table.column_names:
            codes = [untoned(code) for code in table["codepoints"].to_pylist()]
            table = table.append_column("group", pa.array(codes))
        parquet.write_table(table, to / file.name)
    config = IngestConfig(size=32, mode="rgb", heldout=0.1, group="group", caption="caption", id="id")
    dataset = made(to, to / "data", config)
    rows = [row("emoji", "held out", len(dataset.split("heldout")))]
    rows.append(row("emoji", "held out and in training, before", leaked(dataset)))
    for name, bounds in BOUNDS.items():
        found = dedupe(dataset, bounds, "none")
        rows.append(row(f"emoji, {name}", "left out: same file", found.counts["same file"]))
        rows.append(row(f"emoji, {name}", "left out: pixels", found.counts["nearly the same pixels"]))
        rows.append(
            row(f"emoji, {name}", "held out and in training, after", leaked(dataset), target=("<=", 0))
        )
    return rows


def untoned(codes: str) -> str:
    """Code points without skin tones, by which `examples/emoji` groups rows."""
    return "-".join(
        code for code in codes.split("-") if code.lower() not in ("1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff")
    )


def leaked(dataset: DataSet) -> int:
    """Held-out rows whose looks, to the last bit of their thumbnails, a training row has."""
    fingerprint_job(dataset).run()
    seen = dataset.column(LOOKS)
    train, heldout = (seen.read(dataset.split(name)).numpy() for name in ("train", "heldout"))
    known = {one.tobytes() for one in train}
    return sum(one.tobytes() in known for one in heldout)


def sheet(source: Path, to: Path, path: Path, wrong: int | None, count: int = 200) -> list[dict]:
    """Draw pairs that are nearly the same, those nearest to the bounds, and say what was judged of them."""
    dataset = made(
        source, to, IngestConfig(size=32, mode="rgb", heldout=0.1, group="group", id="id", caption="caption")
    )
    found = dedupe(dataset, DedupeConfig(), "none")
    rows = [row("icons", name, value) for name, value in found.counts.items()]
    path.write_bytes(png(pairs(dataset, found, count)))
    if wrong is not None:
        rows.append(
            row("icons, nearest to the bounds", "right by eye", 1 - wrong / count, target=(">=", 0.9))
        )
    return rows


def pairs(dataset: DataSet, found: Duplicates, count: int) -> Image.Image:
    near = np.flatnonzero(found.how == 2)
    chosen = near[np.argsort(-found.distances[near], kind="stable")][:count].tolist()
    pictures = [dataset.image(one) for n in chosen for one in (n, int(found.of[n]))]
    labels = [text for n in chosen for text in (f"{found.distances[n]:.2f}", "")]
    return grid(pictures, 20, 4, labels=labels, scale=2)


if __name__ == "__main__":
    main()
