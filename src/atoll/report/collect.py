"""Everything that a campaign has to show, read from its store into small values.

A campaign may be at any stage: what is not there yet is None or empty, and the page says so.
"""

import base64
import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from atoll.base.errors import DataError, PartitionError, StoreError
from atoll.report.wording import clean, finite
from atoll.store.store import Store

SCHEMA = 1
Point = tuple[float, float]
Weights = list[list[list[float]]]


@dataclass(frozen=True)
class Partition:
    """What `partition/partition.json` says.

    Attributes:
        hash: of the partition.
        method: `kmeans` or `random`.
        encoder: name, hash and size of the vision encoder; None for `random`.
        rows: of the data set, held-out rows too.
        sizes: training rows per cluster.
        heldout: held-out rows per cluster.
        warnings: what is odd about the balance.
    """

    hash: str
    method: str
    encoder: dict[str, Any] | None
    rows: int
    sizes: tuple[int, ...]
    heldout: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def k(self) -> int:
        """Number of clusters."""
        return len(self.sizes)


@dataclass(frozen=True)
class Run:
    """One training run: its plan, how far it is, and what it logged.

    Attributes:
        role: `expert`, `router` or `monolith`.
        island: number of the cluster, for an expert.
        plan: `island.json`, empty if it is not there.
        card: `card.json` of the published network; None while there is none.
        losses: (images seen, training loss), finite ones.
        odd: logged training losses that are not finite.
        validation: last validation losses at the fixed times.
        accuracy: last accuracies at the fixed times, for the router.
        seen: images seen so far.
        spent: seconds of training so far.
    """

    role: str
    island: int | None
    plan: dict[str, Any]
    card: dict[str, Any] | None
    losses: tuple[Point, ...]
    odd: int
    validation: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    seen: int
    spent: float | None

    @property
    def name(self) -> str:
        """As the page calls it."""
        return f"Expert {self.island}" if self.role == "expert" else self.role.capitalize()

    @property
    def style(self) -> str:
        """CSS class of its colour."""
        return f"e{self.island}" if self.role == "expert" else self.role

    @property
    def finished(self) -> bool:
        """Whether the network is published."""
        return self.card is not None

    @property
    def samples(self) -> int | None:
        """Images of the whole run."""
        if self.card is not None:
            return int(self.card["samples"])
        return int(self.plan["steps"]) * int(self.plan["batch"]) if self.plan else None

    @property
    def train_flops(self) -> float | None:
        """Operations of the whole run, as planned."""
        return finite((self.card or self.plan).get("train_flops"))

    @property
    def spent_flops(self) -> float | None:
        """Operations of the finished run; None before."""
        return self.train_flops if self.finished else None

    @property
    def validation_loss(self) -> float | None:
        """Mean of the last validation losses."""
        found = [v for v in self.validation if v is not None]
        return sum(found) / len(found) if found and len(found) == len(self.validation) else None


@dataclass(frozen=True)
class Picture:
    """A PNG, ready for the page."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Measured:
    """One row of the comparison: the monolith or a routing strategy."""

    name: str
    distance: float | None
    seconds: float | None
    gflops: float | None
    experts: float | None
    router: float | None


@dataclass(frozen=True)
class Comparison:
    """What `reports/compare.json` says, with the pictures beside it.

    Attributes:
        rows: monolith (if there is one) and strategies.
        metric: what the distance is.
        prompts: captions of the shown pictures, one line each.
        clusters: cluster of the training picture behind each prompt.
        routing: weights `[step][picture][expert]` by strategy, from noise to data.
        pictures: by strategy, `monolith` or `data`: one per prompt, None where it is missing.
        code: version that measured.
    """

    rows: tuple[Measured, ...]
    metric: dict[str, Any]
    prompts: tuple[str, ...]
    clusters: tuple[int, ...]
    routing: dict[str, Weights]
    pictures: dict[str, tuple[Picture | None, ...]]
    code: str

    def row(self, name: str) -> Measured | None:
        """The row of this name."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def strategies(self) -> tuple[Measured, ...]:
        """All rows but the monolith's."""
        return tuple(row for row in self.rows if row.name != "monolith")

    @property
    def best(self) -> Measured | None:
        """The strategy of the smallest distance. `oracle` is told the cluster, so it does not compete."""
        found = [row for row in self.strategies if row.distance is not None and row.name != "oracle"]
        return min(found, key=lambda row: row.distance or 0.0, default=None)

    def ratio(self, row: Measured | None) -> float | None:
        """Distance over the monolith's."""
        base = self.row("monolith")
        if row is None or row.distance is None or base is None or not base.distance:
            return None
        return row.distance / base.distance


