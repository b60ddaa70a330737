"""A campaign as the page sees it: its typed files; None or empty where a stage has not been yet."""

import base64
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.base.text import sharing_sentence
from atoll.campaign.diagnosed import Diagnosis
from atoll.campaign.folder import Frozen
from atoll.campaign.measured import Comparison
from atoll.campaign.roles import BASELINE, RUNS, SINGLE
from atoll.campaign.runs import MetricsLine, Run, RunPlan, read_partition, runs_as
from atoll.data.formats import PartitionFile
from atoll.model.card import Card
from atoll.model.routing import PRETRAIN
from atoll.store.store import Store

Point = tuple[float, float]
Kind = TypeVar("Kind", bound=File)
LONGEST = 240
"""Characters of a text of unknown origin."""


def finite(value: Any) -> float | None:
    """A number that JSON and a chart can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def clean(value: Any) -> str:
    """Text of unknown origin as one line that can be encoded: no control characters, of bounded length."""
    text = "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in str(value))
    # A lone surrogate is printable to Python, and no encoder takes it.
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def clean_tree(value: Any) -> Any:
    """Plain data whose texts are clean and whose numbers are finite, or null."""
    if isinstance(value, dict):
        return {clean(key): clean_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_tree(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return clean(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Picture:
    """A PNG, ready for the page."""

    uri: str
    width: int
    height: int

    @classmethod
    def of_png(cls, data: bytes) -> "Picture | None":
        """None where the bytes are no PNG."""
        if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
            return None
        # The header chunk IHDR always comes first, so nothing is decoded to learn the size.
        width, height = struct.unpack(">II", data[16:24])
        return cls("data:image/png;base64," + base64.b64encode(data).decode(), width, height)


def pixelated(pictures: Sequence[Picture | None]) -> bool:
    """Whether pictures are so small that their pixels should stay sharp squares."""
    return max((picture.width for picture in pictures if picture), default=0) <= 64


@dataclass(frozen=True)
class LoggedRun:
    """A run as far as it is, from its plan, its log and the card of its published network."""

    run: Run
    plan: RunPlan | None
    card: Card | None
    losses: list[Point]
    """Images seen and training loss, where it is finite."""
    not_finite: int
    """Training losses that are not."""
    validation: list[Point]
    """Times t of the last validation and losses."""
    accuracy: list[Point]
    """Times t of the last validation and the router's accuracy."""
    validation_loss: float | None
    """Mean of the last validation losses; none where one of them is not finite."""
    ignores_captions: bool
    seen: int
    """Images so far."""
    seconds: float | None
    """Of training so far."""

    @classmethod
    def of(cls, run: Run, plan: RunPlan | None, card: Card | None, lines: Sequence[MetricsLine]) -> Self:
        """A run with the lines of its log, those of training and of validations mixed."""
        # A loss of null was logged and is not finite; a validation's line has no loss at all.
        trained = [line for line in lines if "loss" in line.model_fields_set]
        losses = [(float(line.samples), finite(line.loss)) for line in trained]
        known = [(seen, loss) for seen, loss in losses if loss is not None]
        last = next((line for line in reversed(lines) if line.validation), MetricsLine(samples=0))
        validation, accuracy = (
            [(t, v) for t, value in zip(last.times, of, strict=False) if (v := finite(value)) is not None]
            for of in (last.validation, last.accuracy_by_time)
        )
        spent = finite(card.provenance.get("seconds")) if card else None
        return cls(
            run=run,
            plan=plan,
            card=card,
            losses=known,
            not_finite=len(losses) - len(known),
            validation=validation,
            accuracy=accuracy,
            validation_loss=finite(last.validation_loss),
            ignores_captions=last.ignores_captions,
            seen=card.samples if card else max((line.samples for line in lines), default=0),
            seconds=trained[-1].seconds if trained and not card else spent,
        )

    @property
    def name(self) -> str:
        """As the page calls it."""
        return f"{self.run.kind.title}{'' if self.run.expert is None else f' {self.run.expert}'}"

    @property
    def style(self) -> str:
        """CSS class of its colour."""
        return self.run.role if self.run.expert is None else f"e{self.run.expert}"

    @property
    def finished(self) -> bool:
        """Whether the network is published."""
        return self.card is not None

    @property
    def samples(self) -> int | None:
        """Images of the whole run."""
        numbers = self.card or self.plan
        return numbers.samples if numbers else None

    @property
    def train_flops(self) -> float | None:
        """Operations of the whole run: as planned, and as the card says when it is finished."""
        numbers = self.card or self.plan
        return numbers.train_flops if numbers else None


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
        return self.file(Frozen.PLACE, Frozen)

    @cached_property
    def partition(self) -> PartitionFile:
        """Clusters and what decided them."""
        return read_partition(self.store)

    @cached_property
    def by_role(self) -> dict[str, list[LoggedRun]]:
        """Runs that are planned, by role: first those that every ensemble has, then as in `RUNS`."""
        # The baseline has numbers to compare costs with even where it is not trained.
        chosen = {}
        for role in sorted(RUNS.values(), key=lambda role: not role.assembled):
            runs = runs_as(role, self.partition.k)
            if role.assembled or role.name == BASELINE or self.store.exists(runs[0].plan):
                chosen[role.name] = [
                    LoggedRun.of(
                        run,
                        self.optional(run.plan, RunPlan),
                        self.optional(f"{run.network}/card.json", Card),
                        list(self._lines(f"{run.folder}/run/metrics.jsonl")),
                    )
                    for run in runs
                ]
        return chosen

    def _lines(self, key: str) -> Iterator[MetricsLine]:
        text = self.store.get(key).decode("utf-8", "replace") if self.store.exists(key) else ""
        for line in text.splitlines():
            try:
                yield MetricsLine.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                # The run may be writing this very line: what is torn is passed over, what is wrong is not.
                if first["type"] in ("json_invalid", "missing") or not first["loc"]:
                    continue
                what = f"{self.store.name(key)} is not what Atoll writes ({first['loc'][0]!r} in a line)"
                raise DataError(what, "restore it or remove it") from None

    def one(self, role: str) -> LoggedRun | None:
        """The run of a role of one run; None where the campaign plans none."""
        return next(iter(self.by_role.get(role, ())), None)

    @property
    def baseline(self) -> LoggedRun:
        """The run that the others are compared with."""
        return self.by_role[BASELINE][0]

    @property
    def ensemble(self) -> list[LoggedRun]:
        """The runs that together cost what the baseline costs."""
        return [run for runs in self.by_role.values() for run in runs if run.run.kind.counted == "ensemble"]

    @property
    def runs(self) -> list[LoggedRun]:
        """All runs that the campaign wants."""
        every = (run for runs in self.by_role.values() for run in runs)
        return [run for run in every if run.run.role != BASELINE or self.wants_baseline]

    @property
    def wants_baseline(self) -> bool:
        """Whether a baseline is trained, or was; its plan is there in any case."""
        return self.frozen.config.get(BASELINE, True) is not False or self.baseline.finished

    @property
    def finished(self) -> bool:
        """Whether every run is."""
        return all(run.finished for run in self.runs)

    @property
    def flops_ratio(self) -> float | None:
        """Operations of the ensemble's runs over the baseline's, as planned and carded."""
        spent, base = total(run.train_flops for run in self.ensemble), self.baseline.train_flops
        return spent / base if base and spent is not None else None

    @property
    def sharing_sentence(self) -> str:
        """What the experts have in common, as a sentence."""
        spent, pretrain = total(run.train_flops for run in self.ensemble), self.one("pretrain")
        shared = (pretrain.train_flops or 0.0) if pretrain else 0.0
        network = self.frozen.config.get("network")
        init = network.get("init", "scratch") if isinstance(network, dict) else "scratch"
        return sharing_sentence(
            shared / spent if spent else 0.0, init != "scratch", bool(self.frozen.config.get("origin"))
        )

    @cached_property
    def comparison(self) -> Comparison | None:
        """None before `atoll compare`."""
        return self.optional(Comparison.PLACE, Comparison)

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
        return self.optional(Diagnosis.PLACE, Diagnosis)

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
        reports = {"atoll compare": self.comparison, "atoll diagnose": self.diagnosis}
        return [command for command, report in reports.items() if report and self.is_stale(report.parts)]

    def is_stale(self, parts: dict[str, Any]) -> bool:
        """Whether these digests, by part, are of other weights than are published now."""
        # The experts' digests are those of the assembled ensemble, which may lag behind what they published.
        single = parts.keys() & set(SINGLE)
        cards = {name: self.optional(f"{Run(name).network}/card.json", Card) for name in single}
        published: dict[str, Any] = {}
        key = "ensemble/ensemble.json"
        if parts.keys() != single and self.store.exists(key):
            # Its type is beside torch, which a report does without, so the file is read as it is.
            content = self.store.get_json(key)
            published = (content.get("parts") or {}) if isinstance(content, dict) else {}
        if (guide := f"experts/{PRETRAIN}") not in parts:  # it draws nothing but under `null pretrain`
            published.pop(guide, None)
        digests = {name: card.weights_sha256 for name, card in cards.items() if card}
        return bool(parts) and parts != {**published, **digests}

    def picture(self, key: str) -> Picture | None:
        """A PNG; None where there is none or something else lies there."""
        return Picture.of_png(self.store.get(key)) if self.store.exists(key) else None

    def file(self, key: str, kind: type[Kind]) -> Kind:
        """A file whose texts are fit for a page, and whose numbers are finite."""
        return kind.of_json(clean_tree(self.store.get_json(key)), self.store.name(key))

    def optional(self, key: str, kind: type[Kind]) -> Kind | None:
        """The same, None where there is none."""
        return self.file(key, kind) if self.store.exists(key) else None


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None where a value is not known."""
    # A sum that left the unknown out would pass for the whole cost.
    known = list(values)
    return None if None in known else sum(value or 0.0 for value in known)
