"""The split: which groups of rows are held out from training."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.base.rng import seed_of
from atoll.data.dataset import REJECTS, DataSet
from atoll.data.settings import IngestConfig


def write_split(dataset: DataSet, config: IngestConfig, groups: Sequence[str] | None = None) -> None:
    """Write the column `split`, int8: 0 train, 1 held out, 2 test.

    A group is kept from training if a hash of the seed and its name is small, so its rows stay together, and
    neither the order of rows nor other groups count; those of the smallest hashes are the test rows. So the
    training rows depend on `heldout + test` alone. Where that leaves no rows to train on, or none beside
    them, the group nearest to the bound changes sides.

    `groups` are names `(rows,)`, those of the column `group` by default.

    `DataError` where there is only one group, so that one side must stay empty.
    """
    seed, share = config.seed, config.heldout + config.test
    places = np.empty(len(dataset))  # of the groups in [0, 1)
    for shard, (start, end) in enumerate(pairwise(dataset.bounds.tolist())):
        # A shard's names at a time: they take much more than these numbers.
        if groups is None:
            names = dataset.shard_table(shard, ["group"]).column("group").to_pylist()
        else:
            names = groups[start:end]
        places[start:end] = [seed_of(seed, f"split/{name}") / 2**63 for name in names]
    low, high = float(places.min()), float(places.max())
    bound = share
    if share > 0:
        if low == high:
            rejects = sum(dataset.manifest.rejects.values())
            beside = f" ({rejects} others were rejected, see {REJECTS})" if rejects else ""
            raise DataError(
                f"all {len(dataset)} rows{beside} belong to one group, so none can be held out without"
                " leaving none to train on",
                "choose another data.ingest.group, or set data.ingest.heldout and data.ingest.test to 0",
            )
        # Both sides need a group: the bound moves just over the lowest, or down to the highest.
        bound = min(max(share, math.nextafter(low, 1.0)), high)
    # Test rows are the lowest of the held-out ones: so `heldout` may be cut up later, and what was trained on
    # stays trained on.
    sides = np.add(places < bound, places < config.test, dtype=np.int8)

    settings: dict[str, Any] = {"seed": seed, "heldout": config.heldout, "bound": bound}
    settings |= {"test": config.test} if config.test else {}
    if groups is not None:
        settings["rows"] = digest(list(groups))
    dataset.write_values("split", {"name": "split", "hash": digest(settings), **settings}, sides)
