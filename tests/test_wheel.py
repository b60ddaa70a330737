"""What the commands of deploy/Dockerfile install in a fresh environment runs the quickstart and serves it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
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


def dockerfile() -> dict[str, list[str]]:
    """The instructions of deploy/Dockerfile by name."""
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, rest = line.split(maxsplit=1)
            found.setdefault(name, []).append(rest)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_dockerfile_installs_runs_the_quickstart_and_serves_it(tmp_path: Path) -> None:
    """In a virtual environment in place of the image; `useradd` is not run."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, file = tmp_path / "venv/bin/python", dockerfile()
    assert file["COPY"] == [". /src"]
    whole = {"src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    told = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in told and {line[1:] for line in told if line.startswith("!")} == whole
    copied = tmp_path / "src"
    here = run("git", "ls-files", "-co", "--exclude-standard", "src", "pyproject.toml", "README.md", cwd=ROOT)
    for name in [*here.split("\n")[:-1], "LICENSE", "constraints.txt"]:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes((ROOT / name).read_bytes())
    installs = [one for one in file["RUN"] if not one.startswith("useradd ")]
    for one in installs:
        words = shlex.split(one.replace("$INDEX ", "").replace("/src", str(copied)))
        assert words[0] == "python"
        run(python, *words[1:], cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(python, "-c", "import atoll; print(atoll.__file__)", cwd=empty)
    assert where.startswith(str(tmp_path / "venv"))
    atoll = tmp_path / "venv/bin/atoll"
    sets = [part for one in SMALL for part in ("--set", one)]
    said = run(atoll, "quickstart", "--dir", "letters", *sets, cwd=empty)
    assert "letters/reports/index.html" in said
    assert (empty / "letters/reports/index.html").stat().st_size > 10_000
    assert (empty / "letters/ensemble/ensemble.json").is_file()
    assert sorted(path.name for path in empty.iterdir()) == ["letters"]
    run(atoll, "export", "letters", "--to", "model", cwd=empty)
    (entry,), (args,) = map(json.loads, file["ENTRYPOINT"]), map(json.loads, file["CMD"])
    assert entry[0] == "atoll" and file["EXPOSE"] == ["8000"]
    words = [str(empty / "model") if word == "/model" else word for word in [*entry[1:], *args]]
    words = [word.replace("host=0.0.0.0", "host=127.0.0.1") for word in words]
    served = subprocess.Popen(
        [atoll, *words, "--set", "port=0"], stdout=subprocess.PIPE, text=True, cwd=empty
    )
    try:
        assert served.stdout is not None
        lines = [next(served.stdout), next(served.stdout)]
        assert "serving ensemble" in lines[0] and lines[1] == "ready\n"
        address = re.search(r"http://\S+", lines[0])
        assert address is not None
        for place in ("/", "/assets/playground.js", "/health"):
            with urllib.request.urlopen(address[0] + place, timeout=10) as answer:
                assert answer.status == 200
        served.send_signal(signal.SIGTERM)
        assert served.wait(30) == 0
    finally:
        served.kill()
        served.communicate()
