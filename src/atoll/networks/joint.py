"""Attention over text and picture together that knows which texts are padding."""

from typing import cast

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn


class MaskedJointAttention:
    """What diffusers' `JointAttnProcessor2_0` computes, with a mask: that one takes one and forgets it.

    The tokens of the picture come first. Without a mask the result is that of diffusers' own processor.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Attention of the picture `(B, N, D)` and the text `(B, L, D)`, or of the picture alone.

        Returns:
            What was given, attended.
        """

        def split(tokens: Tensor, project: nn.Module, norm: nn.Module | None) -> Tensor:
            heads: Tensor = project(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            return heads if norm is None else cast(Tensor, norm(heads))

        picture, text = hidden_states, encoder_hidden_states
        norms = (attn.norm_q, attn.norm_k, None)
        projections = zip((attn.to_q, attn.to_k, attn.to_v), norms, strict=True)
        query, key, value = (split(picture, *parts) for parts in projections)
        if text is not None:
            norms = (attn.norm_added_q, attn.norm_added_k, None)
            added = zip((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), norms, strict=True)
            read = (split(text, *parts) for parts in added)
            query, key, value = (
                torch.cat(both, dim=2) for both in zip((query, key, value), read, strict=True)
            )
        mask = None if text is None else attention_mask
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out = out.transpose(1, 2).flatten(2).to(query.dtype)
        seen: Tensor = attn.to_out[1](attn.to_out[0](out[:, : picture.shape[1]]))
        if text is None:
            return seen
        rest = out[:, picture.shape[1] :]
        return seen, rest if attn.context_pre_only else attn.to_add_out(rest)
