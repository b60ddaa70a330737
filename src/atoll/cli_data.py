"""The commands that make, extend and check a campaign's data set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from atoll.base.console import say
from atoll.base.errors import AtollError
from atoll.base.options import LOCAL, SETS

CAMPAIGN = click.argument("campaign", metavar="CAMPAIGN")
WORKERS = click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=1,
    help="Processes of this machine that share the work; the same command elsewhere shares it too.",
)


@click.group()
def data() -> None:
    """Make, extend and check the campaign's data set."""


@data.command()
@CAMPAIGN
@WORKERS
@SETS
def ingest(campaign: str, workers: int, sets: tuple[str, ...]) -> None:
    """Turn data.source (folders, parquet, tar, hub data sets, several) into the data set at data.path."""
    from atoll.campaign.prepare import ingest_stage

    _work(ingest_stage, campaign, workers, sets)


@data.command()
@CAMPAIGN
@WORKERS
@SETS
def embed(campaign: str, workers: int, sets: tuple[str, ...]) -> None:
    """Add the features that the partition clusters."""
    from atoll.campaign.prepare import embed_stage

    _work(embed_stage, campaign, workers, sets)


@data.command("prepare")
@CAMPAIGN
@WORKERS
@SETS
def prepare_(campaign: str, workers: int, sets: tuple[str, ...]) -> None:
    """Do whatever is missing of ingest, embed, dedupe and encode, as the settings ask for them."""
    from atoll.campaign.prepare import prepare_data

    _work(prepare_data, campaign, workers, sets)


@data.command()
@CAMPAIGN
@SETS
def dedupe(campaign: str, sets: tuple[str, ...]) -> None:
    """Leave rows out that show what another row shows, as data.dedupe says; before the partition."""
    from atoll.campaign.prepare import dedupe_stage

    dedupe_stage(_open(campaign, sets))


@data.command()
@CAMPAIGN
@WORKERS
@SETS
def encode(campaign: str, workers: int, sets: tuple[str, ...]) -> None:
    """Add the latents and text states that the networks train on."""
    from atoll.campaign.prepare import encode_stage

    _work(encode_stage, campaign, workers, sets)


@data.command()
@CAMPAIGN
@click.option("--page", type=LOCAL, help="HTML file to write, with pictures; it needs nothing else.")
def show(campaign: str, page: Path | None) -> None:
    """What the data set holds: sizes, captions, licences, splits, rejects, duplicates, columns."""
    from atoll.base.console import Progress
    from atoll.data.contents import contents, lines

    opened = _open(campaign)
    found = contents(opened.data_store(), progress=Progress("rows", 1, unit="shards"))
    for line in lines(found):
        say(line)
    if page is not None:
        from atoll.report.data_page import write_data_page

        write_data_page(opened, found, page)
        say(f"wrote {page}")


@data.command()
@CAMPAIGN
def audit(campaign: str) -> None:
    """Check every file of the data set against its size and hash."""
    from atoll.data.audit import audit as check

    problems = check(_open(campaign).dataset())
    for problem in problems:
        say(f"problem: {problem}")
    if problems:
        what = f"{len(problems)} problems in the data set, the first: {problems[0].rstrip('.')}"
        raise AtollError(what, "make the named files again")
    say("no problems")


def _work(stage: Callable[[Any], object], campaign: str, workers: int, sets: tuple[str, ...]) -> None:
    """Do a data stage, or have several processes run this very command."""
    opened = _open(campaign, sets)
    if workers == 1:
        stage(opened)
        return
    from atoll.launch.submit import run_workers

    command = click.get_current_context().info_name or ""
    run_workers(workers, "data", command, campaign, *(part for one in sets for part in ("--set", one)))


def _open(campaign: str, sets: tuple[str, ...] = ()) -> Any:
    from atoll.campaign.folder import Campaign

    return Campaign.open(campaign, sets)
