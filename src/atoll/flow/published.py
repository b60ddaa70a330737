"""What a network was trained on, from the `scheduler_config.json` that diffusers writes beside it."""

from collections.abc import Mapping
from typing import Any

from atoll.base.errors import ConfigError
from atoll.flow.schedule import schedule, schedule_name
from atoll.flow.settings import Prediction

_PREDICTIONS: dict[str, Prediction] = {"epsilon": "eps", "sample": "x0"}
_NOISES = {"linear": "ddpm-linear", "scaled_linear": "ddpm-scaled-linear", "squaredcos_cap_v2": "ddpm-cosine"}
_FIX = "say it with --prediction and --schedule if you know better"


def trained_on(settings: Mapping[str, Any]) -> tuple[Prediction, str]:
    """Prediction and schedule (as `flow.schedule.schedule` takes it) of a network by its scheduler's file.

    Which solver the settings name does not matter, but for those of flows: their networks give the velocity.
    """
    # Where a file says nothing, it is what every scheduler class of diffusers takes.
    config = {key: value for key, value in settings.items() if value is not None}
    learned = config.get("prediction_type", "epsilon")
    flow = str(config.get("_class_name", "")).startswith("FlowMatch") or config.get("use_flow_sigmas")
    if flow or learned == "flow_prediction":
        return "v", "rectified-flow"
    if str(learned) not in _PREDICTIONS:
        raise ConfigError(f"prediction_type {learned!r} is not converted", _FIX)
    for key in ("trained_betas", "rescale_betas_zero_snr"):
        if config.get(key):
            raise ConfigError(f"a schedule with {key} is not converted", _FIX)
    levels, kind = config.get("num_train_timesteps", 1000), config.get("beta_schedule", "linear")
    if str(kind) not in _NOISES:
        raise ConfigError(f"beta_schedule {kind!r} is not converted", _FIX)
    numbers = f"{levels}, {config.get('beta_start', 1e-4)}, {config.get('beta_end', 0.02)}"
    noise = f"{_NOISES[kind]}({levels if kind == 'squaredcos_cap_v2' else numbers})"
    return _PREDICTIONS[learned], schedule_name(schedule(noise))
