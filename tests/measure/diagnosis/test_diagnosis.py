"""A diagnosis: its tables against formulas, and the stage as a user runs it."""

import csv
import io
import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.config import Config
from atoll.base.errors import ConfigError, DataError
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.weights import write_weights
from atoll.flow.objective import noisy
from atoll.flow.schedule import RectifiedFlow
from atoll.measure.diagnosis import labelled_rows, stage
from atoll.measure.diagnosis.labelled_rows import TEMPERATURES, Alignment, Calibration, Rows, answers_of
from atoll.measure.diagnosis.sampled import Copies, Nearest, switches, two_nearest, usage
from atoll.measure.metrics.projection import Means
from atoll.model.bank import Bank
from helpers import Run, atoll, refused
from identities.test_mixture import Exact, World

SHAPE = (1, 2, 2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records(rows: Sequence[Config]) -> list[dict[str, Any]]:
    return [row.model_dump(exclude={"split", "strategy"}) for row in rows]


def found(rows: Sequence[Config], **where: object) -> dict[str, Any]:
    """The one row of a table that these columns pick."""
    (record,) = [r for r in records(rows) if all(r[name] == value for name, value in where.items())]
    return record


class Constant:
    """An expert that always says the same."""

    def __init__(self, value: float) -> None:
        self.value = value

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return torch.full_like(x_t, self.value)


class Fixed:
    """A router that knows the same whatever it sees; or the answer by the label of a row."""

    def __init__(self, p: Sequence[float] | Tensor) -> None:
        self.p = torch.as_tensor(p, dtype=torch.float64)

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if self.p.ndim == 1:
            return self.p.log().expand(len(x_t), -1)
        assert cond.labels is not None
        return self.p[cond.labels].log()


def rows(clusters: Sequence[int], target: Sequence[float], batch: int = 3) -> list[Rows]:
    """Rows whose eps - x0 is one value everywhere, their number as their label."""
    own, wanted = torch.tensor(clusters), torch.tensor(target).view(-1, 1, 1, 1).expand(-1, *SHAPE)
    parts = torch.arange(len(own)).split(batch)
    return [Rows(-wanted[i], Condition(labels=i), torch.zeros(len(i), *SHAPE), own[i]) for i in parts]


def config(**settings: object) -> DiagnoseConfig:
    return DiagnoseConfig.parse({"times": [0.25, 0.75, 1.0], **settings}, "a test")


# Means.


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_means_and_standard_errors_are_those_of_all_rows_at_once(batch: int) -> None:
    values = torch.randn(100, 3, generator=seeded(), dtype=torch.float64) + 1e6
    groups = torch.randint(0, 4, (100,), generator=seeded(1))
    values[::5, 1] = torch.nan
    means = Means.zeros(5, 3)
    for part in torch.arange(100).split(batch):
        means.add(values[part], groups[part])
    for group, column in itertools.product(range(4), range(3)):
        mine = values[groups == group, column]
        mine = mine[~mine.isnan()]
        count, mean, se = means.of(group).cells(column)
        assert (count, mean) == (len(mine), pytest.approx(float(mine.mean()), rel=1e-14))
        assert se == pytest.approx(float(mine.std() / math.sqrt(len(mine))), rel=1e-6)
    assert means.of(4).cells(0) == (0, None, None)
    both = values[(groups == 1) | (groups == 3), 2]
    count, mean, se = means.pooled([1, 3]).cells(2)
    assert (count, mean) == (len(both), pytest.approx(float(both.mean()), rel=1e-14))
    assert se == pytest.approx(float(both.std() / math.sqrt(len(both))), rel=1e-6)


# The router.


def routed(logp: Tensor, clusters: Tensor, prior: Tensor, bins: int = 15) -> dict[str, Any]:
    """Tables of a router that gave these answers `(N, K)` at t = 0.5, in batches."""
    calibration = Calibration([0.5], prior, bins)
    for part in torch.arange(len(clusters)).split(13):
        calibration.add(logp[None, part], clusters[part])
    return calibration.tables()


def test_a_uniform_router_has_the_likelihood_of_a_guess() -> None:
    clusters = torch.arange(50) % 3
    one = found(routed(torch.zeros(50, 3), clusters, torch.tensor([30, 10, 10]), 10)["router"])
    assert one["nll"] == pytest.approx(math.log(3), abs=1e-12) and one["nll_se"] == pytest.approx(0, abs=1e-9)
    assert one["confidence"] == pytest.approx(1 / 3)
    assert one["accuracy"] == pytest.approx(17 / 50)  # the first of equals
    shares, asked = np.array([0.6, 0.2, 0.2]), np.bincount(clusters, minlength=3) / 50
    assert one["prior_nll"] == pytest.approx(-(asked * np.log(shares)).sum())
    assert one["prior_entropy"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert one["prior_accuracy"] == pytest.approx(17 / 50)
    # What the prior holds for impossible has an infinite likelihood, which JSON cannot hold.
    impossible = routed(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([1, 0]))
    assert found(impossible["router"])["prior_nll"] is None


def drawn_from(p: Tensor, per_row: int) -> tuple[Tensor, Tensor]:
    """Every posterior `(N, K)` with clusters in exactly its proportions: `per_row` rows each."""
    counts = (p * per_row).round().long()
    assert torch.equal(counts.double() / per_row, p)
    clusters = [torch.arange(p.shape[1]).repeat_interleave(count) for count in counts]
    return p.repeat_interleave(per_row, 0), torch.cat(clusters)


POSTERIORS = torch.tensor(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5], [0.0, 0.05, 0.95]], dtype=torch.float64
)


