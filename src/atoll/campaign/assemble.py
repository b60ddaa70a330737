"""The ensemble from what has been published, complete or partial."""

from dataclasses import dataclass

from atoll.base.console import say
from atoll.base.errors import PartitionError
from atoll.campaign.card_facts import about
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import Run, experts_of
from atoll.ensemble.card import Card, check_place, check_together
from atoll.ensemble.expert import published, read_card
from atoll.ensemble.folder import FolderWriter, defaults, parts_of
from atoll.ensemble.model_card import listed


@dataclass(frozen=True)
class Assembled:
    """What an assembly holds.

    Attributes:
        k: number of clusters.
        experts: numbers of the experts that are in it.
    """

    k: int
    experts: list[int]

    @property
    def missing(self) -> list[int]:
        """Numbers of the experts that are not published yet."""
        return [number for number in range(self.k) if number not in self.experts]


def assemble(campaign: Campaign) -> Assembled:
    """Write `ensemble/`: a folder that `AtollPipeline` loads, and `ensemble.json` that names its files.

    Parts that lie there unchanged are left alone, so an expert that comes later costs its own bytes only.

    Raises:
        PartitionError: nothing to assemble, or parts of different campaigns.
    """
    store = campaign.store
    k, numbers, router = _gather(campaign)
    store.sweep("ensemble")
    result = Assembled(k, numbers)
    writer = FolderWriter(store.sub("ensemble"), k)
    for number in numbers:
        writer.copy(store, Run("expert", number).network, number)
    writer.copy(store, Run("router").network)
    if not writer.describe({"scheduler": writer.scheduler()}, defaults(campaign.config.sampling)):
        say(f"ensemble: assembled already, experts {listed(numbers)} of {k}")
        return result
    facts = about(campaign, parts_of(writer.experts, router))
    writer.finish(facts, name=f"{facts['name']}/ensemble")
    say(f"ensemble: experts {listed(numbers)} of {k} and the router")
    warn_of_missing(result)
    return result


def warn_of_missing(assembled: Assembled) -> None:
    """Say which experts a partial ensemble lacks."""
    if assembled.missing:
        names = listed(assembled.missing)
        say(f"  warning: partial: experts {names} are missing; their share goes to the others")


def _gather(campaign: Campaign) -> tuple[int, list[int], Card]:
    """K, the numbers of the published experts, and the router's card; all belong together."""
    store = campaign.store
    if not store.exists("partition/partition.json"):
        raise PartitionError(
            f"{store.location} has no partition", "run 'atoll launch' or 'atoll partition' first"
        )
    cut = store.get_json("partition/partition.json")
    present = [n for n, run in enumerate(experts_of(cut["k"])) if published(store, run.network)]
    if not present or not published(store, "router/expert"):
        what = "no expert" if not present else "no router"
        raise PartitionError(f"{store.location} has {what} yet", "train first: atoll launch")
    folders = {f"experts/{n}": Run("expert", n).network for n in present}
    folders["router"] = Run("router").network
    cards = {name: read_card(store, folder) for name, folder in folders.items()}
    check_together(list(cards.values()))
    if cards["router"].partition != cut["hash"]:
        raise PartitionError(
            f"the parts in {store.location} were made for another partition", "put their own back"
        )
    for number in present:
        check_place(cards[f"experts/{number}"], number, Run("expert", number).folder)
    return cut["k"], present, cards["router"]