@dataclass(frozen=True)
class Campaign:
    """A campaign as far as it is.

    Attributes:
        name: of its folder.
        code: version of Atoll that made it.
        config: the frozen settings.
        partition: clusters and what decided them.
        sheets: a contact sheet per cluster, None where it is missing.
        experts: one run per cluster.
        router: the router's run.
        monolith: the baseline's run.
        comparison: None before `atoll compare`.
        stages: seconds by stage, where the quickstart wrote them.
    """

    name: str
    code: str
    config: dict[str, Any]
    partition: Partition
    sheets: tuple[Picture | None, ...]
    experts: tuple[Run, ...]
    router: Run
    monolith: Run
    comparison: Comparison | None
    stages: dict[str, float] | None

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs that the campaign wants: experts, router, monolith."""
        return (*self.experts, self.router, *((self.monolith,) if self.wants_monolith else ()))

    @property
    def wants_monolith(self) -> bool:
        """Whether a baseline is trained."""
        return self.config.get("monolith", True) is not False

    @property
    def default(self) -> str:
        """The routing strategy that the campaign samples with."""
        sampling = self.config.get("sampling")
        return str(sampling.get("routing", "commit")) if isinstance(sampling, dict) else "commit"

    @property
    def flops_ratio(self) -> float | None:
        """Operations of experts and router over the monolith's, as planned and carded."""
        spent = [run.train_flops for run in (*self.experts, self.router)]
        base = self.monolith.train_flops
        if not base or any(value is None for value in spent):
            return None
        return sum(value or 0.0 for value in spent) / base

    @property
    def seconds(self) -> float | None:
        """Of all stages; None where nobody took the time."""
        return round(sum(self.stages.values()), 1) if self.stages else None


def collect(store: Store) -> Campaign:
    """Read a campaign.

    Raises:
        PartitionError: it has no partition yet, so there is nothing to show.
        DataError: a file is not what Atoll writes.
        StoreError: a file cannot be read or is not JSON.
    """
    if not store.exists("partition/partition.json"):
        raise PartitionError(f"{store.root} has no partition", f"run 'atoll partition {store.root}' first")
    frozen = _json(store, "campaign.json")
    with _reading(store, "campaign.json"):
        code, config = clean(frozen["code"]), dict(frozen["config"])
    partition = _partition(store)
    return Campaign(
        name=clean(store.root.name),
        code=code,
        config=config,
        partition=partition,
        sheets=tuple(_picture(store, f"partition/sheets/{k}.png") for k in range(partition.k)),
        experts=tuple(_run(store, f"islands/{k}", "expert", k) for k in range(partition.k)),
        router=_run(store, "router", "router", None),
        monolith=_run(store, "monolith", "monolith", None),
        comparison=_comparison(store),
        stages=_stages(store),
    )


def _partition(store: Store) -> Partition:
    key = "partition/partition.json"
    about = _json(store, key)
    with _reading(store, key):
        if about["schema"] != SCHEMA:
            raise PartitionError(
                f"{store.path(key)} has schema {about['schema']}, this Atoll reads {SCHEMA}", "make it again"
            )
        return Partition(
            hash=str(about["hash"]),
            method=str(about["method"]),
            encoder=about["encoder"],
            rows=int(about["rows"]),
            sizes=tuple(int(size) for size in about["sizes"]),
            heldout=tuple(int(size) for size in about["heldout"]),
            warnings=tuple(clean(warning) for warning in about["warnings"]),
        )


