"""What a campaign fixed and what was measured of it: the types of its JSON files."""

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File
from atoll.campaign.runs import BASELINE, BESIDE
from atoll.model.routing import Routing
from atoll.store.store import Store

Record = dict[str, Any]
Weights = list[list[list[float]]]
"""Weights of the experts, `[step][picture][expert]`, from noise to data."""
WORDS = {
    *("split", "t", "cluster", "model", "gap", "strategy", "step", "why"),
    *("space", "partner", "edge", "how"),
}
"""Columns that may hold words; the others that are named below hold numbers or nothing."""
COLUMNS = {
    "router": "split t nll accuracy confidence ece ece_chance temperature prior_nll prior_accuracy",
    "errors": "split t cluster model error se",
    "differences": "split t cluster gap difference se",
    "experts": "split t cluster expert error",
    "missing": "split t cluster expert loss",
    "disagreement": "split t cluster angle",
    "usage": "strategy expert size asked used",
    "switches": "strategy step t rate ever",
    "landing": "strategy cluster landed served others own heldout_others",
    "stability": "strategy samples sensitivity sensitivity_se refinement refinement_se",
    "lipschitz": "strategy step t foreseen",
    "nearest": "cluster samples suspicious memorised memorised_heldout distance distance_heldout",
    "suspicious": "cluster ratio why",
    "closest": "cluster ratio why",
    "pairs": "strategy space partner pairs mean low high effect higher",
    "guidance": "model guidance distance precision recall",
    "best": "model guidance distance edge ratio",
    "curve": "model share train_flops of_monolith distance precision recall",
    "reach": "model target train_flops of_monolith how",
}
"""Columns that a table of this name has at least; a table may have more."""


class Frozen(File):
    """`campaign.json`: the settings, fixed when the campaign started."""

    FORMAT, PLACE, ERROR = "atoll/campaign", "campaign.json", ConfigError
    REMEDY = "use the version of Atoll that made the campaign, or start a new one"

    code: str
    """Version of Atoll."""
    overrides: list[str] = []
    """`--set` assignments that `campaign.yaml` does not hold."""
    config: dict[str, Any]
    """Every setting, resolved."""


class FrozenStudent(File):
    """`student.json`: the student's settings, fixed when it was added."""

    FORMAT, PLACE, ERROR = "atoll/student", "student/student.json", ConfigError
    REMEDY = "use the version of Atoll that made the campaign, or start a new one"

    code: str
    """Version of Atoll."""
    student: dict[str, Any]
    """The settings of the group `student`."""


class MetricsLine(File):
    """A line of `metrics.jsonl`: a step of training, or a validation. Tasks may add fields of their own."""

    FORMAT, PLACE, HEADED = "atoll/metrics", "ROLE/run/metrics.jsonl", False
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: int = 0
    """Optimizer steps so far."""
    samples: int
    """Training samples so far."""
    loss: float | None = None
    """Training loss of this step."""
    lr: float | None = None
    """Learning rate of this step."""
    grad_norm: float | None = None
    """Norm of its gradient before clipping."""
    accuracy: float | None = None
    """Share of its batch whose cluster the router found."""
    skipped: int | None = None
    """Steps that the guard has left out so far."""
    seconds: float | None = None
    """Time spent in steps, over all restarts."""
    times: tuple[float, ...] = ()
    """Times t of the validation that this line is of; empty for a line of steps."""
    validation: tuple[float | None, ...] = ()
    """Validation loss at each of these times."""
    accuracy_by_time: tuple[float | None, ...] = ()
    """Share of held-out rows whose cluster the router finds, at each of these times."""
    validation_loss: float | None = None
    """Mean of `validation`."""
    validation_seconds: float | None = None
    """Time that this validation took; it is not part of `seconds`."""


