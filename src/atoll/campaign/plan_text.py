"""A plan as a person reads it, within 100 columns."""

import textwrap
from itertools import groupby

from atoll.base.table import Column, Table, text
from atoll.base.text import significant, size
from atoll.campaign.plan import OVERHEAD, Plan, RunCost

COSTS = (
    Column("run"),
    Column("params", "parameters"),
    Column("rows", "parameters"),
    Column("steps"),
    Column("batch"),
    Column("FLOPs", "operations"),
    Column("GPUs"),
    Column("time", "s"),
    Column("GPU_h", digits=3),
    Column("USD", digits=3),
)
MEMORY = (
    Column("run"),
    Column("batch"),
    *(Column(name, "GiB") for name in ("state", "plain", "ckpt", "sharded", "both")),
    Column("how_it_runs"),
)
EXPLAINED = (
    "State is weights, gradients, AdamW's moments and the average: 20 bytes a parameter. Then all of it, "
    f"with bf16 copies, activations and {OVERHEAD / 2**30:g} GiB of overhead: plain, with activation "
    "checkpointing (ckpt), with the state sharded over the run's GPUs, and with both. Estimates: leave a "
    "margin."
)
SUFFIXES = {"baseline": ", one site", "extra": ", after them"}


def lines(plan: Plan) -> list[str]:
    """The plan in lines."""
    gpu, k = plan.gpu, sum(run.expert is not None for run in plan.runs)
    said = [
        f"{k} islands of {plan.gpus} {plan.gpu_name} each: {gpu.tflops:g} TFLOP/s, "
        f"{gpu.utilisation:.0%} of it used (assumed), {gpu.usd_per_hour:g} USD an hour",
        *textwrap.wrap(plan.in_common, 98),
        "",
    ]

    # Experts in a row that are the same are one line.
    titled: list[tuple[str, RunCost]] = []
    for _, alike in groupby(plan.runs.values(), key=lambda c: (c.run.role, c.budget, c.rows, c.footprint)):
        first, *others = alike
        several = f"{first.run.kind.plural} {first.run.expert}-"
        name = f"{several}{others[-1].run.expert}, each" if others else first.run.name
        titled.append((name + SUFFIXES.get(first.run.kind.counted, ""), first))
    own = [(title, cost) for title, cost in titled if cost.run.kind.counted == "ensemble"]
    total = {
        "run": "all side by side",
        "params": sum(cost.footprint.parameters for cost in plan.own),
        "FLOPs": sum(cost.budget.train_flops for cost in plan.own),
        "GPUs": plan.gpus_at_once,
        "time": plan.wall_seconds,
        "GPU_h": sum(cost.gpu_hours for cost in plan.own),
        "USD": sum(cost.usd for cost in plan.own),
    }
    rows = [_cost(title, cost) for title, cost in own]
    rows += [total, *(_cost(title, cost) for title, cost in titled[len(own) :])]
    said += text(Table("costs", "", COSTS, rows))
    if plan.beside:
        every = [*plan.own, *plan.beside]
        hours, usd = sum(cost.gpu_hours for cost in every), sum(cost.usd for cost in every)
        also = " and the ".join(cost.run.name for cost in plan.beside)
        said.append(
            f"The campaign trains the {also} too: {significant(hours)} GPU hours, "
            f"{significant(usd)} USD in all."
        )

    said += ["", f"GiB on each GPU ({plan.gpu_name} has {gpu.memory_gib:g}), the whole batch at once:"]
    said += text(Table("memory", "", MEMORY, [_memory(title, cost) for title, cost in titled]))
    sent, known = plan.transfer, plan.transfer.data_out is not None
    moved = [
        (sent.captions, "captions of the data set"),
        (sent.data_out, "data sets out to the islands"),
        (None if known else sent.row, "for every row of the data sets out to the islands"),
        (sent.experts_in, "networks back in"),
        (sent.between_islands, "between islands while they train"),
        (sent.all_reduce, f"between {k} nodes of a data-parallel monolith (all-reduce)"),
    ]
    said += ["", *textwrap.wrap(EXPLAINED, 98), "", "Bytes:"]
    said += [f"  {size(number):>8}  {what}" for number, what in moved if number is not None]
    return [*said, "", "Assumed:", *(f"  {note}" for note in plan.notes)]


def _cost(title: str, cost: RunCost) -> dict[str, object]:
    return {
        "run": title,
        "params": cost.footprint.parameters,
        "rows": cost.rows,
        "steps": cost.budget.steps,
        "batch": cost.budget.batch,
        "FLOPs": cost.budget.train_flops,
        "GPUs": cost.gpus,
        "time": cost.seconds,
        "GPU_h": cost.gpu_hours,
        "USD": cost.usd,
    }


def _memory(title: str, cost: RunCost) -> dict[str, object]:
    plain, again, sharded, both = (m.total if cost.gpus > 1 or not m.sharded else None for m in cost.modes)
    chosen, how = cost.mode, "DOES NOT FIT"
    if chosen is not None:
        words = ["sharded"] * chosen.sharded + ["ckpt"] * chosen.checkpointing or ["plain"]
        words += [f"{chosen.micro_batch} at once"] if chosen.micro_batch < cost.local_batch else []
        how = f"{', '.join(words)}: {chosen.total / 2**30:.1f}"
    numbers = {"state": cost.footprint.state, "plain": plain, "ckpt": again, "sharded": sharded, "both": both}
    return {"run": title, "batch": cost.local_batch, **numbers, "how_it_runs": how}
