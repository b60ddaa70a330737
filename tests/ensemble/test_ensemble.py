"""The ensemble as one denoiser: what must hold whatever the weights are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.ensemble.dispatch import Dispatch
from atoll.ensemble.ensemble import Ensemble, RoutedField, SingleField
from atoll.ensemble.generation import Generation
from atoll.ensemble.integrate import sample
from atoll.networks.settings import DataShape
from helpers_networks import CLASSES, TEXT, Logits, conditions, expert, noise, null, router

K, B = 4, 8  # B == W == H == 8: a broadcast over the wrong axis would be silent
SHAPES = {"text": TEXT, "class": CLASSES}
STRATEGIES = ["full", "top-1", "top-2", "threshold(0.2)", "sample-2", "nucleus(0.9)", "oracle", "once"]


@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> DataShape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def ensemble(shape: DataShape) -> Ensemble:
    return Ensemble([expert(k, shape) for k in range(K)], Logits(router(9, K, shape)))


def by(routing: str, guidance: float, seed: int = 5) -> Generation:
    return Generation(guidance=guidance, routing=routing, seed=seed)


def field_of(
    ensemble: Ensemble, shape: DataShape, routing: str, guidance: float = 1.0, batch: int = B
) -> RoutedField:
    labels = torch.arange(batch) % K
    return ensemble.field(conditions(batch, shape), null(shape), by(routing, guidance), range(batch), labels)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def x(shape: DataShape) -> Tensor:
    return noise(B, shape)


T = torch.linspace(0.05, 0.95, B)


def test_the_parts_of_these_tests_differ(ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    """Experts, posteriors and conditions are far apart, so that no equality below holds by accident."""
    each = torch.stack([e.velocity(x, T, conditions(B, shape)) for e in ensemble.experts])
    spread = each.std(0).mean()
    assert spread > 0.1
    posterior = ensemble.logits(x, T, conditions(B, shape)).softmax(1)
    assert float(posterior.std(0).min()) > 0.02 and float(posterior.max()) < 0.999
    other = ensemble.experts[0].velocity(x, T, conditions(B, shape, seed=1))
    assert float((other - each[0]).abs().mean()) > 1e-3


# Identities.


def test_copies_of_one_expert_are_that_expert(shape: DataShape, x: Tensor) -> None:
    one = expert(0, shape)
    copies = Ensemble([one] * K, Logits(router(9, K, shape)))
    cond = conditions(B, shape)
    close(copies.velocity(x, T, cond), one.velocity(x, T, cond))
    for routing in STRATEGIES:
        for guidance in (1.0, 2.5):
            alone = SingleField(one, cond, null(shape), guidance, B)
            routed = field_of(copies, shape, routing, guidance)
            close(sample(routed, x, 4), sample(alone, x, 4))


def test_the_denoiser_is_the_sum_over_all_experts(ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    cond = conditions(B, shape)
    posterior = ensemble.logits(x, T, cond).softmax(1)
    dense = torch.zeros_like(x)
    for i in range(B):  # the slow way: one sample and one expert at a time
        for k in range(K):
            row = slice(i, i + 1)
            dense[i] += posterior[i, k] * ensemble.experts[k].velocity(x[row], T[row], cond.select(row))[0]
    close(ensemble.velocity(x, T, cond), dense)


def test_all_of_the_best_are_all(ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    full = sample(field_of(ensemble, shape, "full"), x, 5)
    close(sample(field_of(ensemble, shape, f"top-{K}"), x, 5), full)
    assert float((sample(field_of(ensemble, shape, "top-1"), x, 5) - full).abs().max()) > 1e-2


def test_sparse_evaluation_is_the_dense_sum(ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    cond = conditions(B, shape)
    source = torch.Generator().manual_seed(3)
    weights = torch.rand(B, K, generator=source) * (torch.rand(B, K, generator=source) > 0.5)
    weights[:, 2] = 0  # nobody asks expert 2
    weights[3] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    dense = sum(
        weights[:, k].view(-1, 1, 1, 1) * e.velocity(x, T, cond) for k, e in enumerate(ensemble.experts)
    )
    close(Dispatch(weights, cond).run(ensemble.experts, x, T), dense)


def test_an_expert_sees_only_the_samples_that_chose_it(
    ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    seen: dict[int, tuple[Tensor, Tensor, Condition]] = {}

    class Watched:
        def __init__(self, number: int) -> None:
            self.number = number

        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            assert self.number not in seen
            seen[self.number] = (x_t, t, cond)
            return ensemble.experts[self.number].velocity(x_t, t, cond)

    weights = torch.zeros(B, K)
    weights[torch.arange(B), torch.tensor([0, 1, 1, 3, 3, 3, 0, 0])] = 1.0
    cond = conditions(B, shape)
    Dispatch(weights, cond).run([Watched(k) for k in range(K)], x, T)
    assert sorted(seen) == [0, 1, 3]
    x_seen, t_seen, cond_seen = seen[3]
    assert torch.equal(x_seen, x[3:6]) and torch.equal(t_seen, T[3:6])
    for own, whole in zip(vars(cond_seen).values(), vars(cond).values(), strict=True):
        assert (own is None and whole is None) or torch.equal(own, whole[3:6])


# Sampling.


@pytest.mark.parametrize("routing", ["monolith", *STRATEGIES])
def test_a_picture_does_not_depend_on_its_batch(
    routing: str, ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    cond, labels = conditions(B, shape), torch.arange(B) % K

    def run(rows: list[int]) -> Tensor:
        own = cond.select(torch.tensor(rows))
        if routing == "monolith":
            return sample(SingleField(ensemble.experts[0], own, null(shape), 2.0, len(rows)), x[rows], 5)
        field = ensemble.field(own, null(shape), by(routing, 2.0), rows, labels[rows])
        return sample(field, x[rows], 5)

    together = run(list(range(B)))
    alone = torch.cat([run([i]) for i in range(B)])
    reverse = run(list(reversed(range(B)))).flip(0)
    close(together, alone)
    close(together, reverse)


@pytest.mark.parametrize("routing", ["once", "sample-2"])
def test_draws_depend_on_seed_and_number_only(
    routing: str, ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    def weights(seed: int, indices: range) -> Tensor:
        field = ensemble.field(conditions(B, shape), null(shape), by(routing, 1.0, seed), indices)
        sample(field, x, 3)
        return field.trace.stacked()

    assert torch.equal(weights(5, range(B)), weights(5, range(B)))
    assert not torch.equal(weights(5, range(B)), weights(6, range(B)))
    assert not torch.equal(weights(5, range(B)), weights(5, range(B, 2 * B)))


def test_commit_keeps_its_expert_and_asks_once(shape: DataShape, x: Tensor) -> None:
    counting = Logits(router(9, K, shape))
    ensemble = Ensemble([expert(k, shape) for k in range(K)], counting)
    field = field_of(ensemble, shape, "once")
    sample(field, x, 6)
    trace = field.trace.stacked()
    assert trace.shape == (6, B, K)
    assert all(torch.equal(step, trace[0]) for step in trace)
    assert set(trace.unique().tolist()) == {0.0, 1.0}
    assert (trace.sum(2) == 1).all()
    assert len(trace[0].argmax(1).unique()) > 1
    assert counting.calls == 1 and field.trace.router_calls == B
    assert field.trace.expert_calls == 6 * B


def test_a_step_that_calls_twice_asks_once(shape: DataShape, x: Tensor) -> None:
    counting = Logits(router(9, K, shape))
    ensemble = Ensemble([expert(k, shape) for k in range(K)], counting)
    field = field_of(ensemble, shape, "top-1")
    for step, t in enumerate((1.0, 0.5)):  # Heun: at the ends of its step
        first = field(x, t, step)
        second = field(0.5 * x, t - 0.5, step)
        assert not torch.equal(first, second)
    assert counting.calls == 2
    assert len(field.trace.weights) == 2 and field.trace.expert_calls == 4 * B


@pytest.mark.parametrize(("routing", "calls"), [("top-1", 6), ("top-1 every 3", 2), ("oracle", 0)])
def test_how_often_the_router_is_asked(routing: str, calls: int, shape: DataShape, x: Tensor) -> None:
    counting = Logits(router(9, K, shape))
    field = field_of(Ensemble([expert(k, shape) for k in range(K)], counting), shape, routing)
    sample(field, x, 6)
    assert counting.calls == calls and len(field.trace.weights) == 6


def test_oracle_follows_the_labels(ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    field = field_of(ensemble, shape, "oracle")
    sample(field, x, 2)
    assert field.trace.stacked().argmax(2).tolist() == [[i % K for i in range(B)]] * 2
    with pytest.raises(ConfigError, match="needs the cluster of every sample"):
        ensemble.field(conditions(B, shape), null(shape), by("oracle", 1.0), range(B))


# Guidance.


def by_hand(
    ensemble: Ensemble, shape: DataShape, x: Tensor, t: float, scale: float, choose: Callable
) -> Tensor:
    """Guided velocity with weights `choose(posterior, null posterior)` for the two branches."""
    time = torch.full((B,), t)
    branches = [conditions(B, shape), null(shape).expand(B)]
    posteriors = [ensemble.logits(x, time, c).softmax(1) for c in branches]
    v = []
    for weights, cond in zip(choose(*posteriors), branches, strict=True):
        each = [e.velocity(x, time, cond) for e in ensemble.experts]
        v.append(torch.einsum("bk,kbchw->bchw", weights, torch.stack(each)))
    return v[1] + scale * (v[0] - v[1])


def top(posterior: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(posterior.argmax(1), K).float()


def test_full_routes_each_branch_by_its_own_posterior(
    ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    own = by_hand(ensemble, shape, x, 0.7, 3.0, lambda p, p_null: (p, p_null))
    shared = by_hand(ensemble, shape, x, 0.7, 3.0, lambda p, p_null: (p, p))
    assert float((own - shared).abs().max()) > 1e-2
    field = field_of(ensemble, shape, "full", 3.0)
    close(field(x, 0.7, 0), own)
    assert field.trace.router_calls == 2 * B and field.trace.expert_calls == 2 * B * K


def test_sparse_strategies_use_the_conditional_expert_for_both_branches(
    ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    shared = by_hand(ensemble, shape, x, 0.7, 3.0, lambda p, p_null: (top(p), top(p)))
    own = by_hand(ensemble, shape, x, 0.7, 3.0, lambda p, p_null: (top(p), top(p_null)))
    assert float((own - shared).abs().max()) > 1e-2
    field = field_of(ensemble, shape, "top-1", 3.0)
    close(field(x, 0.7, 0), shared)
    assert field.trace.router_calls == B and field.trace.expert_calls == 2 * B


@pytest.mark.parametrize("routing", ["top-1", "once", "oracle"])
def test_a_null_branch_of_its_own(routing: str, ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    """Its weights come from its own posterior, whatever the conditional branch does."""
    field = field_of(ensemble, shape, f"{routing} null top-1", 3.0)
    v = field(x, 0.7, 0)
    served = field.trace.weights[0]
    close(v, by_hand(ensemble, shape, x, 0.7, 3.0, lambda p, p_null: (served, top(p_null))))
    plain = field_of(ensemble, shape, routing, 3.0)
    shared = plain(x, 0.7, 0)
    assert torch.equal(plain.trace.weights[0], served) and float((v - shared).abs().max()) > 1e-2
    assert field.trace.router_calls == plain.trace.router_calls + B
    assert field.trace.expert_calls == plain.trace.expert_calls == 2 * B


def test_the_null_branchs_draws_average_to_its_posterior(
    ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    """And are none of those that the conditional branch had."""
    own = by_hand(ensemble, shape, x, 0.7, 3.0, lambda p, p_null: (top(p), p_null))
    routing, cond = "top-1 null sample-1", conditions(B, shape)
    found = [ensemble.field(cond, null(shape), by(routing, 3.0, s), range(B))(x, 0.7, 0) for s in range(400)]
    error = (torch.stack(found).mean(0) - own).abs().mean() / (torch.stack(found) - own).abs().mean()
    assert float(error) < 0.1  # 1 / sqrt(400) of one draw's, and no bias beside it
    twice = field_of(ensemble, shape, "sample-1 null sample-1", 3.0)
    twice(x, 0.7, 0)
    alone = field_of(ensemble, shape, "sample-1", 3.0)
    alone(x, 0.7, 0)
    assert torch.equal(twice.trace.weights[0], alone.trace.weights[0])


def test_each_branch_asks_at_its_own_steps(shape: DataShape, x: Tensor) -> None:
    counting = Logits(router(9, K, shape))
    ensemble = Ensemble([expert(k, shape) for k in range(K)], counting)
    for routing, calls in (
        ("once null sample-1", 1 + 6),
        ("top-1 every 3 null sample-1 every 2", 2 + 3),
        ("oracle null top-1 every 6", 1),
        ("full", 12),
        ("full every 2", 6),
    ):
        counting.calls = 0
        field = field_of(ensemble, shape, routing, 2.0)
        sample(field, x, 6)
        assert counting.calls == calls and len(field.trace.weights) == 6, routing
        assert field.trace.router_calls == calls * B


def test_the_trace_is_of_the_conditional_branch(ensemble: Ensemble, shape: DataShape, x: Tensor) -> None:
    field = field_of(ensemble, shape, "full", 3.0)
    field(x, 0.7, 0)
    posterior = ensemble.logits(x, torch.full((B,), 0.7), conditions(B, shape)).softmax(1)
    close(field.trace.weights[0], posterior, 1e-6)


@pytest.mark.parametrize("routing", ["full", "once", "once null sample-1"])
def test_without_guidance_there_is_no_second_branch(
    routing: str, ensemble: Ensemble, shape: DataShape, x: Tensor
) -> None:
    field = field_of(ensemble, shape, routing, 1.0)
    field(x, 0.7, 0)
    assert field.trace.router_calls == B
    assert field.trace.expert_calls == (B * K if routing == "full" else B)


# Experts that are missing.


@pytest.mark.parametrize(
    "routing",
    ["full", "top-2", "threshold(0.01)", "sample-4", "nucleus(1)", "once", "once null sample-4"],
)
def test_a_missing_expert_gets_no_weight(routing: str, shape: DataShape, x: Tensor) -> None:
    class Absent:
        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            raise AssertionError("a missing expert was asked")

    there = [expert(k, shape) for k in range(K)]
    partial = Ensemble([there[0], Absent(), there[2], Absent()], Logits(router(9, K, shape)), (1, 3))
    field = field_of(partial, shape, routing, 2.0)
    sample(field, x, 4)
    trace = field.trace.stacked()
    assert (trace[..., [1, 3]] == 0).all()
    torch.testing.assert_close(trace.sum(2), torch.ones(4, B))
    whole = Ensemble(there, Logits(router(9, K, shape)))
    assert (whole.logits(x, T, conditions(B, shape)).argmax(1) % 2 == 1).any()  # somebody would have asked
    partial.velocity(x, T, conditions(B, shape))


def test_the_oracle_of_a_missing_expert_is_refused(shape: DataShape, x: Tensor) -> None:
    partial = Ensemble([expert(0, shape)] * K, Logits(router(9, K, shape)), (1,))
    with pytest.raises(ConfigError, match="cluster 1 has no expert"):
        sample(field_of(partial, shape, "oracle"), x, 1)


def test_a_router_for_another_number_of_experts_is_refused(shape: DataShape, x: Tensor) -> None:
    ensemble = Ensemble([expert(0, shape)] * 3, Logits(router(9, K, shape)))
    with pytest.raises(ConfigError, match="the router knows 4 experts, the ensemble has 3"):
        ensemble.velocity(x, T, conditions(B, shape))