def test_the_exact_posterior_is_calibrated() -> None:
    """Clusters in exactly the proportions that the router says: all numbers are those of the formulas."""
    p, clusters = drawn_from(POSTERIORS, 20)
    tables = routed(p.log(), clusters, torch.bincount(clusters))
    one, entropy = found(tables["router"]), -torch.special.xlogy(POSTERIORS, POSTERIORS).sum(1).mean()
    assert one["nll"] == pytest.approx(float(entropy), abs=1e-12)
    assert one["accuracy"] == pytest.approx(float(POSTERIORS.max(1).values.mean()), abs=1e-12)
    assert one["ece"] == pytest.approx(0, abs=1e-12) and one["ece_chance"] > 0.03
    assert one["temperature"] == 1 and one["nll_tempered"] == pytest.approx(one["nll"], abs=1e-12)
    assert all(r["confidence"] == pytest.approx(r["accuracy"]) for r in records(tables["reliability"]))
    third = found(tables["router_clusters"], cluster=0)
    assert third["rows"] == 21 and third["accuracy"] == pytest.approx(14 / 21)


def test_a_router_that_is_too_sure_has_the_error_that_was_put_in() -> None:
    """It says 0.9 and is right in 0.6 of the cases; and 0.8 where it is right in 0.7."""
    sure = torch.tensor([[0.9, 0.1]] * 30 + [[0.2, 0.8]] * 10, dtype=torch.float64)
    tables = routed(sure.log(), torch.tensor([0] * 18 + [1] * 12 + [1] * 7 + [0] * 3), torch.tensor([1, 1]))
    one = found(tables["router"])
    assert one["ece"] == pytest.approx(0.75 * 0.3 + 0.25 * 0.1)
    assert one["confidence"] - one["accuracy"] == pytest.approx(one["ece"])
    bins = [[r["rows"], r["accuracy"], r["confidence"]] for r in records(tables["reliability"])]
    assert bins == [pytest.approx([10, 0.7, 0.8]), pytest.approx([30, 0.6, 0.9])]


def test_a_router_that_is_too_sure_by_a_temperature_is_told_which() -> None:
    p, clusters = drawn_from(POSTERIORS[:3], 20)
    one = found(routed(4 * p.log(), clusters, torch.ones(3))["router"])
    exact = -torch.special.xlogy(POSTERIORS[:3], POSTERIORS[:3]).sum(1).mean()
    assert one["temperature"] == 4 and 4 in TEMPERATURES
    assert one["nll_tempered"] == pytest.approx(float(exact), abs=1e-12) and one["nll"] > one["nll_tempered"]


def test_the_error_of_chance_is_what_calibrated_answers_get() -> None:
    """Drawn by the router's own posterior, the calibration error is on average `ece_chance`."""
    source, drawn = seeded(3), []
    for _ in range(200):
        p = torch.softmax(2 * torch.randn(300, 4, generator=source, dtype=torch.float64), 1)
        calibration = Calibration([0.5], torch.ones(4), bins=10)
        calibration.add(p.log()[None], torch.multinomial(p, 1, generator=source)[:, 0])
        drawn.append(found(calibration.tables()["router"]))
    chance = np.mean([one["ece_chance"] for one in drawn])
    assert np.mean([one["ece"] for one in drawn]) == pytest.approx(chance, rel=0.05)


# Errors of experts.


def errors_of(
    ensemble: Bank, monolith: Denoiser | None, rows: list[Rows], prior: list[int], how: DiagnoseConfig
) -> dict[str, list[Any]]:
    """Tables of rows that one process looks at."""
    answers = answers_of(ensemble, monolith, rows, len(prior), how)
    return labelled_rows.errors_of(answers, ensemble.missing, monolith is not None, prior, how)


