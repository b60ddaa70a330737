"""The folder of a pipeline: what is saved comes back to the bit, and what is wrong with it is told early."""

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.base.errors import AtollError, ConfigError, PartitionError, StoreError
from atoll.encoders.text import TextEncoder
from atoll.export.bank import ExpertBank
from atoll.export.pipeline import AtollPipeline
from atoll.model.checkpoint import Checkpoint
from atoll.model.model import Model
from atoll.model.settings import Residency
from atoll.model.stored import WEIGHTS
from atoll.networks.families import family
from atoll.store.store import Store
from helpers_export import LABELS, expert, expert_of, generators, load, pipeline, state, text_pipeline

PROMPTS: dict[str, Any] = {"prompt": ["a red square", "bar", "", "two green"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    text_pipeline(folder).save_pretrained(folder / "model")
    return folder


def picture(pipe: AtollPipeline, **call: Any) -> torch.Tensor:
    call = call or {"class_labels": [0, 1, 2, 3]}
    return pipe(generator=generators(4), output_type="latent", routing="full", **call).images


def test_saved_and_loaded_it_is_the_same_to_the_bit(saved: Path, tmp_path: Path) -> None:
    made, back = pipeline(), load(saved)
    before, after = state(made), state(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(picture(made), picture(back))
    assert back.experts.cards == made.experts.cards and back.config.num_inference_steps == 4
    back.save_pretrained(tmp_path / "again")
    for path in sorted(p for p in saved.rglob("*") if p.is_file()):
        assert (tmp_path / "again" / path.relative_to(saved)).read_bytes() == path.read_bytes(), path
    content = json.loads((saved / "experts/experts.json").read_text())
    assert content["k"] == 3 and set(content["experts"]) == {"0", "1", "2"}
    bank = ExpertBank.from_pretrained(saved / "experts", experts=[1], torch_dtype=torch.float64)
    assert bank.present == (1,) and bank.dtype == torch.float64


def test_the_folder_holds_what_its_index_names_as_safetensors_json_and_text(texts: Path) -> None:
    model = texts / "model"
    files = [path for path in model.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    (texts / "new").touch()
    assert {path.stat().st_mode for path in files} == {(texts / "new").stat().st_mode}
    index = json.loads((model / "model_index.json").read_text())
    named = {name for name, value in index.items() if isinstance(value, list) and value[0]}
    assert named == {"experts", "router", "scheduler", "vae", "text_encoder", "tokenizer"}
    assert {path.name for path in model.iterdir() if path.is_dir()} == named
    assert index["experts"] == ["atoll.export.bank", "ExpertBank"]
    assert index["router"] == ["atoll.networks.router", "Router"]
    assert "_name_or_path" not in index
    with pytest.raises(ConfigError, match="safetensors"):
        pipeline().save_pretrained(model, safe_serialization=False)


def test_a_type_of_numbers_is_kept_and_said(
    saved: Path, texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """diffusers' own `to` warns of layers that there are none of; nobody sees that."""
    diffusers.utils.logging.enable_propagation()
    half = load(saved)
    half.to(torch.bfloat16)
    diffusers.utils.logging.disable_propagation()
    assert "float32" not in caplog.text
    assert torch.equal(picture(half), picture(load(saved, torch_dtype=torch.bfloat16)))
    assert {p.dtype for p in (*half.experts.parameters(), *half.router.parameters())} == {torch.bfloat16}
    half.save_pretrained(tmp_path / "half")
    assert {t.dtype for t in load_file(tmp_path / "half/experts/0" / WEIGHTS).values()} == {torch.bfloat16}
    back = load(tmp_path / "half")
    assert back.experts.cards[0].provenance["saved_as"] == "bfloat16"
    assert torch.equal(picture(half), picture(back))
    wide = load(texts / "model", torch_dtype=torch.bfloat16).to(torch.float32)  # down and up again
    wide.save_pretrained(tmp_path / "wide")
    assert {p.dtype for p in load(tmp_path / "wide").text_encoder.parameters()} == {torch.float32}


# Text and latents.


def test_texts_and_latents_travel_with_their_encoders(texts: Path, tmp_path: Path) -> None:
    made, back = text_pipeline(tmp_path), load(texts / "model")
    assert torch.equal(picture(made, **PROMPTS), picture(back, **PROMPTS))
    images = [pipe("a red square", generator=generators(1)).images[0] for pipe in (made, back)]
    assert images[0].size == (16, 16) and images[0].tobytes() == images[1].tobytes()


def test_without_their_folders_encoders_are_found_by_name(tmp_path: Path) -> None:
    pipe, folder = text_pipeline(tmp_path), tmp_path / "light"
    expected = picture(pipe, **PROMPTS)
    pipe.save_pretrained(tmp_path / "model")
    load(tmp_path / "model", text_encoder=None, tokenizer=None, vae=None).save_pretrained(folder)
    assert not any((folder / name).exists() for name in ("text_encoder", "tokenizer", "vae"))
    with pytest.raises(ConfigError, match=r"which Atoll does not know: if you trust it, load .* encoders=\["):
        load(folder)
    encoders = [str(tmp_path / name) for name in ("text", "vae")]
    assert torch.equal(picture(load(folder, encoders=encoders), **PROMPTS), expected)
    weights = tmp_path / "text/model.safetensors"
    save_file({n: t + 1 for n, t in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match="text encoder is not the one of the training"):
        load(folder, encoders=encoders)


def test_prompt_embeds_stand_for_prompts(texts: Path) -> None:
    whole, light = load(texts / "model"), load(texts / "model", text_encoder=None, tokenizer=None)
    tower = TextEncoder("", whole.tokenizer, whole.text_encoder, 8, 16)
    states, mask = tower.encode(["a red square", "bar", ""])
    call = {
        "prompt_embeds": states[:2],
        "prompt_attention_mask": mask[:2],
        "negative_prompt_embeds": states[2:],
        "negative_prompt_attention_mask": mask[2:],
        "num_images_per_prompt": 2,
    }
    expected = picture(whole, prompt=["a red square", "bar"], num_images_per_prompt=2)
    assert torch.equal(picture(light, **call), expected)
    with pytest.raises(ConfigError, match="loaded without its text encoder"):
        light("a red square")
    with pytest.raises(ConfigError, match="needs negative_prompt_embeds"):
        light(prompt_embeds=states[:1], prompt_attention_mask=mask[:1])


def test_negative_prompts_lead_away(texts: Path) -> None:
    pipe = load(texts / "model")
    plain = picture(pipe, **PROMPTS)
    assert torch.equal(picture(pipe, **PROMPTS, negative_prompt=""), plain)
    one = picture(pipe, **PROMPTS, negative_prompt="green")
    each = picture(pipe, **PROMPTS, negative_prompt=["green"] * 4)
    torch.testing.assert_close(one, each, rtol=0, atol=1e-5)
    assert not torch.equal(one, plain)
    with pytest.raises(ConfigError, match="2 negative prompts for 4 prompts"):
        picture(pipe, **PROMPTS, negative_prompt=["green", "red"])


def test_a_prompt_that_is_too_long_is_refused_or_cut(texts: Path) -> None:
    pipe, short = load(texts / "model"), "a red square bar one two green"
    words = "has 11 tokens, 8 are taken: what begins with 'red square bar' would be lost: shorten it, or"
    with pytest.raises(ConfigError, match=words):
        pipe(f"{short} red square bar")
    cut = picture(pipe, prompt=[f"{short} red square bar"] * 4, truncate_prompt=True)
    assert torch.equal(cut, picture(pipe, prompt=[short] * 4))


def test_encoders_of_another_model_are_refused(texts: Path, saved: Path, tmp_path: Path) -> None:
    pipe = load(texts / "model")
    with torch.no_grad():
        next(pipe.text_encoder.parameters()).add_(1)
    with pytest.raises(ConfigError, match="text encoder is not the one of the training"):
        load(texts / "model", text_encoder=pipe.text_encoder)
    with pytest.raises(ConfigError, match="takes no text"):
        load(saved, text_encoder=pipe.text_encoder)
    with torch.no_grad():
        next(pipe.vae.parameters()).add_(1)
    with pytest.raises(ConfigError, match="VAE is not the one of the training"):
        load(texts / "model", vae=pipe.vae)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_experts_of_several_families_and_predictions(name: str, texts: Path, tmp_path: Path) -> None:
    """One Flux or SD3 beside one PixArt that predicts noise on another schedule, and back from the folder."""
    pipe = load(texts / "model")
    shape, producers = pipe.card.shape, {"text": pipe.card.text, "latents": pipe.card.latents}
    before = picture(pipe, **PROMPTS)
    pipe.experts.add(expert_of(name, 0, shape, **producers))
    pipe.experts.add(expert(1, shape, prediction="eps", schedule="vp-cosine", **producers))
    pipe.save_pretrained(tmp_path / "mixed")
    back = load(tmp_path / "mixed")
    classes = [type(network) for network in back.experts.networks.values()]
    assert classes == [family(one).network_class() for one in (name, "pixart")]
    after = [picture(p, **PROMPTS) for p in (pipe, back)]
    assert torch.equal(*after) and not torch.equal(before, after[0])


# Where a pipeline is saved.


def test_what_is_not_ours_is_not_overwritten(saved: Path, tmp_path: Path) -> None:
    pipe = load(saved)
    for name in ("mine/experts/7/thesis.txt", "camp/campaign.json", "camp/ensemble/model_index.json", "file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"_class_name": "AtollPipeline"}')
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name, words in (
        ("mine", "holds something else: give a new folder"),
        ("camp", "holds something else"),
        ("camp/ensemble", "belongs to a campaign"),
        ("file", "is a file"),
        ("s3://bucket/model", "is a URL"),
    ):
        with pytest.raises(ConfigError, match=words):
            pipe.save_pretrained(name if "://" in name else tmp_path / name)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_evaluation_goes_along_with_the_very_parts_it_is_of(copy: Path, tmp_path: Path) -> None:
    pipe = load(copy)
    metric = {"distance": "a distance", "reference": "pictures", "reference_rows": 9}
    metric |= {"samples": 9, "steps": 9, "guidance": 2.0}
    rows = [{"name": "once", "distance": 7.5}]
    pipe.about = {"name": "It", "evaluation": {"metric": metric, "rows": rows}}
    pipe.picture = b"png"
    pipe.save_pretrained(copy)

    def goes_along(loaded: AtollPipeline, name: str) -> bool:
        loaded.save_pretrained(tmp_path / name)
        text = (tmp_path / name / "README.md").read_text()
        assert text.startswith("---") and "# It" in text
        with_picture = "![Samples]" in text
        assert with_picture == (tmp_path / name / "picture.png").exists() == ("| once | 7.5 |" in text)
        return with_picture

    assert goes_along(load(copy), "whole")
    assert not goes_along(load(copy, experts=[0, 2]), "some")
    assert not goes_along(load(tmp_path / "some"), "again")
    changed = load(copy)
    changed.experts.add(expert(1, LABELS, seed=77))
    assert not goes_along(changed, "whole")  # over the earlier picture
    assert not goes_along(load(copy, torch_dtype=torch.bfloat16), "half")


def test_a_scheduler_that_takes_no_velocity_is_neither_called_nor_saved(saved: Path, tmp_path: Path) -> None:
    pipe = load(saved)
    shifting = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for scheduler, words in (
        (diffusers.DDIMScheduler(), "does not integrate flows"),
        (diffusers.UniPCMultistepScheduler(), "does not integrate flows"),
        (shifting, "use_dynamic_shifting"),
        (None, "None is no scheduler"),
    ):
        pipe.scheduler = scheduler
        with pytest.raises(ConfigError, match=words):
            pipe.save_pretrained(tmp_path / "model")
        with pytest.raises(ConfigError, match=words):
            pipe(class_labels=0)
    assert not (tmp_path / "model").exists()


# Partial ensembles.


def test_some_of_the_experts(copy: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    shutil.rmtree(copy / "experts/1")  # what is not loaded is not looked at
    with caplog.at_level(logging.WARNING):
        some = load(copy, experts=[0, 2])
    assert "partial ensemble: experts 1 of 3 are missing" in caplog.text
    assert some.experts.present == (0, 2) and len(some.experts) == 3
    trace = some(class_labels=[0, 1], routing="full", generator=generators(2)).routing.stacked()
    assert (trace[:, :, 1] == 0).all() and (trace[:, :, [0, 2]] > 0).all()
    torch.testing.assert_close(trace.sum(2), torch.ones(4, 2))
    some.save_pretrained(tmp_path / "some")
    assert "**Partial: experts 1 of 3 are missing.**" in (tmp_path / "some/README.md").read_text()
    assert torch.equal(picture(load(tmp_path / "some")), picture(some))


def test_one_is_added_later_and_another_replaced(saved: Path, tmp_path: Path) -> None:
    """Without touching the others."""
    folder = tmp_path / "model"
    some = load(saved, experts=[0, 2])
    some.save_pretrained(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "experts").rglob(WEIGHTS)}
    some.experts.add(saved / "experts/1")
    some.save_pretrained(folder)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    old = picture(load(folder))
    assert torch.equal(old, picture(load(saved)))
    some.experts.add(expert(1, LABELS, seed=77))
    some.save_pretrained(folder)
    assert torch.equal(picture(load(folder)), picture(some)) and not torch.equal(picture(some), old)


def test_one_is_dropped(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was not loaded is not lost."""
    with pytest.raises(ConfigError, match="holds experts 1, 2, which this pipeline does not have"):
        load(copy, experts=[0]).save_pretrained(copy)
    pipe = load(copy)
    pipe.experts.drop(2)
    assert "experts 2 of 3 are missing" in caplog.text
    pipe.save_pretrained(copy)
    assert not (copy / "experts/2").exists()
    assert load(copy).experts.present == (0, 1)
    pipe.experts.drop(0)
    with pytest.raises(ConfigError, match="expert 1 is the last one"):
        pipe.experts.drop(1)
    with pytest.raises(ConfigError, match="there is no expert 0"):
        pipe.experts.drop(0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "q" * 64}, "another partition"),
        ({"latents": {"name": "x", "hash": "1", "shift": 0.0, "scale": 1.0}}, "another latents"),
        ({"text": {"name": "t5", "hash": "2", "max_length": 8}}, "another text"),
        ({"condition": "none"}, "another condition"),
    ],
)
def test_parts_of_other_campaigns_are_refused(saved: Path, changes: dict[str, Any], words: str) -> None:
    pipe = load(saved)
    with pytest.raises(PartitionError, match=words):
        pipe.experts.add(expert(1, LABELS, **changes), 1)
    assert pipe.experts.cards == load(saved).experts.cards
    with pytest.raises(PartitionError, match=words):
        AtollPipeline(ExpertBank({0: expert(0, LABELS, **changes)}, 3), pipe.router, pipe.scheduler)


def test_places_that_do_not_exist(saved: Path) -> None:
    pipe = load(saved)
    with pytest.raises(PartitionError, match="place 0 holds expert 1"):
        pipe.experts.add(expert(1, LABELS), 0)
    with pytest.raises(PartitionError, match="holds monolith"):
        pipe.experts.add(expert(1, LABELS, role="monolith", island=None), 1)
    with pytest.raises(ConfigError, match="a monolith is of no cluster"):
        pipe.experts.add(expert(1, LABELS, role="monolith", island=None))
    with pytest.raises(ConfigError, match="no place 3 among 3"):
        pipe.experts.add(expert(3, LABELS))
    with pytest.raises(PartitionError, match="knows 3 experts, the bank has 2 places"):
        AtollPipeline(ExpertBank({0: expert(0, LABELS)}, 2), pipe.router, pipe.scheduler)


def test_folders_that_are_no_experts(saved: Path, tmp_path: Path) -> None:
    pipe = load(saved)
    for name in ("camp/campaign.json", "island/island.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    for folder, words in (
        (tmp_path / "camp", r"is not the folder of one expert: give .*camp/islands/K/expert"),
        (tmp_path / "island", r"give .*island/expert"),
        (saved, r"give .*model/experts/K"),
        (saved / "router", "a router is of no cluster"),
        (3, "3 is no expert"),
    ):
        with pytest.raises(ConfigError, match=words):
            pipe.experts.add(folder)


# What is wrong with a folder, told before anything is loaded.


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


EXPERT = "experts/1/" + WEIGHTS
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: rewrite(f / EXPERT, lambda data: bytes(100)), "damaged, or no safetensors"),
    (lambda f: rewrite(f / EXPERT, lambda data: data[:-8]), "bytes instead of"),
    (
        lambda f: rewrite(f / EXPERT, lambda data: b"\x80\x04\x95".ljust(len(data))),
        "is pickle, not safetensors",
    ),
    (
        lambda f: (f / EXPERT).rename(f / "experts/1/diffusion_pytorch_model.bin"),
        "model.bin is pickle, which",
    ),
    (lambda f: shutil.rmtree(f / "router"), "has no router"),
    (lambda f: (f / "router/card.json").unlink(), "router/card.json is missing"),
    (lambda f: shutil.rmtree(f / "scheduler"), "has no scheduler"),
    (lambda f: shutil.rmtree(f / "experts/0"), "experts/0 is missing"),
    (lambda f: (f / "experts/experts.json").unlink(), "experts.json is missing"),
    (lambda f: (f / "ensemble.json").unlink(), "not complete"),
    (lambda f: (f / "model_index.json").unlink(), "is no pipeline"),
    (lambda f: edit_json(f / "ensemble.json", format="atoll/model 9"), "model 9"),
    (lambda f: edit_json(f / "experts/0/card.json", format="atoll/card 9"), "card 9"),
    (lambda f: edit_json(f / "experts/0/card.json", rows=11), "does not match|bytes instead"),
    (lambda f: shutil.copy(f / "experts/0/card.json", f / "experts/1"), "experts/1 holds expert 0"),
    (
        lambda f: edit_json(f / "scheduler/scheduler_config.json", shift=3.0),
        "r_config.json .*(SHA-256|of)",
    ),
    (lambda f: edit_json(f / "model_index.json", _class_name="DiTPipeline"), "holds a DiTPipeline"),
    (
        lambda f: edit_json(f / "model_index.json", vae=["some.where", "Thing"]),
        "wants vae from some.where.Thing",
    ),
    (lambda f: (f / "router/atoll.py").write_text("raise SystemExit"), "has no place in router/"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_what_is_wrong_is_told_before_a_network_is_built(
    damage: Callable[[Path], object], words: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a network was loaded"))
    with pytest.raises(AtollError, match=words) as caught:
        load(copy)
    assert "\n" not in str(caught.value) and caught.value.fix


@pytest.mark.parametrize("residency", [None, Residency(experts=1)], ids=["resident", "on disk"])
@pytest.mark.parametrize("way", ["pipeline", "model"])
def test_weights_are_read_once_and_compared_with_their_hash(
    way: str, residency: Residency | None, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, get, file_digest = Counter[str](), Store.get, hashlib.file_digest

    def counted(store: Store, key: str) -> bytes:
        reads[str((store.local / key).resolve())] += 1
        return get(store, key)

    def hashed(file: Any, name: str) -> Any:
        reads[os.readlink(f"/proc/self/fd/{file.fileno()}")] += 1
        return file_digest(file, name)

    def opened() -> object:
        if way == "pipeline":
            return load(copy, residency=residency)
        return Model.load(copy, residency=residency).bank

    monkeypatch.setattr(Store, "get", counted)
    monkeypatch.setattr(hashlib, "file_digest", hashed)
    files = [str(path) for path in copy.resolve().rglob(WEIGHTS)]
    opened()
    assert {file: reads[file] for file in files} == dict.fromkeys(files, 1) and len(files) == 4
    rewrite(copy / EXPERT, lambda data: data[:-1] + b"\1")
    with pytest.raises(StoreError, match=r"experts/1/.*is not what its card says"):
        opened()


def test_a_part_that_was_exchanged_with_its_card_is_noticed(copy: Path, tmp_path: Path) -> None:
    other = pipeline()
    other.experts.add(expert(1, LABELS, seed=78))
    other.save_pretrained(tmp_path / "other")
    shutil.copytree(tmp_path / "other/experts/1", copy / "experts/1", dirs_exist_ok=True)
    with pytest.raises(StoreError, match=r"is not the part that ensemble\.json names"):
        load(copy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": [5]}, "experts 5 are not there: there are 0, 1, 2"),
        ({"experts": []}, "no expert was asked for"),
        ({"trust_remote_code": True}, "trust_remote_code is not taken"),
        ({"variant": "fp16"}, "variant is not taken"),
        ({"experts": ["0"]}, "give 'auto' or numbers"),
        ({"residency": 1}, "residency=1: give Residency"),
        ({"torch_dtype": "float16"}, "torch_dtype='float16': give a type of torch's"),
    ],
)
def test_wrong_options_are_refused(saved: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(saved, **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere at all", "there is no folder"),
        ("s3://bucket/model", "is a URL: write the folder first"),
        ("owner/not-there", "as a hub name it cannot be had"),
        ("campaign", r"is a campaign: give its folder .*/ensemble"),
    ],
)
def test_a_place_that_is_not_there(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "campaign").mkdir()
    (tmp_path / "campaign/campaign.json").write_text("{}")
    with pytest.raises(ConfigError, match=words):
        AtollPipeline.from_pretrained(name)
