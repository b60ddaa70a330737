"""The JSON files of data sets and partitions, as types; imports nothing that reads pictures or numbers."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from atoll.base.config import Config
from atoll.base.errors import AtollError, DataError, PartitionError
from atoll.base.format import File
from atoll.base.hashing import digest
from atoll.store.manifest import FileEntry, is_there
from atoll.store.store import Store

Mode = Literal["rgb", "gray"]


def clean(text: str) -> str:
    """The text with everything that UTF-8 cannot hold written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


class DataFile(File):
    """A file of a data set."""

    ERROR, REMEDY = DataError, "it is damaged or of another Atoll: write it again"


class Reject(DataFile):
    """Lines of `rejects.jsonl`: a position of the source that gave no row. Reasons are a few fixed words."""

    FORMAT, PLACE, HEADED = "atoll/reject", "DATASET/rejects.jsonl", False

    key: str
    """Where the source has it: a path, a row number."""
    reason: str
    """Why, in the words by which `manifest.json` counts."""
    detail: str = ""
    """What exactly."""

    def __init__(self, key: str, reason: str, detail: str = "") -> None:
        fields: dict[str, Any] = {"key": clean(key)[:1000], "reason": reason, "detail": clean(detail)[:500]}
        super().__init__(**fields)


class Shard(Config):
    """Some rows of a data set and the files that hold them."""

    rows: int = Field(ge=1)
    """Number of rows."""
    files: dict[str, FileEntry]
    """`rows` (parquet) and, where the data set has pictures, `images` (tar); paths from the data set."""

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if not {"rows"} <= self.files.keys() <= {"rows", "images"}:
            raise ValueError("files are rows, and images or none")
        return self

    def content(self) -> str:
        """Digest of what the rows are: changes with any byte of a row or picture, not with their place."""
        return digest({kind: entry.sha256 for kind, entry in self.files.items()})


class Manifest(DataFile):
    """`manifest.json`: what a data set holds, written when all of it is there."""

    FORMAT, PLACE = "atoll/dataset", "DATASET/manifest.json"

    identity: str
    """Digest of source and settings. A folder of another one is never overwritten."""
    source: dict[str, Any]
    """`name`, `fingerprint` (changes when any row does) and `licence`; `columns` (optional ones of the rows),
    `commit` (of the hub) and `sources` (by name, of several) where there are any; of a part also `subset` and
    `rows` (what it was cut from), of a union also `union` (identities of the parts)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The settings of the ingest; empty for subsets and unions."""
    size: int | None = None
    """Height and width of the pictures in pixels; null where the data set has no pictures. Of rows that keep
    their aspect, whose sizes are columns of the rows, the side of a square of about as many pixels."""
    mode: Mode | None = None
    """Channels of the pictures."""
    rejects: dict[str, int] = Field(default_factory=dict)
    """Number of rows left out, by reason; `rejects.jsonl` names them."""
    rows: int
    """Number of rows."""
    ids: str = ""
    """Digest of all ids in order, so that no process of a run has to read them."""
    shards: list[Shard] = Field(min_length=1)
    """Shards in order."""


class ColumnMeta(DataFile):
    """`column.json`: one column of a data set, written last: it exists = the column is complete."""

    FORMAT, PLACE = "atoll/column", "DATASET/columns/NAME/column.json"

    name: str
    """Name of the column and of its folder."""
    kind: Literal["fixed", "ragged"]
    """`fixed`: one array of `shape` a row. `ragged`: a sequence of them a row."""
    dtype: str
    """Name of the torch dtype of `values`."""
    shape: list[Annotated[int, Field(ge=0, le=10**7)]] = Field(max_length=4)
    """Shape of a row's value, or of one element of its sequence."""
    max_length: int = Field(ge=0, le=2**31)
    """Longest sequence of a ragged column; 1 for a fixed one."""
    producer: dict[str, Any]
    """What computed it: name, hash, constants such as shift and scale. Another producer makes it anew."""
    content: list[str]
    """Digest of the rows of every shard that it was computed from. Other rows make it anew."""
    shards: list[FileEntry]
    """Files in the order of the data set's shards; paths relative to the column's folder."""
    extras: dict[str, FileEntry]
    """Tensors that belong to the column and to no row, such as `null`, the text states of ""."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(self.shards) != len(self.content):
            raise ValueError(f"{len(self.shards)} files for {len(self.content)} shards")
        return self


class IngestNote(DataFile):
    """`ingest.json`: what is being ingested; gone when it is finished."""

    FORMAT, PLACE = "atoll/ingest", "DATASET/ingest.json"

    identity: str
    """As the manifest's."""
    mode: Mode
    """Channels of the pictures."""
    buckets: list[tuple[int, int]] = []
    """Widths and heights of the buckets, of those that keep their aspect."""


