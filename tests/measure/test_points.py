"""References, and where pictures come from."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from atoll.base.errors import DataError, StoreError
from atoll.encoders.vision import VisionEncoder, vision_encoder
from atoll.measure.pictures import Batch, Features, Folder, extraction
from atoll.measure.points import Reference, Statistics, reference_of
from atoll.measure.shards import FEW
from atoll.store.store import Store
from helpers import flip
from helpers_extractors import save_pictures

PRODUCER = {"name": "net", "hash": "a" * 64, "size": 28, "resize": "bicubic"}


def about(**changes: Any) -> Statistics:
    plain = {"code": "0", "extractor": PRODUCER, "name": "x", "data": "d" * 64, "split": "heldout"}
    return Statistics(**{**plain, "count": 9, "size": (12, 12), **changes})


@pytest.fixture(scope="module")
def encoder(net: Path) -> VisionEncoder:
    return vision_encoder(str(net), 28)


def features(one: Reference, encoder: VisionEncoder) -> np.ndarray:
    return one.features(encoder, 8).rows


def test_they_come_back_without_the_pictures(tmp_path: Path, encoder: VisionEncoder, store: Store) -> None:
    folder = save_pictures(tmp_path / "real", 37)
    one, again, later = (Reference.of_pictures(Folder(folder), "real", encoder, store) for _ in range(3))
    first = features(one, encoder)
    path = store.path(one.key.replace(".json", ".safetensors"))
    assert np.array_equal(load_file(path)["rows"], first)
    shutil.rmtree(folder)
    assert np.array_equal(features(again, encoder), first)
    named = reference_of(str(path), None, None, encoder, store)
    assert named.about.count == 37 and np.array_equal(features(named, encoder), first)

    # Damage is found.
    flip(path)
    with pytest.raises(StoreError, match="does not match its SHA-256"):
        features(later, encoder)
    store.put_json(one.key, {**json.loads(store.path(one.key).read_text()), "format": "atoll/statistics 2"})
    with pytest.raises(DataError, match="is of atoll/statistics 2"):
        features(later, encoder)


def test_the_key_is_that_of_pictures_and_extractor() -> None:
    same = {about().key, about(name="y").key, about(extractor={**PRODUCER, "name": "elsewhere"}).key}
    assert len(same) == 1
    changes: list[dict[str, Any]] = [{"data": "e"}, {"split": "train"}, {"size": (12, 13)}, {"count": 8}]
    changes.append({"extractor": {**PRODUCER, "size": 64}})
    assert len({about(**change).key for change in changes} | same) == 6


@pytest.mark.parametrize(
    "change", [{"hash": "b" * 64}, {"size": 64}, {"resize": "bilinear"}, {"token": "class"}, {"name": "y"}]
)
def test_another_extractor_is_refused_and_another_name_is_not(store: Store, change: dict[str, Any]) -> None:
    class Other:
        def producer(self) -> dict[str, Any]:
            return {**PRODUCER, **change}

    store.put_json("refs/some.json", about().to_json())
    place, encoder = f"{store.location}/refs/some.json", cast(VisionEncoder, Other())
    if "name" in change:
        assert Reference.saved(place, encoder).about == about()
        return
    with pytest.raises(DataError, match="made by another extractor") as caught:
        Reference.saved(place, encoder)
    assert "\n" not in str(caught.value)


@dataclass
class Shuffled:
    """Pictures of one grey each, in batches whose numbers jump."""

    count: int
    size: tuple[int, int] = (4, 4)
    subject: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    reusable: bool = True

    def __len__(self) -> int:
        return self.count

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        for numbers in np.array_split(np.random.default_rng(0).permutation(part), max(1, len(part) // batch)):
            pictures = [Image.new("L", self.size, int(n)) for n in numbers]
            yield Batch(numbers.tolist(), pictures, [str(n) for n in numbers])


class Grey:
    """An extractor that also says how many pictures it saw at once."""

    width, device = 2, "cpu"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def producer(self) -> dict[str, Any]:
        return PRODUCER

    def encode(self, pictures: list[Image.Image]) -> torch.Tensor:
        self.seen.append(len(pictures))
        return torch.tensor([[float(np.asarray(p)[0, 0]), 1.0] for p in pictures])

    def texts(self, captions: list[str]) -> torch.Tensor:
        return torch.tensor([[2.0 * int(caption), 1.0] for caption in captions])


@pytest.mark.parametrize("batch", [1, 7, 30, 200])
def test_rows_and_captions_are_by_number_and_the_extractor_never_sees_few(store: Store, batch: int) -> None:
    encoder = Grey()
    rows = extraction(store, Shuffled(150), cast(VisionEncoder, encoder), "greys", batch, captions=True)
    found = Features.of(rows.whole())
    assert found.rows[:, 0].tolist() == list(range(150))
    assert found.texts is not None and (found.texts[:, 0] == 2 * found.rows[:, 0]).all()
    assert min(encoder.seen) >= FEW and max(encoder.seen) <= 64
