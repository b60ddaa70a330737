"""Which network, as settings, and the shapes it must fit. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from atoll.base.config import Config
from atoll.base.errors import ConfigError, nearest

FamilyName = Literal["dit", "pixart", "sd3", "flux"]

TAKES_TEXT: dict[str, bool] = {"dit": False, "pixart": True, "sd3": True, "flux": True}
"""Whether a family is conditioned on text, else on class labels or on nothing."""
SQUARE_ONLY = ("dit",)
"""Families whose class gives a wrong shape for latents that are not square."""

# depth, heads, width of a head. nano is for a CPU; S, B, XL are the published DiT sizes
# (arXiv 2212.09748, table 1), which PixArt shares; 2B is SD3 medium (arXiv 2403.03206);
# 3B is the paper's MMDiT (arXiv 2501.05450).
SIZES: dict[str, tuple[int, int, int]] = {
    "nano": (6, 3, 48),
    "micro": (6, 4, 48),
    "tiny": (8, 4, 64),
    "S": (12, 6, 64),
    "B": (12, 12, 64),
    "XL": (28, 16, 72),
    "2B": (24, 24, 64),
    "3B": (30, 20, 128),
}


class LoraConfig(Config):
    """A low-rank change of a network that all experts share (LoRA)."""

    rank: int = Field(default=16, ge=1)
    """Rank of the change of a layer: at most the width of the network."""
    alpha: float | None = Field(default=None, gt=0)
    """The change is scaled by alpha / rank; by default alpha is the rank."""
    targets: list[str] = []
    """Names, or their ends, of the linear layers that are changed, such as `to_q`; by default all those of
    the blocks."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class NetworkConfig(Config):
    """Network architecture and size. The image shape comes from the data."""

    family: FamilyName = "pixart"
    """`dit` (class labels or none), `pixart` (text by cross-attention), `sd3` or `flux` (text by joint
    attention)."""
    size: str = "nano"
    """Preset: nano, micro, tiny, S, B, XL, 2B or 3B."""
    patch: int = Field(default=2, ge=1)
    """Patch size, in latent pixels."""
    depth: int | None = Field(default=None, ge=1, le=1000)
    """Number of transformer blocks; by default the preset's."""
    heads: int | None = Field(default=None, ge=1, le=1000)
    """Number of attention heads; by default the preset's."""
    head_width: int | None = Field(default=None, ge=1, le=10_000)
    """Width of an attention head; by default the preset's."""
    init: str = "scratch"
    """Initial weights: `scratch`, or a diffusers checkpoint (folder or hub name); what does not fit is
    random."""

    arguments: dict[str, Any] = {}
    """Further arguments of the diffusers class, as a checkpoint's `config.json` has them, such as
    `{guidance_embeds: true, num_layers: 19}`."""
    interpolation_scale: float | None = Field(default=None, ge=1 / 64, le=64)
    """Divides the positions of patches: with 2, latents of twice the side keep the range of positions, with 1
    they go beyond it. By default as the class has it, and `init` must have the same positions."""

    lora: LoraConfig | None = None
    """Train every expert as a low-rank change (LoRA) of the network of shared pretraining, or of `init`; `{}`
    uses the defaults, null trains whole networks. All other runs are whole networks."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def whole(self) -> "NetworkConfig":
        """The network without a low-rank change."""
        return self.model_copy(update={"lora": None})

    @property
    def guidance(self) -> bool:
        """Whether the guidance scale is an input, as of FLUX.1-dev, in place of a second evaluation."""
        return bool(self.arguments.get("guidance_embeds"))

    def dimensions(self) -> tuple[int, int, int]:
        """Depth, heads and width of a head."""
        if self.size not in SIZES:
            raise ConfigError(f"unknown network size {self.size!r}", nearest(self.size, SIZES))
        depth, heads, width = SIZES[self.size]
        return self.depth or depth, self.heads or heads, self.head_width or width

    def base_size(self, size: int, patch: int) -> int:
        """Side of the latents, in whole patches, whose positions latents of this side are given."""
        return max(1, round(size / (self.interpolation_scale or 1) / patch)) * patch

    def architecture(self) -> tuple[Any, ...]:
        """What decides names and shapes of the weights, given the data."""
        return self.family, self.dimensions(), self.patch, self.arguments, self.lora


_Size = Annotated[int, Field(ge=0, le=65536)]
_Side = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True)
class DataShape:
    """What a network must fit: the latents' shape and the conditions' size; 0 without text or labels."""

    channels: _Side  # C of a latent
    size: _Side  # H = W of a latent; of several shapes, of a square of about as many numbers
    text_width: _Size = 0  # D of the text states
    text_length: _Size = 0  # L that they are padded to
    classes: Annotated[int, Field(ge=0, le=10**8)] = 0  # number of class labels
    pooled_width: _Size = 0  # P of the text's pooled vector
    guidance: bool = False  # whether the guidance scale is an input
    # H and W of latents that keep their pictures' aspect, in order of width; none where all are squares.
    sizes: tuple[tuple[_Side, _Side], ...] = ()

    @property
    def latents(self) -> tuple[tuple[int, int], ...]:
        """H and W of all latents."""
        return self.sizes or ((self.size, self.size),)

    @property
    def usual(self) -> tuple[int, int]:
        """H and W of what is drawn where nothing is said: nearest to a square."""
        return min(self.latents, key=lambda sides: max(sides) / min(sides))

    @property
    def largest(self) -> tuple[int, int]:
        """H and W of the latents of the most numbers."""
        return max(self.latents, key=math.prod)


def check_sides(name: str, patch: int, latents: Sequence[tuple[int, int]]) -> None:
    """Refuse heights and widths of latents that a family's network, or the router, cannot take."""
    for height, width in latents:
        if height != width and name in SQUARE_ONLY:
            fix = "set network.family: pixart, sd3 or flux, or leave data.ingest.buckets out"
            raise ConfigError(f"the {name} family takes square latents only, not {width}x{height}", fix)
        if height % patch or width % patch:
            named = f"{height} px" if height == width else f"{width}x{height} px"
            fix = f"change {'router.patch' if name == 'router' else 'patch'} or the sizes in data.ingest"
            raise ConfigError(f"latents of {named} do not divide into patches of {patch}", fix)