class Table(Config):
    """A table of measured values."""

    columns: tuple[str, ...]
    """Names."""
    rows: list[list[Any]]
    """Values, in the order of the columns."""

    @classmethod
    def of(cls, columns: Sequence[str], rows: list[list[Any]]) -> Self:
        """A table of these columns."""
        return cls(columns=tuple(columns), rows=rows)

    @classmethod
    def stacked(cls, column: str, tables: Mapping[str, Self]) -> Self:
        """Tables of the same columns, one below the other, led by a column of their names."""
        (columns,) = {table.columns for table in tables.values()}
        return cls.of((column, *columns), [[name, *row] for name, one in tables.items() for row in one.rows])

    def to_csv(self) -> bytes:
        """As CSV; what there is no value of is empty."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue().encode()

    @cached_property
    def records(self) -> list[Record]:
        """Rows as mappings by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError("a row of a table has not as many values as the table has columns")
            for column, value in zip(self.columns, row, strict=True):
                if column in WORDS or value is None or column not in _NUMBERS:
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise ValueError(f"a table's {column} is no number")
        return self


_NUMBERS = {name for columns in COLUMNS.values() for name in columns.split()}


class _Tables(File):
    model_config = ConfigDict(extra="allow")

    key: str = ""
    """Digest of what was measured and how: the same is not measured again."""
    code: str = ""
    """Version of Atoll."""
    seconds: float = 0.0
    """That it took."""
    parts: dict[str, str] = {}
    """Digest of the weights of each network that was measured."""
    tables: dict[str, Table] = {}
    """What was measured, by name; the same as the CSV files beside it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, table in self.tables.items():
            missing = set(COLUMNS.get(name, "").split()) - set(table.columns)
            if table.rows and missing:
                raise ValueError(f"the table {name} lacks {', '.join(sorted(missing))}")
        return self

    def records(self, table: str) -> list[Record]:
        """Rows of a table; none where it was not measured."""
        return self.tables[table].records if table in self.tables else []

    @classmethod
    def known(cls, store: Store, key: str) -> Self | None:
        """What was measured before, where it is of this version and this key."""
        content = store.get_json(cls.PLACE) if store.exists(cls.PLACE) else {}
        fits = cls.fits(content) and content.get("key") == key
        return cls.of_json(content, store.name(cls.PLACE)) if fits else None

    def csv_tables(self) -> dict[str, Table]:
        """Tables that lie beside the JSON as CSV."""
        return self.tables

    def write(self, store: Store) -> None:
        """Write the file and, before it, its tables as CSV; those of other settings are deleted."""
        folder = self.PLACE.removesuffix(".json")
        tables = {f"{folder}/{name}.csv": table for name, table in self.csv_tables().items()}
        for key in store.list(folder):
            if key.endswith(".csv") and key not in tables:
                store.delete(key)
        for key, table in tables.items():
            store.put(key, table.to_csv())
        store.put_json(self.PLACE, self.to_json())


class ComparedModel(Config):
    """A row of the comparison: the monolith, the student, or the ensemble under one routing."""

    model_config = ConfigDict(extra="allow")

    name: str
    """`monolith`, `student`, or the routing."""
    distance: float | None = None
    """Fréchet distance to the reference."""
    precision: float | None = None
    """Share of samples that lie among real pictures."""
    recall: float | None = None
    """Share of real pictures that lie among samples."""
    seconds: float | None = None
    """Of sampling."""
    gflops_per_step: float | None = None
    """Operations of a sample at a step of the sampler, in 1e9, for one branch of guidance."""
    experts_per_step: float | None = None
    """Experts that are evaluated for a sample at a step."""
    router_calls_per_step: float | None = None
    """How often the router is."""
    router_share: float | None = None
    """Part of the operations that is the router's."""

    @cached_property
    def routing(self) -> Routing | None:
        """The routing of this name; None for a dense model, and for a function of the user's own."""
        with suppress(ConfigError):
            return Routing.named(self.name)
        return None


