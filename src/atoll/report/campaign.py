"""A campaign as the page sees it: its typed files; None or empty where a stage has not been yet."""

import base64
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pydantic import ValidationError

from atoll.base.errors import DataError, PartitionError
from atoll.base.format import File
from atoll.campaign.results import Comparison, Diagnosis, Frozen, MeasuredPoint, MetricsLine, PicturePair
from atoll.campaign.settings.train import RunPlan
from atoll.data.formats import PartitionFile
from atoll.ensemble.card import Card
from atoll.report.wording import clean, clean_tree, finite
from atoll.store.store import Store

Point = tuple[float, float]
Kind = TypeVar("Kind", bound=File)
EVALUATIONS = "reports/evaluate"


@dataclass(frozen=True)
class Picture:
    """A PNG, ready for the page."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Pair:
    """A sample and the training picture that it is nearest to."""

    caption: str
    sample: Picture | None
    training: Picture | None


@dataclass(frozen=True)
class Run:
    """One training run: its plan, how far it is, and what it logged.

    Attributes:
        role: `expert`, `router`, `monolith`, `pretrain` or `student`.
        island: number of the cluster, for an expert.
        plan: its numbers; None if they are not there.
        card: of the published network; None while there is none.
        lines: of its metrics.
    """

    role: str
    island: int | None
    plan: RunPlan | None
    card: Card | None
    lines: Sequence[MetricsLine]

    @property
    def name(self) -> str:
        """As the page calls it."""
        names = {"expert": f"Expert {self.island}", "pretrain": "Shared pretraining"}
        return names.get(self.role) or self.role.capitalize()

    @property
    def style(self) -> str:
        """CSS class of its colour."""
        return f"e{self.island}" if self.role == "expert" else self.role

    @property
    def finished(self) -> bool:
        """Whether the network is published."""
        return self.card is not None

    @cached_property
    def trained(self) -> list[MetricsLine]:
        """Lines of training, not of a validation."""
        return [line for line in self.lines if "loss" in line.model_fields_set]

    @cached_property
    def losses(self) -> list[Point]:
        """Images seen and training loss, where it is finite."""
        points = [(float(line.samples), finite(line.loss)) for line in self.trained]
        return [(seen, loss) for seen, loss in points if loss is not None]

    @property
    def odd(self) -> int:
        """Training losses that are not finite."""
        return len(self.trained) - len(self.losses)

    @property
    def checked(self) -> MetricsLine:
        """The last validation; an empty line where there was none."""
        return next((line for line in reversed(self.lines) if line.validation), MetricsLine(samples=0))

    @property
    def validation(self) -> list[Point]:
        """Times t of the last validation and losses."""
        return _points(self.checked, self.checked.validation)

    @property
    def accuracy(self) -> list[Point]:
        """Times t of the last validation and the router's accuracy."""
        return _points(self.checked, self.checked.accuracy_by_time)

    @property
    def validation_loss(self) -> float | None:
        """Mean of the last validation losses."""
        values = [value for _, value in self.validation]
        return sum(values) / len(values) if values and len(values) == len(self.checked.validation) else None

    @property
    def seen(self) -> int:
        """Images seen so far."""
        return self.card.samples if self.card else max((line.samples for line in self.lines), default=0)

    @property
    def samples(self) -> int | None:
        """Images of the whole run."""
        return self.card.samples if self.card else self.plan.samples if self.plan else None

    @property
    def spent(self) -> float | None:
        """Seconds of training so far."""
        if self.card:
            return finite(self.card.provenance.get("seconds"))
        return self.trained[-1].seconds if self.trained else None

    @property
    def train_flops(self) -> float | None:
        """Operations of the whole run, as planned."""
        known = self.card or self.plan
        return known.train_flops if known else None

    @property
    def spent_flops(self) -> float | None:
        """Operations of the finished run; None before."""
        return self.train_flops if self.finished else None


