"""What a campaign will cost, before any GPU is spent: operations, memory, time, money, bytes.

Steps and operations are those of `budget.divide`, which the partition uses too. Memory is counted by
`networks/memory.py`. Time is operations over (GPUs x peak x assumed utilisation).
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from atoll.base.errors import ConfigError
from atoll.base.text import in_common, size
from atoll.campaign.budget import RunBudget, divide, router_arguments
from atoll.campaign.data_spec import CaptionBytes, DataSpec, row_bytes, token_bytes
from atoll.campaign.gpus import Gpu
from atoll.campaign.roles import BASELINE, RUNS
from atoll.campaign.runs import Run, runs_of
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.encoders.text import text_parameters
from atoll.networks.families import family
from atoll.networks.memory import EMA, GRADIENTS, WEIGHTS, Footprint, footprint
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig

OVERHEAD = 2 * 2**30
"""Bytes of a GPU that training cannot use: the CUDA context, workspaces, fragments. Assumed."""
SMALL = 8
"""Samples at once below which a GPU is badly used: other ways to save memory are tried before."""


@dataclass(frozen=True)
class Mode:
    """One way to run a step, and the bytes that it takes on every GPU.

    Attributes:
        sharded: state divided over the GPUs (FSDP) and gathered block by block, or whole on each (DDP).
        checkpointing: blocks computed again in the backward pass.
        micro_batch: samples at once on one GPU; gradients of the rest are accumulated.
        state: weights, gradients, moments, average.
        copies: weights in bf16; where sharded, the gathered blocks.
        activations: or the copy of the weights that a validation makes, where that is larger.
    """

    sharded: bool
    checkpointing: bool
    micro_batch: int
    state: float
    copies: float
    activations: float

    @property
    def total(self) -> float:
        """All bytes on one GPU."""
        return self.state + self.copies + self.activations + OVERHEAD


def mode(
    counted: Footprint, gpus: int, micro_batch: int, sharded: bool = False, checkpointing: bool = False
) -> Mode:
    """Bytes on each of `gpus` GPUs at `micro_batch` samples at once."""
    parts = gpus if sharded else 1
    each = counted.checkpointed if checkpointing else counted.activations
    activations = max(each * micro_batch, WEIGHTS * counted.parameters / parts)
    copies = counted.casts
    if parts > 1:  # the block in hand and the next one, with what lies outside of blocks
        gathered = counted.outer_parameters + 2 * counted.block_parameters
        copies = min(counted.parameters, gathered) * WEIGHTS
    return Mode(sharded, checkpointing, micro_batch, counted.state / parts, copies, activations)


def choose(counted: Footprint, gpus: int, batch: int, memory: float) -> Mode | None:
    """The fastest way that fits into `memory` bytes; None if none does.

    Smaller micro-batches come first, as accumulation costs little down to `SMALL` samples; then sharding,
    then checkpointing (one more forward pass), then micro-batches below that.
    """
    for least in dict.fromkeys((min(batch, SMALL), 1)):
        for checkpointing in (False, True):
            for sharded in (False, True)[: 1 + (gpus > 1)]:
                micro = batch
                while micro >= least:
                    footprint = mode(counted, gpus, micro, sharded, checkpointing)
                    if footprint.total <= memory:
                        return footprint
                    micro = math.ceil(micro / 2) if micro > 1 else 0
    return None


@dataclass(frozen=True)
class RunCost:
    """What one training run takes.

    Attributes:
        run: what it trains.
        budget: steps, batch and operations per sample.
        rows: training rows; None if not known.
        footprint: its memory, counted.
        gpus: GPUs it uses: at most one for each sample of a step.
        gpu: what they are.
        beside: bytes on every GPU for networks that do not learn: a student's teachers, a text encoder.
    """

    run: Run
    budget: RunBudget
    rows: int | None
    footprint: Footprint
    gpus: int
    gpu: Gpu
    beside: float = 0.0

    @property
    def memory(self) -> float:
        """Bytes of a GPU that are left for training."""
        return self.gpu.memory - self.beside

    @property
    def local_batch(self) -> int:
        """Samples of a step on one GPU."""
        return math.ceil(self.budget.batch / self.gpus)

    @cached_property
    def mode(self) -> Mode | None:
        """How it runs; None if it does not fit."""
        return choose(self.footprint, self.gpus, self.local_batch, self.memory)

    @cached_property
    def modes(self) -> list[Mode]:
        """Whole local batch: as it is, checkpointing, sharded, both."""
        pairs = [(False, False), (False, True), (True, False), (True, True)]
        return [mode(self.footprint, self.gpus, self.local_batch, s, c) for s, c in pairs]

    @property
    def seconds(self) -> float:
        """Duration; blocks that are computed again count here, and not among the training operations."""
        again = self.budget.flops.forward if self.mode is None or self.mode.checkpointing else 0.0
        work = self.budget.steps * self.budget.batch * (self.budget.flops.train + again)
        return work / (self.gpus * self.gpu.speed)

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
        how = None if self.mode is None else asdict(self.mode) | {"total": self.mode.total}
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
                "whole_batch": [asdict(m) | {"total": m.total} for m in self.modes],
                "chosen": how,
                "beside": self.beside,
            },
            "seconds": self.seconds,
            "gpu_hours": self.gpu_hours,
            "usd": self.usd,
        }


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes between places.

    Attributes:
        data_out: data sets sent to the islands; None where rows are not known.
        row: of one row, at most.
        experts_in: networks that come back.
        between_islands: while they train.
        all_reduce: what a monolith trained data-parallel over as many nodes sends meanwhile, all nodes
            together: float32 gradients around a ring at every step.
        captions: of the data set; None where that is not known, or without text.
    """

    data_out: int | None
    row: int
    experts_in: int
    between_islands: int
    all_reduce: int
    captions: int | None


