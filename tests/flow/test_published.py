"""What scheduler_config.json says a network was trained on."""

import json
import math
from typing import Any

import pytest
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from atoll.base.errors import ConfigError
from atoll.flow.published import trained_on

STABLE: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (DDPMScheduler(), ("eps", "ddpm-linear")),
        (DDIMScheduler(**STABLE), ("eps", "ddpm-scaled-linear")),
        (EulerDiscreteScheduler(**STABLE), ("eps", "ddpm-scaled-linear")),
        (DDPMScheduler(beta_schedule="squaredcos_cap_v2"), ("eps", "ddpm-cosine")),
        (DPMSolverMultistepScheduler(prediction_type="sample"), ("x0", "ddpm-linear")),
        (DDPMScheduler(250, 0.0004, 0.08), ("eps", "ddpm-linear(250, 0.0004, 0.08)")),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), ("v", "rectified-flow")),
        (UniPCMultistepScheduler(**FLOW), ("v", "rectified-flow")),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "config") else value[1],
)
def test_files_that_diffusers_writes(scheduler: Any, expected: tuple[str, str]) -> None:
    assert trained_on(json.loads(scheduler.to_json_string())) == expected


def test_what_a_file_leaves_out_is_as_in_diffusers() -> None:
    assert trained_on({"_class_name": "DDPMScheduler"}) == trained_on(DDPMScheduler().config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"prediction_type": "v_prediction"},
            "'v_prediction' is not converted: say it with --prediction and --schedule",
        ),
        ({"beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid' is not converted"),
        ({"trained_betas": [0.1, 0.2]}, "trained_betas is not converted"),
        ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr is not converted"),
        ({"prediction_type": ["epsilon"]}, "is not converted"),
        ({"beta_schedule": {}}, "beta_schedule {} is not converted"),
        ({"num_train_timesteps": "many"}, r"'ddpm-linear\(many, 0.0001, 0.02\)' is no schedule"),
        ({"num_train_timesteps": math.inf}, "is no schedule"),
        ({"beta_start": [1]}, "is no schedule"),
    ],
)
def test_what_is_not_converted_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trained_on(settings)
