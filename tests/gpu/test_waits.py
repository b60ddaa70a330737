"""How often the host waits for the device: counted on a pretended one, by `make test-pretended`."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_gpu import changes, pixels

from atoll.base.device import own_device
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import Recipe, RunPlan
from atoll.campaign.token_encoder import token_encoder
from atoll.data.dataset import DataSet
from atoll.model.model import Model
from atoll.train.rows import TrainingRows
from atoll.train.run import train_run
from helpers import assembled, partitioned

pretended: Any = sys.modules.get("pretended")
pytestmark = [
    pytest.mark.pretended,
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


@pytest.mark.parametrize("stored", [True, False], ids=["states", "tokens"])
def test_a_batch_takes_real_tokens_along_and_waits_for_nothing(
    stored: bool, encoders: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States go to the device in half and unpadded; tokens are encoded there, and their states stay."""
    settings = changes("pixart", encoders)
    settings["data"]["precompute_text"] = stored
    campaign = partitioned(tmp_path / "c", settings)
    config, dataset = campaign.config, DataSet.open(campaign.store, "islands/0/data")
    plan = RunPlan.read(campaign.store, "islands/0/island.json")
    network = config.network.model_dump()
    recipe = Recipe(objective=config.objective, train=config.train, network=network, plan=plan)
    rows = TrainingRows.of(dataset, config.condition, recipe, encoder=token_encoder(campaign, dataset))
    there = replace(rows, device=own_device())
    there.batch(range(16))  # what is set up once is there
    moved, pinned = pretended.BYTES.copy(), pretended.PAGEABLE.copy()
    waited = waits(lambda: there.batch(range(16, 32)))
    brought, unpinned = (pretended.BYTES - moved).total(), pretended.PAGEABLE - pinned
    on_cpu = rows.batch(range(16, 32))
    _, mask = dataset.column(config.data.text_column).read_ragged(
        rows.train.rows[rows.order.at(range(16, 32))], plan.shape.text_length
    )
    tokens, longest = int(mask.sum()), plan.shape.text_length if stored else int(mask.sum(1).max())
    text = tokens * (plan.shape.text_width * 2 if stored else 4)
    # Latents and noise, times and the draws of dropout, the mask.
    rest = 2 * on_cpu.x0.numel() * 4 + 2 * 16 * 4 + 16 * longest
    with capsys.disabled():
        print(f"\na batch of 16 brings {brought:,} bytes, of them text {text:,}; waits {waited}")
    # Transformers looks once whether the mask has a hole; the thread that reads ahead waits, and no step.
    assert waited.total() <= (0 if stored else 1) and all("encoders/text" in place for place in waited)
    assert brought == text + rest and tokens < mask.numel() and not unpinned
    batch = there.batch(range(16, 32))
    assert batch.cond.text is not None and on_cpu.cond.text is not None
    assert torch.equal(batch.cond.text.cpu(), on_cpu.cond.text) or not stored


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
