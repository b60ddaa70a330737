"""In bf16 on the CPU all but attention is in bf16, in training as in the recomputation of activations."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from atoll.train.precision import Float32Attention
from atoll.train.run import train_run
from helpers import metrics, partitioned


@pytest.mark.parametrize("kind", [None, torch.bool, torch.bfloat16])
def test_attention_is_in_float32_and_the_rest_in_bf16(kind: torch.dtype | None) -> None:
    query, key, value = torch.randn(3, 2, 3, 5, 4, dtype=torch.bfloat16)
    mask = None if kind is None else torch.ones(2, 1, 1, 5).to(kind)
    short = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with Float32Attention(), torch.autocast("cpu", torch.bfloat16):
        product = query @ key.mT
        whole = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert (product.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(whole, short.float())
    assert torch.allclose(whole, short.float(), atol=0.03)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_in_bf16(checkpointing: bool, tmp_path: Path) -> None:
    losses = {}
    for precision in ("bf16", "float32"):
        train = {"precision": precision, "parallel": {"checkpointing": checkpointing}}
        text = {"condition": "text", "network": {"family": "pixart"}, "data": {"text_length": 4}}
        campaign = partitioned(tmp_path / precision, {**text, "train": train})
        train_run(campaign, "expert", 0)
        lines = metrics(tmp_path / precision / "islands/0")
        losses[precision] = [line["loss"] for line in lines if "loss" in line]
    assert losses["bf16"] != losses["float32"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)
