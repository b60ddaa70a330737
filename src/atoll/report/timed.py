"""Charts over the time t of the flow."""

from collections.abc import Sequence

from markupsafe import Markup

from atoll.report import figures
from atoll.report.figures import Axis, Series


def by_time(
    series: Sequence[Series],
    title: str,
    about: str,
    guides: Sequence[tuple[str, float]] = (),
    zero: bool = False,
    share: bool = False,
) -> Markup | None:
    """Lines over t; None where there is no point.

    Args:
        series: the lines.
        title: of the other axis.
        about: the whole in words.
        guides: names and heights of dashed lines.
        zero: whether the axis begins at 0.
        share: whether it is one of shares, from 0 to 1.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    y = Axis(title, 0.0, 1.0, marks=(0, 0.25, 0.5, 0.75, 1), label=lambda v: f"{v:.0%}")
    if not share:
        values = [v for one in drawn for _, v in one.points] + [value for _, value in guides]
        y = figures.linear_axis(title, values, zero=zero)
    return figures.line_chart(drawn, _time_axis(), y, about, guides)


def _time_axis() -> Axis:
    """The axis of t, from data to noise."""
    ends = {0.0: "0 data", 1.0: "1 noise"}
    return Axis("t", -0.02, 1.02, marks=(0.0, 0.25, 0.5, 0.75, 1.0), label=lambda t: ends.get(t, f"{t:.2g}"))
