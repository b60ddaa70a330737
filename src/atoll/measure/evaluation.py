"""The evaluate stage: one model or one folder of pictures, measured under a protocol that is written down."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.base.config import set_value
from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.processes import ProcessGroup, joined
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.folder import Campaign
from atoll.campaign.results import Protocol, Result, result_key
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.encoders.extractors import extractor
from atoll.encoders.vision import VisionEncoder
from atoll.measure import reference as statistics
from atoll.measure.features import BLOCK, FeatureSet
from atoll.measure.judged import Judged, Statistics, Wanted, folder, model, reference
from atoll.measure.metrics import PAIRWISE, Comparison, check_counts, parse, settings_of
from atoll.measure.pictures import Folder, Rows, Source, share, take_in
from atoll.measure.protocol import make_result, table
from atoll.measure.reference import Origin
from atoll.store.store import Store

REPORTS = "reports/evaluate"
COMPARED = ("routing", "guidance", "steps", "seed")
"""Fields that results of one campaign usually differ in: columns of its table."""


@dataclass(frozen=True)
class Request:
    """What is measured.

    Attributes:
        wanted: a model of the campaign.
        images: a folder of pictures, in its place.
        reference: what they are held against; the campaign's own data if None.
        split: rows of a data set that are the reference.
        sets: settings that replace the campaign's.
        processes: that share the work.
        out: where `reports/` goes without a campaign.
    """

    wanted: Wanted = field(default_factory=Wanted)
    images: Path | None = None
    reference: str | None = None
    split: str = "heldout"
    sets: tuple[str, ...] = ()
    processes: int = 1
    out: str = "."


def requested(campaign: str | None, options: Mapping[str, Any]) -> tuple[Request, list[str]]:
    """The request that options of the command make, and the command itself less `--processes`.

    Raises:
        ConfigError: options of a model beside a folder of pictures.
    """
    given = {name: value for name, value in options.items() if value is not None}
    of_model = {
        name: given[name] for name in ("model", "routing", "guidance", "steps", "seed") if name in given
    }
    if "images" in given and (unused := [*of_model, *(["samples"] if "samples" in given else [])]):
        raise ConfigError(f"--{unused[0]} is for a model, and --images is none", "leave one of them out")
    own: dict[str, Any] = {n: given[n] for n in ("metrics", "extractor", "samples") if n in given}
    sets = (*given["sets"], *(f"evaluate.{name}={json.dumps(value)}" for name, value in own.items()))
    rest = {
        name: given[name] for name in ("images", "reference", "split", "processes", "out") if name in given
    }
    argv = [campaign] if campaign is not None else []
    for name, value in [*of_model.items(), *rest.items()]:
        argv += [f"--{name}", str(value)] if name != "processes" else []
    argv += [part for assignment in sets for part in ("--set", assignment)]
    return Request(Wanted(**of_model), sets=sets, **rest), argv


def evaluate(campaign: Campaign | None, request: Request, argv: Sequence[str] = ()) -> Result | None:
    """Measure, write `reports/evaluate/KEY.json` and `.csv`, and print; None on all processes but the first.

    Args:
        campaign: whose model is judged, and whose data is the reference; None for a folder of pictures alone.
        request: what is measured.
        argv: the command, less `--processes`, where several processes are to be started.

    Raises:
        ConfigError: settings, names or metrics that do not exist or contradict each other.
        DataError: pictures that cannot be judged, or a reference of another extractor.
    """
    if request.processes > 1 and "WORLD_SIZE" not in os.environ:
        _spread(argv, request.processes)
        return None
    if campaign is None and request.images is None:
        raise ConfigError("there is nothing to evaluate", "give a campaign, or --images FOLDER")
    config = campaign.config.evaluate if campaign is not None else _alone(request.sets)
    store = campaign.store if campaign is not None else Store.open(request.out, create=True)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = config.threads or max(1, (os.cpu_count() or 1) // processes)
    with using_threads(threads), joined() as world:
        return _Evaluation(campaign, request, config, store, world).run()


def _spread(argv: Sequence[str], processes: int) -> None:
    """The same command on several processes of this machine; ends this one where it fails."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    command = [sys.executable, "-m", "atoll.launch.torchrun", "--nnodes", "1", "--standalone"]
    environment = {"OMP_NUM_THREADS": threads, **dict(os.environ)}
    command += ["--nproc-per-node", str(processes), "-m", "atoll", "evaluate", *argv]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def _alone(sets: Sequence[str]) -> EvaluateConfig:
    """Settings without a campaign."""
    tree: dict[str, Any] = {}
    for assignment in sets:
        if not assignment.startswith("evaluate."):
            raise ConfigError(f"--set {assignment!r}: there is no campaign", "set evaluate.KEY=VALUE")
        set_value(tree, assignment)
    return EvaluateConfig.parse(tree.get("evaluate", {}), "--set evaluate")


