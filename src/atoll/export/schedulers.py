"""Any diffusers scheduler that integrates a flow: whether it does, and its times."""

import inspect
import warnings
from typing import Any

import numpy as np
import torch

from atoll.base.errors import ConfigError


def set_times(scheduler: Any, steps: int, device: torch.device | str | None = None) -> int:
    """Set the times of any diffusers scheduler that integrates a flow.

    Those that take sigmas are given 1, (N-1)/N, ..., 1/N; the others keep their own grid.

    Returns:
        The number of steps that a `Sampler` will make by it.

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
