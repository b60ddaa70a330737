"""The ensemble as one denoiser: what must hold whatever the weights are.

Of texts, whose lengths differ; `test_parity.py` asks class labels too.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.model.dispatch import Dispatch
from atoll.model.ensemble import Ensemble
from atoll.model.field import RoutedField, SingleField
from atoll.model.generation import Generation
from atoll.model.integrate import sample
from helpers_networks import Logits, conditions, expert, noise, null, router

K, B = 4, 8  # B == W == H == 8: a broadcast over the wrong axis would be silent
STRATEGIES = ["full", "top-1", "top-2", "threshold(0.2)", "sample-2", "nucleus(0.9)", "oracle", "once"]
T = torch.linspace(0.05, 0.95, B)
X, COND, NULL = noise(B), conditions(B), null()


def new_ensemble() -> tuple[Ensemble, Logits]:
    """Four experts, the network they started from, and their router, which counts its calls."""
    counting = Logits(router(9, K))
    return Ensemble([expert(k) for k in range(K)], counting, pretrain=expert(K)), counting


@pytest.fixture(scope="module")
def ensemble() -> Ensemble:
    return new_ensemble()[0]


def field_of(ensemble: Ensemble, routing: str, guidance: float = 1.0, seed: int = 5) -> RoutedField:
    how = Generation(guidance=guidance, routing=routing, seed=seed)
    return ensemble.field(COND, NULL, how, range(B), torch.arange(B) % K)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_parts_of_these_tests_differ(ensemble: Ensemble) -> None:
    """Experts, posteriors and conditions are far apart, so that no equality below holds by accident."""
    each = torch.stack([e.velocity(X, T, COND) for e in ensemble.experts])
    assert each.std(0).mean() > 0.1
    posterior = ensemble.logits(X, T, COND).softmax(1)
    assert float(posterior.std(0).min()) > 0.02 and float(posterior.max()) < 0.999
    other = ensemble.experts[0].velocity(X, T, conditions(B, seed=1))
    assert float((other - each[0]).abs().mean()) > 1e-3


# Identities.


def test_copies_of_one_expert_are_that_expert() -> None:
    one = expert(0)
    copies = Ensemble([one] * K, Logits(router(9, K)))
    close(copies.velocity(X, T, COND), one.velocity(X, T, COND))
    alone = sample(SingleField(one, COND, NULL, [2.5] * B), X, 2)
    for routing in STRATEGIES:
        close(sample(field_of(copies, routing, 2.5), X, 2), alone)


def test_the_denoiser_is_the_sum_over_all_experts(ensemble: Ensemble) -> None:
    posterior = ensemble.logits(X, T, COND).softmax(1)
    each = torch.stack([e.velocity(X, T, COND) for e in ensemble.experts], 1)
    close(ensemble.velocity(X, T, COND), torch.einsum("bk,bkchw->bchw", posterior, each))


def test_an_expert_sees_only_the_samples_that_chose_it(ensemble: Ensemble) -> None:
    """And the sparse sum is the dense one."""
    seen: dict[int, tuple[Tensor, Tensor, Condition]] = {}

    class Watched:
        def __init__(self, number: int) -> None:
            self.number = number

        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            assert self.number not in seen
            seen[self.number] = (x_t, t, cond)
            return ensemble.experts[self.number].velocity(x_t, t, cond)

    source = torch.Generator().manual_seed(3)
    weights = torch.rand(B, K, generator=source) * (torch.rand(B, K, generator=source) > 0.5)
    weights[:, 2] = 0  # nobody asks expert 2
    weights[3] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    sparse = Dispatch(weights, COND).run([Watched(k) for k in range(K)], X, T)
    dense = sum(
        weights[:, k].view(-1, 1, 1, 1) * e.velocity(X, T, COND) for k, e in enumerate(ensemble.experts)
    )
    close(sparse, dense)
    assert sorted(seen) == [0, 1, 3]
    for number, (x_t, t, cond) in seen.items():
        rows = weights[:, number].nonzero().flatten()
        assert 0 < len(rows) < B and torch.equal(x_t, X[rows]) and torch.equal(t, T[rows])
        assert torch.equal(cond.text, COND.text[rows]) and torch.equal(cond.mask, COND.mask[rows])


# Sampling.


@pytest.mark.parametrize(
    "routing",
    ["monolith", "full", "top-2", "sample-2", "oracle", "once null sample-1", "top-1 null pretrain"],
)
def test_a_picture_does_not_depend_on_its_batch(routing: str, ensemble: Ensemble) -> None:
    labels = torch.arange(B) % K

    def run(rows: list[int]) -> Tensor:
        cond = COND.select(torch.tensor(rows))
        if routing == "monolith":
            return sample(SingleField(ensemble.experts[0], cond, NULL, [2.0] * len(rows)), X[rows], 3)
        how = Generation(guidance=2.0, routing=routing, seed=5)
        return sample(ensemble.field(cond, NULL, how, rows, labels[rows]), X[rows], 3)

    together = run(list(range(B)))
    for groups in ([[i] for i in range(B)], [[6, 1, 4], [7], [0, 5, 3, 2]]):
        order = torch.tensor([i for rows in groups for i in rows]).argsort()
        assert torch.equal(torch.cat([run(rows) for rows in groups])[order], together)


@torch.inference_mode()
def test_samples_of_any_kind_share_a_batch_and_do_not_notice(ensemble: Ensemble) -> None:
    """Strategies, guidance, seeds and steps differ by row, and rows come and go between the steps."""
    ways = [
        Generation(steps=3, guidance=2.0, routing="top-1 every 2", seed=1),
        Generation(steps=5, guidance=1.0, routing="full", seed=2),
        Generation(steps=4, guidance=3.0, routing="once null sample-1", seed=3),
        Generation(steps=5, guidance=2.0, routing="oracle", seed=4),
        Generation(steps=2, guidance=2.0, routing="sample-2", seed=1),
        Generation(steps=3, guidance=2.5, routing="top-1 null pretrain", seed=2),
    ]

    def alone(row: int) -> RoutedField:
        labels = torch.tensor([row % K])
        return ensemble.field(COND.select(slice(row, row + 1)), NULL, ways[row], [row], labels)

    def v(field: RoutedField, rows: list[int], x: Tensor, steps: list[int]) -> Tensor:
        t = torch.tensor([1 - step / ways[row].steps for row, step in zip(rows, steps, strict=True)])
        return field(x, t, steps)

    expected = []
    for row, way in enumerate(ways):
        field, x = alone(row), X[row : row + 1]
        for step in range(way.steps):
            x = x - v(field, [row], x, [step]) * torch.tensor(1 / way.steps)
        expected.append(x)
    rows, steps, x, done = [0, 1], [0, 0], X[:2], {}
    field = RoutedField.merged([alone(0), alone(1)], [[0], [0]])
    for turn in range(8):
        if turn in (1, 2, 4, 5):  # another one joins
            new = max([*rows, *done]) + 1
            field = RoutedField.merged([field, alone(new)], [range(len(rows)), [0]])
            rows, steps, x = [*rows, new], [*steps, 0], torch.cat([x, X[new : new + 1]])
        each = torch.tensor([1 / ways[row].steps for row in rows]).view(-1, 1, 1, 1)
        x, steps = x - v(field, rows, x, steps) * each, [step + 1 for step in steps]
        stay = [n for n, row in enumerate(rows) if steps[n] < ways[row].steps]
        done |= {row: x[n : n + 1] for n, row in enumerate(rows) if n not in stay}
        if len(stay) < len(rows):
            rows, steps, x = [rows[n] for n in stay], [steps[n] for n in stay], x[stay]
            field = RoutedField.merged([field], [stay]) if stay else field
    assert sorted(done) == list(range(len(ways)))
    for row, x in enumerate(expected):
        assert torch.equal(done[row], x)


def test_a_step_that_calls_twice_asks_once() -> None:
    ensemble, counting = new_ensemble()
    field = field_of(ensemble, "top-1")
    for step, t in enumerate((1.0, 0.5)):  # Heun: at the ends of its step
        assert not torch.equal(field(X, t, step), field(0.5 * X, t - 0.5, step))
    assert counting.calls == 2
    assert len(field.trace.weights) == 2 and field.trace.expert_calls == 4 * B


def test_oracle_follows_the_labels(ensemble: Ensemble) -> None:
    field = field_of(ensemble, "oracle")
    sample(field, X, 2)
    assert field.trace.stacked().argmax(2).tolist() == [[i % K for i in range(B)]] * 2
    with pytest.raises(ConfigError, match="needs the cluster of every sample"):
        ensemble.field(COND, NULL, Generation(routing="oracle"), range(B))


# Guidance.


def by_hand(ensemble: Ensemble, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Velocity at 0.7, guidance 3; `choose(posterior, null posterior)` are the weights of the branches."""
    time, branches = torch.full((B,), 0.7), [COND, NULL.expand(B)]
    posteriors = [ensemble.logits(X, time, c).softmax(1) for c in branches]
    v = []
    for weights, cond in zip(choose(*posteriors), branches, strict=True):
        each = [e.velocity(X, time, cond) for e in ensemble.experts]
        v.append(torch.einsum("bk,kbchw->bchw", weights, torch.stack(each)))
    return v[1] + 3.0 * (v[0] - v[1])


