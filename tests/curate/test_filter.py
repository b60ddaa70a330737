"""Rows chosen by scores: quantiles of all and of each cluster, protected concepts, and what is refused."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.campaign.card_facts import model_card_facts
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import ReportTable, findings, of_clusters
from atoll.cli import main as cli
from atoll.curate.aesthetics.stages import COLUMN
from atoll.curate.concepts import Finder, Vocabulary
from atoll.data.weights import candidates
from helpers import Run, refused


@pytest.fixture(scope="module")
def made(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign with scores that fall with the row's number, higher by 0.5 in cluster 1."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("filter") / "c"))
    (folder / "concepts.txt").write_text("letter\nsmall letter\ngreek\ndigit\n")
    argv = ["concepts", "index", str(folder), "--vocabulary", str(folder / "concepts.txt")]
    cli.atoll.main(argv, standalone_mode=False)
    dataset, partition = Campaign.open(folder).clustered()
    score = 0.45 - 0.4 * np.arange(len(dataset)) / len(dataset) + 0.5 * (partition.clusters == 1)
    columns = {"id": dataset.ids[::-1], "MetaVoter": score[::-1], "Looks": np.ones(len(dataset)) / 2}
    pq.write_table(pa.table(columns), folder / "scores.parquet")
    argv = ["aesthetics", "score", str(folder), "--from", str(folder / "scores.parquet")]
    cli.atoll.main([*argv, "--sensitive", "Looks"], standalone_mode=False)
    return folder


def shares(folder: Path) -> tuple[float, list[float], float]:
    """Kept share of the training rows, and of each cluster's; a row's share of the smallest cluster."""
    dataset, partition = Campaign.open(folder).clustered()
    train = candidates(dataset)
    kept, homes = dataset.weights[train], partition.clusters[train]
    each = [float(kept[homes == number].mean()) for number in range(partition.k)]
    return float(kept.mean()), each, 1 / min(partition.sizes)


def test_every_cluster_keeps_its_share(campaign: Path, run: Run):
    for quantile in (0.25, 0.5, 0.9):
        argv = ["data", "filter", campaign, "--keep", f"score >= q{quantile}"]
        assert run(*argv, "--per-cluster").code == 0
        whole, each, row = shares(campaign)
        assert each == pytest.approx([1 - quantile] * len(each), abs=max(0.01, row))
        assert whole == pytest.approx(1 - quantile, abs=0.01)
        assert run(*argv).code == 0
        whole, each, _ = shares(campaign)
        assert whole == pytest.approx(1 - quantile, abs=0.01)
        assert each[1] > each[0] + 0.1  # cluster 1 scores higher


def test_what_is_kept_is_told_and_drawn(campaign: Path, run: Run):
    dry = run("data", "filter", campaign, "--keep", "score >= 0.3", "--dry-run")
    dataset = Campaign.open(campaign).dataset()
    assert not dataset.has_column("weights") and not (campaign / "reports" / "kept.txt").exists()
    real = run("data", "filter", campaign, "--keep", "score >= 0.3", "--keep", "width <= 99999")
    assert dry.out.splitlines() == real.out.splitlines()[:-1]
    dataset, store = Campaign.open(campaign).dataset(), Campaign.open(campaign).store
    weights, train = dataset.weights, candidates(dataset)
    kept = (campaign / "reports" / "kept.txt").read_text().split("\n")[:-1]
    assert kept == [dataset.ids[row] for row in train if weights[row] == 1]
    assert set(weights.tolist()) == {0.0, 1.0} and weights[dataset.split("heldout")].min() == 1
    left = {table.title: table for table in findings(store)}
    scores = {row[0]: row[1] for row in left["Scores of the pictures"].rows}
    told = {k: f"mean score {scores[f'cluster {k}']}" for k in (0, 1)}
    assert of_clusters(store) == told == model_card_facts(Campaign.open(campaign), {})["data"]["clusters"]
    table = left["Rows that were kept"]
    assert table.rows[0][1:3] == [len(train), len(kept)]
    assert [row[0] for row in table.rows[1:3]] == ["cluster 0", "cluster 1"]
    with pytest.raises(ValueError, match="another number of cells"):
        ReportTable(title="t", text="x", columns=["a", "b"], rows=[["1"]])


def test_protected_concepts_are_whole(campaign: Path, run: Run):
    (campaign / "tail.txt").write_text("Greeks\n\ndigits\n")
    protect = "--protect", campaign / "tail.txt"
    assert run("data", "filter", campaign, "--keep", "score > 0.9", *protect).code == 0
    opened = Campaign.open(campaign)
    dataset, train = opened.dataset(), candidates(opened.dataset())
    finder = Finder(Vocabulary.read(opened.store, Vocabulary.PLACE))
    texts = dataset.table(["caption"])["caption"].to_pylist()
    safe = np.array([bool({2, 3} & set(finder(texts[row]))) for row in train])
    scores = dataset.column(COLUMN).read(train)[:, 0].numpy()
    assert safe.any() and (dataset.weights[train] == (safe | (scores > 0.9))).all()


def test_other_scores_give_other_weights(campaign: Path, run: Run):
    table, weights = pq.read_table(campaign / "scores.parquet"), []
    for order in (1, -1):
        given = table.set_column(1, "MetaVoter", [pa.array(table["MetaVoter"].to_numpy()[::order])])
        pq.write_table(given, campaign / "scores.parquet")
        run("aesthetics", "score", campaign, "--from", campaign / "scores.parquet")
        assert run("data", "filter", campaign, "--keep", "score >= q0.5").code == 0
        weights.append(Campaign.open(campaign).dataset().weights)
    assert (weights[0] != weights[1]).any()


def test_weights_are_multiplied_if_so_asked(campaign: Path, run: Run):
    run("concepts", "rebalance", campaign, "--t", "5")
    before = Campaign.open(campaign).dataset().weights
    tried = run("data", "filter", campaign, "--keep", "score >= q0.5", "--dry-run").out
    assert "warning: the weights by rebalance are replaced: --times multiplies them instead" in tried
    assert "are replaced" not in run("data", "filter", campaign, "--keep", "score >= q0.5", "--times").out
    dataset = Campaign.open(campaign).dataset()
    after, train = dataset.weights, candidates(dataset)
    assert set(np.unique(after[train] / before[train])) == {0.0, 1.0}
    assert len(np.unique(before)) > 2
    # What is out stays out, and counts neither as kept nor for a quantile.
    again = run("data", "filter", campaign, "--keep", "score >= q0.5", "--times").out
    assert again.startswith("all: 19 of 38 rows kept (50.0%)")
    assert len((campaign / "reports" / "kept.txt").read_text().split()) == 19
    assert "weights by filter are replaced" in run("data", "filter", campaign, "--keep", "score >= 0").out
    told = run("concepts", "rebalance", campaign, "--t", "5", "--dry-run").out
    assert "the weights by filter are replaced: rebalance first" in told


def test_what_cannot_be_is_refused(campaign: Path, run: Run):
    (campaign / "wrong.txt").write_text("greek\nunicorn\n")
    for keep, *words in (
        ("score", "no condition"),
        ("score >= qq", "no condition"),
        ("score >= 1e", "no condition"),
        ("score >= q1.5", "quantile"),
        ("Beauty >= q0.5", "no score 'Beauty': use width, height, MetaVoter"),
        ("Looks >= q0.5", "describes a person", "--allow-sensitive"),
        ("score > 1", "keeps no row"),
    ):
        refused(run("data", "filter", campaign, "--keep", keep), *words)
    for name, words in (("gone.txt", "cannot read"), ("wrong.txt", "'unicorn' is no concept")):
        refused(run("data", "filter", campaign, "--keep", "score >= 0", "--protect", campaign / name), words)
    assert not Campaign.open(campaign).dataset().has_column("weights")
    assert run("data", "filter", campaign, "--keep", "Looks >= 0.5", "--allow-sensitive").code == 0


def test_scores_that_do_not_fit_are_refused(campaign: Path, run: Run):
    table = pq.read_table(campaign / "scores.parquet")
    for wrong, words in (
        (table.slice(3), "lacks 3 of"),
        (pa.concat_tables([table, table.slice(3)]), f"scores {len(table) - 3} rows again"),
        (table.set_column(1, "MetaVoter", pa.array([7.5] * len(table))), "is 7.5"),
        (table.set_column(1, "MetaVoter", pa.array([float("nan")] * len(table))), "is nan"),
        (table.select(["id"]), "columns of scores"),
        (table.drop(["id"]), "has no column 'id'"),
    ):
        pq.write_table(wrong, campaign / "wrong.parquet")
        refused(run("aesthetics", "score", campaign, "--from", campaign / "wrong.parquet"), words)
    pq.write_table(table.rename_columns(["id", "score", "Looks"]), campaign / "own.parquet")
    run("aesthetics", "score", campaign, "--from", campaign / "own.parquet")
    assert run("data", "filter", campaign, "--keep", "score >= q0.5").code == 0


def test_rows_are_kept_by_a_text_of_theirs(campaign: Path, run: Run):
    """A licence, a source, or any other text; commas between texts, and `not in` for all others."""
    dataset = Campaign.open(campaign).dataset()
    groups = dataset.table(["group"])["group"].to_pylist()
    train = dataset.split("train")
    one, other = sorted({groups[row] for row in train})[:2]
    chosen = np.array([groups[row] in (one, other) for row in train])
    argv = ["data", "filter", campaign, "--keep"]
    for text, kept in ((f"in ({one}, {other})", chosen), (f"not in ({one},{other})", ~chosen)):
        assert run(*argv, f"group {text}", "--keep", "width >= 1").code == 0
        assert (Campaign.open(campaign).dataset().weights[train] == kept).all()
    refused(run(*argv, f"group in ({one}, nothing)"), "no row has the group 'nothing'")
    refused(run(*argv, "licence in (MIT)"), "rows have no 'licence'", "they have id, caption")
    for text in ("group in ()", f"group in ({one}) extra"):
        refused(run(*argv, text), "is no condition")
