"""The state of a campaign as a person reads it, within 100 columns, and watching it."""

import json
import shlex
import sys
import textwrap
import time

from atoll.base.console import say
from atoll.base.errors import StoreError
from atoll.base.text import columns, size
from atoll.campaign.folder import Campaign
from atoll.campaign.status import BAD, CampaignStatus, Observer, RunStatus
from atoll.store.signatures import UNSIGNED

WIDTH = 100
_HOST = 8  # columns that a host's name gets at least
_HEAD = ("  run", "state", "step", "done", "loss", "img/s", "left", "saved", "age", "beat", "restarts")


def show(campaign: Campaign, as_json: bool) -> CampaignStatus:
    """Print how a campaign stands."""
    status = Observer(campaign).look()
    say(json.dumps(status.to_json(), indent=2) if as_json else "\n".join(lines(status)))
    return status


def watch(campaign: Campaign, every: float, as_json: bool) -> CampaignStatus | None:
    """Print it again and again, until all runs are published or somebody interrupts.

    Args:
        campaign: the campaign.
        every: seconds between looks.
        as_json: one line of JSON for each look.

    Returns:
        The last look; None if there was none.
    """
    observer, status = Observer(campaign), None
    try:
        while True:
            try:
                status = observer.look()
                _print(status, as_json)
                if status.finished:
                    return status
            except StoreError as error:  # it may come back
                print(f"warning: {error}", file=sys.stderr, flush=True)
            time.sleep(every)
    except KeyboardInterrupt:
        return status


def _print(status: CampaignStatus, as_json: bool) -> None:
    if as_json:
        say(json.dumps(status.to_json()))
        return
    head = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    say(head + "\n".join([*lines(status), "", time.strftime("%H:%M:%S"), ""]))


def lines(status: CampaignStatus) -> list[str]:
    """The state in lines, none of which holds a control character."""
    text = _table(status.runs)
    text += [""] if any(_notes(run) for run in status.runs) else []
    for run in status.runs:
        text += [f"  {run.name}: {note}" for note in _notes(run)]
    text += ["", *_totals(status)]
    if status.clock == "local":
        text.append("Ages are by this machine's clock: the store is read-only and cannot tell its own.")
    text += [""] if status.bad or not status.partitioned else []
    for run in status.bad:
        text += textwrap.wrap(f"! {run.name} {trouble(run)}", WIDTH, subsequent_indent="    ")
    text += _advice(status)
    return [plain(line) for line in text]


def plain(text: str) -> str:
    """The text without anything that a terminal would obey: hosts and errors come from other machines."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _table(runs: list[RunStatus]) -> list[str]:
    rows = columns([_HEAD, *map(_row, runs)], left=(0, 1))
    room = max(_HOST, WIDTH - len(rows[0]) - 2)
    hosts = [plain(host) for host in ("host", *map(_host, runs))]
    cut = (host if len(host) <= room else host[: room - 1] + "…" for host in hosts)
    return [f"{row}  {host}" for row, host in zip(rows, cut, strict=True)]


def _row(run: RunStatus) -> tuple[str, ...]:
    step = "-" if run.steps is None else f"{short(run.step or 0)}/{short(run.steps)}"
    part = (run.step or 0) / run.steps if run.steps else 0.0
    return (
        f"{'!' if run.state in BAD else ' '} {run.name}",
        run.state,
        step,
        f"{int(100 * part)}%",
        "-" if run.loss is None else f"{run.loss:.3g}",
        "-" if run.speed is None else short(run.speed),
        _age(run.seconds_left),
        "-" if run.committed is None else short(run.committed),
        _age(run.commit_age),
        _age(run.heartbeat_age),
        f"{run.restarts} (-{short(run.lost)})" if run.lost else str(run.restarts),
    )


def _host(run: RunStatus) -> str:
    if run.host is None:
        return "-"
    return f"{run.ranks}x {run.host}" if (run.ranks or 1) > 1 else run.host


def _notes(run: RunStatus) -> list[str]:
    """What happened to a run that was made up for, and is worth knowing."""
    notes = [f"{run.lost:,} steps done again after {_times(run.restarts, 'restart')}"] if run.lost else []
    notes += [f"{_times(run.skipped, 'step')} left out by the guard"] if run.skipped else []
    notes += [f"{_times(run.set_aside, 'damaged checkpoint')} set aside"] if run.set_aside else []
    return notes + ([f"{run.damaged} damaged log entries"] if run.damaged else [])


def _times(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _totals(status: CampaignStatus) -> list[str]:
    sent, runs = status.exchanged, status.runs
    done, whole = sum(run.done_flops for run in runs), sum(run.train_flops for run in runs)
    islands = sum(run.role == "expert" for run in runs)
    published = sum(run.state == "published" for run in runs)
    share = f"{int(100 * done / whole)}% of {whole:.3g} training FLOPs; " if whole else ""
    out, back = size(sent.data_out), size(sent.networks_in)
    return [
        f"Done: {share}{published} of {len(runs)} runs published.",
        f"Exchanged: data out to {sent.islands} of {islands} islands {out}; {sent.networks} of {islands + 1} "
        f"networks in {back};",
        f"  between islands while they train {size(sent.between_islands)}.",
        *textwrap.wrap(status.in_common, WIDTH),
        *_signatures(status),
    ]


def _signatures(status: CampaignStatus) -> list[str]:
    """Who signed what is published."""
    names: dict[str, list[str]] = {}
    for run in status.runs:
        if run.signer is not None:
            names.setdefault(run.signer, []).append(run.name)
    if set(names) <= {UNSIGNED}:
        return ["Nothing that is published is signed."] if names else []
    unsigned = names.pop(UNSIGNED, [])
    text = [f"Signed by {key}: {', '.join(runs)}." for key, runs in names.items()]
    return text + ([f"Unsigned: {', '.join(unsigned)}."] if unsigned else [])


def trouble(run: RunStatus) -> str:
    """What is wrong with a run in a bad state, after its name."""
    if run.state == "failed":
        return f"failed: {run.error}"
    if run.state == "unreadable":
        return f"cannot be read: {run.error}"
    saved = "nothing is saved" if run.committed is None else f"saved at step {run.committed:,}"
    why = "its process has ended" if run.ended else f"no sign of life for {_age(run.heartbeat_age)}"
    return f"is stale: {why} ({run.holder}); {saved}"


def _advice(status: CampaignStatus) -> list[str]:
    again = f"atoll launch {shlex.quote(status.location)}"
    if not status.partitioned:
        return [f"Not partitioned yet. Start: {again}"]
    if any(run.state in ("stale", "failed") for run in status.bad):
        return [f"Go on from what is saved: {again}"]
    idle = [run for run in status.runs if run.state in ("left", "waiting")]
    if idle and not any(run.state == "training" for run in status.runs) and not status.bad:
        return ["", f"{_times(len(idle), 'run')} to do: {again}"]
    return []


def short(number: float) -> str:
    """A number in five characters or so: `9,999`, `12.3k`, `1.2M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= unit:
            return f"{number / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.2g}"


def _age(seconds: float | None) -> str:
    """Seconds as `45s`, `12m`, `3.2h`, `5.1d`."""
    if seconds is None:
        return "-"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g}{name}" if seconds < 100 * unit else f"{seconds / unit:.0f}{name}"
    return f"{seconds:.0f}s"
