"""Learning-rate schedules at known points, and what a checkpoint must agree with."""

import pytest

from atoll.campaign.settings.train import Recipe, TrainConfig

TOTAL = 100_000


def rate(samples: float, **settings: object) -> float:
    return TrainConfig.parse({"lr": 2e-3, **settings}, "a test").learning_rate(samples, TOTAL)


def test_constant() -> None:
    assert [rate(s) for s in (1, 5000, TOTAL)] == [2e-3] * 3


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_warm_up_rises_evenly_from_zero(schedule: str) -> None:
    points = [rate(s, warmup=10_000, lr_schedule=schedule) for s in (0, 2500, 5000, 10_000)]
    assert points == pytest.approx([0, 0.5e-3, 1e-3, 2e-3])


def test_cosine_falls_to_its_floor() -> None:
    points = [rate(s, lr_schedule="cosine") for s in (0, TOTAL / 4, TOTAL / 2, TOTAL)]
    assert points == pytest.approx([2e-3, 2e-3 * 0.8535533906, 1e-3, 0], abs=1e-12)
    points = [rate(s, lr_schedule="cosine", lr_floor=0.1) for s in (0, TOTAL / 2, TOTAL, 2 * TOTAL)]
    assert points == pytest.approx([2e-3, 2e-3 * 0.55, 2e-4, 2e-4])


def test_cosine_begins_after_the_warm_up() -> None:
    settings = {"lr_schedule": "cosine", "warmup": 20_000}
    assert rate(20_000, **settings) == pytest.approx(2e-3)
    assert rate(60_000, **settings) == pytest.approx(1e-3)
    assert rate(100_000, **settings) == pytest.approx(0, abs=1e-12)


def test_it_counts_samples_not_steps() -> None:
    settings = {"lr_schedule": "cosine", "warmup": 20_000}
    assert rate(64_000, batch=16, **settings) == rate(64_000, batch=256, **settings)


def test_a_warm_up_longer_than_the_run() -> None:
    for schedule in ("constant", "cosine"):
        assert rate(TOTAL, warmup=2 * TOTAL, lr_schedule=schedule) == pytest.approx(1e-3)


PLAN = {
    "role": "expert",
    "island": 0,
    "rows": 10,
    "steps": 7,
    "batch": 3,
    "partition": "p",
    "seed": 1,
    "init_seed": 2,
    "init_sha256": "i",
    "train_flops": 1.0,
    "forward_flops": 1.0,
    "shape": {"channels": 4, "size": 8},
}


def recipe(train: dict | None = None, **plan: object) -> Recipe:  # type: ignore[type-arg]
    tree = {"objective": {}, "train": train or {}, "network": {"depth": 1}, "plan": {**PLAN, **plan}}
    return Recipe.parse(tree, "a test")


def test_a_run_is_as_long_as_its_plan() -> None:
    assert recipe().plan.samples == 21


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
