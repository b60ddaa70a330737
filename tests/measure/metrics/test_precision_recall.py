"""Precision, recall, density and coverage against brute force and against what is plain to see."""

import numpy as np
import pytest

from atoll.base.errors import DataError
from atoll.measure.metrics import precision_recall
from atoll.measure.metrics.precision_recall import neighbourhoods
from atoll.measure.pictures import Features


def drawn(seed: int, n: int = 70, d: int = 3, shift: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, d)) + shift).astype(np.float32)


def brute(x: np.ndarray, y: np.ndarray, k: int = 3, dense: int = 5) -> dict[str, float]:
    """All distances at once, from differences: samples x, reference y."""

    def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return ((a[:, None].astype(np.float64) - b[None]) ** 2).sum(-1)

    def ball(a: np.ndarray, nth: int) -> np.ndarray:
        return np.sort(distances(a, a), axis=1)[:, nth]  # the 0th is the row itself

    across = distances(x, y)
    inside = across < ball(y, dense)
    return {
        "precision": float((across <= ball(y, k)).any(1).mean()),
        "recall": float((across <= ball(x, k)[:, None]).any(0).mean()),
        "density": float(inside.sum(1).mean() / dense),
        "coverage": float(inside.any(0).mean()),
    }


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize(("shift", "n"), [(0.7, 70), (1.5, 70), (1.0, 41)])
def test_brute_force_agrees(shift: float, n: int, block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if block is not None:
        monkeypatch.setattr(precision_recall, "BLOCK", block)
    x, y, real = drawn(0, n, shift=shift), drawn(1), Features(drawn(1))
    assert neighbourhoods(drawn(2), real) == pytest.approx(brute(drawn(2), y), abs=1e-12)
    found, expected = neighbourhoods(x, real), brute(x, y)  # of another model, by the balls that are known
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0 < expected["precision"] < 1 and 0 < expected["coverage"] < 1


@pytest.mark.parametrize("d", [16, 1280])
def test_copies_of_one_picture_are_on_the_edge(d: int) -> None:
    """A collapsed model: its pictures are one of the reference, which has copies of its own."""
    y = np.repeat(drawn(1, 12, d, shift=3.0), 5, axis=0)
    x = np.repeat(y[:1], 50, axis=0)
    assert neighbourhoods(x, Features(y)) == brute(x, y)
    assert brute(x, y)["precision"] == 1.0
    assert neighbourhoods(x, Features(x)) == {**brute(x, x), "density": 0.0, "coverage": 0.0}


@pytest.mark.parametrize("d", [3, 640])
def test_a_sample_that_is_a_neighbour_is_on_the_edge(d: int) -> None:
    """Every reference picture is somebody's k-th neighbour: there the ball ends, to the last digit."""
    y = drawn(1, 60, d, shift=2.0)
    found, expected = neighbourhoods(y[:20], Features(y)), brute(y[:20], y)
    assert found == pytest.approx(expected, abs=1e-12)


def test_too_few_pictures_are_refused() -> None:
    with pytest.raises(DataError, match="5 pictures have no 5-th neighbour"):
        neighbourhoods(drawn(0), Features(drawn(1, 5)))
    with pytest.raises(DataError, match="3 pictures have no 3-th neighbour"):
        neighbourhoods(drawn(0, 3), Features(drawn(1)))
