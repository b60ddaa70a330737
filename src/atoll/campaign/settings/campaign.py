"""The settings of a campaign: one YAML file, resolved, checked, and frozen into `campaign.json`."""

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from atoll.base.config import Config, loose, loose_fields
from atoll.base.errors import ConfigError
from atoll.base.text import size
from atoll.campaign.settings.launch import LaunchConfig, merged
from atoll.campaign.settings.measure import CompareConfig, DiagnoseConfig, EvaluateConfig
from atoll.campaign.settings.train import StudentConfig, TrackingConfig, TrainConfig
from atoll.data.settings import (
    CaptionerConfig,
    ConditionKind,
    DedupeConfig,
    IngestConfig,
    PartitionConfig,
    SourceConfig,
    check_names,
)
from atoll.encoders.registry import JOIN, KNOWN
from atoll.flow.settings import ObjectiveConfig, TimeConfig
from atoll.model.generation import Generation, Residency
from atoll.model.routing import Routing
from atoll.networks.pipelines import check_settings
from atoll.networks.settings import TAKES_TEXT, NetworkConfig, check_sides
from atoll.store.location import resolve, resolve_own

C = TypeVar("C", bound=Config)
LARGE_STATES = 10**12
"""Bytes of text states that are worth a word: a node fetches them in a quarter of an hour, at 1 GB/s."""


