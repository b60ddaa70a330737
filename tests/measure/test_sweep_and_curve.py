"""The best guidance, and the share of the monolith's FLOPs: known answers."""

import pytest

from atoll.campaign.measured import CurveRow, GuidanceRow
from atoll.measure.comparison import best_table, crossing, reach_table
from atoll.measure.models import supported


def swept(name: str, distances: dict[float, float]) -> list[GuidanceRow]:
    beside = {"model": name, "precision": 0.5, "recall": None}
    return [GuidanceRow(guidance=scale, distance=d, **beside) for scale, d in distances.items()]


def test_each_model_has_its_own_best_guidance() -> None:
    rows = swept("monolith", {1: 9.0, 2: 4.0, 3: 5.0}) + swept("top-1", {3: 2.0, 1: 7.0, 2: 3.0})
    mono, top = best_table(rows)
    assert (mono.guidance, mono.distance, mono.edge, mono.ratio) == (2.0, 4.0, "", None)
    assert (top.guidance, top.distance, top.edge, top.ratio) == (3.0, 2.0, "high", 0.5)


def test_strategies_whose_networks_are_not_there_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["top-1", "top-9", "once null pretrain", "oracle"]
    assert supported(names, 8, [3], pretrained=False) == ["top-1"]
    assert capsys.readouterr().out.count(" is left out: ") == 3
    assert supported(names, 9, [], pretrained=True) == names


@pytest.mark.parametrize(
    ("distances", "scale", "edge"),
    [
        ({1: 3.0, 2: 3.0}, 1.0, "low"),  # of equal ones the smaller
        ({0: 1.0, 2: 3.0}, 0.0, ""),  # there is nothing below 0
        ({2: 3.0}, 2.0, ""),
    ],
)
def test_a_best_at_the_end_of_the_scales_is_marked(
    distances: dict[float, float], scale: float, edge: str
) -> None:
    (found,) = best_table(swept("once", distances))
    assert (found.guidance, found.edge, found.ratio) == (scale, edge, None)


@pytest.mark.parametrize(
    ("path", "target", "flops", "how"),
    [
        ([(10, 8.0), (20, 4.0), (30, 1.0)], 5.0, 17.5, "between points"),
        ([(10, 8.0), (20, 4.0)], 4.0, 20.0, "between points"),
        ([(10, 8.0), (20, 4.0)], 9.0, 10.0, "at the first point"),
        ([(10, 8.0), (20, 4.0)], 3.0, None, "never"),
        # Down, up and down again: the first time counts.
        ([(10, 8.0), (20, 2.0), (30, 6.0), (40, 1.0)], 5.0, 15.0, "between points"),
    ],
)
def test_the_target_is_reached_between_points(
    path: list[tuple[float, float]], target: float, flops: float | None, how: str
) -> None:
    assert crossing(path, target) == (flops if flops is None else pytest.approx(flops), how)


def course(name: str, *points: tuple[float, float]) -> list[CurveRow]:
    beside = {"share": 1.0, "of_monolith": None, "precision": None, "recall": None}
    return [CurveRow(model=name, train_flops=f, distance=d, **beside) for f, d in points]


def test_the_ensembles_path_begins_with_the_seed() -> None:
    rows = [
        *course("pretrain", (10, 20.0), (40, 12.0)),
        *course("monolith", (50, 14.0), (100, 8.0)),
        *course("once", (60, 4.0), (100, 2.0)),
        *course("top-1", (60, 10.0), (100, 9.0)),
    ]
    base, once, top = reach_table(rows, "pretrain")
    assert (base.model, base.of_monolith, base.how) == ("monolith", 1.0, "between points")
    assert (once.model, once.target, once.how) == ("once", 8.0, "between points")
    assert once.train_flops == pytest.approx(50) and once.of_monolith == pytest.approx(0.5)
    assert (top.train_flops, top.of_monolith, top.how) == (None, None, "never")
    alone = [row for row in rows if row.model != "pretrain"]
    once = reach_table(alone)[1]
    assert (once.of_monolith, once.how) == (0.6, "at the first point")
    assert reach_table(course("once", (1, 2.0))) == []  # no monolith, no target


def test_a_monolith_that_no_longer_improves_reaches_its_own_distance_early() -> None:
    rows = [*course("monolith", (50, 6.0), (75, 4.0), (100, 5.0)), *course("once", (50, 7.0), (90, 3.0))]
    base, once = reach_table(rows)
    assert (base.train_flops, once.train_flops) == (pytest.approx(62.5), pytest.approx(70))
