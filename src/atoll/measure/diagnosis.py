"""The diagnose stage: why the ensemble is good or bad, from what a campaign published."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.baselines import dense_cards, load_dense
from atoll.campaign.folder import Campaign
from atoll.campaign.results import Diagnosis
from atoll.data.dataset import DataSet
from atoll.data.partition import Partition
from atoll.data.samples import Samples
from atoll.data.settings import features_column
from atoll.encoders.extractors import extractor
from atoll.encoders.vae import autoencoder_of
from atoll.encoders.vision import VisionEncoder, vision_encoder
from atoll.ensemble.card import Card
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.expert import Expert, read_card
from atoll.ensemble.folder import read_manifest
from atoll.ensemble.generate import Sampling
from atoll.ensemble.generation import Generation
from atoll.ensemble.integrate import euler
from atoll.ensemble.model import Model
from atoll.ensemble.routing import Routing
from atoll.measure.compare import Conditions
from atoll.measure.diagnostics import PRACTICAL, Sampled, labelled, measure, sample_traced
from atoll.measure.landing import landing
from atoll.measure.nearest import Copies, leaders, two_nearest
from atoll.measure.stability import stability
from atoll.measure.streams import Table, to_csv
from atoll.measure.usage import by_strategy, switches, usage

RESULT = "reports/diagnostics.json"
FOLDER = "reports/diagnostics"
_CHUNK = 4096
F32 = NDArray[np.float32]


def diagnose_campaign(campaign: Campaign) -> dict[str, Any]:
    """Measure and write; what was measured of the same parts with the same settings is not measured again."""
    store, config, seed = campaign.store, campaign.config.diagnose, campaign.config.seed
    content = read_manifest(store)
    router = read_card(store, "ensemble/router")
    baseline = dense_cards(campaign, router, ("monolith",))
    parts = content.parts | {name: card.weights_sha256 for name, card in baseline.items()}
    dataset, made = _data(campaign)
    settings = config.model_dump(exclude=PRACTICAL) | {"seed": seed}
    key = digest({"parts": parts, "settings": settings, "data": dataset.content})
    found: dict[str, Any] = store.get_json(RESULT) if store.exists(RESULT) else {}
    if found.get("key") == key and Diagnosis.fits(found):
        say("diagnose: finished already")
        return found
    start = time.monotonic()
    with using_threads(config.threads):
        tables, about = _Diagnosis(campaign, dataset, made, router).run(bool(baseline))
    result = {
        **Diagnosis.header(),
        "key": key,
        "parts": parts,
        "code": code_version(),
        "seconds": round(time.monotonic() - start, 1),
        "settings": settings,
        "k": made.k,
        "sizes": made.sizes,
        "missing": sorted(set(range(made.k)) - set(content.experts)),
        **about,
        "tables": {name: table.to_json() for name, table in tables.items()},
    }
    for name, table in tables.items():
        store.put(f"{FOLDER}/{name}.csv", to_csv(table.columns, table.rows))
    store.put_json(RESULT, result)
    return result


def _data(campaign: Campaign) -> tuple[DataSet, Partition]:
    """Data set and partition, which belong together and hold the rows that are asked for."""
    (dataset, made), config = campaign.clustered(), campaign.config.diagnose
    wanted = {*config.splits, *([config.conditions] if config.samples and config.strategies else [])}
    if "heldout" in wanted and len(dataset.split("heldout")) == 0:
        raise DataError(
            "the data set has no held-out rows",
            "ingest with data.ingest.heldout above 0, or look at training rows:"
            " --set diagnose.splits=[train] --set diagnose.conditions=train",
        )
    return dataset, made


class _Diagnosis:
    """One look at a campaign."""

    def __init__(self, campaign: Campaign, dataset: DataSet, made: Partition, router: Card) -> None:
        self.campaign, self.dataset, self.made, self.router = campaign, dataset, made, router
        self.config, self.seed = campaign.config.diagnose, campaign.config.seed
        self.device = own_device()
        residency = campaign.config.sampling.residency
        ensemble = Model.load(campaign.store, residency=residency, device=self.device).denoiser
        assert isinstance(ensemble, Ensemble)
        self.ensemble = ensemble

    def run(self, baseline: bool) -> tuple[dict[str, Table], dict[str, Any]]:
        """Tables by name, and what else is told."""
        if self.ensemble.missing:
            names = ", ".join(map(str, self.ensemble.missing))
            say(f"  warning: experts {names} are missing and left out; their share goes to the others")
        monolith = load_dense(self.campaign, "monolith", self.device) if baseline else None
        tables = self._measured(monolith)
        routings = {str(routing): routing for routing in self._strategies()}
        sampled = {name: self._sampled(routing) for name, routing in routings.items()}
        about: dict[str, Any] = {"strategies": list(sampled), "copies": None, "pictures": [], "closest": []}
        if sampled:
            tables |= self._traced(sampled) | self._stability(routings, monolith)
            ends, told = self._ends(sampled)
            tables, about = tables | ends, about | told
        _summarise(tables)
        return tables, about

    def _samples(self, split: str) -> Samples:
        shape, kind = self.router.shape, self.campaign.config.condition
        return Samples(self.dataset, self.dataset.split(split), kind, shape)

    def _measured(self, monolith: Expert | None) -> dict[str, Table]:
        config, found = self.config, []
        for split in config.splits:
            samples = self._samples(split)
            say(f"diagnose: {min(len(samples), config.rows):,} {split} rows at {len(config.times)} times")
            rows = labelled(samples, self.made.clusters, config.rows, self.seed, config.batch)
            measured = measure(self.ensemble, monolith, rows, self.made.sizes, config, self.device)
            found.append({name: table.led_by("split", split) for name, table in measured.items()})
        return {name: Table.joined([one[name] for one in found]) for name in found[0]}

    def _strategies(self) -> list[Routing]:
        """Those that are sampled: all that this ensemble can follow."""
        found = []
        for routing in map(Routing.named, self.config.strategies if self.config.samples else ()):
            if not routing.possible(len(self.ensemble.experts)):
                say(f"  warning: {routing} is left out: there are {len(self.ensemble.experts)} experts")
            else:
                found.append(routing)
        return found

    def _sampling(self, routing: Routing, count: int) -> Sampling:
        """All about drawing pictures at the conditions of the first rows of `_asked`."""
        config, (index, clusters) = self.config, self._asked()
        generation = Generation(steps=config.steps, guidance=config.guidance, routing=routing, seed=self.seed)
        conditions = Conditions(self._samples(config.conditions), index, clusters.numpy())
        return conditions.sampling(generation, count, config.batch, self.device)

    def _sampled(self, routing: Routing) -> Sampled:
        say(f"diagnose: {self.config.samples:,} pictures under {routing}, {self.config.steps} steps")
        return sample_traced(self.ensemble, self._sampling(routing, self.config.samples))

    def _asked(self) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Which rows' conditions are sampled, by their number in the split, and their clusters."""
        rows = self.dataset.split(self.config.conditions)
        order = np.random.default_rng(self.seed).permutation(len(rows))
        index = np.resize(order, self.config.samples).astype(np.int64)
        return index, torch.from_numpy(self.made.clusters[rows[index]])

    def _traced(self, sampled: dict[str, Sampled]) -> dict[str, Table]:
        clusters = self._asked()[1]
        times = [float(t) for t in euler(self.config.steps).sigmas[:-1]]
        return {
            "usage": by_strategy(
                {n: usage(s.weights, clusters, self.made.sizes) for n, s in sampled.items()}
            ),
            "switches": by_strategy({n: switches(s.weights, times) for n, s in sampled.items()}),
        }

    def _stability(self, routings: dict[str, Routing], monolith: Expert | None) -> dict[str, Table]:
        """Of every strategy and of the monolith, on the first of the samples."""
        count = min(self.config.probed, self.config.samples)
        if not count:
            return {}
        say(f"diagnose: {count:,} pictures of each nudged, and in {2 * self.config.steps} steps")
        models: dict[str, tuple[Ensemble | Expert, Routing]] = {
            name: (self.ensemble, routing) for name, routing in routings.items()
        }
        if monolith is not None:
            models["monolith"] = (monolith, Routing())
        found = {
            name: stability(model, self._sampling(routing, count))
            for name, (model, routing) in models.items()
        }
        return {
            "stability": by_strategy({name: ends for name, (ends, _) in found.items()}),
            "lipschitz": by_strategy({name: path for name, (_, path) in found.items()}),
        }

    def _ends(self, sampled: dict[str, Sampled]) -> tuple[dict[str, Table], dict[str, Any]]:
        """Whether samples lie in their experts' clusters, and those of the first strategy, whether they are
        copies; tables, and what is shown of the copies."""
        heldout = self.dataset.split("heldout")
        own_space = self.config.extractor is None and len(self.made.centroids) > 0
        if not own_space and not len(heldout):
            return {}, {}
        encoder = self._extractor()
        vae = autoencoder_of(self.router.latents, str(self.device))
        parts = [features for _, features in self._features(encoder, heldout)]
        real = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        tables, told, landings = dict[str, Table](), dict[str, Any](), dict[str, Table]()
        for name, one in sampled.items():
            first = name == next(iter(sampled))
            if not own_space and not first:
                break
            numbers = torch.arange(len(one.latents)).split(self.config.batch)
            pictures = [p for part in numbers for p in vae.pictures(one.latents[part], part.tolist())]
            features, weights = encoder.encode(pictures).numpy(), one.weights.numpy()
            if own_space:
                clusters = self.made.clusters[heldout]
                landings[name] = landing(features, weights, real, clusters, self.made.centroids)
            if first and len(heldout):
                copies = self._copies(encoder, features, real, leaders(weights))
                tables, told = self._told(copies, encoder, pictures)
        return tables | ({"landing": by_strategy(landings)} if landings else {}), told

    def _copies(self, encoder: VisionEncoder, features: F32, real: F32, served: NDArray[np.int64]) -> Copies:
        """Samples and held-out pictures beside their nearest training pictures."""
        train, heldout = self.dataset.split("train"), self.dataset.split("heldout")
        say(f"diagnose: {len(features):,} pictures against {len(train):,} training pictures")
        own, other = (two_nearest(one, self._features(encoder, train)) for one in (features, real))
        return Copies(own, other, served, self.made.clusters[heldout], self.config.quantile)

    def _told(
        self, copies: Copies, encoder: VisionEncoder, pictures: list[Image.Image]
    ) -> tuple[dict[str, Table], dict[str, Any]]:
        """Tables of the copies, and the pictures that they name."""
        limits = dict(zip(("ratio", "distance"), copies.limits, strict=True)) if copies.limits else None
        same = copies.heldout.same
        leaked = int(same.sum())
        if leaked:
            say(
                f"  warning: {leaked} of {len(same)} held-out pictures are training pictures too: what is"
                " measured on held-out rows flatters (see data.ingest.group)"
            )
        tables = {
            "nearest": copies.by_cluster(self.made.k),
            "suspicious": copies.suspicious(self.config.named),
            "closest": copies.closest(),
        }
        return tables, {
            "copies": {"limits": limits, "leaked": leaked, **encoder.producer()},
            "pictures": self._show(tables["suspicious"], pictures, "pairs"),
            "closest": self._show(tables["closest"], pictures, "closest"),
        }

    def _extractor(self) -> VisionEncoder:
        config, partition = self.config, self.campaign.config.partition
        if config.extractor is not None:
            return extractor(config.extractor, config.extractor_size, str(self.device))
        size = config.extractor_size or partition.encoder_size
        return vision_encoder(partition.encoder, size, str(self.device))  # as the partition saw pictures

    def _features(
        self, encoder: VisionEncoder, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Features of rows' pictures in parts: from the column, where this encoder made one."""
        name = features_column(encoder.name)
        kept = self.dataset.column(name) if self.dataset.has_column(name) else None
        if kept is not None and kept.meta.producer != encoder.producer():
            kept = None
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            if kept is not None:
                yield part, kept.read(part).float().numpy()
            else:
                yield part, encoder.encode([self.dataset.image(int(row)) for row in part]).numpy()

    def _show(self, named: Table, pictures: list[Image.Image], folder: str) -> list[dict[str, Any]]:
        """Write the samples of a table and their nearest training pictures; their keys and the caption."""
        shown = []
        for number, record in enumerate(named.records()):
            sample, row = record["sample"], record["row"]
            assert isinstance(sample, int) and isinstance(row, int)
            keys = {name: f"{FOLDER}/{folder}/{number:02d}-{name}.png" for name in ("sample", "training")}
            self.campaign.store.put(keys["sample"], png(pictures[sample]))
            self.campaign.store.put(keys["training"], png(self.dataset.image(row)))
            caption = self.dataset.take([row]).column("caption").to_pylist()[0]
            shown.append({**keys, "caption": caption, "id": self.dataset.ids[row]})
        return shown


def _summarise(tables: dict[str, Table]) -> None:
    """A few lines for whoever waits."""
    first = tables["router"].records()[0]["split"]
    for record in tables["router"].records():
        if record["split"] == first:
            say(
                f"  t = {record['t']:<7g} router: accuracy {_f(record['accuracy'])}, NLL {_f(record['nll'])}"
                f" (prior {_f(record['prior_nll'])}), calibration error {_f(record['ece'])}"
            )
    for record in tables["errors"].records():
        if (record["split"], record["t"], record["cluster"]) == (first, "mean", "all"):
            say(f"  error of {record['model']:<9} {_f(record['error'])} ± {_f(record['se'])}")


def _f(value: float | int | str | None) -> str:
    return "–" if value is None else f"{value:.4f}"
