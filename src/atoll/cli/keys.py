"""`atoll keys`: who made a model."""

from pathlib import Path

import click

from atoll.base.console import say
from atoll.cli.common import LOCAL


@click.group()
def keys() -> None:
    """Keys that say who made a model: make one, sign with it."""


@keys.command("new")
@click.argument("key", metavar="FILE", type=LOCAL)
def new_key(key: Path) -> None:
    """Write a new private key, and print the public one to give away."""
    from atoll.store.signatures import new_key as make

    say(make(key))


@keys.command("show")
@click.argument("key", metavar="FILE", type=LOCAL)
def show_key(key: Path) -> None:
    """Print the public key of a private one."""
    from atoll.store.signatures import public_key

    say(public_key(key))


@keys.command("sign")
@click.argument("folder", metavar="FOLDER")
@click.option("--key", type=LOCAL, required=True, help="Private key.")
def sign(folder: str, key: Path) -> None:
    """Sign an export, all that a campaign has published, or the folder of one run."""
    from atoll.store.signatures import sign_folder

    for name in sign_folder(folder, key):
        say(f"signed {name}")
