"""Which models diffusers' own pipelines run: the limits of the pipeline of each family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.base.errors import ConfigError

CLASSES = 1000
"""Class labels of DiTPipeline: the label after the last one is its null label."""


@dataclass(frozen=True)
class Limits:
    """What a pipeline of diffusers demands of the model that it runs.

    Attributes:
        pipeline: the class.
        needs_vae: whether there has to be one.
        shifts: whether latents may be shifted; such a pipeline decodes with the VAE's `shift_factor`, which
            may then not be None.
        classes: most class labels, None if any number.
        patch: side of the patches that it makes itself, None if the network does.
    """

    pipeline: str
    needs_vae: bool = False
    shifts: bool = False
    classes: int | None = None
    patch: int | None = None


LIMITS = {
    "pixart": Limits("PixArtAlphaPipeline"),
    "dit": Limits("DiTPipeline", needs_vae=True, classes=CLASSES),
    "sd3": Limits("StableDiffusion3Pipeline", shifts=True),
    "flux": Limits("FluxPipeline", shifts=True, patch=2),
}


def limits_of(family: str) -> Limits:
    """The limits of a family's pipeline; `ConfigError` if none is known."""
    if family not in LIMITS:
        raise ConfigError(
            f"no stock diffusers pipeline is known for the {family} family", f"use {' or '.join(LIMITS)}"
        )
    return LIMITS[family]


def check_settings(family: str, vae: str, patch: int) -> None:
    """Refuse a model that no stock pipeline runs, as far as settings tell.

    Raises:
        ConfigError: says what is in the way.
    """
    limits = limits_of(family)
    _demand(
        limits, not limits.needs_vae or vae != "none", "needs a VAE, and data.vae is none", "set data.vae"
    )
    patches = f"makes patches of {limits.patch}, and the network's are of {patch}"
    _demand(limits, limits.patch in (None, patch), patches, f"set patch: {limits.patch}")


def check_data(family: str, latents: Mapping[str, Any], classes: int, patch: int) -> None:
    """The same as far as the data tell."""
    check_settings(family, str(latents["name"]), patch)
    limits, shift = limits_of(family), float(latents.get("shift", 0.0))
    shifted = f"takes no shifted latents, and {latents['name']} shifts by {shift:g}"
    _demand(limits, limits.shifts or not shift, shifted, "use another VAE")
    _demand(
        limits,
        not latents.get("mean"),
        f"does not know of latents_mean and latents_std, which {latents['name']} has",
        "use another VAE",
    )
    too_many = f"knows {limits.classes} classes, and there are {classes}"
    _demand(limits, limits.classes is None or classes <= limits.classes, too_many, "use fewer")


def _demand(limits: Limits, met: bool, why: str, fix: str) -> None:
    if not met:
        fix = f"{fix}, or student.stock=false for a student that only Atoll runs"
        raise ConfigError(f"a stock {limits.pipeline} {why}", fix)
