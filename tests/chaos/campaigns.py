"""A campaign of three islands that trains in seconds, and what must be true of it when all is over."""

import json
from pathlib import Path
from typing import Any

from helpers import entries, metrics, same_bits

ISLANDS = (0, 1, 2)
TRAIN: dict[str, Any] = {"checkpoint_every_s": 0.0, "validations": 5, "log_every": 7}
TRAIN |= {"lease": {"heartbeat_seconds": 0.1, "expiry_seconds": 1.0}}
CHANGES: dict[str, Any] = {"budget": {"samples": 9_000}, "partition": {"k": 3}, "monolith": False}
CHANGES |= {"train": TRAIN}

SLOWLY: dict[str, list[Any]] = {"linger": ["step", 0.2]}
"""A fault: a run would take most of a minute, so that it is not over before those who disturb it come."""


def island(folder: Path, number: int) -> Path:
    return folder / f"islands/{number}"


def kinds(run: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in entries(run) if entry.get("kind") == kind]


def holds(run: Path, pid: int) -> bool:
    """Whether a process has acquired the run."""
    return any(entry["process"]["pid"] == pid for entry in kinds(run, "acquire"))


def finished(run: Path) -> bool:
    return (run / "expert/card.json").exists()


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def card(run: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / "expert/card.json").read_text())
    del read["provenance"]["seconds"]
    return read


def check_as_if_undisturbed(run: Path, reference: Path) -> None:
    """Same bits, published once, nothing half-done, every step on record once."""
    assert same_bits(run, reference)
    assert files(run / "expert") == files(reference / "expert") and card(run) == card(reference)
    assert (run / "expert/config.json").read_bytes() == (reference / "expert/config.json").read_bytes()
    assert len(kinds(run, "publish")) == 1
    assert files(run / "run/export") == []
    lines = metrics(run)
    steps = [(line["step"], "loss" in line) for line in lines]
    assert len(set(steps)) == len(steps) > 20
    differing = [(mine, its) for mine, its in zip(lines, metrics(reference), strict=True) if mine != its]
    assert not differing, differing
