"""What a comparison has measured, point by point, and keeps: one model, one guidance, so many samples."""

from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from atoll.base.hashing import digest
from atoll.measure.pairs import Kept
from atoll.store.store import Store

SCHEMA = 2
"""To be raised with whatever changes the numbers: points of another one are measured anew."""
FOLDER = "reports/compare/points"

Row = dict[str, Any]


class Points:
    """What was measured under some settings, by all that decides it.

    Args:
        store: the campaign.
        shared: settings that all points have in common: data, conditions, sampler, judge.
    """

    def __init__(self, store: Store, shared: Mapping[str, Any]) -> None:
        self.store, self.shared = store, dict(shared)

    def get(self, what: Mapping[str, Any], samples: bool = False) -> tuple[Row, Kept | None] | None:
        """A point's row and, if they are asked for, its samples; None where that was not measured."""
        key = self._key(what)
        if not self.store.exists(f"{key}.json"):
            return None
        row: Row = self.store.get_json(f"{key}.json")["row"]
        if not samples:
            return row, None
        if not self.store.exists(f"{key}.safetensors"):
            return None
        try:
            return row, Kept.read(load_tensors(self.store.get(f"{key}.safetensors")))
        except SafetensorError:
            return None  # damaged: it is measured again

    def put(self, what: Mapping[str, Any], row: Row, samples: Kept | None) -> None:
        """Keep a point; its JSON is written last."""
        key = self._key(what)
        if samples is not None:
            self.store.put(f"{key}.safetensors", save_tensors(samples.tensors()))
        content = {"schema": SCHEMA, "settings": {**self.shared, **what}, "row": row}
        self.store.put_json(f"{key}.json", content)

    def _key(self, what: Mapping[str, Any]) -> str:
        return f"{FOLDER}/{digest({'schema': SCHEMA, **self.shared, **what})[:16]}"
