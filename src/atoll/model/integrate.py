"""From noise to latents: diffusers' flow-matching schedulers around any field."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.base.rng import Position, normals
from atoll.model.field import Field
from atoll.model.generation import Generation


def starting_noise(
    seed: int, rows: Sequence[Position], shape: Sequence[int], stream: str = "sample-noise"
) -> Float[Tensor, "B C H W"]:
    """Noise of each sample from a generator of its own, so a picture does not depend on its batch."""
    return normals(seed, stream, rows, shape)


def euler(steps: int, shift: float = 1.0) -> FlowMatchEulerDiscreteScheduler:
    """Euler's scheduler of flows with its times set.

    The sigmas are passed in: the default grid ends at 1/1000 and wastes a step.

    Args:
        steps: number of steps N; times are 1, (N-1)/N, ..., 1/N before the shift.
        shift: SD3's time shift; 1 is none.
    """
    if steps < 1:
        raise ConfigError(f"{steps} sampling steps", "use at least 1")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps).tolist())
    return scheduler


SCHEDULERS = {"euler": euler}


def scheduler_of(generation: Generation) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler that a generation names, with its times set."""
    return SCHEDULERS[generation.scheduler](generation.steps, generation.shift)


@dataclass
class Point:
    """Where an integration stands after a step.

    Attributes:
        step: number of the step that was finished, from 0.
        timestep: the scheduler's own name of the time at which that step began.
        x: state `(B, C, H, W)`; who reads it may put another one here to go on from.
    """

    step: int
    timestep: Tensor
    x: Tensor


def set_times(scheduler: Any, steps: int, device: torch.device | str | None = None) -> int:
    """Set the times of any diffusers scheduler that integrates a flow.

    Those that take sigmas are given 1, (N-1)/N, ..., 1/N; the others keep their own grid.

    Returns:
        The number of steps that `walk` will make.

    Raises:
        ConfigError: no steps, or a scheduler that does not integrate flows.
    """
    check_flow(scheduler)
    if steps < 1:
        raise ConfigError(f"{steps} sampling steps", "use at least 1")
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a manner that numpy 2 frowns at.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        if "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), device=device)
        else:
            scheduler.set_timesteps(steps, device=device)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # rounded timesteps may repeat, so none is looked up
    return -(-len(scheduler.timesteps) // int(scheduler.order))


def check_flow(scheduler: Any) -> None:
    """Refuse a scheduler that would take a velocity for something else."""
    name, config = type(scheduler).__name__, getattr(scheduler, "config", None)
    if config is None:
        raise ConfigError(f"{scheduler!r} is no scheduler", "give one of diffusers' schedulers of flows")
    flow = name.startswith("FlowMatch") or (
        getattr(config, "use_flow_sigmas", False) and config.prediction_type == "flow_prediction"
    )
    if not flow:
        raise ConfigError(
            f"{name} with these settings does not integrate flows",
            "use FlowMatchEulerDiscreteScheduler or FlowMatchHeunDiscreteScheduler, or give it"
            " prediction_type='flow_prediction' and use_flow_sigmas=True",
        )
    for setting in ("use_dynamic_shifting", "invert_sigmas"):
        if getattr(config, setting, False):
            raise ConfigError(f"{name} has {setting}", f"set {setting}=False, and a fixed shift if needed")


@torch.no_grad()
def walk(
    field: Field,
    noise: Float[Tensor, "B C H W"],
    scheduler: Any,
    generator: torch.Generator | list[torch.Generator] | None = None,
) -> Iterator[Point]:
    """Integrate the flow from noise (t = 1) to data (t = 0), a point after every step.

    Steps are counted, not calls: Heun calls the field twice in one step.

    Args:
        field: velocity at `(x_t, t, step)`.
        noise: starting points.
        scheduler: a diffusers scheduler of flows, with its times set.
        generator: for schedulers that draw noise.
    """
    x, order = noise, scheduler.order
    takes = inspect.signature(scheduler.step).parameters
    more = {"generator": generator} if generator is not None and "generator" in takes else {}
    for call, timestep in enumerate(scheduler.timesteps):
        # t is read from sigmas, since some schedulers round their timesteps.
        v = field(x, float(scheduler.sigmas[call]), call // order)
        x = scheduler.step(v, timestep, x, **more).prev_sample
        if (call + 1) % order == 0 or call + 1 == len(scheduler.timesteps):
            point = Point(call // order, scheduler.timesteps[call - call % order], x)
            yield point
            x = point.x


@torch.inference_mode()
def sample(
    field: Field,
    noise: Float[Tensor, "B C H W"],
    steps: int,
    scheduler: Any = None,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Float[Tensor, "B C H W"]:
    """Integrate the flow from noise (t = 1) to data (t = 0).

    Args:
        field: velocity at `(x_t, t, step)`.
        noise: starting points.
        steps: number of steps.
        scheduler: with its times set; Euler with `steps` even steps by default.
        on_step: called after each step with its number and the state.
    """
    x = noise
    for point in walk(field, noise, scheduler or euler(steps)):
        x = point.x
        if on_step is not None:
            on_step(point.step, x)
    return x
