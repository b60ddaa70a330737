"""The `features` columns: one vector per picture from a frozen vision encoder."""

from collections.abc import Callable

import torch

from atoll.data.columns import Column, write_column
from atoll.data.dataset import DataSet
from atoll.data.settings import features_column
from atoll.encoders.vision import VisionEncoder


def embed(
    dataset: DataSet, encoder: VisionEncoder, progress: Callable[[int, int], None] | None = None
) -> Column:
    """Write (or find) the features `(rows, D)` float16 of every picture."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        values = encoder.encode(list(dataset.iter_images(shard))).half()
        if progress is not None:
            progress(shard + 1, len(dataset.shards))
        return {"values": values}

    return write_column(dataset, features_column(encoder.name), encoder.producer(), compute)
