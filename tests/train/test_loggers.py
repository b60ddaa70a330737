"""Trackers: one run over all restarts, read back with the trackers' own packages; the bits do not change."""

import importlib.machinery
import importlib.util
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.base.errors import ConfigError
from atoll.base.preemption import Interrupted
from atoll.base.safe_parse import read_yaml
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import MetricsLine
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.train import TrackingConfig
from atoll.train import loggers
from atoll.train.loggers import Trackers
from atoll.train.run import train_run
from atoll.train.state import Guard
from helpers import SMALL, metrics, same_bits

CHANGES = {"train": {"log_every": 2}}


@pytest.fixture(scope="module")
def plain(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without trackers."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("plain") / "campaign"))
    train_run(Campaign.open(folder), "expert", 0)
    return folder


def tracked(folder: Path, **settings: object) -> Campaign:
    """The campaign with trackers: they are not frozen."""
    tree = yaml.safe_load((folder / "campaign.yaml").read_text())
    (folder / "campaign.yaml").write_text(yaml.safe_dump({**tree, "tracking": settings}))
    return Campaign.open(folder)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    read.Reload()
    found = {
        tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]
    }
    images = read.Images("preview") if read.Tags()["images"] else []
    found["preview"] = [(event.step, event.width) for event in images]
    return found


def restarted(folder: Path, monkeypatch: pytest.MonkeyPatch, **tracking: object) -> None:
    """Train to an error at step 12, with nothing saved, then to the end: what was tracked is taken back."""
    admits, seen = Guard.admits, []

    def count(guard: Guard, loss: float, norm: float) -> bool:
        seen.append(1)
        if len(seen) == 12:
            raise Interrupted("stopped")
        return admits(guard, loss, norm)

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "admits", count)
        with pytest.raises(Interrupted):
            train_run(tracked(folder, **tracking), "expert", 0)
    run = folder / "islands/0/run"
    assert not (run / "checkpoints").exists()
    if (run / "tensorboard").exists():
        assert max(step for step, _ in events(run / "tensorboard")["loss"]) == 10
    train_run(Campaign.open(folder), "expert", 0)


def test_tensorboard_shows_one_run_over_restarts(
    copy: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    restarted(copy, monkeypatch, tensorboard=True)
    assert same_bits(copy / "islands/0", plain / "islands/0")
    assert metrics(copy / "islands/0") == metrics(plain / "islands/0")
    run = copy / "islands/0/run"
    names = sorted(path.name for path in (run / "tensorboard").iterdir())
    assert [name.split(".")[3] for name in names] == ["000001", "000002"]
    shown, lines = events(run / "tensorboard"), metrics(copy / "islands/0")
    for tag in ("loss", "lr", "grad_norm", "validation_loss"):
        told = [(line["step"], line[tag]) for line in lines if tag in line]
        assert len(told) >= 3 and [step for step, _ in shown[tag]] == [step for step, _ in told]
        assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in told])
    last = next(line for line in reversed(lines) if "validation" in line)
    assert shown["validation/t=0.0625"][-1] == (last["step"], pytest.approx(last["validation"][0]))
    assert [step for step, _ in shown["preview"]] == [lines[-1]["step"]]


def test_wandb_offline_writes_into_the_store(
    copy: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    restarted(copy, monkeypatch, wandb="offline", project="p")
    assert same_bits(copy / "islands/0", plain / "islands/0")
    run = copy / "islands/0/run"
    first, second = sorted(run.glob("wandb/*/*.wandb"), key=lambda path: path.parent.name.split("-")[4])
    tracker = json.loads((run / "log/000000.json").read_text())["tracker"]
    assert first.name == second.name == f"run-{tracker}.wandb"
    lines, shown = metrics(copy / "islands/0"), history(second)
    told = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [(row["_step"], row["loss"]) for row in shown if "loss" in row] == told
    before = [(row["_step"], row["loss"]) for row in history(first) if "loss" in row]
    assert len(before) == 5 and before == told[:5]  # what is shown twice is the same
    assert [row["_step"] for row in shown if any(key.startswith("preview") for key in row)] == [told[-1][0]]
    assert len(list(second.parent.glob("files/media/images/preview*.png"))) == 1


def history(path: Path) -> list[dict[str, Any]]:
    """Rows of an offline file: 7 bytes, then a LevelDB log (blocks of 32 KiB) of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind not in (1, 4):  # a record goes on in the next block
            continue
        record = wandb_internal_pb2.Record.FromString(part)
        part = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            rows.append(row | {"_step": record.history.step.num})
    return rows


def test_a_tracker_that_fails_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        lines = 0

        def show(self, step: int, values: dict[str, float]) -> None:
            self.lines += 1
            raise ConnectionError("no route\nto host")

        files = close = show

    tracks, broken = Trackers(), Broken()
    tracks.start("broken", lambda: broken)  # type: ignore[arg-type, return-value]
    for step in (1, 2):
        tracks.line(MetricsLine(step=step, samples=16 * step, loss=1.0))
    tracks.flush()
    tracks.close()
    assert broken.lines == 1
    assert capsys.readouterr().out == ("warning: broken failed, the run goes on without it: no route\n")

    def fail() -> Any:
        raise OSError("disk full")

    tracks.start("other", fail)
    assert "other does not start, the run goes on without it: disk full" in capsys.readouterr().out


def test_a_tracker_that_hangs_does_not_keep_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "CLOSE_TIMEOUT_S", 0.2)
    ended = threading.Event()

    class Slow:
        def close(self) -> None:
            ended.wait(30)

    tracks = Trackers()
    tracks.start("slow", lambda: Slow())  # type: ignore[arg-type, return-value]
    tracks.close()
    ended.set()
    assert "trackers did not end within 0.2 s, the run goes on without them" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_missing_package_is_told_before_training(
    package: str, folder: bool, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    # A folder of that name without an __init__.py has a spec too.
    absent = importlib.machinery.ModuleSpec(package, None) if folder else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: absent if name == package else find(name))
    campaign = tracked(copy, **{package: True if package == "tensorboard" else "offline"})
    with pytest.raises(ConfigError, match=rf"tracking.{package} needs the package {package}.*pip install"):
        train_run(campaign, "expert", 0)
    assert not (copy / "islands/0/run").exists()


def test_online_without_a_key_is_told_before_training(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://tracker.example.org:8080")
    campaign = tracked(copy, wandb="online")
    with pytest.raises(ConfigError, match="there is no key: set WANDB_API_KEY"):
        train_run(campaign, "expert", 0)
    assert not (copy / "islands/0/run").exists()
    (tmp_path / "netrc").write_text("machine tracker.example.org login user password 0123\n")
    loggers.check_trackers(campaign.config.tracking)


def test_off_needs_no_quotes() -> None:
    tree = {**SMALL, "tracking": read_yaml("wandb: off", "here")}
    assert CampaignConfig.parse(tree, "here").tracking == TrackingConfig()
