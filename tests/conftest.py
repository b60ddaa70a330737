"""Set before anything of the package is imported: no model hub, one thread, types checked at run time."""

import fcntl
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What a shell starts in its background ignores Ctrl-C, and processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Child processes inherit these. Sums on a CPU depend on the number of threads, so bits do too.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MKL_NUM_THREADS="1",
    MPLBACKEND="agg",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)

import jaxtyping
import pytest
import torch

from atoll.base.console import show_messages
from nursery import Nursery, replace_popen
from s3 import BUCKET, S3, serve

torch.set_num_threads(1)

# Every annotated function of these packages checks its arguments and its result from here on.
jaxtyping.install_import_hook(["atoll.flow", "atoll.model", "atoll.networks"], "typecheck.check")

show_messages()  # stages are called as functions too, and tests read what they say

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those of `make test-gpu`: bits are promised on a CPU with one thread."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    replace_popen()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file comes first: two workers would else end with one of them alone with it."""
    items.sort(key=lambda item: item.path.name != "test_wheel.py")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`helpers.command` of this test."""
    from helpers import command  # it imports the package

    return lambda *argv: command(capsys, *argv)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """An empty one in a folder of its own."""
    from atoll.store.store import Store

    return Store.open(tmp_path / "store", create=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with larger real data sets, `shared/data` beside the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """An S3 endpoint that lets everybody in."""
    with serve() as endpoint:
        yield endpoint


@pytest.fixture
def bucket_url(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nothing is yet, with what this process needs to reach it."""
    for name, value in {**s3.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Forks commands, and ends those that are left."""
    with Nursery(tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made with `atoll new` and `atoll launch`: glyphs from their names, experts as separate processes."""
    from whole import whole_campaign

    # Made by the worker that comes first, while others wait; each has a copy, since tests write reports.
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "made").exists():
            whole_campaign(shared / "campaign")
            (shared / "made").touch()
    return Path(shutil.copytree(shared / "campaign", tmp_path_factory.mktemp("whole") / "campaign"))


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small campaign that is partitioned, with the file's `CHANGES`; its tests copy it to change it."""
    from helpers import partitioned

    partitioned(folder := tmp_path_factory.mktemp("made") / "c", getattr(request.module, "CHANGES", {}))
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "campaign"))


@pytest.fixture
def told_to_leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the next run in this process get SIGTERM in its nth step, once."""
    from atoll.train.state import Guard

    def arrange(step: int) -> None:
        admits, seen = Guard.admits, []

        def signalling(guard: Guard, loss: float, norm: float) -> bool:
            seen.append(loss)
            if len(seen) == step:
                signal.raise_signal(signal.SIGTERM)
            return admits(guard, loss, norm)

        monkeypatch.setattr(Guard, "admits", signalling)

    return arrange
