"""A pipeline's call: its arguments checked before a network runs, its conditions, its scheduler's times."""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, first_line
from atoll.base.rng import Position
from atoll.model.card import Card
from atoll.model.folder import defaults_in
from atoll.model.generate import Conditions
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.routing import Routing


def _as_list(value: Any) -> Any:
    """One value or several as a list, numbers of arrays and tensors as Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or isinstance(value, list):
        return value
    several = hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict)
    return list(value) if several else [value]


_Plain = BeforeValidator(lambda value: value.item() if isinstance(value, np.generic) else value)
_Several = BeforeValidator(_as_list)
_Generators = BeforeValidator(lambda value: list(value) if isinstance(value, tuple) else value)
_Count = Annotated[int, _Plain, Field(ge=1)]


class Call(BaseModel):
    """The arguments of `AtollPipeline.__call__`, each of its type and in its range."""

    # Strict: 1.5 pictures, "4" steps and a label of True are mistakes.
    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    prompt: Annotated[list[str] | None, _Several]
    class_labels: Annotated[list[int] | None, _Several]
    negative_prompt: Annotated[list[str] | None, _Several]
    num_images_per_prompt: _Count
    num_inference_steps: Annotated[_Count, Field(le=100_000)]
    guidance_scale: Annotated[float, _Plain, Field(ge=0, le=1e6)]
    generator: Annotated[torch.Generator | list[torch.Generator] | None, _Generators]
    latents: Tensor | None
    routing: str | Routing | Callable[..., Any]
    clusters: Annotated[list[int] | None, _Several]
    prompt_embeds: Tensor | None
    prompt_attention_mask: Tensor | None
    negative_prompt_embeds: Tensor | None
    negative_prompt_attention_mask: Tensor | None
    truncate_prompt: bool
    height: _Count | None
    width: _Count | None
    output_type: Literal["pil", "np", "pt", "latent"]
    return_dict: bool
    callback_on_step_end: Callable[..., Any] | None
    callback_on_step_end_tensor_inputs: Annotated[list[Literal["latents"]], _Several]

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """The call; `ConfigError` names the first argument that is wrong."""
        try:
            return cls.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            value = " ".join(repr(arguments[name]).split())[:60]
            raise ConfigError(f"{name}={value}: {first['msg']}", f"correct {name}") from None

    @property
    def generation(self) -> Generation:
        """Steps, guidance, routing and size; the seed is the generator's."""
        if (self.width is None) != (self.height is None):
            raise ConfigError("one of width and height is missing", "give both or none")
        size = None if self.width is None else f"{self.width}x{self.height}"
        how = {"steps": self.num_inference_steps, "guidance": self.guidance_scale, "size": size}
        return Generation().with_(routing=Routing.of(self.routing), **how)

    def positions(self, count: int) -> list[Position]:
        """Places in the random streams of so many pictures; each generator is left further on.

        A generator that was only seeded stands for its seed, so that one seed is one picture everywhere. One
        that was used before gives a number in its place.
        """
        # One generator has rows 0, 1, ... of its seed; of a list each has row 0 of its own.
        if not isinstance(self.generator, list):
            seed = _seed_of(self.generator)
            return [(seed, number) for number in range(count)]
        if len(self.generator) != count:
            what = f"{len(self.generator)} generators for {count} pictures"
            raise ConfigError(what, "give one, or one for each")
        return [(_seed_of(generator), 0) for generator in self.generator]

    def labels(self, count: int, k: int) -> list[int] | None:
        """The cluster of every picture, for routing `oracle`."""
        if Routing.of(self.routing).needs_labels and len(self.clusters or ()) != count:
            raise ConfigError("routing 'oracle' needs the cluster of every picture", "give clusters=[...]")
        if any(not 0 <= cluster < k for cluster in self.clusters or ()):
            raise ConfigError(f"clusters={self.clusters}", f"give numbers from 0 to {k - 1}")
        return self.clusters

    def conditions(self, model: Model, encodes: bool) -> Conditions:
        """Conditions of all pictures, as training saw them; `encodes`: the pipeline has its text encoder."""
        card, each = model.card, self.num_images_per_prompt
        wanted = {"text": "prompt", "class": "class_labels"}.get(card.condition)
        names = ("prompt", "prompt_embeds", "class_labels")
        given = [name for name in names if getattr(self, name) is not None]
        for name in given:
            if name.removesuffix("_embeds") != wanted:
                fix = f"give {wanted}" if wanted else "leave it out: it takes no condition"
                raise ConfigError(f"this model takes no {name}", fix)
        if wanted and not given:
            raise ConfigError(f"this model needs {wanted}", "give one or more")
        if len(given) > 1:
            raise ConfigError("both prompt and prompt_embeds were given", "give one of them")
        if self.prompt_embeds is None and self.negative_prompt_embeds is not None:
            raise ConfigError("negative_prompt_embeds go with prompt_embeds", "give negative_prompt")
        if self.prompt_embeds is not None and self.negative_prompt is not None:
            raise ConfigError("negative_prompt goes with prompt", "give negative_prompt_embeds")
        negative = self.negative_prompt if self.negative_prompt is not None else [""]
        if self.prompt_embeds is not None:
            return self._of_states(card, self.prompt_embeds)
        if self.prompt is None:
            return model.conditions(self.class_labels or (), negative, each)
        if not encodes:
            what = f"the pipeline was loaded without its text encoder {(card.text or {}).get('name')!r}"
            raise ConfigError(what, "load it, or give prompt_embeds")
        fix = "shorten it, or give truncate_prompt=True"
        return model.conditions(self.prompt, negative, each, self.truncate_prompt, fix)

    def _of_states(self, card: Card, embeds: Tensor) -> Conditions:
        """Those of text states that the caller encoded."""
        pairs = {"prompt": (embeds, self.prompt_attention_mask)}
        if self.guidance_scale not in (0, 1):
            if self.negative_prompt_embeds is None:
                what = "guidance needs negative_prompt_embeds beside prompt_embeds"
                raise ConfigError(what, 'give the states of "", or guidance_scale=1')
            pairs["negative_prompt"] = self.negative_prompt_embeds, self.negative_prompt_attention_mask
        if card.shape.pooled_width:
            raise ConfigError("this model takes a pooled vector beside prompt_embeds", "give prompt")
        width, parts = card.shape.text_width, [Condition()] * 2
        for n, (name, (states, mask)) in enumerate(pairs.items()):
            if states.ndim != 3 or states.shape[2] != width or not states.numel():
                raise ConfigError(f"{name}_embeds has shape {tuple(states.shape)}", f"give (N, L, {width})")
            if mask is None or mask.shape != states.shape[:2]:
                raise ConfigError(f"{name}_attention_mask does not fit {name}_embeds", "give (N, L)")
            parts[n] = Condition(text=states.float(), mask=mask.bool())
        return Conditions.of_rows(parts[0], parts[1], len(embeds), each=self.num_images_per_prompt)


