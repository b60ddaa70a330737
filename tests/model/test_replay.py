"""Recording and replaying, with a stand-in for CUDA's graphs: `tests/gpu` has the real ones."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.model import replay
from atoll.model.replay import Replayed, filled
from atoll.networks.families import family
from atoll.networks.lora import changed, trainable
from atoll.networks.settings import LoraConfig
from helpers_networks import conditions, denoiser, noise


class Twice(nn.Module):
    """A network that counts its calls and remembers how many rows each had."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = (nn.Parameter(torch.tensor(v), requires_grad=False) for v in (0.0, 2.0))
        self.rows = list[int]()

    def forward(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        self.rows.append(len(x))
        return self.first + self.weight * x + (t if cond.text is None else t + cond.text.sum((1, 2)))[:, None]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Outputs of what was recorded; replaying computes in place, as a graph does."""
    made: list[Tensor] = []

    def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        output = run()
        made.append(output)

        def again() -> None:
            output.copy_(run())

        return output, again

    monkeypatch.setattr(replay, "record", record)
    return made


def inputs(rows: int, text: int = 0) -> tuple[Tensor, Tensor, Condition]:
    states = torch.randn(rows, text, 3)
    return torch.randn(rows, 5), torch.rand(rows), Condition(text=states) if text else Condition()


def test_calls_of_every_shape_are_what_the_network_says(recordings: list[Tensor]):
    network = Twice()
    replayed = Replayed(network, network, "cpu")
    for rows, text in [(1, 0), (2, 0), (7, 2), (7, 3), (8, 2), (1, 0), (7, 2), (2, 0), (8, 3), (7, 3)] * 2:
        given = inputs(rows, text)
        with torch.inference_mode():
            once, again = replayed(*given), replayed(*given)
        expected = network(*given)
        assert torch.equal(once, expected) and torch.equal(again, expected), (rows, text)
    assert len(recordings) == 3  # 2, 8 with 2 states, 8 with 3: each is recorded once


def test_what_a_call_gave_stays_when_the_next_one_runs(recordings: list[Tensor]):
    network = Twice()
    replayed = Replayed(network, network, "cpu")
    given = [inputs(4) for _ in range(4)]
    with torch.no_grad():
        results = [replayed(*each) for each in given]
    assert all(torch.equal(result, network(*each)) for result, each in zip(results, given, strict=True))
    assert recordings


def test_a_shape_that_comes_once_is_not_recorded_and_the_oldest_make_room(
    recordings: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replay, "MOST", 2)
    network = Twice()
    replayed = Replayed(network, network, "cpu")
    with torch.no_grad():
        for rows in (2, 4, 6, 8, 2, 4, 6, 8):
            replayed(*inputs(rows))
        assert not recordings
        for rows in (2, 2, 4, 4, 2, 4, 2):
            replayed(*inputs(rows))
        assert len(recordings) == 2
        replayed(*inputs(6)), replayed(*inputs(6)), replayed(*inputs(4))  # 4 had made room for 6
    assert len(recordings) == 3


def test_weights_in_another_place_are_another_graph(recordings: list[Tensor]):
    network = Twice()
    replayed = Replayed(network, network, "cpu")
    given = inputs(2)
    for place in [torch.tensor(2.0), torch.tensor(3.0)] * 3:
        network.weight.data = place
        with torch.no_grad():
            assert torch.equal(replayed(*given), network(*given))


def test_what_cannot_be_recorded_is_called(monkeypatch: pytest.MonkeyPatch):
    def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "record", record)
    network = Twice()
    replayed = Replayed(network, network, "cpu")
    with torch.no_grad():
        for given in [inputs(3)] * 4:
            assert torch.equal(replayed(*given), network(*given))
    assert network.rows[0] == 4 and network.rows[-2] == 3  # no longer filled up


def test_nothing_is_recorded_with_gradients_or_on_a_cpu(recordings: list[Tensor]):
    network = Twice()
    for replayed in (Replayed(network, network, "cpu"), Replayed(network, network)):
        for _ in range(3):
            with torch.set_grad_enabled(replayed._device == "cpu"):
                replayed(*inputs(3))
    assert not recordings and network.rows == [3] * 6


def test_batches_are_filled_up_a_little_to_few_shapes():
    for rows in range(1, 600):
        assert rows <= filled(rows) <= max(rows * 9 / 8, rows + 1) and filled(filled(rows)) == filled(rows)
    assert len({filled(rows) for rows in range(1, 257)}) == 40


def test_changes_of_one_network_are_recorded_apart(recordings: list[Tensor]):
    """Their first parameter is the network's, which stays where it is: the address of a change tells."""
    network = denoiser(1)
    changed(network, LoraConfig(rank=2))
    pool = [{name: torch.randn_like(p) for name, p in trainable(network).items()} for _ in range(3)]
    replayed = Replayed(network, partial(family("pixart").predict, network), "cpu")
    given = noise(4), torch.rand(4), conditions(4)
    held = trainable(network)
    with torch.no_grad():
        for _ in range(3):
            for change in pool:
                for name, value in change.items():
                    held[name].data = value
                assert torch.equal(replayed(*given), family("pixart").predict(network, *given))
    assert len(recordings) == len(pool)