@dataclass
class _Evaluation:
    """One evaluation on one of its processes."""

    campaign: Campaign | None
    request: Request
    config: EvaluateConfig
    store: Store
    world: ProcessGroup

    def run(self) -> Result | None:
        start, config = time.monotonic(), self.config
        encoder = extractor(config.extractor, config.extractor_size, str(self.world.device))
        metrics = parse(config.metrics, encoder.kind, captioned=self.request.images is None)
        keep = bool(set(metrics) & set(PAIRWISE))
        judged = self._judged("clip-score" in metrics)
        against, origin, saved = self._reference(encoder, keep)
        protocol = self._protocol(encoder, judged, origin)
        counts, seed = (protocol.samples, origin.count), protocol.seed or 0
        check_counts(metrics, config.components_of(encoder.kind, encoder.width), *counts)
        settings = {
            name: settings_of(name, config, encoder.kind, encoder.width, counts, seed) for name in metrics
        }
        key = f"{REPORTS}/{result_key(judged.subject, protocol, settings)}"
        if self.world.once(lambda: self.store.exists(f"{key}.json")):
            return self._again(key) if self.world.first else None
        held = self._held_against(against, origin, saved, encoder, keep)
        samples = self._taken(judged.source, encoder, judged.subject["name"], keep, "clip-score" in metrics)
        if samples is None or held is None:
            return None
        comparison = Comparison(samples, held, config, encoder.name, encoder.kind, seed, self.world.device)
        values = comparison.measure(metrics)
        cost = {"seconds": round(time.monotonic() - start, 1), "processes": float(self.world.size)}
        return self._written(key, make_result(judged.subject, protocol, values, dict(cost)))

    def _judged(self, captioned: bool) -> Judged:
        if self.request.images is not None:
            return folder(self.request.images)
        assert self.campaign is not None
        return model(self.campaign, self.request.wanted, captioned, self.world.device)

    def _reference(
        self, encoder: VisionEncoder, keep: bool
    ) -> tuple[Folder | Rows | None, Origin, Statistics | None]:
        """Pictures of the reference, what its statistics are made of, and where they are, if they are."""
        found = reference(self.request.reference, self.request.split, self.campaign)
        if isinstance(found, Statistics):
            return None, statistics.origin_of(found.store, found.key, encoder.producer(), keep), found
        origin = Origin(
            extractor=encoder.producer(),
            name=self.request.reference or "the campaign's data",
            data=found.digest,
            split=found.split if isinstance(found, Rows) else None,
            count=len(found),
            size=found.size,
        )
        key = statistics.saved(self.store, f"{REPORTS}/references", origin, keep)
        return found, origin, Statistics(self.store, key) if key is not None else None

    def _protocol(self, encoder: VisionEncoder, judged: Judged, origin: Origin) -> Protocol:
        size = judged.source.size
        if size != origin.size:
            (a, b), (c, d) = size, origin.size
            raise DataError(
                f"the pictures are {a}x{b}, those of the reference {c}x{d}", "bring both to one size"
            )
        about = encoder.producer()
        return Protocol(
            extractor=encoder.name,
            extractor_hash=about["hash"],
            extractor_size=encoder.size,
            extractor_token=encoder.token,
            resize=encoder.resize,
            picture_size=size,
            reference=origin.name,
            reference_hash=origin.data,
            reference_split=origin.split,
            reference_count=origin.count,
            samples=len(judged.source),
            code=code_version(),
            **judged.about,
        )

    def _held_against(
        self,
        pictures: Folder | Rows | None,
        origin: Origin,
        saved: Statistics | None,
        encoder: VisionEncoder,
        keep: bool,
    ) -> FeatureSet | None:
        """Features of the reference, on the first process."""
        if saved is None:
            assert pictures is not None
            made = self._taken(pictures, encoder, "reference", keep)
            if made is not None:
                statistics.save(self.store, f"{REPORTS}/references", made, origin)
            return made
        if not self.world.first:
            return None
        return statistics.load(saved.store, saved.key, encoder.producer(), keep)[0]

    def _taken(
        self, source: Source, encoder: VisionEncoder, what: str, keep: bool, scores: bool = False
    ) -> FeatureSet | None:
        """Features of all pictures, on the first process; each takes in its share."""
        part = share(len(source), self.config.batch, self.world.rank, self.world.size)
        batches = source.batches(part, self.config.batch)
        made = take_in(batches, len(part), encoder, what, keep, scores, quiet=not self.world.first)
        return gathered(self.world, made)

    def _again(self, key: str) -> Result:
        say("evaluate: finished already")
        result = Result.read(self.store, f"{key}.json")
        _show(result)
        return result

    def _written(self, key: str, result: Result) -> Result:
        self.store.put(f"{key}.csv", table([result], COMPARED).to_csv())
        self.store.put_json(f"{key}.json", result.to_json())
        _show(result)
        say(f"wrote {self.store.name(key)}.json")
        return result


