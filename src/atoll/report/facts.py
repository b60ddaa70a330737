"""A campaign as the page sees it: its typed files; None or empty where a stage has not been yet."""

import base64
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pydantic import ValidationError

from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.base.text import in_common
from atoll.campaign.diagnosed import Diagnosis
from atoll.campaign.measured import Comparison
from atoll.campaign.results import Frozen, MetricsLine
from atoll.campaign.roles import RUNS
from atoll.campaign.runs import RunPlan, read_partition
from atoll.data.formats import PartitionFile
from atoll.model.card import Card
from atoll.report.palette import DENSE
from atoll.report.text import clean, clean_tree, finite
from atoll.store.store import Store

Point = tuple[float, float]
Kind = TypeVar("Kind", bound=File)


@dataclass(frozen=True)
class Picture:
    """A PNG, ready for the page."""

    uri: str
    width: int
    height: int


def pixelated(pictures: Sequence[Picture | None]) -> bool:
    """Whether pictures are so small that their pixels should stay sharp squares."""
    return max((picture.width for picture in pictures if picture), default=0) <= 64


@dataclass(frozen=True)
class Run:
    """One training run: its plan, how far it is, and what it logged.

    Attributes:
        role: a name of `RUNS`.
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
        title = RUNS[self.role].title
        return title if self.island is None else f"{title} {self.island}"

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
        numbers = self.card or self.plan
        return numbers.samples if numbers else None

    @property
    def seconds(self) -> float | None:
        """Of training so far."""
        if self.card:
            return finite(self.card.provenance.get("seconds"))
        return self.trained[-1].seconds if self.trained else None

    @property
    def train_flops(self) -> float | None:
        """Operations of the whole run: as planned, and as the card says when it is finished."""
        numbers = self.card or self.plan
        return numbers.train_flops if numbers else None


def _points(line: MetricsLine, values: Sequence[float | None]) -> list[Point]:
    pairs = zip(line.times, map(finite, values), strict=False)
    return [(t, value) for t, value in pairs if value is not None]


@dataclass(frozen=True)
class Facts:
    """A campaign as far as it is, from the partition on. A file is read when it is first asked for."""

    store: Store

    @cached_property
    def name(self) -> str:
        """Of its folder."""
        return clean(self.store.location.rstrip("/").rpartition("/")[2])

    @cached_property
    def frozen(self) -> Frozen:
        """Its settings, and the version of Atoll that made it."""
        return self.file("campaign.json", Frozen)

    @cached_property
    def partition(self) -> PartitionFile:
        """Clusters and what decided them."""
        return read_partition(self.store)

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

    @property
    def ensemble(self) -> list[Run]:
        """The runs that together cost what the monolith costs: experts, router, shared pretraining."""
        return [*self.experts, self.router, *([self.pretrain] if self.pretrain else [])]

    @property
    def runs(self) -> list[Run]:
        """All runs that the campaign wants: the ensemble's, the monolith, the student."""
        baseline = [self.monolith] if self.wants_monolith else []
        return [*self.ensemble, *baseline, *([self.student] if self.student else [])]

    @property
    def wants_monolith(self) -> bool:
        """Whether a baseline is trained, or was."""
        return self.frozen.config.get("monolith", True) is not False or self.monolith.finished

    @property
    def finished(self) -> bool:
        """Whether every run is."""
        return all(run.finished for run in self.runs)

    @property
    def flops_ratio(self) -> float | None:
        """Operations of experts, router and shared pretraining over the monolith's, as planned and carded."""
        spent, base = total([run.train_flops for run in self.ensemble]), self.monolith.train_flops
        return spent / base if base and spent is not None else None

    @property
    def in_common(self) -> str:
        """What the experts have in common, as a sentence."""
        spent = total([run.train_flops for run in self.ensemble])
        shared = (self.pretrain.train_flops or 0.0) if self.pretrain else 0.0
        init = (self.frozen.config.get("network") or {}).get("init", "scratch")
        return in_common(shared / spent if spent else 0.0, init != "scratch")

    @cached_property
    def comparison(self) -> Comparison | None:
        """None before `atoll compare`."""
        return self.optional("reports/compare.json", Comparison)

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
        return self.optional("reports/diagnostics.json", Diagnosis)

    @cached_property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, where the quickstart wrote them."""
        key = "reports/stages.json"
        content = clean_tree(self.store.get_json(key)) if self.store.exists(key) else {}
        if not isinstance(content, dict):
            raise DataError(f"{self.store.name(key)} is not what Atoll writes", "restore it or remove it")
        return {name: value for name, value in content.items() if finite(value) is not None}

    @property
    def seconds(self) -> float | None:
        """Of all stages; None where nobody took the time."""
        return round(sum(self.stages.values()), 1) if self.stages else None

    @property
    def stale(self) -> list[str]:
        """Commands that measured other weights than are published now: something was trained since."""
        results = {"atoll compare": self.comparison, "atoll diagnose": self.diagnosis}
        return [command for command, one in results.items() if one is not None and self.is_stale(one.parts)]

    def is_stale(self, parts: dict[str, Any]) -> bool:
        """Whether these digests, by part, are of other weights than are published now."""
        dense = parts.keys() & DENSE.keys()
        cards = {name: self.optional(f"{name}/expert/card.json", Card) for name in dense}
        published: dict[str, Any] = {}
        key = "ensemble/ensemble.json"
        if parts.keys() != dense and self.store.exists(
            key
        ):  # its type is beside torch, so it is read as it is
            content = self.store.get_json(key)
            published = (content.get("parts") or {}) if isinstance(content, dict) else {}
        digests = {name: card.weights_sha256 for name, card in cards.items() if card}
        return bool(parts) and parts != {**published, **digests}

    def picture(self, key: str) -> Picture | None:
        """A PNG; None where there is none or something else lies there."""
        data = self.store.get(key) if self.store.exists(key) else b""
        if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
            return None
        width, height = struct.unpack(">II", data[16:24])
        return Picture("data:image/png;base64," + base64.b64encode(data).decode(), width, height)

    def file(self, key: str, kind: type[Kind]) -> Kind:
        """A file whose texts are fit for a page, and whose numbers are finite."""
        return kind.of_json(clean_tree(self.store.get_json(key)), self.store.name(key))

    def optional(self, key: str, kind: type[Kind]) -> Kind | None:
        """The same, None where there is none."""
        return self.file(key, kind) if self.store.exists(key) else None

    def _run(self, folder: str, role: str, island: int | None = None) -> Run:
        plan = self.optional(f"{folder}/island.json", RunPlan)
        card = self.optional(f"{folder}/expert/card.json", Card)
        return Run(role, island, plan, card, list(self._lines(f"{folder}/run/metrics.jsonl")))

    def _lines(self, key: str) -> Iterator[MetricsLine]:
        """Lines of a metrics file; one may be torn while the run writes it, and is left out then."""
        text = self.store.get(key).decode("utf-8", "replace") if self.store.exists(key) else ""
        for line in text.splitlines():
            try:
                yield MetricsLine.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                if first["type"] in ("json_invalid", "missing") or not first["loc"]:
                    continue
                what = f"{self.store.name(key)} is not what Atoll writes ({first['loc'][0]!r} in a line)"
                raise DataError(what, "restore it or remove it") from None


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None where a value is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
