"""The first hour with a GPU: steps and memory against the plan, sampling, encoding, serving.

    python benchmarks/gpu.py [--quick] [--device cpu] [--only TEXT ...] [--json PATH]

All in one process: it takes torch and diffusers longer to load than most cases run. Networks have random
weights and data are drawn, since time and memory depend on neither.

- ceiling: a bf16 matrix product of 8192 x 8192, and a copy within the device's memory.
- step: a step as `atoll train` takes it (forward, loss, backward, norm, AdamW, average) on batches that lie
  ready, for networks of published sizes, eager and compiled. Its peak of memory is told over `atoll plan`'s.
- checkpoint: the 12 GB of a DiT-XL/2's state to a disk and back, as `atoll train` saves and resumes them.
- rows: how fast one thread prepares batches of latents and of T5-XXL's states, which a step must not outrun.
- sampling: an ensemble of K = 8 under each strategy over one network, in turn, in bf16, and `once` in batches
  by expert, as `atoll sample` draws it; then with one expert on the device, the others in host memory.
- storage: an expert's weights in fp8 and int8 against bf16.
- encoding: images a second through the autoencoder of Stable Diffusion and DINOv2-L, captions through T5-XL.
- serving: images a second of the server's engine with 1 to 64 requests in flight, DiT-XL/2 in bf16.

`--device cpu --quick` has toy networks, to see that the program works; its numbers say nothing.
"""

import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Row, finish, measured, median_row, moment, paired, parser, ratios, row
from loading import drawn_texts
from PIL import Image
from sampling import (
    GPU,
    GPU_QUICK,
    Opinions,
    Setting,
    costs,
    expert,
    in_pairs,
    many_batches,
    one_batch,
    stored,
)
from training import recipe_of

from atoll.base.condition import Condition
from atoll.base.device import own_device
from atoll.base.processes import ProcessGroup
from atoll.campaign.budget import denoiser_flops
from atoll.campaign.plan import OVERHEAD, denoiser_footprint, mode
from atoll.campaign.settings.train import TrainConfig
from atoll.encoders.text import TextEncoder
from atoll.encoders.vae import Autoencoder
from atoll.encoders.vision import VisionEncoder
from atoll.model.bank import Bank
from atoll.model.card import Card
from atoll.model.expert import Expert
from atoll.model.generation import Generation, Residency
from atoll.model.model import Model
from atoll.model.residency import ResidentExperts
from atoll.networks.families import family, parameter_count
from atoll.networks.settings import DataShape, NetworkConfig
from atoll.serve.engine import READY, Drawn, Engine, Failed, Job
from atoll.serve.metrics import Metrics
from atoll.serve.settings import ServeSettings
from atoll.store.lease import acquire
from atoll.store.store import Store
from atoll.train.loop import _Run
from atoll.train.rows import Batch, TrainingRows
from atoll.train.state import resume
from atoll.train.tasks import DenoiserTask

# Network, what it is given, samples of a step, samples at once. T5-XXL's states are 4096 wide, T5-XL's 2048.
PRODUCT, OPERATIONS = "bf16 matrix product", "operations of a step"
Network = tuple[NetworkConfig, DataShape, int, int]
NETWORKS: dict[str, Network] = {
    "DiT-XL/2": (NetworkConfig(family="dit", size="XL"), DataShape(4, 32, classes=1000), 64, 64),
    "PixArt-XL/2": (NetworkConfig(family="pixart", size="XL"), DataShape(4, 32, 4096, 120), 64, 64),
    "SD3-medium, 512 px": (NetworkConfig(family="sd3", size="2B"), DataShape(16, 64, 4096, 154), 16, 8),
    "Flux, 3 B": (NetworkConfig(family="flux", size="3B"), DataShape(4, 32, 2048, 77), 32, 4),
}
TOYS: dict[str, Network] = {
    name: (config.model_copy(update={"depth": 1, "heads": 2, "head_width": 32}), replace(shape, size=8), 4, 2)
    for name, (config, shape, *_) in NETWORKS.items()
}
TOY = replace(GPU_QUICK, size="nano", depth=1, latents=8, batch=2, steps=2, router_depth=1, k=2, device="cpu")


