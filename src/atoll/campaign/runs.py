"""Which runs and columns a campaign wants, and what its folders are called."""

import posixpath
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.base.errors import AtollError, PartitionError
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.train import RunPlan
from atoll.data.formats import ColumnMeta, Manifest, PartitionFile
from atoll.data.settings import features_column
from atoll.store.store import Store

if TYPE_CHECKING:  # it imports torch, which status does without
    from atoll.data.dataset import DataSet


class Run(NamedTuple):
    """One training run of a campaign: what it trains, and where that lies.

    Attributes:
        role: `expert`, `router`, `monolith`, `pretrain` or `student`.
        expert: number of the cluster; None unless it is an expert's.
    """

    role: str
    expert: int | None = None

    @property
    def name(self) -> str:
        """For people: `expert 3`, `router`."""
        return self.role if self.expert is None else f"expert {self.expert}"

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


def experts_of(k: int) -> list[Run]:
    """The runs of all experts."""
    return [Run("expert", number) for number in range(k)]


def read_partition(store: Store) -> PartitionFile:
    """Read `partition.json` and hold it against the plans that were cut by it: its hash leaves the sizes out.

    Raises:
        PartitionError: it is of another version, contradicts itself, or is another one than the runs'.
        StoreError: it is missing, or no JSON.
    """
    partition = PartitionFile.read(store, PartitionFile.PLACE)
    for run in (Run("router"), *experts_of(partition.k)):
        if store.exists(run.plan):
            plan = RunPlan.read(store, run.plan)
            size = plan.rows if run.expert is None else partition.sizes[run.expert]
            if (plan.partition, plan.rows) != (partition.hash, size):
                what = f"{store.name(PartitionFile.PLACE)} is not the partition of {run.plan}"
                raise PartitionError(what, "put the one back that the campaign was cut by")
    return partition


def runs_of(config: CampaignConfig) -> list[Run]:
    """All runs that a campaign wants, those first that others start from."""
    runs = [Run("pretrain")] if config.budget.pretrain else []
    runs += [*experts_of(config.partition.k), Run("router")]
    runs += [Run("monolith")] if config.monolith else []
    return runs + ([Run("student")] if config.student is not None else [])


def wanted_columns(config: CampaignConfig) -> dict[str, dict[str, Any]]:
    """Columns that the campaign needs, and what its settings say of their producer."""
    wanted = training_columns(config)
    if config.partition.method == "kmeans":
        encoder, size = config.partition.encoder, config.partition.encoder_size
        wanted[features_column(encoder)] = {"name": encoder} | ({"size": size} if size is not None else {})
    return wanted


def training_columns(config: CampaignConfig) -> dict[str, dict[str, Any]]:
    """Those of them that are read in training."""
    wanted: dict[str, dict[str, Any]] = {"latents": {"name": config.data.vae}}
    if config.condition == "text":
        wanted[config.data.text_column] = {
            "name": config.data.text_encoder,
            "max_length": config.data.text_length,
        }
    return wanted


def made_by(dataset: "DataSet", column: str, wanted: dict[str, Any]) -> bool:
    """Whether a column is there and was made with these settings; no encoder is loaded to find out."""
    if not dataset.has_column(column):
        return False
    producer = dataset.column(column).meta.producer
    return all(producer.get(key) == value for key, value in wanted.items())


def stored_bytes(store: Store, expert: int) -> tuple[int, int] | None:
    """Count the bytes of an expert's data set by its manifests: all, and those outside its own folder.

    None where they are not here or cannot be read.
    """
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
    sizes = [(entry.bytes, posixpath.normpath(entry.path)) for entry in files]
    return sum(size for size, _ in sizes), sum(size for size, path in sizes if path.startswith(".."))
