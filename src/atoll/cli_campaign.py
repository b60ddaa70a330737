"""What commands of all groups begin with: the campaign that is named, opened."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # it takes a second to import
    from atoll.campaign.folder import Campaign

CAMPAIGN = click.argument("campaign", metavar="CAMPAIGN")


def open_campaign(campaign: str, sets: tuple[str, ...] = ()) -> "Campaign":
    """Open a campaign with `--set` overrides."""
    from atoll.campaign.folder import Campaign

    return Campaign.open(campaign, sets)
