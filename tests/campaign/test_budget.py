"""Equal training FLOPs: the experts with their router, and the monolith."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.campaign.budget import Budget, RunBudget, divide, flops_ratio, too_small
from atoll.campaign.runs import Run
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.networks.settings import DataShape
from helpers import SMALL, merged

PRETRAIN, ROUTER, MONOLITH, STUDENT = map(Run, ("pretrain", "router", "monolith", "student"))
SHAPE = DataShape(channels=1, size=8, classes=2)
TEXT = DataShape(channels=4, size=16, text_width=32, text_length=7)
PIXART = {"condition": "text", "network": {"family": "pixart", "patch": 2}, "router": {"patch": 2}}


def budget(sizes: list[int], shape: DataShape = SHAPE, **changes: Any) -> Budget:
    tree = merged(merged(SMALL, {"partition": {"k": len(sizes)}}), changes)
    return divide(CampaignConfig.parse(tree, "a test"), shape, sizes)


def experts(made: Budget) -> list[RunBudget]:
    return [part for run, part in made.items() if run.expert is not None]


def spent(made: Budget) -> float:
    return sum(part.train_flops for run, part in made.items() if run.kind.counted == "ensemble")


@pytest.mark.parametrize("compute", ["proportional", "equal"])
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.integers(20, 5000), min_size=1, max_size=16),
    samples=st.integers(60_000, 10_000_000),
    batch=st.integers(16, 300),
    router_batch=st.integers(4, 16),
    share=st.floats(0.01, 0.3),
    text=st.booleans(),
    seed=st.sampled_from([0.0, 0.05, 1 / 3, 0.6]),
)
def test_the_parts_cost_the_whole(
    compute: str,
    sizes: list[int],
    samples: int,
    batch: int,
    router_batch: int,
    share: float,
    text: bool,
    seed: float,
) -> None:
    made = budget(
        sizes,
        TEXT if text else SHAPE,
        **merged(PIXART if text else {}, {"router": {"share": share, "train": {"batch": router_batch}}}),
        budget={"compute": compute, "samples": samples, "pretrain": seed},
        train={"batch": batch},
    )
    assert spent(made) == pytest.approx(made[MONOLITH].train_flops, rel=0.01)
    assert flops_ratio(made) == pytest.approx(spent(made) / made[MONOLITH].train_flops)
    assert (made[PRETRAIN].train_flops if PRETRAIN in made else 0.0) == pytest.approx(
        seed * made[MONOLITH].train_flops, rel=0.05
    )
    assert made[ROUTER].train_flops == pytest.approx(share * made[MONOLITH].train_flops, rel=0.05)


def test_proportional_is_in_proportion_to_the_cluster() -> None:
    """Every row is seen as often as the monolith sees it, less the router's share."""
    sizes = [100, 300, 50, 550]
    made = budget(sizes, budget={"samples": 1_000_000})
    assert {share.batch for share in experts(made)} == {made[MONOLITH].batch}
    for size, share in zip(sizes, experts(made), strict=True):
        assert share.steps * share.batch / size == pytest.approx(0.9 * 1_000_000 / 1000, rel=0.01)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_equal_is_the_papers_setting(k: int) -> None:
    """256 -> 8 x 32: the batch divided by K, and the same number of steps for all."""
    made = budget(
        [10 * (i + 1) for i in range(k)],
        budget={"samples": 100_000, "compute": "equal"},
        train={"batch": 256},
    )
    assert {share.batch for share in experts(made)} == {256 // k}
    (steps,) = {share.steps for share in experts(made)}
    assert steps == pytest.approx(0.9 * made[MONOLITH].steps * 256 / (256 // k * k), rel=0.01)
    for samples in range(1000, 3000, 500):  # and where parts are rounded
        few = budget([7] * k, budget={"samples": samples, "compute": "equal"})
        assert len({share.steps for share in experts(few)}) == 1


def test_islands_of_their_own_kind() -> None:
    """A deeper expert gets fewer steps, a larger batch too; the sum stays."""
    changes = {0: {"network": {"depth": 3}}, 1: {"train": {"batch": 32}}}
    made = budget([500, 500, 500], budget={"samples": 500_000, "expert_batch": 16}, islands=changes)
    deep, wide, plain = experts(made)
    assert deep.flops.train > 2 * plain.flops.train and deep.steps < plain.steps / 2
    assert wide.batch == 32 and wide.steps == pytest.approx(plain.steps / 2, rel=0.01)
    assert spent(made) == pytest.approx(made[MONOLITH].train_flops, rel=0.01)
    assert deep.train_flops == pytest.approx(plain.train_flops, rel=0.01)


def test_a_seed_takes_its_share_from_the_experts() -> None:
    without = budget([300, 700], budget={"samples": 1_000_000})
    seeded = budget([300, 700], budget={"samples": 1_000_000, "pretrain": 0.3})
    assert PRETRAIN not in without
    pretrain, monolith = seeded[PRETRAIN], seeded[MONOLITH]
    assert (pretrain.batch, pretrain.flops) == (monolith.batch, monolith.flops)
    assert pretrain.steps == round(0.3 * monolith.steps)
    assert (monolith, seeded[ROUTER]) == (without[MONOLITH], without[ROUTER])
    for before, after in zip(experts(without), experts(seeded), strict=True):
        assert after.steps / before.steps == pytest.approx((1 - 0.1 - 0.3) / (1 - 0.1), rel=0.01)


@pytest.mark.parametrize(
    ("settings", "asked", "routed"),
    [
        ({}, 1.0, 0.0),
        ({"guidance": 2.0}, 2.0, 0.0),
        ({"guidance": 2.0, "steps": 8}, 6.0, 0.0),
        ({"teacher": "routed"}, 1.0, 1.0),
        ({"teacher": "routed", "routing": "top-2"}, 2.0, 1.0),
        ({"teacher": "routed", "routing": "full"}, 3.0, 1.0),
        ({"teacher": "routed", "routing": "once"}, 1.0, 1.0),
        ({"teacher": "routed", "routing": "top-1", "guidance": 2.0, "steps": 4}, 12.0, 6.0),
        ({"teacher": "routed", "routing": "once", "steps": 4}, 6.0, 1.0),
        ({"teacher": "routed", "routing": "once", "steps": 4, "reuse": 4}, 1.5, 0.25),
        ({"teacher": "routed", "routing": "top-1 null sample-1", "guidance": 2.0, "steps": 4}, 12.0, 12.0),
        (
            {"teacher": "routed", "routing": "full", "guidance": 3.0, "steps": 1, "teacher_steps": 5},
            30.0,
            10.0,
        ),
    ],
)
def test_a_student_costs_its_own_passes_and_its_teachers(
    settings: dict[str, Any], asked: float, routed: float
) -> None:
    without = budget([200, 300, 500], budget={"samples": 100_000})
    made = budget([200, 300, 500], budget={"samples": 100_000}, student={"stock": False, **settings})
    assert STUDENT not in without
    assert (made[STUDENT].steps, made[STUDENT].batch) == (made[MONOLITH].steps, made[MONOLITH].batch // 4)
    dense, router = made[MONOLITH].flops, routed * made[ROUTER].flops.forward
    assert made[STUDENT].flops.train == pytest.approx(dense.train + router + asked * dense.forward)
    assert made[STUDENT].flops.forward == dense.forward
    if not settings:  # 3F + F at a quarter of the batch
        assert made[STUDENT].train_flops / made[MONOLITH].train_flops == pytest.approx(1 / 3, abs=0.01)
    # The student comes on top.
    assert (experts(made), flops_ratio(made)) == (experts(without), flops_ratio(without))


def test_a_students_shares_and_network_are_its_own() -> None:
    student = {"stock": False, "batch_share": 0.5, "step_share": 0.1, "network": {"depth": 3}}
    made = budget([500, 500], budget={"samples": 100_000}, student=student)
    assert (made[STUDENT].batch, made[STUDENT].steps) == (8, round(0.1 * made[MONOLITH].steps))
    assert made[STUDENT].flops.forward > 2 * made[MONOLITH].flops.forward
    wide = budget([900, 100], student={"stock": False}, islands={1: {"network": {"depth": 3}}})
    teacher = wide[STUDENT].flops.train - wide[MONOLITH].flops.train
    own = [share.flops.forward for share in experts(wide)]
    assert teacher == pytest.approx(0.9 * own[0] + 0.1 * own[1])  # rows of each cluster in proportion


def test_a_budget_that_is_too_small_is_told() -> None:
    def warnings(samples: int, warmup: int) -> list[str]:
        changes = {"partition": {"k": 2}, "budget": {"samples": samples}, "train": {"batch": 2}}
        config = CampaignConfig.parse(merged(merged(SMALL, changes), {"train": {"warmup": warmup}}), "a test")
        return too_small(config, divide(config, SHAPE, [97, 3]))

    assert warnings(100_000, 400) == []
    (cut,) = warnings(100_000, 1_000)
    assert cut == "warm-up (train.warmup) is shortened to a fifth of the training in 1 of 4 runs"
    brief, _, cost = warnings(2, 1_000)
    assert brief == "under 100 steps (as few as 1) in 4 of 4 runs: raise budget.samples or lower partition.k"
    assert "times the monolith's training: raise budget.samples" in cost


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router": {"patch": 5}}, r"patches of 5: change router\.patch"),
        ({"islands": {1: {"network": {"patch": 3}}}}, "patches of 3"),
        ({"budget": {"pretrain": 0.95}}, "pretrain and router.share are 1.05 of the budget: nothing is"),
        ({"budget": {"samples": 10**12}, "train": {"batch": 8}}, "steps of 8 samples: change budget.samples"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        budget([5, 5], **changes)