@dataclass(frozen=True)
class Plan:
    """A whole campaign.

    Attributes:
        gpu_name: kind of GPU.
        gpu: its numbers.
        gpus: GPUs of one island.
        runs: what each run costs, in the order of `RUNS`; the monolith's is the same budget on one cluster of
            as many GPUs as all islands have, whether it is trained or not.
        trained: the runs that the campaign trains.
        wall_seconds: duration when all islands train side by side, and the router.
        in_common: what the experts have in common, as a sentence.
        transfer: bytes.
        notes: what was assumed.
    """

    gpu_name: str
    gpu: Gpu
    gpus: int
    runs: dict[Run, RunCost]
    trained: list[Run]
    wall_seconds: float
    in_common: str
    transfer: PlannedBytes
    notes: list[str]

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

    @property
    def gpus_at_once(self) -> int:
        """GPUs when all islands train side by side, and the router; shared pretraining comes before."""
        side = [cost.gpus for cost in self.own if cost.run.kind.assembled]
        return max(sum(side), *(cost.gpus for cost in self.own))

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, seconds, US dollars."""
        extras = {cost.run.name: cost.to_json() for cost in self.beside if cost.run.role != BASELINE}
        return {
            "gpu": {"name": self.gpu_name, **self.gpu.model_dump()},
            "gpus_per_island": self.gpus,
            "runs": [cost.to_json() for cost in self.own],
            BASELINE: self.monolith.to_json(),
            f"trains_{BASELINE}": Run(BASELINE) in self.trained,
            **dict.fromkeys(name for name, role in RUNS.items() if role.counted == "extra"),
            **extras,
            "total": {
                "train_flops": sum(cost.budget.train_flops for cost in self.own),
                "gpu_hours": sum(cost.gpu_hours for cost in self.own),
                "wall_seconds": self.wall_seconds,
                "usd": sum(cost.usd for cost in self.own),
            },
            "bytes": asdict(self.transfer),
            "assumptions": self.notes,
        }


def make_plan(
    config: CampaignConfig, data: DataSpec, table: dict[str, Gpu], name: str, gpus: int = 1
) -> Plan:
    """Plan a campaign.

    Args:
        config: its settings.
        data: its data, known or assumed.
        table: kinds of GPU.
        name: the kind that every island has.
        gpus: how many each has.
    """
    gpu, budget = table[name], divide(config, data.shape, data.weights or data.sizes, data.buckets)
    encoder = text_parameters(config.data.text_encoder) if config.encodes_text else 0
    counted: dict[tuple[str, bool], Footprint] = {}  # experts are mostly alike, and each takes a second
    costs: dict[Run, RunCost] = {}
    for run, part in budget.items():
        network, train = config.denoiser(run.role, run.expert)
        key = (network.model_dump_json(), train.precision != "float32")
        if run.kind.task == "route":
            memory = router_footprint(config, data.shape)
        else:
            if key not in counted:
                counted[key] = denoiser_footprint(network, data.shape, key[1])
            memory = counted[key]
        rows = data.rows if run.expert is None or data.rows is None else data.sizes[run.expert]
        there = gpus * len(data.sizes) if run.kind.counted == "baseline" else gpus
        encoding = float(WEIGHTS * (encoder or 0))
        costs[run] = RunCost(run, part, rows, memory, min(there, part.batch), gpu, encoding)
    parts = [cost for run, cost in costs.items() if run.kind.assembled]
    experts = [cost for cost in parts if cost.run.expert is not None]
    notes = [*data.notes, "utilisation and price are examples: --table FILE puts in what you measure and pay"]
    for cost in parts:
        if cost.gpus < gpus:
            of = f"{cost.gpus} of the {gpus} GPUs"
            notes.append(f"{cost.run.name} uses {of}: its batch is {cost.budget.batch} samples")
    if any(config.island(n)[1].precision == "float32" for n in range(config.partition.k)):
        notes.append("times are for bf16, and an expert that trains in float32 takes several times as long")
    if config.encodes_text:
        notes.append("times and prices are without the encoding of texts in training")
    if encoder is None:
        notes.append(f"memory of {config.data.text_encoder} is not counted: its config cannot be found here")
    trained = runs_of(config)
    if data.text is not None:
        seen = [budget[run] for run in trained if run.kind.counted != "extra"]
        notes += _text_notes(data.text, sum(part.steps * part.batch for part in seen))

    # A student's GPU also holds its teachers, as many as its budget of memory keeps there.
    if config.student is not None:
        student, monolith = Run("student"), budget[Run(BASELINE)]
        sizes = sorted((WEIGHTS * cost.footprint.parameters for cost in experts), reverse=True)
        teachers = sum(sizes[: config.student.residency.places(len(experts), sizes[0])[1]])
        if config.student.teacher == "routed":
            teachers += WEIGHTS * costs[Run("router")].footprint.parameters
        costs[student] = replace(costs[student], beside=costs[student].beside + teachers)
        share = budget[student].train_flops / monolith.train_flops
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

    ring = 2 * (len(experts) - 1) * GRADIENTS * costs[Run(BASELINE)].footprint.parameters
    transfer = PlannedBytes(
        None if data.stored is None else sum(data.stored),
        row=row_bytes(data.shape, config.data.precompute_text),
        experts_in=EMA * sum(cost.footprint.parameters for cost in parts),
        between_islands=0,
        all_reduce=ring * budget[Run(BASELINE)].steps,
        captions=None if data.text is None else data.text.bytes,
    )
    common = in_common(config.budget.pretrain, config.network.init != "scratch")
    return Plan(name, gpu, gpus, costs, trained, max(ends.values()), common, transfer, notes)


def _text_notes(text: CaptionBytes, samples: int) -> list[str]:
    """How the captions' bytes were counted, and what the other way of keeping them would take."""
    each, other = (token_bytes(text.width, one) for one in (text.precomputed, not text.precomputed))
    counted = f"{text.captions:,} distinct captions x {text.tokens:.1f} tokens x {each} bytes"
    stored, seen = size(text.bytes // each * other), samples / text.captions
    works = f"{seen:.3g} times"
    if text.precomputed:
        cheaper = ": cheaper, data.precompute_text=false" if seen < 1 else ""
        note = f"would take {stored} and {works} the encoder's work{cheaper}"
    else:
        note = f"takes {works} the encoder's work (precomputed states would take {stored})"
    return [f"text: {counted}{'' if text.counted else ', estimated'}", f"text encoded in training {note}"]


def denoiser_footprint(config: NetworkConfig, shape: DataShape, bf16: bool) -> Footprint:
    """Memory of training a denoiser."""
    adapter = family(config.family)
    return footprint(lambda: adapter.build(config, shape), adapter.predict, shape, bf16)


def router_footprint(config: CampaignConfig, shape: DataShape) -> Footprint:
    """Memory of training the router."""
    arguments, bf16 = router_arguments(config, shape), config.router.train.precision != "float32"
    return footprint(lambda: Router(**arguments), lambda net, x, t, cond: net(x, t, cond), shape, bf16)


def must_fit(plan: Plan, table: dict[str, Gpu]) -> None:
    """`ConfigError` that names what would fit, if a run does not; the monolith's cluster is only imagined."""

    def least(cost: RunCost, gpus: int) -> float:
        """Bytes on each GPU of the way that takes the least memory."""
        ways = [(sharded, again) for sharded in (False, True)[: 1 + (gpus > 1)] for again in (False, True)]
        return min(mode(cost.footprint, gpus, 1, *way).total for way in ways) + cost.beside

    for cost in (*plan.own, *(cost for cost in plan.beside if cost.run.role != BASELINE)):
        if cost.mode is not None:
            continue
        gpus = (n for n in range(cost.gpus + 1, cost.budget.batch + 1) if least(cost, n) <= plan.gpu.memory)
        more = next(gpus, None)
        others = [(gpu.memory_gib, name) for name, gpu in table.items()]
        other = min((o for o in others if least(cost, cost.gpus) <= table[o[1]].memory), default=None)
        options = [f"--gpus {more}"] if more else []
        options += [f"--gpu {other[1]}"] if other else []
        raise ConfigError(
            f"{cost.run.name} does not fit: at least {least(cost, cost.gpus) / 2**30:.1f} GiB on each of "
            f"{cost.gpus} {plan.gpu_name} with {plan.gpu.memory_gib:g} GiB",
            f"use {' or '.join(options)}" if options else "make the network smaller",
        )
