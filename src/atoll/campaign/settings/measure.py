"""What a user sets of measuring: `compare`, `evaluate` and `diagnose`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from atoll.base.config import Config, loose
from atoll.base.errors import ConfigError
from atoll.model.routing import Routing

EXTRA = ("guidances", "sweep", "curve", "curve_samples")
"""Settings of what is measured beyond the table of models; they decide nothing in it."""
LITE = "efficientnet-lite2"
"""Who judges where no other network is at hand."""
Split = Literal["heldout", "train"]
Conditions = Literal["heldout", "test", "train"]


class CompareConfig(Config):
    """How models of a campaign are compared."""

    strategies: list[str] | None = None
    """Routing strategies of the ensemble; by default the campaign's own (`sampling.routing`), then once,
    top-1, top-2, full and oracle."""
    conditions: Conditions = "heldout"
    """Rows whose captions or labels are sampled; the reference is the held-out pictures, or under `test` the
    test pictures."""
    samples: int = Field(default=1000, ge=2, le=10**8)
    """Pictures drawn from each."""
    steps: int | None = Field(default=None, ge=1)
    """Sampling steps in place of `sampling.steps`."""
    guidance: float | None = Field(default=None, ge=0)
    """Guidance scale in place of `sampling.guidance`."""
    batch: int = loose(default=250, ge=1)
    """Pictures sampled at once; it does not change them."""
    extractor: str = LITE
    """Network whose features are compared: another one than the partition's."""
    extractor_size: int | None = Field(default=None, ge=8)
    """Side in pixels that it sees; its own if not set."""
    components: int = Field(default=64, ge=1)
    """Most principal components that the distance is taken in; half the pictures at hand if that is less."""
    fit_rows: int = Field(default=2000, ge=2)
    """Training pictures that fix the components."""
    prompts: list[str] = loose(default=[])
    """Captions to show side by side; training captions are added up to `shown`."""
    shown: int = loose(default=12, ge=1)
    """How many prompts are shown."""
    guidances: list[Annotated[float, Field(ge=0)]] = []
    """Further guidance scales that monolith, student and `sweep` are measured at; none by default."""
    sweep: list[str] | None = None
    """Strategies of the guidance sweep and of the curve; by default the campaign's own and `top-1`."""
    curve: bool = False
    """Whether distances over training FLOPs are measured, at the checkpoints that `train.milestones` kept."""
    curve_samples: int | None = Field(default=None, ge=2)
    """Pictures drawn at each point of the curve; `samples` if not set, so that its ends are known."""
    threads: int = loose(default=0, ge=0)
    """CPU threads; 0 is `OMP_NUM_THREADS`, else all cores that the process is bound to."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sweep is not None and not self.sweep:
            raise ConfigError("compare.sweep names no strategy", "name one, or leave it out for the defaults")
        return self

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, tree: Any) -> Any:
        # The size that these see by default is known by their name, and decides what a comparison is.
        if not isinstance(tree, dict) or tree.get("extractor_size") is not None:
            return tree
        lite = str(tree.get("extractor", LITE)).startswith("efficientnet")
        return {**tree, "extractor_size": 64} if lite else tree


class EvaluateConfig(Config):
    """How a model or a folder of pictures is measured."""

    metrics: str = "frechet,kid,precision,recall,density,coverage"
    """Names separated by commas; `all` takes every one that the extractor allows."""
    extractor: str = LITE
    """Network whose features are compared: another one than the partition's."""
    extractor_size: int | None = Field(default=None, ge=8)
    """Side in pixels that it sees; its own if not set."""
    conditions: Conditions = "heldout"
    """Rows whose captions or labels are sampled."""
    samples: int = Field(default=1000, ge=2, le=10**8)
    """Pictures drawn from a model."""
    batch: int = Field(default=250, ge=1)
    """Pictures at once; work is spread over processes by batches."""
    components: int | None = Field(default=None, ge=0)
    """Principal components of the reference that the Fréchet distance is taken in; 0 takes all dimensions.
    By default all of Inception's, and of any other's 64, or half as many as the smaller side has pictures."""
    kid_subsets: int = Field(default=100, ge=1)
    """Random subsets of KID."""
    kid_size: int = Field(default=1000, ge=2)
    """Pictures of a subset; as many as there are if that is less."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of a process; 0 is `OMP_NUM_THREADS`, else its share of the cores."""

    def components_of(self, kind: str, width: int, pictures: int) -> int:
        """Dimensions of the Fréchet distance, where the smaller side has so many pictures."""
        # Half as many as there are pictures: the covariance of more is singular or nearly so.
        usual = 0 if kind == "inception" else max(1, min(64, pictures // 2))
        return min(usual if self.components is None else self.components, width) or width


class DiagnoseConfig(Config):
    """What `atoll diagnose` looks at."""

    splits: list[Split] = Field(default=["heldout"], min_length=1)
    """Rows that errors and the router are measured on: held-out ones, training ones, or each."""
    rows: int = Field(default=1000, ge=1)
    """Most rows of each split, drawn by the campaign's seed."""
    times: list[float] = Field(default=[*((i + 0.5) / 8 for i in range(8)), 1.0], min_length=1)
    """Times t in (0, 1], where 1 is noise. Means over time leave out t = 1, where `once` asks."""
    batch: int = loose(default=128, ge=1)
    """Rows measured, and pictures sampled, at once; it does not change them."""
    bins: int = Field(default=15, ge=1)
    """Bins of confidence for the calibration error."""
    strategies: list[str] | None = None
    """Routing strategies whose use of experts is traced; by default the campaign's own, then once and top-1.
    Copies are looked for in samples of the first."""
    samples: int = Field(default=500, ge=0, le=10**8)
    """Pictures sampled under each; 0 leaves out all that follows from them."""
    probed: int = Field(default=100, ge=0)
    """Most of them that are sampled again, nudged and in finer steps, to see how stable that is; 0: none."""
    conditions: Split = "heldout"
    """Rows whose captions or labels are sampled. At training captions a good model resembles what it saw."""
    steps: int | None = Field(default=None, ge=1)
    """Sampling steps in place of `sampling.steps`."""
    guidance: float | None = Field(default=None, ge=0)
    """Guidance scale in place of `sampling.guidance`."""
    extractor: str | None = None
    """Vision encoder that looks for copies; by default the partition's, whose features are there already."""
    extractor_size: int | None = Field(default=None, ge=8)
    """Side in pixels that it sees; its own default if not set."""
    quantile: float = Field(default=0.01, gt=0, lt=1)
    """Samples nearer to a training picture than all but this share of held-out ones are suspicious."""
    named: int = Field(default=12, ge=0)
    """Most suspicious samples that are named and shown."""
    threads: int = loose(default=0, ge=0)
    """CPU threads; 0 is `OMP_NUM_THREADS`, else all cores that the process is bound to."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for t in self.times:
            if not 0 < t <= 1:
                raise ConfigError(f"diagnose.times: t = {t:g}", "give times above 0, at most 1")
        if sorted(set(self.times)) != self.times:
            raise ConfigError("diagnose.times do not rise", "give each time once, in rising order")
        if len(set(self.splits)) < len(self.splits):
            raise ConfigError("diagnose.splits names one twice", "give each once")
        for name in self.strategies or ():
            # Traces show what the router does, and `oracle` never asks it.
            if Routing.named(name).needs_labels:
                raise ConfigError(
                    "diagnose.strategies: oracle is told the cluster, so there is nothing to trace",
                    "leave it out",
                )
        return self
