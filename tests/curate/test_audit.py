"""Concepts of a campaign: found shard by shard, counted for every expert, added up over islands."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from atoll.base.text import percent, words_of
from atoll.campaign.folder import Campaign
from atoll.curate.audit import ConceptCounts, count, evenness, spread, written
from atoll.curate.concepts import FLOOR, TEXT, Finder, Vocabulary, linear, write_hits
from atoll.data.cluster_map import telling
from atoll.encoders.vision import ClipEncoder, extractor
from helpers import Run, refused
from helpers_extractors import save_clip

CONCEPTS = ["letter", "small letter", "Capital Letters", "digit", "sans", "serif", "unicorn"]


def index(run: Run, campaign: Path, concepts: list[str] = CONCEPTS) -> tuple[Vocabulary, Finder]:
    (campaign / "concepts.txt").write_text("\n".join(concepts))
    answer = run("concepts", "index", campaign, "--vocabulary", campaign / "concepts.txt")
    assert answer.code == 0 and f"{len(concepts)} concepts (concepts.txt)" in answer.out
    vocabulary = written(Campaign.open(campaign), Vocabulary)
    return vocabulary, Finder(vocabulary)


def tags(folder: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), folder / "tags.parquet")
    return folder / "tags.parquet"


def captions(folder: Path) -> list[str]:
    return list(Campaign.open(folder).dataset().table(["caption"])["caption"].to_pylist())


def test_counts_are_those_of_every_caption(campaign: Path, run: Run):
    index(run, campaign)
    audit = run("concepts", "audit", campaign)
    dataset, partition = Campaign.open(campaign).clustered()
    assert len(dataset.shards) > 1
    held, texts = set(dataset.split("heldout").tolist()), captions(campaign)
    expected: Counter[tuple[str, int]] = Counter()
    for row, text in enumerate(texts):
        if row not in held:
            for concept in CONCEPTS:
                phrase = f" {' '.join(words_of(concept))} ".replace("letters ", "letter ")
                expected[concept, int(partition.clusters[row])] += phrase in f" {' '.join(words_of(text))} "
    counts = written(Campaign.open(campaign), ConceptCounts)
    assert {(c, k): counts.text[n][k] for n, c in enumerate(CONCEPTS) for k in (0, 1)} == dict(expected)
    assert expected["small letter", 0] > 3 and expected["unicorn", 0] == 0
    absent = sum(not any(row) for row in counts.text)
    assert audit.code == 0 and "7 concepts" in audit.out and percent(absent / 7) in audit.out and absent
    assert counts.rows == tuple(partition.sizes) and counts.image is None
    table = list(csv.DictReader((campaign / "reports/concepts/counts.csv").read_text().splitlines()))
    assert table[0]["concept"] == "unicorn" and len(table) == 7
    assert all(int(r["text"]) == int(r["expert_0"]) + int(r["expert_1"]) for r in table)


def test_only_shards_that_changed_are_searched_again(
    campaign: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    index(run, campaign)
    folder = campaign / "data/columns" / TEXT
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "00001.safetensors").unlink()
    searched: list[str] = []
    whole = Finder.__call__
    monkeypatch.setattr(Finder, "__call__", lambda self, text: searched.append(text) or whole(self, text))
    index(run, campaign)
    assert len(searched) == Campaign.open(campaign).dataset().shards[1].rows
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_tags_are_imported_counted_with_captions_and_by_threshold(campaign: Path, run: Run):
    vocabulary, finder = index(run, campaign)
    dataset, partition = Campaign.open(campaign).clustered()
    train, texts = dataset.split("train"), captions(campaign)
    small = [int(row) for row in train if "small letter" in texts[int(row)]][:6]
    rows = [dataset.ids[row] for row in small]
    path = tags(
        campaign,
        id=[*rows, *["a stranger"] * 70_000, rows[0]],  # of more rows than are read at a time
        concept=["Small_letter", "unicorn", "unicorn", "letters", "letters", "no such", *["letter"] * 70_001],
        probability=[0.9, 0.8, 0.71, 0.6, FLOOR / 2, *[1.0] * 70_001, 0.99],
    )
    assert run("concepts", "tag", campaign, path).code == 0
    answer = run("concepts", "audit", campaign)
    counts, looser = (
        count(dataset, vocabulary, train, partition.clusters[train], 2, threshold) for threshold in (0.7, 0.5)
    )
    assert counts.table("image").sum(1).tolist() == [1, 1, 0, 0, 0, 0, 2]
    assert looser.table("image").sum() == counts.table("image").sum() + 1
    in_text = [set(finder(texts[int(row)])) for row in train]
    tagged = dict(zip(small, ({1, 0}, {6}, {6}), strict=False))
    in_image = [tagged.get(int(row), set[int]()) for row in train]
    both = [a & b for a, b in zip(in_text, in_image, strict=True)]
    assert counts.table("both").sum() == sum(map(len, both)) > 0
    comparable = [bool(a) and bool(b) for a, b in zip(in_text, in_image, strict=True)]
    assert sum(counts.comparable) == sum(comparable)
    apart = sum(t and not b for t, b in zip(comparable, both, strict=True))
    assert sum(counts.misaligned) == apart > 0
    assert f"misaligned: {apart} of {sum(comparable)} rows" in answer.out


def test_counts_of_islands_add_up_to_those_of_the_whole(campaign: Path, tmp_path: Path, run: Run):
    vocabulary, _ = index(run, campaign)
    run("concepts", "audit", campaign)
    dataset, partition = Campaign.open(campaign).clustered()
    files = [tmp_path / f"{part}.json" for part in range(3)]
    for path, rows in zip(files, np.array_split(dataset.split("train"), 3), strict=True):
        path.write_text(json.dumps(count(dataset, vocabulary, rows, partition.clusters[rows], 2).to_json()))
    assert run("concepts", "add", *files, "--out", tmp_path / "all").code == 0
    one, all_ = ((p / ConceptCounts.PLACE).read_bytes() for p in (campaign, tmp_path / "all"))
    assert one == all_
    own = json.loads(files[0].read_text())
    for other, words in (({"vocabulary": "a"}, "another vocabulary"), ({"rows": [-1, 5]}, "'rows.0'")):
        files[0].write_text(json.dumps(own | other))
        refused(run("concepts", "add", *files, "--out", tmp_path / "no"), words)
    assert not (tmp_path / "no" / "reports").exists()


def test_labels_are_concepts_too_and_another_vocabulary_leaves_them_out(campaign: Path, run: Run):
    index(run, campaign, ["DejaVuSans", "DejaVuSerif"])
    assert run("concepts", "tag", campaign, "labels").code == 0
    assert "alone are counted" not in run("concepts", "audit", campaign).out
    dataset = Campaign.open(campaign).dataset()
    labels = dataset.take(dataset.split("train"))["label"].to_pylist()
    counts = written(Campaign.open(campaign), ConceptCounts)
    assert counts.table("image").sum(1).tolist() == [labels.count(0), labels.count(1)]
    index(run, campaign)
    answer = run("concepts", "audit", campaign)
    assert answer.code == 0 and "captions alone are counted" in answer.out
    assert written(Campaign.open(campaign), ConceptCounts).image is None


def test_a_linear_tagger_learns_what_captions_say(campaign: Path, run: Run):
    """Features that hold the answer: tags of held-out rows, which it never saw, must be the captions'."""
    vocabulary, finder = index(run, campaign)
    dataset, texts = Campaign.open(campaign).dataset(), captions(campaign)
    noise = np.random.default_rng(0).normal(0, 0.05, (len(texts), 16)).astype(np.float32)
    for row, text in enumerate(texts):
        noise[row, finder(text)] += 1
    dataset.write_values("features-told", {"name": "told"}, noise.astype(np.float16))
    about, hits = linear(dataset, vocabulary, "features-told", epochs=300)
    looked = list[int]()  # at each shard once, for both columns
    column = write_hits(dataset, vocabulary, about, lambda shard: looked.append(shard) or hits(shard))
    assert looked == list(range(len(dataset.shards)))
    heldout = dataset.split("heldout")
    values, mask = column.read_ragged(heldout)
    mask &= dataset.column("concepts-image-probabilities").read_ragged(heldout)[0] >= 0.5
    found = [set(v[m].tolist()) for v, m in zip(values, mask, strict=True)]
    assert found == [set(finder(texts[int(row)])) for row in heldout]


