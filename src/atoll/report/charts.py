"""The numbers of the pages' drawings: axes, lines, strips, the ring; and colours. `drawings.html` draws them.

An expert has one colour everywhere, and the first four stay apart best. Colours were searched for in OKLab
under simulated protan-, deuteran- and tritanopia (Machado et al. 2009); numbers and names always stand beside
them, so colour is never alone.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from atoll.campaign.roles import RUNS, SINGLE
from atoll.report.facts import Point

LIGHT = ("#0a6fb0", "#e3a62b", "#9c3015", "#3fbfb9", "#5f3467", "#8b93f0", "#cf8089", "#86762f")
"""On a light page."""
DARK = ("#3f95dc", "#f7cb68", "#c9593b", "#4feadd", "#9a5fa8", "#b4bcfa", "#ef919b", "#a39a2f")
"""The same hues on a dark page."""
ROUTED = ("selected", "mixture", "own", "router")
"""CSS classes of the colours of routings, in order."""


def model_name(name: str) -> str:
    """As the page calls a model: a single network by its title, a routing as it is."""
    return RUNS[name].title if name in SINGLE else name


def expert_colour(number: int, dark: bool = False) -> str:
    """Hex colour of an expert. After the eighth they come again, darker on light and lighter on dark."""
    base = (DARK if dark else LIGHT)[number % len(LIGHT)]
    # Each round covers the same part of what is left to black or white, so no two rounds are ever equal.
    away, share = 255 if dark else 0, 1 - 0.65 ** (number // len(LIGHT))
    channels = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (away - c) * share):02x}" for c in channels)


def stylesheet(count: int) -> str:
    """CSS: `--e0` ... of all experts on light and dark pages, and a class `e0` ... for each."""
    light, dark = (
        " ".join(f"--e{number}: {expert_colour(number, dark)};" for number in range(count))
        for dark in (False, True)
    )
    classes = " ".join(f".e{number} {{ --c: var(--e{number}) }}" for number in range(count))
    of_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ {light} }}\n{of_dark}\n{classes}\n"


def model_styles(names: Iterable[str]) -> dict[str, str]:
    """CSS class of every model: a single network's is its name, routings take theirs in turn."""
    routings = [name for name in dict.fromkeys(names) if name not in SINGLE]
    return {name: name for name in SINGLE} | {n: ROUTED[i % len(ROUTED)] for i, n in enumerate(routings)}


WIDTH, HEIGHT = 440, 254
LEFT, RIGHT, TOP, BOTTOM = 42, WIDTH - 20, 12, HEIGHT - 42


def tick(value: float) -> str:
    """The label of a mark on an axis: `0.2`, `5k`, `1M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.6g}{name}"
    return f"{value:.6g}"


@dataclass(frozen=True)
class Series:
    """A line of a chart, in the colour of its CSS class, with the faint `raw` one behind it."""

    name: str
    style: str
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    dots: bool = True
    """Whether every point gets a dot with a tooltip."""


@dataclass(frozen=True)
class Axis:
    """One axis, from `low` to `high`, which are positive where it is logarithmic; a title is drawn below."""

    low: float
    high: float
    title: str = ""
    log: bool = False
    marks: Sequence[float] = ()
    label: Callable[[float], str] = tick

    def at(self, value: float) -> float:
        """Where a value lies, 0 at the start and 1 at the end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Chart:
    """Lines over two axes, the last on top, and names (which may be empty) and heights of dashed guides."""

    series: Sequence[Series]
    x: Axis
    y: Axis
    guides: Sequence[tuple[str, float]] = ()

    def across(self, value: float) -> float:
        """Horizontal coordinate of a value."""
        return round(LEFT + self.x.at(value) * (RIGHT - LEFT), 2)

    def down(self, value: float) -> float:
        """Vertical coordinate of a value."""
        return round(BOTTOM - self.y.at(value) * (BOTTOM - TOP), 2)

    def path(self, points: Sequence[Point]) -> str:
        """The line through points, in SVG's words."""
        return "M" + "L".join(f"{self.across(x):g} {self.down(y):g}" for x, y in points)


