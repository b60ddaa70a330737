"""The denoiser families: diffusers classes by name, one adapter each, and their published initialisation.

An adapter knows what its class does not say: the time scale, what stands for "no condition", and
which shapes it gets silently wrong. Nothing here trains or samples.
"""

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, nearest
from atoll.base.imports import lean_imports
from atoll.base.rng import generator
from atoll.networks.lora import DOWN, UP, changed, is_change, own
from atoll.networks.settings import TAKES_TEXT, DataShape, FamilyName, NetworkConfig, check_sides

PIXELS = 8
"""Of a latent pixel, for PixArt-alpha's embedding of sizes: its autoencoder has these."""
EMBEDDERS = ("timestep_embedder", "resolution_embedder", "ratio_embedder", "caption_projection")
"""Of two layers, which start at a width of their own."""


class Family:
    """One diffusers class: how to build it and how to call it with `t` in [0, 1]."""

    name: FamilyName
    class_name: str
    module: str
    # diffusers' sinusoids are made for times up to 1000: times in [0, 1] would look much alike.
    time_scale = 1000.0
    # Fewest and most tokens that the last text encoder gives a published checkpoint; None where padding is
    # hidden, so that their number does not matter.
    tokens: tuple[int, int] | None = None

    def network_class(self) -> type[nn.Module]:
        """The diffusers class; imported only here, since each takes its time."""
        with lean_imports():
            module = importlib.import_module(f"diffusers.models.transformers.{self.module}")
        return cast(type[nn.Module], getattr(module, self.class_name))

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        """Arguments of the diffusers class."""
        if TAKES_TEXT[self.name] and not shape.text_width:
            fix = "set condition: text, or family: dit"
            raise ConfigError(f"the {self.name} family needs text states", fix)
        if shape.text_width and not TAKES_TEXT[self.name]:
            fix = "set condition: class or none, or family: pixart"
            raise ConfigError(f"the {self.name} family takes no text", fix)
        depth, heads, width = config.dimensions()
        return {
            "num_attention_heads": heads,
            "attention_head_dim": width,
            "num_layers": depth,
            "in_channels": shape.channels,
            "out_channels": shape.channels,
            "sample_size": shape.size,
            "patch_size": config.patch,
        }

    def build(self, config: NetworkConfig, shape: DataShape) -> nn.Module:
        """An uninitialised network (the class's own defaults; see `initialise`)."""
        check_sides(self.name, config.patch, shape.latents)
        for name in config.arguments.keys() - (known := self.defaults()).keys():
            what = f"network.arguments: {self.class_name} has no argument {name!r}"
            raise ConfigError(what, nearest(name, known))
        network = self.adapt(self.network_class()(**{**self.arguments(config, shape), **config.arguments}))
        made = self.made_for({**known, **dict(cast(Any, network).config)}, shape)
        for name in ("channels", "text_width", "classes"):
            if (mine := getattr(made, name)) != (own := getattr(shape, name)):
                what = f"network.arguments make a network for {name} {mine}, and the data have {own}"
                raise ConfigError(what, "leave that argument out")
        return changed(network, config.lora)

    def adapt(self, network: nn.Module) -> nn.Module:
        """Switch off what a class does by itself that must not happen; returns the network."""
        return network

    def defaults(self) -> dict[str, Any]:
        """The arguments of the class, with what counts where a `config.json` leaves one out."""
        parameters = inspect.signature(self.network_class()).parameters
        return {name: parameter.default for name, parameter in parameters.items()}

    def load(self, config: Mapping[str, Any]) -> nn.Module:
        """A network from the `config.json` that diffusers wrote, without its weights."""
        arguments = {name: value for name, value in config.items() if name != "lora"}
        return changed(self.adapt(cast(Any, self.network_class()).from_config(arguments)), config.get("lora"))

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        """What data the network of a `config.json` was made for; what it does not fix is as in `shape`."""
        raise NotImplementedError

    def predict(
        self, network: nn.Module, x: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """The network's output at time `t (B,)` in [0, 1] of its own schedule; a variance is cut off."""
        if TAKES_TEXT[self.name] and cond.text is None:
            fix = 'pass the stored encoding of "" for no text'
            raise ConfigError(f"{type(self).__name__} was called without text states", fix)
        return self._call(cast(Any, network), x, t * self.time_scale, cond)[:, : x.shape[1]]

    def _call(self, network: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
        raise NotImplementedError


class DiT(Family):
    """`DiTTransformer2DModel`: class labels, square images only; the null label is `num_classes`."""

    name: FamilyName = "dit"
    class_name, module = "DiTTransformer2DModel", "dit_transformer_2d"

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        # The class spreads the positions of `sample_size` over latents of any side.
        return super().arguments(config, shape) | {
            "num_embeds_ada_norm": max(shape.classes, 1),
            "sample_size": config.base_size(shape.size, config.patch),
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        labels, size = settings["num_embeds_ada_norm"], settings["sample_size"]
        classes = shape.classes if labels == max(shape.classes, 1) else labels
        return replace(shape, channels=settings["in_channels"], size=size, classes=classes)

    def adapt(self, network: nn.Module) -> nn.Module:
        # LabelEmbedding drops labels in train mode from the global generator, in every block apart: a
        # sample's loss would depend on its batch, and blocks would see different conditions. Dropout is
        # the objective's; the embedding keeps its null row.
        for module in network.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = cast(Any, 0.0)
        return network

    def _call(self, network: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
        if x.shape[-1] != x.shape[-2]:
            what = f"DiT takes square images, not {x.shape[-2]}x{x.shape[-1]}"
            raise ConfigError(what, "use the pixart family")
        labels = cond.labels
        if labels is None:
            labels = torch.full_like(time, network.config.num_embeds_ada_norm, dtype=torch.long)
        return cast(Tensor, network(x, timestep=time, class_labels=labels).sample)


class PixArt(Family):
    """`PixArtTransformer2DModel`: text through cross-attention (arXiv 2310.00426)."""

    name: FamilyName = "pixart"
    class_name, module = "PixArtTransformer2DModel", "pixart_transformer_2d"

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        _, heads, width = config.dimensions()
        return super().arguments(config, shape) | {
            "cross_attention_dim": heads * width,
            "caption_channels": shape.text_width,
            "use_additional_conditions": False,
            "interpolation_scale": config.interpolation_scale,
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        channels, size = settings["in_channels"], settings["sample_size"]
        return replace(shape, channels=channels, size=size, text_width=settings["caption_channels"])

    def _call(self, network: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
        sizes = None
        if network.use_additional_conditions:
            # As the pipeline at 1024 px; a recorded call could not repeat a copy from the host.
            batch, _, height, width = x.shape
            sides = [x.new_full((batch, 1), side * PIXELS) for side in (height, width)]
            aspect = x.new_full((batch, 1), height / width)
            sizes = {"resolution": torch.cat(sides, dim=1), "aspect_ratio": aspect}
        output = network(
            x,
            encoder_hidden_states=cast(Tensor, cond.text).to(x.dtype),
            encoder_attention_mask=cond.real,
            timestep=time,
            added_cond_kwargs=sizes,
        )
        return cast(Tensor, output.sample)


class _Joint(Family):
    """A class whose text runs through the same attention as the picture."""

    tokens = (256, 512)
    picture_first = False  # whether the picture's tokens come before the text's

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        pooled = {"pooled_projection_dim": shape.pooled_width} if shape.pooled_width else {}
        return super().arguments(config, shape) | {"joint_attention_dim": shape.text_width, **pooled}

    def _joint(
        self, network: Any, x: Tensor, time: Tensor, cond: Condition, patches: int, **more: Tensor
    ) -> Tensor:
        # Without `pooled` the class crashes. It takes no mask by itself and would attend to padding: then a
        # picture would depend on the longest prompt of its batch.
        pooled = cond.pooled
        if pooled is None:
            pooled = time.new_zeros(len(time), network.config.pooled_projection_dim)
        mask = cond.mask
        if mask is not None:
            whole = [mask.new_ones(len(mask), patches), mask]
            mask = torch.cat(whole if self.picture_first else whole[::-1], dim=1)[:, None, None]
        output = network(
            x,
            encoder_hidden_states=cast(Tensor, cond.text).to(x.dtype),
            pooled_projections=pooled.to(x.dtype),
            timestep=time,
            joint_attention_kwargs=None if mask is None else {"attention_mask": mask},
            **more,
        )
        return cast(Tensor, output.sample)


def _heads(attn: Any, tokens: Tensor, project: nn.Module, norm: nn.Module | None) -> Tensor:
    heads: Tensor = project(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
    return heads if norm is None else cast(Tensor, norm(heads))


class MaskedJointAttention:
    """What diffusers' `JointAttnProcessor2_0` computes, with a mask: that one takes one and forgets it.

    The tokens of the picture `(B, N, D)` come before those of the text `(B, L, D)`, if there is any.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        picture, text = hidden_states, encoder_hidden_states
        norms = (attn.norm_q, attn.norm_k, None)
        projections = zip((attn.to_q, attn.to_k, attn.to_v), norms, strict=True)
        query, key, value = (_heads(attn, picture, *parts) for parts in projections)
        if text is not None:
            norms = (attn.norm_added_q, attn.norm_added_k, None)
            added = zip((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), norms, strict=True)
            pairs = zip((query, key, value), (_heads(attn, text, *parts) for parts in added), strict=True)
            query, key, value = (torch.cat(pair, dim=2) for pair in pairs)
        # SD3.5's second attention is handed the same mask, which does not fit: it reads the picture alone.
        mask = None if text is None else attention_mask
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out = out.transpose(1, 2).flatten(2).to(query.dtype)
        attended: Tensor = attn.to_out[1](attn.to_out[0](out[:, : picture.shape[1]]))
        if text is None:
            return attended
        rest = out[:, picture.shape[1] :]
        # The last block of SD3 ends the text stream: diffusers builds no `to_add_out` there.
        return attended, rest if attn.context_pre_only else attn.to_add_out(rest)


class SD3(_Joint):
    """`SD3Transformer2DModel`: blocks of two streams that attend to each other (arXiv 2403.03206).

    As of SD3.5: queries and keys are normalised, and no block has a second attention. The mask is read by
    `MaskedJointAttention`. Positions are cut out of the middle of a square table, which bounds the sides.
    """

    name: FamilyName = "sd3"
    class_name, module = "SD3Transformer2DModel", "transformer_sd3"
    picture_first = True

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        _, heads, width = config.dimensions()
        return super().arguments(config, shape) | {
            "caption_projection_dim": heads * width,
            "pos_embed_max_size": max(map(max, shape.latents)) // config.patch,
            "qk_norm": "rms_norm",
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        # Not `sample_size`: the table of positions bounds the sides, and the class crops it to smaller ones.
        most = settings["pos_embed_max_size"] * settings["patch_size"]
        channels, width = settings["in_channels"], settings["joint_attention_dim"]
        return replace(shape, channels=channels, size=min(shape.size, most), text_width=width)

    def build(self, config: NetworkConfig, shape: DataShape) -> nn.Module:
        network = super().build(config, shape)
        if "pos_embed_max_size" in config.arguments:  # a published one's table, as the class makes it
            if config.interpolation_scale not in (None, 1):
                what = "network.interpolation_scale: network.arguments.pos_embed_max_size names a table"
                raise ConfigError(f"{what} of a published network", "leave one of them out")
            return network
        from diffusers.models.embeddings import get_2d_sincos_pos_embed_from_grid

        # The square has the positions 0, 1, ... over the scale; longer sides go beyond them at both ends. The
        # class would move all of them with the longest side. diffusers reads the table from the file.
        embed = cast(Any, network).pos_embed
        first = (embed.pos_embed_max_size - shape.size // config.patch) // 2
        places = torch.arange(embed.pos_embed_max_size, dtype=torch.float32) - first
        places = places / (config.interpolation_scale or 1)
        grid = torch.stack(torch.meshgrid(places, places, indexing="xy"))
        table = get_2d_sincos_pos_embed_from_grid(embed.pos_embed.shape[-1], grid, output_type="pt")
        embed.pos_embed.copy_(table[None])
        return network

    def adapt(self, network: nn.Module) -> nn.Module:
        cast(Any, network).set_attn_processor(MaskedJointAttention())
        return network

    def _call(self, network: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
        height, width = x.shape[2:]
        patch, most = network.config.patch_size, network.config.pos_embed_max_size
        # The class drops rows that fill no patch, without a word: the output would be smaller than x.
        if height % patch or width % patch or max(height, width) > most * patch:
            sides = f"multiples of {patch} up to {most * patch}"
            raise ConfigError(f"this SD3 takes no latents of {height}x{width}", f"use sides that are {sides}")
        return self._joint(network, x, time, cond, (height // patch) * (width // patch))


class Flux(_Joint):
    """`FluxTransformer2DModel` of single-stream blocks: text and picture are one rotary sequence."""

    name: FamilyName = "flux"
    class_name, module = "FluxTransformer2DModel", "transformer_flux"
    time_scale = 1.0  # the class multiplies by 1000 itself

    def arguments(self, config: NetworkConfig, shape: DataShape) -> dict[str, Any]:
        common = super().arguments(config, shape)
        width = common["attention_head_dim"]
        # Rotary positions take an even width, in the published proportions.
        side = width * 7 // 32 * 2  # of 128: 56 for each side of the picture, 16 for the first axis
        if width % 2 or not side:
            raise ConfigError(f"flux heads are {width} wide", "make head_width even and at least 6")
        return {
            "patch_size": 1,  # the class leaves patches to its caller: see `_call`
            "in_channels": shape.channels * config.patch**2,
            "num_layers": 0,
            "num_single_layers": common["num_layers"],
            "num_attention_heads": common["num_attention_heads"],
            "attention_head_dim": width,
            **{name: common[name] for name in common if name.startswith(("joint", "pooled"))},
            "axes_dims_rope": (width - 2 * side, side, side),
        }

    def made_for(self, settings: Mapping[str, Any], shape: DataShape) -> DataShape:
        # The file has the numbers of a patch, channels times area: only the data tell the two factors apart.
        numbers, patch = settings["in_channels"], math.isqrt(settings["in_channels"] // shape.channels)
        fits = patch and numbers == shape.channels * patch**2 and shape.size % patch == 0
        channels = shape.channels if fits else numbers
        return replace(shape, channels=channels, text_width=settings["joint_attention_dim"])

    def build(self, config: NetworkConfig, shape: DataShape) -> nn.Module:
        return self._scaled(super().build(config, shape), config.interpolation_scale)

    def load(self, config: Mapping[str, Any]) -> nn.Module:
        known = {name: value for name, value in config.items() if name != "interpolation_scale"}
        return self._scaled(super().load(known), config.get("interpolation_scale"))

    def _scaled(self, network: nn.Module, scale: float | None) -> nn.Module:
        # The class takes positions as inputs, and has no argument for what they are divided by.
        if scale not in (None, 1):
            cast(Any, network).register_to_config(interpolation_scale=scale)
        return network

    def _call(self, network: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
        batch, channels, height, width = x.shape
        patch = math.isqrt(network.config.in_channels // channels)
        rows, columns = height // patch, width // patch
        grid = [torch.arange(n, device=x.device, dtype=torch.float32) for n in (rows, columns)]
        # FluxPipeline's numbering: the first axis is 0, then row and column; tokens of the text are all at 0.
        places = nn.functional.pad(torch.cartesian_prod(*grid), (1, 0))
        places = places / network.config.get("interpolation_scale", 1)
        # The order of FluxPipeline's `_pack_latents`: a student has to run in the stock pipeline too.
        tokens = x.reshape(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        tokens = tokens.reshape(batch, rows * columns, -1)
        more = {"img_ids": places, "txt_ids": places.new_zeros(cast(Tensor, cond.text).shape[1], 3)}
        if network.config.guidance_embeds and cond.guidance is not None:
            more["guidance"] = cond.guidance
        output = self._joint(network, tokens, time, cond, rows * columns, **more)
        output = output.reshape(batch, rows, columns, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
        return output.reshape(x.shape)


FAMILIES: dict[str, Family] = {adapter.name: adapter for adapter in (DiT(), PixArt(), SD3(), Flux())}


def family(name: str) -> Family:
    """The adapter of a family by its name or by the name of its diffusers class."""
    by_class = {adapter.class_name: adapter for adapter in FAMILIES.values()}
    if name not in by_class | FAMILIES:
        raise ConfigError(f"unknown network family {name!r}", nearest(name, FAMILIES))
    return (by_class | FAMILIES)[name]


def kept_buffers(network: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network's file beside its parameters: SD3's table of positions."""
    parameters = dict(network.named_parameters())
    return {name: value for name, value in network.state_dict().items() if name not in parameters}


def parameter_count(network: nn.Module) -> int:
    """Number of trained numbers, frozen by now or not: of a low-rank change those of the change."""
    return sum(math.prod(p.shape) for p in own(network, dict(network.named_parameters())).values())


# PixArt's blocks share one adaLN, which its authors draw at random; they zero the cross-attention instead.
GATES = (".norm1.linear", ".norm1_context.linear", ".attn2.to_out.0", ".norm.linear")
"""Linear layers that gate a block: of DiT and SD3, SD3, PixArt, Flux."""


def initialise(network: nn.Module, seed: int) -> None:
    """Draw all weights anew, in place, from `seed` alone (the same on every machine and device).

    diffusers builds networks with torch's defaults: no adaLN-zero, no Xavier. These rules are those of the
    papers' own code (DiT: arXiv 2212.09748 section 3.2; PixArt: arXiv 2310.00426 section 2.3). SD3 and Flux
    have none published; they get DiT's, whose blocks SD3 (arXiv 2403.03206) builds on.
    """
    # Drawn on the CPU, whatever the device: CUDA's generator gives other numbers for the same seed.
    source = generator(seed, "init")

    def normal(weight: Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=source) * std)

    with torch.no_grad():
        for name, module in network.named_modules():
            if is_change(name):
                continue
            if isinstance(module, nn.Linear | nn.Conv2d):
                flat = module.weight.view(module.weight.shape[0], -1)
                bound = (6.0 / (flat.shape[0] + flat.shape[1])) ** 0.5  # Xavier, a convolution as a matrix
                module.weight.copy_(torch.rand(module.weight.shape, generator=source) * (2 * bound) - bound)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                normal(module.weight, 0.02)
            elif type(module).__name__ == "RMSNorm" and module.weight is not None:  # torch's or diffusers'
                cast(Tensor, module.weight).fill_(1.0)
            for key, parameter in module.named_parameters(recurse=False):
                # The tables as in PixArt's code: randn / sqrt(width).
                if key in ("scale_shift_table", "cls_token"):
                    normal(parameter, 0.02 if key == "cls_token" else parameter.shape[-1] ** -0.5)
        for name, module in network.named_modules():  # after their layers, which come later in the first pass
            if name.endswith(EMBEDDERS):
                normal(cast(Any, module).linear_1.weight, 0.02)
                normal(cast(Any, module).linear_2.weight, 0.02)
            elif name == "adaln_single.linear":
                normal(cast(Any, module).weight, 0.02)
        # Gates (in PixArt: of the text alone) and the output start at zero, so v = 0 at the first step.
        for name, layer in network.named_modules():
            gate = "transformer_blocks." in name and name.endswith(GATES)
            if gate or name in ("proj_out", "proj_out_2", "proj_out_1", "norm_out.linear"):
                assert isinstance(layer, nn.Linear), name
                layer.weight.zero_()
                layer.bias.zero_()
        # peft's: a change starts at zero.
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear) and name.endswith(f".{DOWN}"):
                values = torch.rand(layer.weight.shape, generator=source) * 2 - 1
                layer.weight.copy_(values * layer.in_features**-0.5)
            elif isinstance(layer, nn.Linear) and name.endswith(f".{UP}"):
                layer.weight.zero_()
