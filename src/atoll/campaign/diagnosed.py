"""What `atoll diagnose` measured of a campaign: the typed tables of `diagnostics.json`."""

from typing import Any, Literal, Self

from pydantic import model_validator

from atoll.base.config import Config
from atoll.base.errors import DataError
from atoll.base.table import Tables, column
from atoll.campaign.measured import Cluster, Number, Report, Time


class OfSplit(Config):
    """A row measured on a split. `_se`: standard error of the column before it, as of independent rows."""

    split: str = column("Rows that were measured: `heldout` or `train`.", default="")


class OfCluster(OfSplit):
    """A row by time and cluster."""

    t: Time = column("Time, or `mean`: over the times below 1 of each row.")
    cluster: Cluster = column("Of the rows; `all` are those whose cluster has an expert.")


class OfStrategy(Config):
    """A row of a table that is measured on samples; `_se` as above, over samples."""

    strategy: str = ""
    """Routing that was sampled; of `stability` and `lipschitz` the `monolith` too."""


class RouterRow(OfSplit):
    """The router at one time, over all rows."""

    t: float = column("Time that it was asked at.")
    rows: int = column("Their number.")
    nll: Number = column("Mean of -log p(own cluster).", "nats")
    nll_se: Number = column(unit="nats")
    accuracy: Number = column("Share of rows whose own cluster is the likeliest.", "share")
    accuracy_se: Number = column(unit="share")
    confidence: Number = column(unit="share")
    """Mean probability of the likeliest; above the accuracy it is too sure."""
    ece: Number = None
    """Expected calibration error: the mean over bins of |accuracy - confidence|, weighted by their rows (Guo
    et al. 2017, arXiv 1706.04599)."""
    ece_chance: Number = None
    """What a perfectly calibrated router would get from so few rows (bins' normal approximation, sqrt(2 / pi)
    of a standard deviation each); an ece near it says nothing against the router."""
    temperature: Number = None
    """The tried one that the logits, divided by it, are likeliest at (same paper); chosen on these rows."""
    nll_tempered: Number = column("What that gives.", "nats")
    prior_nll: Number = column("Of the training shares as everybody's answer.", "nats")
    prior_accuracy: Number = column("Likewise.", "share")
    prior_entropy: Number = column(unit="nats")
    """Of these shares: what prior_nll is where the rows are shared out alike."""


class RouterClusterRow(OfSplit):
    """The same by the cluster that rows belong to; accuracy is then the share that is found (recall)."""

    t: float = column("Time.")
    cluster: int = column("Of the rows.")
    rows: int = column("Their number.")
    nll: Number = column("Mean of -log p(own cluster).", "nats")
    nll_se: Number = column(unit="nats")
    accuracy: Number = column("Share of rows whose own cluster is the likeliest.", "share")
    accuracy_se: Number = column(unit="share")


class ReliabilityRow(OfSplit):
    """A bin of the reliability diagram; empty ones are left out."""

    t: float = column("Time.")
    low: float = column("Lower end of the bin of confidence.")
    high: float = column("Its upper end.")
    rows: int = column("Rows in it.")
    confidence: float = column("Their mean confidence.")
    accuracy: float = column("Their accuracy.")


class ErrorRow(OfCluster):
    """Error of one way to answer, by time and cluster of the row."""

    model: str
    """Who answers: the cluster's own expert, the router's first choice, the mean of the others, the mixture
    weighted by the router, or the monolith."""
    rows: int = column("Their number.")
    error: Number = column("Mean over rows and dimensions of (v - (eps - x0))^2.")
    se: Number


class DifferenceRow(OfCluster):
    """Difference of two errors, taken row by row, so its standard error is that of pairs."""

    gap: str
    """First less second: `selected-own` is what the router's choice costs against being told the cluster;
    below 0 in `selected-monolith` the ensemble wins."""
    rows: int = column("Their number.")
    difference: Number = column("Mean over rows.")
    se: Number


class ExpertRow(OfCluster):
    """Error of an expert on a cluster's rows: lowest on its own if experts specialise (arXiv 2602.02685)."""

    expert: int = column("Its number.")
    rows: int = column("Number of rows.")
    error: Number = column("Mean over rows.")
    se: Number