class ShardNote(DataFile):
    """What became of one shard of an ingest or column that is unfinished; gone when it is finished."""

    FORMAT, PLACE = "atoll/shard-note", "DATASET/rows/NNNNN.json, DATASET/columns/NAME/NNNNN.json"

    identity: str
    """Digest of what the shard is made from."""
    rows: int
    """Number of rows."""
    files: dict[str, FileEntry]
    """Its files; paths relative to the folder of the data set or column."""
    rejects: list[Reject] = []
    """Positions that gave no row."""
    rejected_ids: list[str] = []
    """Ids of those that were rejected for their picture; where an earlier shard has the id, that is why."""
    duplicate_ids: list[str] = []
    """Ids that are rejected because an earlier shard has them, as was found when all shards were there."""
    form: tuple[str, list[int], int] | None = None
    """Of a column: type and shape of its values, and the longest sequence."""

    @classmethod
    def find(cls, store: Store, key: str, identity: str) -> Self | None:
        """The note at this key, if it is of this identity."""
        try:
            note = cls.read(store, key)
        except AtollError:
            return None
        return note if note.identity == identity else None

    def is_there(self, store: Store, folder: str) -> bool:
        """Whether all its files are there."""
        return all(is_there(store, folder, entry) for entry in self.files.values())


class Inertia(Config):
    """Mean squared distance of training rows to the centroid of their cluster, of features of unit length."""

    clusters: float
    """Of this cut."""
    random: float
    """Of random clusters: the variance of all rows."""
    free: float | None = None
    """Of the same clusters, were they held to no shares; null where they are not."""


class PartitionFile(File):
    """`partition.json`: how the data set was cut, written when all else of the partition lies there."""

    FORMAT, PLACE, ERROR = "atoll/partition", "partition/partition.json", PartitionError
    REMEDY = "restore it from a copy, or start a new campaign"

    method: Literal["kmeans", "random", "label", "column"]
    """How rows were given to clusters."""
    k: int = Field(ge=1, le=4096)
    """Number of clusters."""
    seed: int
    """Of the sample, the starts, and the random clusters."""
    encoder: dict[str, Any] | None
    """Name, hash and input of the vision encoder; null for `random`."""
    rows: int = Field(ge=1, le=10**12)
    """Rows of the data set, those that are held out or of weight 0 too."""
    data: str
    """Digest of the ids of these rows, in order."""
    column: str | None = None
    """Whose values decided; null unless the method is `column`."""
    values: list[list[str]] = []
    """The values of labels or the column, for each cluster; empty for other methods."""
    capacities: list[float] = []
    """What each cluster was to hold, in proportion; empty where that was left open."""
    sizes: list[int] = Field(min_length=1)
    """Training rows of each cluster."""
    heldout: list[int]
    """Held-out and test rows of each cluster."""
    weights: str | None = None
    """Digest of what rows count, by weight or as 0 and 1; null where all count alike."""
    masses: list[float] = []
    """Sum of the weights of each cluster's training rows, where rows are drawn by them; else empty."""
    buckets: dict[str, list[float]] = {}
    """By size of the pictures (width x height) the training rows of each cluster, or the sum of their
    weights; empty where all are squares of one size."""
    warnings: list[str]
    """What is odd about the balance."""
    inertia: Inertia | None = None
    """How close rows are to their centroids; null where there are none."""
    revision: str | None = None
    """Digest of what rows count since some opted out after the cut; null while none has. Clusters and hash
    stay, so that other experts keep theirs."""
    hash: str
    """Digest of clusters, centroids and what decided them: not of sizes, masses and the like."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if {len(self.sizes), len(self.heldout)} != {self.k}:
            raise ValueError("sizes and heldout have not one number for each cluster")
        if min(*self.sizes, *self.heldout) < 0 or sum(self.sizes) + sum(self.heldout) > self.rows:
            raise ValueError("sizes and heldout add up to more than rows")
        if (self.weights is None and self.masses) or len(self.masses) not in (0, self.k):
            raise ValueError("masses have not one number for each cluster")
        if any(len(rows) != self.k for rows in self.buckets.values()):
            raise ValueError("buckets have not one number for each cluster")
        return self


class ClusterMap(File):
    """`map.json`: some training rows as points of a plane, and the words that tell each cluster."""

    FORMAT, PLACE, ERROR = "atoll/cluster-map", "partition/map.json", PartitionError
    REMEDY = "remove the file: the report does without"

    points: list[tuple[float, float, int]]
    """Two coordinates and the cluster of each, along the directions in which centroids differ most."""
    explained: float
    """Part of the variance between the centroids that lies in this plane."""
    words: list[list[str]]
    """Words of captions that are commoner in a cluster than elsewhere, the most telling first."""
