"""The commands of docs/text-to-image.md, in their order, at a tiny size and with a real bucket."""

import base64
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from atoll.base.safe_parse import read_yaml
from atoll.data.settings import BucketConfig
from atoll.networks.settings import check_sides
from atoll.store.store import Store
from helpers import ROOT, Run, merged
from helpers_data import encoded, packed
from helpers_vlm import save_llava
from s3 import S3
from serve.process import Server

pytestmark = pytest.mark.slow
TRAIN = {"batch": 8, "warmup": 8, "validations": 1, "previews": 0, "precision": "float32", "threads": 1}
TINY: dict[str, Any] = {
    "data": {
        "ingest": {"size": 16, "mode": "rgb", "shard_rows": 16, "heldout": 0.2},
        "text_encoder": "minilm",
        "text_length": 8,
        "vae": "none",
    },
    "partition": {"k": 2, "fine": 8, "encoder": "efficientnet-lite0", "encoder_size": 32, "method": "random"},
    "network": {"size": "nano", "depth": 1, "heads": 2, "head_width": 16, "patch": 4, "init": "scratch"},
    "router": {"depth": 1, "heads": 1, "head_width": 16, "patch": 4, "train": TRAIN},
    "train": {**TRAIN, "parallel": {"strategy": "ddp", "checkpointing": False}},
    "budget": {"samples": 160},
    "sampling": {"steps": 2},
}
ARGUMENTS = {"pos_embed_max_size": 16, "dual_attention_layers": [0], "qk_norm": "rms_norm"}


def commands() -> list[list[str]]:
    """What the page's blocks say is typed, but for the size of the images."""
    text = re.sub(r" --set data.ingest.size=\d+", "", (ROOT / "docs/text-to-image.md").read_text())
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.M | re.S))
    return [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith("atoll ")]


def tiny(folder: Path) -> None:
    """Make the campaign that was just written small."""
    place = folder / "campaign.yaml"
    tree = merged(read_yaml(place.read_text(), "the page's"), TINY)
    tree["network"]["arguments"] = ARGUMENTS
    if "buckets" in tree["data"]["ingest"]:
        sizes = BucketConfig.model_validate(tree["data"]["ingest"]["buckets"]).around(1024)
        assert (1376, 768) in sizes  # which the page asks for, and the networks take
        check_sides("router", 4, [(high // 8, wide // 8) for wide, high in sizes])
        tree["data"]["ingest"] |= {
            "size": 32,
            "buckets": {"sizes": ["32x32", "48x16"], "multiple": 16, "min_rows": 1, "max_upscale": 4},
        }
    place.write_text(yaml.safe_dump(tree))


def test_the_page_from_tars_to_a_served_model(
    tmp_path: Path, s3: S3, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    members = [(f"{n:03d}.png", encoded((24, 20), seed=n)) for n in range(48)]
    Store.open("s3://bucket/tars", create=True).put("0.tar", packed(members))
    captioner = save_llava(tmp_path)
    lines = commands()
    assert [line[0] for line in lines][-1] == "serve" and len(lines) > 12
    for line in lines[:-1]:
        said = run(*(word.replace("Qwen/Qwen2.5-VL-3B-Instruct", str(captioner)) for word in line))
        assert said.code == 0, (line, said)
        if line[0] == "new":
            tiny(tmp_path / line[1])
    # The server as the page starts it, and a size that a stock client asks for.
    server = Server(tmp_path / "exported", *lines[-1][2:], "--set", "residency.bound=1")
    try:
        drawn = server.client().images.generate(model="ensemble", prompt="a red square", size="32x32")  # type: ignore[call-overload]
        assert Image.open(io.BytesIO(base64.b64decode(drawn.data[0].b64_json))).size == (32, 32)
    finally:
        assert server.stop() == 0