class MissingRow(OfCluster):
    """What is lost without an expert. Nothing is sampled."""

    expert: int = column("Who is missing.")
    rows: int = column("Number of rows.")
    loss: Number
    """The mixture's error when the expert's weight is shared out among the others in proportion to theirs,
    less the whole mixture's."""
    se: Number


class DisagreementRow(OfCluster):
    """How far experts differ at one state."""

    rows: int = column("Number of rows.")
    angle: Number = column(unit="degrees")
    """Between the velocities of two experts, mean over all pairs (arXiv 2602.02685)."""
    angle_se: Number = column(unit="degrees")
    spread: Number
    """Mean-square distance of an expert drawn by the router's weights to the mixture: the error of drawing
    less that of mixing (ambiguity; Krogh and Vedelsby 1995)."""
    spread_se: Number


class UsageRow(OfStrategy):
    """How much an expert is used."""

    expert: int = column("Its number.")
    size: float = column("Share of the training rows.", "share")
    asked: float = column(unit="share")
    """Share of the samples whose condition comes from a row of this cluster: what a router that knows all
    would come to."""
    used: Number = column("Mean weight over samples and steps.", "share")
    used_se: Number = column(unit="share")
    first: Number = column("Mean weight at the first step, next to pure noise.", "share")


class SwitchRow(OfStrategy):
    """How often the leading expert changes along a trajectory."""

    step: int | Literal["all"] = column("Where the new expert takes over; `all` is the whole trajectory.")
    t: Number = column("Time of that step.")
    rate: Number = column("Mean over samples: of `all` the share of passages between steps that change.")
    se: Number
    ever: float = column("Share of the samples that change by then at least once.")


class ClusterMatchRow(OfStrategy):
    """Samples by the expert that served them most, beside held-out pictures of its cluster, by Euclidean
    distances between features of unit length and centroids."""

    cluster: Cluster = column("Number of the expert.")
    samples: int = column("That it served.")
    landed: Number = column("Share whose nearest centroid is that of the expert.", "share")
    landed_se: Number = column(unit="share")
    served: Number
    """Distance to the centroids of the experts that served a sample, by their weights."""
    served_se: Number
    others: Number = column("Distance to the other centroids, by what the weights leave of 1.")
    others_se: Number
    heldout: int = column("Held-out pictures of the cluster.")
    own: Number = column("As `served`, of held-out pictures, which are wholly their cluster's.")
    own_se: Number
    heldout_others: Number = column("As `others`, of held-out pictures.")
    heldout_others_se: Number


class StabilityRow(OfStrategy):
    """How the ends of paths react to small changes."""

    samples: int = column("That were sampled again.")
    sensitivity: Number
    """How much farther the ends of a sample and of its nudged twin are apart than their starts were, where a
    change of expert counts."""
    sensitivity_se: Number
    refinement: Number
    """Root mean square of what twice the steps change in a sample, in units of the latents."""
    refinement_se: Number


class LipschitzRow(OfStrategy):
    """How fast the field changes around the states of one step."""

    step: int = column("Number of the step.")
    t: float = column("Its time.")
    samples: int = column("That were probed.")
    lipschitz: Number = column("Of the velocity, along one random direction: a lower bound on average.")
    lipschitz_se: Number
    foreseen: Number = column("The same of the picture that is foreseen, x - t v.")
    foreseen_se: Number


class NearestRow(Config):
    """Samples by the expert that served them, beside held-out pictures of that cluster."""

    cluster: Cluster | Literal["monolith"]
    """Number of the expert; `monolith` is all samples of the monolith."""
    samples: int = column("That it served.")
    suspicious: Number = column(unit="share")
    """Share nearer to a training picture than the quantile of held-out pictures, by ratio or by distance; by
    chance up to twice the quantile."""
    memorised: Number = column("Share with a ratio under 1/3.", "share")
    ratio: Number = column("Median of nearest over second nearest.")
    distance: Number = column("Median of the Euclidean distance to the nearest.")
    heldout: int = column("Held-out pictures of the cluster.")
    memorised_heldout: Number = column(unit="share")
    """As `memorised`, of the held-out pictures that are no training pictures."""
    ratio_heldout: Number = column("Likewise.")
    distance_heldout: Number = column("Likewise.")
    leaked: Number = column("Share of the held-out pictures that are training pictures too.", "share")