@dataclass(frozen=True)
class Campaign:
    """A campaign as far as it is. What is read is read from the store when it is first asked for."""

    store: Store

    @cached_property
    def name(self) -> str:
        """Of its folder."""
        return clean(self.store.location.rstrip("/").rpartition("/")[2])

    @cached_property
    def frozen(self) -> Frozen:
        """Its settings."""
        return Frozen.read(self.store, "campaign.json")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its settings as plain data."""
        return self.frozen.config

    @cached_property
    def code(self) -> str:
        """Version of Atoll that made it."""
        return clean(self.frozen.code)

    @cached_property
    def partition(self) -> PartitionFile:
        """Clusters and what decided them."""
        return self._file("partition/partition.json", PartitionFile)

    @cached_property
    def sheets(self) -> list[Picture | None]:
        """A contact sheet per cluster, None where it is missing."""
        return [self.picture(f"partition/sheets/{k}.png") for k in range(self.partition.k)]

    @cached_property
    def experts(self) -> list[Run]:
        """One run per cluster."""
        return [self._run(f"islands/{k}", "expert", k) for k in range(self.partition.k)]

    @cached_property
    def router(self) -> Run:
        """The router's run."""
        return self._run("router", "router")

    @cached_property
    def monolith(self) -> Run:
        """The baseline's run."""
        return self._run("monolith", "monolith")

    @cached_property
    def pretrain(self) -> Run | None:
        """The run that the experts start from; None where they start without one."""
        return self._run("pretrain", "pretrain") if self.store.exists("pretrain/island.json") else None

    @cached_property
    def student(self) -> Run | None:
        """The run that learns from the experts; None where there is none."""
        return self._run("student", "student") if self.store.exists("student/island.json") else None

    @cached_property
    def comparison(self) -> Comparison | None:
        """None before `atoll compare`."""
        return self._optional("reports/compare.json", Comparison)

    @cached_property
    def pictures(self) -> dict[str, list[Picture | None]]:
        """Of each model and of `data`, a picture for each prompt compared, None where it is missing."""
        if self.comparison is None:
            return {}
        names, count = ("data", *(row.name for row in self.comparison.rows)), len(self.comparison.prompts)
        return {
            name: [self.picture(f"reports/compare/{name}/{n:02d}.png") for n in range(count)]
            for name in names
        }

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """None before `atoll diagnose`."""
        return self._optional("reports/diagnostics.json", Diagnosis)

    def pairs(self, pairs: Sequence[PicturePair]) -> list[Pair]:
        """Samples beside what they resemble."""
        return [Pair(p.caption, self.picture(p.sample), self.picture(p.training)) for p in pairs]

    @cached_property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, where the quickstart wrote them."""
        key = "reports/stages.json"
        content = self.store.get_json(key) if self.store.exists(key) else {}
        if not isinstance(content, dict):
            raise DataError(f"{self.store.name(key)} is not what Atoll writes", "restore it or remove it")
        return {clean(k): value for k, raw in content.items() if (value := finite(raw)) is not None}

    @cached_property
    def evaluations(self) -> list[MeasuredPoint]:
        """Reports of `atoll evaluate` of this version, by name of the model."""
        keys = [key for key in self.store.list(EVALUATIONS) if key.endswith(".json") and key.count("/") == 2]
        contents = {key: clean_tree(self.store.get_json(key)) for key in keys}
        current = {k: v for k, v in contents.items() if not isinstance(v, dict) or MeasuredPoint.fits(v)}
        results = [MeasuredPoint.of_json(content, self.store.name(key)) for key, content in current.items()]
        return sorted(results, key=lambda one: str(one.subject["name"]))

    def is_stale(self, parts: dict[str, Any]) -> bool:
        """Whether these digests, by part, are of other weights than are published now."""
        return bool(parts) and parts != self._published(parts)

    @cached_property
    def stale(self) -> list[str]:
        """Commands that measured other weights than are published now: something was trained since."""
        results = {"atoll compare": self.comparison, "atoll diagnose": self.diagnosis}
        return [command for command, one in results.items() if one is not None and self.is_stale(one.parts)]

    def _published(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Digests of what is published now: the parts that were measured, and the ensemble if it was."""
        dense = measured.keys() & {"monolith", "student", "pretrain"}
        cards = {name: self._optional(f"{name}/expert/card.json", Card) for name in dense}
        digests = {name: card.weights_sha256 for name, card in cards.items() if card}
        key = "ensemble/ensemble.json"
        if measured.keys() == dense or not self.store.exists(key):
            return digests
        content = self.store.get_json(key)
        return {**(content.get("parts") or {}), **digests} if isinstance(content, dict) else digests

    @property
    def runs(self) -> list[Run]:
        """All runs that the campaign wants: the ensemble's, the monolith, the student."""
        return [
            *self.ensemble,
            *((self.monolith,) if self.wants_monolith else ()),
            *((self.student,) if self.student else ()),
        ]

    @property
    def ensemble(self) -> list[Run]:
        """The runs that together cost what the monolith costs: experts, router, pretraining."""
        return [*self.experts, self.router, *((self.pretrain,) if self.pretrain else ())]

    @property
    def ensemble_name(self) -> str:
        """These runs in words."""
        return "Experts, router and shared pretraining" if self.pretrain else "Experts and router"

    @property
    def wants_monolith(self) -> bool:
        """Whether a baseline is trained, or was."""
        return self.config.get("monolith", True) is not False or self.monolith.finished

    @property
    def default(self) -> str | None:
        """The routing that the campaign samples with, as its comparison says."""
        return self.comparison.default if self.comparison else None

    @property
    def flops_ratio(self) -> float | None:
        """Operations of experts, router and shared pretraining over the monolith's, as planned and carded."""
        spent = [run.train_flops for run in self.ensemble]
        base = self.monolith.train_flops
        if not base or any(value is None for value in spent):
            return None
        return sum(value or 0.0 for value in spent) / base

    @property
    def seconds(self) -> float | None:
        """Of all stages; None where nobody took the time."""
        return round(sum(self.stages.values()), 1) if self.stages else None

    def picture(self, key: str) -> Picture | None:
        """A PNG; None where there is none or something else lies there."""
        data = self.store.get(key) if self.store.exists(key) else b""
        if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
            return None
        width, height = struct.unpack(">II", data[16:24])
        return Picture("data:image/png;base64," + base64.b64encode(data).decode(), width, height)

    def _run(self, folder: str, role: str, island: int | None = None) -> Run:
        plan = self._optional(f"{folder}/island.json", RunPlan)
        card = self._optional(f"{folder}/expert/card.json", Card)
        return Run(role, island, plan, card, list(self._lines(f"{folder}/run/metrics.jsonl")))

    def _lines(self, key: str) -> Iterator[MetricsLine]:
        """Lines of a metrics file; the last may be torn while the run writes it, and is left out then."""
        text = self.store.get(key).decode("utf-8", "replace") if self.store.exists(key) else ""
        for line in text.splitlines():
            try:
                yield MetricsLine.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                if first["type"] == "json_invalid" or not where or first["type"] == "missing":
                    continue
                what = f"{self.store.name(key)} is not what Atoll writes ({where!r} in a line)"
                raise DataError(what, "restore it or remove it") from None

    def _optional(self, key: str, kind: type[Kind]) -> Kind | None:
        return self._file(key, kind) if self.store.exists(key) else None

    def _file(self, key: str, kind: type[Kind]) -> Kind:
        """A file whose texts are fit for a page."""
        return kind.of_json(clean_tree(self.store.get_json(key)), self.store.name(key))


def _points(line: MetricsLine, values: Sequence[float | None]) -> list[Point]:
    pairs = zip(line.grid, map(finite, values), strict=False)
    return [(t, value) for t, value in pairs if value is not None]


def open_campaign(store: Store) -> Campaign:
    """A campaign to report on.

    Raises:
        PartitionError: it has no partition yet, so there is nothing to show.
    """
    if not store.exists("partition/partition.json"):
        where = store.location
        raise PartitionError(f"{where} has no partition", f"run 'atoll partition {where}' first")
    return Campaign(store)
