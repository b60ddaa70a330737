"""Time of sampling with an ensemble against one network of the same architecture, and memory with offloading.

    python benchmarks/sampling.py [--quick] [--pairs N] [--threads N] [--json PATH]

Networks are PixArts with random weights; times do not depend on weights. The router's network is real and so
is its cost, but what it says is replaced by random logits, drawn anew for every sample and step: each sample
chooses among all experts evenly, so that a batch falls into the most and smallest parts. A trained router
is steadier, and kinder.

Both sides sample the same noise with guidance (two branches) in one process. They take turns, and who goes
first changes; a ratio is the median over the pairs of turns. A turn is one call of the sampler: every step of
one batch, the router included. With `once` and one resident expert it is one call of `generate` over
four batches, on both sides.

CPU: S size, 64 tokens, batch 16 (quick: fewer blocks). Memory is the peak of a process of its own, less what
it had before there was a network.
A GPU is measured by benchmarks/gpu.py.
"""

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import (
    Row,
    child,
    finish,
    forget_peak,
    measured,
    median_row,
    memory,
    paired,
    parsed,
    parser,
    ratios,
    row,
)
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.model.bank import Bank
from atoll.model.dispatch import Costs, Trace
from atoll.model.expert import Expert, FileWeights, StoredExpert, settings_of
from atoll.model.generate import Conditions, Sampling, generate
from atoll.model.generation import Generation, Residency
from atoll.model.residency import ResidentExperts
from atoll.model.sampler import Row as SampleRow
from atoll.model.sampler import Sampler, starting_noise
from atoll.networks.cost import counts, mean
from atoll.networks.families import family
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig

GUIDANCE = 2.0
TARGETS = {"top-1": 1.10, "once": 1.03, "top-2": 2.15, "full": 8.3}
SHARES = ("top-1", "top-1 every 2", "top-1 every 5", "top-1 every 10", "once")
BATCHES = 4  # of a turn with one resident expert, under commit


@dataclass(frozen=True)
class Setting:
    """What is sampled: one network's size, and how."""

    size: str
    latents: int
    batch: int
    steps: int
    depth: int | None = None
    router_depth: int = 3
    router_heads: int = 5
    router_width: int = 28
    device: str = "cpu"
    k: int = 8

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def shape(self) -> DataShape:
        return DataShape(channels=4, size=self.latents, text_width=384, text_length=32)

    @property
    def network(self) -> NetworkConfig:
        return NetworkConfig(family="pixart", size=self.size, depth=self.depth)


CPU = Setting("S", latents=16, batch=16, steps=3)
CPU_QUICK = replace(CPU, depth=2, steps=2, router_depth=1, router_heads=3, router_width=32)
GPU = Setting("XL", 32, 64, 50, router_depth=7, router_heads=6, router_width=64, device="cuda")
GPU_QUICK = replace(GPU, size="B", steps=10, router_depth=3, router_heads=4)


def main() -> None:
    """Measure what `--only` asks for."""
    asked = parser(__doc__, "smaller networks, fewer turns: two minutes", "parts")
    asked.add_argument("--pairs", type=int, help="turns of each side (quick: 3, else 7)")
    asked.add_argument("--threads", type=int, default=1, help="of the CPU")
    options = parsed(asked, peak)
    torch.set_num_threads(options.threads)
    pairs = options.pairs or (3 if options.quick else 7)
    setting = CPU_QUICK if options.quick else CPU
    cases = {
        "CPU, strategies": partial(against_monolith, "CPU", setting, pairs),
        "CPU, number of experts": partial(number_of_experts, "CPU", setting, pairs),
        "CPU, one resident": partial(one_resident, "CPU", setting, pairs, options.threads),
    }
    rows = measured(options, cases)
    finish("sampling", rows, options, {"pairs": pairs, "threads": options.threads})


# Parts with random weights.


class Opinions:
    """A router that costs what its network costs, and says what was drawn: each sample, each step anew."""

    def __init__(self, setting: Setting) -> None:
        self.network = router(setting)
        nn.Module.to(self.network, setting.device, setting.dtype)
        source = torch.Generator().manual_seed(0)
        drawn = 4 * torch.randn(64, setting.batch, setting.k, generator=source)
        self.drawn, self.calls = drawn.to(setting.device), 0

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        self.network(x_t.to(next(self.network.parameters()).dtype), t, cond)
        self.calls += 1
        return self.drawn[self.calls % len(self.drawn), : len(x_t)]


def router(setting: Setting) -> Router:
    """The router's network: coarser patches, fewer and narrower blocks."""
    return Router(
        setting.k,
        setting.shape.channels,
        setting.latents,
        patch_size=2,
        num_layers=setting.router_depth,
        num_attention_heads=setting.router_heads,
        attention_head_dim=setting.router_width,
        caption_channels=setting.shape.text_width,
    )


