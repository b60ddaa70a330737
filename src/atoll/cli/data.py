"""The commands that make, extend and check a campaign's data set."""

from pathlib import Path

import click

from atoll.base.console import say
from atoll.base.errors import AtollError
from atoll.base.part import Part
from atoll.cli.common import CAMPAIGN, LOCAL, ON, PART, SETS, WORKERS, open_campaign, work_is_left


@click.group()
def data() -> None:
    """Make, extend and check the campaign's data set."""


@data.command()
@CAMPAIGN
@SETS
def dedupe(campaign: str, sets: tuple[str, ...]) -> None:
    """Leave rows out that show what another row shows, as data.dedupe says; before the partition."""
    from atoll.campaign.prepare import dedupe_stage

    dedupe_stage(open_campaign(campaign, sets))


@data.command()
@CAMPAIGN
@click.option("--page", type=LOCAL, help="HTML file to write, with pictures; it needs nothing else.")
@click.option("--card", is_flag=True, help="Write the data set's README.md for the Hugging Face hub.")
def show(campaign: str, page: Path | None, card: bool) -> None:
    """What the data set holds: sizes, captions, licences, splits, rejects, duplicates, columns."""
    from atoll.data.contents import contents, lines

    opened = open_campaign(campaign)
    summary = contents(opened.data_store())
    for line in lines(summary):
        say(line)
    if page is not None:
        from atoll.report.data_page import write_data_page

        write_data_page(opened, summary, page)
        say(f"wrote {page}")
    if card:
        from atoll.report.data_page import write_data_card

        say(f"wrote {write_data_card(opened, summary)}")


@data.command()
@CAMPAIGN
def audit(campaign: str) -> None:
    """Check every file of the data set against its size and hash."""
    from atoll.data.contents import audit as check

    problems = check(open_campaign(campaign).dataset())
    for problem in problems:
        say(f"problem: {problem}")
    if problems:
        fix = "columns: atoll data embed, encode; others: restore them, or remove the folder and ingest again"
        raise AtollError(f"{len(problems)} problems in the data set, the first: {problems[0]}", fix)
    say("no problems")


SHARDED = {
    "ingest": "Turn data.source (folders, parquet, tar, hub data sets) into the data set at data.path.",
    "caption": "Describe images that have no caption with the image-text model data.captioner.model.",
    "embed": "Add the features that the partition clusters.",
    "encode": "Add the latents and text states that the networks train on.",
    "prepare": "Do whatever is missing of ingest, caption, embed, dedupe and encode, by the settings.",
}
for stage, summary in SHARDED.items():

    @data.command(stage, help=summary)
    @CAMPAIGN
    @WORKERS
    @PART
    @ON
    @SETS
    @click.pass_context
    def _sharded(
        context: click.Context, campaign: str, workers: int, part: Part | None, on: str, sets: tuple[str, ...]
    ) -> None:
        name, opened = str(context.command.name), open_campaign(campaign, sets)
        if name == "prepare" and opened.is_partitioned:
            return say("data set: finished already, and cut into clusters")
        from atoll.campaign import prepare
        from atoll.launch.submit import launcher

        def share(command: str) -> bool:
            options = [word for setting in sets for word in ("--set", setting)]
            words = ("data", command, opened.store.location, *options)
            return work_is_left(opened, workers, part, on, *words)

        # A queue is given all stages at once; where workers are waited for, each ends within this process.
        if name == "prepare" and (part is not None or on == "local" or launcher(on).WAITS):
            prepare.prepare_data(opened, part, share)
        elif share(name):
            getattr(prepare, f"{name}_stage")(opened, part)
