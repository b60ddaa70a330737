"""Licences of well-known encoders, as their publishers state them."""

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
