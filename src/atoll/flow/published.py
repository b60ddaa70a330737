"""What a network was trained on, from the `scheduler_config.json` that diffusers writes beside it."""

from collections.abc import Mapping
from typing import Any

from atoll.base.errors import ConfigError
from atoll.flow.schedule import DDPMCosine, DDPMLinear, DDPMScaledLinear, Schedule, spelled
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

    Raises:
        ConfigError: the settings are of a kind that is not converted.
    """
    found = {**_USUAL, **{key: value for key, value in settings.items() if value is not None}}
    flow = str(found.get("_class_name", "")).startswith("FlowMatch") or found.get("use_flow_sigmas")
    if flow or found["prediction_type"] == "flow_prediction":
        return "v", "rectified-flow"
    if found["prediction_type"] not in _PREDICTIONS:
        raise ConfigError(f"prediction_type {found['prediction_type']!r} is not converted", _FIX)
    for key in ("trained_betas", "rescale_betas_zero_snr"):
        if found.get(key):
            raise ConfigError(f"a schedule with {key} is not converted", _FIX)
    return _PREDICTIONS[found["prediction_type"]], spelled(_schedule(found))


def _schedule(found: Mapping[str, Any]) -> Schedule:
    steps, kind = int(found["num_train_timesteps"]), found["beta_schedule"]
    ends = float(found["beta_start"]), float(found["beta_end"])
    if kind == "linear":
        return DDPMLinear(steps, *ends)
    if kind == "scaled_linear":
        return DDPMScaledLinear(steps, *ends)
    if kind == "squaredcos_cap_v2":
        return DDPMCosine(steps)
    raise ConfigError(f"beta_schedule {kind!r} is not converted", _FIX)
