"""`atoll diagnose` on a campaign that went the whole way."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from helpers import Run, refused

QUICK = [
    "diagnose.samples=16",
    "diagnose.probed=5",
    "diagnose.steps=3",
    "diagnose.rows=60",
    "diagnose.batch=20",
    "diagnose.times=[0.25, 1.0]",
    "diagnose.threads=1",
]


@pytest.fixture
def diagnose(staged: Run) -> Run:
    return lambda folder, *settings: staged("diagnose", folder, *QUICK, *settings)


def table(folder: Path, name: str) -> list[dict[str, object]]:
    found = json.loads((folder / "reports/diagnostics.json").read_text())["tables"][name]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "campaign"))


def test_tables_are_written_once_per_parts_and_settings(folder: Path, diagnose: Run) -> None:
    said = diagnose(folder, "diagnose.splits=[heldout, train]", "diagnose.quantile=0.999")
    assert said.code == 0 and "router: accuracy" in said.out and "error of monolith" in said.out
    found = json.loads((folder / "reports/diagnostics.json").read_text())
    assert set(found["parts"]) == {"experts/0", "experts/1", "router", "monolith"} and found["missing"] == []
    for name, columns in ((n, t["columns"]) for n, t in found["tables"].items()):
        lines = list(csv.reader(io.StringIO((folder / f"reports/diagnostics/{name}.csv").read_text())))
        assert lines[0] == columns and len(lines) == 1 + len(found["tables"][name]["rows"])
    assert {r["split"] for r in table(folder, "errors")} == {"heldout", "train"}
    assert {r["strategy"] for r in table(folder, "usage")} == {"once", "top-1"}
    assert sum(r["used"] for r in table(folder, "usage")) == pytest.approx(2)  # type: ignore[misc]
    assert all(r["rate"] == 0 for r in table(folder, "switches") if r["strategy"] == "once")
    steady = {r["strategy"]: r for r in table(folder, "stability")}
    assert list(steady) == ["once", "top-1", "monolith"] and {r["samples"] for r in steady.values()} == {5}
    assert all(r["sensitivity"] > 0 and r["refinement"] > 0 for r in steady.values())  # type: ignore[operator]
    assert [r["t"] for r in table(folder, "lipschitz")] == pytest.approx([1, 2 / 3, 1 / 3] * 3)
    ends = [r for r in table(folder, "landing") if r["cluster"] == "all"]
    assert [r["samples"] for r in ends] == [16, 16]
    assert all(r["own"] < r["heldout_others"] for r in ends)  # type: ignore[operator]
    sizes = json.loads((folder / "partition/partition.json").read_text())
    (rows,) = {r["rows"] for r in table(folder, "router") if r["split"] == "heldout"}
    assert rows == min(60, sum(sizes["heldout"]))
    pairs = found["pictures"]
    assert len(pairs) == len(table(folder, "suspicious")) > 0
    assert [r["cluster"] for r in table(folder, "closest")] == [0, 1] and len(found["closest"]) == 2
    for pair in (*pairs, *found["closest"]):
        for key in (pair["sample"], pair["training"]):
            with Image.open(folder / key) as picture:
                picture.load()

    again = diagnose(folder, "diagnose.splits=[heldout, train]", "diagnose.quantile=0.999")
    assert again.out == "diagnose: finished already\n"
    other = diagnose(
        folder, "diagnose.splits=[heldout, train]", "diagnose.quantile=0.999", "diagnose.batch=7"
    )
    assert other.out == "diagnose: finished already\n"
    assert "finished" not in diagnose(folder, "diagnose.samples=0").out
    assert "usage" not in json.loads((folder / "reports/diagnostics.json").read_text())["tables"]


@pytest.mark.parametrize("change", ["diagnose.batch=7", "sampling.residency.experts=1"])
def test_numbers_do_not_depend_on_batches_or_on_where_experts_lie(
    folder: Path, diagnose: Run, change: str
) -> None:
    rows = []
    for setting in ("diagnose.batch=1000", change):
        (folder / "reports/diagnostics.json").unlink(missing_ok=True)
        assert diagnose(folder, setting).code == 0
        names = ("errors", "usage", "stability", "lipschitz", "landing")
        rows.append([v for name in names for r in table(folder, name) for v in r.values()])
    assert len(rows[0]) == len(rows[1])
    for one, other in zip(*rows, strict=True):
        assert one == (pytest.approx(other, rel=1e-4, abs=1e-6) if isinstance(other, float) else other)


def test_a_partial_ensemble_is_told(folder: Path, diagnose: Run) -> None:
    shutil.rmtree(folder / "islands/1/expert")
    assemble(Campaign.open(folder))
    said = diagnose(folder, "diagnose.splits=[train]")
    assert said.code == 0 and "experts 1 are missing and left out" in said.out
    assert json.loads((folder / "reports/diagnostics.json").read_text())["missing"] == [1]
    assert {r["expert"] for r in table(folder, "experts")} == {0}
    own = {(r["cluster"], r["error"] is None) for r in table(folder, "errors") if r["model"] == "own"}
    assert own == {("all", False), (0, False), (1, True)}


def test_copies_of_the_monolith_are_counted_beside_the_ensembles(folder: Path, diagnose: Run) -> None:
    assert diagnose(folder, "diagnose.probed=0").code == 0
    rows = {row["cluster"]: row for row in table(folder, "nearest")}
    assert list(rows)[-1] == "monolith"
    monolith, ensemble = rows["monolith"], rows["all"]
    assert monolith["samples"] == ensemble["samples"] and monolith["distance"] != ensemble["distance"]
    assert monolith["distance_heldout"] == ensemble["distance_heldout"]
    shutil.rmtree(folder / "monolith/expert")
    assert diagnose(folder, "diagnose.probed=0").code == 0
    assert "monolith" not in {row["cluster"] for row in table(folder, "nearest")}
    assert {r["model"] for r in table(folder, "errors")} == {"own", "selected", "others", "mixture"}

    # Another extractor knows nothing of the clusters.
    other = ("diagnose.extractor=efficientnet-lite2", "diagnose.extractor_size=32", "diagnose.probed=0")
    assert diagnose(folder, *other).code == 0
    tables = json.loads((folder / "reports/diagnostics.json").read_text())["tables"]
    assert "nearest" in tables and not {"landing", "stability", "lipschitz"} & set(tables)


def test_without_held_out_rows_it_says_what_to_do(folder: Path, diagnose: Run) -> None:
    dataset = Campaign.open(folder).dataset()
    shutil.rmtree(dataset.store.path("columns/split/column.json").parent)
    everything = {n: torch.zeros(shard.rows, dtype=torch.uint8) for n, shard in enumerate(dataset.shards)}
    dataset.write_column("split", {"name": "none held out"}, lambda n: {"values": everything[n]})
    partition = folder / "partition/partition.json"
    tree = json.loads(partition.read_text())
    tree |= {
        "sizes": [sum(rows) for rows in zip(tree["sizes"], tree["heldout"], strict=True)],
        "heldout": [0, 0],
    }
    partition.write_text(json.dumps(tree))
    refused(diagnose(folder), "no held-out rows", "diagnose.splits=[train]")
    said = diagnose(folder, "diagnose.splits=[train]", "diagnose.conditions=train")
    assert said.code == 0
    assert "nearest" not in json.loads((folder / "reports/diagnostics.json").read_text())["tables"]
