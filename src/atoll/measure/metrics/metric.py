"""What a metric is, and how the metrics of this package are found: each module lists its own in `METRICS`."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch

import atoll.measure.metrics as package
from atoll.base.errors import ConfigError, DataError
from atoll.campaign.measured import MeasuredValue
from atoll.measure.metrics.projection import Axes
from atoll.measure.pictures import Features
from atoll.measure.request import check_metrics


@dataclass(frozen=True)
class Floor:
    """Real training pictures in the place of samples: how near to the reference pictures can be."""

    about: dict[str, Any]
    features: Callable[[], Features]


@dataclass(frozen=True)
class How:
    """What metrics know before anything is computed."""

    extractor: str
    kind: str  # of the extractor: FID is Inception's alone, and the CLIP score CLIP's
    width: int  # D of the features
    samples: int
    references: int
    components: int  # principal ones, that a Fréchet distance is taken in
    axes: Axes | None = None  # those of other pictures than the reference's
    floor: Floor | None = None
    subsets: int = 100  # of KID
    subset: int = 1000  # pictures of one, at most
    seed: int = 0
    device: torch.device | str = "cpu"


class Value(NamedTuple):
    """One number, its standard deviation over subsets or pictures, and what a reader must know beside it."""

    value: float
    deviation: float | None = None
    notes: tuple[str, ...] = ()


class Metric:
    """One way to compare features with others; it may give several numbers at once."""

    names: ClassVar[tuple[str, ...]] = ()
    """Of the numbers that it gives."""
    only: ClassVar[str | None] = None
    """Kind of the extractor without which there is no such number."""
    captions: ClassVar[bool] = False
    """Whether pictures need captions, whose features are then in `Features.texts`."""
    floor: ClassVar[bool] = False
    """Whether training pictures are needed, in `How.floor`."""
    few: ClassVar[int] = 0
    """Pictures of a set that are too few."""

    def label(self, name: str, how: How) -> str:
        """What the number may be called."""
        return name

    def settings(self, name: str, how: How) -> dict[str, Any]:
        """What decides the number beside the protocol."""
        return {}

    def check(self, how: How) -> None:
        """Refuse too few pictures before the work; `DataError`."""
        for count, pictures in ((how.samples, "samples"), (how.references, "reference pictures")):
            if count <= self.few:
                raise DataError(f"{count} {pictures} are too few", f"give more than {self.few}")

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        """All of its numbers, by name."""
        raise NotImplementedError


@cache
def metrics() -> dict[str, Metric]:
    """Every metric by the names of its numbers."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    entries = [metric for module in modules for metric in getattr(module, "METRICS", ())]
    return {name: metric for metric in entries for name in metric.names}


def parse(names: str, kind: str, captioned: bool = True, trained: bool = True) -> list[str]:
    """Metrics out of `frechet,kid,...`; `all` is every one that this kind of extractor allows.

    `ConfigError` for an unknown metric, one of another extractor, or one that captions or training pictures
    are missing for.
    """
    wanted, known = check_metrics(names), metrics()
    if "all" in wanted:
        fit = {name: metric for name, metric in known.items() if metric.only in (None, kind)}
        return [n for n, m in fit.items() if captioned >= m.captions and trained >= m.floor]
    chosen = []
    for name in wanted:
        if name == "fid" and kind != "inception":
            fix = "use frechet, or --extractor inception"
            raise ConfigError("FID is the distance on Inception's features", fix)
        name = {"fid": "frechet"}.get(name, name)
        metric = known[name]
        if metric.only not in (None, kind):
            raise ConfigError(f"{name} needs {metric.only} as its extractor", "give it: --extractor NAME")
        if metric.captions and not captioned:
            raise ConfigError(f"{name} needs captions, and a folder of pictures has none", "leave it out")
        if metric.floor and not trained:
            what = f"{name} needs the training pictures of a campaign"
            raise ConfigError(what, "name one, or leave it out")
        chosen.append(name)
    return list(dict.fromkeys(chosen))


def asks(names: Sequence[str], what: Literal["captions", "floor"]) -> bool:
    """Whether one of these metrics needs captions, or training pictures."""
    return any(getattr(metrics()[name], what) for name in names)


def settings_of(names: Sequence[str], how: How) -> dict[str, dict[str, Any]]:
    """What decides each number beside the protocol; `DataError` where there are too few pictures."""
    for name in names:
        metrics()[name].check(how)
    return {name: metrics()[name].settings(name, how) for name in names}


def compute(
    names: Sequence[str], how: How, samples: Features, reference: Features
) -> dict[str, MeasuredValue]:
    """Numbers by name, as they stand in a point."""
    numbers, settings = dict[str, Value](), settings_of(names, how)
    for metric in dict.fromkeys(metrics()[name] for name in names):  # each once, for all of its numbers
        numbers |= metric.compute(how, samples, reference)
    return {
        name: MeasuredValue(
            label=metrics()[name].label(name, how), settings=settings[name], **numbers[name]._asdict()
        )
        for name in names
    }
