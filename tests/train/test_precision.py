"""In bf16 on the CPU all but attention is in bf16, unless activations are computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from atoll.campaign.folder import Campaign
from atoll.networks.cost import Float32
from atoll.train.run import train_run
from helpers import assembled, metrics, partitioned

TEXT = {"condition": "text", "network": {"family": "pixart"}, "data": {"text_length": 32}}
"""Longer than the captions, which differ in length."""


@pytest.mark.parametrize("kind", [None, torch.bool, torch.bfloat16])
def test_attention_is_in_float32_and_the_rest_in_bf16(kind: torch.dtype | None) -> None:
    query, key, value = torch.randn(3, 2, 3, 5, 4, dtype=torch.bfloat16)
    mask = None if kind is None else torch.ones(2, 1, 1, 5).to(kind)
    short = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with Float32(scaled_dot_product_attention), torch.autocast("cpu", torch.bfloat16):
        product = query @ key.mT
        whole = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert (product.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(whole, short.float())
    assert torch.allclose(whole, short.float(), atol=0.03)


class Attended(TorchFunctionMode):
    """Notes what attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def losses(folder: Path, precision: str, **parallel: bool) -> list[float]:
    """Of every step of an expert."""
    train = {"precision": precision, "parallel": parallel, "log_every": 1}
    train_run(partitioned(folder, {**TEXT, "train": train}), "expert", 0)
    return [line["loss"] for line in metrics(folder / "islands/0") if "loss" in line]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_in_bf16(checkpointing: bool, tmp_path: Path) -> None:
    with Attended() as attended:
        short = losses(tmp_path / "short", "bf16", checkpointing=checkpointing)
    assert (torch.bfloat16 in attended.dtypes) == checkpointing
    whole = losses(tmp_path / "whole", "float32", checkpointing=checkpointing)
    assert short != whole
    assert short == pytest.approx(whole, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_run_in_bf16(tmp_path: Path) -> None:
    """The compiler follows attention too."""
    compiled, eager = (losses(tmp_path / str(way), "bf16", compile=way) for way in (True, False))
    assert compiled == pytest.approx(eager, rel=0.01)


def test_a_guided_teacher_in_bf16(tmp_path: Path) -> None:
    student = {"teacher": "routed", "guidance": 2.0, "stock": False}
    folder = assembled(tmp_path / "c", {**TEXT, "train": {"precision": "bf16"}, "student": student})
    train_run(Campaign.open(folder), "student")
    last = [line["teacher_loss"] for line in metrics(folder / "student") if "teacher_loss" in line][-1]
    assert 0 < last < 10
