"""The evaluate stage: one point, of a model or of a folder of pictures, and all of them as a table."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.base.config import set_value
from atoll.base.console import say
from atoll.base.device import cores, using_threads
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest
from atoll.base.processes import joined
from atoll.base.table import Column, Table
from atoll.base.text import columns
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import MeasuredPoint, Protocol
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.encoders.vision import extractor
from atoll.measure.metrics.metric import How, metrics, parse
from atoll.measure.models import Drawn, RowConditions, generation_of, published, samples_of
from atoll.measure.pictures import Folder
from atoll.measure.points import Judge
from atoll.measure.reference import reference_of
from atoll.store.store import Store

REPORTS = "reports/evaluate"
COMPARED = ("routing", "guidance", "steps", "seed")
"""Fields that points of one campaign usually differ in: columns of its table."""


def evaluate(
    campaign: Campaign | None,
    config: EvaluateConfig | None = None,
    *,
    model: str = "ensemble",
    generation: Mapping[str, Any] | None = None,
    images: Path | None = None,
    reference: str | None = None,
    split: str | None = None,
    out: str = ".",
) -> MeasuredPoint | None:
    """Measure, write `reports/evaluate/KEY.json` and `.csv`, and print; None on all processes but the first.

    Args:
        campaign: whose model is measured, and whose data is the reference; None for pictures alone.
        config: how; by default the campaign's.
        model: `ensemble`, `monolith`, `student` or `pretrain`.
        generation: values in place of the campaign's `sampling`: routing, guidance, steps, seed.
        images: a folder of pictures, in a model's place.
        reference: what they are compared with; the campaign's own data if None.
        split: rows of the reference; by default held-out ones, under `evaluate.conditions=test` those.
        out: where `reports/` goes without a campaign.

    Raises:
        ConfigError: settings, names or metrics that do not exist or contradict each other.
        DataError: pictures that cannot be measured, or a reference of another extractor.
    """
    if campaign is None and images is None:
        raise ConfigError("there is nothing to evaluate", "give a campaign, or --images FOLDER")
    config = config or (campaign.config.evaluate if campaign is not None else EvaluateConfig())
    store = campaign.store if campaign is not None else Store.open(out, create=True)
    with using_threads(config.threads), joined() as world:
        encoder = extractor(config.extractor, config.extractor_size, str(world.device))
        chosen = parse(config.metrics, encoder.kind, captioned=images is None)

        # What is measured: a folder of pictures, or what a model draws at conditions of the campaign's data.
        if images is not None:
            source: Folder | Drawn = Folder(images)
        else:
            assert campaign is not None
            drawn_by = generation_of(campaign).with_(**(generation or {}))
            candidate, rows = published(campaign, model, world.device), config.conditions
            samples = samples_of(campaign, campaign.dataset(), rows, candidate.model.card)
            conditions = RowConditions.drawn(campaign, samples, rows, config.samples, drawn_by.seed)
            source = Drawn(candidate, drawn_by, conditions, captioned="clip-score" in chosen)

        # What it is compared with, and how.
        usual = "test" if config.conditions == "test" else "heldout"
        real = reference_of(reference, split, campaign, encoder, store, usual)
        fewest = min(len(source), real.about.count)
        components = config.components_of(encoder.kind, encoder.width, fewest)
        how = How(
            *(encoder.name, encoder.kind, encoder.width, len(source), real.about.count, components),
            subsets=config.kid_subsets,
            subset=config.kid_size,
            device=world.device,
        )
        point, _, new = Judge(store, encoder, real, chosen, how, config.batch, world, REPORTS).measure(source)
        if point is None:
            return None
        key = f"{REPORTS}/{point.key}"
        if new:
            store.put(f"{key}.csv", table([point], COMPARED).to_csv())
        else:
            say("evaluate: finished already")
        for value in point.values.values():
            spread = f" +- {value.deviation:.4g}" if value.deviation is not None else ""
            say(f"  {value.label:<44} {value.value:.6g}{spread}")
            if value.note:
                say(f"  note: {value.note}")
        if new:
            say(f"wrote {store.name(key)}.json")
        return point


# The command.


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


def spread(processes: int) -> bool:
    """Run this very command on several processes of this machine, unless it is one of them; whether it was
    run. A failure ends this process too."""
    if processes == 1 or "WORLD_SIZE" in os.environ:
        return False
    command = [sys.executable, "-m", "atoll.launch.torchrun", "--nnodes", "1", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "atoll", *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // processes)), **os.environ}
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return True


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


# Points side by side.


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

    Fields that the table is about (`compared`), such as `routing` or `guidance`, become columns and may
    differ; `ConfigError` for those of reference and extractor, which never may.
    """
    allowed = {"steps", "guidance", "routing", "seed", "samples", "sampler", "conditions"}
    for field in compared:
        if field not in allowed:
            what = f"results that differ in {field!r} are not compared"
            raise ConfigError(what, f"use {', '.join(sorted(allowed))}")
    names = [name for name in metrics() if any(name in result.values for result in results)]
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
        text = f"{field} differs: {', '.join('none' if value is None else str(value) for value in values)}"
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
        for result in results:
            if name in result.values and (note := result.values[name].note):
                notes.append(f"{name} of {result.subject['name']}: {note}")
    return Listing(lines, warnings, notes, rows)