class DataConfig(Config):
    """The data set: where it is, and how to make it if it is not there yet."""

    path: str
    """Folder or URL of the data set; a relative path starts from the folder of campaign.yaml."""
    source: str | dict[str, SourceConfig] | None = None
    """What to ingest if `path` is empty: `glyphs`, a folder with captions, parquet or tar files, a data set
    of the hub, or several of them by name."""
    ingest: IngestConfig = IngestConfig()
    """Image size, splits and shards."""
    captioner: CaptionerConfig | None = None
    """Image-text model that describes images without a caption (`atoll data caption`)."""
    dedupe: DedupeConfig | None = None
    """Leave out near-duplicate images; `{}` uses the defaults."""
    text_encoder: str = "minilm"
    """Frozen text encoder for condition `text`: `minilm`, a folder or a hub name. A list, also written
    `A + B`, joins several in the order of their pipeline, as SD3 (two CLIP, T5) and Flux (CLIP, T5) do."""
    text_length: int = Field(default=77, ge=1, le=65536)
    """Maximum tokens of a caption; longer captions are cut. Several encoders pad to it: 256 for SD3 and
    FLUX.1-schnell, 512 for FLUX.1-dev; CLIP takes 77."""
    precompute_text: bool = True
    """Encode all captions once, before training. If false, only token ids are stored and every training step
    encodes its captions (`atoll plan` compares both)."""
    vae: str = "none"
    """Frozen autoencoder: a folder or a hub name. `none` trains on pixels."""
    weighted: bool = False
    """Sample training images in proportion to the column `weights` (see `atoll concepts rebalance`). Rows of
    weight 0 are left out either way."""

    @property
    def text_column(self) -> str:
        """Column that training reads captions from."""
        return "text" if self.precompute_text else "tokens"

    @field_validator("text_encoder", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        return JOIN.join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("source", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {str(name): SourceConfig.parse(each, f"data.source.{name}") for name, each in value.items()}


class BudgetConfig(Config):
    """Total training compute, and how the experts share it."""

    samples: int = Field(default=100_000, ge=1, le=10**12)
    """Training images that the monolith sees. The experts, the router and shared pretraining together cost
    the same FLOPs."""
    compute: Literal["proportional", "equal"] = "proportional"
    """Expert steps: `proportional` to cluster size, or `equal` for all experts as in the paper."""
    expert_batch: int | None = Field(default=None, ge=1, le=10**6)
    """Batch size of experts without their own; by default `train.batch`, with `equal` that divided by K."""
    pretrain: float = Field(default=0.0, ge=0, lt=1)
    """Share of the monolith's FLOPs for pretraining on all data, from which the experts start."""
    pretrain_lr_schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule of shared pretraining after warm-up; the experts go on at the peak."""


class RouterConfig(Config):
    """The router: a small network that predicts which expert knows a noisy image."""

    patch: int = Field(default=4, ge=1)
    """Patch size, in latent pixels."""
    depth: int = Field(default=2, ge=1, le=1000)
    """Number of transformer blocks."""
    heads: int = Field(default=2, ge=1, le=1000)
    """Number of attention heads."""
    head_width: int = Field(default=32, ge=1, le=10_000)
    """Width of an attention head."""
    sees_condition: bool = True
    """Whether the router gets the text or label; without it, it knows only the prior near pure noise."""
    share: float = Field(default=0.04, gt=0, lt=0.5)
    """Share of the total training FLOPs."""
    pure_noise: float = Field(default=0.25, ge=0, le=1)
    """Share of training samples at exactly t = 1, where `once` evaluates the router."""
    time: TimeConfig = TimeConfig()
    """Distribution of training times; by default that of `objective.time`."""
    condition_dropout: float = Field(default=0.1, ge=0, le=1)
    """Probability of training without the condition, as `full` with guidance evaluates the router."""
    train: TrainConfig = TrainConfig(lr=5e-4)
    """Optimizer and training loop of the router."""


class IslandConfig(Config):
    """Settings of one island that differ from the campaign's."""

    network: dict[str, Any] = {}
    """Overrides of `network`."""
    train: dict[str, Any] = {}
    """Overrides of `train`."""
    objective: dict[str, Any] = {}
    """Overrides of `objective`: schedule, prediction, times, condition dropout."""


class SamplingConfig(Generation):
    """Default sampling settings."""

    residency: Residency = Residency()
    """Memory limits for the experts; experts beyond them are loaded on demand."""
    guide_share: float = Field(default=1.0, gt=0, le=1)
    """Part of shared pretraining after which its checkpoint serves `null pretrain`; a weaker model guides
    better, up to a point (arXiv 2406.02507). Below 1 it must be one of `train.milestones`."""


class CampaignConfig(Config):
    """One decentralized diffusion model from data set to ensemble."""

    seed: int = 0
    """Random seed of everything: splits, clusters, initial weights, data order, noise."""
    data: DataConfig
    """The data set."""
    origin: str | None = None
    """Finished campaign that this one goes on from, as by `atoll new --from`: a folder or URL. It gives the
    partition, and each run starts from the weights of the same run there in place of `network.init`."""
    condition: ConditionKind = "text"
    """What the model is conditioned on: text captions, class labels, or none."""
    partition: PartitionConfig = PartitionConfig()
    """How the data set is divided into clusters, one for each expert."""
    network: NetworkConfig = NetworkConfig()
    """Network of the experts and the monolith."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Training objective: noise schedule, prediction type, times."""
    train: TrainConfig = TrainConfig()
    """Optimizer and training loop."""
    islands: dict[int, IslandConfig] = {}
    """Overrides by island number."""
    budget: BudgetConfig = BudgetConfig()
    """Training compute."""
    router: RouterConfig = RouterConfig()
    """The router."""
    trusted: list[str] = loose(default=[])
    """Public keys or certificates, as PEM files or their text. With any, only parts that one of them signed
    are assembled."""
    quarantine: list[int] = loose(default=[])
    """Numbers of published experts to leave out of the ensemble."""
    monolith: bool = True
    """Train the baseline too: one network on all data at equal training FLOPs."""
    student: StudentConfig | None = None
    """One network distilled from the experts. `{}` uses the defaults, null trains none; it may be added after
    all other training."""
    sampling: SamplingConfig = loose(default=SamplingConfig())
    """Sampling defaults; may be changed at any time."""
    compare: CompareConfig = loose(default=CompareConfig())
    """How `atoll compare` compares models; may be changed at any time."""
    diagnose: DiagnoseConfig = loose(default=DiagnoseConfig())
    """What `atoll diagnose` measures; may be changed at any time."""
    evaluate: EvaluateConfig = loose(default=EvaluateConfig())
    """How `atoll evaluate` measures one model; may be changed at any time."""
    launch: LaunchConfig = loose(default=LaunchConfig())
    """Where runs train and with which resources; may be changed at any time."""
    tracking: TrackingConfig = loose(default=TrackingConfig())
    """Experiment trackers; may be changed at any time."""

    @model_validator(mode="before")
    @classmethod
    def _router_times(cls, tree: Any) -> Any:
        # The router is asked where the experts are, so it learns at their times unless it is set apart. And
        # networks are asked where they have learned, so the shift of sampling is theirs.
        if not isinstance(tree, Mapping):
            return tree
        objective, router = tree.get("objective"), tree.get("router") or {}
        if not isinstance(objective, Mapping) or not isinstance(router, Mapping) or "time" not in objective:
            return tree
        time, sampling = objective["time"], tree.get("sampling") or {}
        tree = {**tree, "router": {"time": time, **router}}
        if isinstance(time, Mapping) and "shift" in time and isinstance(sampling, Mapping):
            tree["sampling"] = {"shift": time["shift"], **sampling}
        return tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [*self.islands], [*self.launch.islands], self.quarantine
        for group, numbers in zip(("islands", "launch.islands", "quarantine"), named, strict=True):
            for number in numbers:
                if not 0 <= number < self.partition.k:
                    last = self.partition.k - 1
                    raise ConfigError(f"{group}.{number}: there is no such island", f"use 0 to {last}")
        for number in self.islands:
            self.objective_of("expert", number)
        # Pixels have the size of the pictures; a VAE's latents are known to divide only once it is loaded.
        pixels = self.data.vae == "none"
        sides = [(height, width) for width, height in self.data.ingest.sizes()]
        denoisers = (self.denoiser("monolith"), self.denoiser("student"), *map(self.island, self.islands))
        widths = [("network", *own.dimensions()[1:]) for own, _ in denoisers if own.family != "flux"]
        for name, heads, width in (*widths, ("router", self.router.heads, self.router.head_width)):
            if heads * width % 4:  # sines and cosines of two axes are their positions
                what = f"{name}.heads x {name}.head_width is {heads} x {width}, which gives no positions"
                raise ConfigError(what, "make the product a multiple of 4")
        for network, _ in denoisers:
            check_sides(network.family, network.patch if pixels else 1, sides)
            if network.guidance != self.network.guidance:
                what = "guidance_embeds of network.arguments differs from that of an island or the student"
                raise ConfigError(what, "set it to one value for all")
            if TAKES_TEXT[network.family] != (self.condition == "text"):
                what = f"the {network.family} family does not take condition {self.condition!r}"
                raise ConfigError(what, "take pixart, sd3 or flux for text, dit for class or none")
        check_sides("router", self.router.patch if pixels else 1, sides)
        if isinstance(self.data.source, dict):
            check_names(self.data.source)
            if len({source.weight for source in self.data.source.values()}) > 1 and not self.data.weighted:
                what = "data.source: the weights differ, but rows are drawn without weights"
                raise ConfigError(what, "set data.weighted=true, or leave out the weights")
        self.sampling.routing.check(self.partition.k, pretrained=bool(self.budget.pretrain))
        if self.sampling.routing.needs_labels:
            raise ConfigError("sampling.routing 'oracle' needs known clusters", "use compare.strategies")
        for names in (self.compare.strategies, self.compare.sweep, self.diagnose.strategies):
            for name in names or ():
                Routing.named(name)
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        for number in range(self.partition.k):
            network = self.island(number)[0]
            if network.lora is None:
                continue
            if self.origin or (not self.budget.pretrain and network.init == "scratch"):
                start = "set budget.pretrain above 0 or network.init to a checkpoint"
                what = "network.lora changes a network that all experts share, and there is none"
                raise ConfigError(what, f"leave origin out, and {start}" if self.origin else start)
            if network.whole != self.network.whole:
                what = f"islands.{number}.network: with network.lora all experts change one network"
                raise ConfigError(what, f"leave it out, or set islands.{number}.network: {{lora: null}} too")
        return self

    @model_validator(mode="after")
    def _check_pretrain(self) -> Self:
        if not self.budget.pretrain:
            return self
        if self.origin:
            what = "budget.pretrain: with origin every run starts from the same run there"
            raise ConfigError(what, "set budget.pretrain=0")
        if (shared := self.budget.pretrain + self.router.share) >= 1:
            what = f"budget.pretrain and router.share are {shared:g} of the budget"
            raise ConfigError(f"{what}: nothing is left for experts", "lower one of them")
        for number in self.islands:
            if self.island(number)[0].init != self.network.init:
                what = f"islands.{number}.network.init: with budget.pretrain all start"
                fix = "set network.init, which that starts from, or budget.pretrain=0"
                raise ConfigError(f"{what} from shared pretraining", fix)
        # Milestones are evenly spaced, so a share is there only if it is a whole number of them.
        share, milestone = self.sampling.guide_share, self.sampling.guide_share * self.train.milestones
        if share < 1 and (not round(milestone) or abs(milestone - round(milestone)) > 1e-6):
            what = f"sampling.guide_share {share:g}: no checkpoint of shared pretraining is kept there"
            raise ConfigError(what, "set train.milestones before it is trained, such as 4 or 8 for 0.25")
        # Signatures are of what is published. A checkpoint would get into the ensemble unsigned.
        if share < 1 and self.trusted:
            what = "sampling.guide_share takes a checkpoint, and trusted signatures, which checkpoints lack"
            raise ConfigError(what, "set sampling.guide_share=1")
        return self

    @model_validator(mode="after")
    def _check_student(self) -> Self:
        # All of this would come up when the teachers are trained, days after the mistake.
        if (student := self.student) is None:
            return self
        student.batch(self.train.batch)
        network, learns, k = self.denoiser("student")[0], self.objective_of("student"), self.partition.k
        student.teaching(1.0).routing.check(k)
        if network.lora is not None:
            what = "student.network.lora: a student is a whole network, which needs no other"
            raise ConfigError(what, "leave it out")
        if student.stock:
            check_settings(network.family, self.data.vae, network.patch)
        start, expert = student.origin()
        if start == "expert" and not 0 <= (expert or 0) < k:
            fix = f"use expert:0 to expert:{k - 1}"
            raise ConfigError(f"student.start: there is no expert {expert}", fix)
        own = network.architecture(), learns.schedule, learns.prediction
        for number in {"expert": [expert], "average": range(k), "scratch": ()}[start]:
            taught, learned = self.denoiser("expert", number)[0], self.objective_of("expert", number)
            if (taught.architecture(), learned.schedule, learned.prediction) != own:
                what = f"student.start: {student.start!r} needs equal networks, schedules and predictions"
                fix = "set student.start: scratch, or give the experts its network, rectified-flow and v"
                raise ConfigError(f"{what}, and expert {number}'s differ from the student's", fix)
        return self

    def frozen(self) -> dict[str, Any]:
        """The part that is fixed once the campaign exists."""
        # The student has a file of its own, as it may be added when everything else is fixed.
        return self.model_dump(mode="json", exclude={*loose_fields(CampaignConfig), "student"})

    @property
    def encodes_text(self) -> bool:
        """Whether training encodes captions, so that the text encoder lies beside every network."""
        return self.condition == "text" and not self.data.precompute_text

    def large_states(self, rows: int = 0) -> list[str]:
        """A warning of text states over `LARGE_STATES`, of so many rows or of as many as training sees."""
        data = self.data
        width = max(KNOWN[name].width if name in KNOWN else 0 for name in data.text_encoder.split(JOIN))
        most = 2 * data.text_length * width * (rows or self.budget.samples)
        large = self.condition == "text" and data.precompute_text and most > LARGE_STATES
        fix = "encode in training, data.precompute_text=false"
        return [f"warning: text states may take up to {size(most)}: {fix}"] * large

    @property
    def encoders(self) -> tuple[str, str]:
        """Names of the encoders that the settings choose, which the user vouches for."""
        return self.data.vae, self.data.text_encoder

    def island(self, number: int) -> tuple[NetworkConfig, TrainConfig]:
        """Network and training settings of one island."""
        own, where = self.islands.get(number, IslandConfig()), f"islands.{number}"
        network = _changed(self.network, own.network, f"{where}.network")
        return network, _changed(self.train, own.train, f"{where}.train")

    def denoiser(self, role: str, island: int | None = None) -> tuple[NetworkConfig, TrainConfig]:
        """Network and training settings of a run that is not the router's."""
        if island is not None:
            return self.island(island)
        # Its rate need not fall: the experts go on at the peak.
        if role == "pretrain":
            schedule = {"lr_schedule": self.budget.pretrain_lr_schedule}
            return self.network.whole, self.train.model_copy(update=schedule)
        if role != "student" or self.student is None:
            return self.network.whole, self.train
        network = _changed(self.network.whole, self.student.network, "student.network")
        return network, _changed(self.train, self.student.train, "student.train")

    def training(self, role: str, island: int | None = None) -> TrainConfig:
        """Training settings of any run."""
        return self.router.train if role == "router" else self.denoiser(role, island)[1]

    def objective_of(self, role: str, island: int | None = None) -> ObjectiveConfig:
        """What a run that is not the router's learns."""
        if role == "student" and self.student is not None:
            # One of few steps learns at their times, each as often as the others.
            time = TimeConfig() if self.student.steps else self.objective.time
            return ObjectiveConfig(time=time, condition_dropout=self.objective.condition_dropout)
        if island is None or island not in self.islands:
            return self.objective
        return _changed(self.objective, self.islands[island].objective, f"islands.{island}.objective")

    def data_path(self, campaign: str) -> str:
        """The data set's folder or URL, for a campaign at this folder or URL."""
        return resolve_own(campaign, self.data.path)

    def source(self, campaign: str) -> str | dict[str, SourceConfig] | None:
        """What to ingest, for a campaign at this folder or URL: `glyphs`, absolute paths or URLs."""

        def resolved(source: str) -> str:
            return source if source == "glyphs" else resolve(campaign, source)

        sources = self.data.source
        if isinstance(sources, dict):
            return {n: one.model_copy(update={"source": resolved(one.source)}) for n, one in sources.items()}
        return sources if sources is None else resolved(sources)


def _changed(settings: C, changes: Mapping[str, Any], where: str) -> C:
    return type(settings).parse(merged(settings.model_dump(), changes), where)