def top(posterior: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(posterior.argmax(1), K).float()


def test_full_routes_each_branch_by_its_own_posterior(ensemble: Ensemble) -> None:
    apart = by_hand(ensemble, lambda p, p_null: (p, p_null))
    assert float((apart - by_hand(ensemble, lambda p, p_null: (p, p))).abs().max()) > 1e-2
    field = field_of(ensemble, "full", 3.0)
    close(field(X, 0.7, 0), apart)
    assert field.trace.router_calls == 2 * B and field.trace.expert_calls == 2 * B * K
    posterior = ensemble.logits(X, torch.full((B,), 0.7), COND).softmax(1)
    close(field.trace.weights[0], posterior, 1e-6)  # the trace is of the conditional branch


def test_sparse_strategies_use_the_conditional_expert_for_both_branches(ensemble: Ensemble) -> None:
    shared = by_hand(ensemble, lambda p, p_null: (top(p), top(p)))
    assert float((by_hand(ensemble, lambda p, p_null: (top(p), top(p_null))) - shared).abs().max()) > 1e-2
    field = field_of(ensemble, "top-1", 3.0)
    close(field(X, 0.7, 0), shared)
    assert field.trace.router_calls == B and field.trace.expert_calls == 2 * B


@pytest.mark.parametrize("routing", ["top-1", "once", "oracle"])
def test_a_null_branch_of_its_own(routing: str, ensemble: Ensemble) -> None:
    """Its weights come from its own posterior, whatever the conditional branch does."""
    field, plain = field_of(ensemble, f"{routing} null top-1", 3.0), field_of(ensemble, routing, 3.0)
    v, shared = field(X, 0.7, 0), plain(X, 0.7, 0)
    served = field.trace.weights[0]
    close(v, by_hand(ensemble, lambda p, p_null: (served, top(p_null))))
    assert torch.equal(plain.trace.weights[0], served) and float((v - shared).abs().max()) > 1e-2
    assert field.trace.router_calls == plain.trace.router_calls + B
    assert field.trace.expert_calls == plain.trace.expert_calls == 2 * B


@pytest.mark.parametrize("routing", ["full", "top-1", "once"])
def test_a_null_branch_of_shared_pretraining(routing: str, ensemble: Ensemble) -> None:
    """One more network serves it for all samples; the router is asked for the others only."""
    field, time = field_of(ensemble, f"{routing} null pretrain", 3.0), torch.full((B,), 0.7)
    v, served = field(X, 0.7, 0), field.trace.weights[0]
    each = torch.stack([one.velocity(X, time, COND) for one in ensemble.experts])
    assert ensemble.pretrain is not None
    away = ensemble.pretrain.velocity(X, time, NULL.expand(B))
    close(v, away + 3.0 * (torch.einsum("bk,kbchw->bchw", served, each) - away))
    assert float((v - field_of(ensemble, routing, 3.0)(X, 0.7, 0)).abs().max()) > 1e-2
    plain = field_of(ensemble, routing)
    plain(X, 0.7, 0)
    assert field.trace.router_calls == plain.trace.router_calls == B
    assert field.trace.expert_calls == plain.trace.expert_calls + B
    without = Ensemble(ensemble.experts, ensemble.router)
    with pytest.raises(ConfigError, match="there is no network of shared pretraining"):
        field_of(without, f"{routing} null pretrain")


@pytest.mark.parametrize("routing", ["full", "top-2", "once", "once null sample-1"])
def test_experts_left_out_are_as_if_they_were_missing(routing: str, ensemble: Ensemble) -> None:
    experts = [None if k in (0, 2) else expert(k) for k in range(K)]
    missing = Ensemble(experts, Logits(router(9, K)))
    conditional, *of_null = routing.split(" null ")
    named = " null ".join([f"{conditional} without 0,2", *of_null])
    assert torch.equal(field_of(ensemble, named, 2.0)(X, 0.5, 0), field_of(missing, routing, 2.0)(X, 0.5, 0))
    with pytest.raises(ConfigError, match="there is no expert 4"):
        field_of(ensemble, "full without 4")
    with pytest.raises(ConfigError, match="leaves no expert"):
        field_of(missing, "full without 1,3")


def test_the_null_branchs_draws_average_to_its_posterior(ensemble: Ensemble) -> None:
    """And are none of those that the conditional branch had."""
    draws = 400
    rows = torch.arange(B).repeat(draws)
    how = Generation(guidance=3.0, routing="top-1 null sample-1", seed=5)
    field = ensemble.field(COND.select(rows), NULL, how, range(draws * B))
    drawn = field(X[rows], 0.7, 0).view(draws, B, *X.shape[1:])
    expected = by_hand(ensemble, lambda p, p_null: (top(p), p_null))
    error = (drawn.mean(0) - expected).abs().mean() / (drawn - expected).abs().mean()
    assert float(error) < 2 / draws**0.5  # the mean's is 1 / sqrt(draws) of one draw's, and no bias beside it
    apart, alone = (field_of(ensemble, name, 3.0) for name in ("sample-1 null sample-1", "sample-1"))
    for other in (apart, alone):
        other(X, 0.7, 0)
    assert torch.equal(apart.trace.weights[0], alone.trace.weights[0])


@pytest.mark.parametrize(
    ("routing", "guidance", "calls"),
    [
        ("top-1", 1.0, 6),
        ("top-1 every 3", 1.0, 2),
        ("oracle", 1.0, 0),
        ("full", 1.0, 6),
        ("once null sample-1", 1.0, 1),
        ("once null sample-1", 2.0, 1 + 6),
        ("top-1 every 3 null sample-1 every 2", 2.0, 2 + 3),
        ("oracle null top-1 every 6", 2.0, 1),
        ("full", 2.0, 12),
        ("full every 2", 2.0, 6),
    ],
)
def test_each_branch_asks_at_its_own_steps(routing: str, guidance: float, calls: int) -> None:
    """Without guidance there is no second branch."""
    ensemble, counting = new_ensemble()
    field = field_of(ensemble, routing, guidance)
    sample(field, X, 6)
    assert counting.calls == calls and len(field.trace.weights) == 6
    assert field.trace.router_calls == calls * B
    experts, branches = K if "full" in routing else 1, 1 if guidance == 1 else 2
    assert field.trace.expert_calls == 6 * B * experts * branches


def test_parts_that_do_not_go_together_are_refused() -> None:
    partial = Ensemble([expert(0)] * K, Logits(router(9, K)), (1,))
    with pytest.raises(ConfigError, match="cluster 1 has no expert"):
        sample(field_of(partial, "oracle"), X, 1)
    with pytest.raises(ConfigError, match="the router knows 4 experts, the ensemble has 3"):
        Ensemble([expert(0)] * 3, Logits(router(9, K))).velocity(X, T, COND)
