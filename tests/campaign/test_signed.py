"""Who made a model: islands sign their results, exports are signed, and whoever takes them asks for keys."""

import json
import shutil
from pathlib import Path

import pytest
from model_signing import hashing, signing, verifying

from atoll import AtollPipeline, Model, load
from atoll.base.errors import ConfigError, StoreError
from atoll.campaign.publication import KEY, promote
from atoll.store.log import Log
from atoll.store.signatures import SIGNATURE, signer
from atoll.store.store import Store
from helpers import Run, refused
from keys import key_pair


@pytest.fixture
def campaign(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "campaign")
    return tmp_path / "campaign"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_pair(tmp_path / "key")[0]


@pytest.fixture
def public(key: Path) -> str:
    return str(key.with_suffix(".pub"))


def sign_all(campaign: Path, key: Path) -> None:
    """Sign all that a campaign has published with the command of the standard, which knows no Atoll."""
    for card in sorted(campaign.glob("**/expert/card.json")):
        signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(
            hashing.Config().set_ignored_paths(paths=[SIGNATURE])
        ).sign(card.parent, card.parent / SIGNATURE)


def test_only_what_a_trusted_key_signed_is_assembled(
    campaign: Path, key: Path, public: str, tmp_path: Path, run: Run
) -> None:
    assert "Nothing that is published is signed." in run("status", campaign).out
    refused(run("assemble", campaign, "--trusted", public), "expert is unsigned (no model.sig)")
    for name, keys in (("ensemble", []), ("monolith", []), ("monolith", [public])):
        with pytest.raises(StoreError, match="expert is unsigned"):
            load(campaign, name, trusted=keys)
    sign_all(campaign, key)
    name = signer(Store.open(campaign), "islands/0/expert")
    assert f"Signed by {name}, unchecked: expert 0" in run("status", campaign).out
    assert run("assemble", campaign, "--trusted", public).code == 0
    assert load(campaign, "monolith", trusted=[public]).card.role == "monolith"
    assert f"| experts/0 | `{name}` |" in (campaign / "ensemble/README.md").read_text()

    _, other = key_pair(tmp_path / "other")
    refused(run("assemble", campaign, "--trusted", other), f"{name}, which is not trusted")
    refused(run("assemble", campaign, "--trusted", "mine"), "cannot read mine")
    settings = campaign / "campaign.yaml"
    settings.write_text(f"{settings.read_text()}\ntrusted: [{json.dumps(Path(public).read_text())}]\n")
    assert f"Signed by {name}: expert 0" in run("status", campaign).out
    card = campaign / "islands/1/expert/card.json"
    card.write_text(card.read_text() + " ")
    shutil.rmtree(campaign / "islands/1/run")
    refused(run("assemble", campaign, "--trusted", public), "not what its signature says")
    assert "Signed by nobody" in run("status", campaign).out


def test_an_island_signs_what_it_publishes(
    campaign: Path, key: Path, public: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    store, other = (Store.open(campaign / f"islands/{number}") for number in (0, 1))
    published = (log := Log(store.sub("run"), "")).publication()
    assert published is not None
    # As where the process dies before it copies that.
    (campaign / "islands/0/expert").rename(campaign / "islands/0/run" / published.export)
    monkeypatch.setenv(KEY, str(campaign / "campaign.json"))
    with pytest.raises(ConfigError, match=r"campaign\.json is no private key"):
        promote(store, log)
    monkeypatch.setenv(KEY, str(key))
    promote(store, log)  # it is not finished before it is signed
    said = run("status", campaign).out
    name = signer(store, "expert")
    assert f"Signed by {name}, unchecked: expert 0." in said and "Unsigned: expert 1, router" in said
    monkeypatch.setenv(KEY, str(campaign / "campaign.json"))
    shutil.rmtree(campaign / "islands/1/expert")
    with pytest.raises(StoreError, match=r"1/expert was published, and is gone: .* remove .*1/run too"):
        promote(other, Log(other.sub("run"), ""))
    shutil.rmtree(campaign / "islands/1/run")
    refused(run("train", "expert", campaign, "--expert", "1"), "campaign.json is no private key")
    assert not (campaign / "islands/1/run/log").exists()


def test_what_samples_asks_for_the_keys_that_the_campaign_trusts(
    campaign: Path, key: Path, public: str, run: Run
) -> None:
    sign_all(campaign, key)
    settings = campaign / "campaign.yaml"
    settings.write_text(f"{settings.read_text()}\ntrusted: [../{Path(public).name}]\n")
    assert run("assemble", campaign).code == 0
    draw = "sample", campaign, "house", "--steps", "1", "--out", campaign / "x.png"
    assert run(*draw).code == 0
    # Whoever can write there puts another's expert into it, and makes all hashes agree.
    (campaign / "ensemble/experts/0/model.sig").unlink()
    refused(run(*draw), "ensemble/experts/0 is unsigned")
    refused(run("evaluate", campaign, "--samples", "2"), "is unsigned")


def test_an_export_is_signed_and_its_signature_fits_no_other(
    campaign: Path, key: Path, public: str, tmp_path: Path, run: Run
) -> None:
    signed, plain = tmp_path / "signed", tmp_path / "plain"
    assert run("export", campaign, "--to", signed, "--no-picture", "--sign", key).code == 0
    assert run("export", campaign, "--to", plain, "--no-picture", "--experts", "0").code == 0
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(signed, signed / SIGNATURE)
    AtollPipeline.from_pretrained(signed, trusted=[public])
    assert Model.load(signed, trusted=[public]).card.role == "router"
    for opened in (AtollPipeline.from_pretrained, Model.load):
        with pytest.raises(StoreError, match="is unsigned"):
            opened(plain, trusted=[public])
    shutil.copy(signed / SIGNATURE, plain)
    with pytest.raises(StoreError, match="not what its signature says"):
        AtollPipeline.from_pretrained(plain, trusted=[public])
    AtollPipeline.from_pretrained(plain)
    # A signed one that lost a file is refused too.
    for part in ("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"):
        content = (signed / part).read_bytes()
        (signed / part).unlink()
        for opened in (AtollPipeline.from_pretrained, Model.load):
            with pytest.raises(StoreError, match=f"{part} is missing"):
                opened(signed, trusted=[public])
        (signed / part).write_bytes(content)
    assert run("export", campaign, "--to", signed, "--no-picture").code == 0
    assert not (signed / SIGNATURE).exists(), "another export is not the one that was signed"