def test_constant_experts_have_the_errors_of_arithmetic() -> None:
    """Targets 1 and 2 and 0.5; experts that say 1, 2 and 4; a router that knows the same of all."""
    ensemble = Bank([Constant(1.0), Constant(2.0), Constant(4.0)], Fixed([0.5, 0.3, 0.2]))
    tables = errors_of(ensemble, Constant(0.0), rows([0, 1, 0, 1], [1.0, 2.0, 1.0, 2.0]), [2, 2, 1], config())
    for expert, cluster, error in ((0, 0, 0), (1, 0, 1), (2, 0, 9), (0, 1, 1), (1, 1, 0), (2, 1, 4)):
        for t in (0.25, 1.0, "mean"):
            one = found(tables["experts"], t=t, expert=expert, cluster=cluster)
            assert (one["rows"], one["error"], one["se"]) == (2, pytest.approx(error), pytest.approx(0))
    everything = {"t": "mean", "cluster": "all"}
    mixture = 0.5 * 1 + 0.3 * 2 + 0.2 * 4
    expected = {
        "own": 0.0,
        "selected": (0 + 1) / 2,
        "others": ((1 + 9) / 2 + (0 + 4) / 2) / 2,
        "mixture": ((mixture - 1) ** 2 + (mixture - 2) ** 2) / 2,
        "monolith": (1 + 4) / 2,
    }
    for model, error in expected.items():
        assert found(tables["errors"], model=model, **everything)["error"] == pytest.approx(error), model
    gap = found(tables["differences"], gap="selected-own", **everything)
    assert gap["difference"] == pytest.approx(0.5) and gap["se"] == pytest.approx(math.sqrt(1 / 3 / 4))
    for gone, left in ((0, (0.3 * 2 + 0.2 * 4) / 0.5), (1, (0.5 + 0.8) / 0.7), (2, (0.5 + 0.6) / 0.8)):
        one = found(tables["missing"], t="mean", expert=gone, cluster=1)
        assert one["loss"] == pytest.approx((left - 2) ** 2 - (mixture - 2) ** 2)
    one = found(tables["disagreement"], **everything)
    assert one["angle"] == pytest.approx(0, abs=1e-6)
    variance = 0.5 * 1 + 0.3 * 4 + 0.2 * 16 - mixture**2
    assert one["spread"] == pytest.approx(variance) and one["spread_se"] == pytest.approx(0, abs=1e-7)
    assert found(tables["experts"], t=1.0, expert=0, cluster=2) == {
        "t": 1.0, "cluster": 2, "expert": 0, "rows": 0, "error": None, "se": None
    }  # fmt: skip


def test_means_over_time_leave_out_pure_noise() -> None:
    class Clock:
        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return t.view(-1, 1, 1, 1).expand_as(x_t)

    ensemble = Bank([Clock()], Fixed([1.0]))
    tables = errors_of(ensemble, None, rows([0], [0.0]), [1], config())
    errors = [r["error"] for r in records(tables["errors"]) if (r["model"], r["cluster"]) == ("own", 0)]
    assert errors == pytest.approx([0.25**2, 0.75**2, 1.0, (0.25**2 + 0.75**2) / 2])
    alone = errors_of(ensemble, None, rows([0], [0.0]), [1], config(times=[1.0]))
    assert {r["t"] for r in records(alone["errors"])} == {1.0}


def test_the_angle_between_experts() -> None:
    """Orthogonal, opposite, equal: 90, 180 and 0 degrees."""
    east, north = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 0.0, 0.0])

    def between(*v: Tensor) -> float:
        alignment, each = Alignment([0.5], len(v), range(len(v)), False), torch.stack(v)[:, None, None]
        alignment.means.add(
            alignment.values(each, None, torch.zeros(1, 4), torch.zeros(1, 1, len(v)), torch.tensor([0])),
            torch.tensor([0]),
        )
        return found(alignment.tables()["disagreement"], t=0.5, cluster="all")["angle"]

    assert between(east, north) == pytest.approx(90)
    assert between(east, -2 * east) == pytest.approx(180)
    assert between(east, 5 * east) == pytest.approx(0, abs=1e-9)
    assert between(east, north, -east) == pytest.approx((90 + 180 + 90) / 3)
    assert between(east, torch.tensor([1.0, 1e-6, 0.0, 0.0])) == pytest.approx(math.degrees(1e-6), rel=1e-3)


