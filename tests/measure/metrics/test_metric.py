"""Metrics by name: what they are called, what they refuse, and that one file is enough for a new one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.base.errors import ConfigError, DataError
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.measure import metrics as package
from atoll.measure.metrics import metric
from atoll.measure.metrics.frechet import frechet_distance
from atoll.measure.metrics.metric import Floor, How, compute, metrics, parse, settings_of
from atoll.measure.metrics.projection import Axes, Projection
from atoll.measure.pictures import Features

HOW = How("net", "dinov2", 16, 40, 40, 8)
RNG = np.random.default_rng(0)
REFERENCE = Features(RNG.normal(size=(40, 16)).astype(np.float32))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with a metric of a user's, among the others."""
    (tmp_path / "of_means.py").write_text(
        "from atoll.measure.metrics.metric import Metric, Value\n"
        "class Means(Metric):\n"
        "    names = ('means',)\n"
        "    def compute(self, how, samples, reference):\n"
        "        apart = samples.rows.mean(0) - reference.rows.mean(0)\n"
        "        return {'means': Value(float((apart**2).sum()))}\n"
        "METRICS = (Means(),)\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    metrics.cache_clear()
    yield
    metrics.cache_clear()


def test_a_new_metric_is_one_file(own: None) -> None:
    assert parse("means,frechet", "dinov2") == ["means", "frechet"] and "means" in parse("all", "dinov2")
    value = compute(["means"], HOW, Features(REFERENCE.rows + 2), REFERENCE)["means"]
    assert value.value == pytest.approx(4 * 16, rel=1e-5)
    assert value.label == "means" and value.settings == {} and value.deviation is None


def test_only_inceptions_distance_is_called_fid() -> None:
    def label(name: str, kind: str, components: int = 16) -> str:
        return metric.metrics()[name].label(name, replace(HOW, kind=kind, components=components))

    assert label("frechet", "inception") == "FID"
    assert label("frechet", "inception", 8) == "Fréchet distance on 8 components of net"
    for kind in ("clip", "dinov2", "efficientnet"):
        assert "FID" not in label("frechet", kind)
    assert label("kid", "inception") == "KID" and label("kid", "clip") == "kernel distance on net"
    assert label("cmmd", "clip") == "CMMD" and label("cmmd", "dinov2") == "Gaussian MMD on net"


def test_metrics_are_named() -> None:
    assert parse("frechet, KID,kid", "dinov2") == ["frechet", "kid"]
    assert parse("fid,recall", "inception") == ["frechet", "recall"]
    assert "clip-score" not in parse("all", "clip", captioned=False)
    assert "clip-score" in parse("all", "clip") and "clip-score" not in parse("all", "dinov2")
    assert "frechet-excess" in parse("all", "dinov2")
    assert "frechet-excess" not in parse("all", "dinov2", trained=False)


def test_the_excess_is_over_the_distance_of_training_pictures() -> None:
    samples, trained = Features(REFERENCE.rows + 2), Features(REFERENCE.rows * 1.5)
    how = replace(HOW, floor=Floor({"floor": "digest"}, lambda: trained))
    names = ["frechet", "frechet-excess"]
    found = compute(names, how, samples, REFERENCE)
    least = compute(["frechet"], how, trained, REFERENCE)["frechet"].value
    assert found["frechet-excess"].value == pytest.approx(found["frechet"].value - least) and least > 0.1
    assert found["frechet-excess"].settings == {"components": 8, "floor": "digest"}
    assert compute(names, how, trained, REFERENCE)["frechet-excess"].value == 0


def test_a_picture_finds_its_caption_among_a_hundred() -> None:
    how = replace(HOW, kind="clip", samples=250)
    pictures = RNG.normal(size=(250, 16)).astype(np.float32)
    texts = pictures.copy()
    texts[:30] = -texts[:30]  # nothing fits these less than their own
    texts[30:50] = texts[30]  # and these have one caption
    texts[200:] = -texts[200:]  # too few for a choice among as many
    found = compute(["caption-found"], how, Features(pictures, texts), REFERENCE)["caption-found"]
    assert 0.75 < found.value < (200 - 30) / 200 and found.label == "own caption found among 100"
    assert found.settings == {"among": 100}
    alike = Features(pictures[30:50], texts[30:50])
    few = compute(["caption-found"], replace(how, samples=20), alike, REFERENCE)["caption-found"]
    assert few.value == 1 and few.label == "own caption found among 20"


@pytest.mark.parametrize("name", ["", "clip-score", "caption-found"])
def test_metrics_that_do_not_exist(name: str) -> None:
    words = f"{name} needs clip as its extractor" if name else "unknown metric ''"
    with pytest.raises(ConfigError, match=words):
        parse(name, "dinov2")


def test_too_few_pictures_are_told_before_the_work() -> None:
    settings_of(["frechet", "recall"], replace(HOW, samples=9, references=9))
    for name in ("coverage", "kid", "cmmd"):
        with pytest.raises(DataError, match="5 samples are too few"):
            settings_of([name], replace(HOW, samples=5))


def test_the_reference_itself_is_perfect() -> None:
    values = compute(["frechet", "precision", "recall", "kid"], HOW, REFERENCE, REFERENCE)
    assert values["frechet"].value == pytest.approx(0, abs=1e-9)
    assert values["precision"].value == values["recall"].value == 1.0
    assert "40 samples and 40 reference pictures for 8 dimensions: so few" in values["frechet"].notes[0]
    far = compute(["precision", "recall"], HOW, Features(REFERENCE.rows + 100), REFERENCE)
    assert far["precision"].value == far["recall"].value == 0.0


def test_praise_of_noise_carries_a_note() -> None:
    draws = np.random.default_rng(0)
    reference = draws.normal(size=(600, 8)).astype(np.float32)
    spot = (reference[:1] + 1e-3 * draws.normal(size=(600, 8))).astype(np.float32)
    names = ["precision", "recall", "density", "coverage"]

    def notes(samples: np.ndarray, of: np.ndarray) -> dict[str, tuple[str, ...]]:
        values = compute(names, How("x", "x", 8, len(samples), len(of), 8), Features(samples), Features(of))
        return {name: values[name].notes for name in names}

    assert set(notes(draws.normal(size=(600, 8)).astype(np.float32), reference).values()) == {()}
    told = notes(spot, reference)
    lone = "with a recall of 0.0017 the samples may lie near a few images, as noise does"
    assert told == {"precision": (lone,), "density": (lone,), "recall": (), "coverage": ()}
    few = notes(reference[:40], reference)
    assert set(few.values()) == {("40 pictures on a side are few: their wide neighbourhoods may hold noise",)}


def test_axes_of_other_pictures_and_fewer_of_them() -> None:
    """A comparison fixes its components by training pictures, and takes the first of them."""
    samples, train = (RNG.normal(size=(30, 16)).astype(np.float32) for _ in range(2))
    projection = Projection.fit(train, 8)
    how = replace(HOW, samples=30, components=3, axes=Axes({"axes": "theirs"}, lambda: projection))
    value = compute(["frechet"], how, Features(samples), REFERENCE)["frechet"]
    axes = Projection.fit(train, 3)
    assert value.value == pytest.approx(frechet_distance(axes(samples), axes(REFERENCE.rows)), rel=1e-9)
    assert value.settings == {"components": 3, "axes": "theirs"}


def test_dimensions_of_the_frechet_distance() -> None:
    usual = EvaluateConfig()
    assert usual.components_of("inception", 2048, 10) == 2048
    assert [usual.components_of("dinov2", 768, n) for n in (1, 20, 1000)] == [1, 10, 64]
    assert usual.components_of("dinov2", 16, 1000) == 16
    assert EvaluateConfig(components=0).components_of("dinov2", 768, 10) == 768
    assert EvaluateConfig(components=32).components_of("inception", 2048, 10) == 32
