import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.errors import DataError, StoreError
from atoll.base.hashing import digest_strings
from atoll.data.contents import audit
from atoll.data.dataset import DataSet, to_parquet
from atoll.data.subsets import union, write_subset
from atoll.store.store import Store


@pytest.fixture
def full(glyphs: DataSet) -> DataSet:
    """The glyphs with a fixed and a ragged column."""

    def rows(shard: int) -> torch.Tensor:
        return torch.arange(int(glyphs.bounds[shard]), int(glyphs.bounds[shard + 1]))

    def text(shard: int) -> dict[str, torch.Tensor]:
        lengths = rows(shard) % 5
        return {"values": torch.repeat_interleave(rows(shard), lengths)[:, None].half(), "lengths": lengths}

    glyphs.write_column("latents", {"name": "l"}, lambda shard: {"values": rows(shard)[:, None].float()})
    glyphs.write_column("text", {"name": "t"}, text, {"null": {"values": torch.full((2, 1), 7.0)}}, "ragged")
    return glyphs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "atoll/dataset 2"}, "is of atoll/dataset 2, this Atoll reads atoll/dataset 1"),
        ({"rows": "many"}, "'rows'"),
        ({"rows": 41}, "contradicts itself"),
        ([1], "is not what Atoll writes"),
    ],
)
def test_open_says_what_is_wrong(store: Store, glyphs: DataSet, change: Any, words: str) -> None:
    content = store.get_json("glyphs/manifest.json")
    store.put_json("new/manifest.json", content | change if isinstance(change, dict) else change)
    with pytest.raises(DataError, match=words):
        DataSet.open(store, "new")


def test_a_data_set_may_be_the_root_of_its_store(glyphs: DataSet, store: Store) -> None:
    dataset = DataSet.open(store.sub("glyphs"))
    assert dataset.ids == glyphs.ids
    assert audit(dataset) == []
    assert dataset.write_values("n", {}, np.zeros(len(dataset))).read([3]) == 0
    assert glyphs.has_column("n")


def test_rows_and_pictures(glyphs: DataSet) -> None:
    assert len(glyphs) == 40
    assert glyphs.table(["id", "caption"]).column_names == ["id", "caption"]
    assert glyphs.table().num_rows == 40
    with pytest.raises(IndexError):
        glyphs.image(40)
    again = [picture.tobytes() for shard in range(3) for picture in glyphs.iter_images(shard)]
    assert again == [glyphs.image(row).tobytes() for row in range(40)]
    rows = [39, 0, 20, 20, 3]
    assert glyphs.take(rows).column("id").to_pylist() == [glyphs.ids[row] for row in rows]
    with pytest.raises(DataError, match="no split 'validation'"):
        glyphs.split("validation")
    with pytest.raises(DataError, match="no column 'latents'"):
        glyphs.column("latents")
    assert glyphs.column_names() == ["split"]


