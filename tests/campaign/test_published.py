"""Published checkpoints, whole: what diffusers' own pipeline draws of a folder is what Atoll draws of it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import AtollError, ConfigError
from atoll.campaign.adopt import adopt
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.foreign import DiffusersCheckpoint, find
from atoll.model.model import Model
from atoll.model.sampler import Sampler
from atoll.train.run import train_run
from helpers import Run, merged, partitioned, refused, write_campaign
from helpers_export import load, text_tower
from published import MADE, SIZE, loaded, pictures

NOISE, JOINT = ("dit", "pixart", "alpha", "sigma"), ("sd3", "dev", "schnell")
ASPECTS = (64, 64), (64, 128)
STEPS, GUIDANCE, PROMPTS = 4, 3.0, ["a red square", "two tall houses"]
ENCODERS = {"dit": 0, "pixart": 1, "alpha": 1, "sigma": 1, "sd3": 3, "dev": 2, "schnell": 2}
LENGTHS = {"pixart": 120, "alpha": 120, "sigma": 300, "sd3": 256, "dev": 512, "schnell": 256}
FAMILIES = {"alpha": "pixart", "sigma": "pixart", "dev": "flux", "schnell": "flux"}


def settings_for(name: str, folder: Path, source: Path) -> dict[str, Any]:
    """The settings of a campaign on the latents and text states of a published folder."""
    family = FAMILIES.get(name, name)
    encoders = [str(folder / f"text_encoder{'' if n == 0 else f'_{n + 1}'}") for n in range(ENCODERS[name])]
    data: dict[str, Any] = {
        "source": str(source),
        "vae": str(folder / "vae"),
        "ingest": {"size": SIZE, "mode": "rgb", "label": None if encoders else "label"},
    }
    if name == "alpha":  # two of its aspects, at a sixteenth of its sides
        sizes = [f"{width}x{height}" for height, width in ASPECTS]
        data["ingest"] |= {"size": 1024, "buckets": {"sizes": sizes, "max_upscale": 99, "min_rows": 1}}
    if encoders:
        data |= {"text_encoder": encoders, "text_length": LENGTHS[name]}
    arguments = {"guidance_embeds": True} if name == "dev" else {}
    settings = {"condition": "text" if encoders else "class", "data": data, "monolith": False}
    settings |= {"network": {"family": family, "patch": 2, "arguments": arguments}, "router": {"patch": 4}}
    return settings | {"partition": {"method": "random", "k": 1}, "budget": {"samples": 32}}


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Model]]:
    """A published folder, and the ensemble of one expert that was adopted from it."""

    @cache
    def made(name: str) -> tuple[Path, Model]:
        folder = tmp_path_factory.mktemp(name)
        checkpoint = MADE[name](folder / "there")
        source = pictures(folder / "rows.parquet", wide=name == "alpha")
        campaign = partitioned(folder / "c", settings_for(name, checkpoint, source))
        adopt(campaign, str(checkpoint), 0)
        train_run(campaign, "router")
        assemble(Campaign.open(folder / "c"))
        return checkpoint, Model.load(folder / "c", encoders=campaign.config.encoders)

    return made


def ours(
    model: Model, prompts: list[Any], sigmas: list[float], noise: Tensor, guidance: float, size: str | None
) -> Tensor:
    """Atoll's pictures `(B, C, H, W)` in [0, 1] at these noise levels."""
    times = diffusers.FlowMatchEulerDiscreteScheduler()
    times.set_timesteps(sigmas=sigmas)
    times.set_begin_index(0)
    generation = model.generation.with_(steps=len(sigmas), guidance=guidance, size=size)
    sampling = model.sampling(model.conditions(prompts), generation, noise=noise)
    latents = sampling.start(model.bank, range(len(prompts)), scheduler=times).run()
    return (model.vae.decode(latents) / 2 + 0.5).clamp(0, 1)


