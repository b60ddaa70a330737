"""Streamed moments: what they are, however the stream is cut and spread."""

import numpy as np
import pytest
import torch

from atoll.base.errors import DataError
from atoll.measure.frechet import frechet_between, frechet_distance, frechet_of_moments
from atoll.measure.moments import Moments


def features(seed: int = 0, n: int = 500, d: int = 12, offset: float = 0.0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    return draws.normal(size=(n, d)) @ draws.normal(size=(d, d)) + offset


def cut(values: np.ndarray, *at: int) -> list[Moments]:
    return [Moments.of(part) for part in np.split(values, at)]


def same(one: Moments, other: Moments, rtol: float = 1e-12) -> None:
    assert one.count == other.count
    np.testing.assert_allclose(one.mean, other.mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(one.scatter, other.scatter, rtol=rtol, atol=rtol * np.abs(one.scatter).max())


def test_they_are_those_of_numpy() -> None:
    x = features(offset=3.0)
    moments = Moments.of(x)
    assert moments.count == 500
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-13)
    np.testing.assert_allclose(moments.covariance, np.cov(x, rowvar=False), rtol=1e-11, atol=1e-11)
    assert np.array_equal(moments.scatter, moments.scatter.T)


@pytest.mark.parametrize("batch", [1, 7, 64, 499, 500, 9000])
def test_the_size_of_batches_does_not_matter(batch: int) -> None:
    x = features()
    streamed = Moments(12)
    for first in range(0, len(x), batch):
        streamed.add(x[first : first + batch])
    same(streamed, Moments.of(x))


def test_a_batch_larger_than_what_is_taken_at_once() -> None:
    x = features(n=10_000, d=3)
    np.testing.assert_allclose(Moments.of(x).covariance, np.cov(x, rowvar=False), rtol=1e-11)


def test_they_merge_in_any_order_and_shape() -> None:
    x = features()
    whole = Moments.of(x)
    a, b, c = cut(x, 3, 250)
    b.merge(c)
    b.merge(a)
    same(b, whole)
    one, other, empty = *cut(x, 499), Moments(12)
    empty.merge(other)
    empty.merge(one)
    empty.merge(Moments(12))
    same(empty, whole)


def test_a_large_mean_costs_no_digits() -> None:
    """Sums of squares would lose all of them: 1e8 squared leaves nothing of a variance of 1."""
    x = np.random.default_rng(0).normal(size=(4000, 2))
    moments = Moments(2)
    for part in np.array_split(x + 1e8, 13):
        moments.add(part)
    np.testing.assert_allclose(moments.covariance, np.cov(x, rowvar=False), rtol=1e-6, atol=1e-7)


def test_the_distance_of_spread_moments_is_that_of_the_sets() -> None:
    x, y = features(0), features(1, 400)
    first, second = cut(x, 100, 101), cut(y, 399)
    for parts in (first, second):
        for part in parts[1:]:
            parts[0].merge(part)
    assert frechet_between(first[0], second[0]) == pytest.approx(frechet_distance(x, y), rel=1e-11)


def test_drawn_features_have_the_distance_of_their_gaussians_when_their_moments_are_made_exact() -> None:
    """Samples that are whitened and coloured have exactly the moments that they were given."""
    draws = np.random.default_rng(5)
    wanted = []
    for _ in range(2):
        m, root = draws.normal(size=8), np.tril(draws.normal(size=(8, 8))) + 3 * np.eye(8)
        z = draws.normal(size=(300, 8))
        z = (z - z.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(z, rowvar=False))).T
        wanted.append((m, root @ root.T, z @ root.T + m))
    (m1, c1, x), (m2, c2, y) = wanted
    assert frechet_distance(x, y) == pytest.approx(frechet_of_moments(m1, c1, m2, c2), abs=1e-8)


def test_projected_moments_are_those_of_projected_features() -> None:
    x, axes = features(), np.linalg.qr(features(3, 12, 12))[0][:, :4]
    centre = np.linspace(-1, 1, 12)
    same(Moments.of(x).project(centre, axes), Moments.of((x - centre) @ axes), 1e-10)


def test_they_survive_being_stored() -> None:
    moments = Moments.of(features())
    again = Moments.from_tensors({name: tensor.clone() for name, tensor in moments.tensors().items()})
    assert again.count == moments.count and again.width == 12
    assert np.array_equal(again.mean, moments.mean) and np.array_equal(again.scatter, moments.scatter)
    assert moments.tensors()["scatter"].dtype == torch.float64


def test_what_does_not_fit_is_refused() -> None:
    moments = Moments(3)
    with pytest.raises(DataError, match="width of 3"):
        moments.add(np.zeros((4, 2)))
    with pytest.raises(DataError, match="widths 3 and 2"):
        moments.merge(Moments(2))
    with pytest.raises(DataError, match="NaN or infinity"):
        moments.add(np.full((2, 3), np.nan))
    moments.add(np.ones((3, 3)))
    with pytest.raises(DataError, match="3 samples for 3 dimensions: the covariance is singular"):
        frechet_between(moments, Moments.of(features(0, 50, 3)))
