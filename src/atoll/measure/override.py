"""How measuring starts from the campaign's own `sampling`, and where it departs from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.base.console import say
from atoll.campaign.folder import Campaign
from atoll.campaign.settings.measure import CompareConfig, DiagnoseConfig
from atoll.model.generation import Generation
from atoll.model.routing import PRETRAIN, Routing

WIDE = 26
"""Columns of a model's name where it is printed: `once null sample-1 every 5` fits."""


@dataclass(frozen=True)
class SamplingOverride:
    """How samples are drawn to be measured.

    Attributes:
        generation: the campaign's `sampling` with the stage's own settings in place of it.
        changes: these settings, and what `sampling` says instead, where they differ.
    """

    generation: Generation
    changes: dict[str, list[Any]]

    @classmethod
    def of(cls, campaign: Campaign, config: CompareConfig | DiagnoseConfig) -> "SamplingOverride":
        """Of a stage. Noise and draws are those of the campaign's seed."""
        sampled = generation_of(campaign).for_condition(campaign.config.condition)
        generation = generation_of(campaign).with_(steps=config.steps, guidance=config.guidance)
        generation = generation.for_condition(campaign.config.condition)
        pairs = {name: [getattr(generation, name), getattr(sampled, name)] for name in ("steps", "guidance")}
        return cls(generation, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})

    @property
    def text(self) -> str:
        """The steps and guidance, and what the campaign samples with where that is something else."""
        values = {"steps": self.generation.steps, "guidance": self.generation.guidance}
        beside = {name: f" (sampling: {pair[1]:g})" for name, pair in self.changes.items()}
        return f"{values['steps']} steps{beside.get('steps', '')}, guidance {values['guidance']:g}" + (
            beside.get("guidance", "")
        )


def generation_of(campaign: Campaign) -> Generation:
    """What the campaign samples with, under its own seed, at the size nearest to a square."""
    values = {**dict(campaign.config.sampling), "seed": campaign.config.seed, "size": None}
    return Generation(**{name: values[name] for name in Generation.model_fields})


def strategies_for(campaign: Campaign, names: Sequence[str] | None, usual: Sequence[str]) -> list[str]:
    """Strategies that a stage asks for: those named, or the campaign's own and then the usual ones."""
    default = str(campaign.config.sampling.routing)
    return list(names) if names is not None else list(dict.fromkeys([default, *usual]))


def supported(names: Sequence[str], experts: int, missing: Sequence[int], pretrained: bool) -> list[str]:
    """The strategies that an ensemble of these networks can follow; which are left out is said."""
    kept = []
    for name in names:
        routing = Routing.named(name)
        if routing.needs_labels and missing:
            say(f"  warning: {name} is left out: the clusters of missing experts have nobody to go to")
        elif not routing.possible(experts):
            say(f"  warning: {name} is left out: there are {experts} experts")
        elif routing.null == PRETRAIN and not pretrained:
            say(f"  warning: {name} is left out: no network of shared pretraining is assembled")
        else:
            kept.append(name)
    return kept
