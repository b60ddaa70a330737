"""KID and CMMD: closed forms, brute force, torchmetrics."""

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.image.kid import KernelInceptionDistance

from atoll.base.errors import DataError
from atoll.measure.metrics import mmd
from atoll.measure.metrics.mmd import cmmd, kid


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
    expected = float(within[0] + within[1] - 2 * across.mean())
    assert kid(x.float().numpy(), y.float().numpy(), 1, n).value == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


def test_a_set_that_is_whole_in_every_subset_tells_no_spread() -> None:
    one, other = drawn(0), drawn(1, 40)
    assert kid(one, other, 5, 40).deviation is None and kid(other, one, 5, 40).deviation is None
    assert kid(one, other, 5, 39).deviation is not None
    assert kid(one, one, 7, len(one)) == kid(one, one, 1, len(one))


def test_kid_is_unbiased() -> None:
    """Halves of one distribution are at zero within the spread, on either side of it."""
    x = drawn(0, 4000)
    found = kid(x[:2000], x[2000:], subsets=60, size=100)
    assert found.deviation is not None
    assert abs(found.value) < 4 * found.deviation / np.sqrt(20)
    far = kid(x[:2000], x[2000:] + np.float32(0.5), subsets=20, size=100)
    assert far.value > 10 * abs(found.value)


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
