"""Fréchet distance between two sets of features, in float64.

`d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))` (Dowson and Landau 1982; Heusel et al. 2017). With few
samples for many dimensions the covariances are singular, so features are projected on fixed principal
components first; the result is then named after its extractor and never called FID.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.measure.metrics.metric import How, Metric, Value
from atoll.measure.metrics.projection import F64, Moments, Projection
from atoll.measure.pictures import Features

ENOUGH = 10
"""Pictures per dimension, below which the bias of a Fréchet distance is said: it falls with their number."""


class Frechet(Metric):
    """Distance of Gaussians fitted to both sets, on some or all principal components."""

    names = ("frechet",)

    def label(self, name: str, how: How) -> str:
        """FID on all of Inception's features, and nowhere else."""
        if how.components < how.width:
            return f"Fréchet distance on {how.components} components of {how.extractor}"
        return "FID" if how.kind == "inception" else f"Fréchet distance on {how.extractor}"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        """The components, and which pictures fix them if they are not the reference's."""
        return {"components": how.components, **(how.axes.about if how.axes else {})}

    def check(self, how: How) -> None:
        for count, pictures in ((how.samples, "samples"), (how.references, "reference pictures")):
            must_be_regular(count, how.components, pictures, "fewer components: evaluate.components=N")

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        sets = samples.rows, reference.rows
        if how.components == how.width:
            moments = [Moments.of(rows) for rows in sets]
        else:
            axes = how.axes.projection() if how.axes else Projection.fit(reference.rows, how.components)
            moments = [Moments.of(axes.first(how.components)(rows)) for rows in sets]
        if not moments[1].rank:
            what = f"{how.extractor} sees no difference between any two of the reference pictures"
            raise DataError(what, "let it see larger ones: extractor_size")
        notes, named = list[str](), list(zip(("samples", "reference pictures"), moments, strict=True))
        for pictures, given in named:
            if given.rank < how.components:
                fill = f"they fill {given.rank} of {how.components} dimensions"
                notes.append(f"the covariance of the {pictures} is singular: {fill}")
        if few := [f"{m.count} {pictures}" for pictures, m in named if m.count < ENOUGH * how.components]:
            what = f"{' and '.join(few)} for {how.components} dimensions: so few make the distance larger"
            notes.append(f"{what} by themselves (compare it with one of as many, or take KID)")
        distance = frechet_of_moments(*(part for m in moments for part in (m.mean, m.covariance)))
        return {"frechet": Value(distance, None, tuple(notes))}


class Excess(Frechet):
    """The same in excess over real training pictures: it is 0 of what is as good as they are."""

    names = ("frechet-excess",)
    floor = True

    def label(self, name: str, how: How) -> str:
        return f"{super().label(name, how)} minus training pictures'"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        """The components, and which training pictures."""
        assert how.floor is not None  # `floor`
        return super().settings(name, how) | how.floor.about

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        assert how.floor is not None
        real = how.floor.features()
        own, least = (super(Excess, self).compute(how, of, reference)["frechet"] for of in (samples, real))
        notes, count = own.notes, len(real.rows)
        if count < len(samples.rows):  # of fewer pictures the distance is larger by itself
            few = f"only {count} training pictures for {len(samples.rows)} samples: the excess is too low"
            notes = (few, *notes)
        return {"frechet-excess": Value(own.value - least.value, None, notes)}


METRICS = (Frechet(), Excess())


def frechet_distance(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Squared distance between Gaussians fitted to features `(N, D)` and `(M, D)`.

    Raises:
        DataError: NaN, or fewer samples than dimensions (a singular covariance).
    """
    one, other = Moments.of(first), Moments.of(second)
    for moments in (one, other):
        must_be_regular(moments.count, len(moments.mean))
    return frechet_of_moments(one.mean, one.covariance, other.mean, other.covariance)


def must_be_regular(
    count: int, dimensions: int, pictures: str = "samples", fewer: str = "project on fewer components"
) -> None:
    """Refuse so few pictures that their covariance must be singular."""
    if count <= dimensions:
        what = f"{count} {pictures} for {dimensions} dimensions: the covariance is singular"
        raise DataError(what, f"give more {pictures}, or {fewer}")


def frechet_of_moments(m1: F64, c1: F64, m2: F64, c2: F64) -> float:
    """Squared Fréchet distance between two Gaussians of known mean `(D,)` and covariance `(D, D)`.

    Covariances may be singular. Equal ones give 0 up to rounding, which never makes it negative.
    """
    # tr (C1 C2)^(1/2) through the symmetric A C2 A with A = C1^(1/2): real and stable.
    values, vectors = np.linalg.eigh(c1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # Clipped: rounding leaves small negative eigenvalues, whose roots are NaN.
    middle = np.linalg.eigvalsh(root @ c2 @ root)
    trace = np.trace(c1) + np.trace(c2) - 2 * np.sqrt(middle.clip(0)).sum()
    return max(0.0, float(((m1 - m2) ** 2).sum() + trace))
