"""The router: what its logits depend on."""

import pytest
import torch

from atoll.base.condition import Condition
from atoll.networks.router import Router
from atoll.networks.settings import DataShape
from helpers_networks import CLASSES, TEXT, conditions, noise, null, random_weights, router

B = 8
T = torch.linspace(0, 1, B)
NONE = DataShape(channels=3, size=8)


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs().amax(1) > 1e-3).all())


@pytest.mark.parametrize("shape", [TEXT, CLASSES, NONE], ids=["text", "class", "none"])
def test_logits_depend_on_picture_time_and_condition(shape: DataShape) -> None:
    network, x, cond = router(1, 5, shape), noise(B, shape), conditions(B, shape)
    logits = network(x, T, cond)
    assert logits.shape == (B, 5) and logits.dtype == torch.float32
    assert differ(logits, network(noise(B, shape, 1), T, cond))
    assert differ(logits, network(x, 1 - T, cond))
    if shape is TEXT:
        assert differ(logits, network(x, T, conditions(B, shape, 1)))
        assert differ(logits, network(x, T, null(shape).expand(B)))
    if shape is CLASSES:
        assert differ(logits, network(x, T, Condition(labels=(cond.labels + 1) % 4)))  # type: ignore[operator]


def test_no_label_is_the_null_label() -> None:
    network, x = router(1, 5, CLASSES), noise(B)
    assert torch.equal(network(x, T, Condition()), network(x, T, null(CLASSES).expand(B)))
    assert differ(network(x, T, Condition()), network(x, T, conditions(B, CLASSES)))


def test_labels_are_not_dropped_in_train_mode() -> None:
    network, x, cond = router(1, 5, CLASSES).train(), noise(64), conditions(64, CLASSES)
    t = torch.rand(64)
    assert all(torch.equal(network(x, t, cond), network(x, t, cond)) for _ in range(3))


def test_padding_of_the_text_does_not_count() -> None:
    network, x, cond = router(1, 5), noise(B), conditions(B)
    assert cond.text is not None and cond.mask is not None
    dirty = Condition(text=torch.where(cond.mask[..., None], cond.text, 50.0), mask=cond.mask)
    torch.testing.assert_close(network(x, T, dirty), network(x, T, cond), rtol=1e-5, atol=1e-5)


def test_a_router_that_sees_no_text_ignores_it() -> None:
    network, x = router(1, 5, NONE), noise(B)
    assert torch.equal(network(x, T, conditions(B)), network(x, T, Condition()))


def test_patches_are_places() -> None:
    """The same patches elsewhere are another picture: positions are embedded."""
    network = random_weights(Router(3, 3, 8, 4, 1, 2, 8), 0, 0.3)
    x = noise(B)
    swapped = x.roll(4, dims=3)  # the left patches and the right ones change places
    assert differ(network(x, T, Condition()), network(swapped, T, Condition()))
