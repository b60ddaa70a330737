"""The partition: what decides it, what it must not see, and its hash."""

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.base.errors import AtollError, PartitionError
from atoll.data import partition as partitions
from atoll.data.columns import Column
from atoll.data.dataset import WEIGHTS, DataSet
from atoll.data.partition import imbalances, make
from atoll.data.settings import GlyphOptions, IngestConfig, PartitionConfig
from atoll.data.sources.glyphs import GlyphSource
from atoll.data.subsets import write_subset
from atoll.store.store import Store
from helpers_data import ingest

ROWS = 120


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, options = tmp_path_factory.mktemp("data"), GlyphOptions(limit=ROWS, characters="basic")
    ingest(GlyphSource(options), Store.open(root), "", IngestConfig(size=8, shard_rows=50, heldout=0.25))
    return root


@pytest.fixture
def dataset(whole: Path, tmp_path: Path) -> DataSet:
    return DataSet.open(Store.open(shutil.copytree(whole, tmp_path / "data")))


def features(dataset: DataSet, change: np.ndarray | None = None, name: str = "features") -> Column:
    """Three directions with noise; `change` is added."""
    values = np.eye(3, 8)[np.arange(ROWS) % 3] + 0.1 * np.random.default_rng(0).normal(size=(ROWS, 8))
    values = values + (0 if change is None else change)

    return dataset.write_values(name, {"name": "blobs", "hash": name}, values.astype(np.float16))


KMEANS = PartitionConfig(k=3, fine=3)
RANDOM = PartitionConfig(method="random", k=3)


def test_clusters_are_the_blobs(dataset: DataSet) -> None:
    made = make(dataset, features(dataset), KMEANS, 0)
    assert len({(int(c), i % 3) for i, c in enumerate(made.clusters)}) == 3
    train, heldout = dataset.split("train"), dataset.split("heldout")
    assert len(heldout) > 10
    for k in range(3):
        assert made.sizes[k] == (made.clusters[train] == k).sum()
        assert made.about.heldout[k] == (made.clusters[heldout] == k).sum()
    assert sum(made.sizes) + sum(made.about.heldout) == ROWS


def test_heldout_rows_do_not_decide(dataset: DataSet) -> None:
    """Whatever the held-out features are, centroids and the clusters of training rows stay."""
    heldout, train = dataset.split("heldout"), dataset.split("train")
    change = np.zeros((ROWS, 8))
    change[heldout] = np.random.default_rng(1).normal(size=(len(heldout), 8)) * 5
    one = make(dataset, features(dataset), KMEANS, 0)
    other = make(dataset, features(dataset, change, "changed"), KMEANS, 0)
    assert np.array_equal(one.centroids, other.centroids)
    assert np.array_equal(one.clusters[train], other.clusters[train])
    assert not np.array_equal(one.clusters[heldout], other.clusters[heldout])
    change = np.zeros((ROWS, 8))
    change[train[:5]] = 5
    other = make(dataset, features(dataset, change, "t"), KMEANS, 0)
    assert not np.array_equal(one.centroids, other.centroids)


def test_random_does_not_depend_on_the_order_of_rows(dataset: DataSet, store: Store) -> None:
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = write_subset(dataset, order, store, "", ["split"], shard_rows=33)
    one, other = make(dataset, None, RANDOM, 4), make(shuffled, None, RANDOM, 4)
    assert np.array_equal(one.clusters[order], other.clusters)
    assert one.hash != other.hash  # the hash is of clusters in order
    assert not np.array_equal(one.clusters, make(dataset, None, RANDOM, 5).clusters)
    assert min(one.sizes) > 15


def test_the_hash_is_of_what_was_decided(dataset: DataSet) -> None:
    column = features(dataset)
    first = make(dataset, column, KMEANS, 0)
    assert make(dataset, column, KMEANS, 0).hash == first.hash
    others = [
        make(dataset, column, KMEANS, 1),
        make(dataset, column, KMEANS.model_copy(update={"k": 2}), 0),
        make(dataset, features(dataset, name="same-values-other-encoder"), KMEANS, 0),
        make(dataset, None, RANDOM, 0),
    ]
    assert len({first.hash, *(o.hash for o in others)}) == 5
    assert np.array_equal(others[2].clusters, first.clusters)


