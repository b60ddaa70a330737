"""Work that is done shard by shard: an ingest, or a column.

A shard depends on its part of the source and on nothing else, so its bytes are the same whoever writes it.
One process does all, or several write fixed parts (`Part`) and one that comes after them finishes. Who starts
them, and again where one was lost, is an engine's matter: a pool of processes, or an array of Slurm.
"""

import re
from collections.abc import Mapping, Sequence
from posixpath import join
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from atoll.base.console import Progress, say
from atoll.base.errors import AtollError, DataError
from atoll.base.hashing import digest
from atoll.base.part import Part
from atoll.data.columns import Compute, Extras, Kind, describe
from atoll.data.formats import ColumnMeta, ShardNote
from atoll.store.manifest import is_whole, named_entry, write_file
from atoll.store.store import Store
from atoll.store.tensors import read_tensors

if TYPE_CHECKING:  # a data set computes its columns by this module
    from atoll.data.dataset import DataSet

Result = TypeVar("Result")


class ShardedJob(Generic[Result]):
    """Shards to write, each followed by a note that makes it count, and a result that is put together last.

    Killed at any moment and run again, a job ends with the same bytes. `identities` are digests of what each
    shard is made from: a note of another one does not count. `title` names what is written, for people.
    """

    def __init__(self, store: Store, folder: str, notes: str, identities: Sequence[str], title: str) -> None:
        self.store, self.folder, self.notes, self.identities = store, folder, notes, identities
        self.shards, self.title = len(identities), title

    def result(self) -> Result | None:
        """The result, if the job is finished and all its files are as they should be."""
        raise NotImplementedError

    def begin(self) -> None:
        """Prepare the folder; every process calls this before its first shard."""

    def is_current(self) -> bool:
        """Whether files of this job may still be written: nobody finished it, or took the folder."""
        raise NotImplementedError

    def make_shard(self, number: int, earlier: ShardNote | None) -> tuple[dict[str, bytes], ShardNote]:
        """Files of a shard by their path, and its note; `earlier` is one whose files are gone."""
        raise NotImplementedError

    def combine(self, notes: list[ShardNote]) -> Result:
        """Write what makes the shards one whole."""
        raise NotImplementedError

    def key(self, number: int) -> str:
        """Key of a shard's note."""
        return join(self.notes, f"{number:05d}.json")

    def tidy(self, result: Result) -> None:
        """Remove what killed processes left beside the result."""

    def run(self) -> Result:
        """Write what is missing and put all together; a finished job costs a look."""
        result = self.result()
        if result is None:
            self.begin()
            notes = self.write_shards(range(self.shards))
            result = self.result() if notes is None else self.combine(notes)
        if result is None:
            what = f"{self.store.name(self.folder)} was taken by another process"
            raise DataError(what, "run the command again when that has ended")
        self.tidy(result)
        return result

    def write_part(self, part: Part) -> None:
        """Write one part of the shards and leave the end to who comes after all parts."""
        if self.result() is None:
            self.begin()
            numbers = range(part.number, self.shards, part.total)
            self.write_shards(numbers)
            say(f"{len(numbers)} of {self.shards} shards are there; without --part the command finishes")

    def write_shards(self, numbers: Sequence[int]) -> list[ShardNote] | None:
        """Write those that are not there yet; None if the job was finished by another process."""
        notes, progress = list[ShardNote](), Progress(self.title, len(numbers), unit="shards")
        for number in numbers:
            note = ShardNote.find(self.store, self.key(number), self.identities[number])
            if note is None or not note.is_there(self.store, self.folder):
                files, note = self.make_shard(number, note)
                # Making a shard takes long. A process that hung meanwhile, and whose shards were written by
                # another, must not put files of before the end into a data set that is finished.
                if not self.is_current():
                    return None
                for path, data in files.items():
                    self.store.put(join(self.folder, path), data)
                # After the files: a note is the promise that they are there.
                self.store.put_json(self.key(number), note.to_json())
            notes.append(note)
            progress(len(notes))
        return notes


