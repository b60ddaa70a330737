"""From noise to latents: diffusers' flow-matching Euler scheduler around any field."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.base.rng import normals
from atoll.ensemble.ensemble import Field


def starting_noise(
    seed: int, indices: Sequence[int], shape: Sequence[int], stream: str = "sample-noise"
) -> Float[Tensor, "B C H W"]:
    """Noise of each sample from a generator of its own, so a picture does not depend on its batch."""
    return normals(seed, stream, indices, shape)


def flow_scheduler(steps: int, shift: float = 1.0) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler with its times set.

    The sigmas are passed in: the default grid ends at 1/1000 and wastes a step.

    Args:
        steps: number of steps N; times are 1, (N-1)/N, ..., 1/N.
        shift: SD3's time shift; 1 is none.
    """
    if steps < 1:
        raise ConfigError(f"{steps} sampling steps", "use at least 1")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps).tolist())
    return scheduler


@torch.inference_mode()
def sample(
    field: Field,
    noise: Float[Tensor, "B C H W"],
    steps: int,
    scheduler: FlowMatchEulerDiscreteScheduler | None = None,
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
    scheduler = scheduler or flow_scheduler(steps)
    x = noise
    # t is read from sigmas, since some schedulers round their timesteps.
    for step, timestep in enumerate(scheduler.timesteps):
        v = field(x, float(scheduler.sigmas[step]), step)
        x = scheduler.step(v, timestep, x).prev_sample
        if on_step is not None:
            on_step(step, x)
    return x
