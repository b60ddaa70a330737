"""What networks must fit, as far as it is known: from the partition, the data set, or the settings alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import RunPlan, experts_of, made_by, read_partition, stored_bytes, training_columns
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.data.dataset import CAPTION
from atoll.data.encode import captions_of
from atoll.data.samples import data_shape, null_states
from atoll.encoders.text import text_form
from atoll.encoders.vae import latent_size
from atoll.networks.settings import DataShape

CLASSES = 1000
LOOKED_AT = 16
"""Shards whose captions are counted."""
SEEN_OFTEN = 18
"""Epochs up to which experts that share nothing lost in all small campaigns (decision 0049)."""


@dataclass(frozen=True)
class CaptionBytes:
    """What the captions of a data set take."""

    captions: int  # distinct ones, counted in each shard
    tokens: float  # of one, on average
    width: int  # numbers of a token's state
    counted: bool  # whether they are there; else tokens are estimated, from captions of some shards
    precomputed: bool  # whether states are stored; else only the tokens' ids are

    @property
    def bytes(self) -> int:
        """Of all files."""
        return round(self.captions * self.tokens * token_bytes(self.width, self.precomputed))


@dataclass(frozen=True)
class DataSpec:
    """The data of a campaign, known or assumed."""

    shape: DataShape
    sizes: list[int]  # training rows of each cluster, or equal shares where they are not known
    rows: int | None  # training rows in all
    stored: list[int] | None  # bytes of each island's data set
    notes: list[str]  # what was assumed
    weights: Sequence[float] = ()  # sums by cluster of the weights that rows are drawn by
    text: CaptionBytes | None = None
    buckets: Sequence[Sequence[float]] = ()
    """Training rows (or the sum of their weights) of each of the shape's latents by cluster; empty where
    there is one, or it is not known."""


def data_spec(campaign: Campaign, rows: int | None = None) -> DataSpec:
    """Read what is there: the partition, else the data set, else the settings; and assume the rest.

    `rows` are the training rows to assume where there is no data set yet.
    """
    config, k = campaign.config, campaign.config.partition.k
    precomputed = config.data.precompute_text
    if campaign.is_partitioned:
        plans = [RunPlan.read(campaign.store, run.plan) for run in experts_of(k)]
        shape, sizes, stored = plans[0].shape, [plan.rows for plan in plans], list[int]()
        for number, plan in enumerate(plans):
            on_disk = stored_bytes(campaign.store, number)
            stored.append(row_bytes(shape, precomputed) * plan.rows if on_disk is None else on_disk[0])
        cut = read_partition(campaign.store)
        buckets = list(cut.buckets.values())
        notes = seen_little(config, sum(sizes))
        return DataSpec(shape, sizes, sum(sizes), stored, notes, cut.masses, buckets=buckets)

    notes = ["not partitioned yet: equal clusters are assumed"]
    text, assumed = None, list[list[float]]()
    if not campaign.has_dataset():
        shape = _shape_of_settings(campaign)
        notes.append("no data set yet: shapes are those that the settings name")
        if config.condition == "class":
            notes.append(f"{CLASSES} classes are assumed")
        if rows is None:
            notes.append("rows are not known: --rows N tells what the data set's bytes will be")
    else:
        dataset = campaign.dataset()
        rows = len(dataset.split("train")) if dataset.has_column("split") else len(dataset)
        if all(made_by(dataset, name, by) for name, by in training_columns(config).items()):
            shape = data_shape(dataset, config.condition, config.data.text_column, config.network.guidance)
        else:  # rows and pictures are there: they tell as much as they can
            shape = _shape_of_settings(campaign)
            if config.data.vae == "none" and dataset.manifest.mode is not None:
                shape = replace(shape, channels=1 if dataset.manifest.mode == "gray" else 3)
            if config.condition == "class":
                shape = replace(shape, classes=int(dataset.labels.max()) + 1)
        if dataset.buckets is not None:
            _, counts = np.unique(dataset.buckets, axis=0, return_counts=True)
            if len(counts) == len(shape.latents):
                assumed = [[count / k] * k for count in counts.tolist()]

        # What captions take: by those of a few shards, and by the column where it is there.
        texts = config.condition == "text"
        if texts and config.data.captioner is not None and not dataset.has_column(CAPTION):
            notes.append("captions are not there yet: 'atoll data caption' writes them")
        elif texts:
            name, shards = config.data.text_column, len(dataset.shards)
            # A few shards: to count the captions of all would mean to read the whole data set.
            some = sorted({number * shards // LOOKED_AT for number in range(LOOKED_AT)})
            distinct = [{caption for row in captions_of(dataset, shard) for caption in row} for shard in some]
            count = max(1, sum(map(len, distinct)))  # shards may be left without a row
            captions = round(count * shards / len(some))
            if counted := made_by(dataset, name, training_columns(config)[name]):
                column = dataset.column(name)
                width = int(null_states(column).shape[1])
                held = sum(shard.bytes for shard in column.meta.shards)
                tokens = held / (token_bytes(width, precomputed) * captions)
            else:
                form = text_form(config.data.text_encoder, config.data.text_length)
                width = form.width
                # Tokenizers make about one token of four bytes of English, and add one or two of their own.
                lengths = [2 + len(caption.encode()) / 4 for part in distinct for caption in part]
                tokens = form.length if form.pooled else sum(min(form.length, n) for n in lengths) / count
            text = CaptionBytes(captions, tokens, width, counted, precomputed)
    sizes = [rows // k + (number < rows % k) for number in range(k)] if rows else []
    known_bytes = [row_bytes(shape, precomputed) * size for size in sizes] if sizes else None
    sizes = [max(1, size) for size in sizes] or [1] * k  # the budget divides by them
    notes += seen_little(config, rows or 0)
    return DataSpec(shape, sizes, rows, known_bytes, notes, text=text, buckets=assumed)


def seen_little(config: CampaignConfig, rows: int) -> list[str]:
    """What was measured of experts that share nothing and see their rows as seldom as these."""
    shared = config.budget.pretrain or config.origin or config.network.init != "scratch"
    epochs = config.budget.samples / rows if rows else SEEN_OFTEN
    small = f"in small campaigns of up to {SEEN_OFTEN} one network beat isolated experts"
    return [] if shared or epochs >= SEEN_OFTEN else [f"{epochs:.2g} epochs: {small} (docs/results.md)"]


def row_bytes(shape: DataShape, precomputed: bool) -> int:
    """Bytes of a row's latents and text in float16, texts at their longest; pictures stay behind."""
    text = shape.text_length * token_bytes(shape.text_width, precomputed)
    return 2 * shape.channels * math.prod(shape.largest) + text


def token_bytes(width: int, precomputed: bool) -> int:
    """Bytes of a token as it is stored: its state in float16, or its number."""
    return 2 * width if precomputed else 4


def _shape_of_settings(campaign: Campaign) -> DataShape:
    config, settings = campaign.config, campaign.config.data
    vae, size = settings.vae, settings.ingest.size
    pixels = 1 if settings.ingest.mode == "gray" else 3, size
    shape = DataShape(*(pixels if vae == "none" else latent_size(vae, size)))
    if settings.ingest.buckets is not None:
        sizes = sorted(settings.ingest.sizes())
        if settings.vae != "none":
            sizes = [(latent_size(settings.vae, w)[1], latent_size(settings.vae, h)[1]) for w, h in sizes]
        shape = replace(shape, sizes=tuple((height, width) for width, height in sizes))
    if config.condition == "text":
        form = text_form(settings.text_encoder, settings.text_length)
        shape = replace(shape, text_width=form.width, text_length=form.length, pooled_width=form.pooled)
        return replace(shape, guidance=config.network.guidance)
    return replace(shape, classes=CLASSES) if config.condition == "class" else shape
