"""Experts as stock LoRA files: low-rank changes of the network that all of them started from.

Of an expert that was trained as such a change the file holds its own matrices. Of a whole expert every linear
layer's change is cut to a rank by its singular values (PHLoRA): all other tensors stay those of the network.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, PartitionError
from atoll.base.markdown import render
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import experts_of
from atoll.export.ensemble import ExportRequest, export_campaign
from atoll.export.stock import export_stock
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import README
from atoll.model.model_card import listed
from atoll.model.opened import output_folder, select_experts
from atoll.networks.families import family
from atoll.networks.lora import DOWN, UP, is_change
from atoll.networks.settings import LoraConfig
from atoll.store.store import Store
from atoll.store.tensors import to_blocks

NATIVE, PEFT = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"


def export_model(campaign: Campaign, request: ExportRequest) -> Path:
    """Write what is asked for: the ensemble, a single network, or experts as LoRA files."""
    if request.lora is not None:
        return export_lora(campaign, request, request.lora)
    return (export_campaign if request.model == "ensemble" else export_stock)(campaign, request)


@torch.no_grad()
def low_rank(expert: Checkpoint, rank: int) -> tuple[dict[str, Tensor], float, float]:
    """The change of an expert over the network that it started from; `ConfigError` if there is none.

    Two matrices a layer, by peft's names, whose product is the change; the share of the norm of the whole
    change that they hold; and that of what lies outside of linear layers.
    """
    card, (config, weights), device = expert.card, expert.read(), own_device()
    if (start := card.provenance.get("init", {}).get("kind")) not in ("pretrain", "checkpoint"):
        began = "was adopted as it is" if start == "adopted" else "started from scratch"
        what = f"{card.title} {began}, and is no change of a network"
        raise ConfigError(what, "--lora takes experts of a campaign with budget.pretrain or network.init")
    base = expert.beside(card.base or str(card.provenance["initial_weights"]))
    with torch.device("meta"):
        modules = family(card.family).load(config).named_modules()
    layers = {n: m for n, m in modules if isinstance(m, nn.Linear) and not is_change(n)}
    if rank > (widest := max(min(m.in_features, m.out_features) for m in layers.values())):
        raise ConfigError(f"--lora {rank} is over the network's width, {widest}", f"give {widest} or less")
    lora = LoraConfig.parse(config.get("lora") or {"rank": rank}, "config.json")
    rank, tensors, total, outside, kept = min(rank, lora.rank), dict[str, Tensor](), 0.0, 0.0, 0.0
    for name, first in base.items():
        layer = name.removesuffix(".weight")
        down, up = (weights.get(f"{layer}.{part}.weight") for part in (DOWN, UP))
        change = weights[name] - first if down is None or up is None else lora.scale * up @ down
        total += (norm := float(change.double().square().sum()))
        if layer == name or layer not in layers:
            outside += norm
        elif norm:
            # Half of each singular value on either side: then both matrices bear 16 bits alike.
            left, values, right = torch.linalg.svd(change.float().to(device), full_matrices=False)
            kept, roots = kept + float(values[:rank].double().square().sum()), values[:rank].sqrt()
            up, down, lacking = left[:, :rank] * roots, roots[:, None] * right[:rank], rank - len(roots)
            # A layer narrower than the rank is filled up: peft wants one rank for all.
            tensors[f"{layer}.{DOWN}.weight"] = nn.functional.pad(down, (0, 0, 0, lacking)).cpu()
            tensors[f"{layer}.{UP}.weight"] = nn.functional.pad(up, (0, lacking)).cpu()
    if not tensors:
        raise ConfigError(f"{card.title} has no linear layer that changed", "train it, or leave it out")
    kept, outside = ((part / total) ** 0.5 for part in (kept, outside))
    return {name: value.contiguous() for name, value in tensors.items()}, kept, outside


def export_lora(campaign: Campaign, request: ExportRequest, rank: int) -> Path:
    """Write a folder for each expert: as diffusers reads it, or peft where a class has no loader."""
    earlier = (README, NATIVE, PEFT, PEFT_CONFIG) if any(request.to.glob("expert-*")) else ()
    store, root = campaign.store, output_folder(request.to, "LoRA", earlier)
    if request.model != "ensemble" or request.key is not None or request.encoders != "auto":
        raise ConfigError("--lora goes without --model, --sign and --encoders", "leave them out")
    parts = [Checkpoint(store, run.network) for run in experts_of(campaign.config.partition.k)]
    if not (there := [number for number, part in enumerate(parts) if part.published]):
        raise PartitionError(f"{store.location} has no expert yet", "train first: atoll launch")
    rows, named = list[dict[str, Any]](), select_experts(request.experts, there)
    left_out = [number for number in named if number in campaign.config.quarantine]
    chosen = [number for number in named if number not in left_out]
    if left_out and (request.experts != "auto" or not chosen):
        raise ConfigError(f"experts {listed(left_out)} are in quarantine", "name others: --experts")
    for number in chosen if campaign.config.trusted else ():
        parts[number].check_trusted(campaign.config.trusted)
    if len({parts[number].card.provenance.get("initial_weights") for number in chosen}) > 1:
        raise ConfigError("the experts started from several networks", "name those of one network: --experts")
    changes = [low_rank(parts[number], rank) for number in chosen]  # all, before anything is written
    first = parts[chosen[0]].card
    native = hasattr(kind := family(first.family).network_class(), "load_lora_adapter")
    prefix, file = ("transformer.", NATIVE) if native else ("base_model.model.", PEFT)
    for path in root.glob("expert-*"):  # of an earlier export, whose files alone lie there
        shutil.rmtree(path)
    folder = Store.open(root, create=True)
    for number, (matrices, kept, outside) in zip(chosen, changes, strict=True):
        place, names = f"expert-{number}", sorted({name.rpartition(".lora_")[0] for name in matrices})
        rank = len(matrices[f"{names[0]}.{DOWN}.weight"])  # an expert's own may be less than was asked for
        if not native:
            settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
            folder.put_json(f"{place}/{PEFT_CONFIG}", settings)
        tensors = {f"{prefix}{name}": value for name, value in matrices.items()}
        size, _ = folder.write(f"{place}/{file}", to_blocks(tensors, {"format": "pt"}))
        rows.append({"number": number, "kept": kept, "outside": outside, "bytes": size})
        lost = f", {outside:.1%} is outside of linear layers" * (outside > 0)
        say(f"expert {number}: {kept:.1%} of the norm of its change at rank {rank}{lost}")
    values = {"rank": rank, "rows": rows, "init": first.provenance["init"], "name": request.name}
    values |= {"native": native, "kind": kind.__name__, "licence": request.licence}
    folder.put(README, render("lora.md", "atoll.export", **values).encode())
    say(f"wrote {root}: {len(rows)} LoRA files; see {README}")
    return root
