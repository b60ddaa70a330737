"""Who trains how long: equal training FLOPs for the experts with router and pretraining, and the monolith."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from atoll.base.errors import AtollError, ConfigError, first_line
from atoll.base.text import many
from atoll.campaign.runs import Run, experts_of, runs_of
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.train import WARMUP_SHARE
from atoll.encoders.registry import check_config
from atoll.networks.cost import Flops, counts, mean
from atoll.networks.families import family
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig, check_sides
from atoll.store.log import MOST_STEPS

FEW_STEPS = 100
"""Under so many a network has hardly left its initial weights."""


@dataclass(frozen=True)
class RunBudget:
    """One run's part of the budget."""

    steps: int
    batch: int
    flops: Flops  # per sample; those of a student's training hold its teachers'

    def __post_init__(self) -> None:
        if self.steps > MOST_STEPS or self.batch > 10**6:
            what = f"a run would take {self.steps:,} steps of {self.batch:,} samples"
            raise ConfigError(what, "change budget.samples, or the batch (train.batch, student.batch_share)")

    @property
    def train_flops(self) -> float:
        """Operations of the whole run."""
        return self.steps * self.batch * self.flops.train


Budget = dict[Run, RunBudget]
"""Every run that a campaign plans, in the order of `RUNS`."""


def flops_ratio(budget: Budget) -> float:
    """Training FLOPs of the ensemble's runs over the baseline's; extras come on top."""
    spent = dict.fromkeys(("ensemble", "baseline", "extra"), 0.0)
    for run, part in budget.items():
        spent[run.kind.counted] += part.train_flops
    return spent["ensemble"] / spent["baseline"]


def too_small(config: CampaignConfig, budget: Budget) -> list[str]:
    """What a small budget does to training; nothing where it is large enough."""
    trained, warnings = {run: budget[run] for run in budget if run in runs_of(config)}, list[str]()
    of, steps = f"of {many(len(trained), 'run')}", [part.steps for part in trained.values()]
    if brief := sum(number < FEW_STEPS for number in steps):
        few = f"under {FEW_STEPS} steps (as few as {min(steps)}) in {brief} {of}"
        warnings.append(f"{few}: raise budget.samples or lower partition.k")
    warmups = {run: config.training(*run).warmup for run in trained}
    if cut := sum(warmups[run] > WARMUP_SHARE * part.steps * part.batch for run, part in trained.items()):
        warnings.append(f"warm-up (train.warmup) is shortened to a fifth of the training in {cut} {of}")
    if (cost := flops_ratio(budget)) > 1.1:  # no run has less than one step
        warnings.append(f"the ensemble costs {cost:.1f} times the monolith's training: raise budget.samples")
    return warnings


def denoiser_flops(config: NetworkConfig, shape: DataShape, rows: Sequence[float] = ()) -> Flops:
    """Operations per sample of a denoiser, as a mean over rows: so many of each of the shape's latents."""
    return mean(_denoiser_counts(config, shape), rows)


# A count builds the network on the meta device, which takes a second. Experts are mostly alike.
@lru_cache
def _denoiser_counts(config: NetworkConfig, shape: DataShape) -> tuple[Flops, ...]:
    adapter = family(config.family)
    check_config(config.arguments, "network.arguments")
    try:
        return counts(lambda: adapter.build(config, shape), adapter.predict, shape)
    except Exception as error:  # a class of diffusers that meets odd arguments raises of every kind
        if not config.arguments or isinstance(error, AtollError):
            raise
        what = f"network.arguments make no {adapter.class_name} that computes ({first_line(error)})"
        raise ConfigError(what, "take them from the config.json of a checkpoint") from None


@lru_cache
def _router_counts(arguments: tuple[tuple[str, int], ...], shape: DataShape) -> tuple[Flops, ...]:
    return counts(partial(Router, **dict(arguments)), Router.__call__, shape)


def router_arguments(config: CampaignConfig, shape: DataShape) -> dict[str, int]:
    """Arguments of `networks.router.Router`."""
    router = config.router
    check_sides("router", router.patch, shape.latents)
    return {
        "num_experts": config.partition.k,
        "in_channels": shape.channels,
        "sample_size": config.network.base_size(shape.size, router.patch),
        "patch_size": router.patch,
        "num_layers": router.depth,
        "num_attention_heads": router.heads,
        "attention_head_dim": router.head_width,
        "caption_channels": shape.text_width if router.sees_condition else 0,
        "num_classes": shape.classes if router.sees_condition else 0,
    }


