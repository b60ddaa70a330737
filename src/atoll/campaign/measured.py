"""What was measured of a campaign: the typed tables of its reports, which pages and cards read."""

from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File
from atoll.base.hashing import digest
from atoll.base.table import Table, Tables, column, ratio_of
from atoll.campaign.roles import BASELINE, BESIDE
from atoll.model.routing import Routing
from atoll.store.store import Store

BASE = BASELINE
"""The model that others are compared with."""
Weights = list[list[list[float]]]
"""Weights of the experts, `[step][picture][expert]`, from noise to data."""
Number = float | None
Time = float | Literal["mean"]
Cluster = int | Literal["all"]
Partner = Literal["same noise", "same cluster", "any"]
How = Literal["between points", "at the first point", "never"]


# Points.


class Protocol(Config):
    """How something was measured."""

    extractor: str = column("Name of the extractor.")
    extractor_hash: str = column("Digest of its weights.")
    extractor_size: int = column("Side in pixels that it sees.")
    extractor_token: str | None = column("What of a DINOv2 is the feature.", default=None)
    resize: str = column("How pictures are brought to that size.")
    rounding: str = column("How pictures became 8 bits a channel.")
    picture_size: tuple[int, int] = column("Width and height of the judged pictures, in pixels.")
    reference: str = column("What they were held against, as the user called it.")
    reference_hash: str = column("Digest of its pictures.")
    reference_split: str | None = column("Which rows of a data set.", default=None)
    reference_count: int = column("Its number of pictures.")
    samples: int = column("Number of judged pictures.")
    conditions: str | None = None
    """Whose captions or labels were sampled; none for a folder of pictures, as everything below."""
    conditions_hash: str | None = column("Digest of these rows.", default=None)
    sampler: str | None = column("How the flow was integrated.", default=None)
    steps: int | None = column("Steps of the sampler.", default=None)
    guidance: float | None = column("Scale of classifier-free guidance.", default=None)
    shift: float | str | None = column("Time shift of the sampler; none for 1.", default=None)
    routing: str | None = column("Routing strategy; none for a single network.", default=None)
    seed: int | None = column("Of noise and routing.", default=None)
    ema: bool | None = column("Whether weights were averages over the training.", default=None)
    code: str = column("Version of Atoll.")


class MeasuredValue(Config):
    """One number of a point."""

    label: str
    """What it may be called: FID is the distance on Inception's features and nowhere else."""
    value: float = column("The number.")
    deviation: float | None = None
    """Standard deviation over subsets or pictures; none for a single number."""
    settings: dict[str, Any] = column("What decides it beside the protocol.")
    notes: tuple[str, ...] = column("What a reader of the number must know with it.", default=())


class MeasuredPoint(File):
    """One model, or one folder of pictures, measured under one protocol."""

    FORMAT, PLACE = "atoll/point", "reports/points/KEY.json"
    ERROR, REMEDY = DataError, "measure again: atoll evaluate, or atoll compare"

    subject: dict[str, Any] = column("What was judged: `name`, and the digests of its weights or pictures.")
    protocol: Protocol = column("How.")
    values: dict[str, MeasuredValue] = column("Numbers by metric.")
    cost: dict[str, float | None] = {}
    """Seconds of all processes together; of a model also what a step of one sample takes."""

    @property
    def key(self) -> str:
        """Names the point: subject, protocol, and which metrics with what settings."""
        settings = {name: value.settings for name, value in self.values.items()}
        return point_key(self.subject, self.protocol, settings)

    def number(self, metric: str) -> float | None:
        """The value of a metric; None where it was not measured."""
        return self.values[metric].value if metric in self.values else None


def point_key(subject: dict[str, Any], protocol: Protocol, settings: dict[str, dict[str, Any]]) -> str:
    """Digest of everything that decides a point: not what the reference is called, nor Atoll's version,
    whose changes of numbers raise `MeasuredPoint.VERSION`."""
    decisive = protocol.model_dump(mode="json", exclude={"reference", "code"})
    tree = {"version": MeasuredPoint.VERSION, "subject": subject, "protocol": decisive, "metrics": settings}
    return digest(tree)[:16]


