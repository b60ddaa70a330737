"""What decides a result beside the model, so that unlike ones are not compared unawares."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from atoll.base.config import Config
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest
from atoll.measure.metrics import METRICS, Value
from atoll.measure.streams import to_csv

SCHEMA = 1


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
    sampler: str | None = None
    """How the flow was integrated."""
    steps: int | None = None
    """Steps of the sampler."""
    guidance: float | None = None
    """Scale of classifier-free guidance."""
    routing: str | None = None
    """Routing strategy; none for a single network."""
    seed: int | None = None
    """Of noise and routing."""
    ema: bool | None = None
    """Whether weights were averages over the training."""
    code: str
    """Version of Atoll."""


class Result(Config):
    """One model, or one folder of pictures, measured under one protocol."""

    schema_version: int = Field(default=SCHEMA, alias="schema")
    """Version of this form."""
    subject: dict[str, Any]
    """What was judged: `name`, and the digests of its weights or pictures."""
    protocol: Protocol
    """How."""
    values: dict[str, dict[str, Any]]
    """By metric: `label`, `value`, `deviation`, `settings`, `note`."""
    cost: dict[str, float | None] = {}
    """Seconds; number of processes."""

    @property
    def key(self) -> str:
        """Names the report: subject, protocol, and which metrics with what settings."""
        settings = {name: value["settings"] for name, value in self.values.items()}
        return result_key(self.subject, self.protocol, settings)

    @classmethod
    def read(cls, tree: Any, where: str) -> "Result":
        """A report's content.

        Raises:
            DataError: it has another schema version.
        """
        if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
            raise DataError(f"{where} is no result of schema {SCHEMA}", "evaluate again: atoll evaluate")
        return cls.parse({name: value for name, value in tree.items() if name != "key"}, where)

    def to_json(self) -> dict[str, Any]:
        """The report's content."""
        return {"key": self.key, **self.model_dump(mode="json", by_alias=True)}


def result_key(subject: dict[str, Any], protocol: Protocol, settings: dict[str, dict[str, Any]]) -> str:
    """Digest of everything that decides a result."""
    return digest({"subject": subject, "protocol": protocol.model_dump(mode="json"), "metrics": settings})[
        :16
    ]


def make_result(
    subject: dict[str, Any], protocol: Protocol, values: dict[str, Value], cost: dict[str, float | None]
) -> Result:
    """A result out of its parts."""
    plain = {name: value.to_json() for name, value in values.items()}
    return Result(schema=SCHEMA, subject=subject, protocol=protocol, values=plain, cost=cost)


@dataclass(frozen=True)
class Table:
    """Results side by side.

    Attributes:
        lines: the table, a line each, header first.
        warnings: which fields of the protocols differ, so that numbers may not be compared.
        notes: differences that are likely harmless.
        rows: the same as plain values, for CSV; `of` tells weights or pictures of one name apart.
    """

    lines: list[str]
    warnings: list[str]
    notes: list[str]
    rows: list[dict[str, Any]]

    def to_csv(self) -> bytes:
        """The rows as CSV."""
        return to_csv(self.rows[0], [row.values() for row in self.rows])

    def text(self) -> str:
        """Table, warnings and notes."""
        return "\n".join(
            [*self.lines, *(f"warning: {w}" for w in self.warnings), *(f"note: {n}" for n in self.notes)]
        )


def table(results: Sequence[Result], compared: Collection[str] = ()) -> Table:
    """Results side by side, with a warning for every field of the protocols that differs.

    Args:
        results: one or more.
        compared: fields that the table is about, such as `routing` or `guidance`: they become columns, and
            may differ. Those of the reference and the extractor never may.

    Raises:
        ConfigError: a field that does not exist, or that may not differ.
    """
    allowed = {"steps", "guidance", "routing", "seed", "samples", "sampler", "conditions"}
    for field in compared:
        if field not in allowed:
            raise ConfigError(
                f"results that differ in {field!r} are not compared", f"use {', '.join(sorted(allowed))}"
            )
    names = [name for name in METRICS if any(name in result.values for result in results)]
    rows = [_row(result, names, compared) for result in results]
    seen = {(row["name"], row["of"]) for row in rows}
    versions = Counter(str(name) for name, _ in sorted(seen))
    header = ["name", *(["of"] if max(versions.values()) > 1 else []), *compared, *names]
    cells = [[_cell(row[column]) for column in header] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *cells]
    ]
    warnings, notes = _differences(results, compared)
    warnings += [
        f"{name} was not always the same: its results are of {count} versions; see the column 'of'"
        for name, count in versions.items()
        if count > 1
    ]
    for name in names:
        labels = list(dict.fromkeys(r.values[name]["label"] for r in results if name in r.values))
        settings = {digest(r.values[name]["settings"]) for r in results if name in r.values}
        if len(settings) > 1:
            warnings.append(f"{name} was measured with different settings: do not compare it")
        if labels != [name]:
            notes.append(f"{name}: {' or '.join(labels)}")
        for result in results:
            if note := result.values.get(name, {}).get("note"):
                notes.append(f"{name} of {result.subject['name']}: {note}")
    return Table(lines, warnings, notes, rows)


def _row(result: Result, names: Sequence[str], compared: Collection[str]) -> dict[str, Any]:
    fields = result.protocol.model_dump(mode="json")
    row: dict[str, Any] = {
        "name": result.subject["name"],
        "of": digest(result.subject)[:8],
        "key": result.key,
    }
    row |= {field: fields[field] for field in compared}
    for name in names:
        value = result.values.get(name, {})
        row[name], row[f"{name} deviation"] = value.get("value"), value.get("deviation")
    fields["picture_size"] = "x".join(map(str, fields["picture_size"]))
    return row | fields


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _differences(results: Sequence[Result], compared: Collection[str]) -> tuple[list[str], list[str]]:
    warnings, notes = list[str](), list[str]()
    trees = [result.protocol.model_dump(mode="json") for result in results]
    same_weights = len({tree["extractor_hash"] for tree in trees}) < 2
    # Hashes say what reference and extractor are, whatever they were called.
    passed = {*compared, "reference", *(("extractor",) if same_weights else ())}
    for field in Protocol.model_fields:
        values = list({digest(tree[field]): tree[field] for tree in trees}.values())
        if field in passed or len(values) < 2:
            continue
        said = f"{field} differs: {', '.join('none' if value is None else str(value) for value in values)}"
        if field == "code":
            notes.append(said)
        else:
            warnings.append(f"{said}; do not compare")
    return warnings, notes