def network(setting: Setting, dtype: torch.dtype | None = None) -> nn.Module:
    """An expert's network."""
    with torch.device(setting.device):
        made = family("pixart").build(setting.network, setting.shape)
    nn.Module.to(made, setting.device, dtype or setting.dtype)  # diffusers' own warns of nothing
    return made.eval().requires_grad_(False)


def expert(setting: Setting) -> Expert:
    """An expert on the device."""
    return Expert(network(setting), "pixart", "v", "rectified-flow")


def stored(setting: Setting, folder: Path) -> list[StoredExpert]:
    """The same as files, made on the first call."""
    with torch.device("meta"):
        config = settings_of(family("pixart").build(setting.network, setting.shape))
    paths = [folder / f"{number}.safetensors" for number in range(setting.k)]
    for path in paths:
        if not path.exists():
            weights = network(replace(setting, device="cpu"), setting.dtype).state_dict()
            save_file(weights, path)
    return [StoredExpert(config, "pixart", "v", "rectified-flow", FileWeights(path)) for path in paths]


def costs(setting: Setting) -> Costs:
    """Operations of router and experts, counted on the meta device."""
    adapter = family("pixart")

    def build() -> nn.Module:
        return adapter.build(setting.network, setting.shape)

    own = mean(counts(build, adapter.predict, setting.shape)).forward
    of_router = mean(counts(lambda: router(setting), Router.__call__, setting.shape)).forward
    return Costs(of_router, [own] * setting.k)


def conditions(setting: Setting, rows: int) -> Condition:
    """Text states of full length."""
    shape, source = setting.shape, torch.Generator().manual_seed(1)
    text = torch.randn(rows, shape.text_length, shape.text_width, generator=source)
    mask = torch.ones(rows, shape.text_length, dtype=torch.bool)
    return Condition(text=text, mask=mask).to(setting.device)


# Turns.

Turn = Callable[[], Any]


def in_pairs(one: Turn, other: Turn, pairs: int) -> list[list[float]]:
    """Seconds of both, in turn; the first turn of each is not counted."""
    one(), other()
    return paired((one, other), pairs)


def one_batch(ensemble: Bank, setting: Setting, routing: str, keep: list[Trace] | None = None) -> Turn:
    """One batch of an ensemble."""
    cond, null, noise = start(setting)

    def turn() -> None:
        start_anew(ensemble)
        rows = SampleRow.each(how(setting, routing), range(setting.batch))
        sampler = Sampler(ensemble, cond, null, rows, noise)
        sampler.run()
        if keep is not None:
            keep[:] = [sampler.trace]

    return turn


def start_anew(ensemble: Bank) -> None:
    """Let every turn hear the same opinions."""
    if isinstance(ensemble.router, Opinions):
        ensemble.router.calls = 0


def many_batches(model: Bank, setting: Setting, routing: str) -> Turn:
    """Several batches of an ensemble, ordered by expert, or of one network."""
    cond, null, _ = start(setting)
    shape = (setting.shape.channels, setting.latents, setting.latents)
    count = BATCHES * setting.batch
    rows = Conditions(lambda numbers: cond.select([n % setting.batch for n in numbers]), null, count)
    sampling = Sampling(how(setting, routing), rows, shape, count, batch=setting.batch, device=setting.device)

    def turn() -> None:
        start_anew(model)
        deque(generate(model, sampling), maxlen=0)

    return turn


def how(setting: Setting, routing: str) -> Generation:
    """The generation of a turn."""
    return Generation(routing=routing, guidance=GUIDANCE, steps=setting.steps)


def start(setting: Setting) -> tuple[Condition, Condition, Tensor]:
    """Conditions, the null condition, noise."""
    cond = conditions(setting, setting.batch)
    shape = (setting.shape.channels, setting.latents, setting.latents)
    noise = starting_noise(0, range(setting.batch), shape).to(setting.device)
    return cond, conditions(setting, 1), noise


def monolith_turn(setting: Setting) -> Turn:
    """One batch of one network."""
    return one_batch(Bank([expert(setting)]), setting, "once")


# What is measured.


def against_monolith(name: str, setting: Setting, pairs: int) -> Iterator[Row]:
    """Every strategy's time and operations over the monolith's."""
    case = f"{name}, K = {setting.k}"
    cost, monolith = costs(setting), monolith_turn(setting)
    ensemble = Bank([expert(setting) for _ in range(setting.k)], Opinions(setting), costs=cost)
    yield row(case, "router / expert, operations", cost.router / cost.experts[0], target=("<=", 0.04))
    alone = 2 * setting.batch * setting.steps * cost.experts[0]
    for routing, bound in TARGETS.items():
        traces: list[Trace] = []
        mine, theirs = in_pairs(one_batch(ensemble, setting, routing, traces), monolith, pairs)
        yield median_row(case, f"{routing} / monolith, time", ratios(mine, theirs), target=("<=", bound))
        done = traces[0].router_flops + traces[0].expert_flops
        yield row(case, f"{routing} / monolith, operations", done / alone)
    yield median_row(case, "monolith, time of a step", [s / setting.steps for s in theirs], "s")
    turns = many_batches(ensemble, setting, "once"), many_batches(Bank([expert(setting)]), setting, "once")
    ordered = f"once / monolith, {BATCHES} batches by expert, time"
    yield median_row(case, ordered, ratios(*in_pairs(*turns, pairs)), target=("<=", TARGETS["once"]))
    for routing in SHARES:
        yield row(case, f"router's share, {routing}, 50 steps", router_share(setting, cost, routing))


