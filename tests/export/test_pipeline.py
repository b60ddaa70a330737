"""A call of the pipeline: the pictures of `atoll sample`, whatever the batch, scheduler and precision."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from PIL import Image
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.expert import RouterModel
from atoll.ensemble.generation import Generation
from atoll.ensemble.integrate import euler, sample, starting_noise
from atoll.export.bank import ExpertBank
from atoll.export.pipeline import AtollPipeline
from helpers_export import LABELS, NOTHING, expert, generators, pipeline

pytestmark = pytest.mark.filterwarnings(
    # diffusers' DEIS hands tensors to numpy.
    "ignore:__array_wrap__ must accept:DeprecationWarning"
)
SHAPE = (3, 8, 8)
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
    made = pipe(class_labels=labels, generator=generators(len(labels), first), output_type="latent", **more)
    return made.images


def reference(
    pipe: AtollPipeline, labels: list[int], noise: Tensor, generation: Generation, rows: Any
) -> Tensor:
    """The plain path: the same parts, without a pipeline."""
    experts = {n: expert(n, LABELS) for n in pipe.experts.present}
    ensemble = Ensemble(
        [experts.get(n, experts[pipe.experts.present[0]]) for n in range(3)],
        RouterModel(pipe.router, pipe.card),
        pipe.experts.missing,
    )
    cond, null = Condition(labels=torch.tensor(labels)), Condition(labels=torch.tensor([4]))
    return sample(ensemble.field(cond, null, generation, rows), noise, generation.steps)


@pytest.mark.parametrize(
    "routing", ["top-1", "full", "top-2 every 2", "threshold(0.3)", "once", "sample-2", "once null sample-1"]
)
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_a_fresh_generator_gives_the_pictures_of_its_seed(
    pipe: AtollPipeline, routing: str, guidance: float
) -> None:
    labels, noise = [0, 3, 1, 2, 1], starting_noise(11, range(5), SHAPE)
    generation = Generation(guidance=guidance, routing=routing, steps=5, seed=11)
    made = pipe(
        class_labels=labels,
        generator=torch.Generator().manual_seed(11),
        num_inference_steps=5,
        guidance_scale=guidance,
        routing=routing,
        output_type="latent",
    )
    assert torch.equal(made.images, reference(pipe, labels, noise, generation, range(5)))


def test_a_list_gives_each_picture_the_one_of_its_seed_alone(pipe: AtollPipeline) -> None:
    labels = [2, 0, 1]
    listed = latents(pipe, labels, 5, routing="once")  # seeds 5, 6, 7
    alone = [latents(pipe, [label], 5 + n, routing="once") for n, label in enumerate(labels)]
    torch.testing.assert_close(listed, torch.cat(alone), rtol=0, atol=1e-5)
    single = pipe(
        class_labels=2, generator=torch.Generator().manual_seed(5), routing="once", output_type="latent"
    )
    assert torch.equal(single.images, alone[0])


def test_a_used_generator_goes_on_to_other_pictures(pipe: AtollPipeline) -> None:
    call = {"class_labels": [0, 1], "output_type": "latent", "routing": "once"}

    def twice() -> list[Tensor]:
        source = torch.Generator().manual_seed(1)
        return [pipe(generator=source, **call).images for _ in range(2)]

    first, again = twice(), twice()
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("routing", ["once", "top-1", "full", "sample-1"])
def test_a_picture_does_not_depend_on_its_batch(pipe: AtollPipeline, routing: str) -> None:
    labels = [0, 1, 2, 3, 0, 1]
    together = latents(pipe, labels, routing=routing)
    apart = [latents(pipe, labels[i : i + n], i, routing=routing) for i, n in ((0, 1), (1, 3), (4, 2))]
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-5)


CALL: dict[str, Any] = {"labels": [0, 1, 2], "routing": "full", "guidance_scale": 1.5}


@pytest.fixture(scope="module")
def fine(pipe: AtollPipeline) -> Tensor:
    return latents(pipe, **CALL, num_inference_steps=150)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_euler_integrates_the_same_flow(pipe: AtollPipeline, name: str, fine: Tensor) -> None:
    """With many steps all end where Euler does; a time that was read wrongly would end elsewhere."""
    pipe.scheduler = SCHEDULERS[name]
    try:
        close = latents(pipe, **CALL, num_inference_steps=40)
    finally:
        pipe.scheduler = euler(1)
    assert (close - fine).abs().mean() < 0.02 * (fine.std() + 1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_steps_are_counted_and_not_calls(pipe: AtollPipeline, name: str) -> None:
    seen: list[int] = []

    def on_step(
        pipe: AtollPipeline, step: int, timestep: Tensor, held: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        seen.append(step)
        return held

    pipe.scheduler = SCHEDULERS[name]
    try:
        made = pipe(
            class_labels=[0, 1],
            num_inference_steps=4,
            guidance_scale=1.0,
            routing="top-1",
            generator=generators(2),
            callback_on_step_end=on_step,
        )
        calls = len(pipe.scheduler.timesteps)
    finally:
        pipe.scheduler = euler(1)
    assert seen == [0, 1, 2, 3] and pipe.num_timesteps == 4
    assert made.routing.stacked().shape == (4, 2, 3)
    assert made.routing.router_calls == 8 and made.routing.expert_calls == 2 * calls
    assert calls == (7 if name == "heun" else 4)


@pytest.mark.parametrize(
    "scheduler",
    [DDIMScheduler(), UniPCMultistepScheduler(), FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)],
)
def test_a_scheduler_that_takes_no_velocity_is_refused(pipe: AtollPipeline, scheduler: Any) -> None:
    pipe.scheduler = scheduler
    try:
        with pytest.raises(ConfigError, match=r"does not integrate flows|use_dynamic_shifting"):
            pipe(class_labels=[0])
    finally:
        pipe.scheduler = euler(1)


def test_the_result_has_names_or_is_a_tuple(pipe: AtollPipeline) -> None:
    call: dict[str, Any] = {"class_labels": [0, 1], "routing": "top-1"}
    made = pipe(generator=generators(2), **call)
    images, trace = pipe(generator=generators(2), return_dict=False, **call)
    assert all(isinstance(image, Image.Image) and image.size == (8, 8) for image in made.images)
    assert [image.tobytes() for image in images] == [image.tobytes() for image in made.images]
    assert torch.equal(trace.stacked(), made.routing.stacked())
    assert (trace.stacked().sum(2) == 1).all()


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


def test_a_callback_may_change_the_state_and_stop(pipe: AtollPipeline) -> None:
    def zero(pipe: AtollPipeline, step: int, timestep: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
        held["latents"].zero_()
        return {"latents": held["latents"]} if step == 3 else {}

    assert not latents(pipe, [0, 1], callback_on_step_end=zero).any()

    def stop(pipe: AtollPipeline, step: int, timestep: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
        pipe._interrupt = step == 1
        return {}

    made = pipe(class_labels=[0], generator=generators(1), callback_on_step_end=stop)
    assert made.routing.stacked().shape[0] == 2


def test_several_pictures_of_each_label(pipe: AtollPipeline) -> None:
    made = latents(pipe, [1, 3], num_images_per_prompt=1)
    four = pipe(
        class_labels=[1, 3], num_images_per_prompt=2, generator=generators(4), output_type="latent"
    ).images
    same = latents(pipe, [1, 1, 3, 3])
    assert torch.equal(four, same) and made.shape[0] == 2


def test_a_model_without_condition(pipe: AtollPipeline) -> None:
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
def test_fewer_bits_change_little(dtype: torch.dtype) -> None:
    whole = latents(pipeline(), [0, 1, 2, 3], routing="full")
    less = latents(pipeline().to(dtype), [0, 1, 2, 3], routing="full")
    assert less.dtype == torch.float32
    assert (less - whole).abs().mean() < {torch.float64: 1e-5}.get(dtype, 0.05) * whole.abs().mean()


def test_parts_pass_from_one_pipeline_to_another(pipe: AtollPipeline) -> None:
    other = AtollPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    assert torch.equal(latents(pipe, [0]), latents(other, [0], num_inference_steps=4))


def test_slicing_says_why_it_does_nothing(pipe: AtollPipeline, caplog: pytest.LogCaptureFixture) -> None:
    before = latents(pipe, [0])
    pipe.enable_attention_slicing()
    assert "attention slicing changes nothing" in caplog.text
    pipe.disable_attention_slicing()
    assert torch.equal(before, latents(pipe, [0]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"routing": "top1"}, "there is no routing 'top1': did you mean 'top-K'"),
        ({"routing": "top-4"}, "'top-4' with 3 experts: give k of at most 3"),
        ({"routing": "once null top-4"}, "'once null top-4' with 3 experts: give k of at most 3"),
        ({"guidance_scale": -1.0}, "guidance_scale=-1.0: give 0 or more"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
        ({"num_inference_steps": 0}, "num_inference_steps=0: give a whole number, 1 or more"),
        ({"output_type": "png"}, "output_type='png'"),
        ({"class_labels": [4]}, "class_labels: there is no 4: give numbers from 0 to 3"),
        ({"class_labels": None}, "needs class_labels"),
        ({"class_labels": None, "prompt": "a"}, "takes no prompt: give class_labels"),
        ({"negative_prompt": "a"}, "takes no negative_prompt"),
        ({"generator": []}, r"generator=\[\]: give a torch.Generator"),
        ({"generator": 0}, "generator=0: give a torch.Generator"),
        ({"generator": [torch.Generator()] * 2}, "2 generators for 1 pictures"),
        ({"num_inference_steps": "4"}, "num_inference_steps='4': give a whole number"),
        ({"num_inference_steps": 4.0}, "num_inference_steps=4.0: give a whole number"),
        ({"guidance_scale": "2"}, "guidance_scale='2': give one number"),
        ({"guidance_scale": [2.0, 3.0]}, "give one number"),
        ({"routing": 3}, "routing=3: give a name such as 'top-1'"),
        ({"routing": ""}, "there is no routing ''"),
        ({"output_type": None}, "output_type=None: give one of pil"),
        ({"num_images_per_prompt": 1.5}, "num_images_per_prompt=1.5"),
        ({"class_labels": [True]}, "give a whole number or a list"),
        ({"class_labels": {"a": 1}}, "give a whole number or a list"),
        ({"clusters": ["a"]}, "clusters="),
        ({"clusters": [3]}, "clusters: there is no 3: give numbers from 0 to 2"),
        ({"latents": torch.full((1, 3, 8, 8), float("nan"))}, "latents holds numbers that are not finite"),
        ({"latents": [0.0]}, "latents: list instead of a tensor"),
        ({"callback_on_step_end": 3}, "callback_on_step_end=3: give a function"),
        ({"latents": torch.zeros(1, 3, 9, 8)}, r"latents of shape \(1, 3, 9, 8\)"),
        ({"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}, "callbacks cannot have 'prompt_embeds'"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt=0"),
    ],
)
def test_a_wrong_call_is_refused(
    pipe: AtollPipeline, call: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a network has run."""
    monkeypatch.setattr(ExpertBank, "forward", lambda *_: pytest.fail("an expert was asked"))
    monkeypatch.setattr(pipe.router, "forward", lambda *_: pytest.fail("the router was asked"))
    with pytest.raises(ConfigError, match=words):
        pipe(**{"class_labels": [0], **call})
