"""The arguments of a pipeline's calls, each of the type and in the range that it has to be.

All that is wrong is told in one line that names the argument, before a network runs.
"""

import math
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import ConfigError, nearest
from atoll.base.rng import Position
from atoll.model.routing import Routing
from atoll.model.settings import Residency

Generators = torch.Generator | list[torch.Generator] | None
OnStepEnd = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any] | None]
OUTPUTS = ("pil", "np", "pt", "latent")
CALLBACK = ("latents",)
"""What callbacks may have and give back."""
_NOT_TAKEN = {
    "custom_pipeline": "this class is the pipeline, and no code is fetched",
    "trust_remote_code": "no code is fetched",
    "variant": "there are none; give torch_dtype",
    "device_map": "call .to(device) or .enable_model_cpu_offload()",
    "quantization_config": "quantise the components after loading",
    "use_onnx": "only safetensors are read",
}


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least so much."""
    if not _number(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name}={value!r}", f"give a whole number, {least} or more")
    return int(value)


def size_of(width: Any, height: Any) -> str | None:
    """Width x height as a generation has it; None where neither is said."""
    if width is None and height is None:
        return None
    return f"{whole('width', width)}x{whole('height', height)}"


def texts(name: str, value: Any) -> list[str]:
    """One text or several as a list."""
    listed = [value] if isinstance(value, str) else _listed(value)
    if listed is None or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{name}={_short(value)}", "give a text or a list of texts")
    return listed


def whole_numbers(name: str, value: Any, below: int) -> list[int]:
    """One number or several as a list, each from 0 to less than `below`."""
    values = [value] if _number(value, numbers.Integral) else _listed(value)
    if values is None or not all(_number(one, numbers.Integral) for one in values):
        raise ConfigError(f"{name}={_short(value)}", "give a whole number or a list of them")
    wrong = next((one for one in values if not 0 <= one < below), None)
    if wrong is not None:
        raise ConfigError(f"{name}: there is no {wrong}", f"give numbers from 0 to {below - 1}")
    return [int(one) for one in values]


def guidance_of(value: Any) -> float:
    """A guidance scale."""
    if not _number(value, numbers.Real):
        raise ConfigError(f"guidance_scale={_short(value)}", "give one number; 1 is none")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"guidance_scale={value}", "give 0 or more; 1 is none")
    return float(value)


def routing_of(value: Any, bank: Any) -> Routing:
    """A routing, or its name, that the experts of a bank can follow."""
    if not isinstance(value, str | Routing) and not callable(value):
        raise ConfigError(f"routing={_short(value)}", "give a name such as 'top-1'")
    routing: Routing = Routing.of(value)
    return routing.check(len(bank)).check_null(bank.pretrain is not None)


def positions_of(generator: Generators, batch: int) -> list[Position]:
    """Places in the random streams of a call's pictures; each generator is left further on.

    A generator that was only seeded stands for its seed, so that one seed is one picture everywhere. One that
    was used before gives a number in its place.
    """
    if isinstance(generator, list):
        if len(generator) != batch:
            raise ConfigError(
                f"{len(generator)} generators for {batch} pictures", "give one, or one for each"
            )
        return [(_seed_of(one), 0) for one in generator]
    seed = _seed_of(generator)
    return [(seed, number) for number in range(batch)]


def _seed_of(generator: torch.Generator | None) -> int:
    """The seed of a fresh generator, else its next number; it is advanced either way."""
    if generator is None:
        return int(torch.randint(2**62, ()))
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    unused = torch.equal(fresh.get_state(), generator.get_state())
    number = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return generator.initial_seed() if unused else number


def generators_of(value: Any) -> Generators:
    """No generator, one, or a list of them."""
    if value is None or isinstance(value, torch.Generator):
        return value
    generators = _listed(value)
    if not generators or not all(isinstance(one, torch.Generator) for one in generators):
        raise ConfigError(f"generator={_short(value)}", "give a torch.Generator, or a list of one for each")
    return generators


def check_load(name: Any, residency: Any, kind: Any, others: dict[str, Any]) -> None:
    """Refuse arguments of `from_pretrained` of the wrong type, and others that are set but not taken."""
    for one, why in _NOT_TAKEN.items():
        if others.pop(one, None):
            raise ConfigError(f"{one} is not taken", why)
    if not isinstance(name, str | os.PathLike):
        raise ConfigError(f"from_pretrained({_short(name)})", "give a folder or a hub name")
    if residency is not None and not isinstance(residency, Residency):
        raise ConfigError(f"residency={_short(residency)}", "give Residency(experts=1) or the like")
    if kind is not None and not isinstance(kind, torch.dtype):
        raise ConfigError(f"torch_dtype={_short(kind)}", "give a type of torch's, such as torch.bfloat16")


def check_output(output: Any) -> None:
    """Refuse a form of output that there is not."""
    if output not in OUTPUTS:
        fix = nearest(output, OUTPUTS) if isinstance(output, str) else f"give one of {', '.join(OUTPUTS)}"
        raise ConfigError(f"output_type={output!r}", fix)


def check_callback(callback: Any, inputs: Sequence[str]) -> None:
    """Refuse what cannot be called after a step, or wants what there is not."""
    if callback is not None and not callable(callback):
        raise ConfigError(f"callback_on_step_end={_short(callback)}", "give a function, or leave it out")
    for name in inputs:
        if name not in CALLBACK:
            raise ConfigError(f"callbacks cannot have {name!r}", "there is only 'latents'")


def latents_of(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Latents of a shape, all of them finite."""
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name}: {type(value).__name__} instead of a tensor", f"give shape {shape}")
    if tuple(value.shape) != shape:
        raise ConfigError(f"{name} of shape {tuple(value.shape)}", f"give {shape}")
    if not torch.isfinite(value).all():
        raise ConfigError(f"{name} holds numbers that are not finite", "look at where it comes from")
    return value


def _number(value: Any, kind: type) -> bool:
    """Whether a value is a number of this kind; true and false are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _listed(value: Any) -> list[Any] | None:
    """Members of a list, a tuple, an array; None of anything else."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
        return None
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
