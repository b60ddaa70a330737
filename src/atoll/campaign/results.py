"""What a campaign fixed, and the lines that its trainings log: the types of these JSON files."""

from typing import Any

from pydantic import ConfigDict

from atoll.base.errors import ConfigError
from atoll.base.format import File


class Frozen(File):
    """`campaign.json`: the settings, fixed when the campaign started."""

    FORMAT, PLACE, ERROR = "atoll/campaign", "campaign.json", ConfigError
    REMEDY = "use the version of Atoll that made the campaign, or start a new one"

    code: str
    """Version of Atoll."""
    overrides: list[str] = []
    """`--set` assignments that `campaign.yaml` does not hold."""
    config: dict[str, Any]
    """Every setting, resolved."""


class FrozenStudent(File):
    """`student.json`: the student's settings, fixed when it was added."""

    FORMAT, PLACE, ERROR = "atoll/student", "student/student.json", ConfigError
    REMEDY = "use the version of Atoll that made the campaign, or start a new one"

    code: str
    """Version of Atoll."""
    student: dict[str, Any]
    """The settings of the group `student`."""


class MetricsLine(File):
    """A line of `metrics.jsonl`: a step of training, or a validation. Tasks may add fields of their own."""

    FORMAT, PLACE, HEADED = "atoll/metrics", "ROLE/run/metrics.jsonl", False
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: int = 0
    """Optimizer steps so far."""
    samples: int
    """Training samples so far."""
    loss: float | None = None
    """Training loss of this step."""
    lr: float | None = None
    """Learning rate of this step."""
    grad_norm: float | None = None
    """Norm of its gradient before clipping."""
    accuracy: float | None = None
    """Share of its batch whose cluster the router found."""
    skipped: int | None = None
    """Steps that the guard has left out so far."""
    seconds: float | None = None
    """Time spent in steps, over all restarts."""
    times: tuple[float, ...] = ()
    """Times t of the validation that this line is of; empty for a line of steps."""
    validation: tuple[float | None, ...] = ()
    """Validation loss at each of these times."""
    accuracy_by_time: tuple[float | None, ...] = ()
    """Share of held-out rows whose cluster the router finds, at each of these times."""
    validation_loss: float | None = None
    """Mean of `validation`."""
    validation_seconds: float | None = None
    """Time that this validation took; it is not part of `seconds`."""
