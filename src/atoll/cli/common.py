"""What commands of several groups share: the named campaign, `--set`, and paths of this machine."""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.base.errors import AtollError
from atoll.base.part import Part

if TYPE_CHECKING:  # they take a second to import
    from atoll.campaign.folder import Campaign


class Finite(click.FloatRange):
    """A number within bounds; NaN, which is below and above none, is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; a usage error that names the option without one."""
        number: float = super().convert(value, param, ctx)
        return number if abs(number) < float("inf") else self.fail("give a finite number", param, ctx)


CAMPAIGN = click.argument("campaign", metavar="CAMPAIGN")
SETS = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated."
)
GUIDANCE = click.option("--guidance", type=Finite(0), help="Guidance scale; by default sampling.guidance.")
STEPS = click.option("--steps", type=click.IntRange(min=1), help="Euler steps; by default sampling.steps.")
WORKERS = click.option(
    "--workers", type=click.IntRange(1, 1024), default=1, help="Processes or jobs that share the work."
)
WRITTEN = "Write the shards I, I + N, ...; without it, finish."
PART = click.option("--part", type=Part.parse, envvar="ATOLL_PART", metavar="I/N", help=WRITTEN)
ON = click.option(
    "--on", default="local", metavar="LAUNCHER", help="Where workers run: local, slurm, ray, sky or yours."
)


def drawing(command: Callable[..., None]) -> Callable[..., None]:
    """A command that draws pictures: with the options of routing, guidance and steps."""
    routing = click.option("--routing", help="Routing strategy; by default sampling.routing.")
    return routing(GUIDANCE(STEPS(command)))


def open_campaign(campaign: str, sets: tuple[str, ...] = ()) -> "Campaign":
    """Open a campaign with `--set` overrides."""
    from atoll.campaign.folder import Campaign

    return Campaign.open(campaign, sets)


def work_is_left(campaign: "Campaign | None", workers: int, part: Part | None, on: str, *words: str) -> bool:
    """Whether this process goes on: with its own part, or with what workers left for it to put together."""
    if part is not None or (workers == 1 and on == "local"):
        return True
    from atoll.launch.submit import run_workers

    return run_workers(workers, *words, on=on, campaign=campaign)


def sharded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose shards workers make first; `part` are those that this process alone is to make."""

    @wraps(command)
    def run(workers: int, part: Part | None, on: str, **options: Any) -> None:
        named: tuple[str, ...] = options.get("campaigns") or (options.get("campaign") or "",)
        opened = dict[str, Any]()
        if on != "local" and part is None:
            if "" in named:
                raise AtollError(f"--on {on} needs a campaign", "name one, or leave --on out")
            opened = {name: open_campaign(name, options.get("sets", ())) for name in named}
        words, given = list[str](), iter(sys.argv[1:])
        for word in given:  # a worker, and the job that comes after all of them, are to start no others
            if word.partition("=")[0] not in ("--workers", "--on"):
                words.append(opened[word].store.location if word in opened else word)
            elif "=" not in word:
                next(given)
        if work_is_left(next(iter(opened.values()), None), workers, part, on, *words):
            command(part=part, **options)

    return WORKERS(PART(ON(run)))


def with_options(sets: tuple[str, ...], group: str, **options: Any) -> tuple[str, ...]:
    """`--set` overrides with those that other options are short for, where they are given."""
    given = {name: value for name, value in options.items() if value is not None}
    return (*sets, *(f"{group}{name}={json.dumps(value)}" for name, value in given.items()))


class LocalPath(click.Path):
    """A path of this machine; click alone would turn `s3://x/y` into the folder `s3:/x/y`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; `AtollError` if it can be none."""
        if "://" in str(value):
            raise AtollError(f"{value} is a URL", "write to a local path, and copy it from there")
        value = os.path.expanduser(value)  # of `--out=~/x` no shell does; a slash at the end stays
        # Names that are too long, or hold a NUL, fail here and not in the midst of a stage.
        try:
            os.lstat(value)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise AtollError(f"{str(value)[-100:]!r} can be no path: {reason}", "give another one") from None
        return super().convert(value, param, ctx)


LOCAL = LocalPath(path_type=Path)
