"""How large a server has to be: memory and speed by the number of experts on the device, measured."""

import resource
import sys
import time

import torch

from atoll.base.config import Config
from atoll.base.device import own_device
from atoll.base.errors import ConfigError
from atoll.base.table import Table, column
from atoll.campaign.sample import load_model
from atoll.model.generation import Residency
from atoll.model.model import ENSEMBLE, Model
from atoll.model.residency import ResidentExperts
from atoll.serve.engine import FAILED, READY, Engine, Event, Failed, Job
from atoll.serve.metrics import Metrics
from atoll.serve.settings import ServeSettings

PROMPTS = ["a cat", "a red flower", "the letter A", "a house by the sea", "a smiling face", "a car"]
PROMPTS += ["food", "a map"]
"""What is drawn, so that more than one expert is wanted."""


class Size(Config):
    """What a server with some experts on the device needs and does."""

    experts: int
    """Experts on the device, the place that the next is brought into not counted."""
    weights: int = column(unit="bytes")
    """All experts' places there."""
    peak: int = column(unit="bytes")
    """Most of the device's memory that was in use, or of the process where the device is the CPU."""
    rows: float = column(unit="1/s", digits=3)
    """Steps of pictures a second at full batches."""
    pictures: float = column(unit="1/s", digits=3)
    """Pictures a second."""
    swaps: float = column(digits=3)
    """Experts brought for each picture."""


def sizes(source: str, settings: ServeSettings) -> Table:
    """Serve `batch` pictures with 1, 2, 4 and so on experts on this machine's device, and with all.

    Bounds and residency of the settings are not looked at; the ensemble draws as it does by itself.
    """
    rows: list[Size] = []
    resident, available = 1, sys.maxsize
    while resident < 2 * available:
        how = Residency(experts=min(resident, available))
        model = load_model(source, residency=how, device=own_device())
        experts = model.bank.experts
        assert isinstance(experts, ResidentExperts)
        available = len(experts) - len(model.bank.missing)
        rows.append(_measured(model, experts, settings, min(resident, available)))
        resident *= 2
    return Table.of(Size, rows, "sizes", "A server by the number of experts on the device")


def _measured(model: Model, experts: ResidentExperts, settings: ServeSettings, resident: int) -> Size:
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    unbounded = settings.model_copy(update={"queue": 1_000_000})
    engine = Engine({ENSEMBLE: lambda: model}, unbounded, Metrics())
    engine.start()
    try:
        while engine.state not in (READY, FAILED):
            time.sleep(0.01)
        if engine.error is not None:
            raise engine.error
        # The second of two batches is measured: the first fills caches and places.
        classes, events = max(model.card.shape.classes, 1), list[Event]()
        for _ in range(2):
            before, start, jobs = experts.loads, time.monotonic(), list[Job]()
            for n in range(settings.batch):
                prompts = {"text": (PROMPTS[n % len(PROMPTS)],), "class": (str(n % classes),), "none": ()}
                prompt, generation = prompts[model.card.condition], model.generation.with_(seed=n)
                jobs.append(Job(ENSEMBLE, prompt, generation, events.append))
                engine.submit(jobs[-1])
            while any(job.waiting for job in jobs) and engine.error is None:
                time.sleep(0.005)
            seconds = time.monotonic() - start
        if engine.error is not None:
            raise engine.error
    finally:
        engine.drain(0)
    for event in events:
        if isinstance(event, Failed):
            raise ConfigError(event.message, "ask for a smaller one: --set batch=8")
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(model.device)
    else:  # getrusage counts KiB on Linux, and bytes on macOS
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Size(
        experts=resident,
        weights=experts.device_bytes,
        peak=peak,
        rows=settings.batch / seconds * model.generation.steps,
        pictures=settings.batch / seconds,
        swaps=(experts.loads - before) / settings.batch,
    )
