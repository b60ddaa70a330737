"""Single networks beside the ensemble: the monolith, the student, shared pretraining."""

from collections.abc import Sequence

from atoll.base.errors import StoreError
from atoll.campaign.folder import Campaign
from atoll.campaign.roles import BESIDE
from atoll.model.card import Card, check_together
from atoll.model.checkpoint import Checkpoint


def single_network(campaign: Campaign, name: str) -> str:
    """Folder of one of them; `StoreError` if it is not published."""
    folder = f"{name}/expert"
    if not Checkpoint(campaign.store, folder).published:
        where = campaign.store.location
        raise StoreError(f"{where} has no {name} yet", f"train it: atoll train {name} {where}")
    return folder


def single_cards(campaign: Campaign, router: Card, names: Sequence[str] = BESIDE) -> dict[str, Card]:
    """Cards of those that are published; `PartitionError` if one does not belong to this router."""
    there = [name for name in names if Checkpoint(campaign.store, f"{name}/expert").published]
    cards = {name: Checkpoint(campaign.store, f"{name}/expert").card for name in there}
    check_together([router, *cards.values()])
    return cards
