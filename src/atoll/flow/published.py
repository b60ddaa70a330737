"""What a network was trained on, from the `scheduler_config.json` that diffusers writes beside it."""

from collections.abc import Mapping
from typing import Any

from atoll.base.errors import ConfigError
from atoll.flow.schedule import DDPMCosine, DDPMLinear, DDPMScaledLinear, Schedule, schedule_name
from atoll.flow.settings import Prediction

# What every scheduler class of diffusers takes where its file says nothing.
_USUAL: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "prediction_type": "epsilon",
}
_PREDICTIONS: dict[str, Prediction] = {"epsilon": "eps", "sample": "x0"}
_FIX = "say it with --prediction and --schedule if you know better"


def trained_on(settings: Mapping[str, Any]) -> tuple[Prediction, str]:
    """Prediction and schedule (as `flow.schedule.schedule` takes it) of a network by its scheduler's file.

    Which solver the settings name does not matter, but for those of flows: their networks give the velocity.
    """
    config = {**_USUAL, **{key: value for key, value in settings.items() if value is not None}}
    flow = str(config.get("_class_name", "")).startswith("FlowMatch") or config.get("use_flow_sigmas")
    if flow or config["prediction_type"] == "flow_prediction":
        return "v", "rectified-flow"
    if config["prediction_type"] not in _PREDICTIONS:
        raise ConfigError(f"prediction_type {config['prediction_type']!r} is not converted", _FIX)
    for key in ("trained_betas", "rescale_betas_zero_snr"):
        if config.get(key):
            raise ConfigError(f"a schedule with {key} is not converted", _FIX)
    steps, kind = int(config["num_train_timesteps"]), config["beta_schedule"]
    ends = float(config["beta_start"]), float(config["beta_end"])
    noise: Schedule
    if kind == "linear":
        noise = DDPMLinear(steps, *ends)
    elif kind == "scaled_linear":
        noise = DDPMScaledLinear(steps, *ends)
    elif kind == "squaredcos_cap_v2":
        noise = DDPMCosine(steps)
    else:
        raise ConfigError(f"beta_schedule {kind!r} is not converted", _FIX)
    return _PREDICTIONS[config["prediction_type"]], schedule_name(noise)
