"""What happens to a partition later: new rows are given to its clusters, and rows opt out of it."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from atoll.base.errors import DataError, PartitionError
from atoll.campaign import after_partition
from atoll.campaign.after_partition import assign_new_rows, opt_out_stage
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import findings
from atoll.campaign.runs import read_partition
from atoll.data import partition as partitions
from atoll.data import weights
from atoll.data.dataset import WEIGHTS, DataSet
from atoll.data.weights import DUPLICATES, leave_duplicates_out, out_for_good
from atoll.store.lease import Held, LeaseConfig, acquire, new_holder
from atoll.store.log import Log
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import command, partitioned


@pytest.fixture
def campaign(made: Path, tmp_path: Path) -> Campaign:
    """One of its own for every test, at `c`."""
    return Campaign.open(shutil.copytree(made, tmp_path / "c"))


def digests(folder: Path) -> dict[str, str]:
    """Digest of every file by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def listed(campaign: Campaign, folder: Path, island: int) -> tuple[Path, list[int]]:
    """A list of two rows of an island, one by its id and one by the digest of its source."""
    dataset, partition = campaign.clustered()
    rows = [int(row) for row in partition.rows(island, dataset)[:2]]
    names = [dataset.ids[rows[0]], dataset.take([rows[1]])["sha256"][0].as_py(), "nobody", ""]
    path = folder / "leaving.txt"
    path.write_text("\n".join(names))
    return path, rows