def same(one: Tensor, other: Any) -> None:
    """Pictures in [0, 1] that agree, and are no flat colour."""
    assert one.std() > 0.02
    torch.testing.assert_close(one, torch.as_tensor(np.asarray(other)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "sides"),
    [*((name, (SIZE, SIZE)) for name in NOISE if name != "alpha"), *(("alpha", sides) for sides in ASPECTS)],
)
def test_networks_of_noise_draw_what_their_pipeline_draws(
    name: str, sides: tuple[int, int], adopted: Callable[[str], tuple[Path, Model]]
) -> None:
    """By DDIM, whose steps are Euler's in the flow: at the same levels the pictures are the same."""
    folder, model = adopted(name)
    shape = [side // model.vae.factor for side in sides]
    noise = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"prompt": PROMPTS, "latents": noise, "height": sides[0], "width": sides[1]}
    how |= {"use_resolution_binning": False, "clean_caption": False}
    if name == "dit":  # it takes no latents: the generator is at the same place
        how = {"class_labels": [999, 5], "generator": torch.Generator().manual_seed(1)}
    how |= {"guidance_scale": GUIDANCE, "num_inference_steps": STEPS, "output_type": "pt"}
    with loaded(folder) as pipe:
        pipe.scheduler = diffusers.DDIMScheduler(clip_sample=False)
        found = pipe(**how).images
        kept = pipe.scheduler.alphas_cumprod[pipe.scheduler.timesteps].double()
    alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
    sigmas = (sigma / (alpha + sigma)).tolist()
    start = noise / float(alpha[0] + sigma[0])
    prompts: list[Any] = ["999", "5"] if name == "dit" else PROMPTS
    same(found, ours(model, prompts, sigmas, start, GUIDANCE, f"{sides[1]}x{sides[0]}"))


def shift_of(pipe: Any) -> float | str:
    """The time shift of a scheduler; FLUX.1-dev's goes by the number of patches."""
    config = pipe.scheduler.config
    return "tokens" if config.use_dynamic_shifting else float(config.shift)


def theirs(name: str, pipe: Any, noise: Tensor, prompts: list[str], guidance: float) -> Tensor:
    """What diffusers' pipeline draws of prompts, at Atoll's times."""
    how: dict[str, Any] = {"prompt": prompts, "guidance_scale": guidance, "num_inference_steps": STEPS}
    how |= {"sigmas": [1 - n / STEPS for n in range(STEPS)], "max_sequence_length": LENGTHS[name]}
    how |= {"latents": noise if name == "sd3" else pipe._pack_latents(noise, *noise.shape)}
    how |= {"height": SIZE, "width": SIZE, "output_type": "pt"}
    if name == "schnell":  # it has no guidance of its own: a second call, where it is asked for
        how |= {"true_cfg_scale": guidance, "negative_prompt": [""] * len(prompts), "guidance_scale": 0.0}
    return torch.as_tensor(pipe(**how).images)