def _run(store: Store, folder: str, role: str, island: int | None) -> Run:
    plan = _optional(store, f"{folder}/island.json") or {}
    card = _optional(store, f"{folder}/expert/card.json")
    lines = _lines(store, f"{folder}/run/metrics.jsonl")
    with _reading(store, folder):
        trained = [line for line in lines if "loss" in line]
        values = [(float(line["samples"]), finite(line["loss"])) for line in trained]
        checked = [line for line in lines if "validation" in line]
        last = checked[-1] if checked else {}
        seen = max((int(line["samples"]) for line in lines), default=0)
        return Run(
            role=role,
            island=island,
            plan=plan,
            card=card,
            losses=tuple((x, y) for x, y in values if y is not None),
            odd=sum(y is None for _, y in values),
            validation=tuple(finite(v) for v in last.get("validation", ())),
            accuracy=tuple(finite(v) for v in last.get("accuracy_by_time", ())),
            seen=int(card["samples"]) if card else seen,
            spent=finite(card["provenance"].get("seconds") if card else _last(trained, "seconds")),
        )


def _comparison(store: Store) -> Comparison | None:
    key = "reports/compare.json"
    found = _optional(store, key)
    if found is None:
        return None
    with _reading(store, key):
        if found["schema"] != SCHEMA:
            raise DataError(
                f"{store.path(key)} has schema {found['schema']}, this Atoll reads {SCHEMA}",
                "run 'atoll compare' again",
            )
        rows = tuple(
            Measured(
                str(row["name"]),
                *(finite(row.get(name)) for name in ("distance", "seconds", "gflops_per_step")),
                *(finite(row.get(name)) for name in ("experts_per_step", "router_calls_per_step")),
            )
            for row in found["rows"]
        )
        prompts = tuple(clean(prompt) for prompt in found["prompts"])
        return Comparison(
            rows=rows,
            metric=_without_nan(dict(found["metric"])),
            prompts=prompts,
            clusters=tuple(int(number) for number in found["clusters"]),
            routing=_routing(found["routing"]),
            pictures={
                name: tuple(
                    _picture(store, f"reports/compare/{name}/{n:02d}.png") for n in range(len(prompts))
                )
                for name in ("data", *(row.name for row in rows))
            },
            code=str(found.get("code", "")),
        )


def _routing(traces: dict[str, Any]) -> dict[str, Weights]:
    return {
        str(name): [[[finite(w) or 0.0 for w in sample] for sample in step] for step in steps]
        for name, steps in traces.items()
    }


def _stages(store: Store) -> dict[str, float] | None:
    found = _optional(store, "reports/stages.json")
    if found is None:
        return None
    return {clean(name): value for name, raw in found.items() if (value := finite(raw)) is not None}


def _lines(store: Store, key: str) -> list[dict[str, Any]]:
    """Lines of a metrics file; the last one may be torn while the run writes it, and is left out then."""
    if not store.exists(key):
        return []
    found = []
    for line in store.get(key).decode("utf-8", "replace").splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "samples" in value:
            found.append(value)
    return found


def _last(lines: list[dict[str, Any]], name: str) -> Any:
    return lines[-1].get(name) if lines else None


def _picture(store: Store, key: str) -> Picture | None:
    """A PNG; None where there is none or something else lies there."""
    if not store.exists(key):
        return None
    data = store.get(key)
    if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    width, height = struct.unpack(">II", data[16:24])
    return Picture("data:image/png;base64," + base64.b64encode(data).decode(), width, height)


def _json(store: Store, key: str) -> dict[str, Any]:
    value = store.get_json(key)
    if not isinstance(value, dict):
        raise DataError(f"{store.path(key)} is not what Atoll writes", "restore it or make it again")
    return value


def _optional(store: Store, key: str) -> dict[str, Any] | None:
    return _json(store, key) if store.exists(key) else None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _reading(store: Store, key: str) -> Iterator[None]:
    """A file whose content has another form than Atoll's is one line, not a traceback."""
    try:
        yield
    except (DataError, PartitionError, StoreError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__} {error}"
        raise DataError(
            f"{store.path(key)} is not what Atoll writes ({reason})", "restore it or make it again"
        ) from None
