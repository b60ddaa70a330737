import runpy
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.store.store import Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kind():
    class Note(File):
        """A note."""

        FORMAT, VERSION, REMEDY = "test/note", 2, "write it again"
        ERROR: ClassVar = DataError

        text: str
        """What it says."""

    return Note


def test_a_file_says_its_format_first_and_reads_back(kind, tmp_path: Path):
    store = Store.open(tmp_path)
    store.put_json("note.json", kind(text="a").to_json())
    assert list(store.get_json("note.json").items()) == [("format", "test/note 2"), ("text", "a")]
    assert kind.read(store, "note.json") == kind(text="a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": "test/note 3", "text": "a"}, "is of test/note 3, this Atoll reads test/note 2"),
        ({"format": "test/other 2", "text": "a"}, "is of test/other 2, this Atoll reads test/note 2"),
        ({"format": 2, "text": "a"}, "is of no format of Atoll's, this Atoll reads test/note 2"),
        ({"text": "a"}, "is of no format of Atoll's, this Atoll reads test/note 2"),
        ({"format": "test/note 2", "text": 1}, "is not what Atoll writes ('text' in camp/note.json: Input"),
        ({"format": "test/note 2"}, "is not what Atoll writes ('text' in camp/note.json is missing"),
        ({"format": "test/note 2", "text": "a", "more": 1}, "is not what Atoll writes (unknown key 'more'"),
        ([], "is not what Atoll writes"),
    ],
)
def test_another_version_or_content_is_one_line_with_the_fix(kind, content, message):
    with pytest.raises(DataError) as error:
        kind.of_json(content, "camp/note.json")
    text = str(error.value)
    assert text.startswith(f"camp/note.json {message}") and text.endswith(": write it again")
    assert "\n" not in text


def test_two_formats_of_one_name_are_refused(kind):
    document = runpy.run_path(str(ROOT / "docs" / "formats.py"))["document"]
    other = type("Other", (File,), {"FORMAT": "test/note", "__module__": __name__})
    with pytest.raises(AssertionError, match="2 files are of the format test/note"):
        document([kind, other])


def test_the_page_of_formats_is_the_generated_one():
    argv = [sys.executable, str(ROOT / "docs" / "formats.py"), "--check"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