def test_damaged_rows_and_pictures_are_not_read(glyphs: DataSet, store: Store) -> None:
    for key in ("glyphs/rows/00001.parquet", "glyphs/images/00001.tar"):
        data = bytearray(store.get(key))
        data[len(data) // 2] ^= 1
        store.put(key, bytes(data))
    fresh = DataSet.open(store, "glyphs")
    assert fresh.image(0).size == (8, 8)
    with pytest.raises(StoreError, match="SHA-256"):
        fresh.image(16)
    with pytest.raises(StoreError, match="SHA-256"):
        fresh.table(["id"])


def test_subset_holds_exactly_those_rows_in_that_order(full: DataSet, store: Store) -> None:
    rows = np.array([38, 2, 3, 17, 16, 5])
    subset = write_subset(full, rows, store, "islands/0/data", ["latents", "text", "split"], shard_rows=4)
    assert [shard.rows for shard in subset.shards] == [4, 2]
    assert subset.ids == [full.ids[row] for row in rows]
    assert subset.column("latents").read(np.arange(6))[:, 0].tolist() == rows.tolist()
    values, mask = subset.column("text").read_ragged(np.arange(6))
    expected, expected_mask = full.column("text").read_ragged(rows)
    assert torch.equal(values, expected)
    assert torch.equal(mask, expected_mask)
    assert torch.equal(subset.column("text").extra("null")["values"], torch.full((2, 1), 7.0))
    assert subset.column("text").meta.producer == full.column("text").meta.producer
    held = {full.ids[row] for row in full.split("heldout")}
    assert {subset.ids[row] for row in subset.split("heldout")} == held & set(subset.ids)
    assert audit(subset) == []
    assert subset.manifest.source["licence"] == full.manifest.source["licence"]
    with pytest.raises(DataError, match="no pictures"):
        subset.image(0)


@pytest.mark.parametrize(
    "rows",
    [np.arange(1, 40, 2), np.random.default_rng(0).permutation(40)[:33], np.array([39, 0, 39, 17, 17])],
)
def test_rows_of_a_subset_stay_in_order_whatever_it_is(full: DataSet, store: Store, rows: np.ndarray) -> None:
    subset = write_subset(full, rows, store, "a", ["latents"], shard_rows=4)
    assert subset.ids == [full.ids[row] for row in rows]
    expected = [to_parquet(full.take(rows[start : start + 4])) for start in range(0, len(rows), 4)]
    assert [store.get(f"a/rows/{n:05d}.parquet") for n in range(len(expected))] == expected


def test_subset_is_idempotent_and_restartable(full: DataSet, store: Store, tmp_path: Path) -> None:
    rows = np.arange(0, 40, 3)
    first = write_subset(full, rows, store, "a", ["latents"])
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "store/a").rglob("*")}
    assert write_subset(full, rows, store, "a", ["latents"]).manifest == first.manifest
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "store/a").rglob("*")} == times
    second = write_subset(full, rows, store, "b", ["latents"])
    assert second.content == first.content
    assert second.column("latents").meta == first.column("latents").meta
    store.delete("b/manifest.json", "b/rows/00000.parquet")  # as if it had been killed
    assert write_subset(full, rows, store, "b", ["latents"]).manifest == first.manifest
    with pytest.raises(DataError, match="other rows"):
        write_subset(full, rows[1:], store, "a", ["latents"])
    with pytest.raises(DataError, match="at least one"):
        write_subset(full, rows[:0], store, "c", ["latents"])
    with pytest.raises(DataError, match="no column 'features'"):
        write_subset(full, rows, store, "c", ["features"])
    assert store.list("c") == []


def test_union_names_what_lies_elsewhere(full: DataSet, store: Store) -> None:
    columns = ["latents", "text", "split"]
    numbers = [np.arange(0, 40, 2), np.arange(1, 40, 2)]
    parts = [
        write_subset(full, rows, store.sub(f"islands/{k}"), "data", columns, shard_rows=8)
        for k, rows in enumerate(numbers)
    ]
    whole = union(store, "router/data", parts, columns)
    rows = np.concatenate(numbers)
    assert whole.ids == [full.ids[row] for row in rows]
    pick = np.array([39, 0, 20, 19, 21, 4])
    assert whole.column("latents").read(pick)[:, 0].tolist() == rows[pick].tolist()
    mine, theirs = whole.column("text").read_ragged(pick, 4), full.column("text").read_ragged(rows[pick], 4)
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    assert whole.column("text").extra("null")["values"].shape == (2, 1)
    assert audit(whole) == []
    files = store.get_json("router/data/manifest.json")["shards"][0]["files"]
    assert files["rows"]["path"] == "../../islands/0/data/rows/00000.parquet"
    assert sorted(key for key in store.list("router")) == [
        "router/data/columns/latents/column.json",
        "router/data/columns/split/column.json",
        "router/data/columns/text/column.json",
        "router/data/manifest.json",
    ]
    assert union(store, "router/data", parts, columns).ids == whole.ids
    twice = union(store, "deep/er/data", [DataSet.open(store, "router/data")], columns)
    assert twice.column("latents").read([39])[0, 0] == rows[39]
    narrow = DataSet.open(store.sub("router"), "data")
    with pytest.raises(StoreError, match="leads out of"):
        narrow.table(["id"])


