"""A plan as a person reads it, within 100 columns."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from atoll.base.text import size
from atoll.campaign.plan import OVERHEAD, Plan, RunCost


def lines(plan: Plan) -> list[str]:
    """The plan in lines."""
    groups = _grouped(plan)
    found = [_head(plan), ""]
    costs = [_cost(title, run) for title, run in groups]
    own = len(costs) - (2 if plan.student else 1)
    found += _table(_COST, [*costs[:own], _total(plan), *costs[own:]])
    more = {"monolith": plan.monolith if plan.baseline else None, "student": plan.student}
    if also := [name for name, run in more.items() if run is not None]:
        runs = [*plan.own, *(run for run in more.values() if run is not None)]
        hours, usd = sum(run.gpu_hours for run in runs), sum(run.usd for run in runs)
        found.append(
            f"The campaign trains the {' and the '.join(also)} too: {_amount(hours)} GPU hours,"
            f" {_amount(usd)} USD in all."
        )
    found += ["", f"GiB on each GPU ({plan.gpu_name} has {plan.gpu.memory_gib:g}), the whole batch at once:"]
    found += _table(_MEMORY, [_memory(title, run) for title, run in groups])
    found += ["", *_wrapped(_EXPLAINED.format(overhead=OVERHEAD / 2**30)), "", "Bytes:"]
    found += _traffic(plan)
    return [*found, "", "Assumed:", *(f"  {note}" for note in plan.notes)]


_EXPLAINED = (
    "State is weights, gradients, AdamW's moments and the average: 20 bytes a parameter. Then all of it, "
    "with bf16 copies, activations and {overhead:g} GiB of overhead: plain, with activation checkpointing "
    "(ckpt), with the state sharded over the run's GPUs, and with both. Estimates: leave a margin."
)
_COST = ("run", "params", "rows", "steps x batch", "FLOPs", "GPUs", "time", "GPU hours", "USD")
_MEMORY = ("run", "batch", "state", "plain", "ckpt", "sharded", "both", "how it runs")


def _head(plan: Plan) -> str:
    gpu, k = plan.gpu, len(plan.experts)
    return (
        f"{k} islands of {plan.gpus} {plan.gpu_name} each: {gpu.tflops:g} TFLOP/s, "
        f"{gpu.utilisation:.0%} of it used (assumed), {gpu.usd_per_hour:g} USD an hour"
    )


def _grouped(plan: Plan) -> list[tuple[str, RunCost]]:
    """Runs with their titles; experts in a row that are the same are one line."""
    found = []
    for _, same in groupby(plan.experts, key=lambda run: (run.share, run.rows, run.footprint, run.gpus)):
        runs = list(same)
        first, last = runs[0].name, runs[-1].name.split()[-1]
        found.append((first if len(runs) == 1 else f"experts {first.split()[-1]}-{last}, each", runs[0]))
    pretrain = [("pretraining, before them", plan.pretrain)] if plan.pretrain else []
    student = [("student, after them", plan.student)] if plan.student else []
    return [*pretrain, *found, ("router", plan.router), *student, ("monolith, one cluster", plan.monolith)]


def _cost(title: str, run: RunCost) -> list[str]:
    share = run.share
    return [
        title,
        count(run.footprint.parameters),
        count(run.rows) if run.rows is not None else "?",
        f"{share.steps:,} x {share.batch}",
        _power(share.train_flops),
        str(run.gpus),
        span(run.seconds),
        _amount(run.gpu_hours),
        _amount(run.usd),
    ]


def _total(plan: Plan) -> list[str]:
    runs = plan.own
    return [
        "all side by side",
        count(sum(run.footprint.parameters for run in runs)),
        "",
        "",
        _power(sum(run.share.train_flops for run in runs)),
        str(plan.gpus_at_once),
        span(plan.wall_seconds),
        _amount(sum(run.gpu_hours for run in runs)),
        _amount(sum(run.usd for run in runs)),
    ]


def _memory(title: str, run: RunCost) -> list[str]:
    sizes = [gib(m.total) if not m.sharded or run.gpus > 1 else "-" for m in run.modes]
    return [title, str(run.local_batch), gib(run.footprint.state), *sizes, how(run)]


def how(run: RunCost) -> str:
    """How a run fits, in words."""
    if run.mode is None:
        return "DOES NOT FIT"
    words = ["sharded"] * run.mode.sharded + ["ckpt"] * run.mode.checkpointing
    parts = ", ".join(words) or "plain"
    more = f", {run.mode.micro_batch} at once" if run.mode.micro_batch < run.local_batch else ""
    return f"{parts}{more}: {gib(run.mode.total)}"


def _traffic(plan: Plan) -> list[str]:
    traffic, k = plan.traffic, len(plan.experts)
    known = traffic.data_out is not None
    out, what = (
        (traffic.data_out or 0, "data sets") if known else (traffic.row, "for every row of the data sets")
    )
    return [
        f"  {size(out):>8}  {what} out to the islands",
        f"  {size(traffic.experts_in):>8}  networks back in",
        f"  {size(traffic.between_islands):>8}  between islands while they train",
        f"  {size(traffic.all_reduce):>8}  between {k} nodes of a data-parallel monolith (all-reduce)",
    ]


def count(number: float) -> str:
    """A number in thousands, millions, billions."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"


def gib(number: float) -> str:
    """Bytes in GiB."""
    return f"{number / 2**30:.1f}"


def span(seconds: float) -> str:
    """A duration in its largest useful unit."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def _power(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be: texts on the left, numbers on the right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = {0} | ({len(head) - 1} if head[-1] == "how it runs" else set())

    def cell(number: int, text: str) -> str:
        return text.ljust(widths[number]) if number in left else text.rjust(widths[number])

    return ["  ".join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in cells]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 98)