class ColumnJob(ShardedJob[ColumnMeta]):
    """A column that is computed; shards that are valid for this producer and these rows are kept.

    Every shard is followed by a small note that says what it was computed from; when the column is
    complete, `column.json` says so for all shards and the notes go.

    Args:
        producer: plain data that changes whenever the values would: name, hash, constants.
        compute: gives the tensors of a shard by its number: `values (rows, *shape)`, or for a ragged
            column what `ragged` makes.
    """

    def __init__(
        self,
        dataset: "DataSet",
        name: str,
        producer: dict[str, Any],
        compute: Compute,
        extras: Extras | None = None,
        kind: Kind = "fixed",
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
            raise DataError(f"{name!r} cannot name a column", "use letters, digits, '.', '_' and '-'")
        folder = join(dataset.prefix, "columns", name)
        dataset.store.sweep(folder)  # a writer that was killed leaves its passing file
        dataset.forget(name)
        self.maker = {"kind": kind, "producer": producer}
        self.content = [shard.content() for shard in dataset.shards]
        identities = [digest({**self.maker, "content": content}) for content in self.content]
        super().__init__(dataset.store, folder, folder, identities, name)
        self.name, self.kind, self.producer = name, kind, producer
        self.rows = [shard.rows for shard in dataset.shards]
        self.compute, self.extras = compute, extras or {}

    def result(self) -> ColumnMeta | None:
        meta = self._earlier()
        if meta is None or meta.content != self.content or not self.extras.keys() <= meta.extras.keys():
            return None
        entries = [*meta.shards, *meta.extras.values()]
        return meta if all(is_whole(self.store, self.folder, entry) for entry in entries) else None

    def begin(self) -> None:
        """Turn what is still right of an earlier column of this producer into notes."""
        if (earlier := self._earlier()) is None:
            return
        for number, entry in enumerate(earlier.shards[: self.shards]):
            identity, same = self.identities[number], earlier.content[number] == self.content[number]
            known = ShardNote.find(self.store, self.key(number), identity)
            if same and known is None and is_whole(self.store, self.folder, entry):
                note = ShardNote(identity=identity, rows=self.rows[number], files={"values": entry})
                self.store.put_json(self.key(number), note.to_json())

    def _earlier(self) -> ColumnMeta | None:
        try:
            meta = ColumnMeta.read(self.store, f"{self.folder}/column.json")
        except AtollError:
            return None
        return meta if digest({"kind": meta.kind, "producer": meta.producer}) == digest(self.maker) else None

    def is_current(self) -> bool:
        if self.store.exists(f"{self.folder}/column.json"):
            if self.result() is not None:
                return False
            # Beside shards that it does not describe it would be a lie. It goes no sooner than now: if
            # nothing can be computed (an encoder that is not there), the earlier column stays.
            self.store.delete(f"{self.folder}/column.json")
        return True

    def make_shard(self, number: int, earlier: ShardNote | None) -> tuple[dict[str, bytes], ShardNote]:
        tensors = dict(self.compute(number))
        # Half the bytes; a shard has no two billion elements.
        for name in {"lengths", "index", "choices"} & tensors.keys():
            tensors[name] = tensors[name].to(torch.int32)
        form = describe(tensors, self.kind, self.rows[number], f"column {self.name!r}, shard {number}")
        path, data = f"{number:05d}.safetensors", _to_bytes(tensors)
        files = {"values": named_entry(path, data)}
        note = ShardNote(identity=self.identities[number], rows=self.rows[number], files=files, form=form)
        return {path: data}, note

    def combine(self, notes: list[ShardNote]) -> ColumnMeta:
        forms = []
        for note in notes:
            form = note.form
            if form is None:  # a shard of an earlier column
                key = join(self.folder, note.files["values"].path)
                where = self.store.name(key)
                form = describe(read_tensors(self.store.path(key), where), self.kind, note.rows, where)
            forms.append(form)
        kinds = {(dtype, tuple(shape)) for dtype, shape, _ in forms}
        if len(kinds) != 1:
            raise DataError(f"column {self.name!r} has shards of different form: {sorted(kinds)}")
        ((dtype, shape),) = kinds
        meta = ColumnMeta(
            name=self.name,
            kind=self.kind,
            dtype=dtype,
            shape=list(shape),
            max_length=max(1, *(longest for _, _, longest in forms)),
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

    def tidy(self, result: ColumnMeta) -> None:
        remove_others(self.store, self.folder, result)


def remove_others(store: Store, folder: str, meta: ColumnMeta) -> None:
    """Remove what the folder of a complete column holds besides: notes, and files of earlier columns."""
    named = {store.name(join(folder, entry.path)) for entry in [*meta.shards, *meta.extras.values()]}
    named.add(store.name(f"{folder}/column.json"))
    store.delete(*(key for key in store.list(folder) if store.name(key) not in named))


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
