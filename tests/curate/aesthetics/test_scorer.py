"""Scorers: what the heads see, what they learn, and that a saved one scores as it did."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageFilter
from scipy import stats

from atoll.base.errors import AtollError, ConfigError
from atoll.curate.aesthetics.readers import LanguageReader
from atoll.curate.aesthetics.scale import HEADS, Labels, Scale, read_labels
from atoll.curate.aesthetics.scorer import ExpertHead, Scorer, Training, default_training, split
from atoll.curate.aesthetics.stages import agreement, score_folder
from helpers import Run, refused
from helpers_vlm import save_llava

TREE = {"Sharp": "All", "Bright": "All", "All": None}
SCALE = Scale.parse({"dimensions": [{"name": n, "parent": p} for n, p in TREE.items()]}, "test")
BACKBONE = "efficientnet-lite0@32"


def pictures(folder: Path, groups: int = 12, each: int = 6) -> Path:
    """Labelled crops of noise, blurred and darkened, the whole alone for half of them."""
    random, rows = np.random.default_rng(0), []
    for group in range(groups):
        blocks = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((32, 32))
        for number in range(each):
            sharp, bright = (float(value) for value in random.uniform(0, 1, 2))
            picture = blocks.filter(ImageFilter.GaussianBlur(6 * (1 - sharp)))
            picture = picture.point(lambda value, bright=bright: int(value * (0.2 + 0.8 * bright)))
            picture.save(folder / f"{group}-{number}.png")
            whole = (sharp + bright) / 2
            scores = [sharp, bright, whole] if number % 2 else [None, None, whole]
            rows.append({"image": f"{group}-{number}.png", "scores": scores, "group": f"g{group}"})
    pq.write_table(pa.Table.from_pylist(rows), folder / "labels.parquet")
    return folder / "labels.parquet"


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    return read_labels(pictures(tmp_path_factory.mktemp("labels")), SCALE)


def gradients(module: torch.nn.Module) -> dict[str, bool]:
    return {name: p.grad is not None for name, p in module.named_parameters()}


def test_the_published_scale_is_its_tree():
    human = Scale.load("human")
    whole = {human.names[human.root]: {human.names[n] for n in human.parts[human.root]}}
    parts = {"Facial Aesthetic Score", "Environment", "General Appearance Aesthetic Score"}
    assert whole == {"Comprehensive Aesthetic Score": parts}
    assert [len(parts) for parts in human.parts] == [0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 3, 3]
    assert human.question(0, whole=False).endswith("of the human image from 12 different dimensions?")
    answer = "1. Facial Brightness : bad\n2. Facial Feature Clarity : excellent"
    assert human.answers([0, 4] + [-1] * 10) == answer
    scores = torch.tensor([0.0, 0.19, 0.2, 0.59, 0.6, 0.99, 1.0, float("nan")])
    assert human.level(scores).tolist() == [0, 0, 1, 2, 3, 4, 4, -1]


def test_connections_that_are_not_in_the_tree_do_not_exist():
    human = Scale.load("human")
    head = ExpertHead(human, 7)
    scores = head(torch.randn(2, 7, requires_grad=True))
    assert scores.shape == (2, 12)
    for number, name in enumerate(human.names):
        head.zero_grad(set_to_none=True)
        scores[:, number].sum().backward(retain_graph=True)
        below, new = {number}, {number}
        while new := {part for one in new for part in human.parts[one]}:
            below |= new
        assert {n for n, node in enumerate(head.nodes) if bool(node.bias.grad)} == below, name
    assert [node.weight.shape[1] for node in head.nodes] == [len(parts) or 7 for parts in human.parts]


@pytest.mark.parametrize("backbone", ["features", "vlm"])
def test_a_batch_of_one_kind_leaves_the_other_head_without_gradients(backbone: str, tmp_path: Path):
    name = f"vlm:{save_llava(tmp_path)}" if backbone == "vlm" else BACKBONE
    scorer = Scorer(SCALE, name)
    seen = scorer.reader.look([Image.new("RGB", (32, 32), (number * 60,) * 3) for number in range(3)])
    whole = torch.tensor([[float("nan"), float("nan"), value] for value in (0.1, 0.5, 0.9)])
    every = torch.tensor([[0.1, 0.3, 0.2], [0.4, float("nan"), 0.6], [0.9, 0.9, 0.9]])
    for scores, is_whole, used in ((whole, True, "regression"), (every, False, "expert")):
        scorer.zero_grad(set_to_none=True)
        sum(scorer.losses(seen, scores, is_whole)).backward()
        assert {name.split(".")[0] for name, has in gradients(scorer.heads).items() if has} == {used}
        assert any(gradients(scorer.reader).values())
        assert not any(p.grad is not None for p in scorer.voter.parameters())
    if isinstance(scorer.reader, LanguageReader):
        trained = [name for name, p in scorer.reader.named_parameters() if p.requires_grad]
        assert trained and all("lora" in name for name in trained)


def test_the_language_models_score_is_that_of_its_level():
    scorer = Scorer(SCALE, BACKBONE).eval()
    for level, worth in enumerate(SCALE.worth):
        with torch.no_grad():
            scorer.reader.answer.weight.zero_()
            right = torch.nn.functional.one_hot(torch.tensor([level] * 3), 5)
            scorer.reader.answer.bias.copy_(right.flatten() * 99.0)
        said = scorer.scores([Image.new("RGB", (32, 32))])[0, 0]
        assert float(said) == pytest.approx(float(worth), abs=1e-6)


def test_a_scorer_learns_what_it_sees_and_scores_alike_when_it_is_loaded(
    labels: Labels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scorer = Scorer(SCALE, BACKBONE)
    done = scorer.fit(labels, Training(epochs=40, batch=32))
    assert done["rows"] == 72 and done["rows with the whole alone"] == 36 and done["groups"] == 12
    seen = [labels.open(row) for row in range(len(labels))]
    scores = scorer.scores(seen)
    assert scores.shape == (72, 3 + 3) and scorer.columns == (*HEADS, "Sharp", "Bright", "All")
    assert ((scores >= 0) & (scores <= 1)).all()
    for number in (*range(len(HEADS)), 5):
        assert stats.spearmanr(scores[:, number], labels.scores[:, 2]).statistic > 0.8
    scorer.save(str(tmp_path / "s"), done)
    again, file = Scorer.load(str(tmp_path / "s"))
    assert torch.equal(again.scores(seen), scores)
    assert file.scale == SCALE and file.training["epochs"] == 40
    assert torch.allclose(scorer.scores(seen[:1]), scores[:1], atol=1e-5)
    (tmp_path / "p").mkdir()
    seen[0].save(tmp_path / "p" / os.fsdecode(b"\xff.png"))
    (tmp_path / "p" / "cut.png").write_bytes((tmp_path / "p" / os.fsdecode(b"\xff.png")).read_bytes()[:99])
    score_folder(again, tmp_path / "p", tmp_path / "scores")
    said = capsys.readouterr().out
    assert "1 picture:" in said and "left out 1, the first for:" in said and "cut.png" in said
    assert pq.read_table(tmp_path / "scores")["image"].to_pylist() == ["\\udcff.png"]


def test_a_head_that_no_label_trained_is_named(tmp_path: Path, run: Run):
    table = pq.read_table(pictures(tmp_path, groups=4)).to_pylist()
    rated = [{**row, "scores": [None, None, row["scores"][2]]} for row in table]
    pq.write_table(pa.Table.from_pylist(rated), tmp_path / "labels.parquet")
    (tmp_path / "scale.yaml").write_text(json.dumps(SCALE.model_dump()))
    how = ["--scale", tmp_path / "scale.yaml", "--backbone", BACKBONE, "--epochs", "1"]
    note = "note: no label trained the dimensions (expert head): disregard those scores"
    trained = run("aesthetics", "train", tmp_path / "labels.parquet", *how, "--out", tmp_path / "s")
    assert note in trained.out, trained.err
    found = run("aesthetics", "evaluate", tmp_path / "labels.parquet", "--scorer", tmp_path / "s")
    assert note in found.out, found.err


def test_an_image_text_model_is_trained_by_lora_and_loaded(tmp_path: Path):
    path = save_llava(tmp_path)
    labels = read_labels(pictures(tmp_path, groups=4, each=4), SCALE)
    scorer = Scorer(SCALE, f"vlm:{path}")
    before = {name: p.clone() for name, p in scorer.reader.named_parameters()}
    done = scorer.fit(labels, default_training(f"vlm:{path}"))
    changed = {name for name, p in scorer.reader.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora" in name for name in changed)
    seen = [labels.open(row) for row in range(5)]
    scores = scorer.scores(seen)
    assert torch.allclose(scores, torch.cat([scorer.scores([one]) for one in seen]), atol=1e-4)
    scorer.save(str(tmp_path / "s"), done)
    assert torch.allclose(Scorer.load(str(tmp_path / "s"))[0].scores(seen), scores, atol=1e-6)


def test_groups_are_on_one_side(labels: Labels):
    first, second = split(labels, 0.25, 0)
    assert len({labels.groups[row] for row in second}) == 3
    assert not {labels.groups[row] for row in first} & {labels.groups[row] for row in second}
    alone = Labels(labels.names[:3], labels.scores[:3], ["one"] * 3, labels.open)
    with pytest.raises(AtollError, match="one group"):
        split(alone, 0.2, 0)


def test_agreement_is_that_of_scipy():
    random = np.random.default_rng(1)
    right = random.uniform(0, 1, 200)
    scores = np.clip(right + random.normal(0, 0.2, 200), 0, 1)
    found = agreement(scores, right)
    for name, of in {"PLCC": stats.pearsonr, "SRCC": stats.spearmanr, "KRCC": stats.kendalltau}.items():
        assert found[name] == of(scores, right).statistic
    assert found["published MSE"] == pytest.approx(np.sqrt(((scores - right) ** 2).mean() + 1e-8))
    assert found["published MAE"] == pytest.approx(np.sqrt(np.abs(scores - right).mean() + 1e-8))
    assert np.isnan(agreement(np.full(9, 0.5), right[:9])["SRCC"])


def test_levels_are_counted_by_hand():
    right, scores = np.array([0.1, 0.1, 0.5, 0.9]), np.array([0.1, 0.5, 0.5, 1.0])
    found = agreement(scores, right)
    assert found["accuracy"] == 0.75
    assert found["precision"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert found["recall"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert found["F1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_a_scale_that_is_no_tree_is_refused():
    for words, tree in (
        ("cycle", [("a", "b"), ("b", "a"), ("c", None)]),
        ("which is no dimension", [("a", "b"), ("c", None)]),
        ("stands twice", [("a", None), ("a", None)]),
        ("'score' is another column", [("score", "a"), ("a", None)]),
        ("exactly one", [("a", None), ("b", None)]),
    ):
        dimensions = [{"name": name, "parent": parent} for name, parent in tree]
        with pytest.raises(ConfigError, match=words):
            Scale.parse({"dimensions": dimensions}, "a scale")


def test_wrong_labels_are_refused_in_one_line(tmp_path: Path, run: Run):
    pictures(tmp_path, groups=1, each=2)
    (tmp_path / "scale.yaml").write_text(json.dumps(SCALE.model_dump()))
    how = ["--scale", tmp_path / "scale.yaml", "--backbone", BACKBONE, "--out", tmp_path / "s"]
    for words, *rows in (
        ("2 scores for 3 dimensions", {"image": "0-0.png", "scores": [0.1, 0.2]}),
        ("not from 0 to 1", {"image": "0-0.png", "score": 7.0}),
        ("is no score", {"image": "0-0.png", "score": "good"}),
        ("has no score", {"image": "0-0.png", "score": None}, {"image": "0-1.png", "score": 0.5}),
        ("does not say which pictures", {"picture": "0-0.png", "score": 0.5}),
        ("cannot read", {"image": "gone.png", "score": 0.5}, {"image": "0-1.png", "score": 0.5}),
    ):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "wrong.parquet")
        refused(run("aesthetics", "train", tmp_path / "wrong.parquet", *how), words)
    refused(run("aesthetics", "train", tmp_path / "wrong.parquet", *how, "--range", 5, 5), "5 is none")
    assert not (tmp_path / "s").exists()