def router_share(setting: Setting, cost: Costs, routing: str, steps: int = 50) -> float:
    """The router's part of all operations of guided steps, by the trace of an ensemble that takes no time."""

    class Nothing:
        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return x_t

    class Drawn:
        def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return torch.randn(len(x_t), setting.k)

    ensemble = Bank([Nothing()] * setting.k, Drawn(), costs=cost)
    noise = torch.zeros(setting.batch, 1, 1, 1)
    labels = Condition(labels=torch.zeros(setting.batch, dtype=torch.int64))
    null = labels.select(slice(0, 1))
    rows = SampleRow.each(how(setting, routing).with_(steps=steps), range(setting.batch))
    sampler = Sampler(ensemble, labels, null, rows, noise)
    sampler.run()
    return 1 / (1 + sampler.trace.expert_flops / sampler.trace.router_flops)


def number_of_experts(name: str, setting: Setting, pairs: int) -> Iterator[Row]:
    """Top-1 with more and fewer experts."""
    monolith = monolith_turn(setting)
    for k in (2, 4, 8, 16):
        own = replace(setting, k=k)
        ensemble = Bank([expert(own) for _ in range(k)], Opinions(own), costs=costs(own))
        found = ratios(*in_pairs(one_batch(ensemble, own, "top-1"), monolith, pairs))
        yield median_row(f"{name}, K = {k}", "top-1 / monolith, time", found, target=("<=", 1.10))


def one_resident(name: str, setting: Setting, pairs: int, threads: int) -> Iterator[Row]:
    """A budget of one expert: peak memory over the monolith's, and time over all experts resident."""
    case = f"{name}, one resident"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = ResidentExperts(stored(setting, folder), device=setting.device).place_bytes
        alone = in_child(setting, "monolith", folder, threads)
        yield row(case, "an expert's weights", size / 2**20, "MiB")
        yield row(case, "monolith, peak memory", alone / 2**20, "MiB")
        opinions, cost = Opinions(setting), costs(setting)
        whole = ResidentExperts(stored(setting, folder), None, setting.device, setting.dtype)
        everyone = Bank(whole, opinions, (), cost)
        single = ResidentExperts(stored(setting, folder), Residency(experts=1), setting.device, setting.dtype)
        offloaded = Bank(single, opinions, (), cost)
        for routing, turn in (("top-1", one_batch), ("once", many_batches)):
            more = in_child(setting, routing, folder, threads) - alone
            yield row(case, f"{routing}: (peak - monolith's) / expert", more / size, target=("<=", 1.0))
            before = single.loads
            turns = turn(offloaded, setting, routing), turn(everyone, setting, routing)
            yield median_row(case, f"{routing} / all resident, time", ratios(*in_pairs(*turns, pairs)))
            yield row(case, f"{routing}: experts brought, a turn", (single.loads - before) / (pairs + 1))


def in_child(setting: Setting, routing: str, folder: Path, threads: int) -> float:
    """`peak` in a process of its own."""
    work = {"routing": routing, "folder": str(folder), "threads": threads}
    return float(child(__file__, setting=asdict(setting), **work))


def peak(setting: dict[str, Any], routing: str, folder: str, threads: int) -> float:
    """Bytes that sampling takes at most: of this process beyond what it had before, or of the GPU."""
    torch.set_num_threads(threads)
    size = Setting(**setting)
    warm_up(size)
    before = forget_peak()
    if routing == "monolith":
        monolith_turn(size)()
    else:
        experts = ResidentExperts(stored(size, Path(folder)), Residency(experts=1), size.device, size.dtype)
        ensemble = Bank(experts, Opinions(size))
        (one_batch if routing == "top-1" else many_batches)(ensemble, size, routing)()
    return float(memory("VmHWM") - before if size.device == "cpu" else torch.cuda.max_memory_allocated())


def warm_up(setting: Setting) -> None:
    """What the libraries take once and for all: everything at the smallest size."""
    small = replace(setting, depth=1, batch=2, steps=1, k=2, router_depth=1)
    with tempfile.TemporaryDirectory() as scratch:
        kept = stored(small, Path(scratch))
        single = ResidentExperts(kept, Residency(experts=1), small.device, small.dtype)
        one_batch(Bank(single, Opinions(small)), small, "top-1")()
        single.close()


if __name__ == "__main__":
    main()
