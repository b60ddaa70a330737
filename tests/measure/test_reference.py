"""Statistics of a reference come back as they were, and only for the extractor that made them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from atoll.base.errors import DataError, StoreError
from atoll.measure import reference
from atoll.measure.features import BLOCK, FeatureSet
from atoll.measure.reference import Origin
from atoll.store.store import Store

PRODUCER = {"name": "net", "hash": "a" * 64, "size": 28, "resize": "bicubic"}


def origin(**changes: Any) -> Origin:
    plain = {"extractor": PRODUCER, "name": "x", "data": "d" * 64, "split": "heldout", "count": 9}
    return Origin(**{**plain, "size": (12, 12), **changes})


def features(count: int = 9, keep: bool = True) -> FeatureSet:
    made = FeatureSet(5, keep)
    made.add(np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path)


@pytest.mark.parametrize("count", [9, BLOCK + 3])
def test_they_come_back(store: Store, count: int) -> None:
    made = features(count)
    key = reference.save(store, "refs", made, origin(count=count))
    found, about = reference.load(store, key, PRODUCER, keep_rows=True)
    assert about == origin(count=count) and found.count == count
    assert np.array_equal(found.moments.scatter, made.moments.scatter)
    assert np.array_equal(found.whole_rows().read(range(count)), made.whole_rows().read(range(count)))


def test_the_file_is_plain_safetensors(store: Store, tmp_path: Path) -> None:
    key = reference.save(store, "refs", made := features(), origin())
    tensors = load_file(tmp_path / key.replace(".json", ".safetensors"))
    assert tensors["count"].tolist() == [9]
    assert np.array_equal(tensors["mean"], made.moments.mean)
    assert np.array_equal(tensors["rows"], made.whole_rows().read(range(9)))


def test_the_key_is_that_of_pictures_and_extractor() -> None:
    same = {origin().key, origin(name="y").key, origin(extractor={**PRODUCER, "name": "elsewhere"}).key}
    assert len(same) == 1
    others = {
        origin(data="e" * 64).key,
        origin(split="train").key,
        origin(extractor={**PRODUCER, "size": 64}).key,
        origin(size=(12, 13)).key,
    }
    assert len(others | same) == 5


@pytest.mark.parametrize(
    "change", [{"hash": "b" * 64}, {"size": 64}, {"resize": "bilinear"}, {"token": "class"}]
)
def test_another_extractor_is_refused(store: Store, change: dict[str, Any]) -> None:
    key = reference.save(store, "refs", features(), origin())
    with pytest.raises(DataError, match="made by another extractor") as caught:
        reference.load(store, key, {**PRODUCER, **change}, keep_rows=True)
    assert "\n" not in str(caught.value)


def test_the_same_extractor_under_another_name_is_welcome(store: Store) -> None:
    key = reference.save(store, "refs", features(), origin())
    reference.load(store, key, {**PRODUCER, "name": "/elsewhere/net"}, keep_rows=True)


def test_moments_alone_tell_no_neighbours(store: Store) -> None:
    key = reference.save(store, "refs", features(keep=False), origin())
    assert reference.load(store, key, PRODUCER, keep_rows=False)[0].count == 9
    with pytest.raises(DataError, match="holds moments only"):
        reference.load(store, key, PRODUCER, keep_rows=True)


def test_rows_that_come_later_replace_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is stopped between the file and its JSON leaves those that were there as they were."""
    assert reference.saved(store, "refs", origin(), keep_rows=False) is None
    key = reference.save(store, "refs", features(keep=False), origin())
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            reference.save(store, "refs", features(), origin())
    assert reference.saved(store, "refs", origin(), keep_rows=True) is None
    assert reference.saved(store, "refs", origin(), keep_rows=False) == key
    assert reference.load(store, key, PRODUCER, keep_rows=False)[0].count == 9
    whole = reference.save(store, "refs", features(), origin())
    assert {reference.saved(store, "refs", origin(), keep) for keep in (True, False)} == {whole}


def test_damage_is_found(store: Store, tmp_path: Path) -> None:
    key = reference.save(store, "refs", features(), origin())
    path = tmp_path / key.replace(".json", ".safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="does not match its SHA-256"):
        reference.load(store, key, PRODUCER, keep_rows=True)
    about = json.loads((tmp_path / key).read_text())
    (tmp_path / key).write_text(json.dumps({**about, "schema": 2}))
    with pytest.raises(DataError, match="no statistics of schema 1"):
        reference.load(store, key, PRODUCER, keep_rows=True)
