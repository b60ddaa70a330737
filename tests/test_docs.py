"""The site of the docs builds without warnings and without the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT


def test_every_file_of_the_code_that_the_docs_name_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {path for page in pages for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page.read_text())}
    assert len(named) > 40
    assert [
        p for p in sorted(named) if not any((ROOT / at / p).exists() for at in (".", "src", "src/atoll"))
    ] == []


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and not built.stderr.strip(), built.stdout + built.stderr
    reference = (tmp_path / "site/reference/api/index.html").read_text()
    assert "atoll.api.create" in reference and "AtollPipeline" in reference
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert [url for url in loaded if "canonical" not in url] == [], page
