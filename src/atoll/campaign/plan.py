"""What a campaign will cost, before any GPU is spent: operations, memory, time, money, bytes.

Steps and operations are those of `budget.divide`. Time is operations over (GPUs x peak x utilisation).
"""

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby, product
from typing import Any

from atoll.base.errors import ConfigError, nearest
from atoll.base.table import Column, Table, text
from atoll.base.text import round_sig, sharing_sentence, size
from atoll.campaign.budget import RunBudget, divide, router_arguments, too_small
from atoll.campaign.data_spec import DataSpec, row_bytes, token_bytes
from atoll.campaign.gpus import Gpu
from atoll.campaign.roles import BASELINE, BESIDE, RUNS
from atoll.campaign.runs import Run, runs_of
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.train import ParallelConfig
from atoll.encoders.text import text_parameters
from atoll.networks.cost import EMA, GRADIENTS, OVERHEAD, WEIGHTS, Footprint, Mode, choose, footprint, mode
from atoll.networks.families import family
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig

SIZES = tuple(Column(name, "GiB") for name in ("state", "plain", "ckpt", "sharded", "both"))
MEMORY = (Column("run"), Column("batch"), *SIZES, Column("how_it_runs"))
EXPLAINED = (
    "State is weights, gradients, AdamW's moments and the average: 20 bytes a parameter. Then all of it, "
    f"with bf16 copies, activations and {OVERHEAD / 2**30:g} GiB of overhead: plain, with activation "
    "checkpointing (ckpt), with the state sharded over the run's GPUs, and with both. Estimates: leave a "
    "margin."
)
STAGES = {"sample": 64, "serve": 32}
"""Images that `atoll sample` draws at once, and `atoll serve` by default."""
DECODING = 600 * 4 * 2**20
"""Most bytes of an autoencoder's activations (`encoders.vae`)."""
STARTING = 0.8e-3
"""Seconds that a host takes to start the kernels of a block's training step: 134 counted, 6 us each."""
SUFFIXES = {"baseline": ", one site", "extra": ", after them"}