def linear_axis(values: Iterable[float], zero: bool = False, title: str = "") -> Axis:
    """An axis whose ends are round and hold all values, and 0 if so asked."""
    numbers = [value for value in values if abs(value) < 1e100] or [0.0, 1.0]
    low, high = min(0.0, *numbers) if zero else min(numbers), max(numbers)
    if high - low < 1e-9 * max(1.0, abs(high)):
        wide = abs(high) if abs(high) > 1e-9 else 1.0
        low, high = low - 0.5 * wide * (not zero), high + 0.5 * wide
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    # Without the tolerances, 0.30000000000000004 would get a step and a mark of its own.
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if (high - low) / 5 <= m * power * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = [round(i * step, 12) for i in range(first, last + 1)]
    return Axis(marks[0], marks[-1], title, marks=marks)


def log_axis(values: Iterable[float], title: str = "") -> Axis:
    """A logarithmic axis that holds all positive values, with at most six marks at round numbers."""
    numbers = [value for value in values if 1e-100 < value < 1e100] or [1.0, 10.0]
    low, high = min(numbers), max(numbers)
    if high < 1.05 * low:
        low, high = low / 1.5, high * 1.5
    low, high = low / (high / low) ** 0.02, high * (high / low) ** 0.02
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        marks = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
        if len(marks) <= 6:
            break
    if len(marks) < 2:  # the axis is short: one mark would not tell how short
        marks = [mark for mark in linear_axis([low, high]).marks if low <= mark <= high]
    return Axis(low, high, title, log=True, marks=marks[:: max(1, -(-len(marks) // 6))])


_SHARES = Axis(0.0, 1.0, marks=(0, 0.25, 0.5, 0.75, 1), label="{:.0%}".format)
_ENDS = {0.0: "0 data", 1.0: "1 noise"}
_TIME = Axis(-0.02, 1.02, "t", marks=_SHARES.marks, label=lambda t: _ENDS.get(t, f"{t:.2g}"))


def by_time(
    series: Iterable[Series],
    guides: Sequence[tuple[str, float | None]] = (),
    zero: bool = False,
    share: bool = False,
) -> Chart | None:
    """Plot lines over t, with guides, from 0 if `zero`, to 1 if `share`; None where there is no point."""
    lines = [line for line in series if line.points]
    if not lines:
        return None
    dashed = [(name, value) for name, value in guides if value is not None]
    values = [v for line in lines for _, v in line.points] + [value for _, value in dashed]
    return Chart(lines, _TIME, _SHARES if share else linear_axis(values, zero), dashed)


def training_curve(curves: Sequence[Series]) -> Chart | None:
    """Losses against images seen, both logarithmic: smoothed, with the raw values behind."""
    # Of a stranger's campaign: losses that no training has, and that no logarithm or quotient takes.
    drawn = [
        [(x, y) for x, y in curve.points if x < 1e100 and (y == 0 or 1e-100 < abs(y) < 1e100)]
        for curve in curves
    ]
    lines = [
        Series(curve.name, curve.style, smooth(points), thin(points), dots=False)
        for curve, points in zip(curves, drawn, strict=True)
        if len(points) > 1
    ]
    if not lines:
        return None
    # One spike would press all lines to the floor: the raw values decide the range but for their highest
    # few, which the frame clips.
    raw = sorted(y for line in lines for _, y in line.raw if y > 0)
    high = raw[min(len(raw) - 1, int(0.995 * len(raw)))] if raw else 1.0
    x = log_axis([seen for line in lines for seen, _ in line.points], "images seen")
    y = log_axis([v for line in lines for _, v in line.points] + [v for v in raw if v <= high])
    clipped = [
        replace(line, raw=[(seen, min(max(loss, y.low), y.high)) for seen, loss in line.raw if seen > 0])
        for line in lines
    ]
    return Chart(clipped, x, y)


def smooth(points: Sequence[Point], width: float = 1.18, most: int = 400) -> list[Point]:
    """Geometric mean of a window that is even on a logarithmic axis: from x / width to x * width."""
    positive = [(x, y) for x, y in points if x > 0 and y > 0]
    seen = [x for x, _ in positive]
    # Running sums, so that each of the points costs two look-ups and not a window.
    sums = [0.0, *accumulate(math.log(y) for _, y in positive)]

    def mean(x: float) -> float:
        low, high = bisect_left(seen, x / width), bisect_right(seen, x * width)
        return math.exp((sums[high] - sums[low]) / (high - low))

    return [(x, mean(x)) for x, _ in thin(positive, most)]


def thin(points: Sequence[Point], most: int = 400) -> list[Point]:
    """At most so many points, evenly spread on a logarithmic axis, the first and the last among them."""
    # A run logs every few steps for days: the page would grow with it, and a curve shows no more.
    if len(points) <= most or points[0][0] <= 0:
        return list(points)
    step = math.log(points[-1][0] / points[0][0]) / (most - 1)
    chosen, due = [], points[0][0]
    for point in points[:-1]:
        if point[0] >= due:
            chosen.append(point)
            due = point[0] * math.exp(step)
    return [*chosen, points[-1]]


@dataclass(frozen=True)
class Strip:
    """Which experts served one sample, from noise (left) to data (right), by weights `[step][expert]`."""

    name: str
    weights: Sequence[Sequence[float]]

    @property
    def about(self) -> str:
        """`mostly expert 2 in steps 1 to 4, then mostly expert 0 in steps 5 to 15`, by the largest weight."""
        leaders = [max(range(len(step)), key=step.__getitem__) for step in self.weights]
        spans = [[*span] for _, span in groupby(enumerate(leaders, 1), key=lambda pair: pair[1])]
        words = (f"mostly expert {span[0][1]} in steps {span[0][0]} to {span[-1][0]}" for span in spans)
        return f"{self.name}: {', then '.join(words)}"

    @property
    def paths(self) -> dict[int, str]:
        """For each expert its parts of all steps, 10 wide and together 100 high, in SVG's words."""
        paths: dict[int, str] = {}
        gap = 0 if len(self.weights) > 40 else 1  # between many steps it would be most of the strip
        for number, step in enumerate(self.weights):
            total, top = sum(step) or 1.0, 0.0
            for expert, weight in enumerate(step):
                high = 100 * weight / total
                if high > 0:
                    cell = f"M{10 * number} {top:.4g}h{10 - gap}v{high:.4g}h{gap - 10}z"
                    paths[expert] = paths.get(expert, "") + cell
                top += high
        return dict(sorted(paths.items()))

    @property
    def tooltips(self) -> list[str]:
        """Of every step, who served it."""
        texts, steps = [], len(self.weights)
        for number, step in enumerate(self.weights):
            total = sum(step) or 1.0
            used = ", ".join(f"expert {k} {w / total:.0%}" for k, w in enumerate(step) if w > 0.005 * total)
            texts.append(f"{self.name}, step {number + 1} of {steps}: {used}")
        return texts


def ring(sizes: Sequence[int]) -> list[str]:
    """An atoll: one arc per cluster, as long as its share, in SVG's words."""
    radius, count = 26.0, len(sizes)
    # Round ends reach 0.16 beyond their arc, so many arcs get square ends and smaller gaps.
    gap = (0.52 if count <= 6 else 0.5 / count + 0.04) * (count > 1)
    start, arcs = gap / 2 - math.pi / 2, []
    for size in sizes:
        # Two arcs of half the length each: one of more than half a turn would need another flag of SVG's.
        # Never shorter than 0.02: a cluster of few rows would be no arc at all.
        end = start + max((2 * math.pi - gap * count - 0.01) * size / sum(sizes), 0.02)
        angles = (start, (start + end) / 2, end)
        stops = [f"{32 + radius * math.cos(a):.2f} {32 + radius * math.sin(a):.2f}" for a in angles]
        arcs.append(f"M{stops[0]}" + "".join(f"A{radius:g} {radius:g} 0 0 1 {stop}" for stop in stops[1:]))
        start = end + gap
    return arcs
