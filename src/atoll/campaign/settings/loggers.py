"""Which trackers show the runs."""

from typing import Any, Literal

from pydantic import Field, field_validator

from atoll.base.config import Config


class TrackingConfig(Config):
    """Which trackers show a run, besides metrics.jsonl, which is always there."""

    tensorboard: bool = False
    """Whether event files are written, to `run/tensorboard/`."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: send while training, or write to `run/wandb/` for `wandb sync`."""
    project: str = Field(default="atoll", min_length=1)
    """Its project."""
    entity: str | None = None
    """Its user or team; your own if not set."""
    name: str | None = None
    """What runs' names begin with, and their group; the name of the campaign if not set."""

    @field_validator("wandb", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        # YAML reads a bare `off` as false.
        return "off" if value is False else value
