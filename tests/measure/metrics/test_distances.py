"""KID, CMMD and Fréchet distances, against other programs and formulas."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import nn
from torchmetrics.image.kid import KernelInceptionDistance

from atoll.base.errors import DataError
from atoll.measure.metrics import mmd
from atoll.measure.metrics.frechet import frechet_distance, frechet_of_moments
from atoll.measure.metrics.mmd import cmmd, kid
from atoll.measure.metrics.projection import Moments, Projection
from atoll.measure.pictures import encoded


def drawn(seed: int, n: int = 60, d: int = 16, shift: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, d)) + shift).astype(np.float32)


class Given(nn.Module):
    """An extractor of torchmetrics whose pictures are features already."""

    num_features = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


# KID.


def test_kid_of_all_rows_agrees_with_torchmetrics() -> None:
    x, y = drawn(0), drawn(1, shift=0.3)
    with pytest.warns(UserWarning, match="memory footprint"):
        theirs = KernelInceptionDistance(Given(), subsets=1, subset_size=60)
    theirs.update(torch.from_numpy(x), real=False)
    theirs.update(torch.from_numpy(y), real=True)
    found = kid(x, y, subsets=1, size=60)
    assert found.value == pytest.approx(float(theirs.compute()[0]), rel=1e-4)
    assert found.value > 0.05 and found.deviation is None


@pytest.mark.parametrize("n", [257, 600, 1025])
def test_halves_add_up_to_the_whole(n: int) -> None:
    """Large sets are cut in halves that meet once; torch computes all products at once."""
    x, y = (torch.from_numpy(drawn(seed, n, shift=seed * 0.1)).double() for seed in (0, 1))
    own, other, across = (((a @ b.T) / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = [(k.sum() - k.diagonal().sum()) / (n * (n - 1)) for k in (own, other)]
    found = kid(x.float().numpy(), y.float().numpy(), 1, n)
    assert found.value == pytest.approx(float(within[0] + within[1] - 2 * across.mean()), rel=1e-9, abs=1e-12)


def test_a_set_that_is_whole_in_every_subset_tells_no_spread() -> None:
    one, other = drawn(0), drawn(1, 40)
    assert kid(one, other, 5, 40).deviation is None and kid(other, one, 5, 40).deviation is None
    assert kid(one, other, 5, 39).deviation is not None and kid(one, other, 1, 39).deviation is None
    assert kid(one, one, 7, len(one)) == kid(one, one, 1, len(one))


def test_kid_is_unbiased() -> None:
    """Halves of one distribution are at zero within the spread, on either side of it."""
    x = drawn(0, 4000)
    found = kid(x[:2000], x[2000:], subsets=60, size=100)
    assert found.deviation is not None
    assert abs(found.value) < 4 * found.deviation / np.sqrt(20)
    assert kid(x[:2000], x[2000:] + np.float32(0.5), subsets=20, size=100).value > 10 * abs(found.value)


def test_subsets_are_those_of_the_seed() -> None:
    one, other = drawn(0), drawn(1)
    assert kid(one, other, 5, 20) == kid(one, other, 5, 20)
    assert kid(one, other, 5, 20, seed=1) != kid(one, other, 5, 20)


@pytest.mark.parametrize("size", [1, 41])
def test_subsets_that_cannot_be_drawn_are_refused(size: int) -> None:
    with pytest.raises(DataError, match="use subsets of 2 to 40"):
        kid(drawn(0), drawn(1, 40), size=size)


# CMMD.


def brute(x: np.ndarray, y: np.ndarray, sigma: float) -> float:
    """As the paper's program has it, on features of length 1."""
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x.astype(float), y.astype(float)))

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * sigma**2)).mean())

    return 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))


@pytest.mark.parametrize("sigma", [10.0, 0.5])
def test_cmmd_by_brute_force(sigma: float) -> None:
    x, y = drawn(0), drawn(1, 45, shift=0.5)
    assert cmmd(x, y, sigma) == pytest.approx(brute(x, y, sigma), rel=1e-9)


def test_cmmd_in_closed_form() -> None:
    """All of a set in one point, the sets at a right angle: |x - y|^2 is 2."""
    x, y = np.full((5, 2), [3, 0], np.float32), np.full((4, 2), [0, 7], np.float32)
    assert cmmd(x, y) == pytest.approx(2000 * (1 - np.exp(-2 / 200)), rel=1e-12)
    assert cmmd(x, 2 * x) == pytest.approx(0, abs=1e-12)


