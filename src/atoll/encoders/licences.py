"""Well-known encoders and their licences, as their publishers state them."""

from collections.abc import Collection

from atoll.base.errors import ConfigError

LICENCES = {
    "minilm": "Apache-2.0",
    "openai/clip-vit-base-patch32": "MIT",
    "openai/clip-vit-large-patch14": "MIT",
    "stabilityai/sd-vae-ft-mse": "MIT",
    "stabilityai/sd-vae-ft-ema": "MIT",
    "stabilityai/sdxl-vae": "MIT",
    "madebyollin/taesd": "MIT",
    "madebyollin/taef1": "MIT",
}
LICENCES |= {
    f"google/{kind}-{size}": "Apache-2.0"
    for kind in ("t5-v1_1", "flan-t5")
    for size in ("small", "base", "large", "xl", "xxl")
}
"""Licences of well-known encoders, all of which allow copies; as their publishers state them."""
KNOWN = {"none", "mit-han-lab/dc-ae-f32c32-in-1.0-diffusers", *LICENCES}
"""Encoders that a card may name without being asked about; of any other name it is a stranger's choice."""


def check_known(name: str, allowed: Collection[str]) -> None:
    """Refuse to look for an encoder that only a card names.

    Args:
        name: a folder or hub name, as the card has it.
        allowed: names that the user vouches for.

    Raises:
        ConfigError: it is neither well known nor allowed.
    """
    if name not in KNOWN and name not in allowed:
        raise ConfigError(
            f"the model names the encoder {name!r}, which Atoll does not know",
            f"if you trust it, load the model with encoders=[{name!r}]",
        )
