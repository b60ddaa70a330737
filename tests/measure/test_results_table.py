"""Results name their protocol, and unlike ones stand in one table with a warning only."""

from typing import Any

import pytest

from atoll.base.errors import ConfigError, DataError
from atoll.campaign.measured import MeasuredPoint, Protocol
from atoll.measure.results_table import table

PLAIN: dict[str, Any] = {
    "extractor": "net",
    "extractor_hash": "a" * 64,
    "extractor_size": 28,
    "resize": "bicubic",
    "rounding": "nearest",
    "picture_size": (12, 12),
    "reference": "data",
    "reference_hash": "d" * 64,
    "reference_split": "heldout",
    "reference_count": 100,
    "samples": 50,
    "sampler": "Euler",
    "steps": 20,
    "guidance": 2.0,
    "routing": "once",
    "seed": 0,
    "ema": True,
    "code": "0.1.0",
}


def result(name: str = "ensemble", value: float = 3.0, components: int = 8, **changes: Any) -> MeasuredPoint:
    distance = {"label": "Fréchet distance on net", "value": value, "deviation": None, "note": None}
    kernel = {"label": "kernel distance on net", "value": 0.1, "deviation": 0.01, "note": None}
    values = {
        "frechet": {**distance, "settings": {"components": components}},
        "kid": {**kernel, "settings": {"subsets": 5}},
    }
    protocol = Protocol(**{**PLAIN, **changes})
    return MeasuredPoint(subject={"name": name}, protocol=protocol, values=values, cost={"seconds": 1.0})


def test_everything_that_decides_a_result_changes_its_key() -> None:
    """But not what the reference is called, nor the version of Atoll."""
    beside = [{"value": 4.0}, {"reference": "elsewhere"}, {"code": "9"}]
    same = {result().key, *(result(**change).key for change in beside)}
    assert len(same) == 1
    others: dict[str, Any] = {
        field: value + 1 for field, value in PLAIN.items() if type(value) in (int, float)
    }
    others |= {field: value + "x" for field, value in PLAIN.items() if isinstance(value, str)}
    others |= {"picture_size": (12, 13), "ema": False, "conditions": "train"}
    others |= {"extractor_token": "class", "conditions_hash": "c", "shift": 3.0}
    assert set(others) == set(Protocol.model_fields)
    del others["reference"], others["code"]
    keys = {result(**{field: value}).key for field, value in others.items()}
    keys |= {result("monolith").key, result(components=9).key}
    assert len(keys | same) == len(others) + 3


def test_a_report_comes_back() -> None:
    again = MeasuredPoint.of_json(result().to_json(), "here")
    assert again == result() and again.key == result().to_json()["key"]
    with pytest.raises(DataError, match="here is of atoll/point 2, this Atoll reads"):
        MeasuredPoint.of_json({**result().to_json(), "format": "atoll/point 2"}, "here")


def test_like_results_stand_in_one_table_in_peace() -> None:
    made = table([result(), result("monolith", 4.5)])
    assert made.warnings == []
    assert made.lines[0].split() == ["name", "frechet", "kid"]
    assert made.lines[2].split() == ["monolith", "4.5", "0.1"]
    assert [row["frechet"] for row in made.rows] == [3.0, 4.5]


@pytest.mark.parametrize("field", sorted(set(PLAIN) - {"reference", "extractor", "code"}))
def test_a_field_that_differs_is_named(field: str) -> None:
    value = PLAIN[field]
    other = (12, 13) if field == "picture_size" else (not value if field == "ema" else value * 2)
    if field == "seed":
        other = 5
    made = table([result(), result(**{field: other})])
    assert len(made.warnings) == 1 and made.warnings[0].startswith(f"{field} differs: ")
    assert f"warning: {field} differs" in made.text()


def test_another_version_is_a_note() -> None:
    made = table([result(), result(code="0.2.0")])
    assert made.warnings == [] and "code differs: 0.1.0, 0.2.0" in made.notes


def test_names_do_not_matter_where_hashes_agree() -> None:
    assert table([result(), result(reference="elsewhere", extractor="/models/net")]).warnings == []


def test_what_a_table_is_about_becomes_a_column() -> None:
    pair = [result(), result("monolith", routing=None, guidance=1.5)]
    assert len(table(pair).warnings) == 2
    made = table(pair, ["routing", "guidance"])
    assert made.warnings == []
    assert made.lines[0].split()[:3] == ["name", "routing", "guidance"]
    assert made.lines[2].split()[:3] == ["monolith", "-", "1.5"]
    with pytest.raises(ConfigError, match="results that differ in 'reference_hash' are not compared"):
        table(pair, ["reference_hash"])


def test_settings_of_a_metric_that_differ_are_a_warning() -> None:
    made = table([result(), result(components=16)])
    assert made.warnings == ["frechet was measured with different settings: do not compare it"]