def test_it_comes_back_from_disk(dataset: DataSet, store: Store) -> None:
    made = make(dataset, features(dataset), KMEANS, 0)
    partitions.save(made, store, dataset)
    back = partitions.load(store)
    assert np.array_equal(back.clusters, made.clusters) and np.array_equal(back.centroids, made.centroids)
    assert back.about == made.about and back.k == 3
    assert store.list("partition/sheets") == [f"partition/sheets/{k}.png" for k in range(3)]
    key = "partition/partition.json"
    store.put_json(key, {**store.get_json(key), "format": "atoll/partition 5"})
    with pytest.raises(PartitionError, match="is of atoll/partition 5, this Atoll reads atoll/partition 1"):
        partitions.load(store)


@pytest.mark.parametrize(("config", "weighted"), [(KMEANS, False), (RANDOM, False), (RANDOM, True)])
def test_damage_is_told_in_one_line(
    dataset: DataSet, store: Store, config: PartitionConfig, weighted: bool
) -> None:
    if weighted:
        dataset.write_values(WEIGHTS, {}, np.linspace(0, 1, len(dataset), dtype=np.float32))
    made = make(dataset, features(dataset) if config is KMEANS else None, config, 0, weighted)
    partitions.save(made, store, dataset)
    fields, key = store.get_json("partition/partition.json"), "partition/centroids.safetensors"
    tensors = store.get(key)
    for place in range(0, len(tensors), 7):  # header and values
        flipped = bytearray(tensors)
        flipped[place] ^= 1
        store.put(key, bytes(flipped))
        with pytest.raises(PartitionError, match=r"store/partition is damaged: [^\n]*$"):
            partitions.load(store)
    store.put(key, tensors.replace(b"I64", b"F64"))
    with pytest.raises(PartitionError, match="do not match the hash"):
        partitions.load(store)
    store.put(key, tensors)
    optional = {"column", "values", "capacities", "inertia", "revision", "buckets", "masses"}
    needed = [n for n in fields if n not in optional and (weighted or n != "weights")]
    changed = {name: {k: v for k, v in fields.items() if k != name} for name in needed}
    changed |= {f"other {name}": {**fields, name: 5} for name in fields if name != "warnings"}
    for what, about in changed.items():
        store.put_json("partition/partition.json", about)
        with pytest.raises(PartitionError) as caught:
            partitions.load(store)
        assert re.search("is damaged|is of no format|is not what Atoll writes", str(caught.value)), what
    store.put_json("partition/partition.json", [1])
    with pytest.raises(PartitionError, match="is not what Atoll writes"):
        partitions.load(store)
    store.put_json("partition/partition.json", fields)
    assert partitions.load(store).hash == made.hash


def test_odd_balances_are_told() -> None:
    assert imbalances([30, 30, 40]) == [] and imbalances([90, 10]) == []
    (large,) = imbalances([60, 20, 20])
    assert large.startswith("cluster 0 holds 60% of the rows, a catch-all: lower partition.max_share")
    (small,) = imbalances([398, 300, 301, 1])
    assert small == (
        "cluster 3 holds only 1 row, under a tenth of an even share: set partition.min_share=0.12,"
        " or lower partition.k"
    )


def test_contact_sheets_show_training_pictures_of_their_cluster(dataset: DataSet) -> None:
    made = make(dataset, features(dataset), KMEANS, 0)
    sheets = [partitions.contact_sheet(made, dataset, k) for k in range(3)]
    assert len(set(sheets)) == 3 and partitions.contact_sheet(made, dataset, 0) == sheets[0]
    with Image.open(io.BytesIO(sheets[0])) as sheet:
        assert sheet.width > 12 * 48


@pytest.mark.parametrize("limits", [{}, {"capacities": (3, 2, 1), "tolerance": 0.05}])
def test_neither_shards_nor_blocks_decide(
    dataset: DataSet, store: Store, monkeypatch: pytest.MonkeyPatch, limits: dict[str, object]
) -> None:
    config = PartitionConfig(k=3, fine=3, **limits)  # type: ignore[arg-type]
    first = make(dataset, features(dataset), config, 0)
    assert (len(first.prices) > 0) == bool(limits)
    other = write_subset(dataset, range(ROWS), store, "other", ["split", "features"], 17)
    monkeypatch.setattr(partitions, "_CHUNK", 7)
    again = make(other, other.column("features"), config, 0)
    assert np.array_equal(again.clusters, first.clusters) and again.sizes == first.sizes
    assert len(other.column("features")._mapped) == 1  # shards that lie behind are let go
    assert np.array_equal(first.assign(other, other.column("features")), first.clusters)
    partitions.save(first, store, dataset)
    assert np.array_equal(partitions.load(store).prices, first.prices)


