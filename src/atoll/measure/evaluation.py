"""The evaluate stage: one point, of a model or of a folder of pictures, with its protocol."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.base.config import set_value
from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.processes import joined
from atoll.base.threads import cores, using_threads
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import MeasuredPoint
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.encoders.vision import extractor
from atoll.measure.metrics.metric import How, parse
from atoll.measure.models import Drawn, RowConditions, published, samples_of
from atoll.measure.override import generation_of
from atoll.measure.pictures import Folder
from atoll.measure.points import Judge
from atoll.measure.reference import reference
from atoll.measure.results_table import table
from atoll.store.store import Store

REPORTS = "reports/evaluate"
COMPARED = ("routing", "guidance", "steps", "seed")
"""Fields that points of one campaign usually differ in: columns of its table."""


@dataclass(frozen=True)
class Request:
    """What is measured.

    Attributes:
        model: of the campaign: `ensemble`, `monolith`, `student` or `pretrain`.
        generation: values in place of the campaign's `sampling`: routing, guidance, steps, seed.
        images: a folder of pictures, in a model's place.
        reference: what they are held against; the campaign's own data if None.
        split: rows of a data set that are the reference; by default the held-out ones, or the test ones where
            `evaluate.conditions` is `test`.
        out: where `reports/` goes without a campaign.
    """

    model: str = "ensemble"
    generation: dict[str, Any] = field(default_factory=dict)
    images: Path | None = None
    reference: str | None = None
    split: str | None = None
    out: str = "."


def requested(options: Mapping[str, Any]) -> tuple[Request, tuple[str, ...]]:
    """The request that options of the command make, and the settings that they replace.

    Raises:
        ConfigError: options of a model beside a folder of pictures.
    """
    given = {name: value for name, value in options.items() if value is not None}
    names = ("routing", "guidance", "steps", "seed")
    generation: dict[str, Any] = {name: given[name] for name in names if name in given}
    of_model = [name for name in ("model", *generation, "samples") if name in given]
    if "images" in given and of_model:
        raise ConfigError(f"--{of_model[0]} is for a model, and --images is none", "leave one of them out")
    shorthand = {name: given[name] for name in ("metrics", "extractor", "samples") if name in given}
    sets = (*given["sets"], *(f"evaluate.{name}={json.dumps(value)}" for name, value in shorthand.items()))
    rest = {name: given[name] for name in ("model", "images", "reference", "split", "out") if name in given}
    return Request(generation=generation, **rest), sets


def evaluate(
    campaign: Campaign | None, request: Request, config: EvaluateConfig | None = None
) -> MeasuredPoint | None:
    """Measure, write `reports/evaluate/KEY.json` and `.csv`, and print; None on all processes but the first.

    Args:
        campaign: whose model is measured, and whose data is the reference; None for pictures alone.
        request: what is measured.
        config: how; by default the campaign's.

    Raises:
        ConfigError: settings, names or metrics that do not exist or contradict each other.
        DataError: pictures that cannot be measured, or a reference of another extractor.
    """
    if campaign is None and request.images is None:
        raise ConfigError("there is nothing to evaluate", "give a campaign, or --images FOLDER")
    config = config or (campaign.config.evaluate if campaign is not None else EvaluateConfig())
    store = campaign.store if campaign is not None else Store.open(request.out, create=True)
    with using_threads(config.threads), joined() as world:
        encoder = extractor(config.extractor, config.extractor_size, str(world.device))
        metrics = parse(config.metrics, encoder.kind, captioned=request.images is None)

        # What is measured: a folder of pictures, or what a model draws at conditions of the campaign's data.
        if request.images is not None:
            source: Folder | Drawn = Folder(request.images)
        else:
            assert campaign is not None
            generation = generation_of(campaign).with_(**request.generation)
            candidate, where = published(campaign, request.model, world.device), config.conditions
            rows = samples_of(campaign, campaign.dataset(), where, candidate.model.card)
            conditions = RowConditions.drawn(campaign, rows, where, config.samples, generation.seed)
            source = Drawn(candidate, generation, conditions, captioned="clip-score" in metrics)

        # What it is compared with, and how.
        usual = "test" if config.conditions == "test" else "heldout"
        held = reference(request.reference, request.split, campaign, encoder, store, usual)
        components = config.components_of(encoder.kind, encoder.width)
        how = How(
            *(encoder.name, encoder.kind, encoder.width, len(source), held.about.count, components),
            subsets=config.kid_subsets,
            subset=config.kid_size,
            device=world.device,
        )
        judge = Judge(store, encoder, held, metrics, how, config.batch, world, REPORTS)
        point, _, new = judge.measure(source)
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


def alone(sets: Sequence[str]) -> EvaluateConfig:
    """Settings without a campaign, out of `evaluate.KEY=VALUE`."""
    tree: dict[str, Any] = {}
    for assignment in sets:
        if not assignment.startswith("evaluate."):
            raise ConfigError(f"--set {assignment!r}: there is no campaign", "set evaluate.KEY=VALUE")
        set_value(tree, assignment)
    return EvaluateConfig.parse(tree.get("evaluate", {}), "--set evaluate")


def spread(processes: int) -> bool:
    """Run this very command on several processes of this machine, unless it is one of them.

    Returns:
        Whether it was run; a failure ends this process too.
    """
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

    Points of another version are left out, which is said.

    Raises:
        DataError: there are none.
    """
    keys = [key for key in store.list(REPORTS) if key.endswith(".json")]
    if not keys:
        raise DataError(f"{store.location} has no results", "make one: atoll evaluate")
    points = []
    for key in keys:
        try:
            points.append(MeasuredPoint.read(store, key))
        except DataError as error:
            say(f"warning: left out: {error}")
    if not points:
        raise DataError(f"{store.location} has no results of this version", "make one: atoll evaluate")
    results = table(sorted(points, key=lambda point: str(point.subject["name"])), compared)
    store.put(f"{REPORTS}/table.csv", results.to_csv())
    return results.text()