@dataclass(frozen=True)
class RunCost:
    """What one training run takes."""

    run: Run
    budget: RunBudget
    rows: int | None  # training rows, where they are known
    footprint: Footprint
    gpus: int  # that it uses: at most one for each sample of a step
    gpu: Gpu
    parallel: ParallelConfig
    place: str  # settings that hold `parallel`
    beside: float = 0.0  # bytes on every GPU for networks that do not learn: teachers, a text encoder

    @property
    def local_batch(self) -> int:
        """Samples of a step on one GPU."""
        return math.ceil(self.budget.batch / self.gpus)

    @cached_property
    def mode(self) -> Mode | None:
        """How it runs: as the settings say, else the fastest way that fits; None if none does."""
        room, own = self.gpu.memory - self.beside, self.as_set
        return own if own.total <= room else choose(self.footprint, self.gpus, self.local_batch, room)

    @property
    def as_set(self) -> Mode:
        """The way of `train.parallel`."""
        at_once = min(self.local_batch, self.parallel.micro_batch or self.local_batch)
        sharded = self.parallel.strategy == "fsdp" and self.gpus > 1
        way = (sharded, self.parallel.checkpointing, at_once < self.local_batch)
        return mode(self.footprint, self.gpus, at_once, *way)

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that have to be others for it to run in its `mode`."""
        if (way := self.mode) is None or way == self.as_set:
            return {}
        some, wanted = way.micro_batch < self.local_batch, dict[str, Any](checkpointing=way.checkpointing)
        wanted |= {"strategy": "fsdp" if way.sharded else "ddp"} if self.gpus > 1 else {}
        wanted |= {"micro_batch": way.micro_batch if some else None}
        new = {name: value for name, value in wanted.items() if value != getattr(self.parallel, name)}
        return {f"{self.place}.parallel.{name}": value for name, value in new.items()}

    @cached_property
    def modes(self) -> list[Mode]:
        """Whole local batch: as it is, checkpointing, sharded, both."""
        ways = product((False, True), repeat=2)
        return [mode(self.footprint, self.gpus, self.local_batch, *way) for way in ways]

    @property
    def seconds(self) -> float:
        """Duration; blocks that are computed again count here, and not among the training operations."""
        again = self.budget.flops.forward if self.mode is None or self.mode.checkpointing else 0.0
        work = self.budget.steps * self.budget.batch * (self.budget.flops.train + again)
        return work / (self.gpus * self.gpu.tflops * 1e12 * self.gpu.utilisation)

    @property
    def gpu_hours(self) -> float:
        """GPUs times hours."""
        return self.gpus * self.seconds / 3600

    @property
    def usd(self) -> float:
        """Price."""
        return self.gpu_hours * self.gpu.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, seconds, US dollars."""
        return {
            "name": self.run.name,
            "parameters": self.footprint.parameters,
            "rows": self.rows,
            "steps": self.budget.steps,
            "batch": self.budget.batch,
            "train_flops": self.budget.train_flops,
            "gpus": self.gpus,
            "memory": {
                "footprint": asdict(self.footprint) | {"state": self.footprint.state},
                "whole_batch": [asdict(way) | {"total": way.total} for way in self.modes],
                "chosen": None if self.mode is None else asdict(self.mode) | {"total": self.mode.total},
                "beside": self.beside,
            },
            "seconds": self.seconds,
            "gpu_hours": self.gpu_hours,
            "usd": self.usd,
        }


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes between places; None is not known, or not there."""

    data_out: int | None  # data sets sent to the islands
    row: int  # of one row, at most
    weights_out: int  # initial weights sent to the islands; of a low-rank change the network that it changes
    experts_in: int  # networks that come back
    all_reduce: int  # that a data-parallel monolith on as many nodes sends meanwhile, all nodes together
    captions: int | None  # of the data set


@dataclass(frozen=True)
class Plan:
    """A whole campaign."""

    gpu_name: str
    gpu: Gpu
    gpus: int  # of one island
    runs: dict[Run, RunCost]
    """In the order of `RUNS`. The monolith's is the same budget on one cluster of as many GPUs as all islands
    have, whether it is trained or not."""
    trained: list[Run]
    wall_seconds: float  # when all islands train side by side, and the router
    in_common: str
    transfer: PlannedBytes
    notes: list[str]
    drawing: list[dict[str, Any]]  # rows of `MEMORY`, of stages that draw
    draws_with: list[str]  # settings that these need to fit, beyond those that are

    @property
    def own(self) -> list[RunCost]:
        """The runs that make the ensemble."""
        return [cost for run, cost in self.runs.items() if run.kind.counted == "ensemble"]

    @property
    def beside(self) -> list[RunCost]:
        """The other runs that the campaign trains."""
        return [self.runs[run] for run in self.trained if run.kind.counted != "ensemble"]

    @property
    def monolith(self) -> RunCost:
        """The baseline."""
        return self.runs[Run(BASELINE)]

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, seconds, US dollars."""
        return {
            "gpu": {"name": self.gpu_name, **self.gpu.model_dump()},
            "gpus_per_island": self.gpus,
            "runs": [cost.to_json() for cost in self.own],
            BASELINE: self.monolith.to_json(),
            f"trains_{BASELINE}": Run(BASELINE) in self.trained,
            **dict.fromkeys(name for name, role in RUNS.items() if role.counted == "extra"),
            **{cost.run.name: cost.to_json() for cost in self.beside if cost.run.role != BASELINE},
            "total": {**_total(self.own), "wall_seconds": self.wall_seconds},
            "drawing": self.drawing,
            "bytes": asdict(self.transfer),
            "assumptions": self.notes,
        }


def _total(costs: Iterable[RunCost]) -> dict[str, float]:
    totals = [(cost.budget.train_flops, cost.gpu_hours, cost.usd) for cost in costs]
    return dict(zip(("train_flops", "gpu_hours", "usd"), map(sum, zip(*totals, strict=True)), strict=True))


