"""Features of a reference come back as they were, and only for the extractor that made them."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from atoll.base.errors import DataError, StoreError
from atoll.base.processes import ProcessGroup
from atoll.encoders.vision import VisionEncoder, vision_encoder
from atoll.measure.pictures import Folder
from atoll.measure.points import Reference, Statistics, reference_of
from atoll.store.store import Store
from helpers_extractors import save_pictures

PRODUCER = {"name": "net", "hash": "a" * 64, "size": 28, "resize": "bicubic"}


def about(**changes: Any) -> Statistics:
    plain = {"code": "0", "extractor": PRODUCER, "name": "x", "data": "d" * 64, "split": "heldout"}
    return Statistics(**{**plain, "count": 9, "size": (12, 12), **changes})


@pytest.fixture(scope="module")
def encoder(net: Path) -> VisionEncoder:
    return vision_encoder(str(net), 28)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "out", create=True)


def features(one: Reference, encoder: VisionEncoder) -> np.ndarray:
    made = one.features(encoder, 8, ProcessGroup())
    assert made is not None
    return made.rows


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
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="does not match its SHA-256"):
        features(later, encoder)
    tree = json.loads(store.path(one.key).read_text())
    store.put_json(one.key, {**tree, "format": "atoll/statistics 2"})
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
