"""What a position draws is fixed for good: published weights and pictures depend on these bits."""

import pytest
import torch

from atoll.base.rng import generator, normals, uniforms


@pytest.mark.parametrize("shape", [(), (1,), (3,), (15,), (16,), (17,), (3, 5, 7), (4, 8, 8)])
def test_a_row_is_what_torch_draws_from_its_own_generator(shape: tuple[int, ...]) -> None:
    where = [0, 5, 2**40]
    for draw, reference in ((normals, torch.randn), (uniforms, torch.rand)):
        rows = draw(3, "noise", where, shape)
        assert rows.dtype is torch.float32 and rows.shape == (3, *shape)
        for row, position in zip(rows, where, strict=True):
            assert torch.equal(row, reference(shape, generator=generator(3, "noise", position)))


def test_no_positions() -> None:
    assert normals(0, "noise", [], (4, 2)).shape == (0, 4, 2)
    assert uniforms(0, "time", []).shape == (0,)
