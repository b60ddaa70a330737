"""The icons of one npm package become a folder of parquet files that Atoll ingests, a file for each set.

    npm pack @iconify/json@2.2.535
    pip install resvg_py==0.5.0
    python examples/icons/prepare.py iconify-json-2.2.535.tgz FOLDER_OF_PARQUET [--sets NAME ...]

Every icon is drawn on white, black where its colour is left to the page, its longer side 64 pixels; the
rest of the square is white, or with `--keep-aspect` not there. One that is white itself is left out.
Columns: `image` (the Hugging Face image layout, lossless WebP), `id`, `caption` ("arrow left bold, Material
Design Icons style"), `concept` ("arrow left bold"), `style`, `category`, `licence` (SPDX), `coloured`,
`group`. The group, by which rows are held out, is the name: many sets draw the same thing. A set that is
written already is not drawn again.
"""

import argparse
import io
import json
import sys
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import resvg_py
from PIL import Image

SIDE = 64
AT_ONCE = 20_000
"""Icons in memory at once; the largest set has more."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="iconify-json-2.2.535.tgz")
    parser.add_argument("to", type=Path, help="folder for the parquet files")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these, such as twemoji logos")
    parser.add_argument("--keep-aspect", action="store_true", help="leave no white beside wide and tall ones")
    parser.add_argument("--processes", type=int, help="one for every core by default")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    known = dict(sets_of(options.package))
    wanted = options.sets or sorted(known)
    if missing := [name for name in wanted if name not in known]:
        parser.error(f"the package has no set {', '.join(missing)}; it has {', '.join(sorted(known))}")
    left = [name for name in wanted if not (options.to / f"{name}.parquet").exists()]
    left.sort(key=lambda name: -len(known[name]))  # the largest first, so that none is alone at the end
    with ProcessPoolExecutor(options.processes) as pool:
        tasks = [pool.submit(write, known[n], options.to, n, options.keep_aspect) for n in left]
        for task in tasks:
            print(task.result(), flush=True)


def sets_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """Name and JSON of every set of the package."""
    try:
        with tarfile.open(package) as tar:
            for entry in tar:
                folder, _, file = entry.name.rpartition("/")
                if folder == "package/json" and file.endswith(".json"):
                    content = tar.extractfile(entry)
                    assert content is not None
                    yield file.removesuffix(".json"), content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        print(f"error: {package} cannot be read ({reason}); fetch it with npm pack", file=sys.stderr)
        raise SystemExit(2) from None


def write(content: bytes, to: Path, name: str, keep_aspect: bool) -> str:
    """Draw a set into its file; says what was done."""
    icons, undrawn, count = json.loads(content), 0, 0
    part, writer = to / f".{name}.part", None
    names = [one for one, icon in icons["icons"].items() if not icon.get("hidden")]
    for first in range(0, len(names), AT_ONCE):
        rows = [row(name, icons, one, keep_aspect) for one in names[first : first + AT_ONCE]]
        table = pa.Table.from_pylist([one for one in rows if one is not None], SCHEMA)
        undrawn += sum(one is None for one in rows)
        count += len(table)
        writer = writer or pq.ParquetWriter(part, SCHEMA)
        writer.write_table(table)
    if writer is not None:
        writer.close()
        part.rename(to / f"{name}.parquet") if count else part.unlink()
    return f"{name}: {count:,} icons" + (f", {undrawn:,} that cannot be drawn" if undrawn else "")


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        *((name, pa.string()) for name in ("caption", "concept", "style", "category", "licence")),
        ("coloured", pa.bool_()),
        ("group", pa.string()),
    ]
)


def row(set_: str, icons: dict[str, Any], name: str, keep_aspect: bool) -> Row | None:
    """One icon with its texts; None where nothing is seen of it."""
    picture = drawn(icons, icons["icons"][name], keep_aspect)
    if picture is None:
        return None
    info, concept, content = icons["info"], " ".join(name.split("-")), io.BytesIO()
    picture.save(content, "WEBP", lossless=True)
    return {
        "id": f"{set_}-{name}",
        "image": {"bytes": content.getvalue(), "path": f"{set_}-{name}.webp"},
        "caption": f"{concept}, {info['name']} style",
        "concept": concept,
        "style": info["name"],
        "category": info.get("category") or "",
        "licence": info["license"].get("spdx") or info["license"]["title"],
        "coloured": bool(info.get("palette")),
        "group": concept,
    }


def drawn(icons: dict[str, Any], icon: dict[str, Any], keep_aspect: bool) -> Image.Image | None:
    """An icon on white; None where there is nothing to see."""
    left, top = (icon.get(key, icons.get(key, 0)) for key in ("left", "top"))
    width, height = (icon.get(key, icons.get(key, 16)) for key in ("width", "height"))
    if min(width, height) <= 0:
        return None
    scale = SIDE / max(width, height)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="black"'
        f' viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )
    size = [max(1, round(edge * scale)) for edge in (width, height)]
    try:
        png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size[0], height=size[1]))
    except ValueError:
        return None
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    if picture.getextrema()[3][1] == 0:  # type: ignore[index]
        return None
    canvas = Image.new("RGBA", picture.size if keep_aspect else (SIDE, SIDE), "white")
    canvas.alpha_composite(
        picture, tuple((c - p) // 2 for c, p in zip(canvas.size, picture.size, strict=True))
    )
    seen = canvas.convert("RGB")
    return None if all(low == 255 for low, _ in seen.getextrema()) else seen  # type: ignore[misc]


if __name__ == "__main__":
    main()
