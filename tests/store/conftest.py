"""Stores of three kinds for the same tests: local disk, memory, and S3 over HTTP."""

import uuid
from pathlib import Path

import pytest


@pytest.fixture(params=["local", "memory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a new, empty store may lie."""
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/some/where"
    return f"{request.getfixturevalue('bucket_url')}/some where"
