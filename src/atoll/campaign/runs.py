"""The runs of a campaign: one of each role of `RUNS`, and their plans in `island.json`."""

import posixpath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from atoll.base.config import Config, loose_fields
from atoll.base.console import say
from atoll.base.errors import AtollError, ConfigError, PartitionError, nearest
from atoll.base.format import File
from atoll.base.table import column
from atoll.campaign.roles import RUNS, Init, Role
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.train import TrainConfig
from atoll.data.formats import ColumnMeta, Manifest, PartitionFile
from atoll.data.settings import features_column
from atoll.flow.settings import ObjectiveConfig
from atoll.networks.settings import DataShape
from atoll.store.log import MOST_STEPS
from atoll.store.store import Store

if TYPE_CHECKING:  # it imports torch, which status does without
    from atoll.campaign.folder import Campaign
    from atoll.data.dataset import DataSet


class Run(NamedTuple):
    """One training run of a campaign: what it trains, and where that lies."""

    # A tuple, so that `*run` is the role and the number that settings are asked with.
    role: str  # a name of `RUNS`
    expert: int | None = None  # number of the cluster; None for a run on all rows

    @property
    def kind(self) -> Role:
        """Its row of `RUNS`."""
        return RUNS[self.role]

    @property
    def name(self) -> str:
        """For people: `expert 3`, `router`."""
        return self.role if self.expert is None else f"{self.role} {self.expert}"

    @property
    def folder(self) -> str:
        """Within the campaign; an expert's run lies on its island."""
        return self.role if self.expert is None else f"islands/{self.expert}"

    @property
    def plan(self) -> str:
        """Key of its `RunPlan`."""
        return f"{self.folder}/island.json"

    @property
    def network(self) -> str:
        """Folder of what it publishes."""
        return f"{self.folder}/expert"

    def init(self, config: CampaignConfig) -> Init:
        """Where its weights start."""
        drawn = not self.kind.wanted(config) if config.origin else config.denoiser(*self)[0].init == "scratch"
        return self.kind.init(config) or ("scratch" if drawn else "checkpoint")

    def published(self, store: Store) -> bool:
        """Whether its network is there, whose card is written last."""
        return store.exists(f"{self.network}/card.json")


def run_to_train(campaign: "Campaign", role: str, expert: int | None) -> Run:
    """The run of this role and number; `ConfigError` or `PartitionError` if it cannot be trained."""
    config, root = campaign.config, campaign.store
    if role not in RUNS:
        raise ConfigError(f"there is no role {role!r}", nearest(role, RUNS))
    run, k = Run(role, expert), config.partition.k
    if run.kind.rows == "cluster" and (type(expert) is not int or not 0 <= expert < k):
        problem = "no expert is named" if expert is None else f"there is no expert {expert!r}"
        raise ConfigError(problem, f"give an expert from 0 to {k - 1}")
    if run.kind.rows == "all" and expert is not None:
        raise ConfigError(f"{role} is no expert and has no number", "leave expert out")
    if not run.kind.planned(config):
        why, fix = run.kind.absent
        raise ConfigError(f"{root.location} {why}", fix)
    if not root.exists(run.plan):
        late = " with the same --set" if run.kind.late else ""
        fix = f"run 'atoll partition {root.location}'{late} first, or copy it here"
        raise PartitionError(f"{root.name(run.folder)} has no island.json", fix)
    return run


def partition_finished(campaign: "Campaign") -> bool:
    """Whether the partition and all runs that the settings ask for are there; says so of the partition."""
    if not campaign.is_partitioned:
        return False
    store, partition = campaign.store, read_partition(campaign.store)
    say(f"partition: finished already, {partition.k} clusters of {sum(partition.sizes):,} training rows")
    # Rows that all count alike, then and now, need no look.
    weighed = partition.weights or partition.revision or campaign.has_dataset("weights")
    if weighed and campaign.has_dataset():
        from atoll.data import partition as partitions

        if not partitions.load(store).weighs_as(campaign.dataset()):
            say("  warning: the data set's weights have changed; this campaign keeps those it was cut with")
    return all(store.exists(run.plan) for run in runs_of(campaign.config))


