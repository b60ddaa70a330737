"""The columns that frozen encoders make: `features` to cluster by, `latents` and `text` to train on."""

from typing import Any

import torch

from atoll.data.columns import Column, Progress
from atoll.data.dataset import DataSet
from atoll.data.settings import features_column
from atoll.encoders.text import TextEncoder
from atoll.encoders.vae import Autoencoder
from atoll.encoders.vision import VisionEncoder
from atoll.encoders.weights import rounded_hashes


def origin(encoder: TextEncoder | Autoencoder) -> dict[str, Any]:
    """What made a column: by the hashes in 16 bits, copies that are saved so are known again."""
    hashes = {} if encoder.network is None else {"rounded": rounded_hashes(encoder.network)}
    return {**encoder.producer(), **hashes}


def embed(dataset: DataSet, encoder: VisionEncoder, progress: Progress | None = None) -> Column:
    """Write (or find) the features `(rows, D)` float16 of every picture."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": encoder.encode(list(dataset.iter_images(shard))).half()}

    name = features_column(encoder.name)
    return dataset.write_column(name, encoder.producer(), compute, progress=progress)


def encode_latents(
    dataset: DataSet, vae: Autoencoder, progress: Progress | None = None, batch: int = 32
) -> Column:
    """Write (or find) the latents `(rows, C, H, W)` float16, posterior mode, `(z - shift) * scale`."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        pictures = list(dataset.iter_images(shard))
        parts = [vae.encode(pictures[i : i + batch]) for i in range(0, len(pictures), batch)]
        return {"values": torch.cat(parts).half()}

    return dataset.write_column("latents", origin(vae), compute, progress=progress)


def encode_text(dataset: DataSet, encoder: TextEncoder, progress: Progress | None = None) -> Column:
    """Write (or find) the text states of every caption, float16, ragged; `null` is the state of ""."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        captions = dataset.shard_table(shard, ["caption"]).column("caption").to_pylist()
        values, lengths = encoder.encode_ragged(captions)
        return {"values": values.half(), "lengths": lengths}

    null = {"values": encoder.encode_ragged([""])[0].half()}
    return dataset.write_column("text", origin(encoder), compute, {"null": null}, "ragged", progress)
