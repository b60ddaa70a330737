"""One campaign that goes the whole way, and the command as the entry point runs it."""

from pathlib import Path

from atoll.cli import main as cli

SETS: dict[str, object] = {"data.ingest.glyphs.limit": 320, "data.ingest.glyphs.characters": "basic"}
SETS |= {"data.ingest.shard_rows": 64, "data.text_length": 16, "partition.k": 2, "partition.fine": 8}
SETS |= {"network.depth": 1, "network.heads": 2, "network.head_width": 16, "train.batch": 16}
SETS |= {"train.validations": 2, "router.train.validations": 2, "router.depth": 1, "router.heads": 1}
SETS |= {"router.share": 0.1, "router.train.batch": 16, "budget.samples": 1280, "sampling.steps": 3}
SETS |= {"compare.samples": 24, "compare.steps": 2, "compare.shown": 4, "compare.fit_rows": 60}


def run(*argv: str | Path) -> None:
    """A command as the entry point runs it, but for what becomes of errors."""
    cli.atoll.main([str(part) for part in argv], standalone_mode=False)


def sets(settings: dict[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def whole_campaign(folder: Path) -> Path:
    """Make it in a folder: glyphs from their names, experts as separate processes."""
    run("new", folder, "--recipe", "quickstart", *sets(SETS))
    run("launch", folder, "--on", "local")
    return folder
