"""Whether samples are copies of training pictures.

In the features of an extractor, the distance of a sample to its nearest training picture is held against two
things: the distance to the second nearest, since a copy is much nearer to one picture than to any other (a
sample counts as memorised below a ratio of 1/3 in Yoon et al. 2023, "Diffusion Probabilistic Models
Generalize when They Fail to Memorize", and in arXiv 2310.02664), and what held-out pictures have, which
nobody copied. Where training pictures come in near copies the ratio says nothing, and the distance does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.base.table import finite
from atoll.campaign.diagnosed import CopyRow, NearestRow
from atoll.campaign.measured import Cluster
from atoll.measure.metrics.projection import must_be_finite

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MEMORISED = 1 / 3
"""Ratio below which a sample counts as memorised in the literature."""
SAME = 1e-3
"""Distance below which two pictures are the same, as a part of the features' own size: features of columns
are stored in float16."""
_QUERIES = 1024


@dataclass(frozen=True)
class Nearest:
    """The two training pictures nearest to each of N pictures.

    Attributes:
        distances: Euclidean, `(N, 2)`, rising; the second is infinite where there is one training picture.
        rows: of the data set `(N, 2)`.
        scale: length of each picture's own features `(N,)`.
    """

    distances: F64
    rows: I64
    scale: F64

    @property
    def ratio(self) -> F64:
        """Nearest over second nearest `(N,)`; 0 for a copy, even of a picture that is there twice."""
        first, second = self.distances.T
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient: F64 = np.where(self.same, 0.0, first / second)
        return quotient

    @property
    def same(self) -> NDArray[np.bool_]:
        """Whether the nearest is the very picture `(N,)`."""
        equal: NDArray[np.bool_] = self.distances[:, 0] <= SAME * self.scale
        return equal


def two_nearest(
    queries: NDArray[np.floating], reference: Iterable[tuple[I64, NDArray[np.floating]]]
) -> Nearest:
    """The two nearest to features `(N, D)` of a reference in parts, row numbers `(M,)` and features `(M, D)`
    each; `DataError` where it is empty, or a feature is NaN or infinite."""
    points = must_be_finite(queries)
    distances = np.full((len(points), 2), np.inf)
    rows = np.full((len(points), 2), -1, dtype=np.int64)
    seen = 0
    for numbers, features in reference:
        values = must_be_finite(features)
        seen += len(values)
        for first in range(0, len(points), _QUERIES):
            part = slice(first, first + _QUERIES)
            squared = (values**2).sum(1) - 2 * points[part] @ values.T
            few = np.argpartition(squared, min(1, len(values) - 1), axis=1)[:, :2]
            # The candidates' distances anew, without the cancellation that hides an exact copy.
            exact = np.linalg.norm(points[part][:, None] - values[few], axis=2)
            both, theirs = np.hstack([distances[part], exact]), np.hstack([rows[part], numbers[few]])
            order = np.argsort(both, axis=1, kind="stable")[:, :2]
            distances[part] = np.take_along_axis(both, order, 1)
            rows[part] = np.take_along_axis(theirs, order, 1)
    if not seen:
        raise DataError("there is no training picture to compare samples with", "ingest more rows")
    return Nearest(distances, rows, np.linalg.norm(points, axis=1))


@dataclass(frozen=True)
class Copies:
    """The nearest training pictures of samples and of held-out pictures, by cluster: that of the expert which
    served a sample most `(N,)`, and the held-out pictures' own `(M,)`. A `quantile` of those is the limit."""

    samples: Nearest
    heldout: Nearest
    served: I64
    clusters: I64
    quantile: float

    @property
    def limits(self) -> tuple[float, float] | None:
        """Ratio and distance that this quantile of the held-out pictures lie below.

        Those that are training pictures themselves are no measure and are left out; None if all are.
        """
        real = ~self.heldout.same
        if not real.any():
            return None
        measured = (self.heldout.ratio, self.heldout.distances[:, 0])
        ratio, distance = (float(np.quantile(values[real], self.quantile)) for values in measured)
        return ratio, distance

    def reasons(self) -> list[str]:
        """Why each sample is suspicious: `copy`, `ratio`, `distance`, several, or nothing."""
        ratio, distance = self.limits or (0.0, 0.0)
        tests = {
            "copy": self.samples.same,
            "ratio": self.samples.ratio < ratio,
            "distance": self.samples.distances[:, 0] < distance,
        }
        return [", ".join(n for n, hit in tests.items() if hit[i]) for i in range(len(self.served))]

    def by_cluster(self, k: int) -> list[NearestRow]:
        """Samples by the expert that served them, beside held-out pictures of that cluster; `all` first."""
        flagged = np.array([bool(reason) for reason in self.reasons()])
        clusters: list[Cluster] = ["all", *range(k)]
        rows = []
        for cluster in clusters:
            mine = np.full(len(self.served), True) if cluster == "all" else self.served == cluster
            real = np.full(len(self.clusters), True) if cluster == "all" else self.clusters == cluster
            values: dict[str, Any] = {
                "samples": int(mine.sum()),
                "suspicious": float(flagged[mine].mean()) if mine.any() else None,
                "heldout": int(real.sum()),
                "leaked": float(self.heldout.same[real].mean()) if real.any() else None,
            }
            # Held-out pictures that are training pictures themselves are no measure of what nobody copied.
            sides = (("", self.samples, mine), ("_heldout", self.heldout, real & ~self.heldout.same))
            for suffix, nearest, which in sides:
                ratio, distance = nearest.ratio[which], nearest.distances[which, 0]
                values |= {
                    f"memorised{suffix}": float((ratio < MEMORISED).mean()) if len(ratio) else None,
                    f"ratio{suffix}": finite(np.median(ratio)) if len(ratio) else None,
                    f"distance{suffix}": finite(np.median(distance)) if len(ratio) else None,
                }
            rows.append(NearestRow(cluster=cluster, **values))
        return rows

    def by_ratio(self) -> list[CopyRow]:
        """Every sample beside its nearest training row, nearest by ratio first; `why` may be empty."""
        reasons = self.reasons()
        order = np.lexsort((self.samples.distances[:, 0], self.samples.ratio))  # of equal ratios by distance
        return [
            CopyRow(
                sample=int(n),
                cluster=int(self.served[n]),
                row=int(self.samples.rows[n, 0]),
                ratio=finite(self.samples.ratio[n]),
                distance=finite(self.samples.distances[n, 0]),
                why=reasons[n],
            )
            for n in order
        ]

    def suspicious(self, most: int) -> list[CopyRow]:
        """The most suspicious samples."""
        return [row for row in self.by_ratio() if row.why][:most]

    def closest(self) -> list[CopyRow]:
        """Of every cluster whose expert served a sample the nearest one."""
        nearest = {row.cluster: row for row in reversed(self.by_ratio())}
        return [nearest[cluster] for cluster in sorted(nearest)]
