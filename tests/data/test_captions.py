"""Captions made for images that have none: by whom, for which rows, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from atoll.base.part import Part
from atoll.campaign.folder import Campaign
from atoll.campaign.prepare import caption_stage, encode_stage, ingest_stage
from atoll.data.dataset import CAPTION, DataSet
from atoll.data.encode import captions_of
from atoll.encoders.image_text import Captioner
from helpers import Run, refused, write_campaign
from helpers_data import encoded
from helpers_vlm import save_llava


def campaign(folder: Path, model: Path | None) -> Path:
    """A campaign of five images, one of which has a caption."""
    source = folder / "images"
    source.mkdir(parents=True)
    for number in range(5):
        (source / f"{number}.png").write_bytes(encoded(seed=number))
    (source / "3.txt").write_text("its own words")
    data: dict[str, Any] = {"source": str(source), "text_encoder": "minilm", "text_length": 8}
    data["ingest"] = {"size": 16, "shard_rows": 2, "mode": "rgb", "uncaptioned": True, "heldout": 0.3}
    data |= {} if model is None else {"captioner": {"model": str(model), "tokens": 4, "batch": 2}}
    return write_campaign(folder / "c", {"condition": "text", "network": {"family": "pixart"}, "data": data})


def captions(dataset: DataSet) -> list[str]:
    return dataset.table([CAPTION]).column(CAPTION).to_pylist()


def test_images_without_captions_are_described(tmp_path: Path, run: Run) -> None:
    model = save_llava(tmp_path)
    folder = campaign(tmp_path, model)
    run("data", "ingest", folder)
    refused(run("data", "encode", folder), "no caption", "atoll data caption")
    # Between the two stages, as after a kill: nothing that comes before captions asks for them.
    assert "captions are not there yet" in run("plan", folder).out
    said = run("data", "caption", folder)
    assert said.code == 0 and "5 rows" in said.out, said
    dataset = Campaign.open(folder).dataset()
    made = captions(dataset)
    assert made[3] == "its own words" and all(made)
    assert dataset.take([3, 1])[CAPTION].to_pylist() == [made[3], made[1]]
    assert [row[0] for row in captions_of(dataset, 0)] == made[:2]
    # Alone, an image gets the words that it got in a batch.
    captioner = Captioner(str(model), "Describe this image in one sentence.", 4)
    assert captioner.describe([dataset.image(0)]) == [made[0]]
    producer = dataset.column(CAPTION).meta.producer
    assert producer["name"] == str(model) and producer["prompt"].startswith("Describe")
    assert producer["hash"] == captioner.producer()["hash"]
    assert "caption" in run("data", "show", folder).out
    assert run("data", "encode", folder).code == 0
    assert run("plan", folder).code == 0
    # Other words of the same rows: what was encoded of the first does not stay.
    assert run("data", "caption", folder, "--set", "data.captioner.replace=true").code == 0
    again = Campaign.open(folder).dataset()
    assert captions(again)[3] != "its own words" and not again.has_column("text")


def test_parts_give_the_bytes_of_one_process(tmp_path: Path) -> None:
    model, columns = save_llava(tmp_path), []
    for name in ("one", "parts"):
        opened = Campaign.open(campaign(tmp_path / name, model))
        ingest_stage(opened)
        for number in range(2 if name == "parts" else 0):
            caption_stage(opened, Part(number, 2))
        caption_stage(opened)
        columns.append([entry.sha256 for entry in opened.dataset().column(CAPTION).meta.shards])
    assert columns[0] == columns[1] and len(columns[0]) == 3


def test_a_captioner_that_answers_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    folder = campaign(tmp_path, save_llava(tmp_path))
    run("data", "ingest", folder)
    monkeypatch.setattr(Captioner, "describe", lambda self, pictures: [""] * len(pictures))
    refused(run("data", "caption", folder), "answers nothing", "data.captioner.prompt")
    assert not Campaign.open(folder).dataset().has_column(CAPTION)


def test_a_shard_may_stay_without_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Campaign.open(campaign(tmp_path, save_llava(tmp_path)))
    ingest_stage(opened)
    first = ["", "", "", "a bird"]  # of the images that tell whether it answers at all
    answers = iter([*first, "", "", "a tree", "a house"])
    monkeypatch.setattr(Captioner, "describe", lambda self, pictures: [next(answers) for _ in pictures])
    caption_stage(opened)
    assert captions(opened.dataset()) == ["", "", "a tree", "its own words", "a house"]
    encode_stage(opened)


def test_images_of_several_shapes_wait_for_captions(tmp_path: Path, run: Run) -> None:
    """Ingested alone they may; a preparation describes them before it encodes."""
    folder = campaign(tmp_path, save_llava(tmp_path))
    sets = ["--set", "data.ingest.buckets={sizes: [16x16, 24x12], multiple: 4, min_rows: 1}"]
    for _ in range(2):
        assert run("data", "ingest", folder, *sets).code == 0
    assert run("data", "prepare", folder, *sets).code == 0
    dataset = Campaign.open(folder).dataset()
    assert dataset.has_column("text") and all(captions(dataset))


def test_a_processor_that_takes_no_such_images_is_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = campaign(tmp_path, save_llava(tmp_path))
    run("data", "ingest", folder)

    def refuses(*_: Any, **__: Any) -> None:
        raise ValueError("Found 1 token and 4 images")

    monkeypatch.setattr(transformers.LlavaProcessor, "__call__", refuses)
    refused(run("data", "caption", folder), "takes no such prompt with one image", "name another")


def test_what_is_no_captioner_is_refused(tmp_path: Path, run: Run) -> None:
    folder = campaign(tmp_path, None)
    assert run("data", "ingest", folder).code == 0
    refused(run("data", "caption", folder), "names no image-text model", "data.captioner.model")
    gone = run("data", "caption", folder, "--set", f"data.captioner.model={tmp_path / 'gone'}")
    refused(gone, "cannot load the image-text model")
