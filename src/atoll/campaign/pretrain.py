"""Handing over: what shared pretraining has learned becomes the experts' initial weights."""

from functools import cache

from atoll.base.console import say
from atoll.base.errors import PartitionError
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import initial_network
from atoll.campaign.runs import RunPlan, experts_of
from atoll.model.checkpoint import Checkpoint
from atoll.model.initial import FOLDER, lay_initial


def copy_initial_weights(campaign: Campaign) -> None:
    """Write the pretrained, averaged weights into `islands/K/init/` of every expert that has none.

    An expert of another size than shared pretraining takes over what fits; the rest is drawn.

    Raises:
        PartitionError: shared pretraining is of another partition than an island.
        StoreError: shared pretraining has not published, is damaged, or an expert's are of another one.
    """
    store = campaign.store
    pretrained = Checkpoint(store, "pretrain/expert")
    card = pretrained.card
    origin = {name: getattr(card, name) for name in ("weights_sha256", "samples", "train_flops")}
    weights, count = cache(lambda: pretrained.read()[1]), 0
    for number, run in enumerate(experts_of(campaign.config.partition.k)):
        plan = RunPlan.read(store, run.plan)
        if plan.partition != card.partition:
            raise PartitionError(
                f"pretrain/ in {store.location} is of another partition than expert {number}",
                "put its own back",
            )
        network = initial_network(campaign.config.island(number)[0], plan.shape, plan.init_seed)
        island, whose = store.sub(run.folder), "shared pretraining"
        fit = lay_initial(island, network, "pretrain", origin, plan.partition, weights, whose)
        if fit is None:
            continue
        count += 1
        for line in fit.lines(f"{whose} for {run.name}") if fit.drawn or fit.unused else ():
            say(line)
    if count:
        say(f"shared pretraining: its weights lie in {FOLDER}/ of {count} islands")


def pretrain_finished(campaign: Campaign) -> bool:
    """Whether there is shared pretraining and it has published."""
    return bool(campaign.config.budget.pretrain) and Checkpoint(campaign.store, "pretrain/expert").published
