"""The stages before training, in order; each knows whether it is finished."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from atoll.base.console import Progress, say
from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.base.pictures import grid, png
from atoll.campaign.expected import expected
from atoll.campaign.finding import Finding
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import check_checkpoints
from atoll.campaign.partition import make_islands
from atoll.campaign.runs import made_by, training_columns, wanted_columns
from atoll.data.contents import contents, lines
from atoll.data.dataset import DataSet
from atoll.data.duplicates import COLUMN, Duplicates, about, dedupe, look
from atoll.data.encode import embed, encode_latents, encode_text
from atoll.data.formats import ShardNote
from atoll.data.ingest import ingest
from atoll.data.partition import Partition
from atoll.data.samples import weigh_sources
from atoll.data.settings import DedupeConfig, features_column
from atoll.data.sources import open_sources
from atoll.data.workers import Stage, work_together
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.encoders.vision import vision_encoder
from atoll.networks.settings import check_sides
from atoll.store.store import Store

PAIRS, SHOWN = "reports/duplicates.png", 48
"""Where pairs of duplicates are shown, and how many of each kind."""


def ingest_stage(campaign: Campaign) -> DataSet:
    """Make the data set from its source, and say what it holds and what was left out."""
    config, folder = campaign.config, campaign.store.location
    path, named = config.data_path(folder), config.source(folder)
    if named is None:
        raise DataError(
            f"{path} is not a data set and data.source is not set", "set it: --set data.source=FOLDER"
        )
    if config.data.ingest.buckets is not None:
        check_shapes(campaign)
    source = open_sources(named, config.data.ingest)
    store = Store.open(path, create=True)
    progress = Progress("ingest", len(source))
    dataset = ingest(source, store, "", config.data.ingest, progress, config.train.lease)
    if isinstance(named, dict) and config.data.weighted:
        weigh_sources(dataset, {name: one.weight for name, one in named.items()})
    for line in lines(contents(store, rows=False)):
        say(line)
    return dataset


def check_shapes(campaign: Campaign) -> None:
    """Refuse latents of several shapes that a network could not take, before they are made.

    Raises:
        ConfigError: which, and what to change; or the settings do not tell the shapes.
    """
    config, shape = campaign.config, expected(campaign).shape
    check_sides("router", config.router.patch, shape.latents)
    for number in range(config.partition.k):
        network = config.island(number)[0]
        check_sides(network.family, network.patch, shape.latents)


def embed_stage(campaign: Campaign) -> None:
    """Add the features column."""
    dataset, config = campaign.dataset(), campaign.config.partition
    encoder = vision_encoder(config.encoder, config.encoder_size, str(own_device()))
    progress = Progress(f"features by {config.encoder}", len(dataset.shards), unit="shards")
    column = embed(dataset, encoder, progress, campaign.config.train.lease)
    say(f"{features_column(config.encoder)}: {len(dataset):,} rows of {column.meta.shape[0]}")


def dedupe_stage(campaign: Campaign) -> Duplicates:
    """Find rows that show what another row shows, leave them out of the split, and show the doubtful pairs.

    Raises:
        DataError: the campaign has its partition already, or features are wanted and not there.
    """
    if campaign.is_partitioned:
        what = f"{campaign.store.location} is partitioned already"
        raise DataError(what, "leave duplicates out before that, in a new campaign")
    dataset, config = campaign.dataset(), campaign.config
    how = config.data.dedupe or DedupeConfig()
    look(dataset, Progress("looks of pictures", len(dataset.shards), unit="shards"), config.train.lease)
    found = dedupe(dataset, how, config.partition.encoder)
    largest = max(Counter(found.groups).values())
    rows: list[list[str | int | float | None]] = [
        [name, count, round(count / len(dataset), 4)] for name, count in found.counts.items()
    ]
    for name, count, share in rows:
        say(f"{name}: {count:,} rows ({share:.1%})")
    text = (
        f"Rows that show what another row shows are left out; the largest group, with those of its name in"
        f" the source, has {largest:,}. Pairs nearest to the bounds are in {PAIRS} (atoll data dedupe)."
    )
    Finding(title="Duplicates", text=text, columns=["row", "rows", "share"], rows=rows).write(
        campaign.store, "duplicates"
    )
    doubtful = [np.flatnonzero(found.how == number) for number in (2, 3)]
    if largest > 0.05 * len(dataset):
        fix = "lower data.dedupe.difference, or choose a finer data.ingest.group"
        say(f"the largest group has {largest:,} rows, all on one side of the split: {fix}")
    shown = [row for part in doubtful for row in part[np.argsort(-found.distances[part])][:SHOWN].tolist()]
    if shown:
        pictures = [dataset.image(one) for row in shown for one in (row, int(found.of[row]))]
        labels = [text for row in shown for text in (dataset.ids[row], f"{found.distances[row]:.2f}")]
        scale = max(1, 64 // pictures[0].width)
        campaign.store.put(PAIRS, png(grid(pictures, 12, 4, labels=labels, scale=scale)))
        say(f"the pairs nearest to the bounds: {campaign.store.name(PAIRS)}")
    return found


def encode_stage(campaign: Campaign) -> None:
    """Add the latents column and, for condition `text`, that of text states or tokens."""
    dataset, config, device = campaign.dataset(), campaign.config.data, str(own_device())
    shards, lease = len(dataset.shards), campaign.config.train.lease
    vae = autoencoder(config.vae, device)
    column = encode_latents(dataset, vae, Progress("latents", shards, unit="shards"), lease)
    say(f"latents: {len(dataset):,} rows of {'x'.join(map(str, column.meta.shape))}")
    if campaign.config.condition == "text":
        encoder = text_encoder(config.text_encoder, config.text_length, device)
        progress = Progress(f"text by {config.text_encoder}", shards, unit="shards")
        column = encode_text(dataset, encoder, progress, lease, config.precompute_text)
        each = f" of {encoder.width}" if config.precompute_text else ", encoded in training"
        say(f"text: {len(dataset):,} rows of at most {column.meta.max_length} tokens{each}")


def prepare(campaign: Campaign) -> Partition:
    """Everything before training: data set, columns, partition. Finished stages cost a look."""
    prepare_data(campaign)
    return make_islands(campaign)


def prepare_data(campaign: Campaign) -> None:
    """Whatever is missing of the data set; any number of processes that do this at once share the work."""
    config, store = campaign.config, campaign.store
    if campaign.is_partitioned:
        return
    check_checkpoints(config, store.location)
    named = config.source(store.location)
    sources = [named] if isinstance(named, str) else [one.source for one in (named or {}).values()]
    here = bool(sources) and all(one == "glyphs" or Path(one).exists() for one in sources)
    if here or not campaign.has_dataset():
        ingest_stage(campaign)  # refuses a data set of another source or other settings
    dataset = campaign.dataset()
    stale = {name for name, by in wanted_columns(config).items() if not made_by(dataset, name, by)}
    encoded = stale.intersection(training_columns(config))
    if stale - encoded:
        embed_stage(campaign)
    if (how := config.data.dedupe) is not None:
        dataset = campaign.dataset()
        wanted = about(dataset, how, config.partition.encoder)
        if not made_by(dataset, COLUMN, wanted):  # the looks are shared work, what is alike is one process's
            progress = Progress("looks of pictures", len(dataset.shards), unit="shards")
            look(dataset, progress, config.train.lease)
        work_together(_Dedupe(campaign, wanted), config.train.lease)
    if encoded:
        encode_stage(campaign)
    campaign.dataset().tidy()


class _Dedupe(Stage[bool]):
    """Deduplication as a stage without shards: one process does it, and the others wait."""

    def __init__(self, campaign: Campaign, wanted: dict[str, Any]) -> None:
        super().__init__(campaign.dataset().store, f"columns/{COLUMN}", f"columns/{COLUMN}", [])
        self.campaign, self.wanted = campaign, wanted

    def done(self) -> bool | None:
        """Whether the column is there."""
        return made_by(self.campaign.dataset(), COLUMN, self.wanted) or None

    def put_together(self, notes: list[ShardNote]) -> bool:
        """Do it."""
        dedupe_stage(self.campaign)
        return True
