"""README's script: from a folder of pictures to a model of one's own, in Python."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

import atoll
from atoll.campaign.folder import Campaign

ROOT = Path(__file__).parents[1]
SMALL = {
    "data": {"ingest": {"size": 16, "heldout": 0.4}},
    "partition": {"k": 2, "fine": 8},
    "network": {"depth": 1, "heads": 2, "head_width": 16},
    "train": {"batch": 16, "warmup": 100, "validations": 1, "previews": 1},
    "router": {"depth": 1, "heads": 1, "head_width": 16, "share": 0.1},
    "budget": {"samples": 640},
    "sampling": {"steps": 3},
}


def draw_photos(folder: Path) -> Path:
    """Forty captioned pictures of circles and squares."""
    folder.mkdir()
    for number in range(40):
        picture = Image.new("RGB", (24, 24), "white")
        box = (3 + number % 5, 4, 15 + number % 5, 18)
        shape, colour = ("circle", "square")[number % 2], ("red", "blue", "green")[number % 3]
        (ImageDraw.Draw(picture).ellipse if shape == "circle" else ImageDraw.Draw(picture).rectangle)(
            box, fill=colour
        )
        picture.save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"a {colour} {shape}, {number}")
    return folder


def script() -> str:
    """The script of README that creates a campaign."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return next(block for block in blocks if "atoll.create(" in block)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of the script when it has run, and what it printed as `printed`."""
    folder, create = tmp_path_factory.mktemp("api"), atoll.create
    draw_photos(folder / "photos")

    def small(source: str, folder: str, settings: dict[str, object]) -> object:
        assert settings  # README shows how they are given
        return create(source, folder, SMALL)

    code = script().replace("range(4)", "range(2)").replace("samples=500", "samples=8")
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.setattr(atoll, "create", small)
        for _ in range(2):  # it can run again
            exec(compile(code, "README.md", "exec"), names)
    return {**names, "folder": folder, "printed": printed.getvalue()}


def test_the_script_of_the_readme_runs(ran: dict[str, Any]) -> None:
    with Image.open(ran["folder"] / "bicycle.png") as picture:
        assert picture.size == (16, 16)
    measured = [line for line in ran["printed"].splitlines() if re.match(r"\{'frechet': \d", line)]
    assert len(measured) == 2 and measured[0] == measured[1]


def test_a_function_is_measured_anew_and_wrong_calls_are_one_line(
    ran: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function's name says nothing of what it computes. A later session goes on by the folder's name."""
    folder = ran["folder"] / "bicycles"
    monkeypatch.setenv("HOME", str(ran["folder"]))
    assert atoll.prepare(folder).k == 2
    assert atoll.fit(folder, "expert", 1).role == "expert"  # finished already
    model, steepness = atoll.load(folder), [1.0]
    assert model.generation == ran["campaign"].config.sampling

    def steep(logits, uniforms):  # type: ignore[no-untyped-def]
        return (logits * steepness[0]).softmax(-1)

    values = []
    for steepness[0] in (1e-3, 1e3):
        measured = atoll.evaluate(folder, routing=steep, metrics="frechet", samples=8, components=2)
        values.append(measured["frechet"])
    assert values[0] != values[1]
    pictures = model("a red circle", each=2)
    assert len(pictures) == 2 and pictures[0].size == (16, 16) and [*pictures] == pictures.images
    assert repr(pictures) == "2 pictures of 16x16, 3 steps, guidance 2, seed 0"
    assert repr(model) == "Model(ensemble, condition text, 3 steps, guidance 2, routing once, on cpu)"
    names = [path.name for path in pictures.save(f"{tmp_path}/p/")]
    assert names == ["0000-a-red-circle.png", "0001-a-red-circle.png"]
    assert pictures.save(tmp_path / "a.png")[0].read_bytes() == pictures._repr_png_()
    opened = Campaign.open(folder)
    assert repr(opened) == f"Campaign(folder {opened.store.location}, condition text, K 2, stage assembled)"
    assert f"<td>{opened.store.location}</td>" in opened._repr_html_()
    for call, words in [
        (lambda: atoll.fit(folder, "expret"), "did you mean 'expert'"),
        (lambda: atoll.fit(folder, "expert", 9), "there is no expert 9"),
        (lambda: atoll.fit(folder, "router", 1), "router is no expert"),
        (lambda: atoll.fit(folder), "no expert is named: give an expert from 0 to 1"),
        (lambda: atoll.load(folder, "monolit"), "did you mean 'monolith'"),
        (lambda: atoll.load("~/bicycles", "monolit"), "did you mean 'monolith'"),
        (lambda: atoll.load(folder, device="cudaa"), "no device 'cudaa' here"),
        (lambda: atoll.create(tmp_path / "none", tmp_path / "d"), "there is no .*none"),
        (lambda: model([3]), "3 is no text: give texts"),
        (lambda: model("\udcff"), "is no text: give texts in UTF-8"),
        (lambda: model(["a"], each=-1), "give 1 or more"),
        (lambda: model("a", routing=3), "'routing' in the generation"),
        (lambda: model(["a"], routing=lambda logits: logits), "a function of logits and uniforms"),
    ]:
        with pytest.raises(atoll.AtollError, match=words):
            call()


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    numbers = {"partition": {"k": np.int64(3)}, "train": {"lr": np.float32(1)}, "data": {"path": Path("x")}}
    settings = numbers | {"sampling": {"routing": atoll.Routing.named("top-2 null full")}}
    config = atoll.create("s3://bucket/pictures", tmp_path / "d", settings).config
    assert (config.data.source, config.data.path, config.partition.k) == ("s3://bucket/pictures", "x", 3)
    assert (str(config.sampling.routing), config.train.lr) == ("top-2 null full", 1)
    with pytest.raises(atoll.AtollError, match=r"unknown key 'partition\.kk'.*did you mean 'k'"):
        atoll.create("glyphs", tmp_path / "c", {"partition": {"kk": 2}})
