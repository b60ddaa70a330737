"""Rows that show what another row shows: found, left out, and never on both sides of the split."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance

from atoll.campaign.folder import Campaign
from atoll.campaign.prepare import prepare
from atoll.data import partition as partitions
from atoll.data.contents import audit
from atoll.data.dataset import DataSet
from atoll.data.duplicates import REASONS, Duplicates, dedupe, fingerprint
from atoll.data.settings import DedupeConfig, IngestConfig, features_column
from atoll.data.sources.several import open_source
from atoll.store.store import Store
from helpers import Run, refused
from helpers_data import ingest, saved

SIDE = 96
ORIGINALS = 24


def scene(seed: int, side: int = SIDE) -> Image.Image:
    """A picture of smooth random colours, which no other seed gives."""
    values = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((side, side), Image.Resampling.BICUBIC)


def planted() -> dict[str, tuple[bytes, int]]:
    """Files by name, and which scene each shows."""
    found = {f"own-{n:02d}.png": (saved(scene(n)), n) for n in range(ORIGINALS)}
    small, large = scene(3).resize((48, 48), Image.Resampling.LANCZOS), scene(4, 192)
    return found | {
        "a-copy.png": (found["own-00.png"][0], 0),
        "encoded.jpg": (saved(scene(1), "JPEG", quality=60), 1),
        "again.webp": (saved(scene(1), "WEBP", quality=50), 1),
        "pixels.png": (saved(scene(2), compress_level=0), 2),
        "small.png": (saved(small), 3),
        "large.png": (saved(large), 4),
        "lighter.png": (saved(ImageEnhance.Brightness(scene(5)).enhance(1.03)), 5),
        "mirror.png": (saved(scene(6).transpose(Image.Transpose.FLIP_LEFT_RIGHT)), -1),
        "other-colours.png": (saved(Image.fromarray(255 - np.asarray(scene(7)))), -2),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    root.mkdir()
    lines = []
    for name, (content, shows) in planted().items():
        (root / name).write_bytes(content)
        lines.append(json.dumps({"file_name": name, "text": name, "who": f"{shows}{name}"}) + "\n")
    (root / "metadata.jsonl").write_text("".join(lines))
    return root


def dataset_of(folder: Path, **more: object) -> DataSet:
    config = IngestConfig(size=32, shard_rows=10, heldout=0.3, **more)  # type: ignore[arg-type]
    store = Store.open(folder.parent / "data", create=True)
    return ingest(open_source(str(folder), config), store, "", config)


def kept_by(dataset: DataSet, found: Duplicates) -> dict[str, str]:
    names = dataset.table(["caption"])["caption"].to_pylist()
    return {names[n]: names[int(of)] for n, of in enumerate(found.kept_row) if of != n}


def test_copies_encodings_and_sizes_are_found_and_nothing_else(folder: Path) -> None:
    dataset = dataset_of(folder)
    found = dedupe(dataset, DedupeConfig(), "none")
    assert kept_by(dataset, found) == {
        "a-copy.png": "own-00.png",
        "encoded.jpg": "own-01.png",
        "again.webp": "own-01.png",
        "pixels.png": "own-02.png",
        "small.png": "own-03.png",
        "own-04.png": "large.png",
        "lighter.png": "own-05.png",
    }
    assert found.counts == dict(zip(REASONS, (ORIGINALS + 2, 1, 6, 0), strict=True))
    assert dataset.column("duplicate_of").read(np.arange(len(dataset))).tolist() == found.kept_row.tolist()
    assert sum(len(dataset.split(name)) for name in ("train", "heldout", "test")) == ORIGINALS + 2
    assert audit(dataset) == []


def test_what_is_kept_in_place_of_a_copy_is_kept(folder: Path) -> None:
    """A copy of a file, which a larger picture of the same scene replaces, is replaced by that too."""
    (folder / "large-0.png").write_bytes(saved(scene(0, 192)))
    with (folder / "metadata.jsonl").open("a") as lines:
        lines.write(json.dumps({"file_name": "large-0.png", "text": "large-0.png", "who": "x"}) + "\n")
    dataset = dataset_of(folder)
    found = dedupe(dataset, DedupeConfig(), "none")
    assert kept_by(dataset, found)["a-copy.png"] == kept_by(dataset, found)["own-00.png"] == "large-0.png"
    assert (found.kept_row[found.kept_row] == found.kept_row).all()


def test_no_group_is_on_two_sides(folder: Path) -> None:
    """Rows of one group in the source stay together too, with all that is alike to any of them."""
    dataset = dataset_of(folder, group="who", test=0.2)
    before = {name: dataset.split(name).tolist() for name in ("train", "heldout", "test")}
    found = dedupe(dataset, DedupeConfig(), "none")
    sides = dataset.sides
    assert (dataset.weights == (found.kept_row == np.arange(len(dataset)))).all() and {*sides} == {0, 1, 2}
    assert {name: dataset.split(name).tolist() for name in before} != before
    names = dataset.table(["caption"])["caption"].to_pylist()
    assert len({found.groups[names.index(name)] for name in ("own-01.png", "again.webp", "encoded.jpg")}) == 1
    assert (dedupe(dataset, DedupeConfig(), "none").kept_row == found.kept_row).all()
    assert (dataset.sides == sides).all()


def test_features_join_what_pixels_do_not(folder: Path) -> None:
    """Of three in a row the first and the last are not alike: the last is kept, and a group of its own."""
    dataset = dataset_of(folder)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(len(dataset), 64)).astype(np.float32))
    names = dataset.table(["caption"])["caption"].to_pylist()
    one, two, three = (names.index(f"own-{n}.png") for n in (10, 11, 12))
    step = torch.nn.functional.normalize(values[one], dim=0)
    aside = torch.nn.functional.normalize(values[two] - (values[two] @ step) * step, dim=0)
    values[one], values[two], values[three] = step, step + 0.25 * aside, step + 0.52 * aside
    dataset.write_values(features_column("ours"), {"name": "ours"}, values.half().numpy())
    found = dedupe(dataset, DedupeConfig(cosine=0.95), "ours")
    assert found.kept_row[[two, three]].tolist() == [one, three]
    assert found.counts["nearly the same features"] == 1
    assert found.groups[one] == found.groups[two] != found.groups[three]


def face(mouth: str, colour: str = "#fc2") -> Image.Image:
    """A face of 32 pixels, drawn with soft edges: small ones differ by a few pixels of the mouth."""
    image = Image.new("RGBA", (256, 256))
    draw = ImageDraw.Draw(image)
    draw.ellipse((16, 16, 240, 240), colour, "black", 10)
    for left in (80, 150):
        draw.ellipse((left, 84, left + 26, 116), "black")
    mouths = {"smile": ((80, 120, 176, 190), 20, 160), "frown": ((80, 160, 176, 230), 200, 340)}
    draw.arc(*mouths[mouth], "black", 10)
    return image.resize((64, 64), Image.Resampling.LANCZOS)


def test_a_series_of_small_drawings_stays(tmp_path: Path) -> None:
    """A smile is no frown and a blue face no yellow one, on white or on nothing, and encoded again they are
    the same; pictures of one pixel and of nothing are told apart by their colour alone."""
    root = tmp_path / "faces"
    root.mkdir()
    for name in ("smile", "frown"):
        face(name).save(root / f"{name}.png")
        white = Image.new("RGBA", (64, 64), "white")
        white.alpha_composite(face(name))
        white.convert("RGB").save(root / f"{name}-again.webp", quality=95)
    face("smile", "#28f").save(root / "blue.png")
    for name, colour in (("pixel", "#c33"), ("other", "#3c3")):
        Image.new("RGB", (1, 1), colour).save(root / f"{name}.png")
        Image.new("RGB", (7, 7), colour).save(root / f"{name}-square.png")
    for path in root.iterdir():
        path.with_suffix(".txt").write_text(path.name)
    dataset = dataset_of(root)
    assert kept_by(dataset, dedupe(dataset, DedupeConfig(), "none")) == {
        "smile.png": "smile-again.webp",
        "frown.png": "frown-again.webp",
        "pixel.png": "pixel-square.png",
        "other.png": "other-square.png",
    }


def test_hashes_are_near_for_the_same_scene_and_far_for_others() -> None:
    def apart(one: Image.Image, other: Image.Image) -> int:
        return int(np.bitwise_count(fingerprint(one)[:8] ^ fingerprint(other)[:8]).sum())

    same = [apart(scene(n), Image.open(io.BytesIO(saved(scene(n), "JPEG", quality=50)))) for n in range(20)]
    assert max(same) <= 6 and min(apart(scene(n), scene(n + 1)) for n in range(20)) > 12


def test_a_campaign_leaves_them_out_and_shows_the_doubtful(folder: Path, tmp_path: Path, run: Run) -> None:
    made = tmp_path / "mine"
    sets = [f"data.source={folder}", "data.ingest.size=16", "data.ingest.heldout=0.2", "partition.k=2"]
    sets += ["data.dedupe={}", "partition.encoder=efficientnet-lite0", "partition.encoder_size=64"]
    assert run("new", made, "--recipe", "cpu", *[part for one in sets for part in ("--set", one)]).code == 0
    refused(run("data", "dedupe", made), "no data set")
    assert run("data", "ingest", made).code == 0
    refused(run("partition", made), "not deduplicated")
    refused(run("data", "dedupe", made, "--set", "data.dedupe.cosine=0.9"), "data embed")
    refused(run("data", "dedupe", made, "--set", "data.dedupe.bits=9"), "bits")
    opened = Campaign.open(made)
    partition, dataset = prepare(opened), opened.dataset()
    train, heldout = len(dataset.split("train")), len(dataset.split("heldout"))
    assert (sum(partition.sizes), sum(partition.about.heldout)) == (train, heldout) and train < ORIGINALS
    assert partitions.load(opened.store).hash == partition.hash
    islands = [DataSet.open(opened.store, f"islands/{k}/data") for k in range(2)]
    shown = {name for island in islands for name in island.ids}
    assert shown == {dataset.ids[n] for n in range(len(dataset)) if dataset.weights[n]}
    assert "7 of weight 0" in run("data", "show", made).out
    with Image.open(made / "reports/duplicates.png") as sheet:
        assert sheet.width > 12 * 64 * 0.9
    refused(run("data", "dedupe", made), "partitioned already")
    assert run("data", "audit", made).code == 0