def test_a_partial_ensemble_leaves_the_missing_expert_out() -> None:
    ensemble = Bank([Constant(0.0), None, Constant(2.0)], Fixed([0.2, 0.6, 0.2]))
    tables = errors_of(
        ensemble, Constant(1.0), rows([0, 1, 2, 2], [0.0, 1.0, 2.0, 2.0]), [1, 1, 2], config(times=[0.5])
    )
    assert {r["expert"] for r in records(tables["experts"])} == {0, 2}
    assert {r["expert"] for r in records(tables["missing"])} == {0, 2}
    one = found(tables["errors"], t=0.5, cluster=1, model="own")
    assert (one["rows"], one["error"]) == (0, None)
    assert found(tables["errors"], t=0.5, cluster=1, model="mixture")["error"] == pytest.approx(0)
    # Means over all rows count those that every model has.
    assert {r["rows"] for r in records(tables["errors"]) if (r["t"], r["cluster"]) == (0.5, "all")} == {3}
    # The router is judged on all clusters, missing or not.
    one = found(tables["router"], t=0.5)
    assert (one["rows"], one["accuracy"]) == (4, pytest.approx(0.25))


def test_one_expert_has_nobody_to_differ_from() -> None:
    tables = errors_of(Bank([Constant(1.0)], Fixed([1.0])), None, rows([0, 0], [1.0, 0.0]), [2], config())
    assert found(tables["errors"], t=1.0, cluster="all", model="others")["error"] is None
    assert found(tables["disagreement"], t=1.0, cluster="all")["angle"] is None
    assert found(tables["missing"], t=1.0, cluster="all", expert=0)["loss"] is None
    assert found(tables["router"], t=1.0)["nll"] == 0


def test_a_sure_router_without_its_choice_still_tells_the_others_apart() -> None:
    """Its weights round to 1 and 0; the logits of the others differ all the same."""

    class Sure:
        def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return torch.tensor([[1000.0, 0.0, math.log(3)]]).expand(len(x_t), -1)

    ensemble = Bank([Constant(0.0), Constant(4.0), Constant(8.0)], Sure())
    tables = errors_of(ensemble, None, rows([0], [0.0]), [1, 1, 1], config())
    assert found(tables["missing"], t=1.0, cluster=0, expert=0)["loss"] == pytest.approx(7.0**2)


# Exact parts: a small world of the identities, in which everything is known.


class Known:
    """A function of state and time, as a bank asks networks and routers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.function(x_t.double(), t.double())

    logits = velocity


@pytest.fixture(scope="module")
def exact() -> tuple[World, dict[str, Any]]:
    cluster, source = torch.arange(12) % 3, seeded(7)
    points = torch.randn(12, *SHAPE, generator=seeded(5)) + 1.5 * cluster.view(-1, 1, 1, 1)
    world = World(points.double(), torch.full((12,), 1 / 12, dtype=torch.float64), cluster)
    parts = [Known(world.expert(k, RectifiedFlow(), "v")) for k in range(3)]
    picked = torch.randint(0, 12, (4000,), generator=source)
    eps = torch.randn(4000, *SHAPE, generator=source)
    batches = [
        Rows(points[picked[i]], Condition(), eps[i], cluster[picked[i]])
        for i in torch.arange(4000).split(500)
    ]
    bank, whole = Bank(parts, Known(world.logits)), Known(Exact(world.images, world.weights))
    return world, errors_of(bank, whole, batches, [4, 4, 4], config(times=[0.3, 0.6, 0.9]))


def test_with_exact_parts_every_expert_is_best_at_home(exact: tuple[World, dict[str, Any]]) -> None:
    """The mixture is the monolith, and nobody beats it but he who is told the cluster."""
    _, tables = exact
    gaps = [r["difference"] for r in records(tables["differences"]) if r["gap"] == "mixture-monolith"]
    assert gaps and max(map(abs, gaps)) < 1e-7
    for cluster in range(3):
        errors = [found(tables["experts"], t="mean", cluster=cluster, expert=k)["error"] for k in range(3)]
        assert np.argmin(errors) == cluster
    for t in (0.3, 0.6, 0.9):
        ways = ("own", "mixture", "selected", "others")
        errors = [found(tables["errors"], t=t, cluster="all", model=way)["error"] for way in ways]
        assert errors == sorted(set(errors))
        # Its own cluster misses an expert.
        assert all(found(tables["missing"], t=t, cluster=k, expert=k)["loss"] > 0 for k in range(3))
    # Near noise the best single expert is not the marginal flow, however exact it is: clusters cannot be told
    # apart there.
    near, far = (
        found(tables["differences"], t=t, cluster="all", gap="selected-monolith") for t in (0.9, 0.3)
    )
    assert near["difference"] > 4 * near["se"] and near["difference"] > far["difference"]


def test_the_exact_router_has_the_likelihood_of_its_own_posterior(
    exact: tuple[World, dict[str, Any]],
) -> None:
    """Accuracy and likelihood are the means of max p and of the posterior's entropy, but for sampling."""
    world, tables = exact
    source = seeded(11)
    picked = torch.randint(0, 12, (20000,), generator=source)
    eps = torch.randn(20000, *SHAPE, generator=source)
    for time in (0.3, 0.6, 0.9):
        t = torch.full((20000,), time)
        states = noisy(world.images[picked].float(), eps, t, RectifiedFlow())
        p = world.logits(states.double(), t.double()).softmax(1)
        one = found(tables["router"], t=time)
        assert abs(one["nll"] - float(-torch.special.xlogy(p, p).sum(1).mean())) < 4 * one["nll_se"]
        assert abs(one["accuracy"] - float(p.max(1).values.mean())) < 4 * one["accuracy_se"] + 0.005
        assert one["ece"] < 2.5 * one["ece_chance"] and one["temperature"] in (2 ** (-1 / 8), 1, 2 ** (1 / 8))
        assert one["nll"] < one["prior_nll"] == pytest.approx(math.log(3), abs=1e-9)


