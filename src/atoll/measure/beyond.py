"""Beyond the table of a comparison: other guidance scales, and distances on the way of the training."""

from collections.abc import Sequence

from atoll.base.console import say
from atoll.measure.bench import Bench
from atoll.measure.course import Course
from atoll.measure.points import Row
from atoll.measure.streams import Cell, Table
from atoll.measure.sweeps import BASE, CURVE, GUIDANCE, best_table, ratio_of, reach_table

MEASURED = ("distance", "precision", "recall")


def guidance_sweep(bench: Bench, models: Sequence[str], scales: Sequence[float]) -> dict[str, Table]:
    """Tables `guidance`, every model at every scale, and `best`.

    Args:
        bench: of the comparison.
        models: monolith and student, as far as there are any, and routing strategies.
        scales: rising.
    """
    say(f"compare: guidance {', '.join(f'{scale:g}' for scale in scales)}")
    lines: list[list[Cell]] = []
    for name in models:
        for scale in scales:
            row, drawn = bench.row(bench.published(name), scale, bench.config.samples)
            _tell(name, f"guidance {scale:<6g}", row, drawn)
            lines.append([name, scale, *(row.get(key) for key in MEASURED)])
    table = Table(GUIDANCE, lines)
    best = best_table(table.records())
    for record in best.records():
        ratio = f"   {record['ratio']:.3f} of the monolith's" if record["ratio"] is not None else ""
        edge = ", the last scale tried" if record["edge"] else ""
        say(f"  {record['model']:<20} best at guidance {record['guidance']:g}{edge}{ratio}")
    return {"guidance": table, "best": best}


def flops_curve(bench: Bench, course: Course, strategies: Sequence[str], samples: int) -> dict[str, Table]:
    """Tables `curve`, every model after every part of its training, and `reach`.

    Args:
        bench: of the comparison.
        course: of the campaign's training.
        strategies: of the ensemble.
        samples: pictures of each point.
    """
    say(f"compare: on the way of the training, {samples:,} pictures each")
    base = course.single[BASE].card.train_flops if BASE in course.single else None
    ways = [(stage, [name]) for name in course.single for stage in course.dense(name)]
    ways += [(stage, list(strategies)) for stage in course.ensemble()]
    lines: list[list[Cell]] = []
    for stage, names in ways:
        subject = course.subjects(bench, stage)
        for name in names:
            row, drawn = bench.row(subject(name), bench.config.guidance, samples)
            _tell(name, f"{stage.share:6.1%} trained", row, drawn)
            cost = [stage.share, stage.train_flops, ratio_of(stage.train_flops, base)]
            lines.append([name, *cost, *(row.get(key) for key in MEASURED)])
    order = [*course.single, *strategies]
    table = Table(CURVE, sorted(lines, key=lambda line: order.index(str(line[0]))))
    reach = reach_table(table.records(), "pretrain" if course.seeded else None)
    for record in reach.records():
        say(f"  {record['model']:<20} {told(record)}")
    return {"curve": table, "reach": reach}


def told(record: dict[str, Cell]) -> str:
    """A row of `reach` in words."""
    if record["of_monolith"] is None:
        return "does not reach the monolith's final distance"
    least = "at most " if record["how"] == "at the first point" else ""
    return f"as good as the finished monolith after {least}{record['of_monolith']:.1%} of its FLOPs"


def _tell(name: str, where: str, row: Row, drawn: bool) -> None:
    spent = f"{row['seconds']:.0f} s" if drawn else "known"
    say(f"  {name:<20} {where}   distance {row['distance']:8.3f}   {spent}")