class Comparison(_Tables):
    """`compare.json`: every model's distance under the same conditions, noise and judge."""

    FORMAT, PLACE = "atoll/comparison", "reports/compare.json"
    ERROR, REMEDY = DataError, "run 'atoll compare' again"

    default: str | None = None
    """Routing that the campaign samples with."""
    metric: dict[str, Any]
    """What the distance is: `distance` (a sentence), then the extractor, axes, reference, samples, steps,
    guidance, sampler and seed; `real_training_pictures`, the floor; `neighbours` of precision and recall."""
    departures: dict[str, list[float]] = {}
    """Of `steps` and `guidance` those that are not `sampling`'s, each with what `sampling` says."""
    rows: list[ComparedModel]
    """The models."""
    prompts: list[str]
    """Captions of the pictures that are shown, in `reports/compare/MODEL/NN.png`."""
    clusters: list[int]
    """Cluster of the training picture that each caption is of."""
    routing: dict[str, Weights]
    """What the router said of them, by routing."""
    train_flops: dict[str, float | None] = {}
    """Operations of training, by part: monolith, experts, router, pretrain, student."""
    sweep: dict[str, Any] | None = None
    """What the guidance sweep was of; none where there was none."""
    curve: dict[str, Any] | None = None
    """The same of the training curve."""

    def csv_tables(self) -> dict[str, Table]:
        """Its tables, and the models as `models.csv`."""
        columns = list(ComparedModel.model_fields)
        models = Table.of(columns, [[getattr(row, name) for name in columns] for row in self.rows])
        return {"models": models, **self.tables}

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.clusters) != len(self.prompts):
            raise ValueError("prompts and clusters differ in number")
        return self

    def row(self, name: str | None) -> ComparedModel | None:
        """The row of this name."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def best(self) -> ComparedModel | None:
        """The routing of the smallest distance. `oracle` is told the cluster, so it does not compete."""
        rows = [r for r in self.rows if r.name not in BESIDE and not (r.routing and r.routing.needs_labels)]
        return min((r for r in rows if r.distance is not None), key=lambda r: r.distance or 0.0, default=None)

    def ratio(self, row: ComparedModel | None) -> float | None:
        """Distance over the monolith's."""
        base = self.row(BASELINE)
        if row is None or row.distance is None or base is None or not base.distance:
            return None
        return row.distance / base.distance


class PicturePair(Config):
    """A sample and the training picture that it is nearest to."""

    model_config = ConfigDict(extra="allow")

    sample: str
    """Key of the sample."""
    training: str
    """Key of the training picture."""
    caption: str
    """What was sampled."""


class Diagnosis(_Tables):
    """`diagnostics.json`: why the ensemble is as good as it is."""

    FORMAT, PLACE = "atoll/diagnosis", "reports/diagnostics.json"
    ERROR, REMEDY = DataError, "run 'atoll diagnose' again"

    settings: dict[str, Any]
    """Of the group `diagnose`, and the seed."""
    k: int = 0
    """Number of clusters."""
    sizes: list[int] = []
    """Training rows of each."""
    missing: list[int]
    """Numbers of the experts that were not there."""
    strategies: list[str]
    """Routings that were sampled."""
    departures: dict[str, list[float]] = {}
    """Of `steps` and `guidance` those that are not `sampling`'s, each with what `sampling` says."""
    copies: dict[str, Any] | None
    """How copies of training pictures were looked for, and `leaked`: held-out pictures that are copies."""
    pictures: list[PicturePair]
    """The suspicious samples, in the order of their table."""
    closest: list[PicturePair] = []
    """Of each cluster the sample nearest to a training picture."""

    @property
    def splits(self) -> list[str]:
        """Rows that were measured, `heldout` or `train`; the first is the one that is shown."""
        return list(self.settings["splits"])

    @model_validator(mode="after")
    def _has_splits(self) -> Self:
        if not isinstance(self.settings.get("splits"), list) or not self.settings["splits"]:
            raise ValueError("settings.splits is missing")
        return self

    def select(self, table: str, **where: Any) -> list[Record]:
        """Rows of a table that have these values; of the first split, unless another is asked for."""
        rows = self.records(table)
        if rows and "split" in rows[0]:
            where = {"split": self.splits[0], **where}
        return [row for row in rows if all(row[name] == value for name, value in where.items())]


class SeedsTable(File):
    """`seeds.json`: what comparisons of several seeds have in common."""

    FORMAT, PLACE = "atoll/seeds", "reports/seeds.json"
    ERROR, REMEDY = DataError, "run 'atoll compare' again"

    code: str
    """Version of Atoll."""
    metric: dict[str, Any]
    """What the distance is, as in the first comparison."""
    campaigns: list[dict[str, Any]]
    """Place, seed, and key of the comparison of each."""
    columns: tuple[str, ...]
    """Of the table."""
    rows: list[list[Any]]
    """One for each number of each model."""
