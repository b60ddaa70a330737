"""The stages before training, in order; each knows whether it is finished."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from atoll.base.console import Progress, say
from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.base.pictures import grid, png
from atoll.campaign.data_spec import data_spec
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import check_checkpoints
from atoll.campaign.partition import make_islands
from atoll.campaign.report_table import ReportTable
from atoll.campaign.runs import made_by, training_columns, wanted_columns
from atoll.data.contents import contents, lines
from atoll.data.duplicates import COLUMN, Duplicates, about, dedupe, fingerprint_job
from atoll.data.encode import features_job, latents_job, text_job
from atoll.data.ingest import IngestJob
from atoll.data.job import Part
from atoll.data.partition import Partition
from atoll.data.settings import DedupeConfig
from atoll.data.sources import open_sources
from atoll.data.weights import weigh_sources
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.encoders.vision import vision_encoder
from atoll.networks.settings import check_sides
from atoll.store.store import Store

PAIRS, SHOWN = "reports/duplicates.png", 48
"""Where pairs of duplicates are shown, and how many of each kind."""


def ingest_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Make the data set from its source, and say what it holds and what was left out; or write one part."""
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
    job = IngestJob(source, store, "", config.data.ingest, progress)
    if part is not None:
        return job.write_part(part)
    dataset = job.run()
    if isinstance(named, dict) and config.data.weighted:
        weigh_sources(dataset, {name: one.weight for name, one in named.items()})
    for line in lines(contents(store, rows=False)):
        say(line)


def check_shapes(campaign: Campaign) -> None:
    """Refuse latents of several shapes that a network could not take, before they are made.

    Raises:
        ConfigError: which, and what to change; or the settings do not tell the shapes.
    """
    config, shape = campaign.config, data_spec(campaign).shape
    check_sides("router", config.router.patch, shape.latents)
    for number in range(config.partition.k):
        network = config.island(number)[0]
        check_sides(network.family, network.patch, shape.latents)


def embed_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Add the features column, or write one part of it."""
    dataset, config = campaign.dataset(), campaign.config.partition
    encoder = vision_encoder(config.encoder, config.encoder_size, str(own_device()))
    progress = Progress(f"features by {config.encoder}", len(dataset.shards), unit="shards")
    job = features_job(dataset, encoder, progress)
    if part is not None:
        return job.write_part(part)
    say(f"{job.name}: {len(dataset):,} rows of {job.run().shape[0]}")


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
    fingerprint_job(dataset, Progress("fingerprints of pictures", len(dataset.shards), unit="shards")).run()
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
    ReportTable(title="Duplicates", text=text, columns=["row", "rows", "share"], rows=rows).write(
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


def encode_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Add the latents and, for condition `text`, text states or tokens; or write one part of them."""
    dataset, config, device = campaign.dataset(), campaign.config.data, str(own_device())
    shards = len(dataset.shards)
    job = latents_job(dataset, autoencoder(config.vae, device), Progress("latents", shards, unit="shards"))
    if part is not None:
        job.write_part(part)
    else:
        say(f"latents: {len(dataset):,} rows of {'x'.join(map(str, job.run().shape))}")
    if campaign.config.condition != "text":
        return
    encoder = text_encoder(config.text_encoder, config.text_length, device)
    progress = Progress(f"text by {config.text_encoder}", shards, unit="shards")
    job = text_job(dataset, encoder, progress, config.precompute_text)
    if part is not None:
        return job.write_part(part)
    each = f" of {encoder.width}" if config.precompute_text else ", encoded in training"
    say(f"text: {len(dataset):,} rows of at most {job.run().max_length} tokens{each}")


def prepare(campaign: Campaign) -> Partition:
    """Everything before training: data set, columns, partition. Finished stages cost a look."""
    prepare_data(campaign)
    return make_islands(campaign)


def prepare_data(
    campaign: Campaign, part: Part | None = None, share: Callable[[str], None] = lambda command: None
) -> None:
    """Whatever is missing of the data set.

    Args:
        campaign: with a source, or a data set.
        part: given, that part of the shards of all columns is written, and nothing else.
        share: given, lets several processes write the shards of a command, `ingest` or `prepare`, before this
            one puts them together.
    """
    config, store = campaign.config, campaign.store
    if campaign.is_partitioned:
        return
    check_checkpoints(config, store.location)
    named = config.source(store.location)
    sources = [named] if isinstance(named, str) else [one.source for one in (named or {}).values()]
    here = bool(sources) and all(one == "glyphs" or Path(one).exists() for one in sources)
    if part is None and (here or not campaign.has_dataset()):
        share("ingest")
        ingest_stage(campaign)  # refuses a data set of another source or other settings
    dataset = campaign.dataset()
    stale = {name for name, by in wanted_columns(config).items() if not made_by(dataset, name, by)}
    encoded = stale.intersection(training_columns(config))
    how = config.data.dedupe
    dedupes = how is not None and not made_by(dataset, COLUMN, about(dataset, how, config.partition.encoder))
    if stale or dedupes:
        share("prepare")
    if stale - encoded:
        embed_stage(campaign, part)
    if dedupes and part is not None:
        progress = Progress("fingerprints of pictures", len(dataset.shards), unit="shards")
        fingerprint_job(dataset, progress).write_part(part)
    elif dedupes:
        dedupe_stage(campaign)
    if encoded:
        encode_stage(campaign, part)
    if part is None:
        campaign.dataset().tidy()