def runs_of(config: CampaignConfig, planned: bool = False) -> list[Run]:
    """All runs that a campaign trains, or plans, in the order of `RUNS`."""
    # The baseline is planned though it is not trained: everything else is measured by its FLOPs.
    chosen = [role for role in RUNS.values() if (role.planned if planned else role.wanted)(config)]
    return [run for role in chosen for run in runs_as(role, config.partition.k)]


def runs_as(role: Role, k: int) -> list[Run]:
    """The runs of one role in a campaign of K clusters."""
    return [Run(role.name, n) for n in range(k)] if role.rows == "cluster" else [Run(role.name)]


def experts_of(k: int) -> list[Run]:
    """The runs of all experts."""
    return runs_as(RUNS["expert"], k)


def _known_role(name: str) -> str:
    if name not in RUNS:
        raise ValueError(f"there is no role {name!r}: {nearest(name, RUNS)}")
    return name


class RunPlan(File):
    """`island.json`: the numbers of one run, written by the partition."""

    FORMAT, PLACE = "atoll/run", "ROLE/island.json"
    REMEDY = "copy it from where the partition was made"

    role: Annotated[str, AfterValidator(_known_role)] = Field(description="What is trained.")
    island: int | None = Field(default=None, description="Number of the cluster, for an expert.")
    rows: int = Field(ge=0, le=10**12, description="Training rows.")
    weighted: bool = column("Whether they are drawn in proportion to the column `weights`.", default=False)
    steps: int = Field(ge=0, le=MOST_STEPS, description="Optimizer steps.")
    batch: int = Field(ge=1, le=10**6, description="Samples per step.")
    partition: str = Field(description="Hash of the partition.")
    seed: int = Field(description="Of order, noise, times and dropout.")
    init_seed: int = Field(description="Of the initial weights; all experts of a campaign share it.")
    init: Init = "scratch"
    """Where the initial weights come from: drawn from `init_seed`, or read from `init/`."""
    init_sha256: str | None
    """Digest of the initial weights; null while what they come from is not trained."""
    init_origin: dict[str, Any] = {}
    """Which checkpoint, pretraining or experts they come from; filled in from `init/` when the run starts."""
    parameters: int = Field(default=0, ge=0, le=10**15)
    """Trainable numbers; decides how many runs fit into memory at once."""
    frozen: int = Field(default=0, ge=0, le=10**15)
    """Frozen parameters: those of the network under a LoRA adapter; 0 of a whole network."""
    train_flops: float = Field(ge=0, le=1e40, description="Operations of the whole run.")
    forward_flops: float = Field(ge=0, le=1e40, description="Operations of one evaluation of one sample.")
    shape: DataShape = Field(description="Channels, size, text_width, text_length, classes of the data.")

    @property
    def samples(self) -> int:
        """Training samples of the whole run."""
        return self.steps * self.batch


class Recipe(Config):
    """Everything about how one network learns: what a checkpoint must agree with to be resumed."""

    objective: ObjectiveConfig = Field(description="Schedule, prediction, times and dropout.")
    train: TrainConfig = Field(description="Optimizer and loop.")
    network: dict[str, Any] = Field(description="Network settings.")
    plan: RunPlan = Field(description="Numbers of the run.")

    @property
    def sampling(self) -> dict[str, float | str]:
        """What the network is trained to be sampled with, as its card says."""
        sampling: dict[str, float | str] = self.network.get("student", {}).get("sampling", {})
        return sampling

    def learned(self) -> dict[str, Any]:
        """The part that decides the weights; how it is logged, saved and spread is not."""
        return self.model_dump(exclude={"train": loose_fields(TrainConfig)})