def _show(result: Result) -> None:
    for value in result.values.values():
        spread = f" +- {value['deviation']:.4g}" if value["deviation"] is not None else ""
        say(f"  {value['label']:<44} {value['value']:.6g}{spread}")
        if value.get("note"):
            say(f"  note: {value['note']}")


def gathered(world: ProcessGroup, made: FeatureSet) -> FeatureSet | None:
    """What all processes have taken in, on the first one; None on the others."""
    for rank in range(1, world.size):
        if world.rank not in (0, rank):
            continue
        other = made if world.rank == rank else FeatureSet(made.moments.width, made.rows is not None)
        _bring(world, other, rank)
        if world.first:
            made.merge(other)
    return made if world.first else None


def _bring(world: ProcessGroup, part: FeatureSet, rank: int) -> None:
    """Copy what one process has taken in to the first one's empty set."""
    for name in ("moments", "scores"):
        tensors = {key: value.clone() for key, value in getattr(part, name).tensors().items()}
        world.hand_over(list(tensors.values()), rank)
        setattr(part, name, type(part.moments).from_tensors(tensors))
    if part.rows is None:
        return
    numbers = (
        torch.from_numpy(part.rows.numbers) if not world.first else torch.empty(part.count, dtype=torch.int64)
    )
    world.hand_over([numbers], rank)
    for chosen in numbers.split(BLOCK):
        block = torch.empty(len(chosen), part.rows.width)
        if not world.first:
            block = torch.from_numpy(part.rows.read(chosen.numpy()))
        world.hand_over([block], rank)
        if world.first:
            part.rows.write(chosen.numpy(), block.numpy())


def show_all(store: Store, compared: Sequence[str] = COMPARED) -> str:
    """The table of all results of a campaign, with warnings where their protocols differ; also as CSV.

    Results of another version are left out, which is said.

    Raises:
        DataError: there are none.
    """
    keys = [
        key
        for key in store.list(REPORTS)
        if key.endswith(".json") and key.count("/") == REPORTS.count("/") + 1
    ]
    if not keys:
        raise DataError(f"{store.location} has no results", "make one: atoll evaluate")
    found = []
    for key in keys:
        try:
            found.append(Result.read(store, key))
        except DataError as error:
            say(f"warning: left out: {error}")
    if not found:
        raise DataError(f"{store.location} has no results of this version", "make one: atoll evaluate")
    made = table(sorted(found, key=lambda result: str(result.subject["name"])), compared)
    store.put(f"{REPORTS}/table.csv", made.to_csv())
    return made.text()
