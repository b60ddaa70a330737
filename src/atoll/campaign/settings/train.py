"""How a network is trained: what the user sets, and the numbers of one run."""

import math
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from atoll.base.config import Config, loose
from atoll.base.errors import ConfigError, nearest
from atoll.model.generation import Residency
from atoll.model.routing import Routing, RoutingField
from atoll.store.lease import LeaseConfig

WARMUP_SHARE = 0.2
"""Most of a run that warm-up takes, so that a small budget reaches the peak rate."""
VALIDATION_TIMES = tuple((i + 0.5) / 8 for i in range(8))
Decay = Annotated[float, Field(ge=0, lt=1)]


class GuardConfig(Config):
    """When a step is skipped, and when a run gives up."""

    window: int = Field(default=256, ge=8)
    """Steps whose losses make the bound."""
    factor: float = Field(default=12.0, gt=1)
    """A spike lies this many typical deviations above the window's median."""
    patience: int = Field(default=20, ge=1)
    """Steps skipped in a row that end the run."""


class ParallelConfig(Config):
    """How one run uses its processors. None of it changes what is learned, but for the order of sums."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: `ddp` copies the weights to each, `fsdp` (FSDP2) shards them."""
    shard: int | None = Field(default=None, ge=1)
    """Processes that share one copy of the weights under `fsdp`; all if not set."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Most samples of a process that go through the network at once; gradients add up over the rest."""
    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the network with `torch.compile`."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a collective that does not finish is an error."""


class TrainConfig(Config):
    """Settings of the one loop. Amounts are in samples, so they mean the same for any batch size."""

    batch: int = Field(default=256, ge=1)
    """Samples per step."""
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Shape after warm-up; `cosine` falls to `lr_floor` times the peak at the end of the run."""
    lr_floor: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the peak that `cosine` ends at."""
    warmup: int = Field(default=0, ge=0)
    """Samples over which the learning rate rises from 0; at most a fifth of the run."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    clip: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient; none if not set."""
    ema_half_life: float = Field(default=0.05, ge=0)
    """Half-life of the weight average, as a fraction of the run; 0 for none."""
    ema_warmup: float = Field(default=0.05, ge=0)
    """The half-life is at most this fraction of the samples seen so far (warm-up)."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """`bf16` autocasts, which a CPU with AVX512-BF16 gains by too; `auto` does so on an accelerator only."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the process; results are bit-identical for equal threads only."""
    log_every: int = loose(default=10, ge=1)
    """Steps between lines of metrics.jsonl."""
    validations: int = loose(default=10, ge=0)
    """Validations over the run, evenly spaced, the last at its end."""
    validation_rows: int = loose(default=128, ge=0)
    """Most held-out rows that a validation uses."""
    previews: int = loose(default=2, ge=0)
    """Preview pictures over the run, the last at its end."""
    checkpoint_every_s: float = loose(default=300.0, ge=0)
    """Seconds between checkpoints; there is one at the end in any case."""
    keep: int = loose(default=2, ge=1)
    """Newest checkpoints that stay."""
    milestones: int = loose(default=0, ge=0)
    """Checkpoints over the run that stay for good, evenly spaced."""
    data_timeout_s: float = loose(default=300.0, gt=0)
    """Seconds that a step waits for its data before that is an error."""
    guard: GuardConfig = GuardConfig()
    """Which steps are skipped."""
    parallel: ParallelConfig = loose(default=ParallelConfig())
    """How the run uses its processors."""
    lease: LeaseConfig = loose(default=LeaseConfig())
    """How the run says that it lives."""

    def learning_rate(self, samples: float, total: int) -> float:
        """Learning rate after `samples` of `total` samples."""
        # In samples and not in steps: another batch must not change the shape.
        warmup = min(self.warmup, WARMUP_SHARE * total)
        warm = min(1.0, samples / warmup) if warmup else 1.0
        if self.lr_schedule == "constant":
            return self.lr * warm
        part = min(1.0, max(0.0, (samples - warmup) / max(1, total - warmup)))
        return self.lr * warm * (self.lr_floor + (1 - self.lr_floor) * 0.5 * (1 + math.cos(math.pi * part)))


Start = Literal["scratch", "average", "expert"]


class StudentConfig(Config):
    """The student. Without settings it costs a third of the monolith: 3F + F at a quarter of the batch."""

    teacher: Literal["cluster", "routed"] = "cluster"
    """`cluster`: the expert of the sample's own cluster. `routed`: the ensemble, by the router's weights."""
    routing: RoutingField = Routing.named("top-1")
    """Routing strategy of the `routed` teacher."""
    batch_share: float = Field(default=0.25, gt=0)
    """Samples per step, as a share of `train.batch`."""
    step_share: float = Field(default=1.0, gt=0)
    """Steps, as a share of the monolith's."""
    start: str = "scratch"
    """`scratch` (as the monolith starts), `average` (of the experts' weights) or `expert:K`."""
    data_weight: float = Field(default=0.0, ge=0, lt=1)
    """Weight of the loss against the data; the rest is that against the teacher."""
    network: dict[str, Any] = {}
    """Network settings in place of the campaign's."""
    train: dict[str, Any] = {}
    """Training settings in place of the campaign's."""
    stock: bool = loose(default=True)
    """Whether it must run in a stock diffusers pipeline; if it could not, that is told before training."""
    residency: Residency = loose(default=Residency())
    """Device memory for the teachers; may be changed at any time. Without limits all are loaded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.origin()
        # A teacher is asked once for each sample, at one time: what steps and guidance need is not there.
        if self.routing.needs_labels:
            raise ConfigError("student.routing 'oracle' needs no router", "set student.teacher: cluster")
        if self.routing.every != 1:
            raise ConfigError("student.routing: training has no steps to skip", "leave 'every' out")
        if self.routing.null is not None:
            raise ConfigError("student.routing: training is not guided", "leave 'null' out")
        if "batch" in self.train:
            raise ConfigError(
                "student.train.batch: the student's batch is a share of train.batch",
                "set student.batch_share",
            )
        return self

    def origin(self) -> tuple[Start, int | None]:
        """Where the weights come from, and the expert's number if it is one."""
        word, _, number = self.start.partition(":")
        if word == "expert" and number.isdecimal():
            return "expert", int(number)
        if self.start in ("scratch", "average"):
            return cast(Start, self.start), None
        hint = nearest(self.start, ("scratch", "average", "expert:0"))
        raise ConfigError(f"student.start: unknown {self.start!r}", hint)

    def batch(self, monolith: int) -> int:
        """Samples per step beside a monolith's batch; `ConfigError` if there are none."""
        if monolith * self.batch_share < 1:
            raise ConfigError(
                f"student.batch_share: {self.batch_share:g} of train.batch, {monolith}, is less than one",
                "raise one of them",
            )
        return round(monolith * self.batch_share)


class TrackingConfig(Config):
    """Which trackers show a run, besides metrics.jsonl, which is always there."""

    tensorboard: bool = False
    """Whether event files are written, to `run/tensorboard/`."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: send while training, or write to `run/wandb/` for `wandb sync`."""
    project: str = Field(default="atoll", min_length=1)
    """Its project."""
    entity: str | None = None
    """Its user or team; your own if not set."""
    name: str | None = None
    """What runs' names begin with, and their group; the name of the campaign if not set."""