def test_only_the_islands_of_rows_that_leave_are_written_again(
    campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = listed(campaign, tmp_path, 1)
    before, old = digests(tmp_path / "c"), partitions.load(campaign.store)
    assert opt_out_stage(campaign, path) == [1]
    assert "1 of 3 lines name no row: nobody" in capsys.readouterr().out
    after, new = digests(tmp_path / "c"), partitions.load(campaign.store)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    columns = ("data/columns/weights/", "data/columns/opted_out/")
    assert not [n for n in changed if n.startswith(("islands/0", "data/")) and not n.startswith(columns)]
    assert {"islands/1/data/manifest.json", "islands/1/island.json", "router/island.json"} <= changed
    assert new.hash == old.hash and new.about.revision != old.about.revision is None
    assert sum(new.sizes) + sum(new.about.heldout) == new.about.rows - 2
    assert read_partition(campaign.store).sizes == new.sizes  # the runs' plans agree
    island = DataSet.open(campaign.store, "islands/1/data")
    dataset = Campaign.open(tmp_path / "c").dataset()
    assert np.flatnonzero(dataset.weights == 0).tolist() == rows and not {*rows} & {*new.rows(1, dataset)}
    assert not {dataset.ids[row] for row in rows} & set(island.ids)
    assert not set(rows) & {int(row) for name in ("train", "heldout") for row in dataset.split(name)}
    assert opt_out_stage(campaign, path) == [] and digests(tmp_path / "c") == after
    train_run(Campaign.open(tmp_path / "c"), "expert", 1)
    path.write_text(dataset.ids[int(new.rows(0, dataset)[0])])
    assert opt_out_stage(campaign, path) == [0]  # joins with the island that was written before
    told = command(capsys, "data", "filter", tmp_path / "c", "--keep", "width >= 1")
    assert told.code == 0 and (Campaign.open(tmp_path / "c").dataset().weights == 0).sum() == 3


def test_campaigns_of_one_data_set_lose_the_same_rows(campaign: Campaign, tmp_path: Path) -> None:
    other = partitioned(tmp_path / "o", {"data": {"path": "../c/data"}})
    path, rows = listed(campaign, tmp_path, 1)
    path.write_text("\ufeff" + path.read_text())  # as editors of Windows do
    gone = {campaign.dataset().ids[row] for row in rows}
    for each in (campaign, other):
        assert opt_out_stage(each, path) == [1] and opt_out_stage(each, path) == []
        assert not gone & {*DataSet.open(each.store, "islands/1/data").ids}
    dataset = campaign.dataset()
    last = len(dataset) - 1  # a third one takes it for a duplicate
    assert leave_duplicates_out(dataset, np.arange(len(dataset)) == last) is None
    assert np.flatnonzero(dataset.weights == 0).tolist() == [*rows, last]


def test_what_was_trained_on_them_goes_only_when_asked(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        train_run(campaign, "expert", number)
    path, _ = listed(campaign, tmp_path, 0)
    before = digests(tmp_path / "c")
    with pytest.raises(PartitionError, match="expert 0 learned from rows that leave: add --retrain"):
        opt_out_stage(campaign, path)
    assert digests(tmp_path / "c") == before
    delete, times = obstore.delete, iter("123")
    monkeypatch.setattr(obstore, "delete", lambda *args: (next(times), delete(*args)))
    with pytest.raises(StopIteration):
        opt_out_stage(campaign, path, retrain=True)
    monkeypatch.undo()
    opt_out_stage(campaign, path, retrain=True)  # goes on
    assert not campaign.store.list("islands/0/expert") and not campaign.store.list("islands/0/run")
    assert campaign.store.list("islands/1/expert")


def test_a_run_that_somebody_trains_is_not_removed(campaign: Campaign, tmp_path: Path) -> None:
    acquire(Log(campaign.store.sub("router/run"), new_holder()), LeaseConfig())
    before, (path, _) = digests(tmp_path / "c"), listed(campaign, tmp_path, 0)
    with pytest.raises(Held, match="router is in training: its last sign is 0 s old: stop it"):
        opt_out_stage(campaign, path, retrain=True)
    assert digests(tmp_path / "c") == before


def test_opting_out_goes_on_where_it_was_killed(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = campaign, Campaign.open(shutil.copytree(tmp_path / "c", tmp_path / "killed"))
    path, _ = listed(whole, tmp_path, 0)
    opt_out_stage(whole, path)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("write_subset", "union", "cluster_map", "digest", "write_weights"):
        with monkeypatch.context() as patch:
            patch.setattr(after_partition if hasattr(after_partition, place) else weights, place, die)
            with pytest.raises(KeyboardInterrupt):
                opt_out_stage(killed, path)
    opt_out_stage(killed, path)
    assert digests(tmp_path / "c") == digests(tmp_path / "killed")


def test_lists_and_data_sets_that_do_not_fit(campaign: Campaign, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none.txt"):
        opt_out_stage(campaign, tmp_path / "none.txt")
    dataset = campaign.dataset()
    path = tmp_path / "all.txt"
    path.write_text("\n".join(dataset.ids))
    with pytest.raises(PartitionError, match="would be left without rows to train on"):
        opt_out_stage(campaign, path)
    for text in ("", "nobody\nnothing"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"no line of .* names a row"):
            opt_out_stage(campaign, path)
    with pytest.raises(DataError, match="there is no data set at"):
        assign_new_rows(campaign, str(tmp_path / "nothing"))


def test_a_duplicate_that_opts_out_changes_no_island(campaign: Campaign, tmp_path: Path) -> None:
    dataset = campaign.dataset()
    of = np.arange(len(dataset))
    of[5:7] = 4
    leave_duplicates_out(dataset, of != np.arange(len(dataset)))
    dataset.write_values(DUPLICATES, {"name": "dedupe"}, of)
    campaign = partitioned(tmp_path / "d", {"data": {"path": "../c/data"}})
    cut = partitions.load(campaign.store)
    assert not {5, 6} & {row for k in range(2) for row in cut.rows(k, dataset)} and cut.about.weights
    train_run(campaign, "monolith")
    path, rows = listed(campaign, tmp_path, 1)
    before = digests(tmp_path / "d/islands"), digests(tmp_path / "d/monolith")
    path.write_text(dataset.ids[5])
    assert opt_out_stage(campaign, path) == []
    assert (digests(tmp_path / "d/islands"), digests(tmp_path / "d/monolith")) == before
    dataset.write_values(DUPLICATES, {"name": "none"}, np.arange(len(dataset)))
    assert np.flatnonzero(out_for_good(Campaign.open(tmp_path / "d").dataset())).tolist() == [5]
    dataset.write_values(DUPLICATES, {"name": "dedupe"}, of)
    path.write_text(f"{dataset.ids[5]}\n{dataset.ids[rows[0]]}")
    assert opt_out_stage(Campaign.open(tmp_path / "d"), path, retrain=True) == [1]
    dataset.write_values("split", {"name": "other"}, np.where(dataset.sides == 1, 0, dataset.sides))
    with pytest.raises(PartitionError, match="was split again after the partition"):
        Campaign.open(tmp_path / "d").clustered()


def test_weights_that_changed_since_are_told_and_nothing_is_lost(
    campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = campaign.dataset()
    dataset.write_values(WEIGHTS, {"name": "sources"}, np.full(len(dataset), 0.5, np.float32))
    campaign = partitioned(tmp_path / "w", {"data": {"path": "../c/data", "weighted": True}})
    told = capsys.readouterr().out
    assert "% of the weight, " in told and "steps follow the weights of its rows" in told
    train_run(campaign, "expert", 0)
    path, _ = listed(campaign, tmp_path, 0)
    assert opt_out_stage(campaign, path, retrain=True) == [0]  # islands of the same weights join

    told = command(capsys, "data", "filter", tmp_path / "w", "--keep", "width >= 1")
    assert told.code == 0 and "weights by sources are replaced" in told.out
    before = digests(tmp_path / "w")
    first = partitions.load(campaign.store).rows(0, campaign.dataset())[0]
    path.write_text(campaign.dataset().ids[int(first)])
    with pytest.raises(PartitionError, match=r"weights .* are no longer those"):
        opt_out_stage(Campaign.open(tmp_path / "w"), path, retrain=True)
    told = command(capsys, "partition", tmp_path / "w")
    assert told.code == 0 and "weights have changed" in told.out
    assert told.out.startswith("partition: finished already, 2 clusters of 74 training rows\n")
    assert digests(tmp_path / "w") == before


def test_new_rows_get_the_clusters_that_they_would_have_had(
    campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"data": {"ingest": {"glyphs": {"limit": 100}}}}
    more = partitioned(tmp_path / "more", other).dataset()
    before = digests(tmp_path / "c")
    capsys.readouterr()
    clusters = assign_new_rows(campaign, more.store.location)
    _, head, *rows, last, place = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["cluster", "new", "rows"] and last.split()[:2] == ["all", str(len(more))]
    assert sorted(int(row.split()[2]) for row in rows) == sorted(np.bincount(clusters).tolist())
    assert place.startswith("all 2 clusters: ") and "reports/findings/new-rows.json" in place
    own = dict(zip(campaign.dataset().ids, partitions.load(campaign.store).clusters.tolist(), strict=True))
    both = [(own[name], int(c)) for name, c in zip(more.ids, clusters, strict=True) if name in own]
    assert len(both) > 20 and all(a == b for a, b in both)
    column = DataSet.open(Store.open(more.store.location)).column("clusters")
    assert column.read(range(len(more))).tolist() == clusters.tolist()
    (found,) = findings(campaign.store)
    assert [row[1] for row in found.rows][-1] == len(more) == sum(int(row[1] or 0) for row in found.rows[:-1])
    after = digests(tmp_path / "c")
    assert {n for n in after if after[n] != before.get(n)} == {"reports/findings/new-rows.json"}
    # A campaign on the new rows with an island for each cluster.
    by = {"method": "column", "column": "clusters", "k": 2}
    own_data = {"path": more.store.location, **other["data"]}
    following = partitioned(tmp_path / "next", {"partition": by, "data": own_data})
    assert partitions.load(following.store).clusters.tolist() == clusters.tolist()
