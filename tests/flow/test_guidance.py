"""Classifier-free guidance."""

import torch

from atoll.flow.prediction import guide


def test_scale_one_is_the_conditional_velocity_exactly() -> None:
    cond, null = torch.randn(2, 3, 1, 2, 3, generator=torch.Generator().manual_seed(0)) * 1e3
    assert not torch.equal(null + (cond - null), cond)  # the formula alone would round
    assert guide(cond, null, 1.0) is cond
    assert torch.equal(guide(cond, null, torch.ones(3)), cond)


def test_a_scale_per_sample_where_the_batch_is_as_wide_as_the_image() -> None:
    cond, null = torch.randn(2, 3, 1, 2, 3, generator=torch.Generator().manual_seed(1))
    scales = [0.0, 1.0, 4.0]
    mixed = guide(cond, null, torch.tensor(scales))
    for row, scale in enumerate(scales):
        assert torch.equal(mixed[row], guide(cond[row : row + 1], null[row : row + 1], scale)[0])
