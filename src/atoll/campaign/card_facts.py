"""What a model card says beside the cards of the parts: gathered from a campaign at any stage."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from atoll.base.errors import AtollError
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import SAID, Comparison
from atoll.campaign.report_table import of_clusters
from atoll.campaign.roles import BESIDE, SINGLE
from atoll.campaign.runs import experts_of, read_partition
from atoll.model.card import Card, check_together
from atoll.model.checkpoint import Checkpoint

COMPARISON = Comparison.PLACE


def single_cards(campaign: Campaign, router: Card, names: Sequence[str] = BESIDE) -> dict[str, Card]:
    """Cards of the published single networks; `PartitionError` if one does not belong to this router."""
    networks = {name: Checkpoint(campaign.store, f"{name}/expert") for name in names}
    cards = {name: network.card for name, network in networks.items() if network.published}
    check_together([router, *cards.values()])
    return cards


def model_card_facts(campaign: Campaign, parts: dict[str, str]) -> dict[str, Any]:
    """Name, data, partition, FLOPs of what was trained beside the experts, evaluation of these very parts.

    `parts` are digests of weights: of the ensemble's, as in `ensemble.json`, or of a network by its role.
    """
    from atoll.data.dataset import WEIGHTS, DataSet

    store, partition = campaign.store, read_partition(campaign.store)
    facts: dict[str, Any] = {"name": store.location.rstrip("/").rsplit("/", 1)[-1]}
    facts["partition"] = {key: getattr(partition, key) for key in ("method", "encoder", "sizes")}
    facts |= {"data": {}, "origin": bool(campaign.config.origin)}
    # From the data set or, on a machine that has islands only, from an island's part of it.
    for place in (None, *(f"{run.folder}/data" for run in experts_of(partition.k))):
        with suppress(AtollError):
            source = (DataSet.open(store, place) if place else campaign.dataset()).manifest.source
            named = str(source.get("name", "")).rstrip("/").rsplit("/", 1)[-1]  # no path of this machine
            facts["data"] |= {"source": named}
            facts["data"] |= {"licence": source["licence"]} if source.get("licence") else {}
            break
    facts["data"]["rows"] = partition.rows
    if campaign.config.data.weighted and campaign.has_dataset():
        facts["data"]["weights"] = campaign.dataset().column(WEIGHTS).meta.producer
    facts["data"]["clusters"] = of_clusters(store)
    networks = {role: Checkpoint(store, f"{role}/expert") for role in SINGLE}
    dense = {role: network.card for role, network in networks.items() if network.published}
    facts |= {f"{role}_flops": card.train_flops for role, card in dense.items()}

    # The comparison counts only if it measured these very parts, and not those of an earlier assembly.
    if store.exists(COMPARISON):
        comparison = Comparison.read(store, COMPARISON)
        measured = comparison.parts
        names = parts if set(parts) <= set(BESIDE) else measured.keys() - set(BESIDE)
        if {name: measured.get(name) for name in names} == parts and SAID.keys() <= comparison.metric.keys():
            facts["evaluation"] = {
                "metric": {key: comparison.metric[key] for key in SAID},
                "rows": [{"name": row.name, "distance": row.distance} for row in comparison.rows],
                # A student is drawn as it was trained to be, whatever steps and guidance the others have.
                "own": {n: dense[n].sampling for n in dense if dense[n].weights_sha256 == measured.get(n)},
            }
    return facts


def prompts(campaign: Campaign, count: int) -> list[str]:
    """Texts to show the model with: those of the comparison, else distinct captions of held-out rows."""
    if campaign.store.exists(COMPARISON) and (shown := Comparison.read(campaign.store, COMPARISON).prompts):
        return shown[:count]
    if not campaign.has_dataset():
        return []
    import numpy as np

    from atoll.data.columns import some_rows

    dataset = campaign.dataset()
    rows = dataset.split("heldout") if dataset.is_written("split") else np.arange(0)
    # A hundred tell enough: the captions of a large data set are gigabytes.
    some = some_rows(rows if len(rows) else np.arange(len(dataset)), 100)
    distinct = list(dict.fromkeys(filter(None, dataset.take(some).column("caption").to_pylist())))
    return distinct[:: max(1, len(distinct) // max(1, count))][:count]  # from the whole of the list
