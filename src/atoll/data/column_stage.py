"""Writing a column, shard by shard, by one process or many that share it."""

from collections.abc import Callable, Mapping, Sequence
from posixpath import join
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from atoll.base.errors import AtollError, DataError
from atoll.base.hashing import digest
from atoll.data.columns import Compute, Extras, Form, Kind, Progress, describe
from atoll.data.formats import ColumnMeta, Shard, ShardNote
from atoll.data.workers import Stage
from atoll.store.manifest import is_whole, write_file, write_once
from atoll.store.store import Store
from atoll.store.tensors import read_tensors


class ColumnStage(Stage[ColumnMeta]):
    """A column on its way: see `DataSet.write_column`."""

    def __init__(
        self,
        store: Store,
        folder: str,
        shards: Sequence[Shard],
        producer: dict[str, Any],
        compute: Compute,
        extras: Extras,
        kind: Kind,
        progress: Progress | None,
    ) -> None:
        self.maker = {"kind": kind, "producer": producer}
        self.content = [shard.content() for shard in shards]
        identities = [digest({**self.maker, "content": content}) for content in self.content]
        super().__init__(store, folder, folder, identities)
        self.name, self.kind, self.producer = folder.rpartition("/")[2], kind, producer
        self.rows = [shard.rows for shard in shards]
        self.compute, self.extras, self.progress = compute, extras, progress
        self.incomplete: ColumnMeta | None = None
        self.kept = self._kept()

    def _kept(self) -> dict[int, ShardNote]:
        """Notes of those shards of an earlier column that are still right."""
        old = _column_of(self.store, self.folder, self.maker)
        known = [] if old is None else list(zip(old.content, old.shards, strict=True))
        found = {}
        for number, (content, entry) in enumerate(known[: len(self.content)]):
            if content == self.content[number] and is_whole(self.store, self.folder, entry):
                files, rows = {"values": entry}, self.rows[number]
                found[number] = ShardNote(identity=self.identities[number], rows=rows, files=files)
        return found

    def done(self) -> ColumnMeta | None:
        """What `column.json` says, if it and all files are as they should be."""
        meta = _column_of(self.store, self.folder, self.maker)
        if meta is None or meta == self.incomplete:
            return None
        if meta.content == self.content and self.extras.keys() <= meta.extras.keys():
            kept = [note.files["values"] for note in self.kept.values()]
            entries = [entry for entry in [*meta.shards, *meta.extras.values()] if entry not in kept]
            if all(is_whole(self.store, self.folder, entry) for entry in entries):
                return meta
        self.incomplete = meta
        return None

    def missing(self) -> list[int]:
        """Numbers of the shards that are neither kept nor written."""
        return [number for number in super().missing() if number not in self.kept]

    def note(self, number: int) -> ShardNote | None:
        """A shard's note, or that of an earlier column."""
        return super().note(number) or self.kept.get(number)

    def make(self, number: int, seen: ShardNote | None, untouched: Callable[[], bool]) -> ShardNote | None:
        """Compute and write a shard."""
        tensors = dict(self.compute(number))
        where = f"column {self.name!r}, shard {number}"
        for name in {"lengths", "index", "choices"} & tensors.keys():
            tensors[name] = tensors[name].to(torch.int32)
        form = describe(tensors, self.kind, self.rows[number], where)
        if not self._begin():
            return None
        data = _to_bytes(tensors)
        entry = write_once(self.store, self.folder, f"{number:05d}.safetensors", data, untouched)
        if entry is None:
            return None
        return ShardNote(
            identity=self.identities[number], rows=self.rows[number], files={"values": entry}, form=form
        )

    def _begin(self) -> bool:
        """Remove an earlier `column.json`: beside shards that it does not describe it would be a lie.

        False if it turns out to be that of this column, which somebody has finished.
        """
        if self.store.exists(f"{self.folder}/column.json"):
            if self.done() is not None:
                return False
            for number, note in self.kept.items():  # whoever comes later knows them by their notes
                self.store.put_json(self.key(number), note.to_json())
            self.store.delete(f"{self.folder}/column.json")
        return True

    def report(self, left: int) -> None:
        """Tell how many shards are done."""
        if self.progress is not None:
            self.progress(len(self.rows) - left, len(self.rows))

    def put_together(self, notes: list[ShardNote]) -> ColumnMeta:
        """Write the extras and `column.json`."""
        found = [self._form(number, note) for number, note in enumerate(notes)]
        forms = {(dtype, tuple(shape)) for dtype, shape, _ in found}
        if len(forms) != 1:
            raise DataError(f"column {self.name!r} has shards of different form: {sorted(forms)}")
        ((dtype, shape),) = forms
        meta = ColumnMeta(
            name=self.name,
            kind=self.kind,
            dtype=dtype,
            shape=list(shape),
            max_length=max(1, *(longest for _, _, longest in found)),
            producer=self.producer,
            content=self.content,
            shards=[note.files["values"] for note in notes],
            extras={
                key: write_file(self.store, self.folder, f"{key}.safetensors", _to_bytes(tensors))
                for key, tensors in self.extras.items()
            },
        )
        self.store.put_json(f"{self.folder}/column.json", meta.to_json())
        return meta

    def _form(self, number: int, note: ShardNote) -> Form:
        if note.form is not None:
            return note.form
        key = join(self.folder, note.files["values"].path)
        where = self.store.name(key)
        return describe(read_tensors(self.store.path(key), where), self.kind, self.rows[number], where)


def remove_others(store: Store, folder: str, meta: ColumnMeta) -> None:
    """Remove what the folder of a complete column holds besides: notes and claims, files of earlier ones."""
    named = {store.name(join(folder, entry.path)) for entry in [*meta.shards, *meta.extras.values()]}
    named.add(store.name(f"{folder}/column.json"))
    store.delete(*(key for key in store.list(folder) if store.name(key) not in named))


def _column_of(store: Store, folder: str, maker: dict[str, Any]) -> ColumnMeta | None:
    """The complete column of this maker that is there, if any; its shards may still be stale."""
    try:
        meta = ColumnMeta.read(store, f"{folder}/column.json")
    except AtollError:
        return None
    return meta if digest({"kind": meta.kind, "producer": meta.producer}) == digest(maker) else None


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save(
        {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    )
