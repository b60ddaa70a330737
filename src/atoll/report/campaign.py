"""What a report knows of a campaign: small values, None or empty where a stage has not been yet."""

from dataclasses import dataclass
from typing import Any

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
class Plan:
    """The numbers of `island.json` that the page shows."""

    rows: int
    steps: int
    batch: int
    train_flops: float | None


@dataclass(frozen=True)
class Card:
    """What `card.json` of a published network says of itself, as far as the page shows it.

    Attributes:
        family: of the network.
        parameters: number of trainable numbers.
        samples: images seen.
        train_flops: operations spent.
        weights: SHA-256 of the weights.
        initial: SHA-256 of the initial weights.
        torch: version that trained it.
        latents: what made the latents.
        text: what made the text states.
        seconds: of training.
    """

    family: str
    parameters: int
    samples: int
    train_flops: float | None
    weights: str
    initial: str
    torch: str
    latents: dict[str, Any] | None
    text: dict[str, Any] | None
    seconds: float | None


@dataclass(frozen=True)
class Run:
    """One training run: its plan, how far it is, and what it logged.

    Attributes:
        role: `expert`, `router`, `monolith`, `pretrain` or `student`.
        island: number of the cluster, for an expert.
        plan: its numbers; None if they are not there.
        card: of the published network; None while there is none.
        losses: (images seen, training loss), finite ones.
        odd: logged training losses that are not finite.
        validation: last validation losses at the fixed times.
        accuracy: last accuracies at the fixed times, for the router.
        seen: images seen so far.
        spent: seconds of training so far.
    """

    role: str
    island: int | None
    plan: Plan | None
    card: Card | None
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
            return self.card.samples
        return self.plan.steps * self.plan.batch if self.plan else None

    @property
    def train_flops(self) -> float | None:
        """Operations of the whole run, as planned."""
        known = self.card or self.plan
        return known.train_flops if known else None

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
    """One row of the comparison: the monolith, the student or a routing strategy."""

    name: str
    distance: float | None
    seconds: float | None
    gflops: float | None
    experts: float | None
    router: float | None
    precision: float | None = None
    recall: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What `reports/compare.json` says, with the pictures beside it.

    Attributes:
        rows: monolith and student (if there are any) and strategies.
        metric: what the distance is.
        prompts: captions of the shown pictures, one line each.
        clusters: cluster of the training picture behind each prompt.
        routing: weights `[step][picture][expert]` by strategy, from noise to data.
        pictures: by strategy, `monolith`, `student` or `data`: one per prompt, None where it is missing.
        default: the strategy that the campaign samples with; None if the file does not say.
        tables: what was measured beyond, rows by name of the table, as mappings; empty in earlier files.
    """

    rows: tuple[Measured, ...]
    metric: dict[str, Any]
    prompts: tuple[str, ...]
    clusters: tuple[int, ...]
    routing: dict[str, Weights]
    pictures: dict[str, tuple[Picture | None, ...]]
    default: str | None
    tables: dict[str, list[dict[str, Any]]]

    def row(self, name: str) -> Measured | None:
        """The row of this name."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def strategies(self) -> tuple[Measured, ...]:
        """All rows of the ensemble."""
        return tuple(row for row in self.rows if row.name not in ("monolith", "student"))

    @property
    def best(self) -> Measured | None:
        """The strategy of the smallest distance. `oracle` is told the cluster, so it does not compete."""
        found = [
            row for row in self.strategies if row.distance is not None and not row.name.startswith("oracle")
        ]
        return min(found, key=lambda row: row.distance or 0.0, default=None)

    def ratio(self, row: Measured | None) -> float | None:
        """Distance over the monolith's."""
        base = self.row("monolith")
        if row is None or row.distance is None or base is None or not base.distance:
            return None
        return row.distance / base.distance


@dataclass(frozen=True)
class Pair:
    """A sample and the training picture that it is nearest to."""

    caption: str
    sample: Picture | None
    training: Picture | None


@dataclass(frozen=True)
class Diagnosis:
    """What `reports/diagnostics.json` says, with the pictures beside it.

    Attributes:
        tables: rows by name of the table, as mappings.
        splits: rows that were measured, `heldout` or `train`; the first is the one that is shown.
        strategies: that were sampled.
        settings: of the diagnosis.
        missing: numbers of the experts that were not there.
        leaked: held-out pictures that are training pictures too; None where nobody looked.
        pairs: suspicious samples, beside what they resemble.
        closest: of each cluster the sample nearest to a training picture; empty in earlier files.
    """

    tables: dict[str, list[dict[str, Any]]]
    splits: tuple[str, ...]
    strategies: tuple[str, ...]
    settings: dict[str, Any]
    missing: tuple[int, ...]
    leaked: int | None
    pairs: tuple[Pair, ...]
    closest: tuple[Pair, ...]

    def rows(self, table: str, **where: Any) -> list[dict[str, Any]]:
        """Rows of a table that have these values; of the first split, unless another is asked for."""
        found = self.tables.get(table, [])
        if found and "split" in found[0]:
            where = {"split": self.splits[0], **where}
        return [row for row in found if all(row[name] == value for name, value in where.items())]


@dataclass(frozen=True)
class Evaluation:
    """One report of `atoll evaluate`.

    Attributes:
        name: of the model or the folder of pictures.
        protocol: how it was measured.
        values: by metric: `label`, `value`, `deviation`, `settings`, `note`.
        stale: whether it is of other weights than are published now.
    """

    name: str
    protocol: dict[str, Any]
    values: dict[str, dict[str, Any]]
    stale: bool


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
        pretrain: the run that the experts start from; None where they start without one.
        student: the run that learns from the experts; None where there is none.
        comparison: None before `atoll compare`.
        diagnosis: None before `atoll diagnose`.
        stages: seconds by stage, where the quickstart wrote them.
        evaluations: reports of `atoll evaluate`, by name.
        stale: commands whose results are of other weights than those that are published now.
    """

    name: str
    code: str
    config: dict[str, Any]
    partition: Partition
    sheets: tuple[Picture | None, ...]
    experts: tuple[Run, ...]
    router: Run
    monolith: Run
    pretrain: Run | None
    student: Run | None
    comparison: Comparison | None
    diagnosis: Diagnosis | None
    stages: dict[str, float] | None
    evaluations: tuple[Evaluation, ...] = ()
    stale: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs that the campaign wants: the ensemble's, the monolith, the student."""
        return (*self.ensemble, *self.beside)

    @property
    def beside(self) -> tuple[Run, ...]:
        """The runs that the ensemble does without: the monolith, the student."""
        return (
            *((self.monolith,) if self.wants_monolith else ()),
            *((self.student,) if self.student else ()),
        )

    @property
    def ensemble(self) -> tuple[Run, ...]:
        """The runs that together cost what the monolith costs: experts, router, pretraining."""
        return (*self.experts, self.router, *((self.pretrain,) if self.pretrain else ()))

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
        """The routing strategy that the campaign samples with, as its comparison says."""
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
