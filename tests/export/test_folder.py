"""The folder of a pipeline: what is saved comes back to the bit, and what is wrong with it is told early."""

import hashlib
import json
import logging
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from atoll.base.errors import AtollError, ConfigError, PartitionError, StoreError
from atoll.encoders.text import TextEncoder
from atoll.export.bank import ExpertBank
from atoll.export.pipeline import AtollPipeline
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.networks.families import family
from atoll.store.signatures import SIGNATURE
from atoll.store.store import Store
from helpers import Run, assembled, refused
from helpers_export import LABELS, expert, expert_of, generators, load, pipeline, state, text_pipeline
from hub import Hub, serve

PROMPTS: dict[str, Any] = {"prompt": ["a red square", "bar", "", "two green"]}
EXPERT = "experts/1/" + WEIGHTS


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
    return folder / "model"


@pytest.fixture(scope="module")
def told(texts: Path) -> AtollPipeline:
    """Of texts and latents, loaded; nobody changes it."""
    return load(texts)


def picture(pipe: AtollPipeline, **call: Any) -> torch.Tensor:
    call = call or {"class_labels": [0, 1, 2, 3]}
    return pipe(generator=generators(4), output_type="latent", routing="full", **call).images


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


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


def test_the_folder_holds_what_its_index_names_as_safetensors_json_and_text(
    texts: Path, tmp_path: Path
) -> None:
    files = [path for path in texts.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    (tmp_path / "new").touch()
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}
    index = json.loads((texts / "model_index.json").read_text())
    named = {name for name, value in index.items() if isinstance(value, list) and value[0]}
    assert named == {"experts", "router", "scheduler", "vae", "text_encoder", "tokenizer"}
    assert {path.name for path in texts.iterdir() if path.is_dir()} == named
    assert index["experts"] == ["atoll.export.bank", "ExpertBank"]
    assert index["router"] == ["atoll.networks.router", "Router"]
    assert "_name_or_path" not in index


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
    wide = load(texts, torch_dtype=torch.bfloat16).to(torch.float32)  # down and up again
    wide.save_pretrained(tmp_path / "wide")
    assert {p.dtype for p in load(tmp_path / "wide").text_encoder.parameters()} == {torch.float32}
    one = load(saved, experts=[1], torch_dtype=torch.float64).experts
    assert one.present == (1,) and one.dtype == torch.float64


# Text and latents.


def test_texts_and_latents_travel_with_their_encoders(told: AtollPipeline, tmp_path: Path) -> None:
    made = text_pipeline(tmp_path)
    assert torch.equal(picture(made, **PROMPTS), picture(told, **PROMPTS))
    pipes = made, told, AtollPipeline.from_pipe(told)
    images = [pipe("a red square", generator=generators(1)).images[0] for pipe in pipes]
    assert images[0].size == (16, 16) and len({image.tobytes() for image in images}) == 1


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


def test_prompt_embeds_stand_for_prompts(texts: Path, told: AtollPipeline) -> None:
    light = load(texts, text_encoder=None, tokenizer=None)
    encoder = TextEncoder("", [(told.text_encoder, told.tokenizer)], 8, "cpu")
    states, mask = encoder.encode(["a red square", "bar", ""])
    given = {"prompt_embeds": states[:2], "prompt_attention_mask": mask[:2]}
    null = {"negative_prompt_embeds": states[2:], "negative_prompt_attention_mask": mask[2:]}
    expected = picture(told, prompt=["a red square", "bar"], num_images_per_prompt=2)
    assert torch.equal(picture(light, **given, **null, num_images_per_prompt=2), expected)
    for call, words in (
        ({"prompt": "a red square"}, "loaded without its text encoder"),
        (given, "needs negative_prompt_embeds"),
        ({**given, "prompt": "bar"}, "both prompt and prompt_embeds"),
        ({"prompt_embeds": states, "guidance_scale": 1.0}, "prompt_attention_mask does not fit"),
        ({"prompt_embeds": states[:0], "guidance_scale": 1.0}, r"prompt_embeds has shape \(0, "),
    ):
        with pytest.raises(ConfigError, match=words):
            light(**call)


