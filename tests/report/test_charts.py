import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from atoll.report import charts, facts, page
from atoll.report.charts import Axis, Chart, Series, Strip
from atoll.report.page import environment
from report.pages import Page

# Charts.


def numbers(path: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", path)]


@pytest.mark.parametrize(
    "values",
    [[0.2, 1.7], [1000.0, 1001.0], [3.0, 3.0], [0.0, 0.0], [-5.0, 2.0], [1e-9, 2e-9], [7e7, 3e8], []],
)
def test_a_linear_axis_holds_its_values_between_round_ends(values: list[float]):
    axis = charts.linear_axis(values)
    assert all(-1e-9 <= axis.at(value) <= 1 + 1e-9 for value in values)
    assert axis.high > axis.low
    assert 2 <= len(axis.marks) <= 7
    assert (axis.marks[0], axis.marks[-1]) == (axis.low, axis.high)


@pytest.mark.parametrize(
    "values", [[0.2, 1.7], [3.0, 3.0], [1e-6, 1e6], [1280, 60000], [0.31, 0.33], [1.0, 1.3], [-1.0], []]
)
def test_a_logarithmic_axis_holds_its_positive_values(values: list[float]):
    axis = charts.log_axis(values)
    assert all(0 <= axis.at(value) <= 1 for value in values if value > 0)
    assert axis.high > axis.low > 0
    assert 2 <= len(axis.marks) <= 6
    assert all(axis.low <= mark <= axis.high for mark in axis.marks)
    assert axis.at(math.sqrt(axis.low * axis.high)) == pytest.approx(0.5), "equal ratios are equally long"


def draw(name: str, *values: object) -> Page:
    """The page's drawing of something."""
    macros: Any = environment().get_template("drawings.html").module
    return Page(str(getattr(macros, name)(*values)))


def test_a_line_goes_through_its_points():
    x, y = Axis(0.0, 10.0), Axis(0.0, 1.0)
    lines = [Series("a", "e0", [(0, 0), (5, 0.5), (10, 1)], dots=False)]
    drawn = draw("line_chart", Chart(lines, x, y), "title")
    line = next(a["d"] for a in drawn.all("path") if a["class"] == "line")
    middle = [(charts.LEFT + charts.RIGHT) / 2, (charts.TOP + charts.BOTTOM) / 2]
    through = [charts.LEFT, charts.BOTTOM, *middle, charts.RIGHT, charts.TOP]
    assert numbers(line) == pytest.approx(through, abs=0.01)


def test_text_in_a_chart_is_escaped():
    x, y = Axis(0.0, 1.0, '<x "'), Axis(0.0, 1.0)
    line = Series("<b>&", "e0", [(0, 0), (1, 1)])
    drawn = draw("line_chart", Chart([line], x, y, [("<u>", 0.5)]), 'a "quote" <i>')
    assert drawn.wrong == []
    assert {tag for tag, _ in drawn.elements} == {"svg", "path", "text", "g", "title", "circle"}
    assert drawn.all("svg")[0]["aria-label"] == 'a "quote" <i>: <b>&'
    assert "<b>&" in drawn.texts["title"]


def test_a_guide_outside_of_the_axis_is_not_drawn():
    x, y = Axis(0.0, 1.0), Axis(0.0, 1.0)
    drawn = draw("line_chart", Chart([], x, y, [("over", 1.5), ("inside", 0.5)]), "about")
    assert "over" not in drawn.html and "inside" in drawn.html and len(drawn.with_class("guide")) == 1


def test_smoothing_keeps_a_constant_and_a_power_law():
    xs = [10.0 * n for n in range(1, 300)]
    assert [y for _, y in charts.smooth([(x, 0.7) for x in xs])] == pytest.approx([0.7] * len(xs))
    inner = [(x, y) for x, y in charts.smooth([(x, 5 / math.sqrt(x)) for x in xs]) if 500 < x < 2500]
    assert [y for _, y in inner] == pytest.approx([5 / math.sqrt(x) for x, _ in inner], rel=0.01)


def test_smoothing_takes_noise_away():
    noise = np.random.default_rng(0).normal(0, 0.2, 2000)
    points = [(float(n), float(math.exp(e))) for n, e in enumerate(noise, 1)]
    assert np.std([math.log(y) for x, y in charts.smooth(points) if x > 1000]) < 0.03


def test_smoothing_looks_at_the_window_only():
    points = [(1.0, 1.0), (1.1, 4.0), (100.0, 9.0)]
    assert [y for _, y in charts.smooth(points, width=1.2)] == pytest.approx([2.0, 2.0, 9.0])


def test_thinning_keeps_the_ends_and_the_number():
    points = [(float(n), 0.0) for n in range(1, 50_001)]
    thinned = charts.thin(points, 200)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert 100 < len(thinned) <= 201
    assert charts.thin(points[:150], 200) == points[:150]


def test_a_strip_fills_every_step_in_proportion():
    strip = Strip("full, sample 1", [[0.25, 0.75, 0.0], [0.0, 0.0, 2.0]])
    cells = {expert: numbers(d.replace("h", " ").replace("v", " ")) for expert, d in strip.paths.items()}
    assert cells == {0: [0, 0, 9, 25, -9], 1: [0, 25, 9, 75, -9], 2: [10, 0, 9, 100, -9]}
    drawn = draw("strip", strip)
    assert drawn.texts["title"] == [
        "full, sample 1, step 1 of 2: expert 0 25%, expert 1 75%",
        "full, sample 1, step 2 of 2: expert 2 100%",
    ]
    label = drawn.all("svg")[0]["aria-label"]
    assert label == "full, sample 1: mostly expert 1 in steps 1 to 1, then mostly expert 2 in steps 2 to 2"


def test_a_bar_is_as_long_as_its_parts_and_marks_the_even_share():
    drawn = draw("bar", [("a", "e0", 30.0), ("b", "e1", 10.0)], 80.0, "about", 20.0)
    parts = [(a["class"], a["x"], a["width"]) for a in drawn.all("rect")]
    assert parts == [("fill e0", "0.00", "37.50"), ("fill e1", "37.50", "12.50")]
    assert [a["d"] for a in drawn.all("path")] == ["M25.00 0v1"]


@pytest.mark.parametrize("sizes", [[5], [1, 1], [900, 50, 50], list(range(1, 33)), [1] * 64])
def test_arcs_of_the_ring_follow_each_other_and_do_not_overlap(sizes: list[int]):
    arcs = draw("ring", charts.ring(sizes), sizes).all("path")
    assert len(arcs) == len(sizes)
    ends = []
    for arc in arcs:
        places = [float(n) for n in re.findall(r"[\d.]+", arc["d"])]
        for x, y in (places[:2], places[-2:]):
            ends.append(math.atan2(x - 32, 32 - y) % (2 * math.pi))
    assert ends == sorted(ends)


# Colours.


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def matrix(numbers: str) -> np.ndarray:
    return np.array(numbers.split(), dtype=float).reshape(3, 3)


LMS = "0.4122214708 0.5363325363 0.0514459929 0.2119034982 0.6806995451 0.1073969566 "
LAB = "0.2104542553 0.7936177850 -0.0040720468 1.9779984951 -2.4285922050 0.4505937099 "
OKLAB = (
    matrix(LMS + "0.0883024619 0.2817188376 0.6299787005"),
    matrix(LAB + "0.0259040371 0.7827717662 -0.8086757660"),
)
VISION = {  # Machado, Oliveira, Fernandes (2009), severity 1
    "normal": "1 0 0 0 1 0 0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
}


def closest(colours: list[str], vision: str) -> float:
    lights = [np.clip(matrix(VISION[vision]) @ linear(colour), 0, 1) for colour in colours]
    seen = [OKLAB[1] @ np.cbrt(OKLAB[0] @ light) for light in lights]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stay_apart_for_every_kind_of_colour_vision(dark: bool):
    colours = [charts.expert_colour(number, dark) for number in range(24)]
    for vision in VISION:
        assert closest(colours[:4], vision) > 0.14
        assert closest(colours[:8], vision) > 0.06
    assert len(set(colours)) == 24, "they go on after the eighth"
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_red_and_green_would_not_stay_apart():
    assert closest(["#d62728", "#2ca02c", "#ff7f0e", "#8c564b"], "deuteranopia") < 0.06


# Words.


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.2, "0.2"), (1000, "1k"), (60_000, "60k"), (2_500_000, "2.5M"), (1e9, "1G")],
)
def test_tick(value: float, words: str):
    assert charts.tick(value) == words


def test_what_is_no_finite_number_is_none():
    assert [*map(facts.finite, (None, "1", True, float("nan"), float("inf"), [1]))] == [None] * 6
    assert (facts.finite(2), facts.finite(0.5)) == (2.0, 0.5)
    assert (page.decimals(-0.034), page.whole(12345.6), page.decimals(None)) == ("−0.03", "12,346", "–")