def main() -> None:
    """Measure what `--only` asks for."""
    asked = parser(__doc__, "toy networks, fewer turns", "cases")
    asked.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where (default: cuda)")
    options = asked.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        options.error("no GPU here: --device cpu --quick shows that the program works")
    cases: dict[str, Callable[[], Iterator[Row]]] = {"ceiling": partial(ceiling, "ceiling", options.quick)}
    ways = (False,) if options.device == "cpu" else (False, True)  # to compile for a CPU takes minutes
    for name, compiled in product(NETWORKS, ways):
        case = f"step, {name}, {'compiled' if compiled else 'eager'}"
        cases[case] = partial(step, case, options.quick, name, compiled)
    for part in (checkpoint, rows, serving, sampling, swapped, storage, encoding):
        cases[part.__name__] = partial(part, part.__name__, options.quick)
    found = measured(options, {name: partial(fresh, case) for name, case in cases.items()})
    best = [line["value"] for line in found if line["metric"] == PRODUCT]
    found += [
        row(line["case"], "share of the matrix product's", line["value"] / best[0], target=(">=", 0.4))
        for line in found
        if best and line["metric"] == OPERATIONS
    ]
    finish("gpu", found, options, {"device": device_name()})


def fresh(case: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """A case with nothing compiled and all memory free; one that does not fit is left out, and said."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    try:
        yield from case()
    except torch.OutOfMemoryError as error:
        print(f"does not fit: {str(error).splitlines()[0]}", file=sys.stderr)


def device_name() -> str:
    """The GPU and its memory, or that there is none."""
    if own_device().type == "cpu":
        return "cpu"
    about = torch.cuda.get_device_properties(0)
    return f"{about.name}, {about.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"


def ceiling(case: str, quick: bool) -> Iterator[Row]:
    """What the device gives at best."""
    side = 64 if quick else 8192
    a, b = (torch.randn(side, side, device=own_device(), dtype=torch.bfloat16) for _ in range(2))
    seconds = timed(lambda: torch.mm(a, b), 20)
    yield row(case, PRODUCT, 2 * side**3 / statistics.median(seconds) / 1e12, "TFLOP/s")
    source = torch.empty(2**10 if quick else 2**32, dtype=torch.uint8, device=own_device())
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), 5)
    yield row(case, "copy, read and written", 2 * source.numel() / statistics.median(seconds) / 1e9, "GB/s")


def timed(run: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each call, after two to begin with."""
    run(), run()
    return paired([run], times)[0]


# Training.


def planned_run(folder: str, case: str, network: Network, compiled: bool) -> _Run:
    """A run of the real loop, without data."""
    config, shape, batch, at_once = network
    device = own_device()
    training = TrainConfig(batch=batch, parallel={"compile": compiled, "micro_batch": at_once})  # type: ignore[arg-type]
    recipe = recipe_of(config, shape, training, rows=batch, steps=1000)
    nothing: Any = None
    rows = TrainingRows(nothing, nothing, recipe, {"name": "none"}, None)
    with torch.device(device):
        made = family(config.family).build(config, shape).train()
    return _Run(DenoiserTask(made, rows), Store.open(folder, create=True), case, ProcessGroup(device=device))


def step(case: str, quick: bool, network: str, compiled: bool) -> Iterator[Row]:
    """Steps of the real loop, without its data, checkpoints and validations."""
    config, shape, batch, at_once = about = (TOYS if quick else NETWORKS)[network]
    device, flops = own_device(), denoiser_flops(config, shape)
    with tempfile.TemporaryDirectory() as folder:
        run = planned_run(folder, case, about, compiled)
        parts = [(run.sharding.weight(part), drawn_batch(shape, len(part))) for part in run.sharding.parts(0)]
        began = moment()
        run._step(parts)
        first = moment() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda: run._step(parts), 3 if quick else 15)
    rate = [batch / s for s in seconds]
    yield row(case, "parameters", parameter_count(run.task.network) / 1e6, "M")
    yield row(case, "first step, with compilation" if compiled else "first step", first, "s")
    yield median_row(case, f"step of {batch}, {at_once} at once", [1e3 * s for s in seconds], "ms")
    yield median_row(case, "images per second", rate, "1/s")
    yield median_row(case, OPERATIONS, [r * flops.train / 1e12 for r in rate], "TFLOP/s")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        planned = mode(denoiser_footprint(config, shape, True), 1, at_once).total - OVERHEAD
        yield row(case, "peak of memory", peak / 2**30, "GiB")
        yield row(case, "peak / the plan's", peak / planned)


