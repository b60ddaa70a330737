"""Pushed to a hub and fetched from it: only what is asked for goes over the wire."""

import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml

from atoll.export.pipeline import AtollPipeline
from export.hub import Hub
from helpers import assembled, command, refused
from helpers_export import pipeline


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client of this process talks to, with a token that it takes."""
    served = Hub()
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
    served.shutdown()
    served.server_close()


def test_only_the_experts_that_are_asked_for_are_fetched(hub: Hub, tmp_path: Path) -> None:
    made, cache = pipeline(), {"cache_dir": tmp_path / "cache"}
    made.save_pretrained(tmp_path / "model")
    made.push_to_hub("me/model")
    assert set(hub.files) == {
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


def test_an_export_is_pushed_whole(
    letters: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the repository holds of an earlier export goes; what its owner wrote beside it stays."""
    hub.files = {"experts/7/card.json": b"", "manifest.json.sig": b"", "NOTES.md": b"mine"}
    argv = ["export", letters, "--to", tmp_path / "out", "--no-picture", "--push", "me/model"]
    done = command(capsys, *argv, "--private", "--licence", "CC BY 4.0")
    assert done.code == 0 and done.out.splitlines()[-1] == f"pushed to {hub.url}/me/model", done
    written = {p.relative_to(tmp_path / "out").as_posix(): p for p in (tmp_path / "out").rglob("*.*")}
    assert hub.files == {name: path.read_bytes() for name, path in written.items()} | {"NOTES.md": b"mine"}
    assert [made["visibility"] for made in hub.created] == ["private"]
    head = yaml.safe_load(hub.files["README.md"].split(b"---\n")[1])
    assert (head["library_name"], head["license"]) == ("atoll", "cc-by-4.0")
    assert b'from_pretrained("me/model")' in hub.files["README.md"]
    # A repository that is there keeps who may see it, and by default the hub decides.
    assert command(capsys, *argv).code == 0 and "visibility" not in hub.created[-1]


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ({"/whoami-v2": 401}, ("hf auth login", "HF_TOKEN")),
        ({"/preupload/": 403}, ("403", "a token that may write there")),
        ({"/commit/": 413}, ("413", "run the same command again")),
    ],
)
def test_what_the_hub_refuses_is_no_push(
    refuse: dict[str, int],
    words: tuple[str, ...],
    letters: Path,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.refuse = refuse
    done = command(capsys, "export", letters, "--to", tmp_path / "out", "--no-picture", "--push", "me/model")
    refused(done, "the push to me/model failed", *words)
    assert hub.files == {} and "pushed" not in done.out
    # Who may not even log in learns it before anything is written.
    assert (tmp_path / "out").exists() == ("/whoami-v2" not in refuse)


def test_without_token_network_or_name_nothing_is_written(
    letters: Path,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["export", letters, "--to", tmp_path / "out", "--push"]
    refused(command(capsys, *argv, f"{hub.url}/me/model"), "is not a name of the hub", "OWNER/NAME")
    monkeypatch.setenv("HF_TOKEN", "")
    refused(command(capsys, *argv, "me/model"), "oken", "hf auth login", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    refused(command(capsys, *argv, "me/model"), "the push to me/model failed", "network")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    refused(command(capsys, *argv, "me/model"), "unset HF_HUB_OFFLINE")
    assert not (tmp_path / "out").exists()
