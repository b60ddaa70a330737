"""The one verb of measuring: a model, how it draws, what it is compared with, by which metrics.

A comparison, a guidance sweep, a training curve and several seeds are tables of such points, and `atoll
evaluate` measures one. Points and features of references are kept, so that nothing is measured twice.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as save_tensors

from atoll.base.console import say
from atoll.base.device import own_device, using_threads
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File, code_version
from atoll.base.hashing import digest
from atoll.base.part import Part
from atoll.campaign.folder import FROZEN, YAML, Campaign
from atoll.campaign.measured import MeasuredPoint, Protocol, point_key
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.data.dataset import MANIFEST, DataSet
from atoll.encoders.vision import VisionEncoder, extractor
from atoll.measure.metrics.metric import Floor, How, asks, compute, parse, settings_of
from atoll.measure.models import Drawn, RowConditions, generation_of, published, samples_of
from atoll.measure.pictures import COSTS, Features, Folder, Rows, Source, extraction, training_pictures
from atoll.measure.request import COMPARED, REPORTS, notes_of, table
from atoll.measure.same_noise import MOST, SavedSamples
from atoll.measure.shards import ShardedRows
from atoll.store.location import is_url, local_path
from atoll.store.manifest import FileEntry, read_file, write_file
from atoll.store.store import Damaged, Store
from atoll.store.tensors import read_tensors

REFERENCES = "reports/references"


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
        return cls(about, store, f"{REFERENCES}/{about.key}.json", pictures)

    @classmethod
    def saved(cls, place: str, encoder: VisionEncoder) -> "Reference":
        """Statistics of an earlier evaluation; `DataError` if they are another extractor's."""
        folder, _, file = place.rpartition("/")
        store, key = Store.open(folder or "."), file.removesuffix(".safetensors").removesuffix(".json")
        about, producer = Statistics.read(store, f"{key}.json"), encoder.producer()
        for name in ("hash", "size", "resize", "token"):  # the hash says which it is, whatever it was called
            if (theirs := about.extractor.get(name)) != (needed := producer.get(name)):
                what = f"{store.name(f'{key}.json')} was made by another extractor"
                how = f"{about.extractor.get('name')}, {name} {theirs!s:.16} instead of {needed!s:.16}"
                raise DataError(f"{what} ({how})", "give the pictures, or statistics made by the same one")
        return cls(about, store, f"{key}.json")

    def write_part(self, encoder: VisionEncoder, batch: int, part: Part) -> None:
        """Make one part of the features, if they are not there."""
        if not self.store.exists(self.key):
            self._rows(encoder, batch).write_part(part)

    def features(self, encoder: VisionEncoder, batch: int) -> Features:
        """The features; `StoreError` where a file is missing or damaged."""
        if self._known is not None:
            return self._known
        if not self.store.exists(self.key):
            rows = self._rows(encoder, batch)
            self._known = Features.of(rows.whole())
            # The JSON last: features without one are made again.
            data = save_tensors({"rows": torch.from_numpy(self._known.rows)})
            entry = write_file(self.store, REFERENCES, f"{self.about.key}.safetensors", data)
            about = self.about.model_copy(update={"files": [entry.model_dump()]})
            self.store.put_json(self.key, about.to_json())
            rows.tidy()
        else:
            about, place = Statistics.read(self.store, self.key), self.store.name(self.key)
            if len(about.files) != 1:
                raise DataError(f"{place} names {len(about.files)} files of features", Statistics.REMEDY)
            folder = self.key.rpartition("/")[0] or "."
            data = read_file(self.store, folder, FileEntry.parse(about.files[0], place))
            self._known = Features(read_tensors(data, place, "rows")["rows"].numpy())
        return self._known

    def _rows(self, encoder: VisionEncoder, batch: int) -> ShardedRows:
        assert self.pictures is not None
        return extraction(self.store, self.pictures, encoder, "reference", batch)


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
    """
    pictures: Folder | Rows
    if named is None:
        if campaign is None:
            fix = "give --reference CAMPAIGN, FOLDER or statistics"
            raise ConfigError("there is nothing to hold the pictures against", fix)
        rows = Rows(campaign.dataset(), split or usual)
        return Reference.of_pictures(rows, "the campaign's data", encoder, store)
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
        pictures = Folder(local_path(named) or Path(named))
    return Reference.of_pictures(pictures, named, encoder, store)


FOLDER = "reports/points"


class Measured(NamedTuple):
    """What measuring gave."""

    point: MeasuredPoint
    saved: SavedSamples | None
    new: bool


@dataclass(frozen=True)
class Judge:
    """What points of one table have in common; `batch` pictures at once are drawn or read."""

    store: Store
    encoder: VisionEncoder
    reference: Reference
    metrics: Sequence[str]
    how: How
    batch: int
    folder: str = FOLDER

    def write_part(self, source: Source, part: Part, keep: bool = False) -> None:
        """Draw one part of the pictures that `measure` looks at, if it has not done so."""
        if self._known(source, keep)[-1] is None:
            self._rows(source).write_part(part)

    def measure(self, source: Source, keep: bool = False) -> Measured:
        """Measure pictures, unless it is known what they are.

        Where the first samples are wanted too (`keep`), they lie beside the point.

        Raises:
            DataError: too few pictures, of another size than the reference's, or with values that are NaN.
        """
        key, protocol, how, known = self._known(source, keep)
        if known is not None:
            return known
        # Draw, look, and see what it costs.
        reference, rows = self.reference.features(self.encoder, self.batch), self._rows(source)
        made = rows.whole()
        samples, cost = Features.of(made), made["cost"].sum(0).tolist()
        values = compute(self.metrics, how, samples, reference)
        # The samples first: what has no JSON does not exist, and is drawn again.
        saved = SavedSamples(made["pixels"].numpy(), samples.rows[:MOST].copy()) if keep else None
        if saved is not None:
            self.store.put(f"{key}.safetensors", save_tensors(saved.tensors()))
        spent = cost_of(source, dict(zip(COSTS, cost, strict=True)))
        point = MeasuredPoint(subject=source.subject, protocol=protocol, values=values, cost=spent)
        self.store.put_json(f"{key}.json", point.to_json())
        rows.tidy()
        return Measured(point, saved, True)

    def _rows(self, source: Source) -> ShardedRows:
        name, captions = source.subject["name"], asks(self.metrics, "captions")
        # First samples are always there: a table that keeps them and a sweep that does not share the work.
        keep = isinstance(source, Drawn)
        return extraction(self.store, source, self.encoder, name, self.batch, captions, keep)

    def _known(self, source: Source, keep: bool) -> tuple[str, Protocol, How, Measured | None]:
        """The key of a point, its protocol, what metrics know, and the point if it is there."""
        about, encoder = self.reference.about, self.encoder
        if source.size != tuple(about.size):
            (a, b), (c, d) = source.size, about.size
            what = f"the pictures are {a}x{b}, those of the reference {c}x{d}"
            raise DataError(what, "bring both to one size")
        protocol = Protocol(
            extractor=encoder.name,
            extractor_hash=about.extractor["hash"],
            extractor_size=encoder.size,
            extractor_token=encoder.token,
            resize=encoder.resize,
            picture_size=source.size,
            reference=about.name,
            reference_hash=about.data,
            reference_split=about.split,
            reference_count=about.count,
            samples=len(source),
            code=code_version(),
            **source.about,
        )
        how = replace(self.how, samples=len(source), seed=source.about.get("seed") or 0)
        key = f"{self.folder}/{point_key(source.subject, protocol, settings_of(self.metrics, how))}"
        file, saved, known = f"{key}.safetensors", None, None
        if keep and self.store.exists(file):
            with suppress(Damaged):  # it is measured again
                saved = SavedSamples.read(read_tensors(self.store.get(file), file, "pixels", "features"))
        if source.reusable and self.store.exists(f"{key}.json") and (saved is not None or not keep):
            known = Measured(MeasuredPoint.read(self.store, f"{key}.json"), saved, False)
        return key, protocol, how, known


def cost_of(source: Source, spent: Mapping[str, float]) -> dict[str, float | None]:
    """Seconds of all processes together, and of a model the cost of one step of one sample: operations and
    experts as the mean of guidance's branches, calls of the router, which may serve both, as the sum."""
    cost: dict[str, float | None] = {"seconds": round(spent["seconds"], 1)}
    if not isinstance(source, Drawn):
        return cost
    flops, experts, router, routing = source.candidate.model.card.forward_flops, 1.0, 0.0, 0.0
    if spent["rows"]:
        steps = source.generation.steps
        each = spent["rows"] * steps
        experts, router = spent["expert_calls"] / each, spent["router_calls"] / (len(source) * steps)
        routing = spent["router_flops"] / each
        flops = spent["expert_flops"] / each + routing  # experts may differ in size
    return cost | {
        "draw_seconds": round(spent["draw_seconds"], 1),
        "gflops_per_step": flops / 1e9,
        "experts_per_step": experts,
        "router_calls_per_step": router,
        "router_share": routing / flops if flops else 0.0,
    }