def drawn_batch(shape: DataShape, size: int) -> Batch:
    """Samples as the data thread hands them over."""
    with torch.device(own_device()):
        x0, eps = torch.randn(2, size, shape.channels, shape.size, shape.size)
        return Batch(x0, condition(shape, size), eps, torch.rand(size))


def condition(shape: DataShape, size: int) -> Condition:
    """Labels, or texts of full length."""
    if not shape.text_width:
        return Condition(labels=torch.randint(0, shape.classes, (size,)))
    text = torch.randn(size, shape.text_length, shape.text_width).half()
    return Condition(text=text, mask=torch.ones(text.shape[:2], dtype=torch.bool))


def checkpoint(case: str, quick: bool) -> Iterator[Row]:
    """A state is copied, written beside the training, and read by the process that goes on."""
    about = (TOYS if quick else NETWORKS)["DiT-XL/2"]
    with tempfile.TemporaryDirectory() as folder:
        run = planned_run(folder, case, about, False)
        acquire(run.log, run.settings.lease)
        run._step([(1.0, drawn_batch(about[1], about[2]))])
        began = moment()
        run.saver.save(run.state)
        copied = moment()
        run.saver.settle(fatal=True)
        written = moment()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / 1e9
        run.saver.close()
        again = planned_run(folder, case, about, False)
        begun = moment()
        assert resume(again.state, again.run, again.log, again.learned)
        resumed = moment()
    yield row(case, "size", size, "GB")
    yield row(case, "training waits for the copy", copied - began, "s")
    yield row(case, "copied and written", size / (written - began), "GB/s")
    yield row(case, "read, checked and on the device", size / (resumed - begun), "GB/s")


def rows(case: str, quick: bool) -> Iterator[Row]:
    """Batches that one thread reads from disk, as they go to the device."""
    torch.set_num_threads(1)
    count, batch, length, width = (32, 4, 8, 16) if quick else (512, 32, 120, 4096)
    with tempfile.TemporaryDirectory() as folder:
        samples = drawn_texts(Store.open(folder, create=True), count, length, width)
        order = torch.randperm(count).numpy()

        def read() -> None:
            for first in range(0, count, batch):
                part = order[first : first + batch]
                samples.latents(part), samples.stored(part)

        seconds = timed(read, 3)
    yield median_row(case, f"latents and {length} x {width} text states", [count / s for s in seconds], "1/s")


# Sampling.


def sampling_setting(quick: bool) -> Setting:
    """PixArt-XL/2 in batches of 64, ten steps."""
    return replace(TOY if quick else replace(GPU, steps=10), device=own_device().type)


