"""The commands that put a folder behind HTTP."""

import json
from pathlib import Path
from typing import Any

import click

from atoll.base.console import say
from atoll.base.errors import extra
from atoll.cli.common import CAMPAIGN, LOCAL, SETS, open_campaign, with_options

KEYS = click.option("--keys", "keyring", type=LOCAL, help="File of bearer keys, one a line; also ATOLL_KEYS.")
HOST = click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
PORT = click.option("--port", type=int, help="0 takes a free one.  [default: 8000]")


@click.command()
@click.argument("source", metavar="DIR")
@HOST
@PORT
@KEYS
@click.option("--trusted", multiple=True, help="Key or certificate (PEM) that must have signed this.")
@SETS
def serve(
    source: str, keyring: Path | None, trusted: tuple[str, ...], sets: tuple[str, ...], **address: Any
) -> None:
    """Serve a campaign, an exported folder or a hub name: OpenAI's images API, and a playground."""
    with extra("serve", "the server needs further packages"):
        from atoll.serve.app import read_keys
        from atoll.serve.server import serve as run
    from atoll.serve.settings import ServeSettings

    run(source, ServeSettings.of(with_options(sets, "", **address)), read_keys(keyring), trusted or None)


@click.command()
@CAMPAIGN
@click.option("--once", type=LOCAL, metavar="FILE", help="Write one page of this moment, and end.")
@HOST
@PORT
@KEYS
@SETS
def dashboard(
    campaign: str, once: Path | None, keyring: Path | None, sets: tuple[str, ...], **address: Any
) -> None:
    """How the islands stand, live in a browser while they train anywhere; it only reads."""
    opened = open_campaign(campaign)
    if once is not None:
        from atoll.report.page import Dashboard

        Dashboard(opened).write(once)
        say(f"wrote {once}")
        return
    with extra("serve", "the dashboard needs further packages"):
        from atoll.serve.app import read_keys
        from atoll.serve.server import watch
    from atoll.serve.settings import ServeSettings

    watch(opened, ServeSettings.of(with_options(sets, "", **address)), read_keys(keyring))


def size_up(source: str, sets: tuple[str, ...], as_json: bool) -> None:
    """What `atoll plan DIR --serve` does: memory and speed by the number of experts on the device."""
    from atoll.base.table import text
    from atoll.serve.settings import ServeSettings
    from atoll.serve.sizing import sizes

    table = sizes(source, ServeSettings.of(sets))
    say(json.dumps(table.records, indent=2) if as_json else "\n".join(text(table)))
