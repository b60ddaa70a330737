"""Weights by concepts: the rule, and that experts and router draw by the same ones."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import RunPlan
from atoll.cli import main as cli
from atoll.curate.concepts import Finder, Vocabulary
from atoll.data.dataset import DataSet
from atoll.data.order import Order
from atoll.data.partition import load
from atoll.train.run import train_run
from helpers import Run, refused, write_campaign

CONCEPTS = ["letter", "small letter", "capital letter", "greek", "unicorn"]


@pytest.fixture(scope="module")
def made(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("rebalance") / "c"))
    (folder / "concepts.txt").write_text("\n".join(CONCEPTS))
    argv = ["concepts", "index", str(folder), "--vocabulary", str(folder / "concepts.txt")]
    cli.atoll.main(argv, standalone_mode=False)
    return folder


def expected(folder: Path, t: float, per_expert: bool = False, other: float = 1.0) -> list[float]:
    """The rule, row by row."""
    dataset, partition = Campaign.open(folder).clustered()
    finder = Finder(Vocabulary.read(Campaign.open(folder).store, Vocabulary.PLACE))
    found = [finder(text) for text in dataset.table(["caption"])["caption"].to_pylist()]
    homes = partition.clusters if per_expert else np.zeros(len(found), dtype=int)
    counts: Counter[tuple[int, int]] = Counter()
    for row in dataset.split("train"):
        counts.update((int(homes[row]), concept) for concept in found[row])
    weights = []
    for row, concepts in enumerate(found):
        dropped = 1.0
        for concept in concepts:
            dropped *= 1 - t / max(counts[int(homes[row]), concept], t)
        weights.append(1 - dropped if concepts else other)
    return weights


def test_a_row_is_kept_as_likely_as_any_of_its_concepts_keeps_it(campaign: Path, run: Run):
    for t, options in ((5, []), (20, ["--other", "0.25"]), (3, ["--per-expert"])):
        answer = run("concepts", "rebalance", campaign, "--t", str(t), *options)
        assert answer.code == 0
        dataset = Campaign.open(campaign).dataset()
        wanted = expected(campaign, t, "--per-expert" in options, 0.25 if "--other" in options else 1.0)
        weights = dataset.weights
        assert weights.tolist() == pytest.approx(wanted, abs=1e-6) and weights.min() < 0.5 < weights.max()
        assert f"an epoch has {weights[dataset.split('train')].sum():,.0f} of 76 training rows" in answer.out


def test_a_target_finds_its_t_and_a_dry_run_writes_nothing(campaign: Path, run: Run):
    argv = ["concepts", "rebalance", campaign, "--target-size", "30"]
    answer = run(*argv, "--dry-run")
    assert answer.code == 0 and "an epoch has 30 of 76" in answer.out and "expert 1: " in answer.out
    assert not Campaign.open(campaign).dataset().has_column("weights")
    assert run(*argv).code == 0
    dataset = Campaign.open(campaign).dataset()
    assert 29 < dataset.weights[dataset.split("train")].sum() <= 30
    refused(run("concepts", "rebalance", campaign, "--target-size", "1"), "no t keeps as few")
    refused(run("concepts", "rebalance", campaign, "--target-size", "77"), "76 training rows")
    refused(run("concepts", "rebalance", campaign), "--t or --target-size")
    refused(run("concepts", "rebalance", campaign, "--t", "nan"), "'--t'", "finite")
    refused(run("concepts", "rebalance", campaign, "--t", "5", "--other", "nan"), "'--other'", "finite")
    (campaign / "none.txt").write_text("unicorn")
    run("concepts", "index", campaign, "--vocabulary", campaign / "none.txt")
    refused(run("concepts", "rebalance", campaign, "--t", "5", "--other", "0"), "would have any weight")


@pytest.fixture
def weighted(campaign: Path, run: Run) -> Path:
    """Another campaign on the same data, which draws by weight."""
    run("concepts", "rebalance", campaign, "--t", "4")
    folder = write_campaign(campaign.parent / "w", {"data": {"path": "../c/data", "weighted": True}})
    assert run("partition", folder).code == 0
    return folder


def test_experts_and_router_draw_by_the_same_weights(campaign: Path, weighted: Path):
    plain, drawn = (load(Campaign.open(folder).store) for folder in (campaign, weighted))
    assert np.array_equal(plain.clusters, drawn.clusters) and plain.hash != drawn.hash
    dataset = Campaign.open(weighted).dataset()
    weights, train = dataset.weights, dataset.split("train")
    masses = np.bincount(drawn.clusters[train], weights[train], 2)
    assert drawn.masses == pytest.approx(masses.tolist()) and plain.masses == plain.sizes
    store = Campaign.open(weighted).store
    plans = [RunPlan.read(store, f"islands/{number}/island.json") for number in (0, 1)]
    assert plans[0].steps / plans[1].steps == pytest.approx(masses[0] / masses[1], rel=0.1)
    ids = dict(zip(dataset.ids, weights, strict=True))
    for run in ("islands/0", "islands/1", "router"):
        own = DataSet.open(store, f"{run}/data")
        rows = own.split("train")
        order = Order.weighted(own.weights[rows], 0, own.id_hash)
        seen = np.bincount(order.at(range(400 * order.rows)), minlength=len(rows)) / 400
        assert seen == pytest.approx([ids[own.ids[row]] for row in rows], abs=0.1)
        assert RunPlan.read(store, f"{run}/island.json").weighted


def test_parts_of_other_weights_make_no_ensemble(campaign: Path, weighted: Path, run: Run):
    runs = [("expert", 0), ("expert", 1), ("router", None)]
    for folder, role, number in (*((weighted, *each) for each in runs), (campaign, "expert", 1)):
        train_run(Campaign.open(folder), role, number)
    assert run("assemble", weighted).code == 0
    card = run("export", weighted, "--to", weighted.parent / "out")
    assert card.code == 0 and '"name": "rebalance"' in (weighted.parent / "out" / "README.md").read_text()
    shutil.rmtree(weighted / "islands/1")
    shutil.copytree(campaign / "islands/1", weighted / "islands/1")
    shutil.rmtree(weighted / "ensemble")
    refused(run("assemble", weighted), "partition")


def test_an_island_without_its_weights_does_not_train(weighted: Path, run: Run):
    shutil.rmtree(weighted / "islands/0/data/columns/weights")
    refused(run("train", "expert", weighted, "--expert", "0"), "weights")


def test_weights_that_are_none(campaign: Path, run: Run):
    dataset = Campaign.open(campaign).dataset()
    folder = write_campaign(campaign.parent / "w", {"data": {"path": "../c/data", "weighted": True}})
    refused(run("partition", folder), "no column 'weights'")
    wrong = dict.fromkeys((-1.0, np.nan, np.inf), "negative or no number")
    for value, words in (wrong | {0.0: "no training row has any weight"}).items():
        dataset.write_values("weights", {"name": str(value)}, np.full(len(dataset), value, dtype=np.float32))
        refused(run("partition", folder), words)
    # Shares that a rebalance tells are of all that it weighs, also of rows that the partition left out.
    dataset.write_values("weights", {"name": "half"}, np.arange(len(dataset), dtype=np.float32) % 2)
    assert run("partition", folder).code == 0
    shutil.copytree(campaign / "concepts", folder / "concepts")
    assert run("concepts", "rebalance", folder, "--t", "99", "--dry-run").out.count(" rows (100.0%)") == 2