def sampling(case: str, quick: bool) -> Iterator[Row]:
    """Every strategy's time over one network's."""
    setting = sampling_setting(quick)
    alone, cost = Bank([expert(setting)]), costs(setting)
    bank = Bank([expert(setting) for _ in range(setting.k)], Opinions(setting), costs=cost)
    for routing in ("top-1", "once", "top-2", "full"):
        turns = one_batch(bank, setting, routing), one_batch(alone, setting, "once")
        mine, theirs = in_pairs(*turns, 1 if quick else 3)
        yield median_row(case, f"K = {setting.k}, {routing} / one network, time", ratios(mine, theirs))
    sorted_batches = many_batches(bank, setting, "once"), many_batches(alone, setting, "once")
    found = ratios(*in_pairs(*sorted_batches, 1 if quick else 3))
    yield median_row(case, f"K = {setting.k}, once by expert / one network, time", found)
    each = [s / setting.steps for s in theirs]
    done = 2 * setting.batch * cost.experts[0]
    yield median_row(case, f"one network, a guided step of {setting.batch}", [1e3 * s for s in each], "ms")
    yield median_row(case, "one network, operations", [done / s / 1e12 for s in each], "TFLOP/s")
    few = replace(setting, batch=1)
    member = expert(setting)
    for way in ("replayed", "called"):
        member.replayed = member.replayed if way == "replayed" else None
        one = timed(one_batch(Bank([member]), few, "once"), 3)
        each = [1e3 * s / few.steps for s in one]
        yield median_row(case, f"one network, a guided step of 1, {way}", each, "ms")


def swapped(case: str, quick: bool) -> Iterator[Row]:
    """One expert of four on the device and one on its way, the others in pinned memory, over all there."""
    setting = replace(sampling_setting(quick), k=2 if quick else 4)
    with tempfile.TemporaryDirectory() as folder:
        sources = stored(setting, Path(folder))
        router = Opinions(setting)
        here = Bank([source.expert() for source in sources], router, costs=costs(setting))
        for member in here.experts:
            torch.nn.Module.to(member.network, setting.device)  # type: ignore[union-attr,attr-defined]
        apart = ResidentExperts(sources, Residency(experts=1), setting.device)
        moved = Bank(apart, router, costs=costs(setting))
        for routing in ("once", "top-1"):
            turns = one_batch(moved, setting, routing), one_batch(here, setting, routing)
            found = ratios(*in_pairs(*turns, 1 if quick else 3))
            yield median_row(case, f"{routing}, one of {setting.k} resident / all, time", found)
        yield row(case, "an expert's weights", apart.place_bytes / 2**20, "MiB")


def storage(case: str, quick: bool) -> Iterator[Row]:
    """One byte a number, brought back layer by layer, against bf16: time of a guided step, and bytes."""
    setting = replace(sampling_setting(quick), k=1)
    few = replace(setting, batch=1)
    with tempfile.TemporaryDirectory() as folder:
        sources, names = stored(setting, Path(folder)), ("bf16", "fp8", "int8")
        made = [
            ResidentExperts(sources, Residency(experts=1, dtype=name), setting.device, torch.bfloat16)
            for name in names  # type: ignore[arg-type]
        ]
        banks = [Bank(one, Opinions(setting), costs=costs(setting)) for one in made]
        for how in (setting, few):
            base = one_batch(banks[0], how, "once")
            for name, bank in zip(names[1:], banks[1:], strict=True):
                found = ratios(*in_pairs(one_batch(bank, how, "once"), base, 1 if quick else 3))
                yield median_row(case, f"{name}, batches of {how.batch} / bf16, time", found)
        for name, one in zip(names[1:], made[1:], strict=True):
            yield row(case, f"{name}, bytes of an expert / bf16", one.place_bytes / made[0].place_bytes)


# Encoding.