# Usage and switches.


def test_the_switch_rate_of_a_trace_made_by_hand() -> None:
    leaders_by_step = torch.tensor([[0, 1, 2], [0, 2, 2], [1, 1, 2], [1, 2, 2], [1, 2, 2]])
    weights = torch.nn.functional.one_hot(leaders_by_step, 3) * 0.6 + 0.2 / 3
    table = switches(weights, [1.0, 0.8, 0.6, 0.4, 0.2])
    whole = found(table, step="all")
    rates = np.array([1 / 4, 3 / 4, 0])
    assert whole["rate"] == pytest.approx(rates.mean()) and whole["ever"] == pytest.approx(2 / 3)
    assert whole["se"] == pytest.approx(rates.std(ddof=1) / math.sqrt(3))
    assert [r["rate"] for r in records(table)[1:]] == pytest.approx([1 / 3, 2 / 3, 1 / 3, 0])
    assert [r["ever"] for r in records(table)[1:]] == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3])
    assert [r["t"] for r in records(table)[1:]] == [0.8, 0.6, 0.4, 0.2]
    assert switches(torch.ones(1, 4, 2), [1.0]) == []  # one step cannot switch


def test_usage_counts_samples_and_steps() -> None:
    weights = torch.zeros(2, 4, 3)
    weights[0, :, 0] = 1
    weights[1, 0, 0] = weights[1, 1:, 2] = 1
    table = usage(weights, torch.tensor([0, 0, 1, 1]), [6, 3, 1])
    assert [r["size"] for r in records(table)] == pytest.approx([0.6, 0.3, 0.1])
    assert [r["asked"] for r in records(table)] == pytest.approx([0.5, 0.5, 0.0])
    assert [r["used"] for r in records(table)] == pytest.approx([5 / 8, 0, 3 / 8])
    assert [r["first"] for r in records(table)] == pytest.approx([1, 0, 0])
    assert records(table)[0]["used_se"] == pytest.approx(np.std([1, 0.5, 0.5, 0.5], ddof=1) / 2)


# Copies.


