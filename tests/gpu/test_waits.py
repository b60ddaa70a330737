"""How often the host waits for the device: counted on a pretended one, by `make test-pretended`."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.test_gpu import pixels

from atoll.base.device import own_device
from atoll.campaign.folder import Campaign
from atoll.model.model import Model
from atoll.train.run import train_run
from helpers import assembled, partitioned

pretended: Any = sys.modules.get("pretended")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(pretended is None, reason="counted on a pretended device: run `make test-pretended`"),
]


def waits(do: Callable[[], object]) -> Counter[str]:
    before = pretended.WAITS.copy()
    do()
    return pretended.WAITS - before  # type: ignore[no-any-return]


def test_a_training_step_waits_for_loss_and_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = {"validations": 0, "previews": 0, "checkpoint_every_s": 1e6, "log_every": 1000}
    steps, counts = list[int](), list[Counter[str]]()
    for samples in (480, 960):
        campaign = partitioned(tmp_path / str(samples), {"train": train, "budget": {"samples": samples}})
        counts.append(waits(partial(add_steps, steps, campaign)))
    each = {place: round(n / (steps[1] - steps[0]), 2) for place, n in (counts[1] - counts[0]).items()}
    with capsys.disabled():
        print(f"\na training step waits: {each}")
    assert steps[1] > steps[0] and 0 < sum(each.values()) <= 2


def add_steps(steps: list[int], campaign: Campaign) -> None:
    """Train an expert, and note how many steps it took."""
    card = train_run(campaign, "expert", 0)
    assert card is not None
    steps.append(card.samples // card.batch)


def test_a_sampling_step_waits_for_the_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model.load(assembled(tmp_path / "c", {}), device=own_device())
    pixels(model)  # what is recorded is recorded by now
    short, long = (waits(partial(pixels, model, routing="top-1", steps=n)) for n in (4, 12))
    each = {place: round(n / 8, 2) for place, n in (long - short).items()}
    with capsys.disabled():
        print(f"\na sampling step waits: {each}")
    assert 0 < sum(each.values()) <= 1
