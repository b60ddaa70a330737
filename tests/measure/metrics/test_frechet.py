"""Fréchet distance: closed forms, a reference, and what it refuses."""

import numpy as np
import pytest
import scipy.linalg

from atoll.base.errors import DataError
from atoll.measure.metrics.frechet import frechet_distance, frechet_of_moments
from atoll.measure.metrics.projection import Moments, Projection


def covariance(seed: int, d: int, condition: float = 10.0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    basis = np.linalg.qr(draws.normal(size=(d, d)))[0]
    return (basis * np.geomspace(1.0, condition, d)) @ basis.T


def samples(seed: int, n: int, d: int) -> np.ndarray:
    draws = np.random.default_rng(seed)
    return draws.normal(size=(n, d)) @ np.linalg.cholesky(covariance(seed, d)).T + draws.normal(size=d)


def reference(m1: np.ndarray, c1: np.ndarray, m2: np.ndarray, c2: np.ndarray) -> float:
    """As it is usually written, with scipy's root of a matrix that is not symmetric."""
    root = scipy.linalg.sqrtm(c1 @ c2)
    return float(((m1 - m2) ** 2).sum() + np.trace(c1 + c2 - 2 * np.real(root)))


@pytest.mark.parametrize("d", [1, 2, 16, 64])
def test_it_agrees_with_scipy(d: int) -> None:
    draws = np.random.default_rng(d)
    m1, m2, c1, c2 = draws.normal(size=d), draws.normal(size=d), covariance(1, d), covariance(2, d, 50.0)
    assert frechet_of_moments(m1, c1, m2, c2) == pytest.approx(reference(m1, c1, m2, c2), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("d", [1, 8, 32])
def test_identical_sets_are_at_zero(d: int) -> None:
    """Up to rounding: 1e-9 where traces are some tens."""
    x = samples(0, 200, d)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(x, x[::-1]) == pytest.approx(0, abs=1e-9)


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


def test_moments_that_are_no_numbers_are_refused() -> None:
    """Of saved statistics: their features are not at hand, so nobody has looked at them."""
    good = np.zeros(2), np.eye(2)
    for bad in ((np.array([np.nan, 0]), np.eye(2)), (np.zeros(2), np.full((2, 2), np.inf))):
        for pair in ((*good, *bad), (*bad, *good)):
            with pytest.raises(DataError, match="the moments hold NaN"):
                frechet_of_moments(*pair)


# Principal components.


def test_components_are_those_of_largest_variance() -> None:
    draws = np.random.default_rng(0)
    scales = np.array([0.1, 5.0, 0.5, 2.0])
    x = draws.normal(size=(5000, 4)) * scales + 7
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
    moments = Moments.of(x + 1e8)
    np.testing.assert_allclose(moments.covariance, np.cov(x, rowvar=False), rtol=1e-6, atol=1e-7)
