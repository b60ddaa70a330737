"""How a network is trained: what the user sets, and the numbers of one run."""

import math
import os
from shutil import which
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from atoll.base.config import Config, loose
from atoll.base.errors import ConfigError, nearest
from atoll.model.generation import Generation, Residency
from atoll.model.routing import PRETRAIN, Routing, RoutingField
from atoll.store.lease import LeaseConfig

WARMUP_SHARE = 0.2
"""Most of a run that warm-up takes, so that a small budget reaches the peak rate."""
ANSWERS = 256
"""Most batches whose answers are kept at once: fewer take less memory, and come again sooner."""
VALIDATION_TIMES = tuple((i + 0.5) / 8 for i in range(8))
Decay = Annotated[float, Field(ge=0, lt=1)]


class GuardConfig(Config):
    """When a step with a loss spike is skipped, and when a run stops."""

    window: int = Field(default=256, ge=8)
    """Number of recent losses that a step is compared with."""
    factor: float = Field(default=12.0, gt=1)
    """A step is skipped if its loss is this many typical deviations above the median of the window."""
    patience: int = Field(default=20, ge=1)
    """Consecutive skipped steps that stop the run."""


class ParallelConfig(Config):
    """How a run uses its processors. The result changes only by the order of sums."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: `ddp` copies the weights to each process, `fsdp` (FSDP2) shards them."""
    shard: int | None = Field(default=None, ge=1)
    """Processes that share one copy of the weights with `fsdp`; by default all."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Maximum images per process in one forward pass; gradients accumulate over the rest of the batch."""
    checkpointing: bool = False
    """Gradient checkpointing: recompute activations in the backward pass to save memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the network with `torch.compile`; `auto` does so on GPUs where each has 1e17 FLOPs to do, and
    where gcc or clang is installed."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a collective operation fails."""

    def decided(self, cpu: bool, flops: float) -> Self:
        """The same without `auto`, for a device that has so many FLOPs; `ConfigError` without a compiler."""
        compilers = (os.environ.get("CXX", "g++"),) if cpu else (os.environ.get("CC", "gcc"), "clang")
        able = any(map(which, compilers))
        if self.compile is True and not able:
            what = f"train.parallel.compile needs {' or '.join(compilers)}, which is not here"
            raise ConfigError(what, "install it, or set it to auto")
        # An H100 computes for five minutes then: it compiles for one, and saves one in four.
        long = not cpu and flops >= 1e17 and able
        return self if self.compile != "auto" else self.model_copy(update={"compile": long})