def test_fewer_rows_than_fine_centroids_and_no_numbers(dataset: DataSet) -> None:
    assert make(dataset, features(dataset), PartitionConfig(k=3, fine=100_000), 0).k == 3
    change = np.zeros((ROWS, 8))
    change[dataset.split("train")[3], 2] = np.nan
    with pytest.raises(PartitionError, match="NaN or infinity"):
        make(dataset, features(dataset, change, "broken"), KMEANS, 0)


def by(column: str, k: int, **more: object) -> PartitionConfig:
    return PartitionConfig(method="column", column=column, k=k, **more)  # type: ignore[arg-type]


def numbers(dataset: DataSet, values: np.ndarray) -> None:
    dataset.write_values("owner", {"name": "test", "of": values.tolist()}, values)


def test_rows_of_one_value_stay_together(dataset: DataSet) -> None:
    owners = np.random.default_rng(0).integers(0, 10, ROWS)
    owners[:10] = range(10)
    numbers(dataset, owners)
    made = make(dataset, None, by("owner", 3), 0)
    assert sorted(int(v) for names in made.about.values for v in names) == list(range(10))
    assert all(str(o) in made.about.values[c] for o, c in zip(owners, made.clusters, strict=True))
    assert made.sizes == sorted(made.sizes, reverse=True) and made.sizes[0] < 1.3 * made.sizes[-1]
    assert "several values each: 0 (" in made.about.warnings[-1] and len(made.centroids) == 0
    assert np.array_equal(made.assign(dataset, None), made.clusters)
    wide = make(dataset, None, by("owner", 2, capacities=(1, 3), tolerance=0.2), 0)
    assert wide.sizes[1] == pytest.approx(3 * wide.sizes[0], rel=0.4)
    with pytest.raises(PartitionError, match=r"would hold .*, since rows of one owner stay together"):
        make(dataset, None, by("owner", 2, capacities=(1, 8), tolerance=0.01), 0)
    numbers(dataset, owners + (np.arange(ROWS) == 5) * 90)
    with pytest.raises(PartitionError, match=r"1 values of owner are in no cluster: '9\d' \(1 rows\)"):
        made.assign(dataset, None)


def test_clusters_without_held_out_rows_are_told(dataset: DataSet) -> None:
    numbers(dataset, np.where((dataset.sides == 0) & (np.arange(ROWS) % 3 == 0), 1, 0))
    made = make(dataset, None, by("owner", 2), 0)
    assert made.about.heldout[1] == 0 and "without a validation loss: 1" in made.about.warnings[0]
    assert not make(dataset, None, PartitionConfig(method="random", k=2), 0).about.warnings


def test_as_many_values_as_clusters_are_their_numbers(dataset: DataSet) -> None:
    values = np.arange(ROWS) % 12
    numbers(dataset, values)
    assert np.array_equal(make(dataset, None, by("owner", 12), 0).clusters, values)  # 10 is not before 2
    groups = make(dataset, None, by("group", 5), 0)
    assert len(groups.about.values) == 5 and sum(map(len, groups.about.values)) > 5


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (by("owner", 13), "owner has 12 values among the training rows for K = 13 clusters: lower"),
        (by("ovner", 3), "has no column 'ovner'.*owner"),
        (by("features", 3), "holds no whole number for each row"),
        (PartitionConfig(method="label", k=9), "label has 8 values among the training rows for K = 9"),
        (PartitionConfig(method="random", k=ROWS), f"K = {ROWS} clusters for 72 training rows"),
        (PartitionConfig(method="random", k=70), r"is empty: lower partition\.k"),
    ],
)
def test_cuts_that_are_refused(dataset: DataSet, config: PartitionConfig, what: str) -> None:
    numbers(dataset, np.arange(ROWS) % 12)
    with pytest.raises(AtollError, match=what):
        make(dataset, features(dataset), config, 0)


def test_random_clusters_in_proportion(dataset: DataSet) -> None:
    made = make(dataset, None, RANDOM.model_copy(update={"capacities": (8, 1, 1), "tolerance": 0.9}), 0)
    assert made.sizes[0] > 3 * max(made.sizes[1:])
    assert np.array_equal(made.assign(dataset, None), made.clusters)
