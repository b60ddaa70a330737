"""Correlations of pairs: known answers, partners, and what is kept of pictures."""

import numpy as np
import pytest
from PIL import Image

from atoll.measure.same_noise import MOST, SIDE, SavedSamples, correlations, pair_table, partners


def test_correlations_have_known_answers() -> None:
    line = np.arange(8.0)
    one = np.stack([line, line, line, np.ones(8), [1, -1] * 4])
    other = np.stack([3 * line + 7, -line, np.abs(line - 3.5), line, [1, 1, -1, -1] * 2])
    found = correlations(one, other)
    assert found[:2] == pytest.approx([1, -1]) and found[2] == pytest.approx(0, abs=1e-12)
    assert np.isnan(found[3]) and found[4] == pytest.approx(0, abs=1e-12)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 30))
    expected = [np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)]
    assert correlations(a, b) == pytest.approx(expected, abs=1e-12)


def test_unsigned_bytes_do_not_wrap_around() -> None:
    dark, light = np.array([[0, 255, 0, 255]], dtype=np.uint8), np.array([[255, 0, 255, 0]], dtype=np.uint8)
    assert correlations(dark, light) == pytest.approx([-1])


def test_partners_are_others_of_the_group_and_nobody_is_taken_twice() -> None:
    groups = np.array([0, 1, 0, 2, 1, 0, 1])
    found = partners(groups, seed=3)
    assert found[3] == -1  # alone
    rest = [n for n in range(7) if n != 3]
    assert all(found[n] != n and groups[found[n]] == groups[n] for n in rest)
    assert sorted(found[rest]) == rest
    assert (partners(groups, seed=3) == found).all()


def made(pixels: np.ndarray) -> SavedSamples:
    return SavedSamples(pixels, pixels.astype(np.float32))


def test_the_same_noise_is_told_from_other_samples() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, size=(60, 48), dtype=np.uint8)
    noisy = (base * 0.5 + rng.integers(0, 128, size=base.shape)).astype(np.uint8)
    alien = rng.integers(0, 256, size=base.shape, dtype=np.uint8)
    others = {"near": made(noisy), "far": made(alien)}
    table = pair_table(made(base), others, np.arange(60) % 3, np.arange(60), seed=0)
    found = {(r["strategy"], r["space"], r["partner"]): r for r in (row.model_dump() for row in table)}
    assert len(found) == 2 * 2 * 3
    near, far = found["near", "pixels", "same noise"], found["far", "pixels", "same noise"]
    expected = correlations(base, noisy)
    assert near["mean"] == pytest.approx(expected.mean()) and near["pairs"] == 60
    half = 1.96 * expected.std(ddof=1) / np.sqrt(60)
    assert (near["low"], near["high"]) == pytest.approx((near["mean"] - half, near["mean"] + half), rel=1e-4)
    assert near["effect"] is near["higher"] is None
    for partner in ("same cluster", "any"):
        apart = found["near", "features", partner]
        assert apart["pairs"] == 60 and abs(apart["mean"]) < 0.1
        assert apart["effect"] > 3 and apart["higher"] > 0.95
        nothing = found["far", "pixels", partner]
        assert abs(nothing["effect"]) < 0.5 and 0.3 < nothing["higher"] < 0.7
    assert far["low"] < 0 < far["high"]


def test_the_effect_is_cohens_d() -> None:
    """Two pictures of one value each way: +1 with the same noise, -1 with any other, no spread but in one."""
    base = np.array([[0, 9, 0, 9], [9, 0, 9, 0], [0, 9, 0, 9], [9, 0, 9, 0]], dtype=np.uint8)
    table = pair_table(made(base), {"a": made(base)}, np.zeros(4, int), np.arange(4), seed=0)
    same, _, apart = (r for r in (row.model_dump() for row in table) if r["space"] == "pixels")
    values = correlations(base, base[partners(np.zeros(4, dtype=np.int64), 0)])
    assert same["mean"] == 1 and same["deviation"] == 0
    expected = (1 - values.mean()) / np.sqrt(values.var(ddof=1) / 2)
    assert apart["effect"] == pytest.approx(expected)
    assert apart["higher"] == pytest.approx((values < 1).mean())


def test_pairs_of_equal_conditions_and_of_nobody_do_not_count() -> None:
    base = np.random.default_rng(2).integers(0, 256, size=(4, 12), dtype=np.uint8)
    table = pair_table(made(base), {"a": made(base)}, np.array([0, 1, 2, 3]), np.zeros(4, int), seed=0)
    counts = {(row.space, row.partner): (row.pairs, row.mean) for row in table}
    assert counts["pixels", "same noise"][0] == 4
    assert counts["pixels", "same cluster"] == (0, None) and counts["features", "any"] == (0, None)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_large_pictures_are_reduced_before_they_are_kept(mode: str, channels: int) -> None:
    half = np.tile(np.array([0, 200], np.uint8), (2 * SIDE, 2 * SIDE))  # every other column
    picture = Image.fromarray(half).convert(mode)
    pixels = SavedSamples.pixels_of(range(3), [picture] * 3)
    kept = SavedSamples.of(pixels, np.zeros((3, 5), dtype=np.float32))
    assert kept.pixels.shape == (3, channels * SIDE * SIDE // 2) and (kept.pixels == 100).all()
    small = Image.new(mode, (4, 4))
    pixels = SavedSamples.pixels_of(range(MOST + 1), [small] * (MOST + 1))
    many = SavedSamples.of(pixels, np.zeros((MOST + 1, 2), dtype=np.float32))
    assert many.pixels.shape == (MOST, 16 * channels) and len(many.features) == MOST
    again = SavedSamples.read(many.tensors())
    assert (again.pixels == many.pixels).all() and (again.features == many.features).all()
