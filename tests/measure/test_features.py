"""Rows of features in a file, and sets of features that are taken in and merged."""

import numpy as np
import pytest

from atoll.base.errors import DataError
from atoll.measure.features import FeatureRows, FeatureSet


def features(n: int = 100, d: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)


def test_rows_come_back_in_any_order() -> None:
    x, rows = features(), FeatureRows(5)
    for part in np.array_split(np.random.default_rng(1).permutation(100), 7):
        rows.write(part, x[part])
    assert len(rows) == 100 and rows.missing == 0
    wanted = np.array([99, 3, 4, 5, 0, 3])
    assert np.array_equal(rows.read(wanted), x[wanted])
    assert np.array_equal(np.concatenate(list(rows.blocks(size=9))), x)
    assert [len(block) for block in rows.blocks(wanted, 4)] == [4, 2]
    assert rows.read([]).shape == (0, 5)


def test_rows_that_are_missing_are_known() -> None:
    x, rows = features(), FeatureRows(5)
    rows.write([7], x[7:8])
    assert len(rows) == 8 and rows.missing == 7 and rows.numbers.tolist() == [7]
    with pytest.raises(DataError, match="width of 5"):
        rows.write([0], np.zeros((1, 4)))


def test_a_set_does_not_depend_on_how_it_is_cut() -> None:
    x, whole = features(), FeatureSet.of(features())
    parts = [FeatureSet(5, keep_rows=True) for _ in range(3)]
    for number, part in enumerate(np.array_split(np.random.default_rng(1).permutation(100), 10)):
        parts[number % 3].add(x[part], part.tolist(), x[part, 0].astype(np.float64))
    first = parts[0]
    for part in parts[1:]:
        first.merge(part)
    assert first.count == whole.count == 100
    assert np.array_equal(first.whole_rows().read(range(100)), x)
    np.testing.assert_allclose(first.moments.covariance, whole.moments.covariance, rtol=1e-12, atol=1e-14)
    assert first.scores.mean[0] == pytest.approx(x[:, 0].astype(np.float64).mean(), rel=1e-12)


def test_rows_are_kept_only_where_they_are_wanted() -> None:
    light = FeatureSet(5)
    light.add(features())
    assert light.rows is None and light.count == 100 and light.scores.count == 0