class CopyRow(Config):
    """A sample and the training row that it is nearest to."""

    sample: int = column("Its number.")
    cluster: int = column("Whose expert served it.")
    row: int = column("The training row.")
    ratio: Number = column("Distance to the nearest over that to the second nearest.")
    distance: Number = column("To the nearest.")
    why: str = column("`copy`, `ratio`, `distance`, several of them, or nothing.")


class DiagnosisTables(Tables):
    """What a diagnosis measures."""

    router: tuple[RouterRow, ...] | None = column("The router at every time.", default=None)
    router_clusters: tuple[RouterClusterRow, ...] | None = column("By cluster.", default=None)
    reliability: tuple[ReliabilityRow, ...] | None = column("Confidence against accuracy.", default=None)
    errors: tuple[ErrorRow, ...] | None = column("Of the ways to answer.", default=None)
    differences: tuple[DifferenceRow, ...] | None = column("Between them.", default=None)
    experts: tuple[ExpertRow, ...] | None = column("Every expert on every cluster.", default=None)
    missing: tuple[MissingRow, ...] | None = column("Without each expert.", default=None)
    disagreement: tuple[DisagreementRow, ...] | None = column("Between experts.", default=None)
    usage: tuple[UsageRow, ...] | None = column("Of the experts while sampling.", default=None)
    switches: tuple[SwitchRow, ...] | None = column("Between experts while sampling.", default=None)
    stability: tuple[StabilityRow, ...] | None = column("Of paths.", default=None)
    lipschitz: tuple[LipschitzRow, ...] | None = column("Of fields along paths.", default=None)
    nearest: tuple[NearestRow, ...] | None = column("Distances to training pictures.", default=None)
    suspicious: tuple[CopyRow, ...] | None = None
    """The most suspicious samples, nearest by ratio first."""
    closest: tuple[CopyRow, ...] | None = None
    """Of every cluster whose expert served a sample the nearest one."""
    landing: tuple[ClusterMatchRow, ...] | None = column("Where samples end.", default=None)


class PicturePair(Config):
    """A sample and the training picture that it is nearest to."""

    sample: str = column("Key of the sample.")
    training: str = column("Key of the training picture.")
    caption: str = column("Of the training picture.")
    id: str = column("Of the training picture's row.", default="")


class Diagnosis(Report):
    """`diagnostics.json`: why the ensemble is as good as it is."""

    FORMAT, PLACE = "atoll/diagnosis", "reports/diagnostics.json"
    ERROR, REMEDY = DataError, "run 'atoll diagnose' again"

    settings: dict[str, Any] = column("Of the group `diagnose`, and the seed.")
    k: int = column("Number of clusters.", default=0)
    sizes: list[int] = column("Training rows of each.", default=[])
    missing: list[int] = column("Numbers of the experts that were not there.")
    strategies: list[str] = column("Routings that were sampled.")
    copies: dict[str, Any] | None
    """How copies of training pictures were looked for, and `leaked`: held-out pictures that are copies."""
    pictures: list[PicturePair] = column("The suspicious samples, in the order of their table.")
    closest: list[PicturePair] = []
    """Of each cluster the sample nearest to a training picture."""
    tables: DiagnosisTables = DiagnosisTables()
    """What was measured; the same as the CSV files beside it."""

    @model_validator(mode="after")
    def _has_splits(self) -> Self:
        if not isinstance(self.settings.get("splits"), list) or not self.settings["splits"]:
            raise ValueError("settings.splits is missing")
        return self

    @property
    def splits(self) -> list[str]:
        """Rows that were measured, `heldout` or `train`; the first is the one that is shown."""
        return list(self.settings["splits"])

    def select(self, table: str, **where: Any) -> list[Any]:
        """Typed rows of a table that have these values; of the first split, unless another is asked for."""
        rows = getattr(self.tables, table) or ()
        if rows and isinstance(rows[0], OfSplit):
            where = {"split": self.splits[0], **where}
        return [row for row in rows if all(getattr(row, name) == value for name, value in where.items())]
