"""Words of strangers in model cards, scripts and data sets stay words."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from atoll.base.console import say, show_messages
from atoll.base.errors import ConfigError, StoreError
from atoll.launch.slurm import _quoted
from atoll.model.model_card import model_card
from atoll.networks.settings import DataShape
from atoll.store.log import Log
from atoll.store.store import Store
from helpers_export import card
from hostile.arena import Arena

MARKDOWN = "x</script><script>alert(1)</script>\n\n## Licences\n\n[a](javascript:b) | ![c](d) `e`"
LICENCE = "mit\npipeline_tag: evil\n---\n# owned"
NAME = 'exp"+__import__("os").system("touch X")+"'
Capture = pytest.CaptureFixture[str]


def test_a_model_card_shows_words_and_obeys_none() -> None:
    shape = DataShape(channels=1, size=8, text_width=4, text_length=4)
    facts = {
        "licence": LICENCE,
        "name": MARKDOWN,
        "data": {"source": MARKDOWN, "licence": MARKDOWN, "rows": 5},
        "picture": {"prompts": [MARKDOWN], "steps": 3},
        "evaluation": None,
    }
    call = {"num_inference_steps": 2, "guidance_scale": 2.0, "routing": "top-1"}
    parts = [card(role=role, condition="text", shape=vars(shape)) for role in ("router", "expert")]
    _, head, body = model_card(parts[0], {0: parts[1]}, 1, facts, call, True, NAME).split("---\n", 2)
    facts = yaml.safe_load(head)
    assert facts["license"] == "other" and facts["license_name"] == "mit-pipeline-tag-evil-owned"
    assert facts["pipeline_tag"] == "text-to-image"
    assert body.count("\n## Licences\n") == 1 and "\n# owned" not in body
    assert "<script" not in body and not re.search(r"(?<!\\)\]\(javascript", body)
    (snippet,) = re.findall(r"```python\n(.*?)```", body, re.S)
    load = next(node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Call))
    assert [ast.literal_eval(argument) for argument in load.args] == [NAME]


def test_an_option_of_sbatch_is_one_line() -> None:
    with pytest.raises(ConfigError, match="line break"):
        _quoted("--output=/a\n#SBATCH --wrap=evil")


def test_no_message_steers_a_terminal(capsys: Capture) -> None:
    show_messages()
    say("a\x1b[2Jb\u202e\nc")
    assert capsys.readouterr().out == "a?[2Jb?\nc\n"


def test_a_link_out_of_a_source_is_a_reject(arena: Arena) -> None:
    secret = arena.folder / "secret.txt"
    secret.write_text("SECRET")
    (arena / "source/g1.txt").unlink()
    (arena / "source/g1.txt").symlink_to(secret)
    (arena / "source/inside.png").symlink_to(arena / "source/g0.png")
    (arena / "source/inside.txt").write_text("a link that stays inside")
    arena.run("data", "ingest", arena / "fresh", "--set", f"data.source={arena / 'source'}").check()
    lines = (arena / "fresh/data/rejects.jsonl").read_text().splitlines()
    rejects = {line["key"]: line["reason"] for line in map(json.loads, lines)}
    assert rejects == {"g1.png": "link out of the folder"}
    assert not any(b"SECRET" in path.read_bytes() for path in (arena / "fresh").rglob("*") if path.is_file())


def test_nothing_is_written_by_way_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("kept")
    store = Store.open(tmp_path / "campaign", create=True)
    (tmp_path / "campaign/ensemble").symlink_to(tmp_path / "elsewhere")
    for write in (
        lambda: store.put("ensemble/file", b"x"),
        lambda: store.create("ensemble/other", b"x"),
        lambda: store.delete("ensemble/file"),
        lambda: store.sub("ensemble"),
    ):
        with pytest.raises(StoreError, match="is a link that leads to"):
            write()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["file"]
    assert (tmp_path / "elsewhere/file").read_text() == "kept"


def test_a_dead_end_says_the_way_out(tmp_path: Path) -> None:
    log = Log(Store.open(tmp_path, create=True), "a")
    for _ in range(2):
        log.append("resume")
    (tmp_path / "log/000000.json").unlink()
    with pytest.raises(StoreError, match=f"put it back, or remove {tmp_path} to start the run anew"):
        Log(Store.open(tmp_path), "b")
