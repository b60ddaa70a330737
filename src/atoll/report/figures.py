"""Charts as inline SVG, drawn by hand: no script, colours by CSS class, values in tooltips.

Every function returns `Markup`; whatever text goes in is escaped.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from atoll.report.wording import significant, tick

WIDTH, HEIGHT = 440, 254
LEFT, RIGHT, TOP, BOTTOM = 42, 20, 12, 42
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: for the tooltip.
        style: CSS class of its colour.
        points: of the line.
        raw: of the faint line behind it.
        dots: whether every point gets a dot with a tooltip.
    """

    name: str
    style: str
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        title: what it measures.
        low: value at its start.
        high: value at its end, above `low`.
        log: logarithmic; `low` is positive then.
        marks: values that get a label.
        label: text of a mark.
    """

    title: str
    low: float
    high: float
    log: bool = False
    marks: Sequence[float] = field(default_factory=tuple)
    label: Callable[[float], str] = tick

    def at(self, value: float) -> float:
        """Where a value lies, 0 at the start and 1 at the end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(title: str, values: Iterable[float], zero: bool = False) -> Axis:
    """An axis whose ends are round and hold all values."""
    found = list(values) or [0.0, 1.0]
    low, high = min(0.0, *found) if zero else min(found), max(found)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * (abs(low) or 1.0) * (not zero), high + 0.5 * (abs(high) or 1.0)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = [round(i * step, 12) for i in range(first, last + 1)]
    return Axis(title, marks[0], marks[-1], marks=marks)


