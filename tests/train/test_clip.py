"""The clipped gradient has torch's bits, whether there was anything to clip or not."""

import pytest
import torch
from torch import nn

from atoll.train.loop import clip


def gradients(norm: float) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    own = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])  # type: ignore[misc]
    for parameter in network.parameters():
        parameter.grad *= norm / own
    return network


@pytest.mark.parametrize("most", [1.0, 0.3, None])
@pytest.mark.parametrize("norm", [0.1, 0.5, 0.9989, 0.9995, 0.999999, 1.0, 1.000001, 7.0, float("nan")])
def test_same_bits_as_torch(norm: float, most: float | None) -> None:
    mine, torchs = gradients(norm), gradients(norm)
    told = clip(list(mine.parameters()), most)
    expected = float(torch.nn.utils.clip_grad_norm_(torchs.parameters(), most or float("inf")))
    assert told == expected or (told != told and expected != expected)
    for one, other in zip(mine.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(one.grad.isnan(), other.grad.isnan())  # type: ignore[union-attr]
        assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())  # type: ignore[union-attr, arg-type]