def test_a_clip_tags_each_concept_against_a_plain_photo(campaign: Path, tmp_path: Path, run: Run):
    index(run, campaign, ["red", "apple"])
    name = str(save_clip(tmp_path / "clip"))
    assert run("concepts", "tag", campaign, f"clip:{name}").code == 0
    dataset, encoder = Campaign.open(campaign).dataset(), extractor(name)
    assert isinstance(encoder, ClipEncoder)
    row = 37
    texts = encoder.texts(["a photo.", "a photo of a red.", "a photo of a apple."])
    cosines = torch.nn.functional.cosine_similarity(encoder.encode([dataset.image(row)])[0][None], texts)
    expected = torch.sigmoid(encoder.network.logit_scale.exp() * (cosines[1:] - cosines[0]))
    values, mask = dataset.column("concepts-image").read_ragged([row])
    likely = dataset.column("concepts-image-probabilities").read_ragged([row])[0]
    found = dict(zip(values[mask].tolist(), likely[mask].tolist(), strict=True))
    wanted = {n: pytest.approx(float(p), abs=1e-4) for n, p in enumerate(expected) if p >= FLOOR}
    assert found == wanted and wanted
    bare = save_clip(tmp_path / "bare", tokenizer=False)
    refused(run("concepts", "tag", campaign, f"clip:{bare}"), "no tokenizer")
    refused(run("concepts", "tag", campaign, "clip:pixels"), "is no CLIP")


