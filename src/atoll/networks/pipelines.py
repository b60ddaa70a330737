"""Which models diffusers' own pipelines run: the limits of the pipeline of each family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from atoll.base.errors import ConfigError

CLASSES = 1000
"""Class labels of DiTPipeline: the label after the last one is its null label."""


@dataclass(frozen=True)
class Limits:
    """What a pipeline of diffusers demands of the model that it runs."""

    pipeline: str  # the class
    needs_vae: bool = False
    # Whether latents may be shifted: it decodes with the VAE's `shift_factor`, which may then not be None.
    shifts: bool = False
    classes: int | None = None  # most class labels; None for any number
    patch: int | None = None  # side of the patches that it makes itself; None if the network does


LIMITS = {
    "pixart": Limits("PixArtAlphaPipeline"),
    # DiTPipeline decodes even if it is asked for latents.
    "dit": Limits("DiTPipeline", needs_vae=True, classes=CLASSES),
    "sd3": Limits("StableDiffusion3Pipeline", shifts=True),
    "flux": Limits("FluxPipeline", shifts=True, patch=2),
}


def limits_of(family: str) -> Limits:
    """The limits of a family's pipeline; `ConfigError` if none is known."""
    if family not in LIMITS:
        problem = f"no stock diffusers pipeline is known for the {family} family"
        raise ConfigError(problem, f"use {' or '.join(LIMITS)}")
    return LIMITS[family]


def check_settings(family: str, vae: str, patch: int) -> None:
    """Refuse a model that no stock pipeline runs, as far as settings tell."""
    limits = limits_of(family)
    if limits.needs_vae and vae == "none":
        _refuse(limits, "needs a VAE, and data.vae is none", "set data.vae")
    if limits.patch not in (None, patch):
        patches = f"makes patches of {limits.patch}, and the network's are of {patch}"
        _refuse(limits, patches, f"set patch: {limits.patch}")


def check_data(family: str, latents: Mapping[str, Any], classes: int, patch: int) -> None:
    """The same as far as the data tell."""
    name, shift, limits = str(latents["name"]), float(latents.get("shift", 0.0)), limits_of(family)
    check_settings(family, name, patch)
    if shift and not limits.shifts:
        _refuse(limits, f"takes no shifted latents, and {name} shifts by {shift:g}", "use another VAE")
    if latents.get("mean"):
        _refuse(limits, f"does not know of latents_mean and latents_std, which {name} has", "use another VAE")
    if limits.classes is not None and classes > limits.classes:
        _refuse(limits, f"knows {limits.classes} classes, and there are {classes}", "use fewer")


def _refuse(limits: Limits, why: str, fix: str) -> NoReturn:
    fix = f"{fix}, or student.stock=false; an export of the ensemble needs no stock pipeline"
    raise ConfigError(f"a stock {limits.pipeline} {why}", fix)
