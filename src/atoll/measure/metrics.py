"""The metrics by name: what each needs, what it is called, and its value."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from atoll.base.errors import ConfigError, DataError, nearest
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.measure.features import FeatureSet
from atoll.measure.frechet import Projection, frechet_between, must_be_regular, rank
from atoll.measure.kernels import CMMD_SCALE, CMMD_SIGMA, Spread, cmmd, kid
from atoll.measure.moments import Moments
from atoll.measure.neighbours import DENSITY_K, PRECISION_K, neighbourhoods

NEIGHBOURS = ("precision", "recall", "density", "coverage")
METRICS = ("frechet", "kid", "cmmd", *NEIGHBOURS, "clip-score")
PAIRWISE = ("kid", "cmmd", *NEIGHBOURS)
"""Those that need every picture's features, and not their moments alone."""
ENOUGH = 10
"""Pictures per dimension, below which the bias of a Fréchet distance is said: it falls with their number."""


@dataclass(frozen=True)
class Value:
    """One metric's value.

    Attributes:
        label: what it may be called.
        value: the number.
        deviation: standard deviation over subsets (KID) or pictures (CLIP score); None for a single number.
        settings: what else decides it.
        note: what a reader of the number must know beside it.
    """

    label: str
    value: float
    deviation: float | None
    settings: dict[str, Any]
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in a report."""
        return asdict(self)


def parse(names: str, kind: str, captioned: bool = True) -> list[str]:
    """Metrics out of `frechet,kid,...`.

    Args:
        names: separated by commas; `all` is every one that the extractor's kind allows.
        kind: of the extractor: FID is Inception's alone, and CLIP score CLIP's.
        captioned: whether the pictures have captions, without which there is no CLIP score.

    Raises:
        ConfigError: an unknown metric, one of another extractor, or one that captions are missing for.
    """
    if names.strip() == "all":
        return [name for name in METRICS if name != "clip-score" or (kind == "clip" and captioned)]
    found = []
    for name in (part.strip().lower() for part in names.split(",")):
        if name == "fid" and kind != "inception":
            raise ConfigError(
                "FID is the distance on Inception's features", "use frechet, or --extractor inception"
            )
        chosen = {"fid": "frechet"}.get(name, name)
        if chosen not in METRICS:
            raise ConfigError(f"unknown metric {name!r}", nearest(name, METRICS))
        if chosen == "clip-score" and kind != "clip":
            raise ConfigError("the CLIP score needs CLIP", "give --extractor openai/clip-vit-large-patch14")
        if chosen == "clip-score" and not captioned:
            raise ConfigError(
                "the CLIP score needs captions, and a folder of pictures has none", "leave it out"
            )
        found.append(chosen)
    return list(dict.fromkeys(found))


def label(metric: str, kind: str, name: str) -> str:
    """What a metric may be called on this extractor: FID is Inception's, CMMD is CLIP's."""
    if metric == "clip-score":
        return "CLIP score"
    if metric in NEIGHBOURS:
        return metric
    published = {"frechet": ("inception", "FID"), "kid": ("inception", "KID"), "cmmd": ("clip", "CMMD")}
    other = {"frechet": "Fréchet distance", "kid": "kernel distance", "cmmd": "Gaussian MMD"}[metric]
    owner, short = published[metric]
    return short if kind == owner else f"{other} on {name}"


def check_counts(metrics: Sequence[str], dimensions: int, samples: int, reference: int) -> None:
    """Say before the work that there are too few pictures for what is asked.

    Raises:
        DataError: a singular covariance, or fewer pictures than neighbours.
    """
    for count, what in ((samples, "samples"), (reference, "reference pictures")):
        if "frechet" in metrics:
            must_be_regular(count, dimensions, what, "fewer components: --set evaluate.components=N")
        if set(metrics) & set(PAIRWISE) and count <= DENSITY_K:
            raise DataError(f"{count} {what} are too few", f"give more than {DENSITY_K}")


@dataclass(frozen=True)
class Comparison:
    """Samples, what they are held against, and how.

    Attributes:
        samples: features that are judged.
        reference: the reference's.
        config: how they are compared.
        name: of the extractor.
        kind: of the extractor.
        seed: of KID's subsets.
        device: where kernels and neighbours are computed.
    """

    samples: FeatureSet
    reference: FeatureSet
    config: EvaluateConfig
    name: str
    kind: str
    seed: int = 0
    device: torch.device | str = "cpu"

    def settings(self, metric: str) -> dict[str, Any]:
        """What decides a metric's value beside the protocol."""
        return settings_of(metric, self.config, self.kind, self.samples.moments.width, self.counts, self.seed)

    @property
    def counts(self) -> tuple[int, int]:
        """Pictures of samples and reference."""
        return self.samples.count, self.reference.count

    def measure(self, metrics: Sequence[str]) -> dict[str, Value]:
        """Every one of these metrics."""
        found = {metric: self._spread(metric) for metric in metrics if metric not in NEIGHBOURS}
        if set(metrics) & set(NEIGHBOURS):
            rows = self.samples.whole_rows(), self.reference.whole_rows()
            near = neighbourhoods(*rows, device=self.device)
            found |= {metric: Spread(near[metric]) for metric in metrics if metric in NEIGHBOURS}
        return {metric: self._value(metric, found[metric]) for metric in metrics}

    def _value(self, metric: str, spread: Spread) -> Value:
        settings, width = self.settings(metric), self.samples.moments.width
        title = label(metric, self.kind, self.name)
        if settings.get("components", width) < width:
            title = f"Fréchet distance on {settings['components']} components of {self.name}"
        return Value(title, spread.value, spread.deviation, settings, self._note(metric, settings))

    def _note(self, metric: str, settings: dict[str, Any]) -> str | None:
        if metric != "frechet":
            return None
        named = list(
            zip(("samples", "reference pictures"), self._compared(settings["components"]), strict=True)
        )
        flat = [
            f"the covariance of the {name} is singular: they fill {found} of {moments.width} dimensions"
            for name, moments in named
            if (found := rank(moments)) < moments.width
        ]
        few = [
            f"{moments.count} {name} for {moments.width} dimensions: so few make the distance larger by"
            " themselves (compare it with one of as many, or take KID)"
            for name, moments in named
            if moments.count < ENOUGH * moments.width
        ]
        return "; ".join(flat + few) or None

    def _spread(self, metric: str) -> Spread:
        settings = self.settings(metric)
        if metric == "frechet":
            return Spread(frechet_between(*self._compared(settings["components"])))
        if metric == "clip-score":
            scores = self.samples.scores
            return Spread(float(scores.mean[0]), float(scores.covariance[0, 0] ** 0.5))
        rows = self.samples.whole_rows(), self.reference.whole_rows()
        if metric == "kid":
            return kid(*rows, settings["subsets"], settings["size"], settings["seed"], self.device)
        return Spread(cmmd(*rows, settings["sigma"], self.device))

    def _compared(self, components: int) -> tuple[Moments, Moments]:
        """Moments of samples and reference on the reference's components."""
        one, other = self.samples.moments, self.reference.moments
        if components == one.width:
            return one, other
        axes = Projection.of_moments(other, components)
        return one.project(axes.mean, axes.axes), other.project(axes.mean, axes.axes)


def settings_of(
    metric: str, config: EvaluateConfig, kind: str, width: int, counts: tuple[int, int], seed: int
) -> dict[str, Any]:
    """What decides a metric's value beside the protocol; known before anything is computed."""
    if metric == "frechet":
        return {"components": config.components_of(kind, width)}
    if metric == "kid":
        return {"subsets": config.kid_subsets, "size": min(config.kid_size, *counts), "seed": seed}
    if metric == "cmmd":
        return {"sigma": CMMD_SIGMA, "scale": CMMD_SCALE}
    if metric == "clip-score":
        return {"scale": 100.0}
    return {"k": PRECISION_K if metric in ("precision", "recall") else DENSITY_K}
