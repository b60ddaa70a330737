"""Atoll from Python: from a folder of pictures to a model, without YAML. Every stage returns a value."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic_core import to_jsonable_python

from atoll.base.device import named_device
from atoll.base.preemption import Interrupted
from atoll.base.safe_parse import read_yaml
from atoll.campaign import folder as campaigns
from atoll.campaign import prepare as stages
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.sample import campaign_model
from atoll.campaign.settings.launch import merged
from atoll.data.partition import Partition
from atoll.measure.points import evaluate as measure_point
from atoll.model.card import Card
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.model.opened import border, is_hub_name
from atoll.model.routing import WeightFunction
from atoll.recipes import catalogue
from atoll.store.location import is_url, local_path
from atoll.store.store import Store
from atoll.train.run import train_run


def create(
    source: str | Path,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    recipe: str = "cpu",
) -> Campaign:
    """Create a campaign on a folder of captioned pictures, a parquet file, or `glyphs`.

    Args:
        source: of the pictures.
        folder: of the campaign, or its URL; a temporary one by default. One of the same settings is opened.
        settings: nested settings in place of the recipe's, as in `{"partition": {"k": 4}}`.
        recipe: the ready-made campaign to start from, of `atoll recipes`.
    """
    tree = read_yaml(catalogue.text(recipe), recipe)
    # Absolute, as a path in campaign.yaml is relative to the campaign's folder and not to the script's.
    place = source if source == "glyphs" or is_url(source) else local_path(source)
    tree = merged(merged(tree, {"data": {"source": str(place)}}), settings or {})
    # YAML has no words for paths, routings, numbers of numpy and the like.
    tree = to_jsonable_python(tree, fallback=lambda value: getattr(value, "tolist", value.__repr__)())
    where = folder if folder is not None else tempfile.mkdtemp(prefix="atoll-")
    campaigns.new(where, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), ())
    return Campaign.open(where)


def prepare(campaign: Campaign | str | Path) -> Partition:
    """Do everything before training: data set, features, latents, text states, partition."""
    return stages.prepare(_opened(campaign))


def fit(campaign: Campaign | str | Path, role: str = "expert", expert: int | None = None) -> Card:
    """Train one network, or go on with it, and return the card it was published with.

    `role` is `expert`, which has a number, `router`, `monolith`, `pretrain` or `student`. Ctrl-C raises
    `KeyboardInterrupt` once the state is saved.
    """
    try:
        return train_run(_opened(campaign), role, expert)
    except Interrupted as left:  # Ctrl-C is what Python's own is for scripts and notebooks
        raise KeyboardInterrupt(str(left)) from None


def load(
    source: Campaign | str | Path,
    name: str = "ensemble",
    residency: Residency | None = None,
    device: torch.device | str | None = None,
    encoders: Collection[str] = (),
    trusted: Collection[str] | None = None,
) -> Model:
    """Load a model: of a campaign, whose trained parts are assembled first, or of an exported folder.

    Args:
        source: the campaign, its folder, an exported folder, or a hub name.
        name: `ensemble`, or in a campaign `monolith`, `student` or `pretrain`.
        residency: how many experts stay on the device.
        device: where it samples; the GPU if there is one.
        encoders: names of encoders that you vouch for, where a model names one unknown to Atoll.
        trusted: keys or certificates, one of which must have signed the exported folder, or in a campaign
            each part; None takes unsigned ones too.
    """
    where = named_device(device)
    # What has no settings is an exported folder or a hub name. Both bring card and routing along.
    if not isinstance(source, Campaign):
        if is_hub_name(source) or not any(map(Store.open(source).exists, (campaigns.YAML, campaigns.FROZEN))):
            with border(source):
                return Model.load(source, name, residency, where, encoders=encoders, trusted=trusted)
        source = Campaign.open(source)
    if name == "ensemble":
        assemble(source, trusted=trusted)
    options: dict[str, Any] = {"encoders": (*source.config.encoders, *encoders)}
    options |= {"residency": residency} if residency else {}
    return campaign_model(source, name, where, trusted=trusted, **options)


def evaluate(
    campaign: Campaign | str | Path,
    model: str = "ensemble",
    *,
    routing: str | WeightFunction | None = None,
    guidance: float | None = None,
    steps: int | None = None,
    seed: int | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Measure a model of a campaign against held-out pictures, or test ones under `conditions="test"`.

    `model` is `ensemble`, `monolith`, `student` or `pretrain`. `routing`, `guidance`, `steps` and `seed` are
    those of the campaign's `sampling` by default. `settings` are those of `evaluate`, such as `metrics`,
    `samples` and `extractor`. Returns values by the metrics' names.
    """
    campaign = _opened(campaign)
    config = campaign.config.evaluate
    changed = type(config).parse({**config.model_dump(), **settings}, "evaluate()")
    generation = {"routing": routing, "guidance": guidance, "steps": steps, "seed": seed}
    point = measure_point(campaign, changed, model=model, generation=generation)
    assert point is not None  # only the other processes of several return nothing
    return {name: value.value for name, value in point.values.items()}


def _opened(campaign: Campaign | str | Path) -> Campaign:
    return campaign if isinstance(campaign, Campaign) else Campaign.open(campaign)
