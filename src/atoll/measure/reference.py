"""What pictures are compared with: other pictures, whose features are saved and reused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File, code_version
from atoll.base.hashing import digest, sha256
from atoll.base.processes import ProcessGroup
from atoll.campaign.folder import FROZEN, YAML, Campaign
from atoll.data.dataset import MANIFEST, DataSet
from atoll.encoders.vision import VisionEncoder
from atoll.measure.pictures import Features, Folder, Rows, extract
from atoll.store.location import is_url
from atoll.store.manifest import FileEntry, read_file
from atoll.store.store import Store
from atoll.store.tensors import read_tensors

FOLDER = "reports/references"


class Statistics(File):
    """Features of a reference, in a file beside this one, and what made them."""

    FORMAT, PLACE = "atoll/statistics", "reports/references/KEY.json"
    ERROR, REMEDY = DataError, "make them again: atoll evaluate"

    code: str
    """Version of Atoll."""
    extractor: dict[str, Any]
    """Name, weights' hash, size and resize kernel of the extractor."""
    name: str
    """What the user called the reference."""
    data: str
    """Digest of the pictures."""
    split: str | None = None
    """Which rows of a data set; none for a folder."""
    count: int
    """Number of pictures."""
    size: tuple[int, int]
    """Width and height of the pictures, in pixels."""
    files: list[dict[str, Any]] = []
    """Path, bytes and SHA-256 of the features."""

    @property
    def key(self) -> str:
        """Names the statistics: other pictures or another extractor give another key."""
        tree = self.model_dump(mode="json", exclude={"code", "files", "name"})
        tree["extractor"] = {name: value for name, value in self.extractor.items() if name != "name"}
        return digest(tree)[:16]


@dataclass
class Reference:
    """Features of the pictures that others are compared with, read or made once, when they are needed."""

    about: Statistics
    store: Store
    key: str  # of the statistics, which lie there or come to lie there
    pictures: Folder | Rows | None = None  # None where there are only the statistics
    _known: Features | None = None

    @classmethod
    def of_pictures(
        cls, pictures: Folder | Rows, name: str, encoder: VisionEncoder, store: Store
    ) -> "Reference":
        """A reference of pictures; features of theirs that the store holds are not made again."""
        about = Statistics(
            code=code_version(),
            extractor=encoder.producer(),
            name=name,
            data=pictures.digest,
            split=pictures.split if isinstance(pictures, Rows) else None,
            count=len(pictures),
            size=pictures.size,
        )
        return cls(about, store, f"{FOLDER}/{about.key}.json", pictures)

    @classmethod
    def saved(cls, place: str, encoder: VisionEncoder) -> "Reference":
        """Statistics of an earlier evaluation; `DataError` if they are another extractor's."""
        folder, _, file = place.rpartition("/")
        store, key = Store.open(folder or "."), file.removesuffix(".safetensors").removesuffix(".json")
        about, producer = Statistics.read(store, f"{key}.json"), encoder.producer()
        for name in ("hash", "size", "resize", "token"):  # the hash says which it is, whatever it was called
            if (theirs := about.extractor.get(name)) != (needed := producer.get(name)):
                raise DataError(
                    f"{store.name(f'{key}.json')} was made by another extractor"
                    f" ({about.extractor.get('name')}, {name} {theirs!s:.16} instead of {needed!s:.16})",
                    "give the pictures, or statistics made by the same one",
                )
        return cls(about, store, f"{key}.json")

    def features(self, encoder: VisionEncoder, batch: int, world: ProcessGroup) -> Features | None:
        """The features, on the first process; `StoreError` where a file is missing or damaged."""
        if self._known is not None and world.size == 1:
            return self._known
        if not world.once(lambda: self.store.exists(self.key)):
            assert self.pictures is not None
            self._known = extract(self.pictures, encoder, "reference", batch, world)
            if self._known is not None:
                # The JSON last: features without one are made again.
                data = save_tensors({"rows": torch.from_numpy(self._known.rows)})
                entry = FileEntry(path=f"{self.about.key}.safetensors", bytes=len(data), sha256=sha256(data))
                self.store.put(f"{FOLDER}/{entry.path}", data)
                about = self.about.model_copy(update={"files": [entry.model_dump()]})
                self.store.put_json(self.key, about.to_json())
        elif world.first:
            about, place = Statistics.read(self.store, self.key), self.store.name(self.key)
            if len(about.files) != 1:
                raise DataError(f"{place} names {len(about.files)} files of features", Statistics.REMEDY)
            folder = self.key.rpartition("/")[0] or "."
            data = read_file(self.store, folder, FileEntry.parse(about.files[0], place))
            self._known = Features(read_tensors(data, place, "rows")["rows"].numpy())
        return self._known


def reference_of(
    named: str | None,
    split: str | None,
    campaign: Campaign | None,
    encoder: VisionEncoder,
    store: Store,
    usual: str = "heldout",
) -> Reference:
    """What pictures are compared with: a campaign, a data set, a folder of pictures, or saved statistics, by
    name; None is the data of the campaign at hand. Of a data set it is one `split`, by default the `usual`.

    Raises:
        ConfigError: nothing is named, or rows are asked of what has none.
        DataError: it is nothing of these, or statistics of another extractor.
    """
    pictures: Folder | Rows
    if named is None:
        if campaign is None:
            fix = "give --reference CAMPAIGN, FOLDER or statistics"
            raise ConfigError("there is nothing to hold the pictures against", fix)
        pictures = Rows(campaign.dataset(), split or usual)
        return Reference.of_pictures(pictures, "the campaign's data", encoder, store)
    statistics = named.endswith((".json", ".safetensors"))
    source = None if statistics else Store.open(named)
    if source is not None and (source.exists(YAML) or source.exists(FROZEN)):
        pictures = Rows(Campaign.open(named).dataset(), split or usual)
    elif source is not None and source.exists(MANIFEST):
        pictures = Rows(DataSet.open(source), split or usual)
    elif source is not None and is_url(named):
        what = f"{named} is no campaign and no data set"
        raise DataError(what, "give one of them, or a local folder of images")
    elif split is not None:
        raise ConfigError(f"--split {split} is for a data set, and {named} is none", "leave it out")
    elif statistics:
        return Reference.saved(named, encoder)
    else:
        pictures = Folder(Path(named))
    return Reference.of_pictures(pictures, named, encoder, store)