def test_negative_prompts_lead_away(told: AtollPipeline) -> None:
    plain = picture(told, **PROMPTS)
    assert torch.equal(picture(told, **PROMPTS, negative_prompt=""), plain)
    one = picture(told, **PROMPTS, negative_prompt="green")
    each = picture(told, **PROMPTS, negative_prompt=["green"] * 4)
    torch.testing.assert_close(one, each, rtol=0, atol=1e-5)
    assert not torch.equal(one, plain)
    for wrong, words in ((["green", "red"], "2 negative prompts for 4 prompts"), ("\ud800", "is no text")):
        with pytest.raises(ConfigError, match=words):
            picture(told, **PROMPTS, negative_prompt=wrong)


def test_a_prompt_may_be_longer_than_a_training_caption(told: AtollPipeline) -> None:
    """The training cut captions to 8 tokens; T5 takes 512, and what is longer is refused or cut."""
    short = "a red square bar one two green"
    eleven = picture(told, prompt=[f"{short} red square bar"] * 4)
    assert not torch.equal(eleven, picture(told, prompt=[short] * 4))
    longest = " ".join([short] * 73)  # with its end, 512 tokens
    words = "has 513 tokens, 512 are taken: what begins with 'bar' would be lost: shorten it, or"
    with pytest.raises(ConfigError, match=words):
        told(f"{longest} bar")
    cut = picture(told, prompt=[f"{longest} bar"] * 4, truncate_prompt=True)
    assert torch.equal(cut, picture(told, prompt=[longest] * 4))


