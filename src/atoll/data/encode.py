"""The columns that frozen encoders make: `features` to cluster by, `latents` and `text` to train on."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from atoll.base.errors import DataError
from atoll.base.text import many
from atoll.data.columns import ragged
from atoll.data.dataset import CAPTION, DataSet
from atoll.data.job import ColumnJob
from atoll.data.settings import CaptionerConfig, features_column
from atoll.encoders.image_text import Captioner
from atoll.encoders.registry import rounded_hashes
from atoll.encoders.text import TextEncoder
from atoll.encoders.vae import Autoencoder
from atoll.encoders.vision import VisionEncoder


def origin(encoder: TextEncoder | Autoencoder) -> dict[str, Any]:
    """What made a column: by the hashes in 16 bits, copies that are saved so are known again.

    Not by the device: a machine without a GPU may finish what workers with GPUs have begun.
    """
    producer, towers = encoder.producer(), getattr(encoder, "towers", [encoder])
    for part, network in zip(producer.get("parts", [producer]), [t.network for t in towers], strict=True):
        if network is not None:
            part["rounded"] = rounded_hashes(network)
    return producer


def features_job(dataset: DataSet, encoder: VisionEncoder) -> ColumnJob:
    """The features `(rows, D)` float16 of every picture."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": _in_batches(encoder.encode, dataset.iter_images(shard, encoder.sized), 64)}

    return ColumnJob(dataset, features_column(encoder.name), encoder.producer(), compute)


def latents_job(dataset: DataSet, vae: Autoencoder) -> ColumnJob:
    """The latents `(rows, C, H, W)` float16, posterior mode, `(z - shift) * scale`.

    Where rows keep their aspect it is a ragged column: of each row H x W elements of C numbers.
    """

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": _in_batches(vae.encode, dataset.iter_images(shard), 32)}

    def compute_ragged(shard: int) -> dict[str, torch.Tensor]:
        assert dataset.buckets is not None
        sizes = np.split(dataset.buckets, dataset.bounds[1:-1])[shard]
        rows: list[torch.Tensor] = [torch.empty(0)] * len(sizes)
        for size in np.unique(sizes, axis=0):  # one shape a batch
            numbers = (sizes == size).all(1).nonzero()[0].tolist()
            latents = _in_batches(vae.encode, dataset.iter_images(shard, numbers=numbers), 32)
            for number, row in zip(numbers, latents.flatten(2).transpose(1, 2), strict=True):
                rows[number] = row
        return {"values": torch.cat(rows), "lengths": torch.tensor([len(row) for row in rows])}

    if dataset.buckets is not None:
        if (odd := (dataset.buckets % vae.factor).any(1)).any():
            width, height = dataset.buckets[int(odd.argmax())].tolist()
            what = f"pictures of {width}x{height} px do not divide by {vae.factor}, as {vae.name} asks"
            fix = f"ingest with data.ingest.buckets.multiple={vae.factor} or a multiple of it"
            raise DataError(what, fix)
        return ColumnJob(dataset, "latents", origin(vae), compute_ragged, None, "ragged")
    return ColumnJob(dataset, "latents", origin(vae), compute)


def _in_batches(
    encode: Callable[[list[Image.Image]], torch.Tensor], pictures: Iterator[Image.Image], batch: int
) -> torch.Tensor:
    # A few at a time: the next are decoded meanwhile, and a whole shard would not fit into a GPU.
    return torch.cat([encode(part) for part in iter(lambda: [*islice(pictures, batch)], [])]).half()


def caption_job(dataset: DataSet, captioner: Captioner, config: CaptionerConfig) -> ColumnJob:
    """The captions of all rows, UTF-8, ragged: made for those that have none, or for all."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        captions = dataset.source_table(shard, [CAPTION]).column(CAPTION).to_pylist()
        rows = [row for row, caption in enumerate(captions) if config.replace or not caption]
        pictures = dataset.iter_images(shard, numbers=rows) if rows else iter(())
        for start in range(0, len(rows), config.batch):
            part = rows[start : start + config.batch]
            for row, answer in zip(part, captioner.describe([*islice(pictures, len(part))]), strict=True):
                captions[row] = answer
        return ragged([[caption] for caption in captions], lambda text: torch.tensor([*text.encode()]).byte())

    return ColumnJob(dataset, CAPTION, {**captioner.producer(), **config.producer()}, compute, None, "ragged")


def text_job(dataset: DataSet, encoder: TextEncoder, precompute: bool = True) -> ColumnJob:
    """The text states of all captions, float16, ragged; `null` is the state of "".

    Unless they are to be precomputed it is the column `tokens`, int32, and training encodes them. A caption
    stands once in a shard, however many rows have it.
    """

    def compute(shard: int) -> dict[str, torch.Tensor]:
        captions = captions_of(dataset, shard)
        distinct = {caption: None for row in captions for caption in row}
        if precompute:
            states = {caption: state.half() for caption, state in encoder.states(distinct).items()}
        else:
            states = dict(zip(distinct, encoder.tokens([*distinct]), strict=True))
        return ragged(captions, states.__getitem__)

    # The null condition is the encoding of "" with its mask: an all-zero mask would be uniform attention.
    null, name = {"values": encoder.states([""])[""].half()}, "text" if precompute else "tokens"
    return ColumnJob(dataset, name, origin(encoder), compute, {"null": null}, "ragged")


def captions_of(dataset: DataSet, shard: int) -> list[list[str]]:
    """All captions of every row of a shard, the main one first; `DataError` where there are none yet."""
    table = dataset.shard_table(shard)
    first = table.column("caption").to_pylist()
    described = dataset.is_written(CAPTION)
    if "" in first and not described:
        what = f"{many(first.count(''), 'row')} of shard {shard} have no caption"
        raise DataError(what, "set data.captioner.model=MODEL and run `atoll data caption`")
    new = dataset.column(CAPTION).meta.producer if described else {}
    if "captions" not in table.column_names or new.get("replace"):
        return [[caption] for caption in first]
    pairs = zip(first, table.column("captions").to_pylist(), strict=True)
    return [list(dict.fromkeys([main, *filter(None, others or [])])) for main, others in pairs]
