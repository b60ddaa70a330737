"""What a stranger needs to make the data of `examples/`."""

import ast
import contextlib
import gzip
import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import atoll
from atoll.encoders.vae import autoencoder
from helpers import ROOT, write_campaign
from helpers_data import packed, saved

RED = (255, 0, 0)


def example(name: str, script: str = "prepare") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_{script}", ROOT / f"examples/{name}/{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # other processes look it up by its name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return example("emoji")


def picture(side: int, suffix: str) -> bytes:
    """Red in the upper half, nothing below."""
    made = Image.new("RGBA", (side, side))
    made.paste(RED, (0, 0, side, side // 2))
    return saved(made, suffix, **({"lossless": True} if suffix == "WEBP" else {}))


def package(path: Path, files: dict[str, bytes]) -> None:
    path.write_bytes(gzip.compress(packed((f"package/{name}", files[name]) for name in files)))


def packages(folder: Path, prepare: ModuleType) -> None:
    """One hand in two skin tones, and a sign that Fluent spells without its selector."""
    hand: dict[str, Any] = {"name": "WAVING HAND SIGN", "category": "People & Body", "subcategory": "hands"}
    hand |= {"unified": "1F44B", "skin_variations": {"1F3FB": {"unified": "1F44B-1F3FB"}}}
    sign = {"name": None, "short_name": "Sign", "category": "Symbols", "subcategory": "gender"}
    emoji = json.dumps([hand, {**sign, "unified": "26A7-FE0F"}]).encode()
    codes = ("1f44b", "1f44b-1f3fb", "26a7-fe0f")
    for style in ("google", "twitter"):
        drawn = {f"img/{style}/64/{code}.png": picture(64, "PNG") for code in codes}
        sheets = {f"img/{style}/sheets/64.png": b"not a picture of one"}
        package(folder / prepare.PACKAGES[style], {"emoji.json": emoji, **drawn, **sheets})
    drawn = {f"assets/{code}.webp": picture(256, "WEBP") for code in ("1f44b", "26a7", "23-fe0f-20e3")}
    package(folder / prepare.PACKAGES["fluent3d"], drawn)
    about = {"hexcode": "1F44B", "annotation": "Waving Hand", "group": "people-body", "subgroups": "hands"}
    other = {**about, "hexcode": "E000", "annotation": "atoll", "group": "extras-openmoji"}
    rectangle = b'<rect width="72" height="36" fill="red"/>'
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 72">' + rectangle + b"</svg>"
    drawn = {f"color/svg/{code}.svg": svg for code in ("1F44B", "E000")}
    listed = {"data/openmoji.json": json.dumps([about, other]).encode()}
    package(folder / prepare.PACKAGES["openmoji"], listed | drawn)


def ended(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """What a program says that is called wrongly."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words])
    with pytest.raises(SystemExit) as leaves:
        module.main()
    assert leaves.value.code == 2
    return capsys.readouterr().err


def test_four_packages_become_four_parquet_files(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, prepare)
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path), str(tmp_path / "out")])
    prepare.main()
    rows = {path.stem: pq.read_table(path).to_pylist() for path in (tmp_path / "out").glob("*")}
    assert {style: [row["codepoints"] for row in found] for style, found in rows.items()} == {
        "google": ["1f44b", "1f44b-1f3fb", "26a7-fe0f"],
        "twitter": ["1f44b", "1f44b-1f3fb", "26a7-fe0f"],
        "fluent3d": ["1f44b", "26a7"],
        "openmoji": ["1f44b", "e000"],
    }
    assert [row["concept"] for row in rows["google"]] == ["waving hand sign", "waving hand sign", "sign"]
    assert rows["fluent3d"][1]["caption"] == "sign, fluent3d style"
    assert [row["category"] for row in rows["openmoji"]] == ["People & Body", "Extras"]
    assert {row["group"] for found in rows.values() for row in found} == {"1f44b", "26a7", "e000"}
    for row in (row for found in rows.values() for row in found):
        seen = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        assert seen.shape == (64, 64, 3)
        assert (seen[:28] == RED).all() and (seen[36:] == 255).all(), row["id"]


@pytest.mark.parametrize("damage", ["missing", "empty", "junk", "half"])
def test_packages_that_are_missing_or_damaged_are_one_line(
    damage: str,
    prepare: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = tmp_path / prepare.PACKAGES["google"]
    if damage != "missing":
        packages(tmp_path, prepare)
        whole = first.read_bytes()
        first.write_bytes({"empty": b"", "junk": b"junk", "half": whole[: len(whole) // 2]}[damage])
    error = ended(prepare, monkeypatch, capsys, str(tmp_path), str(tmp_path / "out"))
    if damage == "missing":
        assert "openmoji-17.0.0.tgz; fetch them with npm pack" in error and not (tmp_path / "out").exists()
    else:
        assert error.count("\n") == 1 and f"{first} cannot be read" in error and "npm pack" in error


def test_icons_are_drawn_on_white_with_their_set_and_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    icons = example("icons")
    square = '<path d="M0 0h16v16H0z" fill="currentColor"/>'
    info = {"name": "Squares", "license": {"title": "MIT", "spdx": "MIT"}, "category": "Shapes"}
    set_ = {
        "info": {**info, "palette": True},
        "icons": {
            "black-square": {"body": square},
            "half": {"body": square, "width": 32},
            "nothing": {"body": "<g/>"},
            "broken": {"body": "<path"},
            "old": {"body": square, "hidden": True},
        },
    }
    package(tmp_path / "p.tgz", {"json/squares.json": json.dumps(set_).encode(), "readme.md": b"-"})
    argv = ["prepare.py", str(tmp_path / "p.tgz"), str(tmp_path / "to"), "--processes", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    icons.main()
    assert "squares: 2 icons, 2 that cannot be drawn" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "to/squares.parquet").to_pylist()
    assert [(r["caption"], r["licence"], r["coloured"], r["group"]) for r in rows] == [
        ("black square, Squares style", "MIT", True, "black square"),
        ("half, Squares style", "MIT", True, "half"),
    ]
    black, half = (np.asarray(Image.open(io.BytesIO(r["image"]["bytes"]))) for r in rows)
    assert black.shape == (64, 64, 3) and black.max() == 0
    assert half.min() == 0 and (half[:16] == 255).all() and (half[16:48, :32] == 0).all()
    assert (half[16:48, 33:] == 255).all() and (half[48:] == 255).all()
    assert "no set circles" in ended(icons, monkeypatch, capsys, *argv[1:], "--sets", "circles")


def test_an_autoencoder_goes_on_from_its_last_minute_and_loads(
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    script, folder = example("emoji", "autoencoder"), tmp_path / "autoencoder"
    campaign = write_campaign(tmp_path / "campaign", {"data": {"ingest": {"size": 32}}})
    assert run("data", "ingest", campaign).code == 0
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=count(0, 100).__next__))
    argv = f"autoencoder.py {campaign} --to {folder} --batch 2 --channels 4 --steps ".split()
    for steps, seen in (("2", ["step 0", "step 1"]), ("3", ["step 2"])):
        monkeypatch.setattr(sys, "argv", [*argv, steps])
        script.main()
        told = capsys.readouterr().out
        assert re.findall(r"step \d+", told) == seen and "PSNR of" in told
    assert autoencoder(str(folder)).encode([Image.new("RGB", (32, 32))]).shape == (1, 4, 8, 8)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer letters with a tiny budget; each cell that shows something in the file does so here."""
    create = atoll.create
    few = {
        "data": {"ingest": {"glyphs": {"limit": 240}}},
        "partition": {"fine": 32},
        "sampling": {"steps": 3},
    }
    small = lambda source, folder, settings, **more: create(source, folder, {**settings, **few}, **more)  # noqa: E731
    monkeypatch.setattr(atoll, "create", small)
    book = json.loads((ROOT / "examples/quickstart.ipynb").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAMPLES", "2000")
    names: dict[str, Any] = {}
    for number, cell in enumerate([cell for cell in book["cells"] if cell["cell_type"] == "code"], 1):
        assert cell["execution_count"] == number
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, "cell", "exec"), names)
            shown = (
                [eval(compile(ast.Expression(last.value), "cell", "eval"), names)] if last is not None else []
            )
        kinds = [output["output_type"] for output in cell["outputs"]]
        expected = ["execute_result"] * (bool(shown) and shown[0] is not None)
        assert [kind for kind in kinds if kind != "stream"] == expected
        assert ("stream" in kinds) == (bool(printed.getvalue()) and "print(" in "".join(cell["source"]))
    assert len(names["pictures"]) == 12 and len(names["files"]) == 12
    assert (tmp_path / "letters.png").read_bytes() == names["pictures"]._repr_png_()
