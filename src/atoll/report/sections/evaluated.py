"""What `atoll evaluate` measured: a table for every protocol, so that unlike numbers never share one."""

import json
from collections.abc import Sequence
from typing import Any

from atoll.campaign.measured import MeasuredPoint
from atoll.report.facts import Facts
from atoll.report.text import clean_tree

FOLDER = "reports/evaluate"
COLUMNS = ("routing", "guidance", "steps", "seed")
"""Fields of a protocol that a table is about: they may differ within it."""
NAMES = ("reference", "extractor", "code")
"""Fields that decide no number: hashes stand for the first two."""


def section(facts: Facts) -> dict[str, Any] | None:
    """Tables by protocol, models sorted by name; None before anything was evaluated."""
    groups: dict[str, list[MeasuredPoint]] = {}
    for one in sorted(_points(facts), key=lambda point: str(point.subject["name"])):
        key = one.protocol.model_dump(mode="json", exclude={*COLUMNS, *NAMES})
        key["settings"] = {name: value.settings for name, value in one.values.items()}
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(one)
    return {"tables": [_table(facts, points) for points in groups.values()]} if groups else None


def _table(facts: Facts, points: Sequence[MeasuredPoint]) -> dict[str, Any]:
    """Points of one protocol, each with whether it is of other weights than are published."""
    notes = {value.note for one in points for value in one.values.values()}
    return {
        "rows": [(one, facts.is_stale(one.subject.get("weights") or {})) for one in points],
        "columns": [n for n in COLUMNS if any(getattr(one.protocol, n) is not None for one in points)],
        "notes": sorted(note for note in notes if note),
    }


def _points(facts: Facts) -> list[MeasuredPoint]:
    """Those of this version; others are not shown."""
    store, points = facts.store, []
    for key in store.list(FOLDER):
        if key.endswith(".json") and key.count("/") == FOLDER.count("/") + 1:
            content = clean_tree(store.get_json(key))
            if not isinstance(content, dict) or MeasuredPoint.fits(content):
                points.append(MeasuredPoint.of_json(content, store.name(key)))
    return points