def divide(
    config: CampaignConfig, shape: DataShape, sizes: Sequence[float], buckets: Sequence[Sequence[float]] = ()
) -> Budget:
    """Divide the training FLOPs over the runs.

    `sizes` are training rows per cluster, or sums of their weights; `buckets` the same of each of the shape's
    latents, where there are several. The monolith sees `budget.samples` images. Router and shared pretraining
    get their shares of its FLOPs, and the experts the rest. The student costs extra.
    """
    # The monolith's samples are the user's one dial; what all others may spend follows from its FLOPs.
    k, batch, all_rows = len(sizes), config.train.batch, [sum(rows) for rows in buckets]
    dense = denoiser_flops(config.network.whole, shape, all_rows)
    monolith = RunBudget(max(1, round(config.budget.samples / batch)), batch, dense)
    budget = {Run("monolith"): monolith}

    # Router and shared pretraining: a share each. Pretraining is the monolith's network at its batch, so its
    # share of FLOPs is one of steps.
    passes = _router_counts(tuple(router_arguments(config, shape).items()), shape)
    flops, router_batch = mean(passes, all_rows), config.router.train.batch
    steps = round(config.router.share * monolith.train_flops / (flops.train * router_batch))
    router = budget[Run("router")] = RunBudget(max(1, steps), router_batch, flops)
    left = monolith.train_flops - router.train_flops
    if config.budget.pretrain:
        pretrain = RunBudget(max(1, round(config.budget.pretrain * monolith.steps)), batch, dense)
        budget[Run("pretrain")] = pretrain
        left -= pretrain.train_flops

    # The experts: what is left.
    equal = config.budget.compute == "equal"
    kinds: list[tuple[int, Flops]] = []
    for number in range(k):
        network, train = config.island(number)
        # Under `equal` the experts share the monolith's batch, and so take about as many steps as it does.
        own = config.islands[number].train.get("batch") if number in config.islands else None
        own_batch = own or config.budget.expert_batch or (max(1, train.batch // k) if equal else train.batch)
        kinds.append((own_batch, denoiser_flops(network, shape, [rows[number] for rows in buckets])))
    if equal:
        # One number of steps for all, as in the paper: small clusters are seen more often than large ones.
        steps = max(1, round(left / sum(own_batch * flops.train for own_batch, flops in kinds)))
        experts = [RunBudget(steps, own_batch, flops) for own_batch, flops in kinds]
    else:
        experts, waiting = [], sum(sizes)
        for size, (own_batch, flops) in zip(sizes, kinds, strict=True):
            # A part of what is left after the experts before it: rounding to whole steps does not add up.
            steps = max(1, round(left * size / waiting / (flops.train * own_batch)))
            experts.append(RunBudget(steps, own_batch, flops))
            left -= experts[-1].train_flops
            waiting -= size
    budget.update(zip(experts_of(k), experts, strict=True))

    # The student: its own passes, and those of the experts that it asks for an average row, in both branches
    # of guidance where there is one, and at all of the teacher's steps to its next; once for `reuse` steps.
    if config.student is not None:
        own = denoiser_flops(config.denoiser("student")[0], shape, all_rows)
        teacher = sum(size * part.flops.forward for size, part in zip(sizes, experts, strict=True))
        teacher /= sum(sizes) or 1
        how = config.student.teaching(1.0).for_condition(config.condition)
        guided = how.guidance != 1 and not config.network.guidance
        branches = [how.routing, *([how.routing.of_null or how.routing] if guided else [])]
        path = how.steps // config.student.steps if config.student.steps else 1
        teacher *= path * sum(routing.experts_per_step(k) for routing in branches)
        if config.student.teacher == "routed":
            asked = (1 if how.routing.rule.fixed else path) + path * bool(guided and how.routing.of_null)
            teacher += asked * router.flops.forward
        steps = max(1, round(config.student.step_share * monolith.steps))
        flops = Flops(own.forward, own.train + teacher / config.student.reuse)
        budget[Run("student")] = RunBudget(steps, config.student.batch(batch), flops)
    return {run: budget[run] for run in runs_of(config, planned=True)}
