"""Points side by side, with a warning wherever they were measured otherwise."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.base.errors import ConfigError
from atoll.base.hashing import digest
from atoll.base.table import Column, Table
from atoll.base.text import columns
from atoll.campaign.measured import MeasuredPoint, Protocol
from atoll.measure.metrics.metric import metrics


@dataclass(frozen=True)
class Listing:
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
        return Table("table", "", tuple(map(Column, self.rows[0])), self.rows).to_csv()

    def text(self) -> str:
        """Table, warnings and notes."""
        return "\n".join(
            [*self.lines, *(f"warning: {w}" for w in self.warnings), *(f"note: {n}" for n in self.notes)]
        )


def table(results: Sequence[MeasuredPoint], compared: Collection[str] = ()) -> Listing:
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
    names = [name for name in metrics() if any(name in result.values for result in results)]
    rows = [_row(result, names, compared) for result in results]
    seen = {(row["name"], row["of"]) for row in rows}
    versions = Counter(str(name) for name, _ in sorted(seen))
    header = ["name", *(["of"] if max(versions.values()) > 1 else []), *compared, *names]
    cells = [[_cell(row[column]) for column in header] for row in rows]
    lines = columns([header, *cells], left=range(len(header)))
    warnings, notes = _differences(results, compared)
    warnings += [
        f"{name} was not always the same: its results are of {count} versions; see the column 'of'"
        for name, count in versions.items()
        if count > 1
    ]
    for name in names:
        labels = list(dict.fromkeys(r.values[name].label for r in results if name in r.values))
        settings = {digest(r.values[name].settings) for r in results if name in r.values}
        if len(settings) > 1:
            warnings.append(f"{name} was measured with different settings: do not compare it")
        if labels != [name]:
            notes.append(f"{name}: {' or '.join(labels)}")
        for result in results:
            if name in result.values and (note := result.values[name].note):
                notes.append(f"{name} of {result.subject['name']}: {note}")
    return Listing(lines, warnings, notes, rows)


def _row(result: MeasuredPoint, names: Sequence[str], compared: Collection[str]) -> dict[str, Any]:
    fields = result.protocol.model_dump(mode="json")
    row: dict[str, Any] = {
        "name": result.subject["name"],
        "of": digest(result.subject)[:8],
        "key": result.key,
    }
    row |= {field: fields[field] for field in compared}
    for name in names:
        value = result.values.get(name)
        row[name] = value.value if value else None
        row[f"{name} deviation"] = value.deviation if value else None
    fields["picture_size"] = "x".join(map(str, fields["picture_size"]))
    return row | fields


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _differences(results: Sequence[MeasuredPoint], compared: Collection[str]) -> tuple[list[str], list[str]]:
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
