"""The dashboard: how a campaign's runs stand while they train anywhere, as HTML that only reads."""

from collections import Counter
from pathlib import Path

from markupsafe import Markup

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import runs_of
from atoll.campaign.status import BAD, Observer, trouble
from atoll.report import palette
from atoll.report.facts import Facts, pixelated
from atoll.report.html import environment
from atoll.report.page import write_page
from atoll.report.sections import clusters, learning


class Dashboard:
    """A campaign at any stage as a page; nothing of it is changed."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self._observer = Observer(campaign)

    def now(self) -> str:
        """Render states, curves and previews; `StoreError` or `DataError` where files cannot be read."""
        status, store = self._observer.read(), self.campaign.store
        facts = Facts(store) if status.partitioned else None
        done, whole = (
            sum(getattr(run, part) for run in status.runs) for part in ("done_flops", "train_flops")
        )
        folders, previews = {run.name: run.folder for run in runs_of(self.campaign.config)}, []
        for run in status.runs if facts else []:
            keys = [key for key in store.list(f"{folders[run.name]}/run/previews") if key.endswith(".png")]
            # By number: names are not padded for all lengths of a training, and others may lie there.
            steps = {int(stem): key for key in keys if (stem := key.rpartition("/")[2][:-4]).isdecimal()}
            picture = facts.picture(steps[max(steps)]) if facts and steps else None
            if picture is not None:
                previews.append((run, max(steps), picture))
        return (
            environment()
            .get_template("dashboard_now.html")
            .render(
                status=status,
                styles={
                    run.name: run.role if run.island is None else f"e{run.island}" for run in status.runs
                },
                done=done / whole if whole else 0.0,
                counts=Counter(run.state for run in status.runs),
                troubles=[f"{run.name} {trouble(run)}" for run in status.bad],
                bad=BAD,
                learning=learning(facts) if facts else None,
                facts=facts,
                previews=previews,
                pixelated=pixelated([picture for _, _, picture in previews]),
            )
        )

    def still(self) -> str:
        """The partition, which never changes: sizes of the clusters and their contact sheets; or nothing."""
        if not self.campaign.is_partitioned:
            return ""
        facts = Facts(self.campaign.store)
        return (
            environment().get_template("dashboard_still.html").render(facts=facts, clusters=clusters(facts))
        )

    def write(self, path: Path) -> None:
        """Write all of it as one page that needs nothing else; `ConfigError` if that cannot be."""
        page = (
            environment()
            .get_template("dashboard.html")
            .render(
                name=Facts(self.campaign.store).name,
                now=Markup(self.now()),
                still=Markup(self.still()),
                colours=Markup(palette.stylesheet(self.campaign.config.partition.k)),
            )
        )
        write_page(path, page, "--once")
