"""A plan as a person reads it, within 100 columns."""

import textwrap
from itertools import groupby

from atoll.base.text import columns, count, duration, significant, size
from atoll.campaign.plan import OVERHEAD, Plan, RunCost


def lines(plan: Plan) -> list[str]:
    """The plan in lines."""
    groups = _grouped(plan)
    text = [_head(plan), *textwrap.wrap(plan.in_common, 98), ""]
    costs = [_cost(title, run) for title, run in groups]
    trained = len(costs) - (2 if plan.student else 1)
    text += columns([_COST, *costs[:trained], _total(plan), *costs[trained:]])
    more = {"monolith": plan.monolith if plan.baseline else None, "student": plan.student}
    if also := [name for name, run in more.items() if run is not None]:
        runs = [*plan.own, *(run for run in more.values() if run is not None)]
        hours, usd = sum(run.gpu_hours for run in runs), sum(run.usd for run in runs)
        text.append(
            f"The campaign trains the {' and the '.join(also)} too: {significant(hours)} GPU hours,"
            f" {significant(usd)} USD in all."
        )
    text += ["", f"GiB on each GPU ({plan.gpu_name} has {plan.gpu.memory_gib:g}), the whole batch at once:"]
    text += columns([_MEMORY, *(_memory(title, run) for title, run in groups)], left=(0, 7))
    text += ["", *textwrap.wrap(_EXPLAINED.format(overhead=OVERHEAD / 2**30), 98), "", "Bytes:"]
    text += _traffic(plan)
    return [*text, "", "Assumed:", *(f"  {note}" for note in plan.notes)]


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
    titled = []
    for _, same in groupby(plan.experts, key=lambda run: (run.share, run.rows, run.footprint, run.gpus)):
        runs = list(same)
        first, last = runs[0].name, runs[-1].name.split()[-1]
        titled.append((first if len(runs) == 1 else f"experts {first.split()[-1]}-{last}, each", runs[0]))
    pretrain = [("pretraining, first", plan.pretrain)] if plan.pretrain else []
    student = [("student, after them", plan.student)] if plan.student else []
    return [*pretrain, *titled, ("router", plan.router), *student, ("monolith, one site", plan.monolith)]


def _cost(title: str, run: RunCost) -> list[str]:
    share = run.share
    return [
        title,
        count(run.footprint.parameters),
        count(run.rows),
        f"{share.steps:,} x {share.batch}",
        f"{share.train_flops:.2e}",
        str(run.gpus),
        duration(run.seconds),
        significant(run.gpu_hours),
        significant(run.usd),
    ]


def _total(plan: Plan) -> list[str]:
    runs = plan.own
    return [
        "all side by side",
        count(sum(run.footprint.parameters for run in runs)),
        "",
        "",
        f"{sum(run.share.train_flops for run in runs):.2e}",
        str(plan.gpus_at_once),
        duration(plan.wall_seconds),
        significant(sum(run.gpu_hours for run in runs)),
        significant(sum(run.usd for run in runs)),
    ]


def _memory(title: str, run: RunCost) -> list[str]:
    sizes = [_gib(m.total) if not m.sharded or run.gpus > 1 else "-" for m in run.modes]
    return [title, str(run.local_batch), _gib(run.footprint.state), *sizes, _how(run)]


def _how(run: RunCost) -> str:
    if run.mode is None:
        return "DOES NOT FIT"
    words = ["sharded"] * run.mode.sharded + ["ckpt"] * run.mode.checkpointing
    parts = ", ".join(words) or "plain"
    more = f", {run.mode.micro_batch} at once" if run.mode.micro_batch < run.local_batch else ""
    return f"{parts}{more}: {_gib(run.mode.total)}"


def _traffic(plan: Plan) -> list[str]:
    traffic, k = plan.traffic, len(plan.experts)
    known = traffic.data_out is not None
    out, what = (
        (traffic.data_out or 0, "data sets") if known else (traffic.row, "for every row of the data sets")
    )
    stored = traffic.captions
    return [
        *([f"  {size(stored):>8}  captions of the data set"] if stored is not None else []),
        f"  {size(out):>8}  {what} out to the islands",
        f"  {size(traffic.experts_in):>8}  networks back in",
        f"  {size(traffic.between_islands):>8}  between islands while they train",
        f"  {size(traffic.all_reduce):>8}  between {k} nodes of a data-parallel monolith (all-reduce)",
    ]


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f}"
