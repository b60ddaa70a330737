"""The dashboard: how a campaign's runs stand while they train anywhere, as HTML that only reads."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import runs_of
from atoll.campaign.status import BAD, Observer, RunStatus
from atoll.campaign.status_text import trouble
from atoll.report import palette
from atoll.report.facts import Facts, Picture, pixelated
from atoll.report.page import environment, write_page
from atoll.report.sections import clusters, learning


class Dashboard:
    """A campaign as a page.

    Args:
        campaign: at any stage; nothing of it is changed.
    """

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self._observer = Observer(campaign)

    def now(self) -> str:
        """What changes while runs train: states, curves and previews.

        Raises:
            StoreError: the store does not answer.
            DataError: a file of the campaign is not what Atoll writes.
        """
        status, store = self._observer.read(), self.campaign.store
        facts = Facts(store) if status.partitioned else None
        folders = {run.name: run.folder for run in runs_of(self.campaign.config)}
        done, whole = (
            sum(getattr(run, what) for run in status.runs) for what in ("done_flops", "train_flops")
        )
        shown = [self._preview(facts, run, folders[run.name]) for run in status.runs] if facts else []
        previews = [one for one in shown if one is not None]
        return _render(
            "dashboard_now.html",
            status=status,
            done=done / whole if whole else 0.0,
            counts={state: sum(r.state == state for r in status.runs) for state in _states(status.runs)},
            troubles=[f"{run.name} {trouble(run)}" for run in status.bad],
            bad=BAD,
            learning=learning.section(facts) if facts else None,
            facts=facts,
            previews=previews,
            pixelated=pixelated([picture for _, _, picture in previews]),
        )

    def still(self) -> str:
        """The partition, which never changes: sizes of the clusters and their contact sheets; or nothing."""
        store = self.campaign.store
        if not self.campaign.is_partitioned:
            return ""
        facts = Facts(store)
        return _render("dashboard_still.html", facts=facts, clusters=clusters.section(facts))

    def page(self) -> str:
        """All of it as one page that needs nothing else, for `--once`."""
        name, k = Facts(self.campaign.store).name, self.campaign.config.partition.k
        colours = Markup(palette.stylesheet(k))
        now, still = Markup(self.now()), Markup(self.still())
        return _render("dashboard.html", name=name, now=now, still=still, colours=colours)

    def write(self, path: Path) -> None:
        """Write the page.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_page(path, self.page(), "--once")

    def _preview(self, facts: Facts, run: RunStatus, folder: str) -> tuple[RunStatus, int, Picture] | None:
        """A run, and the step and picture of its newest preview."""
        keys = [key for key in self.campaign.store.list(f"{folder}/run/previews") if key.endswith(".png")]
        steps = {int(stem): key for key in keys if (stem := key.rpartition("/")[2][:-4]).isdecimal()}
        picture = facts.picture(steps[max(steps)]) if steps else None
        return None if picture is None else (run, max(steps), picture)


def _states(runs: list[RunStatus]) -> list[str]:
    return list(dict.fromkeys(run.state for run in runs))


def _style(run: RunStatus) -> str:
    """CSS class of a run's colour."""
    return run.role if run.island is None else f"e{run.island}"


def _render(template: str, **context: Any) -> str:
    return environment().get_template(template).render(style=_style, **context)
