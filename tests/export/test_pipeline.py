"""A call of the pipeline: the pictures of `atoll sample`, whatever the batch, scheduler and precision."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.export.bank import ExpertBank
from atoll.export.call import quiet_loading
from atoll.export.pipeline import AtollPipeline
from atoll.model.bank import Bank
from atoll.model.expert import RouterModel
from atoll.model.generation import Generation
from atoll.model.sampler import Row, Sampler, starting_noise
from helpers_export import LABELS, NOTHING, expert, generators, pipeline

pytestmark = pytest.mark.filterwarnings(
    # diffusers' DEIS hands tensors to numpy.
    "ignore:__array_wrap__ must accept:DeprecationWarning"
)
SHAPE = (3, 8, 8)
State = dict[str, Tensor]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS: dict[str, Any] = {
    "euler": FlowMatchEulerDiscreteScheduler(),
    "euler shifted": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "heun": FlowMatchHeunDiscreteScheduler(),
    "unipc": UniPCMultistepScheduler(**FLOW),
    "dpm++": DPMSolverMultistepScheduler(**FLOW),
    "dpm++ 1": DPMSolverMultistepScheduler(**FLOW, solver_order=1),
    "dpm++ single": DPMSolverSinglestepScheduler(**FLOW),
    "deis": DEISMultistepScheduler(**FLOW),
}


@pytest.fixture(scope="module")
def pipe() -> AtollPipeline:
    return pipeline()


def latents(pipe: AtollPipeline, labels: list[int], first: int = 0, **more: Any) -> Tensor:
    call = {"generator": generators(len(labels), first), "output_type": "latent", **more}
    return pipe(class_labels=labels, **call).images


def reference(pipe: AtollPipeline, labels: list[int], generation: Generation) -> Tensor:
    """The plain path: the same parts, without a pipeline."""
    bank = Bank([expert(n, LABELS) for n in range(3)], RouterModel(pipe.router, pipe.card))
    cond, null = Condition(labels=torch.tensor(labels)), Condition(labels=torch.tensor([4]))
    numbers = range(len(labels))
    noise = starting_noise(generation.seed, numbers, SHAPE)
    return Sampler(bank, cond, null, Row.each(generation, numbers), noise).run()


@pytest.mark.parametrize(
    ("routing", "guidance"),
    [("full", 1.0), ("full", 2.5), ("top-2 every 2", 2.5), ("sample-2", 2.5), ("once null sample-1", 2.5)],
)
def test_a_fresh_generator_gives_the_pictures_of_its_seed(
    pipe: AtollPipeline, routing: str, guidance: float
) -> None:
    """And goes on to others when it is used again."""
    labels = [0, 3, 1, 2, 1]
    generation = Generation(guidance=guidance, routing=routing, steps=4, seed=11)
    source = torch.Generator().manual_seed(11)
    call = {"generator": source, "num_inference_steps": 4, "guidance_scale": guidance, "routing": routing}
    first = latents(pipe, labels, **call)
    assert torch.equal(first, reference(pipe, labels, generation))
    second = latents(pipe, labels, **call)
    source.manual_seed(11)
    assert torch.equal(latents(pipe, labels, **call), first) and not torch.equal(second, first)
    assert torch.equal(latents(pipe, labels, **call), second)


@pytest.mark.parametrize("routing", ["full", "once", "sample-1"])
def test_a_picture_does_not_depend_on_its_batch(pipe: AtollPipeline, routing: str) -> None:
    """A list of generators gives each picture the one of its seed alone."""
    labels = [0, 1, 2, 3, 0, 1]
    together = latents(pipe, labels, 5, routing=routing)
    apart = [latents(pipe, labels[i : i + n], 5 + i, routing=routing) for i, n in ((0, 1), (1, 3), (4, 2))]
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-5)
    single = torch.Generator().manual_seed(5)
    assert torch.equal(latents(pipe, labels[:1], generator=single, routing=routing), apart[0])


CALL: dict[str, Any] = {"labels": [0, 1, 2], "routing": "full", "guidance_scale": 1.5}


@pytest.fixture(scope="module")
def fine(pipe: AtollPipeline) -> Tensor:
    return latents(pipe, **CALL, num_inference_steps=100)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_integrates_the_same_flow(pipe: AtollPipeline, name: str, fine: Tensor) -> None:
    """With many steps all end where Euler does; a time that was read wrongly would end elsewhere."""
    steps: list[int] = []

    def on_step(pipe: AtollPipeline, step: int, timestep: Tensor, state: State) -> State:
        steps.append(step)
        return state

    other = pipeline()
    other.scheduler = SCHEDULERS[name]
    assert (latents(other, **CALL, num_inference_steps=30) - fine).abs().mean() < 0.02 * (fine.std() + 1)
    call = {"num_inference_steps": 4, "guidance_scale": 1.0, "routing": "top-1"}
    made = other(class_labels=[0, 1], generator=generators(2), callback_on_step_end=on_step, **call)
    calls = len(other.scheduler.timesteps)  # steps are counted, and not calls
    assert steps == [0, 1, 2, 3] and other.num_timesteps == 4
    assert made.routing.stacked().shape == (4, 2, 3)
    assert made.routing.router_calls == 8 and made.routing.expert_calls == 2 * calls
    assert calls == (7 if name == "heun" else 4)


def test_kinds_of_output_show_one_picture(pipe: AtollPipeline) -> None:
    made = {
        kind: pipe(class_labels=[2], generator=generators(1), output_type=kind).images
        for kind in ("pil", "np", "pt", "latent")
    }
    assert made["np"].shape == (1, 8, 8, 3) and made["pt"].shape == (1, 3, 8, 8)
    expected = (made["latent"].clamp(-1, 1) / 2 + 0.5).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(made["np"], expected, atol=1e-6)
    np.testing.assert_allclose(made["pt"].permute(0, 2, 3, 1).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(np.asarray(made["pil"][0]) / 255, expected[0], atol=0.003)
    images, trace = pipe(class_labels=[2], generator=generators(1), return_dict=False)
    assert images[0].tobytes() == made["pil"][0].tobytes() and trace.stacked().shape == (4, 1, 3)


def test_a_callback_may_change_the_state_and_stop(pipe: AtollPipeline) -> None:
    def zero(pipe: AtollPipeline, step: int, timestep: Tensor, state: State) -> State:
        state["latents"].zero_()
        return {"latents": state["latents"].half()} if step == 3 else {}

    def stop(pipe: AtollPipeline, step: int, timestep: Tensor, state: State) -> State:
        pipe._interrupt = step == 1
        return {}

    zeros = latents(pipe, [0, 1], callback_on_step_end=zero)
    assert zeros.dtype == torch.float32 and not zeros.any()
    made = pipe(class_labels=[0], generator=generators(1), callback_on_step_end=stop)
    assert made.routing.stacked().shape[0] == 2


def test_several_pictures_of_each_label(pipe: AtollPipeline) -> None:
    four = latents(pipe, [1, 3], num_images_per_prompt=2, generator=generators(4))
    assert torch.equal(four, latents(pipe, [1, 1, 3, 3]))


def test_a_model_without_condition() -> None:
    plain = pipeline(NOTHING)
    made = plain(num_images_per_prompt=3, generator=generators(3), output_type="latent")
    assert made.images.shape == (3, *SHAPE)
    assert made.routing.expert_calls == 12  # guidance would ask the same question twice
    with pytest.raises(ConfigError, match="takes no class_labels: leave it out"):
        plain(class_labels=[0])


def test_the_oracle_sends_every_picture_to_its_cluster(pipe: AtollPipeline) -> None:
    made = pipe(class_labels=[0, 1, 2], routing="oracle", clusters=[2, 0, 1], generator=generators(3))
    assert made.routing.stacked()[0].argmax(1).tolist() == [2, 0, 1]
    with pytest.raises(ConfigError, match="needs the cluster of every picture"):
        pipe(class_labels=[0, 1, 2], routing="oracle")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fewer_bits_change_little(dtype: torch.dtype, pipe: AtollPipeline) -> None:
    whole = latents(pipe, [0, 1, 2, 3], routing="full")
    less = latents(pipeline().to(dtype), [0, 1, 2, 3], routing="full")
    assert less.dtype == torch.float32
    assert (less - whole).abs().mean() < {torch.float64: 1e-5}.get(dtype, 0.05) * whole.abs().mean()


def test_parts_pass_from_one_pipeline_to_another(
    pipe: AtollPipeline, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", logger="atoll")
    other = AtollPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    other.enable_attention_slicing()
    # On the console once a command has run in this process, else where Python's logging goes.
    assert "attention slicing changes nothing" in caplog.text + capsys.readouterr().out
    assert torch.equal(latents(pipe, [0]), latents(other, [0], num_inference_steps=4))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"routing": "top1"}, "there is no routing 'top1': did you mean 'top-1'"),
    ({"routing": "once null top-4"}, "'once null top-4' with 3 experts: give k of at most 3"),
    ({"routing": "top-2 without 0,1"}, "with 3 experts: give k of at most 1"),
    ({"routing": "top-1 without 0,1,2"}, "with 3 experts: leave fewer out"),
    ({"guidance_scale": -1.0}, "guidance_scale=-1.0: Input should be greater than or equal to 0"),
    ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
    ({"num_inference_steps": 0}, "num_inference_steps=0: Input should be greater than or equal to 1"),
    ({"output_type": "png"}, "output_type='png'"),
    ({"class_labels": [4]}, "'4' is no class label: give a number from 0 to 3"),
    ({"class_labels": None}, "needs class_labels"),
    ({"class_labels": None, "prompt": "a"}, "takes no prompt: give class_labels"),
    ({"negative_prompt": "a"}, "takes no negative prompt"),
    ({"generator": []}, "0 generators for 1 pictures"),
    ({"generator": [torch.Generator()] * 2}, "2 generators for 1 pictures"),
    ({"num_inference_steps": "4"}, "num_inference_steps='4': Input should be a valid integer"),
    ({"guidance_scale": "2"}, "guidance_scale='2': Input should be a valid number"),
    ({"guidance_scale": [2.0, 3.0]}, "a valid number"),
    ({"routing": 3}, "routing=3: "),
    ({"num_images_per_prompt": 1.5}, "num_images_per_prompt=1.5"),
    ({"class_labels": [True]}, r"class_labels=\[True\]: Input should be a valid integer"),
    ({"clusters": ["a"]}, "clusters="),
    ({"clusters": [3]}, r"clusters=\[3\]: give numbers from 0 to 2"),
    ({"latents": torch.full((1, 3, 8, 8), float("nan"))}, "latents holds numbers that are not finite"),
    ({"latents": [0.0]}, r"latents=\[0.0\]: Input should be an instance of Tensor"),
    ({"callback_on_step_end": 3}, "callback_on_step_end=3: Input should be callable"),
    ({"latents": torch.zeros(1, 3, 9, 8)}, r"latents of shape \(1, 3, 9, 8\)"),
    ({"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}, "tensor_inputs=.*should be 'latents'"),
    ({"height": 8}, "one of width and height is missing"),
]


def test_a_wrong_call_is_refused(pipe: AtollPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a network has run."""
    monkeypatch.setattr(ExpertBank, "forward", lambda *_: pytest.fail("an expert was asked"))
    monkeypatch.setattr(pipe.router, "forward", lambda *_: pytest.fail("the router was asked"))
    for call, words in WRONG:
        with pytest.raises(ConfigError, match=words):
            pipe(**{"class_labels": [0], **call})


def test_loading_is_quiet_but_for_real_warnings() -> None:
    logger, said = logging.getLogger("diffusers.pipelines.pipeline_utils"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with quiet_loading():
            logger.warning("Expected types for text_encoder: T5, got Bert")
            logger.warning("Expected types for vae: A, got B")
        logger.warning("Expected types for text_encoder: later")
    finally:
        logger.removeHandler(handler)
    assert said == ["Expected types for vae: A, got B", "Expected types for text_encoder: later"]