def test_how_concepts_are_spread():
    rows = np.array([100, 300])
    table = np.array([[10, 30], [40, 0], [0, 40], [0, 0]])
    even = evenness(table, rows)
    assert even[0] == pytest.approx(1) and even[1] == pytest.approx(0) and 0 < even[2] < 1 and even[3] == 1
    found = spread("text", table, rows)
    assert (found.absent, found.median, found.top) == (0.25, 40, pytest.approx(1 / 3))
    assert telling(table, rows) == [[1], [2]]
    assert evenness(table[:, :1], rows[:1]).tolist() == [1, 1, 1, 1]


def test_bad_input_is_one_line(campaign: Path, run: Run):
    for argv, *words in (
        (["index", campaign, "--vocabulary", campaign / "none.txt"], "none.txt", "No such file"),
        (["index", campaign, "--vocabulary", campaign], "cannot read", "directory"),
        (["tag", campaign, "labels"], "no vocabulary", "atoll concepts index"),
        (["audit", campaign], "no vocabulary", "atoll concepts index"),
        (["add", campaign / "campaign.yaml"], "campaign.yaml"),
    ):
        refused(run("concepts", *argv), *words)
    (campaign / "wrong.txt").write_bytes(bytes(range(256)))
    refused(run("concepts", "index", campaign, "--vocabulary", campaign / "wrong.txt"), "no UTF-8 text")


def test_tags_that_are_none(campaign: Path, run: Run):
    index(run, campaign)
    for content, *words in (
        ({"id": ["x"], "concept": ["letter"]}, "tags no row"),
        ({"id": ["x"]}, "no column 'concept'"),
        ({"id": ["x"], "concept": ["letter"], "probability": [1.5]}, "row 0", "1.5"),
        ({"id": ["x"], "concept": ["letter"], "probability": ["high"]}, "row 0", "'high'"),
        ({"id": ["x"], "concept": ["letter"], "probability": [float("nan")]}, "row 0", "nan"),
    ):
        refused(run("concepts", "tag", campaign, tags(campaign, **content)), *words)
    (campaign / "tags.parquet").write_bytes(b"PAR1 and then nothing")
    refused(run("concepts", "tag", campaign, campaign / "tags.parquet"), "no parquet")
    refused(run("concepts", "tag", campaign, "clairvoyance"), "no tagger or file")
    assert not (campaign / "data/columns/concepts-image").exists()
