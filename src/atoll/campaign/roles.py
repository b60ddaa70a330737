"""The kinds of runs of a campaign: `RUNS` has one row for each, and every stage loops over it.

A new role is a row here and, where it learns something new, a `Task` in `train/tasks.py`. The command line
lists its choices from this table, so it imports nothing: settings alone take a second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from atoll.campaign.settings.campaign import CampaignConfig

Init = Literal["scratch", "checkpoint", "pretrain", "experts"]
"""Where weights start: drawn, a published file, shared pretraining, or the experts (their mean, or one)."""


@dataclass(frozen=True)
class Role:
    """What sets one kind of run apart from the others."""

    name: str  # in commands, cards and folders
    title: str  # on pages
    rows: Literal["cluster", "all"]  # those of one cluster (then there are K such runs), or all
    counted: Literal["ensemble", "baseline", "extra"]
    """Where its FLOPs count: the ensemble's and the baseline's are equal, an extra comes on top."""
    task: Literal["denoise", "route", "distill"] = "denoise"
    assembled: bool = False  # the ensemble waits for it
    sampled: bool = False  # it is a model by itself
    wanted: Callable[["CampaignConfig"], bool] = lambda config: True
    late: bool = False  # it may be added when the campaign is partitioned
    absent: tuple[str, str] = ("", "")  # what to say where the campaign has no such run, and the remedy
    needs: Callable[["CampaignConfig"], tuple[str, ...]] = lambda config: ()  # roles that publish before it
    init: Callable[["CampaignConfig"], Init | None] = lambda config: None
    """Where its weights start; None is what its network's setting `init` says."""

    @property
    def plural(self) -> str:
        """Name of all runs of this role together: `experts`, `router`."""
        return f"{self.name}s" if self.rows == "cluster" else self.name

    def planned(self, config: "CampaignConfig") -> bool:
        """Whether the partition writes its folder; a baseline's numbers are there without being trained."""
        return self.counted == "baseline" or self.wanted(config)


# What others start from comes before them: plans, launches and tables go by this order.
_ROLES = (
    # Its FLOPs count to the ensemble's. Else an ensemble that starts from it would have trained for longer
    # than the monolith it is compared with.
    Role(
        "pretrain",
        "Shared pretraining",
        rows="all",
        counted="ensemble",
        sampled=True,
        wanted=lambda config: bool(config.budget.pretrain),
        absent=(
            "has no shared pretraining (budget.pretrain is 0)",
            "start a campaign with, for example, --set budget.pretrain=0.3",
        ),
    ),
    Role(
        "expert",
        "Expert",
        rows="cluster",
        counted="ensemble",
        assembled=True,
        needs=lambda config: ("pretrain",),
        init=lambda config: "pretrain" if config.budget.pretrain else None,
    ),
    Role(
        "router",
        "Router",
        rows="all",
        counted="ensemble",
        task="route",
        assembled=True,
        # No published checkpoint has a head of K outputs, but the router that it goes on from.
        init=lambda config: None if config.origin else "scratch",
    ),
    Role(
        "monolith",
        "Monolith",
        rows="all",
        counted="baseline",
        sampled=True,
        wanted=lambda config: config.monolith,
    ),
    # Nothing else depends on it, so it may be asked for when all others are trained.
    Role(
        "student",
        "Student",
        rows="all",
        counted="extra",
        task="distill",
        sampled=True,
        wanted=lambda config: config.student is not None,
        late=True,
        absent=("has no student", "add 'student: {}' to campaign.yaml, then run 'atoll partition' again"),
        needs=lambda config: (
            ("expert", "router") if config.student and config.student.teacher == "routed" else ("expert",)
        ),
        init=lambda config: "experts" if config.student and config.student.origin()[0] != "scratch" else None,
    ),
)
RUNS: dict[str, Role] = {role.name: role for role in _ROLES}
"""All roles by name, those first that others start from."""
BESIDE = tuple(role.name for role in _ROLES if role.counted != "ensemble")
"""Roles that the ensemble does without."""
SINGLE = tuple(role.name for role in _ROLES if role.sampled)
"""Roles whose network is a model by itself."""
BASELINE = next(role.name for role in _ROLES if role.counted == "baseline")