@pytest.mark.parametrize("name", JOINT)
def test_flows_draw_what_their_pipeline_draws(
    name: str, adopted: Callable[[str], tuple[Path, Model]]
) -> None:
    """With all of their text encoders, the padding that they were trained on, and dev's guidance."""
    folder, model = adopted(name)
    noise = torch.randn(2, 16, SIZE // 2, SIZE // 2, generator=torch.Generator().manual_seed(1))
    with loaded(folder) as pipe:
        found = theirs(name, pipe, noise, PROMPTS, GUIDANCE)
        shift = shift_of(pipe)
    generation = model.generation.with_(steps=STEPS, guidance=GUIDANCE, shift=shift)
    (batch,) = model.generate(model.conditions(PROMPTS), generation, noise=noise)
    same(found, (model.vae.decode(batch.latents) / 2 + 0.5).clamp(0, 1))
    assert batch.trace is not None and batch.trace.branches == (1 if name == "dev" else 2)
    # Each of these counts here: without it the picture is another one.
    conditions = model.conditions(PROMPTS)
    for cond in (
        replace(conditions, cond=lambda numbers: conditions.cond([1 - n for n in numbers])),
        replace(conditions, cond=lambda numbers: without(conditions.cond(numbers), "pooled")),
        replace(conditions, cond=lambda numbers: without(conditions.cond(numbers), "text")),
    ):
        other = next(model.generate(cond, generation, noise=noise)).latents
        assert float((other - batch.latents).abs().mean()) > 0.02
    other = next(model.generate(conditions, generation.with_(guidance=1.5), noise=noise)).latents
    assert float((other - batch.latents).abs().mean()) > 0.02


def without(cond: Condition, part: str) -> Condition:
    """The same with zeros for one part."""
    return replace(cond, **{part: torch.zeros_like(getattr(cond, part))})


def initial(name: str, folder: Path, source: Path) -> dict[str, Any]:
    """Settings of a campaign whose networks start from a published one, with the arguments of its config."""
    config = json.loads((folder / "transformer/config.json").read_text())
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    noise = {"prediction": "eps", "schedule": "ddpm-linear"} if name in NOISE else {}
    network = {"init": str(folder), "arguments": arguments}
    return merged(settings_for(name, folder, source), {"network": network, "objective": noise})


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_training_goes_on_from_all_of_its_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With states that are stored, and with states that each step encodes: the same bits."""
    folder, source, weights = MADE[name](tmp_path / "there"), pictures(tmp_path / "rows.parquet"), []
    for precompute in (True, False) if name in ("sd3", "dev") else (True,):
        data = {"data": {"precompute_text": precompute}}
        campaign = partitioned(tmp_path / str(precompute), merged(initial(name, folder, source), data))
        assert "100.0% of the numbers" in capsys.readouterr().out
        train_run(campaign, "expert", 0)
        trained = Checkpoint(campaign.store, "islands/0/expert").read()[1]
        first = DiffusersCheckpoint.weights(find(str(folder), Path()))
        assert trained.keys() <= first.keys()
        moved = [float((trained[key] - first[key]).abs().max()) for key in trained]
        assert max(moved) > 1e-4 and all(np.isfinite(moved))
        weights.append(trained)
    assert all(torch.equal(weights[0][key], other[key]) for other in weights[1:] for key in other)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "sd3",
            {"data": {"text_encoder": "THERE/text_encoder_3"}},
            (
                "takes a pooled text of 20 numbers, data.text_encoder gives 0",
                "set data.text_encoder: [THERE/text_encoder, THERE/text_encoder_2, THERE/text_encoder_3]",
            ),
        ),
        (
            "dev",
            {"data": {"text_encoder": ["THERE/text_encoder_2"]}},
            ("a pooled text of 8 numbers", "[THERE/text_encoder, THERE/text_encoder_2]"),
        ),
        (
            "dev",
            {"network": {"arguments": {"guidance_embeds": False}}},
            ("has an input for guidance", "network.arguments: {guidance_embeds: true}"),
        ),
        (
            "schnell",
            {"network": {"arguments": {"guidance_embeds": True}}},
            ("has no input for guidance", "network.arguments: {guidance_embeds: false}"),
        ),
        (
            "sd3",
            {"data": {"text_length": 77}},
            ("trained on 256 to 512 tokens of T5, the campaign's data have 77", "data.text_length=256"),
        ),
        (
            "dev",
            {"data": {"text_encoder": ["THERE/text_encoder_2", "THERE/text_encoder_2"]}},
            ("of several text encoders one must be CLIP's",),
        ),
        (
            "dev",
            {"data": {"text_encoder": ["THERE/text_encoder", "THERE/text_encoder_5"]}},
            ("cannot load the text encoder 'THERE/text_encoder_5'",),
        ),
    ],
)
def test_what_a_checkpoint_needs_and_a_campaign_lacks_is_named(
    name: str, changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    """Before any work."""
    folder, source = MADE[name](tmp_path / "there"), pictures(tmp_path / "rows.parquet")
    changes = json.loads(json.dumps(changes).replace("THERE", str(folder)))
    words = tuple(word.replace("THERE", str(folder)) for word in words)
    settings = merged(settings_for(name, folder, source), changes)
    campaign = write_campaign(tmp_path / "c", merged(settings, {"network": {"init": str(folder)}}))
    refused(run("data", "prepare", campaign), *words)
    assert not (campaign / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINT)
def test_an_export_is_the_pipeline_with_all_of_its_encoders(name: str, tmp_path: Path, run: Run) -> None:
    folder, source = MADE[name](tmp_path / "there"), pictures(tmp_path / "rows.parquet")
    sampling = {"steps": STEPS, "shift": 3.0 if name == "schnell" else "tokens"}
    settings = merged(initial(name, folder, source), {"monolith": True, "sampling": sampling})
    campaign = partitioned(tmp_path / "c", settings)
    train_run(campaign, "monolith")
    argv = ["export", tmp_path / "c", "--model", "monolith", "--to", tmp_path / "out"]
    refused(run(*argv, "--encoders", "name"), "--encoders copy")
    answer = run(*argv, "--encoders", "copy")
    assert answer.code == 0 and (tmp_path / "out/picture.png").is_file(), answer
    encoders = [path.name for path in sorted((tmp_path / "out").glob("text_encoder*"))]
    assert encoders == [path.name for path in sorted(folder.glob("text_encoder*"))]
    model = Model.load(campaign.store, "monolith", encoders=campaign.config.encoders)
    noise = torch.randn(2, 16, SIZE // 2, SIZE // 2, generator=torch.Generator().manual_seed(1))
    generation = model.generation.with_(steps=STEPS, guidance=GUIDANCE, shift=sampling["shift"])
    (batch,) = model.generate(model.conditions(PROMPTS), generation, noise=noise)
    with loaded(tmp_path / "out") as pipe:
        assert type(pipe).__name__ == json.loads((folder / "model_index.json").read_text())["_class_name"]
        found = theirs(name, pipe, noise, PROMPTS, GUIDANCE)
    same(found, (model.vae.decode(batch.latents) / 2 + 0.5).clamp(0, 1))
    # What README.md says, as it stands.
    program = re.findall(r"```python\n(.*?)```", (tmp_path / "out/README.md").read_text(), re.DOTALL)[0]
    picture = tmp_path / "one.png"
    for name, path in (("out", tmp_path / "out"), ("picture.png", picture)):
        program = program.replace(f'"{name}"', repr(str(path)))
    exec(compile(program, "README.md", "exec"), {"__name__": "stranger"})
    with Image.open(picture) as drawn:
        assert drawn.size == (SIZE, SIZE)
    # CLIP's texts are cut where the campaign's are, and no pipeline cuts them at fewer than 77 tokens.
    card = tmp_path / "c/monolith/expert/card.json"
    content = json.loads(card.read_text())
    content["text"]["max_length"] = 76
    card.write_text(json.dumps(content))
    refused(run(*argv, "--encoders", "copy"), "reads 77 to 512 tokens, and this model 76")


@pytest.mark.parametrize("name", ["sd3", "dev"])
def test_an_exported_ensemble_holds_all_encoders(
    name: str, adopted: Callable[[str], tuple[Path, Model]], tmp_path: Path, run: Run
) -> None:
    folder, model = adopted(name)
    argv = ["export", folder.parent / "c", "--to", tmp_path / "out", "--encoders", "copy", "--no-picture"]
    assert run(*argv).code == 0
    pipe = load(tmp_path / "out")
    how = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "latent"}
    drawn = pipe(PROMPTS, generator=torch.Generator().manual_seed(7), **how).images
    opened = Model.load(tmp_path / "out")
    generation = opened.generation.with_(steps=STEPS, guidance=GUIDANCE, seed=7)
    for one in (model, opened):
        (batch,) = one.generate(one.conditions(PROMPTS), generation)
        torch.testing.assert_close(batch.latents, drawn, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="pooled vector beside prompt_embeds"):
        pipe(prompt_embeds=torch.zeros(1, 2, 24), prompt_attention_mask=torch.ones(1, 2), guidance_scale=1.0)
    if name == "sd3":  # as diffusers' users turn it off; the formula would leave the prompt out
        off, none = (
            pipe(PROMPTS, generator=torch.Generator().manual_seed(7), **{**how, "guidance_scale": g}).images
            for g in (0.0, 1.0)
        )
        assert torch.equal(off, none)
    pipe.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again(PROMPTS, generator=torch.Generator().manual_seed(7), **how).images, drawn)


def test_encoders_that_stay_outside_are_loaded_beside_those_in_the_folder(
    adopted: Callable[[str], tuple[Path, Model]], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of FLUX.1: CLIP is small and copied, T5 is not."""
    folder, model = adopted("dev")
    small = {"text_encoder": "MIT"}
    monkeypatch.setattr("atoll.export.encoders.licence_of", lambda name: small.get(Path(name).name))
    assert run("export", folder.parent / "c", "--to", tmp_path / "out", "--no-picture").code == 0
    assert [path.name for path in (tmp_path / "out").glob("text_encoder*")] == ["text_encoder"]
    with pytest.raises(ConfigError, match="does not know"):
        load(tmp_path / "out")
    pipe = load(tmp_path / "out", encoders=Campaign.open(folder.parent / "c").config.encoders)
    how = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "latent"}
    drawn = pipe(PROMPTS, generator=torch.Generator().manual_seed(7), **how).images
    generation = model.generation.with_(steps=STEPS, guidance=GUIDANCE, seed=7)
    (batch,) = model.generate(model.conditions(PROMPTS), generation)
    torch.testing.assert_close(batch.latents, drawn, rtol=0, atol=1e-5)


