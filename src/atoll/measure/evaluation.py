"""The evaluate stage: one point, of a model or of a folder of pictures, and all of them as a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.base.console import say
from atoll.base.device import using_threads
from atoll.base.errors import ConfigError
from atoll.base.processes import joined
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import MeasuredPoint
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.encoders.vision import extractor
from atoll.measure.metrics.metric import How, parse
from atoll.measure.models import Drawn, RowConditions, generation_of, published, samples_of
from atoll.measure.pictures import Folder
from atoll.measure.points import Judge, reference_of
from atoll.measure.request import COMPARED, REPORTS, notes_of, table
from atoll.store.store import Store


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
) -> MeasuredPoint | None:
    """Measure, write `reports/evaluate/KEY.json` and `.csv`, and print; None on all processes but the first.

    Args:
        campaign: whose model is measured, and whose data is the reference; None for pictures alone.
        config: how; by default the campaign's.
        model: `ensemble`, `monolith`, `student` or `pretrain`.
        generation: values in place of the campaign's `sampling`: routing, guidance, steps, seed.
        images: a folder of pictures, in a model's place.
        reference: what they are compared with; the campaign's own data if None.
        split: rows of the reference; by default held-out ones, under `evaluate.conditions=test` those.
        out: where `reports/` goes without a campaign.

    Raises:
        ConfigError: settings, names or metrics that do not exist or contradict each other.
        DataError: pictures that cannot be measured, or a reference of another extractor.
    """
    if campaign is None and images is None:
        raise ConfigError("there is nothing to evaluate", "give a campaign, or --images FOLDER")
    config = config or (campaign.config.evaluate if campaign is not None else EvaluateConfig())
    store = campaign.store if campaign is not None else Store.open(out, create=True)
    with using_threads(config.threads), joined() as world:
        encoder = extractor(config.extractor, config.extractor_size, str(world.device))
        chosen = parse(config.metrics, encoder.kind, captioned=images is None)

        # What is measured: a folder of pictures, or what a model draws at conditions of the campaign's data.
        if images is not None:
            source: Folder | Drawn = Folder(images)
        else:
            assert campaign is not None
            drawn_by = generation_of(campaign).with_(**(generation or {}))
            candidate, rows = published(campaign, model, world.device), config.conditions
            samples = samples_of(campaign, campaign.dataset(), rows, candidate.model.card)
            conditions = RowConditions.drawn(campaign, samples, rows, config.samples, drawn_by.seed)
            source = Drawn(candidate, drawn_by, conditions, captioned="clip-score" in chosen)

        # What it is compared with, and how.
        usual = "test" if config.conditions == "test" else "heldout"
        real = reference_of(reference, split, campaign, encoder, store, usual)
        fewest = min(len(source), real.about.count)
        components = config.components_of(encoder.kind, encoder.width, fewest)
        how = How(
            *(encoder.name, encoder.kind, encoder.width, len(source), real.about.count, components),
            subsets=config.kid_subsets,
            subset=config.kid_size,
            device=world.device,
        )
        point, _, new = Judge(store, encoder, real, chosen, how, config.batch, world, REPORTS).measure(source)
        if point is None:
            return None
        key = f"{REPORTS}/{point.key}"
        if new:
            store.put(f"{key}.csv", table([point], COMPARED).to_csv())
        else:
            say("evaluate: finished already")
        for value in point.values.values():
            spread = f" +- {value.deviation:.4g}" if value.deviation is not None else ""
            say(f"  {value.label:<44} {value.value:.6g}{spread}")
        for note in notes_of([("", point.values)]):
            say(f"  note on {note}")
        if new:
            say(f"wrote {store.name(key)}.json")
        return point
