"""Campaigns so small that they train in seconds, and the `atoll` command as a user runs it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from atoll.base.hashing import sha256
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import make_islands
from atoll.campaign.prepare import prepare
from atoll.campaign.settings.launch import merged
from atoll.cli import main as cli
from atoll.train.run import train_run

ROOT = Path(__file__).resolve().parents[1]

# Characters in two faces as 8 px pictures, by class (= face), cut at random: nothing heavy is loaded.
SMALL: dict[str, Any] = yaml.safe_load("""
seed: 3
condition: class
data:
  {path: data, source: glyphs, vae: none, ingest: {size: 8, mode: gray, heldout: 0.1, shard_rows: 32,
   label: null, glyphs: {faces: [DejaVuSans, DejaVuSerif], characters: basic, limit: 80}}}
partition: {method: random, k: 2}
network: {family: dit, size: nano, patch: 4, depth: 1, heads: 2, head_width: 16}
train: {batch: 16, lr: 0.001, validations: 3, previews: 1, checkpoint_every_s: 3600.0}
router: {patch: 4, depth: 1, heads: 1, head_width: 16, share: 0.1,
         train: {batch: 16, lr: 0.001, validations: 2, checkpoint_every_s: 3600.0}}
budget: {samples: 640}
sampling: {steps: 3}
compare: {samples: 24, steps: 2, shown: 4, fit_rows: 60, batch: 10}
""")


def of_no_number(part: Path) -> None:
    """Make all weights of a published network NaN, and its card agree."""
    path, card = part / "diffusion_pytorch_model.safetensors", part / "card.json"
    save_file({name: torch.full_like(value, torch.nan) for name, value in load_file(path).items()}, path)
    card.write_text(json.dumps({**json.loads(card.read_text()), "weights_sha256": sha256(path.read_bytes())}))


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def write_campaign(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A folder with a `campaign.yaml`: `SMALL` with some settings replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "campaign.yaml").write_text(yaml.safe_dump(merged(SMALL, changes or {})))
    return folder


def partitioned(folder: Path, changes: Mapping[str, Any] | None = None) -> Campaign:
    """A campaign that is ready to be trained."""
    prepare(Campaign.open(write_campaign(folder, changes)))
    campaign = Campaign.open(folder)
    make_islands(campaign)
    return campaign


def assembled(folder: Path, changes: Mapping[str, Any]) -> Path:
    """The folder of a campaign whose experts and router are trained and assembled."""
    campaign = partitioned(folder, changes)
    if campaign.config.budget.pretrain:
        train_run(campaign, "pretrain")
    for k in range(campaign.config.partition.k):
        train_run(campaign, "expert", k)
    train_run(campaign, "router")
    assemble(campaign)
    return folder


def environment() -> dict[str, str]:
    """That of a child process: this checkout, and the stacks of all threads if it crashes."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def python(*argv: str | Path, cwd: Path | None = None, listens: bool = False) -> subprocess.Popen[str]:
    """Start a Python that imports this checkout, with pipes from it, and to it where it listens."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr")[not listens :], subprocess.PIPE)
    return subprocess.Popen([sys.executable, *map(str, argv)], env=environment(), cwd=cwd, text=True, **pipes)


def start(*argv: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start the command as a process of its own."""
    return python("-m", "atoll", *argv, cwd=cwd)


def atoll(*argv: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own, to its end."""
    said = (process := start(*argv, cwd=cwd)).communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Answer]
"""The `run` fixture: the command's words to what a user would see."""


def command(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> Answer:
    """The command within this process, through the entry point's own handling of errors.

    An error that nothing foresaw fails the test.
    """
    capsys.readouterr()
    code = cli.run_command(lambda: cli.atoll.main([str(part) for part in argv], standalone_mode=False))
    captured = capsys.readouterr()
    assert "(traceback: " not in captured.err, captured.err
    return Answer(code, captured.out, captured.err)


def refused(answer: Answer, *words: str) -> str:
    """Check that an answer is one line of error and exit code 2; the line."""
    assert answer.code == 2, answer
    lines = answer.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), answer
    assert "Traceback" not in answer.out
    for word in words:
        assert word in lines[0], (word, lines[0])
    return lines[0]


def until(ready: Callable[[], object], what: Callable[[], object] = str, seconds: float = 300) -> None:
    """Wait for something to become true; else `what` is said."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, what()
        time.sleep(0.005)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl, less the timings."""
    lines = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "validation_seconds")
    return [{key: value for key, value in line.items() if key not in clocks} for line in lines]


def newest_checkpoint(run: Path) -> Path:
    """Folder of the last checkpoint that the log names."""
    commits = [entry for entry in entries(run) if entry.get("kind") == "commit"]
    return run / "run" / str(commits[-1]["checkpoint"])


def entries(run: Path) -> list[dict[str, Any]]:
    """Entries of a run's log; one that cannot be read is empty."""
    found = []
    for path in sorted((run / "run/log").glob("*.json")):
        try:
            found.append(json.loads(path.read_bytes()))
        except ValueError:
            found.append({})
    return found


STATE = ("weights.safetensors", "ema.safetensors", "optimizer.safetensors")
WEIGHTS = "expert/diffusion_pytorch_model.safetensors"


def bits(run: Path) -> dict[str, bytes]:
    """Everything that a finished run computed, as bytes."""
    paths = {name: newest_checkpoint(run) / name for name in STATE}
    return {name: path.read_bytes() for name, path in {**paths, "published": run / WEIGHTS}.items()}


def same_bits(one: Path, other: Path) -> bool:
    """Whether two finished runs computed the same."""
    return bits(one) == bits(other)
