"""The stages before training, in order; each knows whether it is finished."""

from collections import Counter
from collections.abc import Callable
from posixpath import join

import numpy as np

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, DataError
from atoll.base.part import Part
from atoll.base.pictures import grid, png
from atoll.base.text import many
from atoll.campaign.data_spec import data_spec
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import check_checkpoints
from atoll.campaign.partition import make_islands
from atoll.campaign.report_table import Cell, ReportTable
from atoll.campaign.runs import made_by, training_columns, wanted_columns
from atoll.data.contents import contents, lines
from atoll.data.dataset import CAPTION
from atoll.data.duplicates import Duplicates, dedupe, dedupe_producer, fingerprint_job
from atoll.data.encode import caption_job, captions_of, features_job, latents_job, text_job
from atoll.data.ingest import IngestJob
from atoll.data.partition import Partition
from atoll.data.settings import DedupeConfig
from atoll.data.sources.files import is_here
from atoll.data.sources.several import open_sources
from atoll.data.weights import DUPLICATES, weigh_sources
from atoll.encoders.image_text import Captioner
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.encoders.vision import vision_encoder
from atoll.networks.settings import check_sides
from atoll.store.store import Store

PROBED = 4
"""Images whose captions tell whether a captioner answers at all."""
PAIRS, SHOWN = "reports/duplicates.png", 48
"""Where pairs of duplicates are shown, and how many of each kind."""


def ingest_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Make the data set from its source, and say what it holds and what was left out; or write one part."""
    config, folder = campaign.config, campaign.store.location
    path, source = config.data_path(folder), config.source(folder)
    if source is None:
        what = f"{path} is not a data set and data.source is not set"
        raise DataError(what, "set it: --set data.source=FOLDER")
    # An encoder that is missing, and latents that no network takes, are refused before hours of work.
    if not campaign.has_dataset():
        shape = data_spec(campaign).shape
        check_sides("router", config.router.patch, shape.latents)
        for network, _ in map(config.island, range(config.partition.k)):
            check_sides(network.family, network.patch, shape.latents)
    opened, store = open_sources(source, config.data.ingest), Store.open(path, create=True)
    # A finished data set is left as it is: the job then only compares source and settings with it.
    job = IngestJob(opened, store, "", config.data.ingest)
    if part is not None:
        return job.write_part(part)
    dataset = job.run()
    if isinstance(source, dict) and config.data.weighted:
        weigh_sources(dataset, {name: settings.weight for name, settings in source.items()})
    made = contents(store, rows=False)
    made.columns.clear()  # `atoll data show` names them
    for line in lines(made):
        say(line)


def caption_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Add captions of rows that have none, or write one part of them."""
    dataset, config = campaign.dataset(), campaign.config.data.captioner
    if config is None:
        fix = "set it: --set data.captioner.model=MODEL"
        raise ConfigError("data.captioner names no image-text model", fix)
    if campaign.is_partitioned:
        raise DataError(f"{campaign.store.location} is partitioned already", "describe images before that")
    captioner = Captioner(config.model, config.prompt, config.tokens, str(own_device()))
    job = caption_job(dataset, captioner, config)
    if job.result() is None:
        first = [dataset.image(row) for row in range(min(PROBED, len(dataset)))]
        if not any(captioner.describe(first)):  # of some images "" is well: it trains no condition
            what = f"{config.model!r} answers nothing to {config.prompt!r} for {many(len(first), 'image')}"
            raise DataError(what, "set another data.captioner.prompt or model")
        for name in ("text", "tokens"):  # states of earlier captions fit these rows, and not these words
            dataset.store.delete(*dataset.store.list(join(dataset.prefix, "columns", name)))
            dataset.forget(name)
    if part is not None:
        return job.write_part(part)
    job.run()
    captions = dataset.shard_table(0, [CAPTION]).column(CAPTION)
    say(f"caption: {many(len(dataset), 'row')}, such as {captions[0].as_py()!r}")