def test_union_of_parts_that_do_not_fit(full: DataSet, store: Store, tmp_path: Path) -> None:
    a = write_subset(full, np.arange(5), store, "a", ["latents"])
    b = write_subset(full, np.arange(5, 9), store, "b", ["latents"])
    b.write_column("latents", {"name": "other"}, lambda i: {"values": torch.zeros(4, 1)})
    with pytest.raises(DataError, match="differs"):
        union(store, "u", [a, b], ["latents"])
    assert not store.exists("u/manifest.json")
    assert len(union(store, "u", [a, b], [])) == 9
    with pytest.raises(DataError, match="other parts"):
        union(store, "u", [b, a], [])
    elsewhere = write_subset(full, np.arange(5), Store.open(tmp_path / "far", create=True), "d", [])
    with pytest.raises(DataError, match="outside"):
        union(store, "v", [a, elsewhere], [])
    with pytest.raises(DataError, match="at least one"):
        union(store, "v", [], [])


def test_audit_finds_what_is_wrong(full: DataSet, store: Store) -> None:
    assert audit(full) == []
    store.delete("glyphs/images/00000.tar", "glyphs/columns/text/null.safetensors")
    for key in ("glyphs/rows/00001.parquet", "glyphs/columns/latents/00002.safetensors"):
        store.put(key, store.get(key)[:-1])
    problems = audit(DataSet.open(store, "glyphs"))
    assert len(problems) == 4
    for name in ("00000.tar", "00001.parquet", "00002.safetensors", "null"):
        assert any(name in problem for problem in problems)


@pytest.mark.parametrize("false", [{"dtype": "nn"}, {"shape": [10**6]}, {"kind": "ragged"}])
def test_audit_finds_a_column_that_is_not_what_it_says(
    full: DataSet, store: Store, false: dict[str, Any]
) -> None:
    key = "glyphs/columns/latents/column.json"
    store.put_json(key, store.get_json(key) | false)
    problems = audit(DataSet.open(store, "glyphs"))
    assert len(problems) == 3 and all("columns/latents" in problem for problem in problems)


def test_audit_finds_contradictions(glyphs: DataSet, store: Store) -> None:
    content = store.get_json("glyphs/manifest.json")
    content["shards"][1] = content["shards"][0]
    store.put_json("glyphs/manifest.json", content)
    problems = audit(DataSet.open(store, "glyphs"))
    assert sum("occurs more than once" in problem for problem in problems) == 16
    assert any("column 'split'" in problem and "other rows" in problem for problem in problems)


def test_audit_finds_groups_in_both_splits(glyphs: DataSet) -> None:
    glyphs.write_values("split", {"name": "wrong"}, (np.arange(len(glyphs)) % 2).astype(np.int8))
    assert any("lies in two splits" in problem for problem in audit(glyphs))


def test_pictures_are_decoded_ahead_in_threads_and_no_further(
    glyphs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.data.dataset.AHEAD", 3)
    threads, image = list[str](), DataSet.image

    def noted(dataset: DataSet, row: int) -> Image.Image:
        threads.append(threading.current_thread().name)
        return image(dataset, row)

    monkeypatch.setattr(DataSet, "image", noted)
    pictures = glyphs.iter_images(0, lambda picture: picture.resize((4, 4)))
    next(pictures)
    pictures.close()
    # The first opens the file; then come the one that was asked for and three more.
    assert len(threads) == 5 and all(name.startswith("decode") for name in threads[1:])
    whole = list(glyphs.iter_images(0))
    assert [p.tobytes() for p in whole] == [image(glyphs, n).tobytes() for n in range(len(whole))]
    some = glyphs.iter_images(0, numbers=[4, 1])
    assert [p.tobytes() for p in some] == [whole[4].tobytes(), whole[1].tobytes()]


def test_the_manifest_knows_the_digest_of_all_ids(store: Store, glyphs: DataSet) -> None:
    """So no process of a run reads the rows for it; they may even be gone."""
    dataset = DataSet.open(store, glyphs.prefix)
    assert dataset.manifest.ids == digest_strings(dataset.ids)
    store.delete(*(f"{glyphs.prefix}/{shard.files['rows'].path}" for shard in dataset.shards))
    with pytest.raises(StoreError, match="is missing"):
        DataSet.open(store, glyphs.prefix).table(["id"])
    assert DataSet.open(store, glyphs.prefix).id_hash == dataset.manifest.ids