def make_plan(
    config: CampaignConfig, data: DataSpec, table: dict[str, Gpu], name: str, gpus: int = 1
) -> Plan:
    """Plan a campaign whose islands have `gpus` GPUs each, of the kind `name` of the table."""
    if name not in table:
        raise ConfigError(f"unknown GPU {name!r}", f"{nearest(name, table)}; --table FILE adds your own")
    gpu, budget = table[name], divide(config, data.shape, data.weights or data.sizes, data.buckets)
    encoder = text_parameters(config.data.text_encoder) if config.encodes_text else 0
    costs: dict[Run, RunCost] = {}
    for run, part in budget.items():
        if run.kind.task == "route":
            arguments = tuple(router_arguments(config, data.shape).items())
            bf16 = config.router.train.precision != "float32"
            memory, train = _router_footprint(arguments, data.shape, bf16), config.router.train
        else:
            network, train = config.denoiser(run.role, run.expert)
            memory = denoiser_footprint(network, data.shape, train.precision != "float32")
        own = "student.train" if run.expert is None else f"islands.{run.expert}.train"
        place = "train" if train.parallel == config.train.parallel else own
        place = "router.train" if run.kind.task == "route" else place
        rows = data.rows if run.expert is None or data.rows is None else data.sizes[run.expert]
        # The monolith would have the GPUs of all islands, at one site.
        there = gpus * len(data.sizes) if run.kind.counted == "baseline" else gpus
        encoding, there = float(WEIGHTS * (encoder or 0)), min(there, part.batch)
        costs[run] = RunCost(run, part, rows, memory, there, gpu, train.parallel, place, encoding)
    parts = [cost for run, cost in costs.items() if run.kind.assembled]
    experts = [cost for cost in parts if cost.run.expert is not None]
    notes = [*data.notes, *too_small(config, budget), "utilisation and price are examples: see --table"]
    notes += [
        f"{cost.run.name} uses {cost.gpus} of the {gpus} GPUs: its batch is {cost.budget.batch} samples"
        for cost in parts
        if cost.gpus < gpus
    ]
    # Where a host starts a step's kernels more slowly than its GPUs run them, fewer GPUs take as long.
    cost, start = experts[0], STARTING * config.network.dimensions()[0]
    step = cost.local_batch * cost.budget.flops.train / (gpu.tflops * 1e12 * gpu.utilisation)
    if cost.gpus > 1 and step < start:
        few = f"use --gpus {max(1, int(cost.gpus * step / start))}"
        times = f"take {1e3 * step:.2g} ms a step and {1e3 * start:.2g} to start it"
        notes.append(f"{cost.run.name}: {cost.local_batch} images a GPU {times}: {few}")
    if any(config.island(n)[1].precision == "float32" for n in range(config.partition.k)):
        notes.append("times are for bf16, and an expert that trains in float32 takes several times as long")
    if config.encodes_text:
        notes.append("times and prices are without the encoding of texts in training")
    if encoder is None:
        notes.append(f"memory of {config.data.text_encoder} is not counted: its config cannot be found here")

    # How captions' bytes were counted, and what the other way of keeping them would take.
    if (captions := data.text) is not None:
        ways = captions.precomputed, not captions.precomputed
        each, other = (token_bytes(captions.width, stored) for stored in ways)
        samples = sum(
            budget[run].steps * budget[run].batch for run in runs_of(config) if run.kind.counted != "extra"
        )
        seen, stored = samples / captions.captions, size(captions.bytes // each * other)
        counted = f"{captions.captions:,} distinct captions x {captions.tokens:.1f} tokens x {each} bytes"
        notes.append(f"text: {counted}{'' if captions.counted else ', estimated'}")
        if captions.precomputed:
            takes = f"would take {stored} and {seen:.3g} times the encoder's work"
            takes += ": cheaper, data.precompute_text=false" * (seen < 1)
        else:
            takes = f"takes {seen:.3g} times the encoder's work (precomputed states would take {stored})"
        notes.append(f"text encoded in training {takes}")
    notes += config.large_states(data.rows or 0)

    # A student's GPU also holds its teachers, as many as its budget of memory keeps there.
    if config.student is not None:
        student = Run("student")
        sizes = sorted((WEIGHTS * cost.footprint.parameters for cost in experts), reverse=True)
        teachers = sum(sizes[: config.student.residency.places(len(experts), sizes[0])[1]])
        router = costs[Run("router")].footprint.parameters * (config.student.teacher == "routed")
        teachers += WEIGHTS * (router + max(cost.footprint.frozen for cost in experts))
        costs[student] = replace(costs[student], beside=costs[student].beside + teachers)
        share = budget[student].train_flops / budget[Run(BASELINE)].train_flops
        notes += [
            f"the student's FLOPs hold its teachers' forward passes: {share:.3f} of the monolith's in all",
            f"{teachers / 2**30:.1f} GiB of the student's GPU are its teachers'",
        ]

    # Every run starts when those that it needs have ended.
    ends: dict[str, float] = {}
    for run, cost in costs.items():
        if run.kind.counted == "ensemble":
            start = max((ends.get(role, 0.0) for role in run.kind.needs(config)), default=0.0)
            ends[run.role] = max(ends.get(run.role, 0.0), start + cost.seconds)

    started = [cost.footprint for cost in experts if cost.run.init(config) != "scratch"]
    # All-reduce in a ring: each of K nodes sends 2 (K - 1) / K of the float32 gradients at every step.
    ring = 2 * (len(experts) - 1) * GRADIENTS * costs[Run(BASELINE)].footprint.parameters
    transfer = PlannedBytes(
        None if data.stored is None else sum(data.stored),
        row=row_bytes(data.shape, config.data.precompute_text),
        weights_out=WEIGHTS * sum(each.frozen or each.parameters for each in started),
        experts_in=EMA * sum(cost.footprint.parameters for cost in parts),
        all_reduce=ring * budget[Run(BASELINE)].steps,
        captions=None if captions is None else captions.bytes,
    )
    common = sharing_sentence(config.budget.pretrain, config.network.init != "scratch", bool(config.origin))
    about = max(ends.values()), common, transfer, notes
    return Plan(name, gpu, gpus, costs, runs_of(config), *about, *drawing(config, costs, gpu.memory))


def drawing(
    config: CampaignConfig, costs: Mapping[Run, RunCost], memory: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """What stages take of one GPU to draw; settings that make them fit: fewer experts, smaller batches."""
    own, most, k = config.sampling.residency, config.compare.batch, config.partition.k
    width = 4 if own.dtype == "float32" else 2  # bytes of a number
    weights = {run: cost.footprint.weights(width, own.stored) for run, cost in costs.items()}
    sizes = {run: mine for run, (mine, _) in weights.items()}
    experts = [sizes[run] for run in costs if run.expert is not None]
    image = width / 2 * max(cost.footprint.drawing for cost in costs.values())
    second = config.condition != "none" and not config.network.guidance  # branch, at a scale other than 1
    compared = {config.sampling.with_(guidance=config.compare.guidance).guidance, *config.compare.guidances}
    encoder = text_parameters(config.data.text_encoder) if config.condition == "text" else 0
    shared = OVERHEAD + DECODING * (config.data.vae != "none") + WEIGHTS * (encoder or 0)
    changed = max(other for _, other in weights.values())
    single, ways = [run for run in runs_of(config) if run.expert is None], list[list[dict[str, Any]]]()
    for batch, n in product((most >> halved for halved in range(most.bit_length())), range(k, 0, -1)):
        limits, rows = own if n == k else own.model_copy(update={"experts": n}), list[dict[str, Any]]()
        places = limits.places(k, max(experts))[1] if limits.limited else 0
        for stage, count in {**STAGES, "compare": batch}.items():
            # `compare` keeps the single networks that it has measured.
            held = sum(sizes[run] for run in single if stage == "compare" or run.role not in BESIDE)
            held += changed + (max(experts) * places if places else sum(experts))
            guided = second and (compared if stage == "compare" else {config.sampling.guidance}) != {1.0}
            total = held + image * count * (1 + guided) + shared
            how = f"{places or k} experts: {total / 2**30:.1f}" if total <= memory else "DOES NOT FIT"
            rows.append({"run": stage, "batch": count, "state": held, "plain": total, "how_it_runs": how})
        ways.append(rows)
        if all(row["plain"] <= memory for row in rows):
            fewer = [f"sampling.residency.experts={n}"] * (n < k)
            return ways[0], [*fewer, *[f"compare.batch={batch}"] * (batch < most)]
    return ways[0], []


@lru_cache  # experts are mostly alike, and each takes a second
def denoiser_footprint(config: NetworkConfig, shape: DataShape, bf16: bool) -> Footprint:
    """Memory of training a denoiser."""
    adapter = family(config.family)
    return footprint(lambda: adapter.build(config, shape), adapter.predict, shape, bf16)


@lru_cache
def _router_footprint(arguments: tuple[tuple[str, int], ...], shape: DataShape, bf16: bool) -> Footprint:
    return footprint(partial(Router, **dict(arguments)), Router.__call__, shape, bf16)


def must_fit(plan: Plan, table: dict[str, Gpu]) -> None:
    """`ConfigError` that names what would fit, if a run does not; the monolith's cluster is only imagined."""

    # The least memory a run can take: one sample at a time, or all of a step's, which keeps no gradients
    # in between.
    def least(cost: RunCost, gpus: int) -> float:
        ways, batch = product((False, True)[: 1 + (gpus > 1)], (False, True)), -(-cost.budget.batch // gpus)
        sizes = {1: batch > 1, batch: False}
        each = (mode(cost.footprint, gpus, n, *way, sizes[n]).total for way in ways for n in sizes)
        return min(each) + cost.beside

    for cost in (*plan.own, *plan.beside):
        if cost.mode is not None or cost.run.role == BASELINE:
            continue
        gpus = (n for n in range(cost.gpus + 1, cost.budget.batch + 1) if least(cost, n) <= plan.gpu.memory)
        more, need = next(gpus, None), least(cost, cost.gpus)
        other = min(((gpu.memory, name) for name, gpu in table.items() if need <= gpu.memory), default=None)
        options = [f"--gpus {more}"] if more else []
        options += [f"--gpu {other[1]}"] if other else []
        there = f"{cost.gpus} {plan.gpu_name} with {plan.gpu.memory_gib:g} GiB"
        what = f"{cost.run.name} does not fit: at least {need / 2**30:.1f} GiB on each of {there}"
        raise ConfigError(what, f"use {' or '.join(options)}" if options else "make the network smaller")


COSTS: tuple[tuple[Column, Callable[[RunCost], object]], ...] = (
    (Column("params", "parameters"), lambda cost: cost.footprint.parameters),
    (Column("rows", "parameters"), lambda cost: cost.rows),
    (Column("steps"), lambda cost: cost.budget.steps),
    (Column("batch"), lambda cost: cost.budget.batch),
    (Column("FLOPs", "operations"), lambda cost: cost.budget.train_flops),
    (Column("GPUs"), lambda cost: cost.gpus),
    (Column("time", "s"), lambda cost: cost.seconds),
    (Column("GPU_h", digits=3), lambda cost: cost.gpu_hours),
    (Column("USD", digits=3), lambda cost: cost.usd),
)
"""The table of costs: a column after that of the run's name, and what it shows of a run."""


def lines(plan: Plan) -> list[str]:
    """The plan as a person reads it, within 100 columns."""
    gpu, k = plan.gpu, sum(run.expert is not None for run in plan.runs)
    price = f"{gpu.utilisation:.0%} of it used (assumed), {gpu.usd_per_hour:g} USD an hour"
    shown = [f"{k} islands of {plan.gpus} {plan.gpu_name} each: {gpu.tflops:g} TFLOP/s, {price}"]
    shown += [*textwrap.wrap(plan.in_common, 98), ""]

    # Experts in a row that are the same are one line: eight equal ones would hide the one that differs.
    titled: list[tuple[str, RunCost]] = []
    for _, alike in groupby(plan.runs.values(), key=lambda c: (c.run.role, c.budget, c.rows, c.footprint)):
        first, *others = alike
        several = f"{first.run.kind.plural} {first.run.expert}-"
        name = f"{several}{others[-1].run.expert}, each" if others else first.run.name
        titled.append((name + SUFFIXES.get(first.run.kind.counted, ""), first))
    costs = [{"run": title, **{head.name: value(cost) for head, value in COSTS}} for title, cost in titled]
    total = _total(plan.own)
    side_by_side: dict[str, object] = {
        "run": "all side by side",
        "params": sum(cost.footprint.parameters for cost in plan.own),
        "FLOPs": total["train_flops"],
        # Shared pretraining comes before the islands, so its GPUs are not added to theirs.
        "GPUs": max(sum(c.gpus for c in plan.own if c.run.kind.assembled), *(c.gpus for c in plan.own)),
        "time": plan.wall_seconds,
        "GPU_h": total["gpu_hours"],
        "USD": total["usd"],
    }
    costs.insert(sum(cost.run.kind.counted == "ensemble" for _, cost in titled), side_by_side)
    shown += text(Table("costs", "", (Column("run"), *(head for head, _ in COSTS)), costs))
    if plan.beside:
        every = _total([*plan.own, *plan.beside])
        names = " and the ".join(cost.run.name for cost in plan.beside)
        spent = f"{round_sig(every['gpu_hours'])} GPU hours, {round_sig(every['usd'])} USD in all"
        shown.append(f"The campaign trains the {names} too: {spent}.")

    memory: list[dict[str, Any]] = []
    for title, cost in titled:
        how, numbers = "DOES NOT FIT", [cost.footprint.state, *(way.total for way in cost.modes)]
        if (chosen := cost.mode) is not None:
            words = ["sharded"] * chosen.sharded + ["ckpt"] * chosen.checkpointing or ["plain"]
            words += [f"{chosen.micro_batch} at once"] if chosen.micro_batch < cost.local_batch else []
            how = f"{', '.join(words)}: {chosen.total / 2**30:.1f}"
        # One GPU has nothing to shard the state over.
        shown_sizes = zip(SIZES[: 5 if cost.gpus > 1 else 3], numbers, strict=False)
        sizes = {column.name: number for column, number in shown_sizes}
        memory.append({"run": title, "batch": cost.local_batch, **sizes, "how_it_runs": how})
    shown += ["", f"GiB on each GPU ({plan.gpu_name} has {gpu.memory_gib:g}), the whole batch at once:"]
    shown += text(Table("memory", "", MEMORY, [*memory, *plan.drawing]))
    # Of runs that share their settings, the one counts that takes the fewest images at once.
    trained = [cost for cost in (*plan.own, *plan.beside) if cost.run.role != BASELINE]
    changes = dict[str, Any]()
    for cost in sorted(trained, key=lambda cost: -(cost.mode or cost.as_set).micro_batch):
        changes |= cost.changes
    settings = [f"{name}={json.dumps(value)}".replace('"', "") for name, value in changes.items()]
    for verb, wanted in (("run so", settings), ("draw", plan.draws_with)):
        shown += [f"to {verb}: --set {' --set '.join(wanted)}"] * bool(wanted)

    sent, known = plan.transfer, plan.transfer.data_out is not None
    moved = [
        (sent.captions, "captions of the data set"),
        (sent.data_out, "data sets out to the islands"),
        (None if known else sent.row, "for every row of the data sets out to the islands"),
        (sent.weights_out or None, "initial weights out to the islands"),
        (sent.experts_in, "networks back in"),
        (0, "between islands while they train"),
        (sent.all_reduce, f"between {k} nodes of a data-parallel monolith (all-reduce)"),
    ]
    shown += ["", *textwrap.wrap(EXPLAINED, 98), "", "Bytes:"]
    shown += [f"  {size(number):>8}  {words}" for number, words in moved if number is not None]
    return [*shown, "", "Assumed:", *(f"  {note}" for note in plan.notes)]
