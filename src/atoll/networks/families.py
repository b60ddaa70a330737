"""The denoiser families: diffusers classes by name, one adapter each, and their sizes.

An adapter knows what its class does not say: the time scale, what stands for "no condition", and
which shapes it gets silently wrong. Nothing here trains or samples.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, nearest
from atoll.networks.settings import DataShape, FamilyName, NetworkConfig


class Family:
    """One diffusers class: how to build it and how to call it with `t` in [0, 1]."""

    name: FamilyName
    time_scale = 1000.0
    takes_text = True

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        """Arguments of the diffusers class."""
        raise NotImplementedError

    def network_class(self) -> type[nn.Module]:
        """The diffusers class."""
        raise NotImplementedError

    def build(self, config: NetworkConfig, shape: DataShape) -> nn.Module:
        """An uninitialised network (the class's own defaults; see `networks/init.py`)."""
        if shape.size % config.patch:
            raise ConfigError(
                f"latents of {shape.size} px do not divide into patches of {config.patch}", "change patch"
            )
        return self.adapt(self.network_class()(**self.arguments(config, shape)))

    def adapt(self, network: nn.Module) -> nn.Module:
        """Switch off what a class does by itself that must not happen; returns the network."""
        return network

    def load(self, config: Mapping[str, Any]) -> nn.Module:
        """A network from the `config.json` that diffusers wrote, without its weights."""
        return self.adapt(cast(Any, self.network_class()).from_config(dict(config)))

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        """What data the network of a `config.json` was made for; what it does not fix is as in `shape`."""
        raise NotImplementedError

    def predict(
        self, network: nn.Module, x: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """The network's output at time `t (B,)` in [0, 1] of its own schedule."""
        raise NotImplementedError


class DiT(Family):
    """`DiTTransformer2DModel`: class labels, square images only; the null label is `num_classes`."""

    name: FamilyName = "dit"
    takes_text = False

    def network_class(self) -> type[nn.Module]:
        from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

        return cast(type[nn.Module], DiTTransformer2DModel)

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        if shape.text_width:
            raise ConfigError(
                "the dit family takes no text", "set condition: class or none, or family: pixart"
            )
        depth, heads, width = config.dimensions()
        return {
            "num_attention_heads": heads,
            "attention_head_dim": width,
            "num_layers": depth,
            "in_channels": shape.channels,
            "out_channels": shape.channels,
            "sample_size": shape.size,
            "patch_size": config.patch,
            "num_embeds_ada_norm": max(shape.classes, 1),
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        labels, size = settings["num_embeds_ada_norm"], settings["sample_size"]
        classes = shape.classes if labels == max(shape.classes, 1) else labels
        return replace(shape, channels=settings["in_channels"], size=size, classes=classes)

    def adapt(self, network: nn.Module) -> nn.Module:
        # LabelEmbedding drops labels in train mode from the global generator, in every block apart.
        # Dropout is the objective's; the embedding keeps its null row.
        for module in network.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = cast(Any, 0.0)
        return network

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if x.shape[-1] != x.shape[-2]:
            raise ConfigError(
                f"DiT takes square images, not {x.shape[-2]}x{x.shape[-1]}", "use the pixart family"
            )
        config = cast(Any, network).config
        labels = cond.labels
        if labels is None:
            labels = torch.full((x.shape[0],), config.num_embeds_ada_norm, device=x.device, dtype=torch.long)
        output = network(x, timestep=t * self.time_scale, class_labels=labels).sample
        return cast(Tensor, output[:, : config.in_channels])


class PixArt(Family):
    """`PixArtTransformer2DModel`: text through cross-attention (arXiv 2310.00426)."""

    name: FamilyName = "pixart"

    def network_class(self) -> type[nn.Module]:
        from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

        return cast(type[nn.Module], PixArtTransformer2DModel)

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        if not shape.text_width:
            raise ConfigError("the pixart family needs text states", "set condition: text, or family: dit")
        depth, heads, width = config.dimensions()
        return {
            "num_attention_heads": heads,
            "attention_head_dim": width,
            "num_layers": depth,
            "cross_attention_dim": heads * width,
            "in_channels": shape.channels,
            "out_channels": shape.channels,
            "sample_size": shape.size,
            "patch_size": config.patch,
            "caption_channels": shape.text_width,
            "use_additional_conditions": False,
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        channels, size = settings["in_channels"], settings["sample_size"]
        return replace(shape, channels=channels, size=size, text_width=settings["caption_channels"])

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if cond.text is None or cond.mask is None:
            raise ConfigError(
                "PixArt was called without text states", 'pass the stored encoding of "" for no text'
            )
        output = network(
            x,
            encoder_hidden_states=cond.text.to(x.dtype),
            encoder_attention_mask=cond.mask,
            timestep=t * self.time_scale,
        ).sample
        return cast(Tensor, output[:, : cast(Any, network).config.in_channels])


class SD3(Family):
    """`SD3Transformer2DModel`: blocks of two streams that attend to each other (arXiv 2403.03206).

    As of SD3.5: queries and keys are normalised, and no block has a second attention. The class takes no
    mask, so padding would be read: see `MaskedJointAttention`. Without `pooled` it crashes: zeros. Positions
    are cut out of a square table, so it takes any sides up to those that it was made for.
    """

    name: FamilyName = "sd3"

    def network_class(self) -> type[nn.Module]:
        from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

        return cast(type[nn.Module], SD3Transformer2DModel)

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        if not shape.text_width:
            raise ConfigError("the sd3 family needs text states", "set condition: text, or family: dit")
        depth, heads, width = config.dimensions()
        return {
            "num_attention_heads": heads,
            "attention_head_dim": width,
            "num_layers": depth,
            "caption_projection_dim": heads * width,
            "joint_attention_dim": shape.text_width,
            "in_channels": shape.channels,
            "out_channels": shape.channels,
            "sample_size": shape.size,
            "patch_size": config.patch,
            "pos_embed_max_size": shape.size // config.patch,
            "qk_norm": "rms_norm",
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        most = settings["pos_embed_max_size"] * settings["patch_size"]
        channels, width = settings["in_channels"], settings["joint_attention_dim"]
        return replace(shape, channels=channels, size=min(shape.size, most), text_width=width)

    def adapt(self, network: nn.Module) -> nn.Module:
        from atoll.networks.joint import MaskedJointAttention

        cast(Any, network).set_attn_processor(MaskedJointAttention())
        return network

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if cond.text is None or cond.mask is None:
            raise ConfigError(
                "SD3 was called without text states", 'pass the stored encoding of "" for no text'
            )
        config, (batch, _, height, width) = cast(Any, network).config, x.shape
        patch, most = config.patch_size, config.pos_embed_max_size
        if height % patch or width % patch or max(height, width) > most * patch:
            sides = f"multiples of {patch} up to {most * patch}"
            raise ConfigError(f"this SD3 takes no latents of {height}x{width}", f"use sides that are {sides}")
        tokens = (height // patch) * (width // patch)
        seen = torch.cat([cond.mask.new_ones(batch, tokens, dtype=torch.bool), cond.mask.bool()], dim=1)
        pooled = cond.pooled if cond.pooled is not None else x.new_zeros(batch, config.pooled_projection_dim)
        output = network(
            x,
            encoder_hidden_states=cond.text.to(x.dtype),
            pooled_projections=pooled.to(x.dtype),
            timestep=t * self.time_scale,
            joint_attention_kwargs={"attention_mask": seen[:, None, None]},
        ).sample
        return cast(Tensor, output[:, : config.in_channels])


class Flux(Family):
    """`FluxTransformer2DModel` of single-stream blocks: text and picture are one rotary sequence.

    The class takes no mask by itself and would attend to padding, so that a picture would depend on the
    longest prompt of its batch: the mask goes to the attention. Without `pooled` it crashes: zeros.
    """

    name: FamilyName = "flux"
    time_scale = 1.0  # the class multiplies by 1000 itself

    def network_class(self) -> type[nn.Module]:
        from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

        return cast(type[nn.Module], FluxTransformer2DModel)

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        if not shape.text_width:
            raise ConfigError("the flux family needs text states", "set condition: text, or family: dit")
        depth, heads, width = config.dimensions()
        side = width * 7 // 32 * 2  # of 128: 56 for each side of the picture, 16 for the first axis
        if width % 2 or not side:
            raise ConfigError(f"flux heads are {width} wide", "make head_width even and at least 6")
        return {
            "patch_size": 1,  # the class leaves patches to its caller: see `predict`
            "in_channels": shape.channels * config.patch**2,
            "num_layers": 0,
            "num_single_layers": depth,
            "num_attention_heads": heads,
            "attention_head_dim": width,
            "joint_attention_dim": shape.text_width,
            "axes_dims_rope": (width - 2 * side, side, side),
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        numbers, patch = settings["in_channels"], math.isqrt(settings["in_channels"] // shape.channels)
        fits = patch and numbers == shape.channels * patch**2 and shape.size % patch == 0
        channels = shape.channels if fits else numbers
        return replace(shape, channels=channels, text_width=settings["joint_attention_dim"])

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if cond.text is None or cond.mask is None:
            raise ConfigError(
                "Flux was called without text states", 'pass the stored encoding of "" for no text'
            )
        config, (batch, channels, height, width) = cast(Any, network).config, x.shape
        patch = math.isqrt(config.in_channels // channels)
        rows, columns = height // patch, width // patch
        grid = [torch.arange(n, device=x.device, dtype=torch.float32) for n in (rows, columns)]
        places = nn.functional.pad(torch.cartesian_prod(*grid), (1, 0))
        seen = torch.cat(
            [cond.mask.bool(), cond.mask.new_ones(batch, rows * columns, dtype=torch.bool)], dim=1
        )
        tokens = x.reshape(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        pooled = cond.pooled if cond.pooled is not None else x.new_zeros(batch, config.pooled_projection_dim)
        output = network(
            tokens.reshape(batch, rows * columns, -1),
            encoder_hidden_states=cond.text.to(x.dtype),
            pooled_projections=pooled.to(x.dtype),
            timestep=t * self.time_scale,
            img_ids=places,
            txt_ids=places.new_zeros(cond.text.shape[1], 3),
            joint_attention_kwargs={"attention_mask": seen[:, None, None]},
        ).sample
        output = output.reshape(batch, rows, columns, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
        return cast(Tensor, output.reshape(x.shape))


FAMILIES: dict[str, Family] = {one.name: one for one in (DiT(), PixArt(), SD3(), Flux())}
_CLASS_NAMES = {
    "DiTTransformer2DModel": "dit",
    "PixArtTransformer2DModel": "pixart",
    "SD3Transformer2DModel": "sd3",
    "FluxTransformer2DModel": "flux",
}


def family(name: str) -> Family:
    """The adapter of a family by its name or by the name of its diffusers class."""
    key = _CLASS_NAMES.get(name, name)
    if key not in FAMILIES:
        raise ConfigError(f"unknown network family {name!r}", nearest(name, FAMILIES))
    return FAMILIES[key]


def kept_buffers(network: nn.Module) -> dict[str, Tensor]:
    """The tensors that belong to a network's file beside its parameters: SD3's table of positions."""
    found = {}
    for prefix, module in network.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = value.detach()
    return found


def parameter_count(network: nn.Module) -> int:
    """Number of trainable numbers."""
    return sum(math.prod(p.shape) for p in network.parameters())
