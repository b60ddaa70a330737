"""The export stage: a folder that holds all a pipeline needs, for a server, a colleague or a hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.base.console import say
from atoll.base.pictures import grid, png
from atoll.campaign.assemble import assembled_manifest, warn_of_missing
from atoll.campaign.card_facts import model_card_facts, prompts
from atoll.campaign.folder import Campaign
from atoll.export.call import quiet_loading
from atoll.export.encoders import Copied, by_name, check_encoders, copy_encoders
from atoll.export.pipeline import AtollPipeline
from atoll.model.folder import FolderWriter, defaults
from atoll.model.model_card import listed
from atoll.model.opened import Chosen, inspect_folder, mark_incomplete, output_folder, select_experts
from atoll.store.manifest import entry_of
from atoll.store.signatures import check_key, sign

SHOWN = 8
"""Pictures for the model card."""


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
        model: `ensemble`; the others go as stock pipelines (`stock.export_stock`).
        push: name on the hub under which the card's program loads the folder; see `push_folder`.
        lora: rank of LoRA files of the experts, in place of all else (`lora.export_lora`).
    """

    to: Path
    experts: Chosen = "auto"
    encoders: Copied = "auto"
    picture: bool = True
    licence: str | None = None
    model: str = "ensemble"
    key: Path | None = None
    push: str | None = None
    lora: int | None = None

    @property
    def name(self) -> str:
        """What the card's program calls the folder."""
        return self.push or self.to.resolve().name


def export_campaign(campaign: Campaign, request: ExportRequest) -> Path:
    """Write the folder; what lies there unchanged from an earlier export is left alone.

    `ConfigError` where it holds something else, or for an expert or encoder that is not there.
    """
    store, root = campaign.store, output_folder(request.to)
    if request.key is not None:
        check_key(request.key)  # a wrong one is told now
    manifest = assembled_manifest(campaign)
    chosen = select_experts(request.experts, manifest.experts)
    facts = model_card_facts(campaign, manifest.parts)
    facts |= {"licence": request.licence} if request.licence else {}
    if len(chosen) < len(manifest.experts):
        facts.pop("evaluation", None)  # what was measured is not what is exported
    parts = manifest.checkpoints(store, "ensemble/", chosen)
    for part in parts.values() if campaign.config.trusted else ():
        part.check_trusted(campaign.config.trusted)
    manifest.check_indices(store, "ensemble")
    router = parts["router"].card
    networks = {} if request.encoders == "name" else by_name(router, allowed=campaign.config.encoders)
    check_encoders(router, networks)

    folder = mark_incomplete(root)
    folder.sweep()
    writer = FolderWriter(folder, manifest.k)
    for part in parts.values():
        writer.copy(part)
    components = copy_encoders(root, router, request.encoders, networks, {})
    sampling = campaign.config.sampling
    writer.describe({**components, "scheduler": writer.scheduler(sampling)}, defaults(sampling))
    writer.finish(facts, name=request.name)
    # What was written is read as a stranger would, before anything is said of it.
    inspect_folder(root, "auto")
    if request.picture:
        picture, facts["picture"] = _picture(campaign, root)
        # Once more: the model card shows the picture, and only a finished folder can be sampled.
        writer.finish(facts, picture, request.name)
    if request.key is not None:
        others = (entry_of(folder, "", name) for name in folder.list() if "/" not in name)
        sign(folder, "", {entry.path: entry.sha256 for entry in (*writer.entries, *others)}, request.key)
    say(f"wrote {root}: experts {listed(chosen)} of {manifest.k} and the router")
    warn_of_missing([number for number in range(manifest.k) if number not in chosen])
    return root


def _picture(campaign: Campaign, root: Path) -> tuple[bytes, dict[str, Any]]:
    """Load what was written, and sample it: a PNG, and what the model card says below it."""
    with quiet_loading():
        pipe = AtollPipeline.from_pretrained(root, encoders=campaign.config.encoders)
    pipe.set_progress_bar_config(disable=True)
    if pipe.card.condition == "text":
        given = prompts(campaign, SHOWN) or [""]
        arguments: dict[str, Any] = {"prompt": given, "truncate_prompt": True}
    elif pipe.card.condition == "class":
        classes = pipe.card.shape.classes
        given = [str(label) for label in range(0, classes, max(1, classes // SHOWN))][:SHOWN]
        arguments = {"class_labels": [int(label) for label in given]}
    else:
        given, arguments = [""] * SHOWN, {"num_images_per_prompt": SHOWN}
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(given))]
    pictures, _ = pipe(generator=generators, return_dict=False, **arguments)
    sheet = grid(pictures, columns=4, scale=max(1, 128 // pictures[0].width))
    of_condition = {"prompts": given, "guidance": pipe.config.guidance_scale}
    return png(sheet), {
        **(of_condition if pipe.card.condition != "none" else {}),
        "steps": pipe.config.num_inference_steps,
        "routing": pipe.config.routing,
        "seed": f"0 to {len(given) - 1}",
    }
