"""Learning-rate schedules at known points, and what a checkpoint must agree with."""

import pytest

from atoll.campaign.runs import Recipe
from atoll.campaign.settings.train import TrainConfig

TOTAL = 100_000


def rate(samples: float, **settings: object) -> float:
    return TrainConfig.parse({"lr": 2e-3, **settings}, "a test").learning_rate(samples, TOTAL)


COSINE = {"lr_schedule": "cosine"}


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        ({}, {1: 2e-3, 5000: 2e-3, TOTAL: 2e-3}),
        ({"warmup": 10_000}, {0: 0, 2500: 0.5e-3, 5000: 1e-3, 10_000: 2e-3, TOTAL: 2e-3}),
        ({**COSINE, "warmup": 10_000}, {0: 0, 2500: 0.5e-3, 5000: 1e-3, 10_000: 2e-3}),
        (COSINE, {0: 2e-3, TOTAL / 4: 2e-3 * 0.8535533906, TOTAL / 2: 1e-3, TOTAL: 0}),
        ({**COSINE, "lr_floor": 0.1}, {0: 2e-3, TOTAL / 2: 1.1e-3, TOTAL: 2e-4, 2 * TOTAL: 2e-4}),
        ({**COSINE, "warmup": 20_000}, {20_000: 2e-3, 60_000: 1e-3, TOTAL: 0}),
        ({**COSINE, "warmup": 20_000, "batch": 16}, {60_000: 1e-3}),  # it counts samples, not steps
        # Of a run that is shorter than its warm-up a fifth is enough to warm up.
        ({"warmup": 2 * TOTAL}, {10_000: 1e-3, 20_000: 2e-3, TOTAL: 2e-3}),
        ({**COSINE, "warmup": 2 * TOTAL}, {10_000: 1e-3, 20_000: 2e-3, 60_000: 1e-3, TOTAL: 0}),
    ],
)
def test_learning_rates(settings: dict[str, object], points: dict[float, float]) -> None:
    assert [rate(s, **settings) for s in points] == pytest.approx(list(points.values()), abs=1e-12)


PLAN = {"role": "expert", "island": 0, "rows": 10, "steps": 7, "batch": 3, "partition": "p", "seed": 1}
PLAN |= {"init_seed": 2, "init_sha256": "i", "train_flops": 1.0, "forward_flops": 1.0}
PLAN |= {"shape": {"channels": 4, "size": 8}}


def recipe(train: dict | None = None, **plan: object) -> Recipe:  # type: ignore[type-arg]
    tree = {"objective": {}, "train": train or {}, "network": {"depth": 1}, "plan": {**PLAN, **plan}}
    return Recipe.parse(tree, "a test")


@pytest.mark.parametrize("key", ["log_every", "validations", "validation_rows", "previews", "keep"])
def test_how_a_run_is_watched_does_not_decide_its_weights(key: str) -> None:
    assert recipe({key: 3}).learned() == recipe({key: 4}).learned()
    assert recipe({"checkpoint_every_s": 60}).learned() == recipe({"checkpoint_every_s": 120}).learned()


@pytest.mark.parametrize(
    "change", [{"lr": 1.0}, {"betas": [0.5, 0.5]}, {"threads": 2}, {"precision": "bf16"}]
)
def test_what_decides_the_weights_is_kept(change: dict) -> None:  # type: ignore[type-arg]
    assert recipe(change).learned() != recipe().learned()
    assert recipe(seed=9).learned() != recipe().learned()
    assert recipe(steps=9).learned() != recipe().learned()
