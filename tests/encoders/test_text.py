"""Text encoders: what a caption's states depend on. MiniLM is the real one; T5 and CLIP are tiny."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from atoll.base.errors import ConfigError
from atoll.encoders.text import (
    LONGEST_PROMPT,
    Form,
    TextEncoder,
    prompt_length,
    text_encoder,
    text_encoder_of,
    text_form,
    text_parameters,
)
from helpers_export import WORDS, save_tokenizer, text_tower

CAPTIONS = ["a red square", "", "greek small letter alpha, serif bold", "a red square"]
CAPTIONS += ["one two three four five six seven eight nine ten eleven twelve", "ß — 日本"]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_tower(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = transformers.CLIPTextConfig(max_position_embeddings=9, **sizes, **tokens)
    transformers.CLIPTextModel(config).save_pretrained(folder)
    save_tokenizer(folder, start=True)
    return folder


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return text_encoder("minilm")


@pytest.fixture(scope="module", params=["minilm", "t5", "clip"])
def encoder(request: pytest.FixtureRequest) -> TextEncoder:
    made = request.getfixturevalue(request.param)
    return made if isinstance(made, TextEncoder) else text_encoder(str(made))


def test_ragged_states_are_the_padded_ones(encoder: TextEncoder) -> None:
    found = encoder.states(CAPTIONS, batch=2)
    states, mask = encoder.encode(CAPTIONS)
    assert [len(found[caption]) for caption in CAPTIONS] == mask.sum(1).tolist()
    assert len(found) == len({*CAPTIONS}) < len(CAPTIONS)  # each is encoded once
    values = torch.cat([found[caption] for caption in CAPTIONS])
    torch.testing.assert_close(values, states[mask], rtol=1e-5, atol=1e-5)
    assert (states[~mask] == 0).all() and not mask.all()


def test_a_caption_does_not_see_its_batch(encoder: TextEncoder) -> None:
    for caption, states in encoder.states(CAPTIONS).items():
        torch.testing.assert_close(states, encoder.states([caption])[caption], rtol=1e-5, atol=1e-5)


def test_the_empty_caption_has_states(encoder: TextEncoder) -> None:
    """An all-zero mask would become uniform attention: "" keeps its special tokens."""
    values = encoder.states([""])[""]
    assert [len(values)] == [1 if encoder.name.rsplit("/", 1)[-1].startswith("t5") else 2]
    assert float(values.abs().min(1).values.max()) > 0 and torch.isfinite(values).all()


def test_a_tokenizer_that_adds_nothing_gives_no_words_one_token(t5: Path, tmp_path: Path) -> None:
    """As Qwen's, without which the unconditional branch would have no state."""
    path = shutil.copytree(t5, tmp_path / "bare") / "tokenizer.json"
    tree = json.loads(path.read_text().replace('"two"', '"house"'))  # a word that tokenizers are asked for
    path.write_text(json.dumps({**tree, "post_processor": None}))
    states = text_encoder(str(path.parent)).states(["", "a red"])
    assert {caption: len(values) for caption, values in states.items()} == {"": 1, "a red": 2}


def test_long_captions_are_cut(encoder: TextEncoder) -> None:
    short = text_encoder(encoder.name, max_length=5)
    _states, mask = short.encode(["a red square a red square a red square"])
    assert mask.shape == (1, 5) and short.producer()["max_length"] == 5


def test_the_network_decides_how_long_a_caption_may_be(clip: Path, t5: Path) -> None:
    assert text_encoder(str(clip), 77).max_length == 9
    assert text_encoder(str(t5), 77).max_length == 77
    text_encoder(str(clip), 77).encode(["a red square " * 40])


def test_a_prompt_may_be_as_long_as_the_network_takes(t5: Path, clip: Path) -> None:
    for folder, longest in ((t5, 512), (clip, 9)):
        trained = text_encoder(str(folder), 5)
        prompts = text_encoder_of(trained.producer(), longest=LONGEST_PROMPT)
        assert prompts.max_length == longest == prompt_length(prompts.towers[0].network, 5)
        short = trained.states(["a red"])["a red"]
        assert torch.equal(prompts.states(["a red"])["a red"], short)  # to the bit
        assert len(prompts.states(["a red square a red"])["a red square a red"]) > 5
    assert prompt_length(text_encoder(str(t5)).towers[0].network, 900) == 900


def test_positions_of_roberta_begin_after_those_of_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokens = {"vocab_size": len(WORDS), "max_position_embeddings": 10, "pad_token_id": 0}
    transformers.RobertaModel(transformers.RobertaConfig(**sizes, **tokens)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, start=True)
    encoder = text_encoder(str(tmp_path))
    assert encoder.max_length == 9
    assert encoder.encode(["a red square " * 9])[0].shape == (1, 9, 16)


@pytest.mark.parametrize("name", ["minilmm", "nowhere/t5", "./nowhere", "google/t5-v1_1-xxl", "a/b/c"])
def test_an_encoder_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot load the text encoder") as caught:
        text_encoder(name)
    assert repr(name) in str(caught.value) and "minilm" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(t5: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((t5 / name).read_bytes())
    with pytest.raises(ConfigError, match="cannot load the text encoder") as caught:
        text_encoder(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_parts_of_a_pipeline_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokenizer that lies in a folder of its own, and nothing that may be pickle or code."""
    folder, asked = tmp_path / "there", list[list[str]]()
    text_tower(folder / "text_encoder_2")
    (folder / "tokenizer_2").mkdir()
    for path in (folder / "text_encoder_2").glob("*token*"):
        path.rename(folder / "tokenizer_2" / path.name)

    def fetched(name: str, allow_patterns: list[str]) -> str:
        assert name == "someone/flux"
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    encoder = text_encoder("someone/flux/text_encoder_2", 12)
    local = text_encoder(str(folder / "text_encoder_2"))
    assert torch.equal(encoder.encode(["a red"])[0], local.encode(["a red"])[0])
    assert text_form("someone/flux/text_encoder_2", 12).width == 16
    assert asked[1] == ["text_encoder_2/*.json"] and "tokenizer_2/*.json" in asked[0]
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked[0])


def test_a_config_of_no_encoder_is_one_line(t5: Path, tmp_path: Path) -> None:
    config = json.loads((t5 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": 5}))
    assert text_parameters(str(tmp_path)) is None
    with pytest.raises(ConfigError, match="cannot load the text encoder"):
        text_form(str(tmp_path), 8)


def test_clip_without_a_projection_beside_one_that_has_it_is_refused() -> None:
    """SD3 reads the states of both; a name such as openai/clip-vit-large-patch14 gives a vector alone."""
    states, vector, t5 = Form(77, 12, 12, True), Form(77, 0, 8, True), Form(256, 24)
    assert Form.joined([states, states, t5]) == Form(333, 24, 24)
    assert Form.joined([vector, t5]) == Form(256, 24, 8)
    for forms in ([states, vector, t5], [vector, vector, t5]):
        with pytest.raises(ConfigError, match="no projection"):
            Form.joined(forms)