class MetricsLine(File):
    """A line of `metrics.jsonl`: a step of training, or a validation. Tasks may add fields of their own."""

    FORMAT, PLACE, HEADED = "atoll/metrics", "ROLE/run/metrics.jsonl", False
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: int = Field(default=0, description="Optimizer steps so far.")
    samples: int = Field(description="Training samples so far.")
    loss: float | None = Field(default=None, description="Training loss of this step.")
    lr: float | None = Field(default=None, description="Learning rate of this step.")
    grad_norm: float | None = Field(default=None, description="Norm of its gradient before clipping.")
    accuracy: float | None = column("Share of its batch whose cluster the router found.", default=None)
    skipped: int | None = Field(default=None, description="Steps that the guard has left out so far.")
    seconds: float | None = Field(default=None, description="Time spent in steps, over all restarts.")
    times: tuple[float, ...] = ()
    """Times t of the validation that this line is of; empty for a line of steps."""
    validation: tuple[float | None, ...] = column("Validation loss at each of these times.", default=())
    accuracy_by_time: tuple[float | None, ...] = ()
    """Share of held-out rows whose cluster the router finds, at each of these times."""
    validation_loss: float | None = Field(default=None, description="Mean of `validation`.")
    condition_gain: float | None = None
    """By which part the loss is higher under captions of other rows, at the time that tells most."""
    validation_seconds: float | None = None
    """Time that this validation took; it is not part of `seconds`."""

    @property
    def ignores_captions(self) -> bool:
        """Attention to texts can die: docs/decisions/0050-attention-to-captions-can-die.md."""
        return self.condition_gain is not None and self.condition_gain < 0.001


def read_partition(store: Store) -> PartitionFile:
    """Read `partition.json` and check it against the runs' plans, as its hash leaves the sizes out."""
    partition = PartitionFile.read(store, PartitionFile.PLACE)
    for run in (Run("router"), *experts_of(partition.k)):
        if store.exists(run.plan):
            plan = RunPlan.read(store, run.plan)
            size = plan.rows if run.expert is None else partition.sizes[run.expert]
            if (plan.partition, plan.rows) != (partition.hash, size):
                what = f"{store.name(PartitionFile.PLACE)} is not the partition of {run.plan}"
                raise PartitionError(what, "repeat the opt-out that was stopped, or put back the right one")
    return partition


def wanted_columns(config: CampaignConfig) -> dict[str, dict[str, Any]]:
    """Columns that the campaign needs, and what its settings say of their producer."""
    wanted = training_columns(config)
    if config.partition.method == "kmeans" and not config.origin:
        by = {"name": config.partition.encoder, "size": config.partition.encoder_size}
        wanted[features_column(config.partition.encoder)] = {k: v for k, v in by.items() if v is not None}
    return wanted


def training_columns(config: CampaignConfig) -> dict[str, dict[str, Any]]:
    """Those of them that are read in training."""
    wanted: dict[str, dict[str, Any]] = {"latents": {"name": config.data.vae}}
    if config.condition == "text":
        wanted[config.data.text_column] = {"name": config.data.text_encoder, "asked": config.data.text_length}
    return wanted


def made_by(dataset: "DataSet", column: str, wanted: dict[str, Any]) -> bool:
    """Whether a column is there and was made with these settings; no encoder is loaded to find out."""
    if not dataset.has_column(column):
        return False
    # Of the producer only what settings name: its hash of the weights is known once the encoder is loaded.
    producer = dataset.column(column).meta.producer
    producer = {"asked": producer.get("max_length"), **producer}
    return all(producer.get(key) == value for key, value in wanted.items())


def stored_bytes(store: Store, expert: int) -> tuple[int, int] | None:
    """Bytes of an expert's data set by its manifests, all and outside its folder; None without them."""
    folder = f"{Run('expert', expert).folder}/data"
    try:
        shards = Manifest.read(store, f"{folder}/manifest.json").shards
        files = [entry for shard in shards for entry in shard.files.values()]
        for key in store.list(f"{folder}/columns"):
            if key.endswith("/column.json"):
                column = ColumnMeta.read(store, key)
                files += [*column.shards, *column.extras.values()]
    except AtollError:
        return None
    # Paths are relative to the data set. One that climbs out names another island's file, which must not be.
    sizes = [(entry.bytes, posixpath.normpath(entry.path)) for entry in files]
    return sum(size for size, _ in sizes), sum(size for size, path in sizes if path.startswith(".."))
