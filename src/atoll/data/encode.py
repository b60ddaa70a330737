"""The `latents` and `text` columns: what an expert trains on."""

from collections.abc import Callable

import torch

from atoll.data.columns import Column, write_column
from atoll.data.dataset import DataSet
from atoll.encoders.text import TextEncoder
from atoll.encoders.vae import Autoencoder

Progress = Callable[[int, int], None] | None


def encode_latents(dataset: DataSet, vae: Autoencoder, progress: Progress = None, batch: int = 32) -> Column:
    """Write (or find) the latents `(rows, C, H, W)` float16, posterior mode, `(z - shift) * scale`."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        pictures = list(dataset.iter_images(shard))
        parts = [vae.encode(pictures[i : i + batch]) for i in range(0, len(pictures), batch)]
        _report(progress, shard, dataset)
        return {"values": torch.cat(parts).half()}

    return write_column(dataset, "latents", vae.producer(), compute)


def encode_text(dataset: DataSet, encoder: TextEncoder, progress: Progress = None) -> Column:
    """Write (or find) the text states of every caption, float16, ragged; `null` is the state of ""."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        values, lengths = encoder.encode_ragged(captions[starts[shard] : starts[shard + 1]])
        _report(progress, shard, dataset)
        return {"values": values.half(), "lengths": lengths}

    captions = dataset.table(["caption"]).column("caption").to_pylist()
    starts = [0]
    for entry in dataset.shards:
        starts.append(starts[-1] + entry.rows)
    null, _ = encoder.encode_ragged([""])
    return write_column(
        dataset, "text", encoder.producer(), compute, extras={"null": {"values": null.half()}}, kind="ragged"
    )


def _report(progress: Progress, shard: int, dataset: DataSet) -> None:
    if progress is not None:
        progress(shard + 1, len(dataset.shards))
