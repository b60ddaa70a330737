"""Four npm packages of emoji become one folder of parquet files that Atoll ingests.

    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0 \
        @lobehub/fluent-emoji-3d@1.1.0 openmoji@17.0.0
    pip install resvg_py==0.5.0
    python examples/emoji/prepare.py FOLDER_WITH_THE_TGZ_FILES FOLDER_OF_PARQUET

Every picture is laid on white and brought to 64 x 64. Columns: `image` (the Hugging Face image layout,
lossless WebP), `id`, `caption` ("red apple, google style"), `concept` ("red apple"), `style`, `category`,
`subcategory`, `codepoints`, `group`. The group, by which rows are held out, is the code points without skin
tones and variation selectors: tones and styles of one emoji show the same thing, and the packages name it
differently.
"""

import argparse
import io
import json
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIDE = 64
PACKAGES = {
    "google": "emoji-datasource-google-16.0.0.tgz",
    "twitter": "emoji-datasource-twitter-16.0.0.tgz",
    "fluent3d": "lobehub-fluent-emoji-3d-1.1.0.tgz",
    "openmoji": "openmoji-17.0.0.tgz",
}
UNTOLD = {"fe0f", "1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"}
"""Code points that make no other emoji: the variation selector and the skin tones."""
Row = dict[str, Any]


class Files(dict[str, bytes]):
    """Files of a package by their path in it."""

    def __missing__(self, path: str) -> bytes:
        raise mistake(f"a package has no {path}; the versions must be {', '.join(PACKAGES.values())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="folder with the four .tgz files")
    parser.add_argument("to", type=Path, help="folder for the parquet files")
    options = parser.parse_args()
    if missing := [name for name in PACKAGES.values() if not (options.packages / name).exists()]:
        parser.error(f"{options.packages} lacks {', '.join(missing)}; fetch them with npm pack")
    options.to.mkdir(parents=True, exist_ok=True)
    names = described(read(options.packages / PACKAGES["google"]))
    for style, package in PACKAGES.items():
        files = read(options.packages / package)
        if style == "openmoji":
            rows = list(openmoji(files))
        else:
            rows = list(fluent(files, names) if style == "fluent3d" else datasource(files, style, names))
        part = options.to / f".{style}.part"
        pq.write_table(pa.Table.from_pylist(rows), part)
        part.rename(options.to / f"{style}.parquet")
        print(f"{style}: {len(rows):,} pictures")


def read(package: Path) -> Files:
    """Files of an npm package that are of use here, by their path in it."""
    useless = ("/sheets", "/black/", "/src/", "/font")
    try:
        with tarfile.open(package) as tar:
            entries = [entry for entry in tar if not any(part in entry.name for part in useless)]
            found = {entry.name: content.read() for entry in entries if (content := tar.extractfile(entry))}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise mistake(f"{package} cannot be read ({reason}); fetch it again with npm pack") from None
    return Files(found)


def mistake(message: str) -> SystemExit:
    """What ends the program with one line and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    return SystemExit(2)


def described(files: Files) -> dict[str, Row]:
    """Name, category and subcategory by code points, skin tones too."""
    found = {}
    for emoji in json.loads(files["package/emoji.json"]):
        about = {
            "concept": (emoji["name"] or emoji["short_name"]).lower(),
            "category": emoji["category"],
            "subcategory": emoji["subcategory"],
        }
        for one in (emoji, *emoji.get("skin_variations", {}).values()):
            found[one["unified"].lower()] = about
    return found


def datasource(files: Files, style: str, names: dict[str, Row]) -> Iterator[Row]:
    """Rows of a package whose pictures are named by their code points."""
    for codepoints, about in names.items():
        yield row(style, codepoints, files[f"package/img/{style}/64/{codepoints}.png"], **about)


def fluent(files: Files, names: dict[str, Row]) -> Iterator[Row]:
    """The same of Fluent, whose pictures are fewer, and at times named without the variation selector."""
    for path in sorted(path for path in files if path.endswith(".webp")):
        codepoints = Path(path).stem
        about = names.get(codepoints) or names.get(f"{codepoints}-fe0f")
        if about is not None:
            yield row("fluent3d", codepoints, files[path], **about)


def openmoji(files: Files) -> Iterator[Row]:
    """Rows of OpenMoji, which are drawings."""
    import resvg_py

    for emoji in json.loads(files["package/data/openmoji.json"]):
        drawing = files[f"package/color/svg/{emoji['hexcode']}.svg"]
        png = bytes(resvg_py.svg_to_bytes(svg_string=drawing.decode(), width=SIDE, height=SIDE))
        group = emoji["group"].removesuffix("-openmoji").removesuffix("-unicode").replace("-", " & ").title()
        about = {"concept": emoji["annotation"].lower(), "category": group, "subcategory": emoji["subgroups"]}
        yield row("openmoji", emoji["hexcode"].lower(), png, **about)


def row(style: str, codepoints: str, picture: bytes, **about: str) -> Row:
    """One picture on white, with its texts."""
    drawn = Image.open(io.BytesIO(picture)).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB")
    bare = [point for point in codepoints.split("-") if point not in UNTOLD]
    content = io.BytesIO()
    flat.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(content, "WEBP", lossless=True)
    name = f"{style}-{codepoints}"
    return {
        "id": name,
        "image": {"bytes": content.getvalue(), "path": f"{name}.webp"},
        "caption": f"{about['concept']}, {style} style",
        **about,
        "style": style,
        "codepoints": codepoints,
        "group": "-".join(bare) or codepoints,
    }


if __name__ == "__main__":
    main()
