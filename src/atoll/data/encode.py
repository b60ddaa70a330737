"""The columns that frozen encoders make: `features` to cluster by, `latents` and `text` to train on."""

from typing import Any

import torch

from atoll.data.columns import Column, Progress, ragged
from atoll.data.dataset import DataSet
from atoll.data.settings import features_column
from atoll.encoders.text import TextEncoder
from atoll.encoders.vae import Autoencoder
from atoll.encoders.vision import VisionEncoder
from atoll.encoders.weights import rounded_hashes
from atoll.store.lease import LeaseConfig


def origin(encoder: TextEncoder | Autoencoder) -> dict[str, Any]:
    """What made a column: by the hashes in 16 bits, copies that are saved so are known again."""
    hashes = {} if encoder.network is None else {"rounded": rounded_hashes(encoder.network)}
    return {**encoder.producer(), **hashes}


def embed(
    dataset: DataSet,
    encoder: VisionEncoder,
    progress: Progress | None = None,
    lease: LeaseConfig | None = None,
) -> Column:
    """Write (or find) the features `(rows, D)` float16 of every picture."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": encoder.encode(list(dataset.iter_images(shard))).half()}

    name = features_column(encoder.name)
    return dataset.write_column(name, encoder.producer(), compute, progress=progress, lease=lease)


def encode_latents(
    dataset: DataSet,
    vae: Autoencoder,
    progress: Progress | None = None,
    lease: LeaseConfig | None = None,
    batch: int = 32,
) -> Column:
    """Write (or find) the latents `(rows, C, H, W)` float16, posterior mode, `(z - shift) * scale`."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        pictures = list(dataset.iter_images(shard))
        parts = [vae.encode(pictures[i : i + batch]) for i in range(0, len(pictures), batch)]
        return {"values": torch.cat(parts).half()}

    return dataset.write_column("latents", origin(vae), compute, progress=progress, lease=lease)


def encode_text(
    dataset: DataSet,
    encoder: TextEncoder,
    progress: Progress | None = None,
    lease: LeaseConfig | None = None,
) -> Column:
    """Write (or find) the text states of all captions, float16, ragged; `null` is the state of "".

    A caption's states stand once in a shard, however many rows have it.
    """

    def compute(shard: int) -> dict[str, torch.Tensor]:
        captions = captions_of(dataset, shard)
        states = encoder.states(caption for row in captions for caption in row)
        return ragged(captions, lambda caption: states[caption].half())

    null = {"values": encoder.states([""])[""].half()}
    return dataset.write_column("text", origin(encoder), compute, {"null": null}, "ragged", progress, lease)


def captions_of(dataset: DataSet, shard: int) -> list[list[str]]:
    """All captions of every row of a shard, the main one first."""
    table = dataset.shard_table(shard)
    first = table.column("caption").to_pylist()
    if "captions" not in table.column_names:
        return [[caption] for caption in first]
    every = table.column("captions").to_pylist()
    return [list(dict.fromkeys([one, *(more or [])])) for one, more in zip(first, every, strict=True)]
