"""A shift by tokens: Flux's own line, and the same in training, sampling and a folder's scheduler."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from atoll.base.errors import ConfigError
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.export.call import set_times
from atoll.flow.objective import training_times
from atoll.flow.schedule import RectifiedFlow
from atoll.flow.settings import TimeConfig, shift_at
from atoll.model.folder import defaults_in, scheduler_shift
from atoll.model.generation import Generation
from atoll.model.sampler import times

LINE = "tokens(0.2, 0.9, 64, 1024)"


@pytest.mark.parametrize("tokens", [16.0, 256.0, 1000.0, 4096.0, 16384.0])
def test_it_is_that_of_flux(tokens: float) -> None:
    assert shift_at("tokens", tokens) == pytest.approx(math.exp(calculate_shift(tokens)))
    line = calculate_shift(tokens, 64, 1024, 0.2, 0.9)
    assert shift_at(LINE, tokens) == pytest.approx(math.exp(min(line, 9.2)))  # as far as numbers go
    assert shift_at(3.0, tokens) == 3


def test_training_and_sampling_take_the_same_number() -> None:
    u, curve, tokens = torch.rand(8), RectifiedFlow(), 24 * 12 / 4
    fixed = TimeConfig(shift=shift_at("tokens", tokens))
    shifted = training_times(TimeConfig(shift="tokens"), u, curve, tokens)
    assert torch.equal(shifted, training_times(fixed, u, curve))
    assert Generation(shift="tokens").at(24, 12).shift == fixed.shift
    tree: dict[str, Any] = {"data": {"path": "data"}, "objective": {"time": {"shift": "tokens"}}}
    config = CampaignConfig.parse(tree, "a test")
    assert config.router.time.shift == config.sampling.shift == "tokens"
    apart = CampaignConfig.parse({**tree, "sampling": {"shift": 2, "steps": 5}}, "a test")
    assert apart.sampling.shift == 2 and apart.objective.time.shift == "tokens"


def shift_of(scheduler: FlowMatchEulerDiscreteScheduler, tokens: float) -> float:
    """The logarithm of the shift that diffusers' pipelines compute."""
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return float(calculate_shift(tokens, *(scheduler.config[name] for name in names)))


@pytest.mark.parametrize("shift", [1.0, 3.0, "tokens", LINE])
def test_a_scheduler_holds_it(shift: float | str) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**scheduler_shift(shift))
    index = {"num_inference_steps": 4, "guidance_scale": 2.0, "routing": "once"}
    again = defaults_in(index, scheduler.config).shift
    assert again == shift or shift_at(again, 333.0) == shift_at(shift, 333.0)
    # The pipeline's times are the sampler's to the bit, and those that diffusers' own pipelines compute.
    number = shift_at(shift, 16 * 32 / 4)
    timed, steps = set_times(scheduler, 4, (4, 16, 32))
    assert steps == 4 and tuple(timed.sigmas.tolist()) == times(4, number)
    mu = {"mu": shift_of(scheduler, 128)} if isinstance(shift, str) else {}
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 4, 4), **mu)
    torch.testing.assert_close(scheduler.sigmas, timed.sigmas, rtol=0, atol=1e-6)
    # A network of other patches has another number of them at the same size.
    coarse = FlowMatchEulerDiscreteScheduler(**scheduler_shift(shift, patch=4))
    if isinstance(shift, str):
        assert shift_of(coarse, 128 / 4) == pytest.approx(math.log(number))


@pytest.mark.parametrize(
    "shift",
    [0, -1, 1e5, "3", "token", "tokens()", "tokens(1, 2)", "tokens(1, 2, 9, 9)", "tokens(a, 2, 3, 4)"],
)
def test_another_one_is_refused(shift: float | str) -> None:
    with pytest.raises(ConfigError, match=r"write a number from 0\.0001 to 10000, tokens or tokens"):
        TimeConfig.parse({"shift": shift}, "a test")
    with pytest.raises(ConfigError, match="tokens"):
        Generation().with_(shift=shift)