def test_encoders_of_another_model_are_refused(texts: Path, saved: Path) -> None:
    pipe = load(texts)
    with torch.no_grad():
        for part in (pipe.text_encoder, pipe.vae):
            next(part.parameters()).add_(1)
    for folder, parts, words in (
        (texts, {"text_encoder": pipe.text_encoder}, "text encoder is not the one of the training"),
        (saved, {"text_encoder": pipe.text_encoder}, "takes no text"),
        (texts, {"vae": pipe.vae}, "VAE is not the one of the training"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(folder, **parts)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_experts_of_several_families_and_predictions(name: str, texts: Path, tmp_path: Path) -> None:
    """One Flux or SD3 beside one PixArt that predicts noise on another schedule, and back from the folder."""
    pipe = load(texts)
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
    before = times(tmp_path)
    for name, words in (
        ("mine", "holds something else: give a new folder"),
        ("camp", "holds something else"),
        ("camp/ensemble", "belongs to a campaign"),
        ("file", "is a file"),
        ("s3://bucket/model", "is a URL"),
    ):
        with pytest.raises(ConfigError, match=words):
            pipe.save_pretrained(name if "://" in name else tmp_path / name)
    with pytest.raises(ConfigError, match="safetensors"):
        pipe.save_pretrained(tmp_path / "new", safe_serialization=False)
    for scheduler, words in (
        (diffusers.DDIMScheduler(), "does not integrate flows"),
        (diffusers.UniPCMultistepScheduler(), "does not integrate flows"),
        (None, "None is no scheduler"),
    ):
        pipe.scheduler = scheduler
        for use in (lambda: pipe.save_pretrained(tmp_path / "new"), lambda: pipe(class_labels=0)):
            with pytest.raises(ConfigError, match=words):
                use()
    assert times(tmp_path) == before


def test_an_evaluation_goes_along_with_the_very_parts_it_is_of(copy: Path, tmp_path: Path) -> None:
    pipe = load(copy)
    metric = {"distance": "a distance", "reference": "pictures", "reference_rows": 9}
    metric |= {"samples": 9, "steps": 9, "guidance": 2.0}
    rows, own = [{"name": "once", "distance": 7.5}], {"once": {"steps": 4.0}}
    pipe.about = {"name": "It", "evaluation": {"metric": metric, "rows": rows, "own": own}}
    pipe.picture = b"png"
    pipe.save_pretrained(copy)

    def goes_along(loaded: AtollPipeline, name: str) -> bool:
        loaded.save_pretrained(tmp_path / name)
        text = (tmp_path / name / "README.md").read_text()
        assert text.startswith("---") and "# It" in text
        with_picture = "![Samples]" in text
        assert with_picture == (tmp_path / name / "picture.png").exists() == ("once, steps 4 | 7.5" in text)
        return with_picture

    assert goes_along(load(copy), "whole")
    assert not goes_along(load(copy, experts=[0, 2]), "some")
    assert not goes_along(load(tmp_path / "some"), "again")
    changed = load(copy)
    changed.experts.add(expert(1, LABELS, seed=77))
    signature = tmp_path / "whole" / SIGNATURE
    signature.touch()
    assert not goes_along(changed, "whole")  # over the earlier picture
    assert not signature.exists()  # it was of the earlier parts
    assert not goes_along(load(copy, torch_dtype=torch.bfloat16), "half")


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
    for number, words in ((1, "expert 1 is the last one"), (0, "there is no expert 0")):
        with pytest.raises(ConfigError, match=words):
            pipe.experts.drop(number)


ANOTHER: dict[str, Any] = {
    "partition": "q" * 64,
    "latents": {"name": "x", "hash": "1", "shift": 0.0, "scale": 1.0},
    "text": {"name": "t5", "hash": "2", "max_length": 8},
    "condition": "none",
}
MONOLITH: dict[str, Any] = {"role": "monolith", "island": None}


def test_parts_that_do_not_belong_are_refused(saved: Path, tmp_path: Path) -> None:
    pipe = load(saved)
    for name in ("camp/campaign.json", "island/island.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    foreign = [({field: value}, f"another {field}") for field, value in ANOTHER.items()]
    for part, place, words in (
        *((expert(1, LABELS, **changes), 1, words) for changes, words in foreign),
        (expert(1, LABELS), 0, "place 0 holds expert 1"),
        (expert(1, LABELS, **MONOLITH), 1, "holds monolith"),
        (expert(1, LABELS, **MONOLITH), None, "a monolith is of no cluster"),
        (expert(3, LABELS), None, "no place 3 among 3"),
        (tmp_path / "camp", None, r"is not the folder of one expert: give .*camp/islands/K/expert"),
        (tmp_path / "island", None, r"give .*island/expert"),
        (saved, None, r"give .*model/experts/K"),
        (saved / "router", None, "a router is of no cluster"),
        (3, None, "3 is no expert"),
    ):
        with pytest.raises((ConfigError, PartitionError), match=words):
            pipe.experts.add(part, place)
    assert pipe.experts.cards == load(saved).experts.cards
    for k, changes, words in (
        *((3, *another) for another in foreign),
        (2, {}, "knows 3 experts, the bank has 2 places"),
    ):
        with pytest.raises(PartitionError, match=words):
            AtollPipeline(ExpertBank({0: expert(0, LABELS, **changes)}, k), pipe.router, pipe.scheduler)


# What is wrong with a folder, told before anything is loaded.

Damage = Callable[[Path], object]


def fields(name: str, **changes: Any) -> Damage:
    """Other fields of a JSON file."""
    return lambda f: (f / name).write_text(json.dumps({**json.loads((f / name).read_text()), **changes}))


def weights(change: Callable[[bytes], bytes]) -> Damage:
    """Other bytes of an expert's weights."""
    return lambda f: (f / EXPERT).write_bytes(change((f / EXPERT).read_bytes()))


def listed(damage: Damage) -> Damage:  # by somebody who writes the manifest anew
    def both(folder: Path) -> None:
        damage(folder)
        files = json.loads((folder / "ensemble.json").read_text())["files"]
        for entry in files:
            entry["bytes"] = len(data := (folder / entry["path"]).read_bytes())
            entry["sha256"] = hashlib.sha256(data).hexdigest()
        fields("ensemble.json", files=files)(folder)

    return both


def gone(name: str) -> Damage:
    return lambda f: shutil.rmtree(f / name) if (f / name).is_dir() else (f / name).unlink()


DAMAGE: list[tuple[Damage, str]] = [
    (weights(lambda data: bytes(100)), "damaged, or no safetensors"),
    (weights(lambda data: data[:-8]), "bytes instead of"),
    (weights(lambda data: b"\x80\x04\x95".ljust(len(data))), "is pickle, not safetensors"),
    (lambda f: (f / EXPERT).rename(f / "experts/1/model.bin"), "model.bin is pickle, which"),
    (gone("router"), "has no router"),
    (gone("router/card.json"), "router/card.json is missing"),
    (gone("scheduler"), "has no scheduler"),
    (gone("experts/0"), "experts/0 is missing"),
    (gone("experts/experts.json"), "experts.json is missing"),
    (fields("experts/experts.json"), "experts.json (does not|has)"),
    (gone("ensemble.json"), "not complete"),
    (gone("model_index.json"), "is no pipeline"),
    (fields("ensemble.json", format="atoll/model 9"), "model 9"),
    (fields("ensemble.json", files=[]), "its files are not those of"),
    (listed(fields("experts/0/card.json", format="atoll/card 9")), "card 9"),
    (listed(lambda f: (f / "experts/0/card.json").write_text("{")), "not what Atoll writes"),
    (fields("experts/0/card.json", rows=11), "card.json is not the one that the manifest names"),
    (fields("experts/0/config.json", num_layers=3), "config.json is not what its card says"),
    (listed(lambda f: shutil.copy(f / "experts/0/card.json", f / "experts/1")), "experts/1 holds expert 0"),
    (fields("scheduler/scheduler_config.json", shift=3.0), "r_config.json .*(SHA-256|of)"),
    (fields("model_index.json", _class_name="DiTPipeline"), "holds a DiTPipeline"),
    (fields("model_index.json", vae=["some.where", "Thing"]), "wants vae from some.where.Thing"),
    (lambda f: (f / "router/atoll.py").write_text("raise SystemExit"), "has no place in router/"),
]


def test_what_is_wrong_is_told_before_a_network_is_built(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a network was loaded"))
    for number, (damage, words) in enumerate(DAMAGE):
        damage(folder := Path(shutil.copytree(saved, tmp_path / str(number))))
        with pytest.raises(AtollError, match=words) as caught:
            load(folder)
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
    weights(lambda data: data[:-1] + b"\1")(copy)
    with pytest.raises(StoreError, match=r"experts/1/.*is not what its card says"):
        opened()
    fields("experts/0/card.json", rows=11)(copy)
    with pytest.raises(StoreError, match=r"experts/0/card\.json is not the one that the manifest names"):
        opened()


def test_what_cannot_be_loaded_is_told(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "campaign").mkdir()
    (tmp_path / "campaign/campaign.json").write_text("{}")
    cases: list[tuple[Path | str, dict[str, Any], str]] = [
        (saved, {"experts": [5]}, "experts 5 are not there: there are 0, 1, 2"),
        (saved, {"experts": []}, "no expert was asked for"),
        (saved, {"trust_remote_code": True}, "trust_remote_code is not taken"),
        (saved, {"variant": "fp16"}, "variant is not taken"),
        (saved, {"experts": ["0"]}, "give 'auto' or numbers"),
        (saved, {"residency": 1}, "residency=1: give Residency"),
        (saved, {"torch_dtype": "float16"}, "torch_dtype='float16': give a type of torch's"),
        ("nowhere at all", {}, "there is no folder"),
        ("s3://bucket/model", {}, "is a URL: write the folder first"),
        ("owner/not-there", {}, "as a hub name it cannot be had"),
        ("campaign", {}, r"is a campaign: give its folder .*/ensemble"),
    ]
    for name, options, words in cases:
        with pytest.raises(ConfigError, match=words):
            AtollPipeline.from_pretrained(name, **options)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client of this process talks to, with a token that it takes."""
    with serve({"1" * 40: {}}, "1" * 40) as served:
        constants = {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        huggingface_hub.close_session()  # one that was made offline stays so
        yield served
        huggingface_hub.close_session()


def test_only_the_experts_that_are_asked_for_are_fetched(hub: Hub, tmp_path: Path) -> None:
    made, cache = pipeline(), {"cache_dir": tmp_path / "cache"}
    made.save_pretrained(tmp_path / "model")
    made.push_to_hub("me/model")
    assert set(hub.tree) == {
        path.relative_to(tmp_path / "model").as_posix() for path in (tmp_path / "model").rglob("*.*")
    }

    def fetched() -> set[str]:
        names, hub.fetched = hub.fetched, []
        return {name.split("/")[1] for name in names if name.startswith("experts/")}

    some = AtollPipeline.from_pretrained("me/model", experts=[1], **cache)
    assert fetched() == {"experts.json", "1"} and list(some.experts.present) == [1]
    whole = AtollPipeline.from_pretrained("me/model", **cache)
    assert fetched() == {"0", "2"}
    cached = AtollPipeline.from_pretrained("me/model", local_files_only=True, **cache)
    call = {"class_labels": [0, 1], "output_type": "latent"}
    pictures = [p(generator=torch.Generator().manual_seed(0), **call).images for p in (whole, cached)]
    assert fetched() == set() and torch.equal(*pictures)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"partition": {"k": 2}, "budget": {"samples": 64}, "monolith": False}
    return assembled(tmp_path_factory.mktemp("push") / "letters", changes)


def test_an_export_is_pushed_whole(letters: Path, hub: Hub, tmp_path: Path, run: Run) -> None:
    """What the repository holds of an earlier export goes; what its owner wrote beside it stays."""
    hub.files[hub.branch] = {"transformer/a": b"", "expert-7/a": b"", "model.sig": b"", "NOTES.md": b"mine"}
    argv = ["export", letters, "--to", tmp_path / "out", "--no-picture", "--push", "me/model"]
    done = run(*argv, "--private", "--licence", "CC BY 4.0")
    assert done.code == 0 and done.out.splitlines()[-1] == f"pushed to {hub.url}/me/model", done
    written = {p.relative_to(tmp_path / "out").as_posix(): p for p in (tmp_path / "out").rglob("*.*")}
    assert hub.tree == {name: path.read_bytes() for name, path in written.items()} | {"NOTES.md": b"mine"}
    assert [made["visibility"] for made in hub.created] == ["private"]
    head = yaml.safe_load(hub.tree["README.md"].split(b"---\n")[1])
    assert (head["library_name"], head["license"]) == ("atoll", "cc-by-4.0")
    assert b'from_pretrained("me/model")' in hub.tree["README.md"]
    # A repository that is there keeps who may see it, and by default the hub decides.
    assert run(*argv).code == 0 and "visibility" not in hub.created[-1]


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ({"/whoami-v2": 401}, ("hf auth login", "HF_TOKEN")),
        ({"/preupload/": 403}, ("403", "a token that may write there")),
        ({"/commit/": 413}, ("413", "run the same command again")),
    ],
)
def test_what_the_hub_refuses_is_no_push(
    refuse: dict[str, int], words: tuple[str, ...], letters: Path, hub: Hub, tmp_path: Path, run: Run
) -> None:
    hub.refuse = refuse
    done = run("export", letters, "--to", tmp_path / "out", "--no-picture", "--push", "me/model")
    refused(done, "the push to me/model failed", *words)
    assert hub.tree == {} and "pushed" not in done.out
    # Who may not even log in learns it before anything is written.
    assert (tmp_path / "out").exists() == ("/whoami-v2" not in refuse)


def test_without_token_network_or_name_nothing_is_written(
    letters: Path, hub: Hub, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["export", letters, "--to", tmp_path / "out", "--push"]
    refused(run(*argv, f"{hub.url}/me/model"), "is not a name of the hub", "OWNER/NAME")
    monkeypatch.setenv("HF_TOKEN", "")
    refused(run(*argv, "me/model"), "oken", "hf auth login", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    refused(run(*argv, "me/model"), "the push to me/model failed", "network")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    refused(run(*argv, "me/model"), "unset HF_HUB_OFFLINE")
    assert not (tmp_path / "out").exists()
