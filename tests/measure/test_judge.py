"""The judge: fewer components for fewer pictures, and precision and recall where there are enough."""

from pathlib import Path

import numpy as np
import pytest

from atoll.encoders.vision import vision_encoder
from atoll.measure.frechet import Projection, frechet_distance
from atoll.measure.judge import Judge
from atoll.measure.neighbours import DENSITY_K
from helpers_extractors import save_dinov2

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(40, 16)).astype(np.float32)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    encoder = vision_encoder(str(save_dinov2(tmp_path)), 28)
    return Judge(encoder, Projection.fit(FEATURES, 8), FEATURES)


def test_the_reference_itself_is_perfect(judge: Judge) -> None:
    found = judge.measure(FEATURES)
    assert found["distance"] == pytest.approx(0, abs=1e-9)
    assert found["precision"] == found["recall"] == 1.0
    far = judge.measure(FEATURES[:20] + 100)
    assert far["precision"] == far["recall"] == 0.0


def test_fewer_pictures_take_fewer_components(judge: Judge) -> None:
    few = judge.of(6)
    assert (judge.components, few.components, judge.of(100).components) == (8, 3, 8)
    own = Projection.fit(FEATURES, 3)
    samples = RNG.normal(size=(6, 16)).astype(np.float32)
    assert few.measure(samples)["distance"] == pytest.approx(
        frechet_distance(own(samples), own(FEATURES)), rel=1e-9
    )


def test_too_few_pictures_for_balls_have_no_precision(judge: Judge) -> None:
    assert judge.of(DENSITY_K).measure(FEATURES[:DENSITY_K])["precision"] is None
    assert judge.of(DENSITY_K + 1).measure(FEATURES[: DENSITY_K + 1])["recall"] is not None
    about = judge.about_neighbours(24)
    assert about == {"k": 3, "dimensions": 16, "samples": 24, "references": 40}