def parts(features: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    numbers = np.arange(len(features), dtype=np.int64) + 100
    return [(numbers[i : i + size], features[i : i + size]) for i in range(0, len(features), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_two_nearest_are_those_of_a_full_search(size: int) -> None:
    draws = np.random.default_rng(0)
    train, queries = draws.normal(size=(60, 5)), draws.normal(size=(20, 5))
    near = two_nearest(queries, parts(train, size))
    full = np.linalg.norm(queries[:, None] - train, axis=2)
    np.testing.assert_allclose(near.distances, np.sort(full, axis=1)[:, :2], rtol=1e-12)
    np.testing.assert_array_equal(near.rows, np.argsort(full, axis=1)[:, :2] + 100)
    np.testing.assert_allclose(near.ratio, near.distances[:, 0] / near.distances[:, 1])


def check(samples: np.ndarray, train: np.ndarray, seed: int = 1) -> Copies:
    heldout = np.random.default_rng(seed).normal(size=(200, train.shape[1]))
    served = np.arange(len(samples)) % 2
    near = (two_nearest(values, parts(train, 64)) for values in (samples, heldout))
    return Copies(*near, served, np.arange(200) % 2, 0.01)


def test_a_copied_training_picture_is_found() -> None:
    draws = np.random.default_rng(0)
    train = draws.normal(size=(300, 8))
    samples = draws.normal(size=(50, 8))
    samples[13], samples[20] = train[77], train[5] + 1e-2 * draws.normal(size=8)
    copies = check(samples, train)
    rows = records(copies.suspicious(10))
    assert [(r["sample"], r["row"], r["cluster"]) for r in rows[:2]] == [(13, 177, 1), (20, 105, 0)]
    assert rows[0]["why"] == "copy, ratio, distance" and rows[0]["ratio"] == 0
    assert rows[1]["why"] == "ratio, distance" and rows[1]["ratio"] < 0.05
    whole = found(copies.by_cluster(2), cluster="all")
    assert whole["memorised"] == pytest.approx(2 / 50) and whole["memorised_heldout"] == 0
    assert records(copies.suspicious(1)) == rows[:1]
    assert records(copies.closest()) == [rows[1], rows[0]], "of cluster 0 and of cluster 1"
    assert found(copies.by_cluster(2), cluster=1)["memorised"] == pytest.approx(1 / 25)


def test_a_copy_of_a_picture_that_is_there_twice_is_found() -> None:
    """The ratio of the two distances would be one."""
    draws = np.random.default_rng(0)
    train = draws.normal(size=(300, 8))
    train[1] = train[0]
    samples = draws.normal(size=(5, 8))
    samples[2] = train[0]
    assert records(check(samples, train).suspicious(5))[0]["sample"] == 2
    samples[2] += 1e-2 * draws.normal(size=8)  # a near copy: the ratio is no help, the distance is
    rows = records(check(samples, train).suspicious(5))
    assert [(r["sample"], r["why"]) for r in rows] == [(2, "distance")]


def test_held_out_pictures_that_are_training_pictures_are_told_and_no_measure() -> None:
    draws = np.random.default_rng(0)
    train, samples = draws.normal(size=(300, 8)), draws.normal(size=(50, 8))
    samples[13] = train[77]
    clean = check(samples, train)
    near = [two_nearest(values, parts(train, 64)) for values in (samples, train[:100])]
    pairs = zip(vars(clean.heldout).values(), vars(near[1]).values(), strict=True)
    clusters = np.concatenate([clean.clusters, np.zeros(100, dtype=np.int64)])
    dirty = Copies(near[0], Nearest(*map(np.concatenate, pairs)), clean.served, clusters, 0.01)
    assert dirty.limits == clean.limits and dirty.suspicious(5) == clean.suspicious(5)
    assert found(dirty.by_cluster(2), cluster="all")["leaked"] == pytest.approx(1 / 3)
    assert found(dirty.by_cluster(2), cluster=0)["leaked"] == pytest.approx(1 / 2)
    assert found(dirty.by_cluster(2), cluster="all")["memorised_heldout"] == 0
    only = Copies(near[0], near[1], clean.served, np.zeros(100, dtype=np.int64), 0.01)
    assert only.limits is None
    assert [(r["sample"], r["why"]) for r in records(only.suspicious(5))] == [(13, "copy")]


def test_samples_of_the_same_law_are_suspicious_by_chance_only() -> None:
    draws = np.random.default_rng(2)
    train, samples = draws.normal(size=(300, 8)), draws.normal(size=(4000, 8))
    whole = found(check(samples, train).by_cluster(2), cluster="all")
    assert 0 < whole["suspicious"] < 0.06 and whole["memorised"] < 0.01
    near = check(samples[:9], train)
    ratios, closest = near.samples.ratio, [r["sample"] for r in records(near.closest())]
    assert closest == [2 * ratios[::2].argmin(), 2 * ratios[1::2].argmin() + 1]
    assert whole["ratio"] == pytest.approx(whole["ratio_heldout"], rel=0.1)
    assert whole["distance"] == pytest.approx(whole["distance_heldout"], rel=0.1)


def test_an_expert_that_served_nobody_has_no_numbers() -> None:
    draws = np.random.default_rng(0)
    one = found(check(draws.normal(size=(4, 8)), draws.normal(size=(30, 8))).by_cluster(3), cluster=2)
    assert (one["samples"], one["suspicious"], one["ratio"], one["heldout"]) == (0, None, None, 0)


def test_features_that_are_few_or_none() -> None:
    near = two_nearest(np.ones((1, 3)), parts(np.zeros((1, 3)), 5))
    assert near.ratio.tolist() == [0.0] and near.distances[0, 1] == np.inf  # there is no second nearest
    copies = Copies(near, near, np.array([0]), np.array([0]), 0.5)
    assert copies.suspicious(5) == [] and copies.by_cluster(1)[0].cluster == "all"
    with pytest.raises(DataError, match="NaN or infinity"):
        two_nearest(np.full((2, 3), np.nan), parts(np.zeros((4, 3)), 2))
    with pytest.raises(DataError, match="no training picture"):
        two_nearest(np.zeros((2, 3)), [])


# Settings.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"times": [0.0, 0.5]}, "t = 0"),
        ({"times": [0.5, 1.2]}, "t = 1.2"),
        ({"times": [0.5, 0.25]}, "do not rise"),
        ({"splits": ["train", "train"]}, "twice"),
        ({"strategies": ["oracle"]}, "nothing to trace"),
        ({"strategies": ["best"]}, "there is no routing"),
        ({"splits": []}, "splits"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**settings)


def named(settings: str) -> list[str]:
    return [f"diagnose.{setting}" for setting in settings.split()]


QUICK = named("samples=16 probed=5 steps=3 rows=60 batch=20 times=[0.25,1.0] threads=1")


@pytest.fixture
def diagnose(staged: Run) -> Run:
    return lambda folder, *settings: staged("diagnose", folder, *QUICK, *settings)


def table(folder: Path, name: str) -> list[dict[str, object]]:
    found = json.loads((folder / "reports/diagnostics.json").read_text())["tables"][name]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "campaign"))


def test_tables_are_written_once_per_parts_and_settings(folder: Path, diagnose: Run) -> None:
    how = named("splits=[heldout,train] quantile=0.999")
    said = diagnose(folder, *how)
    assert said.code == 0 and "router: accuracy" in said.out and "error of monolith" in said.out
    found = json.loads((folder / "reports/diagnostics.json").read_text())
    assert set(found["parts"]) == {"experts/0", "experts/1", "router", "monolith"} and found["missing"] == []
    for name, columns in ((n, t["columns"]) for n, t in found["tables"].items()):
        lines = list(csv.reader(io.StringIO((folder / f"reports/diagnostics/{name}.csv").read_text())))
        assert lines[0] == columns and len(lines) == 1 + len(found["tables"][name]["rows"])
    assert {r["split"] for r in table(folder, "errors")} == {"heldout", "train"}
    assert {r["strategy"] for r in table(folder, "usage")} == {"once", "top-1"}
    assert sum(r["used"] for r in table(folder, "usage")) == pytest.approx(2)  # type: ignore[misc]
    assert all(r["rate"] == 0 for r in table(folder, "switches") if r["strategy"] == "once")
    steady = {r["strategy"]: r for r in table(folder, "stability")}
    assert list(steady) == ["once", "top-1", "monolith"] and {r["samples"] for r in steady.values()} == {5}
    assert all(r["sensitivity"] > 0 and r["refinement"] > 0 for r in steady.values())  # type: ignore[operator]
    assert [r["t"] for r in table(folder, "lipschitz")] == pytest.approx([1, 2 / 3, 1 / 3] * 3)
    ends = [r for r in table(folder, "landing") if r["cluster"] == "all"]
    assert [r["samples"] for r in ends] == [16, 16]
    assert all(r["own"] < r["heldout_others"] for r in ends)  # type: ignore[operator]
    sizes = json.loads((folder / "partition/partition.json").read_text())
    (rows,) = {r["rows"] for r in table(folder, "router") if r["split"] == "heldout"}
    assert rows == min(60, sum(sizes["heldout"]))
    pairs = found["pictures"]
    assert len(pairs) == len(table(folder, "suspicious")) > 0
    assert [r["cluster"] for r in table(folder, "closest")] == [0, 1] and len(found["closest"]) == 2
    for pair in (*pairs, *found["closest"]):
        for key in (pair["sample"], pair["training"]):
            with Image.open(folder / key) as picture:
                picture.load()

    for again in ([], ["diagnose.batch=7"]):
        assert diagnose(folder, *how, *again).out == "diagnose: finished already\n"
    assert "finished" not in diagnose(folder, "diagnose.samples=0").out
    assert "usage" not in json.loads((folder / "reports/diagnostics.json").read_text())["tables"]


def test_numbers_do_not_depend_on_batches_or_on_where_experts_lie(folder: Path, diagnose: Run) -> None:
    found = []
    for setting in ("diagnose.batch=1000", "diagnose.batch=7", "sampling.residency.experts=1"):
        (folder / "reports/diagnostics.json").unlink(missing_ok=True)
        assert diagnose(folder, setting).code == 0
        names = ("errors", "usage", "stability", "lipschitz", "landing")
        found.append([v for name in names for r in table(folder, name) for v in r.values()])
    for values in found[1:]:
        for one, other in zip(found[0], values, strict=True):
            assert one == (pytest.approx(other, rel=1e-4, abs=1e-6) if isinstance(other, float) else other)


def test_a_partial_ensemble_is_told(folder: Path, diagnose: Run) -> None:
    shutil.rmtree(folder / "islands/1/expert")
    assemble(Campaign.open(folder))
    said = diagnose(folder, "diagnose.splits=[train]")
    assert said.code == 0 and "experts 1 are missing and left out" in said.out
    refused(diagnose(folder, "diagnose.strategies=[top-9]"), "strategies top-9 none is possible")
    assert json.loads((folder / "reports/diagnostics.json").read_text())["missing"] == [1]
    assert {r["expert"] for r in table(folder, "experts")} == {0}
    own = {(r["cluster"], r["error"] is None) for r in table(folder, "errors") if r["model"] == "own"}
    assert own == {("all", False), (0, False), (1, True)}


def test_copies_of_the_monolith_are_counted_beside_the_ensembles(folder: Path, diagnose: Run) -> None:
    assert diagnose(folder, "diagnose.probed=0").code == 0
    rows = {row["cluster"]: row for row in table(folder, "nearest")}
    assert list(rows)[-1] == "monolith"
    monolith, ensemble = rows["monolith"], rows["all"]
    assert monolith["samples"] == ensemble["samples"] and monolith["distance"] != ensemble["distance"]
    assert monolith["distance_heldout"] == ensemble["distance_heldout"]
    shutil.rmtree(folder / "monolith/expert")
    assert diagnose(folder, "diagnose.probed=0").code == 0
    assert "monolith" not in {row["cluster"] for row in table(folder, "nearest")}
    assert {r["model"] for r in table(folder, "errors")} == {"own", "selected", "others", "mixture"}

    # Another extractor knows nothing of the clusters.
    other = ("diagnose.extractor=efficientnet-lite2", "diagnose.extractor_size=32", "diagnose.probed=0")
    assert diagnose(folder, *other).code == 0
    tables = json.loads((folder / "reports/diagnostics.json").read_text())["tables"]
    assert "nearest" in tables and not {"landing", "stability", "lipschitz"} & set(tables)


def test_without_held_out_rows_it_says_what_to_do(folder: Path, diagnose: Run) -> None:
    dataset = Campaign.open(folder).dataset()
    weights = dataset.weights.copy()
    weights[dataset.split("heldout")] = 0
    write_weights(dataset, {"name": "none held out"}, weights)
    refused(diagnose(folder), "no held-out rows", "diagnose.splits=[train]")
    assert diagnose(folder, "diagnose.splits=[train]", "diagnose.conditions=train").code == 0
    assert "nearest" not in json.loads((folder / "reports/diagnostics.json").read_text())["tables"]


@pytest.mark.slow
def test_three_workers_diagnose_to_the_bit_what_one_process_does(
    made: Path, net: Path, tmp_path: Path
) -> None:
    """The extractor is another one than the partition's, so features of real pictures are shared too."""
    sets = named("samples=40 batch=4 probed=20 steps=3 rows=30 times=[0.5,1.0] extractor_size=28 threads=1")
    argv = [word for setting in (*sets, f"diagnose.extractor={net}") for word in ("--set", setting)]
    results = []
    for workers in ("1", "3"):
        folder = Path(shutil.copytree(made, tmp_path / workers))
        done = atoll("diagnose", folder, *argv, "--workers", workers)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("diagnose: 40 pictures of the monolith") == 1, done.stdout
        tree = json.loads((folder / "reports/diagnostics.json").read_text())
        del tree["seconds"]
        files = sorted((folder / "reports/diagnostics").rglob("*.png"))
        results.append((tree, [path.read_bytes() for path in files]))
        assert not list((folder / "reports/work").iterdir())
    assert {"errors", "usage", "stability", "lipschitz", "nearest"} <= results[0][0]["tables"].keys()
    assert len(results[0][1]) > 2 and results[0] == results[1]


@pytest.mark.parametrize("column", [True, False])
def test_parts_leave_nothing_to_make(
    folder: Path, net: Path, diagnose: Run, run: Run, monkeypatch: pytest.MonkeyPatch, column: bool
) -> None:
    """Who comes after all parts asks no network; by the partition's column of features, or without one."""
    sets = named("samples=40 batch=4 probed=20 steps=2 rows=30 times=[0.5]")
    sets += [] if column else [f"diagnose.extractor={net}", "diagnose.extractor_size=28"]
    argv = [word for setting in sets for word in ("--set", setting)]
    for number in (1, 2):
        assert run("diagnose", folder, *argv, "--part", f"{number}/2").code == 0
    assert not (folder / "reports/diagnostics.json").exists()

    def refuse(*args: Any) -> Any:
        raise AssertionError("a network was asked again")

    for name in ("answers_of", "generate", "reactions", "encoded"):
        monkeypatch.setattr(stage, name, refuse)
    monkeypatch.setattr("atoll.measure.pictures.encoded", refuse)
    assert diagnose(folder, *sets).code == 0
    assert "nearest" in json.loads((folder / "reports/diagnostics.json").read_text())["tables"]
