"""What a campaign will cost, before any GPU is spent: operations, memory, time, money, bytes.

Steps and operations are those of `budget.divide`, which the partition uses too. Memory is counted by
`networks/memory.py`. Time is operations over (GPUs x peak x assumed utilisation).
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from atoll.base.errors import ConfigError
from atoll.base.text import in_common, size
from atoll.campaign.budget import Share, divide, router_arguments
from atoll.campaign.expected import CaptionBytes, Expected, row_bytes, token_bytes
from atoll.campaign.gpus import Gpu
from atoll.campaign.runs import Run
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
                for micro in _halvings(batch, least):
                    footprint = mode(counted, gpus, micro, sharded, checkpointing)
                    if footprint.total <= memory:
                        return footprint
    return None


def _halvings(batch: int, least: int) -> Iterator[int]:
    while batch >= least:
        yield batch
        if batch == 1:
            return
        batch = math.ceil(batch / 2)


@dataclass(frozen=True)
class RunCost:
    """What one training run takes.

    Attributes:
        name: `expert 0`, `router`, `monolith`, `student`.
        share: steps, batch and operations per sample.
        rows: training rows; None if not known.
        footprint: its memory, counted.
        gpus: GPUs it uses: at most one for each sample of a step.
        gpu: what they are.
        beside: bytes on every GPU for networks that do not learn: a student's teachers, a text encoder.
    """

    name: str
    share: Share
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
        return math.ceil(self.share.batch / self.gpus)

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
        again = self.share.flops.forward if self.mode is None or self.mode.checkpointing else 0.0
        work = self.share.steps * self.share.batch * (self.share.flops.train + again)
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
            "name": self.name,
            "parameters": self.footprint.parameters,
            "rows": self.rows,
            "steps": self.share.steps,
            "batch": self.share.batch,
            "train_flops": self.share.train_flops,
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
class Traffic:
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
        experts: one run each.
        router: its run.
        pretrain: the run that the experts start from, if there is one.
        monolith: the same budget on one cluster of as many GPUs as all islands have.
        baseline: whether the campaign trains the monolith too.
        student: the run that learns from the experts, after them, if there is one.
        in_common: what the experts have in common, as a sentence.
        traffic: bytes.
        notes: what was assumed.
    """

    gpu_name: str
    gpu: Gpu
    gpus: int
    experts: list[RunCost]
    router: RunCost
    pretrain: RunCost | None
    monolith: RunCost
    baseline: bool
    student: RunCost | None
    in_common: str
    traffic: Traffic
    notes: list[str]

    @property
    def own(self) -> list[RunCost]:
        """The runs that make the ensemble."""
        return [*self.experts, self.router, *([self.pretrain] if self.pretrain else [])]

    @property
    def gpus_at_once(self) -> int:
        """GPUs when all islands train side by side, and the router; shared pretraining comes before."""
        beside = sum(run.gpus for run in (*self.experts, self.router))
        return max(beside, self.pretrain.gpus if self.pretrain else 0)

    @property
    def wall_seconds(self) -> float:
        """Duration when all islands train side by side, and the router, after shared pretraining."""
        before = self.pretrain.seconds if self.pretrain else 0.0
        return max(before + max(run.seconds for run in self.experts), self.router.seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, seconds, US dollars."""
        return {
            "gpu": {"name": self.gpu_name, **self.gpu.model_dump()},
            "gpus_per_island": self.gpus,
            "runs": [run.to_json() for run in self.own],
            "monolith": self.monolith.to_json(),
            "trains_monolith": self.baseline,
            "student": self.student.to_json() if self.student else None,
            "total": {
                "train_flops": sum(run.share.train_flops for run in self.own),
                "gpu_hours": sum(run.gpu_hours for run in self.own),
                "wall_seconds": self.wall_seconds,
                "usd": sum(run.usd for run in self.own),
            },
            "bytes": asdict(self.traffic),
            "assumptions": self.notes,
        }


def make_plan(
    config: CampaignConfig, data: Expected, table: dict[str, Gpu], name: str, gpus: int = 1
) -> Plan:
    """Plan a campaign.

    Args:
        config: its settings.
        data: its data, known or assumed.
        table: kinds of GPU.
        name: the kind that every island has.
        gpus: how many each has.
    """
    gpu, budget = table[name], divide(config, data.shape, data.masses or data.sizes, data.buckets)
    rows = [None if data.rows is None else size for size in data.sizes]
    counts: dict[tuple[str, bool], Footprint] = {}
    encoder = text_parameters(config.data.text_encoder) if config.encodes_text else 0
    beside = WEIGHTS * (encoder or 0)

    def cost(run: Run, share: Share, rows: int | None, gpus: int) -> RunCost:
        network, train = config.denoiser(*run)
        key = (network.model_dump_json(), train.precision != "float32")
        if key not in counts:
            counts[key] = denoiser_footprint(network, data.shape, key[1])
        return RunCost(run.name, share, rows, counts[key], min(gpus, share.batch), gpu, beside)

    experts = [cost(Run("expert", n), share, rows[n], gpus) for n, share in enumerate(budget.experts)]
    routing = router_footprint(config, data.shape)
    router = RunCost("router", budget.router, data.rows, routing, min(gpus, budget.router.batch), gpu, beside)
    monolith = cost(Run("monolith"), budget.monolith, data.rows, gpus * len(experts))
    pretrain = cost(Run("pretrain"), budget.pretrain, data.rows, gpus) if budget.pretrain else None
    student = None
    if budget.student:
        student = cost(Run("student"), budget.student, data.rows, gpus)
        student = replace(student, beside=beside + _teachers(config, experts, router))

    networks = sum(run.footprint.parameters for run in [*experts, router])
    ring = 2 * (len(experts) - 1) * GRADIENTS * monolith.footprint.parameters
    traffic = Traffic(
        None if data.stored is None else sum(data.stored),
        row=row_bytes(data.shape, config.data.precompute_text),
        experts_in=EMA * networks,
        between_islands=0,
        all_reduce=ring * budget.monolith.steps,
        captions=None if data.text is None else data.text.bytes,
    )
    notes = [*data.notes, *_notes([*experts, router], gpus, config)]
    if config.encodes_text:
        notes.append("times and prices are without the encoding of texts in training")
    if encoder is None:
        notes.append(f"memory of {config.data.text_encoder} is not counted: its config cannot be found here")
    if data.text is not None:
        shares = [*budget.experts, budget.router, *(run for run in [budget.pretrain] if run)]
        shares += [budget.monolith] if config.monolith else []
        notes += _text_notes(data.text, sum(share.steps * share.batch for share in shares))
    if student:
        part = student.share.train_flops / budget.monolith.train_flops
        notes.append(
            f"the student's FLOPs hold its teachers' forward passes: {part:.3f} of the monolith's in all"
        )
        notes.append(f"{(student.beside - beside) / 2**30:.1f} GiB of the student's GPU are its teachers'")
    common = in_common(config.budget.pretrain, config.network.init != "scratch")
    return Plan(
        name, gpu, gpus, experts, router, pretrain, monolith, config.monolith, student, common, traffic, notes
    )


def _teachers(config: CampaignConfig, experts: list[RunCost], router: RunCost) -> float:
    """Bytes of the networks that a student learns from, as many as its budget keeps on the device."""
    assert config.student is not None
    size = WEIGHTS * max(run.footprint.parameters for run in experts)
    places = config.student.residency.places(len(experts), size)[1]
    resident = sum(sorted((WEIGHTS * run.footprint.parameters for run in experts), reverse=True)[:places])
    return resident + (WEIGHTS * router.footprint.parameters if config.student.teacher == "routed" else 0)


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


def _notes(runs: list[RunCost], gpus: int, config: CampaignConfig) -> list[str]:
    notes = ["utilisation and price are examples: --table FILE puts in what you measure and pay"]
    notes += [
        f"{run.name} uses {run.gpus} of the {gpus} GPUs: its batch is {run.share.batch} samples"
        for run in runs
        if run.gpus < gpus
    ]
    if any(config.island(n)[1].precision == "float32" for n in range(config.partition.k)):
        notes.append("times are for bf16, and an expert that trains in float32 takes several times as long")
    return notes


def denoiser_footprint(config: NetworkConfig, shape: DataShape, bf16: bool) -> Footprint:
    """Memory of training a denoiser."""
    adapter = family(config.family)
    return footprint(lambda: adapter.build(config, shape), adapter.predict, shape, bf16)


def router_footprint(config: CampaignConfig, shape: DataShape) -> Footprint:
    """Memory of training the router."""
    arguments, bf16 = router_arguments(config, shape), config.router.train.precision != "float32"
    return footprint(lambda: Router(**arguments), lambda net, x, t, cond: net(x, t, cond), shape, bf16)


def must_fit(plan: Plan, table: dict[str, Gpu]) -> None:
    """`ConfigError` that names what would fit, if a run of the ensemble does not."""
    for run in [*plan.own, *([plan.student] if plan.student else [])]:
        if run.mode is None:
            least = _least(run.footprint, run.gpus)
            raise ConfigError(
                f"{run.name} does not fit: at least {(least.total + run.beside) / 2**30:.1f} GiB on each of "
                f"{run.gpus} {plan.gpu_name} with {plan.gpu.memory_gib:g} GiB",
                _what_fits(run, table),
            )


def _least(counted: Footprint, gpus: int) -> Mode:
    """The way that takes the least memory."""
    kinds = [(s, c) for s in (False, True)[: 1 + (gpus > 1)] for c in (False, True)]
    return min((mode(counted, gpus, 1, s, c) for s, c in kinds), key=lambda m: m.total)


def _what_fits(run: RunCost, table: dict[str, Gpu]) -> str:
    def fits(gpus: int, memory: float) -> bool:
        return _least(run.footprint, gpus).total + run.beside <= memory

    counts = [n for n in range(run.gpus + 1, run.share.batch + 1) if fits(n, run.gpu.memory)]
    others = sorted((gpu.memory_gib, name) for name, gpu in table.items() if fits(run.gpus, gpu.memory))
    options = [f"--gpus {counts[0]}"] if counts else []
    options += [f"--gpu {others[0][1]}"] if others else []
    return f"use {' or '.join(options)}" if options else "make the network smaller"
