"""What a model card says beside the cards of the parts: gathered from a campaign at any stage."""

from collections.abc import Sequence
from typing import Any

from atoll.base.errors import AtollError
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import Comparison
from atoll.campaign.report_table import of_clusters
from atoll.campaign.roles import BESIDE, SINGLE
from atoll.campaign.runs import experts_of, read_partition
from atoll.data.dataset import MANIFEST, WEIGHTS, DataSet
from atoll.model.checkpoint import Checkpoint

COMPARISON = Comparison.PLACE


def about(campaign: Campaign, parts: dict[str, str]) -> dict[str, Any]:
    """Name, data, partition, FLOPs of what was trained beside the experts, evaluation of these very parts.

    Args:
        campaign: a campaign with a partition.
        parts: digest of the weights of every part of the ensemble, as in `ensemble.json`, or of one dense
            model by its role.
    """
    store = campaign.store
    cut = read_partition(store)
    facts: dict[str, Any] = {"name": store.location.rstrip("/").rsplit("/", 1)[-1]}
    facts["partition"] = {key: getattr(cut, key) for key in ("method", "encoder", "sizes")}
    facts["data"] = {**_source(campaign, cut.k), "rows": cut.rows}
    if campaign.config.data.weighted and campaign.has_dataset():
        facts["data"]["weights"] = campaign.dataset().column(WEIGHTS).meta.producer
    facts["data"]["clusters"] = of_clusters(store)
    for role in SINGLE:
        if Checkpoint(store, f"{role}/expert").published:
            facts[f"{role}_flops"] = Checkpoint(store, f"{role}/expert").card.train_flops
    evaluation = _evaluation(campaign, parts)
    return {**facts, "evaluation": evaluation} if evaluation else facts


def prompts(campaign: Campaign, count: int) -> list[str]:
    """Texts to show the model with: those of the comparison, else captions of held-out rows."""
    if campaign.store.exists(COMPARISON):
        shown = Comparison.read(campaign.store, COMPARISON).prompts
        if shown:
            return shown[:count]
    if not campaign.has_dataset():
        return []
    dataset = campaign.dataset()
    rows = dataset.split("heldout") if "split" in dataset.column_names() else range(len(dataset))
    rows = rows if len(rows) else range(len(dataset))
    captions = dataset.table(["caption"]).column("caption").to_pylist()
    return _spread([captions[int(row)] for row in rows], count)


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """Some of the texts, none twice, from the whole of the list."""
    distinct = list(dict.fromkeys(text for text in texts if text))
    step = max(1, len(distinct) // max(1, count))
    return distinct[::step][:count]


def _source(campaign: Campaign, k: int) -> dict[str, Any]:
    """Name and licence of the source, from the data set or from an island's part of it."""
    places = [f"{run.folder}/data" for run in experts_of(k)]
    for prefix in [None, *places]:
        try:
            if prefix is None:
                dataset = campaign.dataset()
            elif campaign.store.exists(f"{prefix}/{MANIFEST}"):
                dataset = DataSet.open(campaign.store, prefix)
            else:
                continue
        except AtollError:
            continue
        source = dataset.manifest.source
        named = str(source.get("name", "")).rstrip("/").rsplit("/", 1)[-1]  # no path of this machine
        return {"source": named, **({"licence": source["licence"]} if source.get("licence") else {})}
    return {}


def _evaluation(campaign: Campaign, parts: dict[str, str]) -> dict[str, Any] | None:
    """The comparison, if it measured these very parts."""
    if not campaign.store.exists(COMPARISON):
        return None
    comparison = Comparison.read(campaign.store, COMPARISON)
    measured = comparison.parts
    names = parts if set(parts) <= set(BESIDE) else measured.keys() - set(BESIDE)
    if {name: measured.get(name) for name in names} != parts:
        return None
    keys = ("distance", "reference", "reference_rows", "samples", "steps", "guidance")
    return {
        "metric": {key: comparison.metric.get(key) for key in keys},
        "rows": [{"name": row.name, "distance": row.distance} for row in comparison.rows],
    }