def encoding(case: str, quick: bool) -> Iterator[Row]:
    """Encoders of the published sizes with random weights."""
    import diffusers
    import transformers

    device, count, times = own_device(), 4 if quick else 64, 3
    where = str(device)
    side = 64 if quick else 256
    pictures = [Image.effect_noise((side, side), 60).convert("RGB") for _ in range(count)]
    widths = (32, 32) if quick else (128, 256, 512, 512)
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "block_out_channels": widths,
        "layers_per_block": 2,
    }
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    dino_config = transformers.Dinov2Config(image_size=518, patch_size=14, **(small if quick else large))
    small = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    large = {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32}
    size = {"vocab_size": 32128, **(small if quick else large)}
    t5_config = transformers.T5Config(feed_forward_proj="gated-gelu", **size)
    with torch.device(device):
        vae = diffusers.AutoencoderKL(latent_channels=4, **blocks).eval().requires_grad_(False)
        dino = transformers.Dinov2Model(dino_config).eval().requires_grad_(False)
        t5 = transformers.T5EncoderModel(t5_config).eval().requires_grad_(False)

    def rate(seconds: Sequence[float]) -> list[float]:
        return [count / s for s in seconds]

    for way, form in (("", torch.contiguous_format), (", channels last", torch.channels_last)):
        autoencoder = Autoencoder("drawn", vae.to(memory_format=form), device=where)
        latents = autoencoder.encode(pictures)
        for name, run in (
            (f"{side} px to latents", partial(autoencoder.encode, pictures)),
            (f"latents to {side} px", partial(autoencoder.decode, latents)),
        ):
            yield median_row(case, f"autoencoder{way}, {name}", rate(timed(run, times)), "1/s")
    seen = 28 if quick else 224
    judge = VisionEncoder(
        "drawn", dino, seen, dino_config.hidden_size, lambda x: x / 127.5 - 1,
        lambda net, x: net(pixel_values=x).pooler_output, device=where,
    )  # fmt: skip
    yield median_row(case, f"DINOv2-L, {seen} px", rate(timed(lambda: judge.encode(pictures), times)), "1/s")
    texts = TextEncoder("drawn", [(t5, None)], 77, device)
    lengths = torch.randint(5, 60, (count,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(60) < lengths[:, None]
    tokens = torch.randint(2, 32000, mask.shape) * mask
    seconds = timed(lambda: texts.encode_tokens(tokens, mask), times)
    yield median_row(case, "T5-XL, captions of 5 to 60 tokens", rate(seconds), "1/s")


# Serving.


def serving(case: str, quick: bool) -> Iterator[Row]:
    """The engine that `atoll serve` runs, asked by so many clients each of which waits for its picture."""
    config, _, *_ = (TOYS if quick else NETWORKS)["DiT-XL/2"]
    shape, device = DataShape(3, 32 if not quick else 8, classes=1000), own_device()
    with torch.device(device):
        made = family("dit").build(config, shape).eval().requires_grad_(False)
    torch.nn.Module.to(made, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    card = Card(
        role="monolith",
        family="dit",
        condition="class",
        partition="",
        latents={"name": "none", "hash": "", "shift": 0.0, "scale": 1.0},
        shape=shape,
        parameters=parameter_count(made),
        rows=1,
        samples=1,
        batch=1,
        train_flops=1.0,
        forward_flops=1.0,
        provenance={},
    )
    bank = Bank([Expert(made, "dit", "v", "rectified-flow", card)])
    settings = ServeSettings(batch=64, queue=100_000)
    engine = Engine({"one": lambda: Model(bank, card, device, Generation(steps=20))}, settings, Metrics())
    engine.start()
    while engine.state != READY:
        assert engine.error is None, engine.error
        time.sleep(0.1)
    for clients in (1, 4) if quick else (1, 4, 16, 64):
        asked = clients * (1 if quick else 4)
        done, gate, events = threading.Semaphore(0), threading.Semaphore(clients), list[Any]()

        def tell(event: Any, done: Any = done, gate: Any = gate, events: Any = events) -> None:
            if isinstance(event, Failed):
                events.append(event)
            if isinstance(event, Failed) or (isinstance(event, Drawn) and event.index is None):
                done.release()
                gate.release()

        began = moment()
        for number in range(asked):
            gate.acquire()
            generation = Generation(steps=4 if quick else 20, guidance=2.0, seed=number)
            engine.submit(Job("one", (str(number % 1000),), generation, tell))
        for _ in range(asked):
            done.acquire()
        assert not events, events[0]
        yield row(case, f"{clients} in flight, guided, 20 steps", asked / (moment() - began), "1/s")
    engine.drain(0)


if __name__ == "__main__":
    main()
