"""How a command ends: what it says of an error, and its exit code."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import click

from atoll.base.errors import AtollError, PeerFailed, first_line

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
        part = (error.name or "").startswith("atoll.")
        fix = "install all of it" if part else f"pip install {(error.name or '').partition('.')[0]}"
        click.echo(f"error: this Atoll is without {error.name}: {fix}", err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; run the same command again to go on", err=True)
        return 130
    except Exception as error:
        click.echo(f"error: {unexpected(error)} (traceback: {_kept_traceback()})", err=True)
        return 1
    return 0


def unexpected(error: Exception) -> str:
    """One line for an error that no part of Atoll foresaw, and what to do about it."""
    reason = first_line(error)[:300]
    if isinstance(error, MemoryError):
        return "there is not enough memory: ask for less at once, or for fewer samples or steps"
    if isinstance(error, RecursionError):
        return "something is nested too deeply: look at the last file that was read"
    if isinstance(error, OSError):
        return f"{reason}: check the path, its permissions and the free space"
    return f"{type(error).__name__}: {reason}: please report it with the traceback"


def _kept_traceback() -> str:
    """Path of a file that holds the traceback; where none can be written, it is printed instead."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="atoll-", suffix=".traceback", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exc(file=file)
        return file.name
    except OSError:
        traceback.print_exc()
        return "above"
