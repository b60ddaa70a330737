"""How a command ends: what it says of an error, and its exit code."""

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import click

from atoll.base.errors import AtollError, PeerFailed

ASIDE = 3.0
"""Seconds that a process holds back an error that another one of the same run has to tell: what all meet
alike is told by the first, a collective that fails by whoever made it fail. `torchrun` then ends the rest."""


def ended(run: Callable[[], Any]) -> int:
    """Run a command and tell its errors.

    Returns:
        The exit code.
    """
    try:
        run()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except AtollError as error:
        if not error.alone:
            beside = os.environ.get("LOCAL_RANK", "0") != "0"
            time.sleep(ASIDE * (beside + isinstance(error, PeerFailed)))
        click.echo(f"error: {error}", err=True)
        return int(getattr(error, "exit_code", 2))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        click.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        return 2
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("atoll."):
            raise
        click.echo(f"error: this Atoll is without {error.name}: install all of it", err=True)
        return 2
    except (OSError, MemoryError, RecursionError) as error:
        reason = " ".join(str(error).split()) or "too much was asked for"
        click.echo(f"error: {type(error).__name__}: {reason} (ATOLL_TRACEBACK=1 tells where)", err=True)
        if os.environ.get("ATOLL_TRACEBACK"):
            traceback.print_exc()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; run the same command again to go on", err=True)
        return 130
    return 0
