"""Stability of paths and where they land: constructed cases whose answers are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import DataError
from atoll.measure.diagnosis.sampled import cluster_match, reactions, stability
from atoll.model.bank import Bank
from atoll.model.generate import Conditions, Sampling
from atoll.model.generation import Generation
from atoll.model.sampler import starting_noise

SHAPE, STEPS = (1, 2, 2), 4


class Linear:
    """A flow that is its slope times its state."""

    def __init__(self, slope: float, constant: float = 0.0) -> None:
        self.slope, self.constant = slope, constant

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.slope * x_t + self.constant


class Restless:
    """A router that any nudge confuses."""

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        first = (x_t.mean((1, 2, 3)) * 1e4).floor() % 2
        return 50 * torch.stack([first, 1 - first], 1)


def measured(
    model: object, count: int = 40, **how: object
) -> tuple[dict[str, float], list[dict[str, float]]]:
    batch = how.pop("batch", 16)
    labels = Condition(labels=torch.zeros(count).long())
    rows = Conditions.of_rows(labels, labels.select(slice(0, 1)), count)
    generation = Generation(**{"guidance": 1.0, "steps": STEPS, "seed": 3, **how})  # type: ignore[arg-type]
    sampling = Sampling(generation, rows, SHAPE, count, batch=batch)  # type: ignore[arg-type]
    bank = model if isinstance(model, Bank) else Bank([model])  # type: ignore[list-item]
    # In two parts, as two processes have them.
    parts = [(0, batch), (batch, count - batch)] if batch < count else [(0, count)]
    reacted = [reactions(bank, replace(sampling, first=first, count=own)) for first, own in parts]
    joined = {name: torch.cat([part[name] for part in reacted]) for name in reacted[0]}
    ends, path = stability(joined, generation, batch)
    return ends.model_dump(exclude={"strategy"}), [row.model_dump() for row in path]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("slope", [0.7, -1.5])
def test_a_linear_flow_has_the_numbers_of_its_slope(slope: float, guidance: float) -> None:
    line, path = measured(Linear(slope, 0.3), guidance=guidance)
    assert [row["lipschitz"] for row in path] == pytest.approx([abs(slope)] * STEPS, rel=1e-4)
    foreseen = [abs(1 - slope * t) for t in (1.0, 0.75, 0.5, 0.25)]
    assert [row["foreseen"] for row in path] == pytest.approx(foreseen, rel=1e-3)
    assert [row["t"] for row in path] == [1.0, 0.75, 0.5, 0.25] and path[0]["samples"] == 40
    assert line["sensitivity"] == pytest.approx(abs(1 - slope / STEPS) ** STEPS, rel=1e-3)
    assert line["sensitivity_se"] == pytest.approx(0, abs=1e-4)
    # Euler steps of size h: x' = (1 - h slope) x - h constant.
    ends = []
    for steps in (STEPS, 2 * STEPS):
        x = starting_noise(3, range(40), SHAPE).double()
        for _ in range(steps):
            x = x - (slope * x + 0.3) / steps
        ends.append(x)
    apart = (ends[0] - ends[1]).flatten(1).square().mean(1).sqrt()
    assert line["refinement"] == pytest.approx(float(apart.mean()), rel=1e-4)
    assert line["refinement_se"] == pytest.approx(float(apart.std() / math.sqrt(40)), rel=1e-3)


def test_a_change_of_expert_counts_for_the_ends_and_not_for_the_field() -> None:
    line, path = measured(Bank([Linear(0, 1), Linear(0, -1)], Restless()), routing="top-1")
    assert [(row["lipschitz"], row["foreseen"]) for row in path] == [(0.0, 1.0)] * STEPS
    assert line["sensitivity"] > 10  # some steps of 1 / 4 either way, from a nudge of 0.01
    one = Bank([Linear(0, 1)], type("Sure", (), {"logits": lambda *a: torch.zeros(len(a[1]), 1)})())
    assert measured(one, routing="top-1")[0]["sensitivity"] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("name", ["once", "top-1", "full"])
def test_numbers_do_not_depend_on_batches(name: str) -> None:
    model = Bank([Linear(0.5), Linear(-0.5)], Restless())
    whole, parts = (measured(model, batch=size, routing=name) for size in (40, 7))
    assert whole[0] == pytest.approx(parts[0], rel=1e-4)
    assert [row["lipschitz"] for row in whole[1]] == pytest.approx([row["lipschitz"] for row in parts[1]])


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    with pytest.raises(DataError, match="NaN or infinity"):
        measured(Linear(float("nan")))


def test_where_samples_land_by_hand() -> None:
    centroids = np.array([[1, 0], [0, 1]], np.float32)
    features = np.array([[3, 0], [0, 2], [0, 5]], np.float32)  # at the first centroid, at the second twice
    weights = np.array([[[1, 0], [1, 0], [0.25, 0.75]]] * 2)
    heldout, clusters = np.array([[0, 1.0]], np.float32), np.array([1])
    table = cluster_match(features, weights, heldout, clusters, centroids)
    rows = {row.cluster: row.model_dump() for row in table}
    far = math.sqrt(2)
    assert (rows[0]["samples"], rows[0]["landed"]) == (2, 0.5)  # the second sample left its expert's cluster
    assert rows[0]["served"] == pytest.approx(far / 2) and rows[0]["others"] == pytest.approx(far / 2)
    assert rows[0]["heldout"] == 0 and rows[0]["own"] is None
    assert (rows[1]["samples"], rows[1]["landed"]) == (1, 1.0)
    assert rows[1]["served"] == pytest.approx(far / 4) and rows[1]["others"] == pytest.approx(far * 3 / 4)
    assert rows[1]["own"] == pytest.approx(0, abs=1e-6) and rows[1]["heldout_others"] == pytest.approx(far)
    assert rows["all"]["samples"] == 3 and rows["all"]["landed"] == pytest.approx(2 / 3)
    assert rows["all"]["served"] == pytest.approx((far / 2 * 2 + far / 4) / 3)


def test_nothing_held_out_and_a_single_cluster_leave_gaps() -> None:
    one = np.ones((4, 2), np.float32)
    for row in cluster_match(one, np.ones((2, 4, 1)), one[:0], np.zeros(0, np.int64), one[:1]):
        assert row.samples == 4 and row.landed == 1.0
        assert row.others is None and row.heldout == 0 and row.own is None
