"""The JSON files of data and partitions, as types; imports nothing that reads pictures or numbers."""

from typing import Any, Literal

from pydantic import Field

from atoll.base.errors import PartitionError
from atoll.base.format import File


class PartitionFile(File):
    """`partition.json`: how the data set was cut, written when all else of the partition lies there."""

    FORMAT, PLACE, ERROR = "atoll/partition", "partition/partition.json", PartitionError
    KEEPS, REMEDY = "schema", "restore it from a copy, or start a new campaign"  # the version is hashed

    method: Literal["kmeans", "random"]
    """How rows were given to clusters."""
    k: int
    """Number of clusters."""
    seed: int
    """Of the sample, the starts, and the random clusters."""
    encoder: dict[str, Any] | None
    """Name, hash and input of the vision encoder; null for `random`."""
    rows: int
    """Rows of the data set, held-out rows too."""
    data: str
    """Digest of the ids of these rows, in order."""
    sizes: list[int] = Field(min_length=1)
    """Training rows of each cluster."""
    heldout: list[int]
    """Held-out rows of each cluster."""
    warnings: list[str]
    """What is odd about the balance."""
    hash: str
    """Digest of clusters, centroids and the fields above, but for sizes and warnings."""
