"""What a stock pipeline of SD3 or Flux needs from outside. README.md of an export prints these functions.

So they know nothing of Atoll: torch is all they import.
"""

from typing import Any

import torch


def encode(pipe: Any, tokenizer: Any, tower: Any, texts: list[str], length: int) -> dict[str, torch.Tensor]:
    """What the pipeline takes in place of texts: states, zeros where there is padding, and pooled zeros."""
    tokens = tokenizer(
        [*texts, *[""] * len(texts)],
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    ).to(tower.device)
    seen = tokens["attention_mask"]
    with torch.no_grad():
        states = tower(input_ids=tokens["input_ids"], attention_mask=seen).last_hidden_state * seen[..., None]
    pooled = states.new_zeros(len(texts), pipe.transformer.config.pooled_projection_dim)
    return {
        "prompt_embeds": states[: len(texts)],
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": states[len(texts) :],
        "negative_pooled_prompt_embeds": pooled,
    }


def picture_first(network: Any, args: Any, kwargs: Any) -> Any:
    """Hide padding from SD3's attention, which reads the picture and then the text."""
    text, latents = kwargs["encoder_hidden_states"].any(dim=-1), kwargs["hidden_states"]
    patches = latents[0, 0].numel() // network.config.patch_size**2
    seen = torch.cat([text.new_ones(len(text), patches), text], dim=1)
    return args, {**kwargs, "joint_attention_kwargs": {"attention_mask": seen[:, None, None]}}


def text_first(network: Any, args: Any, kwargs: Any) -> Any:
    """Hide padding from Flux's attention, which reads the text and then the picture."""
    text, patches = kwargs["encoder_hidden_states"].any(dim=-1), kwargs["hidden_states"].shape[1]
    seen = torch.cat([text, text.new_ones(len(text), patches)], dim=1)
    return args, {**kwargs, "joint_attention_kwargs": {"attention_mask": seen[:, None, None]}}


def unpacked(tokens: torch.Tensor, side: int) -> torch.Tensor:
    """Latents `(B, C, side, side)` of Flux's patches of 2x2."""
    return torch.nn.functional.pixel_shuffle(tokens.mT.unflatten(2, (side // 2, side // 2)), 2)