def test_blocks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = drawn(0), drawn(1, 45)
    whole = kid(one, other, 2, 40), cmmd(one, other)
    monkeypatch.setattr(mmd, "BLOCK", 7)
    cut = kid(one, other, 2, 40), cmmd(one, other)
    assert cut[0].value == pytest.approx(whole[0].value, rel=1e-10)
    assert cut[1] == pytest.approx(whole[1], rel=1e-8)


def covariance(seed: int, d: int, condition: float = 10.0) -> np.ndarray:
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]
    return (basis * np.geomspace(1.0, condition, d)) @ basis.T


def samples(seed: int, n: int, d: int) -> np.ndarray:
    draws = np.random.default_rng(seed)
    return draws.normal(size=(n, d)) @ np.linalg.cholesky(covariance(seed, d)).T + draws.normal(size=d)


def reference(m1: np.ndarray, c1: np.ndarray, m2: np.ndarray, c2: np.ndarray) -> float:
    """As it is usually written, with scipy's root of a matrix that is not symmetric."""
    return float(((m1 - m2) ** 2).sum() + np.trace(c1 + c2 - 2 * np.real(scipy.linalg.sqrtm(c1 @ c2))))


@pytest.mark.parametrize("d", [1, 2, 16, 64])
def test_it_agrees_with_scipy(d: int) -> None:
    draws = np.random.default_rng(d)
    m1, m2, c1, c2 = draws.normal(size=d), draws.normal(size=d), covariance(1, d), covariance(2, d, 50.0)
    assert frechet_of_moments(m1, c1, m2, c2) == pytest.approx(reference(m1, c1, m2, c2), rel=1e-8, abs=1e-8)


def test_rounding_makes_no_distance_negative() -> None:
    """300 rows that fill 5 of 64 dimensions: the roots of what should be 0 add up to more than rounding."""
    x = samples(0, 300, 5) @ samples(1, 5, 64)
    assert 0 <= frechet_distance(x, x) < 1e-3
    assert Moments.of(x).rank == 5 and Moments.of(samples(0, 300, 8)).rank == 8
    assert Moments.of(np.ones((300, 4))).rank == 0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(DataError, match="5 samples for 5 dimensions: the covariance is singular"):
        frechet_distance(samples(0, 50, 5), samples(1, 5, 5))
    frechet_distance(samples(0, 50, 5), samples(1, 6, 5))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    x = samples(0, 50, 5)
    y = x.copy()
    y[3, 2] = bad
    for pair in ((x, y), (y, x)):
        with pytest.raises(DataError, match="NaN or infinity"):
            frechet_distance(*pair)
    with pytest.raises(DataError, match="NaN or infinity"):
        Projection.fit(y, 2)
    # Other metrics give a number all the same, so no features of an extractor get so far.
    with pytest.raises(DataError, match="NaN or infinity"):
        encoded(SimpleNamespace(encode=lambda pictures: torch.from_numpy(y[3:])), [Image.new("L", (1, 1))], 1)


# Principal components.


def test_components_are_those_of_largest_variance() -> None:
    x = np.random.default_rng(0).normal(size=(5000, 4)) * [0.1, 5.0, 0.5, 2.0] + 7
    projection = Projection.fit(x, 2)
    assert projection.axes.shape == (4, 2)
    np.testing.assert_allclose(np.abs(projection.axes.T), [[0, 1, 0, 0], [0, 0, 0, 1]], atol=0.05)
    np.testing.assert_allclose(projection.axes.T @ projection.axes, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(projection(x).mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(projection(x).std(0), [5, 2], rtol=0.05)


def test_more_components_than_pictures_are_refused() -> None:
    with pytest.raises(DataError, match="5 pictures cannot fix 5 components"):
        Projection.fit(samples(0, 5, 9), 5)


# Moments.


@pytest.mark.parametrize("count", [500, 10_000])
def test_moments_are_those_of_numpy_however_many_rows(count: int) -> None:
    x = samples(0, count, 12)
    moments = Moments.of(x)
    assert moments.count == count and np.array_equal(moments.scatter, moments.scatter.T)
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-11)
    np.testing.assert_allclose(moments.covariance, np.cov(x, rowvar=False), rtol=1e-10, atol=1e-10)


def test_a_large_mean_costs_no_digits() -> None:
    """Sums of squares would lose all of them: 1e8 squared leaves nothing of a variance of 1."""
    x = np.random.default_rng(0).normal(size=(9000, 2))
    np.testing.assert_allclose(Moments.of(x + 1e8).covariance, np.cov(x, rowvar=False), rtol=1e-6, atol=1e-7)