def test_rows_of_different_guidance_share_a_batch(adopted: Callable[[str], tuple[Path, Model]]) -> None:
    """Each has its own scale as an input; a cluster's expert sees the rows that are its own."""
    _, model = adopted("dev")
    alone = list[Tensor]()
    parts = list[Sampler]()
    for seed, guidance in enumerate((1.0, 2.5)):
        generation = model.generation.with_(steps=STEPS, guidance=guidance, seed=seed)
        sampling = model.sampling(model.conditions(PROMPTS[seed]), generation)
        alone.append(sampling.start(model.bank, [0]).run())
        parts.append(sampling.start(model.bank, [0]))
    parts[0].advance()
    parts[1].advance()
    torch.testing.assert_close(Sampler.merge(parts).run(), torch.cat(alone), rtol=0, atol=1e-5)


def test_a_card_whose_encoders_do_not_agree_is_refused(adopted: Callable[[str], tuple[Path, Model]]) -> None:
    """It comes from a stranger: none of this may be found out in the middle of a picture."""
    card = json.loads(adopted("dev")[1].card.model_dump_json())
    assert card["shape"]["pooled_width"] == card["text"]["pooled"] == 8 and card["shape"]["guidance"]
    parts = card["text"]["parts"]
    for part, value in (
        *(("parts", wrong) for wrong in (5, parts[:1], parts[::-1])),
        *(("pooled", 0), ("pooled", 9), ("name", "minilm")),
    ):
        with pytest.raises(AtollError):
            Card.of_json({**card, "text": {**card["text"], part: value}}, "card.json")


def test_arguments_that_make_no_network_are_one_line(tmp_path: Path, run: Run) -> None:
    for odd in ({"num_layers": "x"}, {"axes_dims_rope": [4, 4, 4]}, {"axes_dims_rope": []}):
        network = {"family": "flux", "patch": 2, "arguments": odd}
        folder = write_campaign(tmp_path / "c", {"condition": "text", "network": network})
        refused(run("plan", folder), "network.arguments make no FluxTransformer2DModel that computes")


def test_guidance_is_an_input_of_a_network_that_is_trained_from_scratch(tmp_path: Path) -> None:
    """With one text encoder, whose padding is masked, and without a pooled vector."""
    network = {"family": "flux", "patch": 2, "arguments": {"guidance_embeds": True}}
    data = {"text_encoder": str(text_tower(tmp_path / "text")), "text_length": 8}
    settings = {"condition": "text", "network": network, "data": data, "budget": {"samples": 32}}
    campaign = partitioned(tmp_path / "c", settings)
    train_run(campaign, "expert", 0)
    trained = Checkpoint(campaign.store, "islands/0/expert").read()[1]
    assert any("guidance_embedder" in name for name in trained)
