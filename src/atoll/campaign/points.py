"""A measured point, how it was measured, and what it was held against: the types of their JSON files."""

from typing import Any, Self

from pydantic import model_validator

from atoll.base.config import Config
from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.base.hashing import digest


class Protocol(Config):
    """How something was measured."""

    extractor: str
    """Name of the extractor."""
    extractor_hash: str
    """Digest of its weights."""
    extractor_size: int
    """Side in pixels that it sees."""
    extractor_token: str | None = None
    """What of a DINOv2 is the feature."""
    resize: str
    """How pictures are brought to that size."""
    rounding: str
    """How pictures became 8 bits a channel."""
    picture_size: tuple[int, int]
    """Width and height of the judged pictures, in pixels."""
    reference: str
    """What they were held against, as the user called it."""
    reference_hash: str
    """Digest of its pictures."""
    reference_split: str | None = None
    """Which rows of a data set."""
    reference_count: int
    """Its number of pictures."""
    samples: int
    """Number of judged pictures."""
    conditions: str | None = None
    """Whose captions or labels were sampled; none for a folder of pictures, as everything below."""
    conditions_hash: str | None = None
    """Digest of these rows; earlier versions left it out."""
    sampler: str | None = None
    """How the flow was integrated."""
    steps: int | None = None
    """Steps of the sampler."""
    guidance: float | None = None
    """Scale of classifier-free guidance."""
    shift: float | None = None
    """Time shift of the sampler; none for 1."""
    routing: str | None = None
    """Routing strategy; none for a single network."""
    seed: int | None = None
    """Of noise and routing."""
    ema: bool | None = None
    """Whether weights were averages over the training."""
    code: str
    """Version of Atoll."""


class MeasuredPoint(File):
    """One model, or one folder of pictures, measured under one protocol."""

    FORMAT, PLACE = "atoll/point", "reports/points/KEY.json"
    ERROR, REMEDY = DataError, "measure again: atoll evaluate, or atoll compare"

    subject: dict[str, Any]
    """What was judged: `name`, and the digests of its weights or pictures."""
    protocol: Protocol
    """How."""
    values: dict[str, dict[str, Any]]
    """By metric: `label`, `value`, `deviation`, `settings`, `note`."""
    cost: dict[str, float | None] = {}
    """Seconds, processes; of a model also what a step of one sample takes."""

    @model_validator(mode="before")
    @classmethod
    def _without_key(cls, tree: Any) -> Any:
        return {name: tree[name] for name in tree if name != "key"} if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _has_numbers(self) -> Self:
        for name, value in self.values.items():
            number = value.get("value")
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{name} is no number")
            if not {"label", "settings"} <= value.keys():
                raise ValueError(f"{name} lacks its label or settings")
        return self

    @property
    def key(self) -> str:
        """Names the point: subject, protocol, and which metrics with what settings."""
        settings = {name: value["settings"] for name, value in self.values.items()}
        return point_key(self.subject, self.protocol, settings)

    def number(self, metric: str) -> float | None:
        """The value of a metric; None where it was not measured."""
        return self.values[metric]["value"] if metric in self.values else None

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {"key": self.key, **super().to_json()}


def point_key(subject: dict[str, Any], protocol: Protocol, settings: dict[str, dict[str, Any]]) -> str:
    """Digest of everything that decides a point: not what the reference is called, nor Atoll's version,
    whose changes of numbers raise `MeasuredPoint.VERSION`."""
    decisive = protocol.model_dump(mode="json", exclude={"reference", "code"})
    tree = {"version": MeasuredPoint.VERSION, "subject": subject, "protocol": decisive, "metrics": settings}
    return digest(tree)[:16]


class Statistics(File):
    """Features of a reference, in a file beside this one, and what made them."""

    FORMAT, PLACE = "atoll/statistics", "reports/references/KEY.json"
    ERROR, REMEDY = DataError, "make them again: atoll evaluate"

    code: str
    """Version of Atoll."""
    extractor: dict[str, Any]
    """Name, weights' hash, size and resize kernel of the extractor."""
    name: str
    """What the user called the reference."""
    data: str
    """Digest of the pictures."""
    split: str | None = None
    """Which rows of a data set; none for a folder."""
    count: int
    """Number of pictures."""
    size: tuple[int, int]
    """Width and height of the pictures, in pixels."""
    files: list[dict[str, Any]] = []
    """Path, bytes and SHA-256 of the features."""

    @property
    def key(self) -> str:
        """Names the statistics: other pictures or another extractor give another key."""
        tree = self.model_dump(mode="json", exclude={"code", "files", "name"})
        tree["extractor"] = {name: value for name, value in self.extractor.items() if name != "name"}
        return digest(tree)[:16]
