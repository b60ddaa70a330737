"""Values in Markdown stay values."""

import ast

import pytest
import yaml

from atoll.base.markdown import Markdown, code, escape, licence, quoted

HOSTILE = ["<script>", "a\n## Licences", "[x](http://y)", "`", "| a | b |", "![x](y)", "- item"]
HOSTILE += ["\\`", "&lt;"]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_line_that_marks_nothing_up(value: str):
    line = escape(value)
    assert "\n" not in line and "<" not in line and not line.startswith(("#", "-"))
    for sign in "[]`|*_":
        assert line.count(sign) == line.count("\\" + sign)
    assert "`" not in code(value)[1:-1] and code(value)[0] == code(value)[-1] == "`"
    assert ast.literal_eval(quoted(value)) == value
    assert list(yaml.safe_load(licence(value))) == ["license", "license_name"]


def test_plain_words_stay_as_they_are():
    assert escape("DejaVu, 3.5 M") == "DejaVu, 3.5 M" and licence("CC BY 4.0") == "license: cc-by-4.0"
    assert escape(Markdown("**bold**")) == "**bold**"
