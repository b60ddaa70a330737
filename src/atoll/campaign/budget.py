"""Who trains how long: equal training FLOPs for the experts with router and pretraining, and the monolith."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.train import StudentConfig
from atoll.networks.families import family
from atoll.networks.flops import Flops, counts, mean
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig, check_sides


@dataclass(frozen=True)
class Share:
    """One run's part of the budget.

    Attributes:
        steps: optimizer steps.
        batch: samples per step.
        flops: operations per sample; those of a student's training hold its teacher's.
    """

    steps: int
    batch: int
    flops: Flops

    @property
    def train_flops(self) -> float:
        """Operations of the whole run."""
        return self.steps * self.batch * self.flops.train


@dataclass(frozen=True)
class Budget:
    """All runs of a campaign."""

    monolith: Share
    router: Share
    experts: list[Share]
    pretrain: Share | None = None
    student: Share | None = None

    def whole(self) -> dict[str, Share]:
        """The runs on all the data, by role."""
        roles = ("router", "monolith", "pretrain", "student")
        return {role: share for role in roles if (share := getattr(self, role)) is not None}

    def ratio(self) -> float:
        """FLOPs of experts, router and pretraining over the monolith's; the student comes on top."""
        parts = [self.router, *self.experts, *([self.pretrain] if self.pretrain else [])]
        return sum(part.train_flops for part in parts) / self.monolith.train_flops


def denoiser_flops(config: NetworkConfig, shape: DataShape, rows: Sequence[float] = ()) -> Flops:
    """Operations per sample of a denoiser, as a mean over rows: so many of each of the shape's latents."""
    return mean(_denoiser_counts(config, shape), rows)


@lru_cache
def _denoiser_counts(config: NetworkConfig, shape: DataShape) -> tuple[Flops, ...]:
    adapter = family(config.family)
    return counts(lambda: adapter.build(config, shape), adapter.predict, shape)


def router_arguments(config: CampaignConfig, shape: DataShape) -> dict[str, int]:
    """Arguments of `networks.router.Router`."""
    router = config.router
    check_sides("router", router.patch, shape.latents)
    return {
        "num_experts": config.partition.k,
        "in_channels": shape.channels,
        "sample_size": shape.size,
        "patch_size": router.patch,
        "num_layers": router.depth,
        "num_attention_heads": router.heads,
        "attention_head_dim": router.head_width,
        "caption_channels": shape.text_width if router.sees_condition else 0,
        "num_classes": shape.classes if router.sees_condition else 0,
    }


def router_flops(config: CampaignConfig, shape: DataShape, rows: Sequence[float] = ()) -> Flops:
    """Operations per sample of the router; arguments as of `denoiser_flops`."""
    arguments = router_arguments(config, shape)
    return mean(counts(lambda: Router(**arguments), lambda net, x, t, cond: net(x, t, cond), shape), rows)


def divide(
    config: CampaignConfig,
    shape: DataShape,
    sizes: Sequence[float],
    buckets: Sequence[Sequence[float]] = (),
) -> Budget:
    """Divide the budget.

    The monolith sees `budget.samples` images. Router and shared pretraining get their shares of its FLOPs,
    and the experts the rest: steps in proportion to their cluster's size, or the same steps for all.

    The student, if there is one, costs extra: its own forward and backward pass and its teachers' forward.

    Args:
        config: the campaign's settings.
        shape: of the data.
        sizes: training rows per cluster, or the sum of their weights.
        buckets: the same of each of the shape's latents, where there are several and it is known.
    """
    budget = _divide(config, shape, sizes, buckets)
    if config.student is None:
        return budget
    network = config.denoiser("student")[0]
    flops_each = denoiser_flops(network, shape, [sum(row) for row in buckets])
    steps = max(1, round(config.student.step_share * budget.monolith.steps))
    flops = Flops(flops_each.forward, flops_each.train + _teacher_flops(config.student, budget, sizes))
    return replace(budget, student=Share(steps, config.student.batch(config.train.batch), flops))


def _teacher_flops(student: StudentConfig, budget: Budget, sizes: Sequence[float]) -> float:
    """Operations of a teacher for one sample: that of an average row, by as many experts as are asked."""
    expert = sum(size * share.flops.forward for size, share in zip(sizes, budget.experts, strict=True))
    expert /= sum(sizes) or 1
    if student.teacher == "cluster":
        return expert
    return budget.router.flops.forward + student.routing.experts_per_step(len(sizes)) * expert


def _divide(
    config: CampaignConfig, shape: DataShape, sizes: Sequence[float], buckets: Sequence[Sequence[float]]
) -> Budget:
    whole = [sum(rows) for rows in buckets]
    dense = denoiser_flops(config.network, shape, whole)
    batch = config.train.batch
    monolith = Share(max(1, round(config.budget.samples / batch)), batch, dense)

    routing = router_flops(config, shape, whole)
    router_batch = config.router.train.batch
    wanted = config.router.share * monolith.train_flops / (routing.train * router_batch)
    router = Share(max(1, round(wanted)), router_batch, routing)

    pretrain = None
    if config.budget.pretrain:
        pretrain = Share(max(1, round(config.budget.pretrain * monolith.steps)), batch, dense)
    left = monolith.train_flops - router.train_flops - (pretrain.train_flops if pretrain else 0.0)
    equal = config.budget.compute == "equal"
    kinds: list[tuple[int, Flops]] = []
    for number in range(len(sizes)):
        network, train = config.island(number)
        own_batch = config.budget.expert_batch or (
            max(1, train.batch // len(sizes)) if equal else train.batch
        )
        kinds.append((own_batch, denoiser_flops(network, shape, [rows[number] for rows in buckets])))
    if equal:
        steps = max(1, round(left / sum(own_batch * flops.train for own_batch, flops in kinds)))
        return Budget(
            monolith, router, [Share(steps, own_batch, flops) for own_batch, flops in kinds], pretrain
        )
    experts: list[Share] = []
    waiting = sum(sizes)
    for size, (own_batch, flops) in zip(sizes, kinds, strict=True):
        # A part of what is left, so rounding does not add up.
        steps = max(1, round(left * size / waiting / (flops.train * own_batch)))
        experts.append(Share(steps, own_batch, flops))
        left -= experts[-1].train_flops
        waiting -= size
    return Budget(monolith, router, experts, pretrain)
