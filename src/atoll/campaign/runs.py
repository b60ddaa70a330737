"""Which runs and columns a campaign wants, and what its folders are called."""

import posixpath
from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.data.formats import ColumnMeta, Manifest
from atoll.data.settings import features_column
from atoll.store.store import Store

if TYPE_CHECKING:  # it imports torch, which status does without
    from atoll.data.dataset import DataSet


def run_folder(role: str, island: int | None = None) -> str:
    """Folder of a run inside the campaign."""
    return f"islands/{island}" if role == "expert" else role


def runs_of(config: CampaignConfig) -> list[tuple[str, int | None]]:
    """Role and island of all runs that a campaign wants, those first that others start from."""
    found: list[tuple[str, int | None]] = [("pretrain", None)] if config.budget.pretrain else []
    found += [("expert", number) for number in range(config.partition.k)]
    found += [("router", None)] + ([("monolith", None)] if config.monolith else [])
    return found + ([("student", None)] if config.student is not None else [])


def wanted_columns(config: CampaignConfig) -> dict[str, dict[str, Any]]:
    """Columns that the campaign needs, and what its settings say of their producer."""
    wanted: dict[str, dict[str, Any]] = {"latents": {"name": config.data.vae}}
    if config.condition == "text":
        wanted["text"] = {"name": config.data.text_encoder, "max_length": config.data.text_length}
    if config.partition.method == "kmeans":
        encoder, size = config.partition.encoder, config.partition.encoder_size
        wanted[features_column(encoder)] = {"name": encoder} | ({"size": size} if size is not None else {})
    return wanted


def made_by(dataset: "DataSet", column: str, asked: dict[str, Any]) -> bool:
    """Whether a column is there and was made with these settings; no encoder is loaded to find out."""
    if not dataset.has_column(column):
        return False
    producer = dataset.column(column).meta.producer
    return all(producer.get(key) == value for key, value in asked.items())


def stored_bytes(store: Store, expert: int) -> tuple[int, int] | None:
    """Count the bytes of an expert's data set by its manifests: all, and those outside its own folder.

    None where they are not here or cannot be read.
    """
    folder = f"{run_folder('expert', expert)}/data"
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
