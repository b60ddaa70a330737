"""The state of a campaign as a person reads it, within 100 columns, and watching it."""

import json
import shlex
import sys
import textwrap
import time

from atoll.base.console import say
from atoll.base.errors import StoreError
from atoll.base.text import columns, printable, size
from atoll.campaign.folder import Campaign
from atoll.campaign.status import BAD, CampaignStatus, Observer, RunStatus
from atoll.store.signatures import UNSIGNED

WIDTH = 100
_HOST = 8  # columns that a host's name gets at least
_HEAD = ("  run", "state", "step", "done", "loss", "img/s", "left", "saved", "age", "beat", "restarts")


def show(campaign: Campaign, as_json: bool) -> CampaignStatus:
    """Print how a campaign stands."""
    status = Observer(campaign).read()
    say(json.dumps(status.to_json(), indent=2) if as_json else "\n".join(lines(status)))
    return status


def watch(campaign: Campaign, every: float, as_json: bool) -> CampaignStatus | None:
    """Print it again and again, until all runs are published or somebody interrupts.

    Args:
        campaign: the campaign.
        every: seconds in between.
        as_json: one line of JSON each time.

    Returns:
        The last status; None if there was none.
    """
    observer, status = Observer(campaign), None
    head = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    try:
        while True:
            try:
                status = observer.read()
                text = [*lines(status), "", time.strftime("%H:%M:%S"), ""]
                say(json.dumps(status.to_json()) if as_json else head + "\n".join(text))
                if status.finished:
                    return status
            except StoreError as error:  # it may come back
                print(f"warning: {error}", file=sys.stderr, flush=True)
            time.sleep(every)
    except KeyboardInterrupt:
        return status


def lines(status: CampaignStatus) -> list[str]:
    """The state in lines, none of which holds a control character: hosts and errors come from elsewhere."""
    runs, sent = status.runs, status.transfer
    rows = columns([_HEAD, *map(_row, runs)], left=(0, 1))
    room = max(_HOST, WIDTH - len(rows[0]) - 2)
    hosts = ["host"]
    for run in runs:
        ranks = f"{run.ranks}x " if run.host is not None and (run.ranks or 1) > 1 else ""
        hosts.append(printable(f"{ranks}{run.host or '-'}"))
    hosts = [host if len(host) <= room else host[: room - 1] + "…" for host in hosts]
    text = [f"{row}  {host}" for row, host in zip(rows, hosts, strict=True)]

    # What happened to a run that was made up for, and is worth knowing.
    notes: list[str] = []
    for run in runs:
        again = f"steps done again after {_times(run.restarts, 'restart')}"
        notes += [f"  {run.name}: {run.lost:,} {again}"] if run.lost else []
        notes += [f"  {run.name}: {_times(run.skipped, 'step')} left out by the guard"] if run.skipped else []
        aside = _times(run.set_aside, "damaged checkpoint")
        notes += [f"  {run.name}: {aside} set aside"] if run.set_aside else []
        notes += [f"  {run.name}: {run.damaged} damaged log entries"] if run.damaged else []
    text += [*([""] if notes else []), *notes]

    # Totals.
    done, whole = sum(run.done_flops for run in runs), sum(run.train_flops for run in runs)
    islands = sum(run.island is not None for run in runs)
    published = sum(run.state == "published" for run in runs)
    share = f"{int(100 * done / whole)}% of {whole:.3g} training FLOPs; " if whole else ""
    out, back = size(sent.data_out), size(sent.networks_in)
    text += [
        "",
        f"Done: {share}{published} of {len(runs)} runs published.",
        f"Exchanged: data out to {sent.islands} of {islands} islands {out}; {sent.networks} of {islands + 1} "
        f"networks in {back};",
        f"  between islands while they train {size(sent.between_islands)}.",
        *textwrap.wrap(status.in_common, WIDTH),
    ]

    # Who signed what is published.
    signed: dict[str, list[str]] = {}
    for run in runs:
        if run.signer is not None:
            signed.setdefault(run.signer, []).append(run.name)
    unsigned = signed.pop(UNSIGNED, [])
    text += [f"Signed by {key}: {', '.join(names)}." for key, names in signed.items()]
    if unsigned:
        only = "Nothing that is published is signed."
        text.append(f"Unsigned: {', '.join(unsigned)}." if signed else only)
    if status.clock == "local":
        text.append("Ages are by this machine's clock: the store is read-only and cannot tell its own.")

    # What to do about it.
    text += [""] if status.bad or not status.partitioned else []
    for run in status.bad:
        text += textwrap.wrap(f"! {run.name} {trouble(run)}", WIDTH, subsequent_indent="    ")
    launch = f"atoll launch {shlex.quote(status.location)}"
    idle = [run for run in runs if run.state in ("left", "waiting")]
    if not status.partitioned:
        text.append(f"Not partitioned yet. Start: {launch}")
    elif any(run.state in ("stale", "failed") for run in status.bad):
        text.append(f"Go on from what is saved: {launch}")
    elif idle and not status.bad and not any(run.state == "training" for run in runs):
        text += ["", f"{_times(len(idle), 'run')} to do: {launch}"]
    return [printable(line) for line in text]


def _row(run: RunStatus) -> tuple[str, ...]:
    part = (run.step or 0) / run.steps if run.steps else 0.0
    return (
        f"{'!' if run.state in BAD else ' '} {run.name}",
        run.state,
        "-" if run.steps is None else f"{short(run.step or 0)}/{short(run.steps)}",
        f"{int(100 * part)}%",
        "-" if run.loss is None else f"{run.loss:.3g}",
        "-" if run.speed is None else short(run.speed),
        _age(run.seconds_left),
        "-" if run.committed is None else short(run.committed),
        _age(run.commit_age),
        _age(run.heartbeat_age),
        f"{run.restarts} (-{short(run.lost)})" if run.lost else str(run.restarts),
    )


def _times(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def trouble(run: RunStatus) -> str:
    """What is wrong with a run in a bad state, after its name."""
    if run.state == "failed":
        return f"failed: {run.error}"
    if run.state == "unreadable":
        return f"cannot be read: {run.error}"
    saved = "nothing is saved" if run.committed is None else f"saved at step {run.committed:,}"
    why = "its process has ended" if run.ended else f"no sign of life for {_age(run.heartbeat_age)}"
    return f"is stale: {why} ({run.holder}); {saved}"


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
