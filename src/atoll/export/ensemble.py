"""The export stage: a folder that holds all a pipeline needs, for a server, a colleague or a hub."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from atoll.base.console import say
from atoll.base.pictures import grid, png
from atoll.campaign.assemble import Assembled, warn_of_missing
from atoll.campaign.card_facts import about, prompts
from atoll.campaign.folder import Campaign
from atoll.export.encoders import by_name, check_encoders, may_be_copied, size_of
from atoll.export.pipeline import AtollPipeline
from atoll.model.card import Card
from atoll.model.checkpoint import use_default_permissions
from atoll.model.folder import (
    MANIFEST,
    FolderWriter,
    defaults,
    read_manifest,
    verify_folder,
)
from atoll.model.model_card import listed
from atoll.model.opened import Chosen, inspect_folder, mark_incomplete, output_folder, select_experts
from atoll.store.signatures import SUFFIX, public_key, sign
from atoll.store.store import Store

Encoders = Literal["auto", "copy", "name"]
SHOWN = 8


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        to: folder to write.
        experts: numbers, or "auto" for all that are assembled.
        encoders: "copy" takes text encoder and VAE along, "name" leaves them to be found by name, "auto"
            copies those whose licence is known to allow it and that have at most 2 GB.
        picture: whether to sample a picture for the model card.
        licence: of the weights, for the model card.
        key: private key that signs the folder.
        model: `ensemble`; the others go as stock pipelines (`export_stock.export_stock`).
    """

    to: Path
    experts: Chosen = "auto"
    encoders: Encoders = "auto"
    picture: bool = True
    licence: str | None = None
    model: str = "ensemble"
    key: Path | None = None


def export_campaign(campaign: Campaign, request: ExportRequest) -> Path:
    """Write the folder; what lies there unchanged from an earlier export is left alone.

    Raises:
        ConfigError: the folder holds something else, an expert or an encoder that is not there.
        StoreError: not assembled, or a file is not what the manifest says.
    """
    store, root = campaign.store, output_folder(request.to)
    if request.key is not None:
        public_key(request.key)  # a wrong one is told now
    manifest = read_manifest(store)
    chosen = select_experts(request.experts, manifest.experts)
    facts = about(campaign, manifest.parts) | ({"licence": request.licence} if request.licence else {})
    if len(chosen) < len(manifest.experts):
        facts.pop("evaluation", None)  # what was measured is not what is exported
    parts = manifest.checkpoints(store.sub("ensemble"), chosen)
    verify_folder(store.sub("ensemble"), manifest, parts)
    router = parts["router"].card
    networks = {} if request.encoders == "name" else by_name(router, (), (), campaign.config.encoders)
    check_encoders(router, networks.get("text_encoder"), networks.get("vae"))
    mark_incomplete(root)
    Store.open(root).delete(MANIFEST + SUFFIX)  # of an earlier export
    folder = Store.open(root)
    folder.sweep()
    writer = FolderWriter(folder, manifest.k)
    for part in parts.values():
        writer.copy(part)
    components = copy_encoders(root, router, request.encoders, networks)
    generation = defaults(campaign.config.sampling)
    writer.describe({**components, "scheduler": writer.scheduler(campaign.config.sampling)}, generation)
    writer.finish(facts, name=root.name)
    inspect_folder(root, "auto")
    if request.picture:
        picture, facts["picture"] = _picture(campaign, root)
        writer.finish(facts, picture, root.name)
    if request.key is not None:
        sign(Store.open(root), MANIFEST, request.key)
    say(f"wrote {root}: experts {listed(chosen)} of {manifest.k} and the router")
    warn_of_missing(Assembled(manifest.k, list(chosen)))
    return root


def copy_encoders(
    root: Path, card: Card, how: Encoders, components: dict[str, Any], places: Mapping[str, str] | None = None
) -> dict[str, list[str | None]]:
    """Write the encoders that go along; what `model_index.json` says of each of the three components.

    Args:
        root: the folder.
        card: says what made latents and text states.
        how: which go along.
        found: those that were loaded.
        places: their folders, where these are not called as they are.
    """
    names = ("vae", "text_encoder", "tokenizer")
    sizes = {name: size_of(part) for name, part in components.items() if name != "tokenizer"}
    result: dict[str, list[str | None]] = {}
    for name in names:
        encoder = (card.latents if name == "vae" else card.text) or {"name": "none"}
        place = root / (places or {}).get(name, name)
        shutil.rmtree(place, ignore_errors=True)
        result[name] = [None, None]
        size = sizes.get("vae" if name == "vae" else "text_encoder", 0)
        why = (
            "asked for" if how == "name" else None if how == "copy" else may_be_copied(encoder["name"], size)
        )
        if name in components and components[name] is not None and why is None:
            components[name].save_pretrained(str(place))
            use_default_permissions(place)
            library = "diffusers" if name == "vae" else "transformers"
            result[name] = [library, type(components[name]).__name__]
        elif encoder["name"] != "none" and name != "tokenizer":
            say(f"  {name} stays outside ({why}): it will be looked for as {encoder['name']!r}")
    return result


def _picture(campaign: Campaign, root: Path) -> tuple[bytes, dict[str, Any]]:
    """Load what was written, and sample it: a PNG, and what the model card says below it."""
    pipe = AtollPipeline.from_pretrained(root, encoders=campaign.config.encoders)
    pipe.set_progress_bar_config(disable=True)
    condition, given = pipe.card.condition, prompts(campaign, SHOWN)
    arguments: dict[str, Any] = {"num_images_per_prompt": SHOWN}
    if condition == "text":
        given = given or [""]
        arguments = {"prompt": given, "truncate_prompt": True}
    elif condition == "class":
        classes = pipe.card.shape.classes
        given = [str(label) for label in range(0, classes, max(1, classes // SHOWN))][:SHOWN]
        arguments = {"class_labels": [int(label) for label in given]}
    count = SHOWN if condition == "none" else len(given)
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    pictures, _ = pipe(generator=generators, return_dict=False, **arguments)
    sheet = grid(pictures, columns=4, scale=max(1, 128 // pictures[0].width))
    settings = {
        "steps": pipe.config.num_inference_steps,
        "routing": pipe.config.routing,
        "seed": f"0 to {count - 1}",
    }
    if condition == "none":
        return png(sheet), settings
    return png(sheet), {"prompts": given, "guidance": pipe.config.guidance_scale, **settings}
