"""Who serves a batch: weights by a routing, the batch regrouped by expert, and the trace of what it cost.

Every expert is evaluated once, on the samples that chose it. A routing draws by each sample's own uniforms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError
from atoll.model.card import Card
from atoll.model.replay import COMPUTING
from atoll.model.routing import STRATEGIES, Routing


def route(
    routing: Routing,
    logits: Float[Tensor, "B K"],
    uniforms: Float[Tensor, "B n"],
    labels: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B K"]:
    """Compute the weight of every expert for every sample; rows sum to 1.

    Returned in the logits' dtype (at least float32). A row with a NaN, or with no finite logit, becomes NaN.

    Args:
        logits: of p(k | x_t, t, condition), up to a constant per row; -inf = this expert is missing, and its
            weight is exactly 0.
        uniforms: on [0, 1), `n >= routing.uniforms`.
        labels: the cluster of every sample, for `oracle`.
    """
    batch, experts = logits.shape
    assert uniforms.shape[0] == batch and uniforms.shape[1] >= routing.uniforms, "too few uniforms"
    routing.check(experts)
    name, draws = f"routing {str(routing)!r}", uniforms[:, : routing.uniforms]
    if routing.needs_labels:
        if labels is None:
            raise ConfigError(f"{name} without cluster labels", "give labels, or choose another strategy")
        present = logits.gather(-1, labels.long().clamp(0, experts - 1)[:, None])[:, 0] > -torch.inf
        known = (labels >= 0) & (labels < experts) & present
        if not bool(known.all()):
            absent = int(labels[~known][0])
            raise ConfigError(f"{name}: cluster {absent} has no expert", "choose another strategy")
        weights = torch.nn.functional.one_hot(labels.long(), experts).double()
    elif routing.function is not None:
        # A function of the user's: weights that are none would only show as bad pictures.
        weights = routing.function(logits, draws)
        if not isinstance(weights, Tensor) or weights.shape != logits.shape:
            raise ConfigError(f"{name} gave no weights of shape {tuple(logits.shape)}", "return (B, K)")
        sums = weights.sum(-1)
        if bool((weights < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            raise ConfigError(f"{name} gave weights that do not sum to 1", "normalise them")
        if bool((weights[logits == -torch.inf] != 0).any()):
            raise ConfigError(f"{name} chose an expert that is missing", "mind logits of -inf")
    else:
        # In float64, so that sums over many experts add no rounding of their own: a draw compares them.
        rule = STRATEGIES[routing.strategy].weights
        assert rule is not None
        weights = rule(routing, torch.softmax(logits.double() / routing.temperature, dim=-1), draws)
    return weights.to(torch.promote_types(logits.dtype, torch.float32))


class Networks(Protocol):
    """Networks by number: a list (None where one is missing), `ResidentExperts`, or a bank."""

    def __len__(self) -> int:
        """How many, missing ones counted."""
        ...

    def __getitem__(self, number: int, /) -> Denoiser | None:
        """One of them; those that are missing are never asked for."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """Networks that are brought to the device before they run, and so have to know what comes."""

    def prefetch(self, now: Sequence[int], next: Sequence[int] = ()) -> Sequence[int]:
        """Start to bring what is wanted: `now` once each in any order, `next` after that in this order.

        Returns:
            The numbers of `now` in the order in which they are best asked: first those on the device.
        """
        ...


@dataclass(frozen=True)
class _Part:
    """One expert's share of a batch: its rows (None: every row), their weights (None: all 1), conditions.

    `chosen` and `shares` are the rows and their weights in host memory, by which a later step knows its part.
    """

    number: int
    rows: Tensor | None
    weights: Tensor | None
    cond: Condition
    chosen: Tensor
    shares: Tensor


class Dispatch:
    """Which expert is evaluated on which rows, for as long as the weights stay.

    What is found on the way (rows, conditions) is kept, so that steps which keep their weights only evaluate.
    A step that changes some of them regroups the conditions of those experts only whose rows changed.

    Args:
        weights: of every expert for every row `(B, K)`; 0 is not evaluated.

    Attributes:
        weights: those, in host memory.
        numbers: experts with any weight, rising.
        calls: evaluations of each expert on one sample `(K)`, in one run.
    """

    def __init__(
        self, weights: Float[Tensor, "B K"], cond: Condition, before: "Dispatch | None" = None
    ) -> None:
        self.weights = host = weights.detach().cpu()  # one look at the device for all experts
        known = {} if before is None else before._parts
        self._parts: dict[int, _Part] = {}
        for number in range(host.shape[1]):
            rows, part = host[:, number].nonzero()[:, 0], known.get(number)
            if not len(rows):
                continue
            shares = host[rows, number]
            if part is not None and not torch.equal(part.chosen, rows):
                part = None
            if part is None or not torch.equal(part.shares, shares):
                scale = None if bool((shares == 1).all()) else shares.to(weights.device).view(-1, 1, 1, 1)
                if part is not None:
                    part = replace(part, weights=scale, shares=shares)
                elif len(rows) == len(host):
                    part = _Part(number, None, scale, cond, rows, shares)
                else:
                    there = rows.to(weights.device)
                    part = _Part(number, there, scale, cond.select(there), rows, shares)
            self._parts[number] = part
        self.numbers = list(self._parts)
        self.calls = [len(self._parts[k].chosen) if k in self._parts else 0 for k in range(host.shape[1])]

    def rows(self, number: int) -> list[int]:
        """Rows that one of the experts is evaluated on."""
        rows: list[int] = self._parts[number].chosen.tolist()
        return rows

    def run(
        self,
        experts: Networks,
        x_t: Float[Tensor, "B C H W"],
        t: Float[Tensor, "B"],
        next: Sequence[int] = (),
    ) -> Float[Tensor, "B C H W"]:
        """`sum_k weights_k v_k(x_t)`; `next` are experts that are wanted after this run, in order."""
        velocities = {}
        with COMPUTING:
            order: Sequence[int] = self.numbers
            if isinstance(experts, Prefetching):
                order = experts.prefetch(self.numbers, next)
            for number in order:
                part, expert = self._parts[number], experts[number]
                if expert is None:
                    raise ConfigError(f"expert {number} is missing, and yet was asked", "put it in `missing`")
                states, times = (x_t, t) if part.rows is None else (x_t[part.rows], t[part.rows])
                velocities[number] = expert.velocity(states, times, part.cond)
        # One expert for all rows: its answer is the sum, without a pass over the batch.
        alone = self._parts[self.numbers[0]] if len(self.numbers) == 1 else None
        if alone is not None and alone.rows is None and alone.weights is None:
            return velocities[alone.number]
        # Experts run in the order that suits them, but sums run in order of their number: floating-point sums
        # depend on their order, and a picture must not depend on where experts lie or who shares its batch.
        total = torch.zeros_like(x_t)
        for part in self._parts.values():
            v = velocities.pop(part.number)
            if part.weights is not None:
                v = v * part.weights.to(v.dtype)
            total = total.add_(v) if part.rows is None else total.index_add_(0, part.rows, v)
        return total


@dataclass(frozen=True)
class Costs:
    """Operations of one evaluation of one sample, as cards say; 0 where a network is missing."""

    router: float
    experts: Sequence[float]
    pretrain: float = 0.0

    @classmethod
    def of(cls, router: Card, experts: Mapping[int, Card], k: int, pretrain: Card | None = None) -> "Costs":
        """What the cards say, of K experts."""
        each = [experts[n].forward_flops if n in experts else 0.0 for n in range(k)]
        return cls(router.forward_flops, each, 0.0 if pretrain is None else pretrain.forward_flops)


@dataclass
class Trace:
    """Which expert served which sample at which step, and what it cost."""

    weights: list[Tensor] = field(default_factory=list)  # (B, K) float32 per step, of the conditional branch
    router_calls: int = 0  # samples the router was asked for
    expert_calls: int = 0  # samples that networks were evaluated on, both branches of guidance counted
    expert_runs: int = 0  # evaluations of networks, each on the samples that chose it
    router_flops: float = 0.0  # NaN where the ensemble does not know its costs
    expert_flops: float = 0.0  # likewise
    branches: int = 1  # 2 under guidance, which evaluates every sample with and without its condition

    def stacked(self) -> Tensor:
        """Weights `(steps, B, K)`."""
        return torch.stack(self.weights)

    @classmethod
    def joined(cls, traces: Sequence["Trace"], rows: Sequence[int] = ()) -> "Trace":
        """One trace of batches of the same number of steps; samples in the order of their numbers, `rows`."""
        order = torch.tensor(rows).argsort() if rows else slice(None)
        steps = zip(*(t.weights for t in traces), strict=True)
        joined = cls([torch.cat(parts)[order] for parts in steps], branches=traces[0].branches)
        for name in ("router_calls", "expert_calls", "expert_runs", "router_flops", "expert_flops"):
            setattr(joined, name, sum(getattr(trace, name) for trace in traces))
        return joined