def _seed_of(generator: torch.Generator | None) -> int:
    """The seed of a fresh generator, else its next number; it is advanced either way."""
    if generator is None:
        # From torch's global generator, as in diffusers: `torch.manual_seed` still decides.
        return int(torch.randint(2**62, ()))
    # A generator does not say whether it was used, but its state does.
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    unused = torch.equal(fresh.get_state(), generator.get_state())
    number = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return generator.initial_seed() if unused else number


def checked_latents(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Latents in float32, as all sampling is; refused if they are of another shape or not finite."""
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name}: {type(value).__name__} instead of a tensor", f"give shape {shape}")
    if tuple(value.shape) != shape:
        raise ConfigError(f"{name} of shape {tuple(value.shape)}", f"give {shape}")
    if not torch.isfinite(value).all():
        raise ConfigError(f"{name} holds numbers that are not finite", "look at where it comes from")
    return value.float()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Load a pipeline without diffusers' bar, and without its word on a text encoder of another class."""
    from diffusers.utils import logging as bars

    # An encoder need not be the class's usual one; all else that diffusers says stays.
    def usual(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Expected types for text_encoder")

    logger, shown = logging.getLogger("diffusers.pipelines.pipeline_utils"), bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    logger.addFilter(usual)
    try:
        yield
    finally:
        logger.removeFilter(usual)
        if shown:
            bars.enable_progress_bar()


def set_times(scheduler: Any, steps: int, shape: Sequence[int]) -> tuple[Any, int]:
    """Set a scheduler's times for latents `(C, H, W)`; it, or a copy, and the steps of a `Sampler` by it.

    `ConfigError` if it is of no flow.
    """
    check_flow(scheduler)
    if getattr(scheduler.config, "use_dynamic_shifting", False):
        # With the number in its place the times are those of all who draw at this size, to the bit.
        shift = defaults_in({}, scheduler.config).at(*shape[1:]).shift
        names = {"shift", "flow_shift"} & scheduler.config.keys()
        fixed = {"use_dynamic_shifting": False, **dict.fromkeys(names, shift)}
        scheduler = type(scheduler).from_config(scheduler.config, **fixed)
    # diffusers' own grid ends at 1/1000 and wastes a step; schedulers without sigmas keep theirs.
    given: dict[str, Any] = {"num_inference_steps": steps}
    if "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
        given = {"sigmas": np.linspace(1.0, 1.0 / steps, steps)}
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a manner that numpy 2 frowns at.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        try:
            scheduler.set_timesteps(**given)
        except (TypeError, ArithmeticError) as error:
            what = f"the settings of {type(scheduler).__name__} give no times ({first_line(error)[:200]})"
            raise ConfigError(what, "mend scheduler_config.json, or give another scheduler") from None
    # diffusers would look the first timestep up by its value.
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # rounded timesteps may repeat, so none is looked up
    # Heun lists every time but the first twice, so it is rounded up.
    return scheduler, -(-len(scheduler.timesteps) // int(scheduler.order))


def check_flow(scheduler: Any) -> None:
    """Refuse a scheduler that would take a velocity for something else."""
    name, config = type(scheduler).__name__, getattr(scheduler, "config", None)
    if config is None:
        raise ConfigError(f"{scheduler!r} is no scheduler", "give one of diffusers' schedulers of flows")
    by_settings = getattr(config, "use_flow_sigmas", False) and config.prediction_type == "flow_prediction"
    if not name.startswith("FlowMatch") and not by_settings:
        raise ConfigError(
            f"{name} with these settings does not integrate flows",
            "use FlowMatchEulerDiscreteScheduler or FlowMatchHeunDiscreteScheduler, or give it"
            " prediction_type='flow_prediction' and use_flow_sigmas=True",
        )
    # The first runs time from data to noise; the second has a shift of another rule.
    for setting, wanted in (("invert_sigmas", False), ("time_shift_type", "exponential")):
        if getattr(config, setting, wanted) != wanted:
            raise ConfigError(f"{name} has another {setting}", f"set {setting}={wanted!r}")
