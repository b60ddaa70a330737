"""The router: a small DiT with a CLS token that says which expert knows a noisy image.

Built from diffusers' parts and conditioned with the same mechanisms as a denoiser: text through
cross-attention, labels and time through adaLN (DDM, arXiv 2501.05450, section 3.3).
"""

from typing import Any, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.imports import lean_imports

with lean_imports():
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.attention import BasicTransformerBlock
    from diffusers.models.embeddings import LabelEmbedding, PatchEmbed, PixArtAlphaTextProjection
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.models.normalization import AdaLayerNormSingle


class Router(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """`p(k | x_t, t, condition)` as logits: of text by `caption_channels` (D), of labels by `num_classes`."""

    card: Any = None
    """What it is, once published; as a component of a pipeline it travels alone."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_experts: int,
        in_channels: int,
        sample_size: int,
        patch_size: int = 2,
        num_layers: int = 2,
        num_attention_heads: int = 2,
        attention_head_dim: int = 32,
        caption_channels: int = 0,
        num_classes: int = 0,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        self.pos_embed = PatchEmbed(sample_size, sample_size, patch_size, in_channels, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.adaln_single = AdaLayerNormSingle(width, use_additional_conditions=False)
        self.caption_projection = (
            PixArtAlphaTextProjection(caption_channels, width) if caption_channels else None
        )
        # dropout_prob > 0 makes the null row; the dropout itself is the objective's.
        self.label_embedding = LabelEmbedding(num_classes, width, dropout_prob=0.1) if num_classes else None
        if self.label_embedding is not None:
            self.label_embedding.dropout_prob = 0.0
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                width,
                num_attention_heads,
                attention_head_dim,
                cross_attention_dim=width if caption_channels else None,
                activation_fn="gelu-approximate",
                attention_bias=True,
                norm_type="ada_norm_single",
                norm_elementwise_affine=False,
                norm_eps=1e-6,
            )
            for _ in range(num_layers)
        )
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.scale_shift_table = nn.Parameter(torch.zeros(2, width))
        self.proj_out = nn.Linear(width, num_experts)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As any module's; diffusers' own warns of layers to keep in float32, of which there are none."""
        return nn.Module.to(self, *args, **kwargs)

    def forward(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B K"]:
        """Logits over experts at `x_t`, time `t` in [0, 1] (0 is data), given the condition."""
        tokens, rows = self.pos_embed(x_t), x_t.shape[0]
        tokens = torch.cat([self.cls_token.expand(rows, -1, -1).to(tokens.dtype), tokens], dim=1)
        adaln, embedded = self.adaln_single(t * 1000.0, batch_size=rows, hidden_dtype=tokens.dtype)
        text = mask = None
        if self.caption_projection is not None and cond.text is not None:
            text = self.caption_projection(cond.text.to(tokens.dtype))
            # A bias that is finite: with -inf, a row without any text would come out as NaN.
            mask = ((1 - cond.real.to(tokens.dtype)) * -10000.0)[:, None]  # diffusers' convention
        if self.label_embedding is not None:
            embedding, labels = cast(Any, self.label_embedding), cond.labels
            if labels is None:
                labels = torch.full((rows,), embedding.num_classes, device=x_t.device, dtype=torch.long)
            tokens = tokens + embedding(labels)[:, None].to(tokens.dtype)
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=adaln)
        shift, scale = (self.scale_shift_table[None] + embedded[:, None]).chunk(2, dim=1)
        head = self.norm_out(tokens[:, :1]) * (1 + scale) + shift
        return cast(Tensor, self.proj_out(head[:, 0]).float())
