"""Handing over: what shared pretraining has learned becomes the experts' initial weights."""

from typing import Any

import torch

from atoll.base.console import say
from atoll.base.errors import PartitionError
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import initial_network
from atoll.campaign.runs import Run
from atoll.campaign.settings.train import RunPlan
from atoll.ensemble.card import Card
from atoll.ensemble.expert import published, read_card, read_part
from atoll.ensemble.initial import FOLDER, MANIFEST, describe, read_manifest, write_initial
from atoll.networks.checkpoint import take_over
from atoll.store.store import Store


def hand_over(campaign: Campaign) -> None:
    """Write the pretrained, averaged weights into `islands/K/init/` of every expert that has none.

    An expert of another size than shared pretraining takes over what fits; the rest is drawn.

    Raises:
        PartitionError: shared pretraining is of another partition than an island.
        StoreError: shared pretraining has not published, is damaged, or an expert's are of another one.
    """
    card = read_card(campaign.store, "pretrain/expert")
    origin = _origin(card)
    waiting = []
    for number in range(campaign.config.partition.k):
        run = campaign.store.sub(Run("expert", number).folder)
        plan = RunPlan.read(run, "island.json")
        if plan.partition != card.partition:
            raise PartitionError(
                f"pretrain/ in {campaign.store.location} is of another partition than expert {number}",
                "put its own back",
            )
        if not _has(run, origin):
            waiting.append((number, run, plan))
    if not waiting:
        return
    weights = read_part(campaign.store, "pretrain/expert")[2]
    for number, run, plan in waiting:
        _write(campaign, number, run, plan, weights, origin)
    say(f"shared pretraining: its weights lie in {FOLDER}/ of {len(waiting)} islands")


def pretrain_finished(campaign: Campaign) -> bool:
    """Whether there is shared pretraining and it has published."""
    return bool(campaign.config.budget.pretrain) and published(campaign.store, "pretrain/expert")


def _has(run: Store, origin: dict[str, Any]) -> bool:
    """Whether an island has the weights of this seed; those of another one are refused."""
    if not run.exists(f"{FOLDER}/{MANIFEST}"):
        return False
    found = read_manifest(run)
    if found.kind != "pretrain" or found.origin != origin:
        raise PartitionError(
            f"{run.name(FOLDER)} holds the weights of another shared pretraining",
            "remove it, and run/ and expert/ beside it, to start the expert anew",
        )
    return True


def _write(
    campaign: Campaign,
    number: int,
    run: Store,
    plan: RunPlan,
    weights: dict[str, torch.Tensor],
    origin: dict[str, Any],
) -> None:
    network = initial_network(campaign.config.island(number)[0], plan.shape, plan.init_seed)
    fit = take_over(network, weights, "shared pretraining")
    if fit.drawn or fit.unused:
        for line in fit.lines(f"shared pretraining for expert {number}"):
            say(line)
    write_initial(run, network, describe(network, "pretrain", origin, plan.partition, fit))


def _origin(card: Card) -> dict[str, Any]:
    return {"weights_sha256": card.weights_sha256, "samples": card.samples, "train_flops": card.train_flops}