class Report(File):
    """What a comparison and a diagnosis have in common as files."""

    key: str = column("Digest of what was measured and how: the same is not measured again.", default="")
    code: str = column("Version of Atoll.", default="")
    seconds: float = column("That it took.", default=0.0)
    parts: dict[str, str] = column("Digest of the weights of each network that was measured.", default={})
    tables: Tables
    overrides: dict[str, list[float]] = {}
    """Of `steps` and `guidance` those that are not `sampling`'s, each with what `sampling` says."""

    @classmethod
    def known(cls, store: Store, key: str) -> Self | None:
        """What was measured before, where it is of this version and this key."""
        content = store.get_json(cls.PLACE) if store.exists(cls.PLACE) else {}
        fits = isinstance(content, dict) and {**cls.header(), "key": key}.items() <= content.items()
        return cls.of_json(content, store.name(cls.PLACE)) if fits else None

    def csv_tables(self) -> dict[str, Table]:
        """Tables that lie beside the JSON as CSV."""
        return self.tables.present()

    def write(self, store: Store) -> None:
        """Write the file and, before it, its tables as CSV; those of other settings are deleted."""
        folder = self.PLACE.removesuffix(".json")
        tables = {f"{folder}/{name}.csv": table for name, table in self.csv_tables().items()}
        # A table that was not measured this time would be taken for one of this file.
        store.delete(*(key for key in store.list(folder) if key.endswith(".csv") and key not in tables))
        for key, table in tables.items():
            store.put(key, table.to_csv())
        store.put_json(self.PLACE, self.to_json())


# What `atoll compare` measures.


class ComparedModel(Config):
    """A row of the comparison: the monolith, the student, or the ensemble under one routing."""

    name: str = column("`monolith`, `student`, or the routing.")
    distance: Number = column("Fréchet distance to the reference.", default=None)
    precision: Number = column("Share of samples that lie among real pictures.", "share", default=None)
    recall: Number = column("Share of real pictures that lie among samples.", "share", default=None)
    seconds: Number = column("Of sampling.", "s", default=None)
    gflops_per_step: Number = column(unit="GFLOPs", default=None)
    """Operations of a sample at a step of the sampler; with guidance the mean of both branches."""
    experts_per_step: Number = column("Experts that are evaluated for it, likewise.", default=None)
    router_calls_per_step: Number = column("Router calls, of both branches together.", default=None)
    router_share: Number = column("Part of the operations that is the router's.", "share", default=None)

    @cached_property
    def routing(self) -> Routing | None:
        """The routing of this name; None for a dense model, and for a function of the user's own."""
        with suppress(ConfigError):
            return Routing.named(self.name)
        return None


class GuidanceRow(Config):
    """A model at one guidance scale."""

    model: str = column("A single network, or a routing of the ensemble.")
    guidance: float = column("Scale of classifier-free guidance.")
    distance: Number = column("As in the comparison, like the two that follow.")
    precision: Number = column("Likewise.")
    recall: Number = column("Likewise.")


class BestRow(GuidanceRow):
    """A model at its own best guidance: the smallest distance, of equal ones the smaller scale."""

    edge: str
    """`low` or `high` where the best is at an end of the scales, so that a better one may lie beyond."""
    ratio: Number = column("Its distance over that of the monolith at its own best.")


class CurveRow(Config):
    """A model after a part of its training."""

    model: str = column("A single network, or a routing of the ensemble.")
    share: float = column("Part of its own training; of an ensemble, of its experts'.")
    train_flops: float = column("Operations spent by then.", "FLOPs")
    of_monolith: Number = column("The same over the whole of the monolith's.")
    distance: Number = column("As in the comparison, like the two that follow.")
    precision: Number = column("Likewise.")
    recall: Number = column("Likewise.")


