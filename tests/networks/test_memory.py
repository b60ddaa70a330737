"""Memory counted without having it: against what real tensors take."""

import pytest
import torch

from atoll.networks.cost import Footprint, empty_condition, footprint, saved_bytes
from atoll.networks.families import family, parameter_count
from atoll.networks.settings import NetworkConfig
from atoll.train.ema import Ema
from helpers_networks import CLASSES, TEXT, TINY

SHAPES = {"dit": CLASSES, "pixart": TEXT, "sd3": TEXT, "flux": TEXT}


def config(name: str, **changes: object) -> NetworkConfig:
    return NetworkConfig.parse({**TINY, "patch": 2, "depth": 3, "family": name, **changes}, "a test")


def counted(name: str, bf16: bool = False, **changes: object) -> Footprint:
    adapter, settings = family(name), config(name, **changes)
    return footprint(lambda: adapter.build(settings, SHAPES[name]), adapter.predict, SHAPES[name], bf16)


def nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_state_is_what_a_training_step_leaves_in_memory(name: str) -> None:
    adapter, shape = family(name), SHAPES[name]
    network = adapter.build(config(name), shape)
    ema, optimizer = Ema(network, 10, 1), torch.optim.AdamW(network.parameters(), fused=True)
    x, t, cond = torch.randn(2, shape.channels, 8, 8), torch.rand(2), empty_condition(shape, 2)
    adapter.predict(network, x, t, cond).square().mean().backward()
    optimizer.step()
    own = list(network.parameters())
    state = [v for values in optimizer.state.values() for key, v in values.items() if key != "step"]
    grads = [p.grad for p in own if p.grad is not None]
    assert len(grads) == len(own)
    real = nbytes([*own, *grads, *state, *ema.weights.values()])
    found = counted(name)
    assert found.parameters == parameter_count(network)
    assert found.state == real == 20 * found.parameters


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_activations_are_what_autograd_keeps_of_real_tensors(name: str, bf16: bool) -> None:
    adapter, shape = family(name), SHAPES[name]
    network = adapter.build(config(name), shape)

    def kept(batch: int) -> int:
        x = torch.randn(batch, shape.channels, 8, 8)
        t, cond = torch.rand(batch), empty_condition(shape, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return saved_bytes(lambda: adapter.predict(network, x, t, cond), network)

    found = counted(name, bf16)
    assert found.activations == pytest.approx((kept(9) - kept(5)) / 4, rel=0.05)
    fixed = kept(5) - 5 * found.activations
    assert found.casts == (2 * found.parameters if bf16 else 0)
    if (
        bf16
    ):  # weights of matrix products are kept in bf16; tables, and what only the autocast cache holds, not
        assert 0.4 * found.casts < fixed <= found.casts


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_more_network_is_more_memory_and_checkpointing_less(name: str) -> None:
    small, deep, wide = counted(name), counted(name, depth=12), counted(name, heads=4)
    for more in (deep, wide):
        assert more.parameters > small.parameters and more.activations > small.activations
    assert deep.block_parameters == small.block_parameters
    assert deep.outer_parameters == small.outer_parameters
    assert deep.parameters == deep.outer_parameters + 12 * deep.block_parameters
    block = (deep.activations - small.activations) / 9
    assert block < deep.checkpointed < deep.activations / 2
    # Beyond one whole block there are the inputs of the others, which are small.
    assert (deep.checkpointed - small.checkpointed) / 9 < block / 5
