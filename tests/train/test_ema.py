"""The average of the weights, against a slow reference."""

import pytest
import torch
from torch import nn

from atoll.train.state import Ema


def set_to(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(value)


@pytest.mark.parametrize(("half_life", "ramp"), [(500.0, 0.05), (100.0, 0.5), (0.0, 0.05), (500.0, 0.0)])
def test_it_agrees_with_a_slow_reference(half_life: float, ramp: float) -> None:
    source = torch.Generator().manual_seed(0)
    net, batch = nn.Linear(2, 2), 16
    ema = Ema(net, half_life, ramp)
    slow = {n: p.detach().double().clone() for n, p in net.named_parameters()}
    for step in range(1, 101):
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=source))
        ema.update(batch * step, batch)
        own = min(half_life, ramp * batch * step)
        keep = 2 ** (-batch / own) if own > 0 else 0.0
        assert ema.decay(batch * step, batch) == pytest.approx(keep, abs=1e-15)
        for n, p in net.named_parameters():
            slow[n] = keep * slow[n] + (1 - keep) * p.detach().double()
    for n in slow:
        torch.testing.assert_close(ema.weights[n].double(), slow[n], rtol=1e-5, atol=1e-6)


def test_without_a_half_life_it_is_a_copy() -> None:
    net = nn.Linear(2, 2)
    ema = Ema(net, 0.0, 0.05)
    set_to(net, 3.0)
    ema.update(16, 16)
    assert torch.equal(ema.weights["weight"], net.weight)  # type: ignore[arg-type]
    set_to(net, 4.0)
    assert float(ema.weights["weight"][0, 0]) == 3.0  # no alias of the network


@pytest.mark.parametrize("fails", [False, True])
def test_the_networks_own_bits_come_back(fails: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 5)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    ema = Ema(net, 100, 0.05)
    for average in ema.weights.values():
        average.fill_(0.1)
    try:
        with ema.in_place():
            assert all(torch.equal(p, ema.weights[n]) for n, p in net.named_parameters())
            assert not torch.equal(net.weight, before["weight"])
            if fails:
                raise RuntimeError("a validation that fails")
    except RuntimeError:
        pass
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert all(p.requires_grad for p in net.parameters())