class TrainConfig(Config):
    """Optimizer and training loop. Amounts are in samples, so that they fit any batch size."""

    batch: int = Field(default=256, ge=1, le=10**6)
    """Batch size: images per step, over all processes."""
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: `constant`, or `cosine` down to `lr_floor` times the peak."""
    lr_floor: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of `cosine`, as a fraction of the peak."""
    warmup: int = Field(default=0, ge=0)
    """Images over which the learning rate rises from 0; at most a fifth of the run."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Betas of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    clip: float | None = Field(default=1.0, gt=0)
    """Maximum gradient norm; null for no clipping."""
    ema_half_life: float = Field(default=0.05, ge=0)
    """Half-life of the EMA of the weights, as a fraction of the run; 0 for no EMA."""
    ema_warmup: float = Field(default=0.05, gt=0)
    """Upper bound of the half-life during warm-up, as a fraction of the images seen so far."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """`bf16` uses autocast. `auto` is bf16 on a GPU and float32 on a CPU."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per process; results are bit-identical only for equal numbers."""
    log_every: int = loose(default=10, ge=1)
    """Steps between lines of metrics.jsonl."""
    validations: int = loose(default=10, ge=0)
    """Validations over the run, evenly spaced; the last is at the end."""
    validation_rows: int = loose(default=128, ge=0)
    """Maximum held-out images per validation."""
    previews: int = loose(default=2, ge=0)
    """Preview images over the run, evenly spaced; the last is at the end."""
    checkpoint_every_s: float = loose(default=300.0, ge=0)
    """Seconds between checkpoints, at least 20 times what the last one took to write; one more is written at
    the end. 0 writes them as often as possible."""
    keep: int = loose(default=2, ge=1)
    """Number of recent checkpoints to keep."""
    milestones: int = loose(default=0, ge=0)
    """Checkpoints to keep for good, evenly spaced over the run."""
    data_timeout_s: float = loose(default=300.0, gt=0)
    """Seconds to wait for a batch of data before the run fails."""
    guard: GuardConfig = GuardConfig()
    """Which steps are skipped."""
    parallel: ParallelConfig = loose(default=ParallelConfig())
    """How the run uses its processors."""
    lease: LeaseConfig = loose(default=LeaseConfig())
    """Heartbeats and takeover of the run."""

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
    """The student: one network distilled from the experts, by default at a third of the monolith's cost."""

    teacher: Literal["cluster", "routed"] = "cluster"
    """`cluster`: the expert of the image's own cluster. `routed`: the ensemble, weighted by the router."""
    routing: RoutingField = Routing.named("top-1")
    """Routing strategy of the `routed` teacher."""
    steps: int | None = Field(default=None, ge=1)
    """Number of sampling steps that it is distilled for, such as 1, 2, 4 or 8; null: any number of steps."""
    teacher_steps: int = Field(default=24, ge=1, le=100_000)
    """Sampling steps of the teacher of a student with `steps`, a multiple of them."""
    guidance: float = Field(default=1.0, ge=0, le=1e6)
    """Guidance scale of the teacher. Above 1 the student is sampled without guidance, at half the cost."""
    batch_share: float = Field(default=0.25, gt=0, le=1000)
    """Batch size, as a share of `train.batch`."""
    step_share: float = Field(default=1.0, gt=0, le=1000)
    """Number of steps, as a share of the monolith's."""
    reuse: int = Field(default=1, ge=1, le=8)
    """Number of steps, at most 8, that learn from each answer of the teacher, which costs that much less."""
    start: str = "scratch"
    """Initial weights: `scratch`, `average` (mean of the experts) or `expert:K`."""
    data_weight: float = Field(default=0.0, ge=0, lt=1)
    """Weight of the loss against the data; the rest is the loss against the teacher."""
    network: dict[str, Any] = {}
    """Overrides of `network`."""
    train: dict[str, Any] = {}
    """Overrides of `train`."""
    stock: bool = loose(default=True)
    """Refuse, before training, a student that no stock diffusers pipeline can run."""
    residency: Residency = loose(default=Residency())
    """Memory limits for the teachers; by default all are loaded. May be changed at any time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.origin()
        # A teacher is asked once for each sample, at one time: what steps and guidance need is not there.
        if self.routing.needs_labels:
            raise ConfigError("student.routing 'oracle' needs no router", "set student.teacher: cluster")
        if self.routing.every != 1:
            raise ConfigError("student.routing: training has no steps to skip", "leave 'every' out")
        if self.routing.null == PRETRAIN or (self.routing.null is not None and self.guidance == 1):
            what = "pretraining is no teacher" if self.guidance != 1 else "the teacher is not guided"
            raise ConfigError(f"student.routing: {what}", "leave 'null' out")
        if self.teacher == "cluster" and self.routing != StudentConfig.model_fields["routing"].default:
            raise ConfigError("student.routing: the teacher routes nothing", "set student.teacher: routed")
        if self.steps is not None and (self.steps > self.teacher_steps or self.teacher_steps % self.steps):
            what = f"student.steps: {self.steps} steps of a teacher that takes {self.teacher_steps}"
            more = self.steps * max(1, round(self.teacher_steps / self.steps))
            raise ConfigError(what, f"set student.teacher_steps to a multiple, such as {more}")
        if self.steps is not None and self.data_weight:
            what = "student.data_weight: the data tell the velocity at one time, and not that of a step"
            raise ConfigError(what, "leave it out, or student.steps")
        if self.residency.stored:  # there is no ensemble yet whose pictures could be compared
            what = f"student.residency.dtype: no teacher answers by {self.residency.dtype}"
            raise ConfigError(what, "set student.residency.experts, if memory is short")
        if "batch" in self.train:
            raise ConfigError("student.train.batch: it is a share of train.batch", "set student.batch_share")
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

    def teaching(self, shift: float | str) -> Generation:
        """How the teacher draws, where training times have this shift."""
        routing = Routing.named("oracle") if self.teacher == "cluster" else self.routing
        return Generation(steps=self.teacher_steps, guidance=self.guidance, routing=routing, shift=shift)

    def sampling(self, shift: float | str) -> dict[str, float | str]:
        """How the student has to be sampled then, as its card says; empty where any steps will do."""
        return {
            **({"guidance": 1.0} if self.steps or self.guidance != 1 else {}),
            **({"steps": self.steps, "shift": shift} if self.steps else {}),
        }

    def batch(self, monolith: int) -> int:
        """Samples per step beside a monolith's batch; `ConfigError` if there are none."""
        if monolith * self.batch_share < 1:
            what = f"student.batch_share: {self.batch_share:g} of train.batch, {monolith}, is less than one"
            raise ConfigError(what, "raise one of them")
        return round(monolith * self.batch_share)

    def kept(self, steps: int) -> int:
        """Batches whose answers are kept at once: rounds of them divide the steps of a run evenly."""
        rounds = max(1, math.ceil(steps / (ANSWERS * self.reuse)))
        return math.ceil(steps / (rounds * self.reuse))

    def learns_from(self, step: int, steps: int) -> int:
        """The number of the batch, among those that the teacher answers, that a step of a run learns from."""
        kept = self.kept(steps)
        return step // (kept * self.reuse) * kept + step % kept


class TrackingConfig(Config):
    """Experiment trackers beside metrics.jsonl, which is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files to `run/tensorboard/`."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: `online` sends while training, `offline` writes to `run/wandb/` for `wandb sync`."""
    project: str = Field(default="atoll", min_length=1)
    """Project in Weights & Biases."""
    entity: str | None = None
    """User or team in Weights & Biases; by default your own."""
    name: str | None = None
    """Prefix of run names, and their group; by default the campaign's name."""
