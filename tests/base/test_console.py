"""Messages are Python logging; only the command line prints them."""

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from atoll.base import console
from helpers import environment


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of a program that imports Atoll."""
    logger = logging.getLogger("atoll")
    with monkeypatch.context() as patch:
        patch.setattr(logger, "handlers", [h for h in logger.handlers if not isinstance(h, console._Console)])
        patch.setattr(logger, "propagate", True)
        logger.setLevel(logging.NOTSET)
        yield logger
    logger.setLevel(logging.INFO)


def test_a_library_does_not_print(
    library: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    console.say("unheard")
    with caplog.at_level(logging.INFO, "atoll"):
        console.say("expert 0: finished")
        console.say("  warning: a cluster is small")
        progress = console.Progress("expert 0", 2, every=0)
        for done in (1, 2):
            progress(done)
    levels = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert levels == [("INFO", "expert 0"), ("WARNING", "  warning"), *[("INFO", "expert 0")] * 2]
    assert capsys.readouterr() == ("", "")


def test_the_command_line_prints_each_message_once(
    library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        console.show_messages()
    console.say("100 % done")
    logging.getLogger("atoll.serve").info("GET %s 200", "/version")
    assert capsys.readouterr().out == "100 % done\nGET /version 200\n"


def test_a_full_disk_under_a_log_ends_nothing() -> None:
    code = "console.show_messages(); console.say('unheard'); preemption.exit_process(0)"
    argv = [sys.executable, "-c", f"from atoll.base import console, preemption; {code}"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(argv, stdout=full, env=environment(), check=False).returncode == 0


def test_a_terminal_may_lack_letters(library: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    console.show_messages()
    console.say("é – 日本")
    assert sys.stdout.buffer.getvalue() == "é ? ??\n".encode("latin-1")  # type: ignore[attr-defined]


def test_a_notebook_has_a_bar(library: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = pytest.importorskip("tqdm.auto")
    made: list[object] = []

    class Bar(bars.tqdm):  # type: ignore[misc,name-defined]
        def __init__(self, *args: object, **kwargs: object) -> None:
            made.append(self)
            super().__init__(*args, disable=False, **kwargs)

    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(bars, "tqdm", Bar)
    progress = console.Progress("expert 0", 10, done=4, unit="images")
    progress(6, note="loss 0.5")
    progress(10)
    (bar,) = made
    assert (bar.n, bar.total, bar.desc, bar.postfix) == (10, 10, "expert 0", "")  # type: ignore[attr-defined]


def test_what_takes_longer_than_a_second_has_seconds_and_no_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter([0.0, 1250.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    with caplog.at_level("INFO", logger="atoll"):
        console.Progress("shards", 20, unit="shards", every=0)(10)
    assert "10/20 shards, 2 min 05 s each, 20 min 50 s left" in caplog.text
