"""The whole way, as the commands that a user would type."""

import time
from collections.abc import Callable, Sequence

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.text import duration
from atoll.campaign.folder import Campaign
from atoll.store.store import Store

STAGES = "reports/stages.json"


COMMANDS = "data ingest", "data embed", "data encode", "partition", "launch", "compare", "diagnose", "report"


def run(folder: str, sets: Sequence[str], invoke: Callable[[list[str]], object]) -> None:
    """Invoke every command, printed as it runs; finished stages say so and cost nothing."""
    start = time.monotonic()
    store = Store.open(folder, create=True)
    if not store.exists("campaign.yaml"):
        overrides = [part for assignment in sets for part in ("--set", assignment)]
        _step(["new", folder, "--recipe", "quickstart", *overrides], invoke)
    elif Campaign.open(folder, sets).config != Campaign.open(folder).config:
        what = f"{store.location} was started with other settings"
        raise ConfigError(what, "leave --set out, or give another --dir")
    # Times of a run that went through stay: commands that find everything finished take no time to speak of.
    done_before = store.exists("reports/index.html")
    seconds: dict[str, float] = store.get_json(STAGES) if store.exists(STAGES) else {}
    for name in COMMANDS:
        began = time.monotonic()
        try:
            _step([*name.split(), folder], invoke)
        finally:
            if not done_before:
                seconds[name] = round(seconds.get(name, 0.0) + time.monotonic() - began, 1)
                store.put_json(STAGES, seconds)
    say(f"\nquickstart: {duration(time.monotonic() - start)}. Open {store.name('reports/index.html')}")


def _step(argv: list[str], invoke: Callable[[list[str]], object]) -> None:
    say(f"\n$ atoll {' '.join(argv)}")
    invoke(argv)