def evaluate(
    campaign: Campaign | None,
    config: EvaluateConfig | None = None,
    *,
    model: str = "ensemble",
    generation: Mapping[str, Any] | None = None,
    images: Path | None = None,
    reference: str | None = None,
    split: str | None = None,
    out: str = ".",
    part: Part | None = None,
) -> MeasuredPoint | None:
    """Measure, write `reports/evaluate/KEY.json` and `.csv`, and print.

    Args:
        campaign: whose model is measured, and whose data is the reference; None for pictures alone.
        config: how; by default the campaign's.
        model: `ensemble`, `monolith`, `student` or `pretrain`.
        generation: values in place of the campaign's `sampling`: routing, guidance, steps, seed.
        images: a folder of pictures, in a model's place.
        reference: what they are compared with; the campaign's own data if None.
        split: rows of the reference; by default held-out ones, under `evaluate.conditions=test` those.
        out: where `reports/` goes without a campaign.
        part: shards of pictures to draw, and nothing else: the answer is None.

    Raises:
        ConfigError: settings, names or metrics that do not exist or contradict each other.
        DataError: pictures that cannot be measured, or a reference of another extractor.
    """
    if campaign is None and images is None:
        raise ConfigError("there is nothing to evaluate", "give a campaign, or --images FOLDER")
    config = config or (campaign.config.evaluate if campaign is not None else EvaluateConfig())
    store = campaign.store if campaign is not None else Store.open(out, create=True)
    with using_threads(config.threads):
        device = own_device()
        encoder = extractor(config.extractor, config.extractor_size, str(device))
        chosen = parse(config.metrics, encoder.kind, images is None, campaign is not None)

        # What is measured: a folder of pictures, or what a model draws at conditions of the campaign's data.
        if images is not None:
            source: Folder | Drawn = Folder(images)
        else:
            assert campaign is not None
            candidate, rows = published(campaign, model, device), config.conditions
            own = generation_of(campaign).with_(**candidate.model.card.sampling)
            drawn_by = own.with_(**(generation or {}))
            samples = samples_of(campaign, campaign.dataset(), rows, candidate.model.card)
            conditions = RowConditions.drawn(campaign, samples, rows, config.samples, drawn_by.seed)
            source = Drawn(candidate, drawn_by, conditions, captioned=asks(chosen, "captions"))

        # What it is compared with, and how.
        usual = "test" if config.conditions == "test" else "heldout"
        real = reference_of(reference, split, campaign, encoder, store, usual)
        fewest = min(len(source), real.about.count)
        components = config.components_of(encoder.kind, encoder.width, fewest)
        floor = None
        if campaign is not None and asks(chosen, "floor"):
            trained = training_pictures(campaign.dataset(), campaign.config.seed, "floor", len(source))
            training = Reference.of_pictures(trained, "training pictures", encoder, store)
            if part is not None:
                training.write_part(encoder, config.batch, part)
            floor = Floor({"floor": training.about.data}, partial(training.features, encoder, config.batch))
        how = How(
            *(encoder.name, encoder.kind, encoder.width, len(source), real.about.count, components),
            subsets=config.kid_subsets,
            subset=config.kid_size,
            device=device,
            floor=floor,
        )
        judge = Judge(store, encoder, real, chosen, how, config.batch, REPORTS)
        if part is not None:
            real.write_part(encoder, config.batch, part)
            judge.write_part(source, part)
            return None
        point, _, new = judge.measure(source)
        key = f"{REPORTS}/{point.key}"
        if not new:
            say("evaluate: finished already")
        for value in point.values.values():
            spread = f" +- {value.deviation:.4g}" if value.deviation is not None else ""
            say(f"  {value.label:<44} {value.value:.6g}{spread}")
        for note in notes_of([("", point.values)]):
            say(f"  note on {note}")
        if new:
            store.put(f"{key}.csv", table([point], COMPARED).to_csv())
            say(f"wrote {store.name(key)}.json")
        return point
