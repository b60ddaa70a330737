"""The identities of decentralized diffusion that hold without any training, in float64.

On a finite data set everything is known: the posterior of every image, hence the exact network of any
cluster, schedule and prediction, and the exact router. What is tested is our own `route`, `convert`
and `flow_velocity` between them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from scipy.stats import chisquare, kstest, norm
from torch import Tensor

from atoll.flow.objective import noisy
from atoll.flow.prediction import DATA_EDGE, exact_range, flow_velocity
from atoll.flow.schedule import DDPMCosine, DDPMLinear, Discrete, RectifiedFlow, Schedule, VPCosine
from atoll.flow.settings import Prediction
from atoll.model.dispatch import route
from atoll.model.routing import Routing

SCHEDULES: list[Schedule] = [RectifiedFlow(), VPCosine(), DDPMLinear(), DDPMCosine()]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)
GRID = torch.cat(
    [torch.tensor([0.01, 0.02]), torch.linspace(0.05, 0.95, 16), torch.tensor([0.98, 0.99])]
).double()


@dataclass(frozen=True)
class Exact:
    """The network that training only approaches: exact predictions for weighted images `(n, C, H, W)`."""

    images: Tensor
    weights: Tensor
    schedule: Schedule = RectifiedFlow()
    prediction: Prediction = "v"

    def log_joint(self, x: Tensor, t: Tensor) -> Tensor:
        """log q(image) p_t(x | image), `(B, n)`, but for a constant that all images share."""
        alpha, sigma = self.schedule.alpha(t)[:, None, None], self.schedule.sigma(t)[:, None]
        distance = (x.flatten(1)[:, None] - alpha * self.images.flatten(1)).square().sum(-1)
        return self.weights.log() - distance / (2 * sigma**2)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        x0 = torch.einsum("bn,nchw->bchw", self.log_joint(x, t).softmax(1), self.images)
        own = self.schedule
        curves = (own.alpha, own.sigma, own.d_alpha, own.d_sigma)
        alpha, sigma, d_alpha, d_sigma = (curve(t)[:, None, None, None] for curve in curves)
        eps = (x - alpha * x0) / sigma
        kinds = {"x0": x0, "eps": eps, "score": -eps / sigma, "v": d_alpha * x0 + d_sigma * eps}
        return kinds[self.prediction]


@dataclass(frozen=True)
class World:
    """A data set with a partition."""

    images: Tensor
    weights: Tensor
    cluster: Tensor

    @property
    def clusters(self) -> int:
        return int(self.cluster.max()) + 1

    def expert(self, k: int, schedule: Schedule, prediction: Prediction) -> Exact:
        mine = self.cluster == k
        return Exact(self.images[mine], self.weights[mine], schedule, prediction)

    def logits(self, x: Tensor, t: Tensor) -> Tensor:
        """The exact router: log p(k | x_t) up to a constant, `(B, K)`."""
        joint = Exact(self.images, self.weights).log_joint(x, t)
        return torch.stack([joint[:, self.cluster == k].logsumexp(1) for k in range(self.clusters)], 1)

    def states(self, t: Tensor, seed: int) -> Tensor:
        """One noisy image per time."""
        source = torch.Generator().manual_seed(seed)
        chosen = torch.multinomial(self.weights, len(t), replacement=True, generator=source)
        eps = torch.randn((len(t), *self.images.shape[1:]), generator=source, dtype=torch.float64)
        return noisy(self.images[chosen], eps, t, RectifiedFlow())


def world(shape: tuple[int, int, int], rows: int = 24, clusters: int = 4, spread: float = 1.0) -> World:
    source = torch.Generator().manual_seed(sum(shape) + rows)
    images = spread * torch.randn((rows, *shape), generator=source, dtype=torch.float64)
    weights = torch.rand(rows, generator=source, dtype=torch.float64) + 0.1
    return World(images, weights / weights.sum(), torch.arange(rows) % clusters)


def mixed(
    w: World, kinds: Sequence[tuple[Schedule, Prediction]], x: Tensor, t: Tensor, routing: str = "full"
) -> Tensor:
    """The velocity of the ensemble whose expert k is of `kinds[k]`, through the real parts."""
    share = route(Routing.named(routing), w.logits(x, t), torch.empty(len(t), 0, dtype=t.dtype))
    each = [flow_velocity(w.expert(k, *kind), kind[1], kind[0], x, t) for k, kind in enumerate(kinds)]
    return torch.einsum("bk,bkchw->bchw", share, torch.stack(each, 1))


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# Identity 1: the monolith's flow is the experts' flows, weighted by the router.


@pytest.mark.parametrize("routing", ["full", "top-4", "threshold(1e-30)"])
@pytest.mark.parametrize("shape", [(1, 2, 2), (3, 4, 4), (2, 3, 20)], ids=str)
def test_experts_and_router_are_the_monolith(shape: tuple[int, int, int], routing: str) -> None:
    w = world(shape)
    for t in (GRID, *GRID.split(4)):  # B = 20 and B = 4: each equal to one of the widths
        x = w.states(t, seed=1)
        monolith = Exact(w.images, w.weights)(x, t)
        assert error(mixed(w, [(RectifiedFlow(), "v")] * 4, x, t, routing), monolith) < 1e-12


def test_other_weights_are_not_the_monolith() -> None:
    """The test above can fail: where the clusters cannot be told apart yet, leaving some out shows, and so
    does a router that does not see the weights of the images."""
    w, t = world((2, 3, 4)), torch.full((4,), 0.9, dtype=torch.float64)
    x, kinds = w.states(t, seed=1), [(RectifiedFlow(), "v")] * 4
    monolith = Exact(w.images, w.weights)(x, t)
    for routing in ("top-1", "top-3", "threshold(0.3)"):
        assert error(mixed(w, kinds, x, t, routing), monolith) > 1e-2
    blind = World(w.images, torch.full_like(w.weights, 1 / 24), w.cluster)
    each = torch.stack([w.expert(k, *kinds[k])(x, t) for k in range(4)], 1)
    assert error(torch.einsum("bk,bkchw->bchw", blind.logits(x, t).softmax(1), each), monolith) > 1e-3


# Identity 2: the same with experts of any schedule and prediction.


@pytest.mark.parametrize("shift", range(4))
def test_experts_of_any_kind_are_the_monolith(shift: int) -> None:
    """Each ensemble mixes all schedules and all predictions; over the shifts each pairs with each."""
    w = world((2, 3, 4))
    kinds = [(SCHEDULES[k], PREDICTIONS[(k + shift) % 4]) for k in range(4)]
    for t in (GRID, *GRID.split(4)):  # all times are within every schedule's range
        x = w.states(t, seed=2)
        assert error(mixed(w, kinds, x, t), Exact(w.images, w.weights)(x, t)) < 1e-12


def outside(schedule: Schedule, prediction: Prediction) -> Tensor:
    lo, hi = exact_range(schedule, prediction)
    t = torch.tensor([1e-4, 1e-3, 4e-3, 0.009, 0.9945, 0.996, 0.999, 1.0], dtype=torch.float64)
    return t[(t < lo) | (t > hi)]


def clamped_error_bound(w: World, x: Tensor, t: Tensor, schedule: Schedule, prediction: Prediction) -> Tensor:
    """How far `flow_velocity` of an exact network may be off outside the exact range, `(B,)`.

    The log-posterior of image i at (x_t, t) is `a <x_t, x_i> - b |x_i|^2 / 2` with a = alpha / sigma^2 and
    b = (alpha / sigma)^2; the network, asked at c x_t and tau, uses other a and b. Two posteriors whose
    log-ratio spreads over w differ by at most tanh(w / 4) in total variation, hence in mean by the diameter
    times that, and v = (x_t - x0) / t by that over t. The spread is at most |da| |x_t| D + |db| (range of
    |x_i|^2) / 2. Where both posteriors sit on one image (the data end), their mass elsewhere
    is the sharper bound.
    """
    lo, hi = exact_range(schedule, prediction)
    edge = t.clamp(lo, hi)
    rho, rho_edge = (1 - t) / t, (1 - edge) / edge  # alpha / sigma
    flat, points = x.flatten(1), w.images.flatten(1)
    diameter = torch.cdist(points, points).max()
    # <c x_t, x_i> alpha / sigma^2 at tau: the data end keeps x_t / alpha, the noise end x_t / sigma
    a, a_edge = rho / t, torch.where(t < 0.5, rho_edge**2 / (1 - t), rho_edge / t)
    norms = points.square().sum(1)
    spread = (a - a_edge).abs() * flat.norm(dim=1) * diameter
    spread = spread + (rho**2 - rho_edge**2).abs() * (norms.max() - norms.min()) / 2
    by_spread = torch.tanh(spread / 4)
    joint = w.weights.log() + a_edge[:, None] * flat @ points.T - rho_edge[:, None] ** 2 * norms / 2
    elsewhere = 1 - joint.softmax(1).max(1).values  # the network's; the true posterior is sharper still
    return diameter * torch.minimum(by_spread, torch.where(t < 0.5, 2 * elsewhere, math.inf)) / t


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_outside_the_exact_range_the_error_is_bounded(schedule: Schedule, prediction: Prediction) -> None:
    w = world((2, 3, 4), spread=0.3)
    t = outside(schedule, prediction)
    if not isinstance(schedule, Discrete) and prediction in ("v", "x0"):
        assert len(t) == 0  # nothing lies outside
        return
    x = w.states(t, seed=3)
    expert = Exact(w.images, w.weights, schedule, prediction)
    monolith = Exact(w.images, w.weights)(x, t)
    off = (flow_velocity(expert, prediction, schedule, x, t) - monolith).flatten(1).norm(dim=1)
    bound = clamped_error_bound(w, x, t, schedule, prediction)
    assert (off <= bound + 1e-13 / t).all()
    assert (bound < 0.05 * monolith.flatten(1).norm(dim=1)).all()  # and the bound says something
    assert float(off[t > 0.5].max()) > 1e-6  # it is a bound, not an identity


def test_below_the_smallest_divisor_the_velocity_stays_finite() -> None:
    w = world((2, 3, 4))
    t = torch.zeros(4, dtype=torch.float64)
    x = w.images[:4]
    v = flow_velocity(Exact(w.images, w.weights, DDPMLinear(), "eps"), "eps", DDPMLinear(), x, t)
    assert float(v.abs().max()) < 1e-12 / DATA_EDGE  # x_t is the image already: nothing to move


# Identity 3: one expert, drawn once per sample and kept, samples the mixture.
#
# Drawing anew from the exact p(k | x_t) at every step keeps the marginals too: if k ~ p(k | x_t), then
# (x_t, k) has the law of cluster and state together, and the flow of expert k carries it on. What does not
# is a draw that forgets the state: p(k | c) at every step.

PLANE = World(
    torch.tensor([[-2.0, -1.0], [-2.0, 1.0], [-1.2, 0.3], [2.0, 0.5], [2.2, -1.0], [0.3, 2.2], [0.0, -2.4]])
    .double()
    .view(7, 1, 1, 2),
    torch.tensor([0.25, 0.15, 0.2, 0.1, 0.1, 0.15, 0.05], dtype=torch.float64),
    torch.tensor([0, 0, 0, 1, 1, 2, 2]),
)
SIGNIFICANCE, STEPS, SAMPLES = 1e-3, 32, 4000


def follow(routing: str, seed: int, *, forget: bool = False) -> tuple[Tensor, Tensor]:
    """Samples at times 0.5 and 0, each `(n, 2)`, by Heun's method from noise at t = 1.

    Args:
        forget: the router keeps answering p(k | c), what it says at t = 1.
    """
    rule, source = Routing.named(routing), torch.Generator().manual_seed(seed)
    experts = [PLANE.expert(k, RectifiedFlow(), "v") for k in range(PLANE.clusters)]
    x = torch.randn(SAMPLES, 1, 1, 2, generator=source, dtype=torch.float64)
    times = torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    prior = PLANE.logits(x, torch.ones(SAMPLES, dtype=torch.float64))
    share = halfway = torch.empty(0)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        each = torch.stack([expert(x, t.expand(SAMPLES)) for expert in experts], 1)
        return torch.einsum("bk,bkchw->bchw", share, each)

    for step, (now, then) in enumerate(itertools.pairwise(times)):
        halfway = x if now == 0.5 else halfway
        if rule.asks_at(step):
            logits = prior if forget else PLANE.logits(x, now.expand(SAMPLES))
            share = route(rule, logits, torch.rand(SAMPLES, rule.uniforms, generator=source))
        slope = velocity(x, now)
        if then > 0:  # the last step is Euler's: it lands on x0
            slope = (slope + velocity(x + (then - now) * slope, then)) / 2
        x = x + (then - now) * slope
    return halfway.flatten(1), x.flatten(1)


def p_values(halfway: Tensor, reached: Tensor) -> list[float]:
    """Of the images reached (chi-square against their weights) and of the state half-way (KS, both axes)."""
    points, weights = PLANE.images.flatten(1), PLANE.weights.numpy()
    counts = torch.bincount(torch.cdist(reached, points).argmin(1), minlength=7).numpy()
    values = [float(chisquare(counts, SAMPLES * weights).pvalue)]
    for axis in range(2):
        means = 0.5 * points[:, axis].numpy()
        law = kstest(
            halfway[:, axis].numpy(), lambda z, means=means: norm.cdf((z[:, None] - means) / 0.5) @ weights
        )
        values.append(float(law.pvalue))
    return values


@pytest.mark.parametrize(("routing", "seed"), [("once", 1), ("once", 2), ("sample-1", 1)])
def test_a_draw_from_the_exact_posterior_samples_the_mixture(routing: str, seed: int) -> None:
    """Drawn once and kept, or anew at every step."""
    halfway, reached = follow(routing, seed)
    assert min(p_values(halfway, reached)) > SIGNIFICANCE
    assert float(torch.cdist(reached, PLANE.images.flatten(1)).min(1).values.max()) < 1e-2


def test_a_draw_at_every_step_that_forgets_the_state_does_not() -> None:
    values = p_values(*follow("sample-1", seed=1, forget=True))
    assert values[0] < 1e-9 and values[1] < 1e-9


def test_a_commitment_with_another_temperature_samples_another_mixture() -> None:
    assert p_values(*follow("once(0.5)", seed=1))[0] < 1e-9
