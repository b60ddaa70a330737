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

from helpers import ROOT
from whole import SETS, sets

# PIP_NO_COMPILE is pip's negative option, so 0 is what turns compiling off: it takes a minute, of which the
# commands below need a fraction.
ALONE = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
ALONE = {**ALONE, "PIP_NO_COMPILE": "0"}
ALONE.pop("PYTHONDONTWRITEBYTECODE", None)
SMALL = {**SETS, "compare.strategies": "[top-1]", "diagnose.strategies": "[top-1]"}
SMALL |= {"diagnose.samples": 24, "diagnose.steps": 2}


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run(argv, cwd=cwd, env=ALONE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_the_dockerfile_installs_runs_the_quickstart_and_serves_it(tmp_path: Path) -> None:
    """In a virtual environment in place of the image; `apt-get` and `useradd` are not run."""
    file: dict[str, list[str]] = {}
    for line in (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            name, rest = line.split(maxsplit=1)
            file.setdefault(name, []).append(rest)
    assert file["COPY"] == [". /src"]
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    copied = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored and copied == {"src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    source, empty, venv = (tmp_path / name for name in ("src", "empty", "venv"))
    listed = run(
        "git", "ls-files", "-co", "--exclude-standard", "src", "pyproject.toml", "README.md", cwd=ROOT
    )
    for name in [*listed.split("\n")[:-1], "LICENSE", "constraints.txt"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    for install in (line for line in file["RUN"] if not line.startswith(("apt-get ", "useradd "))):
        words = shlex.split(install.replace("$INDEX ", "").replace("/src", str(source)))
        assert words[0] == "python"
        run(venv / "bin/python", *words[1:], cwd=tmp_path)
    empty.mkdir()
    where = run(venv / "bin/python", "-c", "import atoll; print(atoll.__file__)", cwd=empty)
    assert where.startswith(str(venv))

    # The quickstart, with a small budget.
    atoll = venv / "bin/atoll"
    said = run(atoll, "quickstart", "--dir", "letters", *sets(SMALL), cwd=empty)
    assert "letters/reports/index.html" in said
    assert (empty / "letters/reports/index.html").stat().st_size > 10_000
    assert (empty / "letters/ensemble/ensemble.json").is_file()
    assert sorted(path.name for path in empty.iterdir()) == ["letters"]

    # The image's server.
    run(atoll, "export", "letters", "--to", "model", cwd=empty)
    (_, entry), (args,) = map(json.loads, file["ENTRYPOINT"]), map(json.loads, file["CMD"])
    assert entry[0] == "atoll" and file["EXPOSE"] == ["8000"]
    words = [str(empty / "model") if word == "/model" else word for word in [*entry[1:], *args]]
    words = [word.replace("host=0.0.0.0", "host=127.0.0.1") for word in words]
    argv = [atoll, *words, "--set", "port=0"]
    served = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=empty, env=ALONE)
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