def embed_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Add the features column, or write one part of it."""
    dataset, config = campaign.dataset(), campaign.config.partition
    job = features_job(dataset, vision_encoder(config.encoder, config.encoder_size, str(own_device())))
    if part is not None:
        return job.write_part(part)
    say(f"{job.name}: {len(dataset):,} rows of {job.run().shape[0]}")


def dedupe_stage(campaign: Campaign) -> Duplicates:
    """Find rows that show what another row shows, leave them out of the split, and show doubtful pairs."""
    store, config = campaign.store, campaign.config
    if campaign.is_partitioned:
        fix = "leave duplicates out before that, in a new campaign"
        raise DataError(f"{store.location} is partitioned already", fix)
    dataset = campaign.dataset()
    duplicates = dedupe(dataset, config.data.dedupe or DedupeConfig(), config.partition.encoder)
    largest = max(Counter(duplicates.groups).values())
    rows: list[list[Cell]] = [
        [name, count, round(count / len(dataset), 4)] for name, count in duplicates.counts.items()
    ]
    for name, count, share in rows:
        say(f"{name}: {count:,} rows ({share:.1%})")
    text = (
        f"Rows that show what another row shows are left out; the largest group, with those of its name in"
        f" the source, has {largest:,}. Pairs nearest to the bounds are in {PAIRS} (atoll data dedupe)."
    )
    table = ReportTable(title="Duplicates", text=text, columns=["row", "rows", "share"], rows=rows)
    table.write(store, "duplicates")
    if largest > 0.05 * len(dataset):
        fix = "lower data.dedupe.difference, or choose a finer data.ingest.group"
        say(f"the largest group has {largest:,} rows, all on one side of the split: {fix}")

    # Equal pictures are beyond doubt; pairs at the bounds of the two other reasons are for a person to judge.
    shown = list[int]()
    for reason in (2, 3):
        doubtful = np.flatnonzero(duplicates.reason == reason)
        shown += doubtful[np.argsort(-duplicates.distances[doubtful])][:SHOWN].tolist()
    if shown:
        pairs = [(row, int(duplicates.kept_row[row])) for row in shown]
        pictures = [dataset.image(row) for pair in pairs for row in pair]
        labels = [text for row in shown for text in (dataset.ids[row], f"{duplicates.distances[row]:.2f}")]
        store.put(PAIRS, png(grid(pictures, 12, 4, labels=labels, scale=max(1, 64 // pictures[0].width))))
        say(f"the pairs nearest to the bounds: {store.name(PAIRS)}")
    return duplicates


def encode_stage(campaign: Campaign, part: Part | None = None) -> None:
    """Add the latents and, for condition `text`, text states or tokens; or write one part of them."""
    dataset, config, device = campaign.dataset(), campaign.config.data, str(own_device())
    job = latents_job(dataset, autoencoder(config.vae, device))
    if part is not None:
        job.write_part(part)
    else:
        say(f"latents: {len(dataset):,} rows of {'x'.join(map(str, job.run().shape))}")
    if campaign.config.condition != "text":
        return
    encoder = text_encoder(config.text_encoder, config.text_length, device)
    job = text_job(dataset, encoder, config.precompute_text)
    if part is not None:
        return job.write_part(part)
    each = f" of {encoder.width}" if config.precompute_text else ", encoded in training"
    longest = job.run().max_length
    say(f"text: {many(len(dataset), 'row')} of at most {longest} tokens{each}")
    if encoder.pooled or longest == encoder.max_length:  # else no caption can have been cut
        shards = (captions_of(dataset, shard) for shard in range(len(dataset.shards)))
        cut = sum(len(encoder.too_long([text for row in rows for text in row])) for rows in shards)
        if cut:
            most, longer = encoder.max_length, many(cut, "longer caption")
            say(f"note: training sees {most} tokens of {longer} (data.text_length)")


def prepare(campaign: Campaign) -> Partition:
    """Everything before training: data set, columns, partition. Finished stages cost a look."""
    prepare_data(campaign)
    return make_islands(campaign)


def prepare_data(
    campaign: Campaign, part: Part | None = None, share: Callable[[str], bool] = lambda command: True
) -> None:
    """Make whatever is missing of the data set; with `part` only that part of the shards of all columns.

    `share` lets several processes write the shards of `ingest` or `prepare` before this one joins them.
    """
    config, location = campaign.config, campaign.store.location
    if campaign.is_partitioned:
        return
    check_checkpoints(campaign)
    source = config.source(location)
    names = [source] if isinstance(source, str) else [settings.source for settings in (source or {}).values()]
    here = bool(names) and all(name == "glyphs" or is_here(name) for name in names)
    # A data set whose source is gone, or on the hub, is taken as it is. One whose source is here is compared
    # with it, so that another source or other settings are refused and not trained on in silence.
    if part is None and (here or not campaign.has_dataset()):
        share("ingest")
        ingest_stage(campaign)
    dataset = campaign.dataset()
    captioner = config.data.captioner
    if part is None and captioner is not None and not made_by(dataset, CAPTION, captioner.producer()):
        share("caption")
        caption_stage(campaign)
    stale = {name for name, by in wanted_columns(config).items() if not made_by(dataset, name, by)}
    encoded = stale.intersection(training_columns(config))
    how, encoder = config.data.dedupe, config.partition.encoder
    dedupes = how is not None and not made_by(dataset, DUPLICATES, dedupe_producer(dataset, how, encoder))
    if stale or dedupes:
        share("prepare")
    if stale - encoded:
        embed_stage(campaign, part)
    if dedupes and part is not None:
        fingerprint_job(dataset).write_part(part)
    elif dedupes:
        dedupe_stage(campaign)
    if encoded:
        encode_stage(campaign, part)
    # What workers left half done goes only when nobody writes any more.
    if part is None:
        campaign.dataset().tidy()