class ReachRow(Config):
    """When a model is as good as the finished monolith. The monolith's own row is what the others are read
    against: it comes before its end where the monolith no longer improves, or by the noise of distances."""

    model: str = column("A single network, or a routing of the ensemble.")
    target: float = column("The monolith's final distance.")
    train_flops: Number = column("Operations that were spent by then; none if it never was.", "FLOPs")
    of_monolith: Number = column("The same over the whole of the monolith's.")
    how: How
    """Interpolated `between points`; `at the first point` it was as good already, and maybe before."""


class PairRow(Config):
    """Correlations of the monolith's samples with a strategy's, for one way to choose partners."""

    strategy: str = column("Of the ensemble.")
    space: Literal["pixels", "features"] = column("What is correlated.")
    partner: Partner = column("Which sample each is paired with.")
    pairs: int = column("Number of them.")
    mean: Number = column("Mean Pearson correlation.")
    deviation: Number = column("Sample standard deviation.")
    low: Number = column("Lower end of the mean's 95 % interval (normal).")
    high: Number = column("Its upper end.")
    effect: Number = column("How far the same noise is above it, in pooled standard deviations (Cohen's d).")
    higher: Number = column("Share of samples whose partner of the same noise correlates more than this one.")


class ComparisonTables(Tables):
    """What a comparison measures beside its models."""

    guidance: tuple[GuidanceRow, ...] | None = column("Every model at every scale.", default=None)
    best: tuple[BestRow, ...] | None = column("Each model at its own best scale.", default=None)
    curve: tuple[CurveRow, ...] | None = column("Every model after every part of its training.", default=None)
    reach: tuple[ReachRow, ...] | None = None
    """When each model is as good as the finished monolith."""
    pairs: tuple[PairRow, ...] | None = column("Whether the same noise gives similar pictures.", default=None)


SAID: dict[str, Any] = {
    **dict.fromkeys(("distance", "reference"), str),
    **dict.fromkeys(("reference_rows", "samples", "steps"), int),
    "guidance": int | float,
}
"""What model cards say of a comparison's distance, and of which type it is."""


class Comparison(Report):
    """`compare.json`: every model's distance under the same conditions, noise and judge."""

    FORMAT, PLACE = "atoll/comparison", "reports/compare.json"
    ERROR, REMEDY = DataError, "run 'atoll compare' again"

    default: str | None = column("Routing that the campaign samples with.", default=None)
    metric: dict[str, Any]
    """What the distance is: `distance` (a sentence), then the extractor, axes, reference, samples, steps,
    guidance, sampler and seed; `real_training_pictures`, the floor; `neighbours` of precision and recall."""
    rows: list[ComparedModel] = column("The models.")
    prompts: list[str] = column("Captions of the pictures that are shown, in `reports/compare/MODEL/NN.png`.")
    clusters: list[int] = column("Cluster of the training picture that each caption is of.")
    routing: dict[str, Weights] = column("What the router said of them, by routing.")
    train_flops: dict[str, float | None] = {}
    """Operations of training, by part: monolith, experts, router, pretrain, student."""
    sweep: dict[str, Any] | None = None
    """What the guidance sweep was of; none where there was none."""
    curve: dict[str, Any] | None = column("The same of the training curve.", default=None)
    tables: ComparisonTables = ComparisonTables()
    """What was measured beside the models; the same as the CSV files beside it."""

    def csv_tables(self) -> dict[str, Table]:
        """Its tables, and the models as `models.csv`."""
        return {"models": Table.of(ComparedModel, self.rows, "models"), **super().csv_tables()}

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        if len(self.clusters) != len(self.prompts):
            raise ValueError("prompts and clusters differ in number")
        for key in SAID.keys() & self.metric.keys():
            if not isinstance(self.metric[key], SAID[key]):
                raise ValueError(f"metric.{key} is of another type")
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
        base = self.row(BASE)
        return ratio_of(row.distance if row else None, base.distance if base else None)
