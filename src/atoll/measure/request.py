"""What `atoll evaluate` is asked for, and all of its results as a table: both without torch."""

import ast
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atoll.measure.metrics as package
from atoll.base.config import set_value
from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.hashing import digest
from atoll.base.table import Column, Table
from atoll.base.text import columns
from atoll.campaign.measured import MeasuredPoint, MeasuredValue, Protocol
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.store.store import Store


def metric_names() -> list[str]:
    """Names of all metrics, out of the text of their modules, which import torch."""
    texts = [path.read_text("utf-8") for folder in package.__path__ for path in Path(folder).glob("*.py")]
    classes = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    fields = [part for kind in classes for part in kind.body if isinstance(part, ast.Assign)]
    values = [field.value for field in fields if ast.unparse(field.targets[0]) == "names"]
    return [name for value in values for name in ast.literal_eval(value)]


def check_metrics(names: str) -> list[str]:
    """The names of `evaluate.metrics`; `ConfigError` for one that no module has."""
    wanted, known = [part.strip().lower() for part in names.split(",")], metric_names()
    for name in wanted:
        if name not in (*known, "all", "fid"):
            raise ConfigError(f"unknown metric {name!r}", nearest(name, known))
    return wanted


def requested(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments of `evaluate` that options of the command make, and the settings that they replace."""
    given = {name: value for name, value in options.items() if value is not None}
    generation = {name: given[name] for name in COMPARED if name in given}
    of_model = [name for name in ("model", *generation, "samples") if name in given]
    if "images" in given and of_model:
        raise ConfigError(f"--{of_model[0]} is for a model, and --images is none", "leave one of them out")
    shorthand = {name: given[name] for name in ("metrics", "extractor", "samples") if name in given}
    sets = (*given["sets"], *(f"evaluate.{name}={json.dumps(value)}" for name, value in shorthand.items()))
    rest: dict[str, Any] = {
        name: given[name] for name in ("model", "images", "reference", "split", "out") if name in given
    }
    return {"generation": generation, **rest}, sets


def alone(sets: Sequence[str]) -> EvaluateConfig:
    """Settings without a campaign, out of `evaluate.KEY=VALUE`."""
    tree: dict[str, Any] = {}
    for assignment in sets:
        if not assignment.startswith("evaluate."):
            raise ConfigError(f"--set {assignment!r}: there is no campaign", "set evaluate.KEY=VALUE")
        set_value(tree, assignment)
    return EvaluateConfig.parse(tree.get("evaluate", {}), "--set evaluate")


REPORTS = "reports/evaluate"
COMPARED = ("routing", "guidance", "steps", "seed")
"""Fields that points of one campaign usually differ in: columns of its table."""


def show_all(store: Store, compared: Sequence[str] = COMPARED) -> str:
    """The table of all that was evaluated of a campaign, with warnings where protocols differ; also as CSV.

    Points of another version are left out, which is said; `DataError` where there are none.
    """
    points, keys = list[MeasuredPoint](), [key for key in store.list(REPORTS) if key.endswith(".json")]
    for key in keys:
        try:
            points.append(MeasuredPoint.read(store, key))
        except DataError as error:
            say(f"warning: left out: {error}")
    if not points:
        version = " of this version" if keys else ""
        raise DataError(f"{store.location} has no results{version}", "make one: atoll evaluate")
    results = table(sorted(points, key=lambda point: str(point.subject["name"])), compared)
    store.put(f"{REPORTS}/table.csv", results.to_csv())
    return results.text()


@dataclass(frozen=True)
class Listing:
    """Results side by side, as lines for a reader and as plain rows for CSV."""

    lines: list[str]
    warnings: list[str]
    """Which fields of the protocols differ, so that numbers may not be compared."""
    notes: list[str]
    """Differences that are likely harmless."""
    rows: list[dict[str, Any]]
    """`of` tells weights or pictures of one name apart."""

    def to_csv(self) -> bytes:
        """The rows as CSV."""
        return Table("table", "", tuple(map(Column, self.rows[0])), self.rows).to_csv()

    def text(self) -> str:
        """Table, warnings and notes."""
        beside = [*(f"warning: {warning}" for warning in self.warnings), *(f"note: {n}" for n in self.notes)]
        return "\n".join([*self.lines, *beside])


def table(results: Sequence[MeasuredPoint], compared: Collection[str] = ()) -> Listing:
    """Results side by side, one or more, with a warning for every field of the protocols that differs.

    Fields that the table is about (`compared`), such as `routing`, become columns and may differ.
    """
    names = list(dict.fromkeys(name for result in results for name in result.values))
    protocols = [result.protocol.model_dump(mode="json") for result in results]
    rows = list[dict[str, Any]]()
    for result, protocol in zip(results, protocols, strict=True):
        row = {"name": result.subject["name"], "of": digest(result.subject)[:8], "key": result.key}
        row |= {field: protocol[field] for field in compared}
        for name in names:
            value = result.values.get(name)
            row |= {name: value and value.value, f"{name} deviation": value and value.deviation}
        rows.append(row | protocol | {"picture_size": "x".join(map(str, protocol["picture_size"]))})
    versions = Counter(str(name) for name, _ in sorted({(row["name"], row["of"]) for row in rows}))
    header = ["name", *(["of"] if max(versions.values()) > 1 else []), *compared, *names]

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [[cell(row[column]) for column in header] for row in rows]
    lines, warnings, notes = columns([header, *cells], left=range(len(header))), list[str](), list[str]()

    # Hashes say what reference and extractor are, whatever they were called.
    same_weights = len({protocol["extractor_hash"] for protocol in protocols}) < 2
    passed = {*compared, "reference", *(("extractor",) if same_weights else ())}
    for field in Protocol.model_fields:
        values = list({digest(protocol[field]): protocol[field] for protocol in protocols}.values())
        if field in passed or len(values) < 2:
            continue
        text = f"{field} differs: {', '.join('none' if v is None else f'{v!s:.40}' for v in values)}"
        # Another version of Atoll is likely harmless: one that changes numbers has another version of points.
        notes += [text] if field == "code" else []
        warnings += [] if field == "code" else [f"{text}; do not compare"]
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
    notes += notes_of((f"of {result.subject['name']}", result.values) for result in results)
    return Listing(lines, warnings, notes, rows)


def notes_of(results: Iterable[tuple[str, Mapping[str, MeasuredValue]]]) -> list[str]:
    """What a reader must know of the numbers, each thing once with all that it holds for."""
    holds: dict[str, list[str]] = {}
    for where, values in results:
        for name, value in values.items():
            for note in value.notes:
                holds.setdefault(note, []).append(f"{name} {where}".strip())
    return [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in holds.items()]