def log_axis(title: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis that holds all positive values, with marks at 1, 2 and 5."""
    found = [value for value in values if value > 0] or [1.0, 10.0]
    low, high = min(found), max(found)
    if high < 1.05 * low:
        low, high = low / 1.5, high * 1.5
    low, high = low / (high / low) ** 0.02, high * (high / low) ** 0.02
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        marks = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
        if len(marks) <= 6:
            break
    marks = marks[:: max(1, -(-len(marks) // 6))]
    return Axis(title, low, high, log=True, marks=marks)


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, about: str, guides: Sequence[tuple[str, float]] = ()
) -> Markup:
    """Lines over two axes.

    Args:
        series: drawn in order, so the last is on top.
        x: horizontal axis.
        y: vertical axis.
        about: what the chart shows, for those who do not see it.
        guides: horizontal lines with their names, which may be empty.
    """
    parts, names = [_frame(x, y)], []
    for name, value in guides:
        if y.low <= value <= y.high:
            height = _y(y, value)
            # Below its line where the line is at the top, so that the text stays inside.
            text_at = height + 13 if height < TOP + 14 else height - 5
            parts.append(f'<path class="guide" d="M{LEFT} {_n(height)}H{WIDTH - RIGHT}"/>')
            if name:  # on top of the lines
                place = f'x="{WIDTH - RIGHT}" y="{_n(text_at)}" text-anchor="end"'
                names.append(f'<text class="note" {place}>{escape(name)}</text>')
    for one in series:
        lines = f'<path class="raw" d="{_path(one.raw, x, y)}"/>' if len(one.raw) > 1 else ""
        lines += f'<path class="line" d="{_path(one.points, x, y)}"/>' if len(one.points) > 1 else ""
        dots = one.points if one.dots or len(one.points) == 1 else ()
        lines += "".join(_dot(one.name, point, x, y) for point in dots)
        parts.append(f'<g class="{escape(one.style)}"><title>{escape(one.name)}</title>{lines}</g>')
    return _svg(f"0 0 {WIDTH} {HEIGHT}", "".join(parts + names), about, "chart")


@dataclass(frozen=True)
class Heat:
    """A cell of a heat map.

    Attributes:
        strength: from -1 (good) over 0 (neutral) to 1 (bad); None is an empty cell.
        text: in the cell; left out in small maps.
        title: for the tooltip.
        framed: whether it has a frame.
    """

    strength: float | None
    text: str
    title: str
    framed: bool = False


def heat_map(
    rows: Sequence[tuple[str, str]],
    columns: Sequence[tuple[str, str]],
    cells: Sequence[Sequence[Heat]],
    about: str,
    small: bool = False,
) -> Markup:
    """Cells in rows and columns.

    Args:
        rows: name and CSS class of the mark of every row.
        columns: the same of every column.
        cells: by row and column.
        about: what it shows, for those who do not see it.
        small: without names and texts: marks only.
    """
    left, top, side = (16, 16, 22) if small else (104, 26, 34)
    wide = side if small else min(76.0, max(30.0, (620 - left) / len(columns)))
    drawn = []
    for number, (name, style) in enumerate(columns):
        middle = left + wide * (number + 0.5)
        drawn.append(_mark(middle - 5, 2 if small else 3, style, name))
        if not small:
            text = f'<text x="{_n(middle + 9)}" y="13" text-anchor="start">{number}</text>'
            drawn.append(text if wide > 29 else "")
    for number, (name, style) in enumerate(rows):
        middle = top + side * (number + 0.5)
        drawn.append(_mark(2, middle - 5, style, name))
        if not small:
            drawn.append(f'<text x="18" y="{_n(middle)}" dy="4">{escape(name)}</text>')
        for place, cell in enumerate(cells[number]):
            drawn.append(_heat(cell, left + wide * place, top + side * number, wide, side, small))
    box = f"0 0 {_n(left + wide * len(columns) + 2)} {_n(top + side * len(rows) + 2)}"
    width = left + wide * len(columns) + 2
    return _svg(box, "".join(drawn), about, "heat", f' style="max-width:{_n(width)}px"')


def _mark(x: float, y: float, style: str, name: str) -> str:
    title = f"<title>{escape(name)}</title>"
    return (
        f'<rect class="{escape(style)} fill" x="{_n(x)}" y="{_n(y)}" width="10" height="10" rx="2">'
        f"{title}</rect>"
    )


def _heat(cell: Heat, x: float, y: float, wide: float, side: float, small: bool) -> str:
    kind = "empty" if cell.strength is None else "bad" if cell.strength > 0 else "good"
    strength = min(1.0, abs(cell.strength or 0.0))
    size = f'x="{_n(x + 1)}" y="{_n(y + 1)}" width="{_n(wide - 2)}" height="{_n(side - 2)}" rx="3"'
    title = f"<title>{escape(cell.title)}</title>"
    drawn = f'<rect class="cell {kind}" {size} fill-opacity="{_n(0.06 + 0.74 * strength)}">{title}</rect>'
    if cell.framed:
        drawn += f'<rect class="frame" {size}/>'
    if cell.text and not small:
        middle = f'x="{_n(x + wide / 2)}" y="{_n(y + side / 2)}"'
        drawn += f'<text class="in" {middle} dy="4" text-anchor="middle">{escape(cell.text)}</text>'
    return drawn


def share_bar(parts: Sequence[tuple[str, str, float]], total: float, about: str) -> Markup:
    """One horizontal bar of coloured parts.

    Args:
        parts: name with value for the tooltip, CSS class, length.
        total: length of the whole width.
        about: alternative text.
    """
    drawn, start = [], 0.0
    for name, style, value in parts:
        share = 100 * value / total if total else 0.0
        drawn.append(
            f'<rect class="{escape(style)} fill" x="{_n(start)}%" width="{_n(share)}%" height="100%">'
            f"<title>{escape(name)}</title></rect>"
        )
        start += share
    return _svg(None, "".join(drawn), about, "bar")


def balance_bar(name: str, style: str, size: float, even: float, longest: float) -> Markup:
    """A cluster's bar with a mark at the even share."""
    share, mark = 100 * size / longest, 100 * even / longest
    inside = (
        f'<rect class="track" width="100%" height="100%"/>'
        f'<rect class="{escape(style)} fill" width="{_n(share)}%" height="100%">'
        f"<title>{escape(name)}</title></rect>"
        f'<line class="halo" x1="{_n(mark)}%" x2="{_n(mark)}%" y1="0" y2="100%"/>'
        f'<line class="even" x1="{_n(mark)}%" x2="{_n(mark)}%" y1="0" y2="100%"/>'
    )
    return _svg(None, inside, name, "bar")


def strip(weights: Sequence[Sequence[float]], name: str) -> Markup:
    """Which experts served one sample, from noise (left) to data (right).

    Args:
        weights: `[step][expert]`; a step's colours share its height in these proportions.
        name: of sample and strategy, for the tooltips.
    """
    steps = len(weights)
    gap = 0 if steps > 40 else 1
    paths: dict[int, list[str]] = {}
    hovers = []
    for number, step in enumerate(weights):
        total, top = sum(step) or 1.0, 0.0
        for expert, weight in enumerate(step):
            height = 100 * weight / total
            if height > 0:
                d = f"M{10 * number} {_n(top)}h{10 - gap}v{_n(height)}h{gap - 10}z"
                paths.setdefault(expert, []).append(d)
            top += height
        used = ", ".join(f"expert {k} {w / total:.0%}" for k, w in enumerate(step) if w > 0.005 * total)
        text = escape(f"{name}, step {number + 1} of {steps}, t = {1 - number / steps:.2f}: {used}")
        hovers.append(
            f'<rect class="hover" x="{10 * number}" width="10" height="100"><title>{text}</title></rect>'
        )
    drawn = "".join(f'<path class="e{k} fill" d="{"".join(d)}"/>' for k, d in sorted(paths.items()))
    about = f"{name}: {_in_words(weights)}"
    return _svg(
        f"0 0 {10 * steps - gap} 100", drawn + "".join(hovers), about, "strip", ' preserveAspectRatio="none"'
    )


def ring(sizes: Sequence[int]) -> Markup:
    """An atoll: one arc per cluster, as long as its share."""
    radius, total, count = 26.0, sum(sizes), len(sizes)
    # Round ends reach 0.16 beyond their arc, so many arcs get square ends and smaller gaps.
    style, gap = ("arc", 0.52) if count <= 6 else ("arc square", 0.5 / count + 0.04)
    gap *= count > 1
    free = 2 * math.pi - gap * count - 0.01
    start, arcs = gap / 2 - math.pi / 2, []
    for number, size in enumerate(sizes):
        end = start + max(free * size / total, 0.02)
        ends = [
            (32 + radius * math.cos(a), 32 + radius * math.sin(a)) for a in (start, (start + end) / 2, end)
        ]
        turns = " ".join(f"A{radius:g} {radius:g} 0 0 1 {_n(px)} {_n(py)}" for px, py in ends[1:])
        d = f"M{_n(ends[0][0])} {_n(ends[0][1])}{turns}"
        title = f"<title>Cluster {number}: {size:,} rows</title>"
        arcs.append(f'<path class="e{number} {style}" d="{d}">{title}</path>')
        start = end + gap
    return _svg("0 0 64 64", "".join(arcs), f"A ring of {len(sizes)} arcs, as long as the clusters", "ring")


def smooth(points: Sequence[Point], width: float = 1.18, most: int = 400) -> list[Point]:
    """Geometric mean of a window that is even on a logarithmic axis: from x / width to x * width."""
    found = [(x, y) for x, y in points if x > 0 and y > 0]
    sums = [0.0]
    for _, y in found:
        sums.append(sums[-1] + math.log(y))
    smoothed, low, high = [], 0, 0
    for x, _ in found:
        while found[low][0] < x / width:
            low += 1
        while high < len(found) and found[high][0] <= x * width:
            high += 1
        smoothed.append((x, math.exp((sums[high] - sums[low]) / (high - low))))
    return thin(smoothed, most)


def thin(points: Sequence[Point], most: int = 400) -> list[Point]:
    """At most so many points, evenly spread on a logarithmic axis, the first and the last among them."""
    if len(points) <= most or points[0][0] <= 0:
        return list(points)
    step = math.log(points[-1][0] / points[0][0]) / (most - 1)
    chosen, due = [], points[0][0]
    for point in points[:-1]:
        if point[0] >= due:
            chosen.append(point)
            due = point[0] * math.exp(step)
    return [*chosen, points[-1]]


def _frame(x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    drawn = []
    for mark in y.marks:
        height = _n(_y(y, mark))
        drawn.append(f'<path class="grid" d="M{LEFT} {height}H{right}"/>')
        drawn.append(
            f'<text x="{LEFT - 7}" y="{height}" dy="4" text-anchor="end">{escape(y.label(mark))}</text>'
        )
    for mark in x.marks:
        across = _n(_x(x, mark))
        drawn.append(f'<path class="tick" d="M{across} {bottom}v4"/>')
        drawn.append(
            f'<text x="{across}" y="{bottom + 17}" text-anchor="middle">{escape(x.label(mark))}</text>'
        )
    drawn.append(f'<path class="base" d="M{LEFT} {bottom}H{right}"/>')
    middle = (LEFT + right) / 2
    drawn.append(
        f'<text class="axis" x="{_n(middle)}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.title)}</text>'
    )
    return "".join(drawn)


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    return "".join(f"{'L' if n else 'M'}{_n(_x(x, px))} {_n(_y(y, py))}" for n, (px, py) in enumerate(points))


def _dot(name: str, point: Point, x: Axis, y: Axis) -> str:
    text = escape(f"{name}: {significant(point[1])} at {x.label(point[0])}")
    return (
        f'<circle class="dot" cx="{_n(_x(x, point[0]))}" cy="{_n(_y(y, point[1]))}" r="3">'
        f"<title>{text}</title></circle>"
    )


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.at(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.at(value) * (HEIGHT - TOP - BOTTOM)


def _svg(box: str | None, inside: str, about: str, style: str, more: str = "") -> Markup:
    view = f' viewBox="{box}"' if box else ""
    return Markup(f'<svg class="{style}" role="img" aria-label="{escape(about)}"{view}{more}>{inside}</svg>')


def _n(value: float) -> str:
    """A coordinate with at most two decimals."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def _round_step(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if value <= m * power * (1 + 1e-9))


def _in_words(weights: Sequence[Sequence[float]]) -> str:
    """`expert 2 in steps 1 to 4, then expert 0 in steps 5 to 15`, by the largest weight."""
    leaders = [max(range(len(step)), key=step.__getitem__) for step in weights]
    spans: list[list[int]] = []
    for number, leader in enumerate(leaders, 1):
        if spans and spans[-1][0] == leader:
            spans[-1][2] = number
        else:
            spans.append([leader, number, number])
    return ", then ".join(f"mostly expert {k} in steps {first} to {last}" for k, first, last in spans)
