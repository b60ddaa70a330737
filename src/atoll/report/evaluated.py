"""What `atoll evaluate` measured: a table for every protocol, so that unlike numbers never share one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.campaign.results import MeasuredPoint, Protocol
from atoll.report.campaign import Campaign
from atoll.report.sections import Section
from atoll.report.wording import clean, significant, whole

COLUMNS = ("routing", "guidance", "steps", "seed")
"""Fields of a protocol that a table is about: they may differ within it."""
NAMES = ("reference", "extractor", "code")
"""Fields that decide no number: hashes stand for the first two."""


def section(campaign: Campaign) -> Section | None:
    """Tables by protocol; None before anything was evaluated."""
    groups: dict[str, list[MeasuredPoint]] = {}
    for one in campaign.evaluations:
        key = one.protocol.model_dump(mode="json", exclude={*COLUMNS, *NAMES})
        key["settings"] = {name: value["settings"] for name, value in one.values.items()}
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(one)
    return {"tables": [_table(campaign, group) for group in groups.values()]} if groups else None


def _table(campaign: Campaign, group: Sequence[MeasuredPoint]) -> Section:
    about, values = group[0].protocol, group[0].values
    stale = {id(one): campaign.is_stale(one.subject.get("weights") or {}) for one in group}
    return {
        "about": _sentence(about),
        "stale": any(stale.values()),
        "measures": [value["label"] for value in values.values()],
        "fields": [name for name in COLUMNS if any(getattr(one.protocol, name) is not None for one in group)],
        "rows": [
            {
                "name": clean(one.subject["name"]),
                "fields": {name: _plain(getattr(one.protocol, name)) for name in COLUMNS},
                "values": [_number(one.values[metric]) for metric in values],
                "stale": stale[id(one)],
            }
            for one in group
        ],
        "notes": sorted(
            {value["note"] for one in group for value in one.values.values() if value.get("note")}
        ),
    }


def _sentence(about: Protocol) -> str:
    rows = f", {about.reference_split} rows" if about.reference_split else ""
    return clean(
        f"{whole(about.samples)} pictures against {whole(about.reference_count)} of"
        f" {about.reference}{rows}; {about.extractor} at {about.extractor_size} px"
    )


def _plain(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else clean(value)


def _number(value: Mapping[str, Any]) -> str:
    spread = f" ± {significant(value['deviation'], 2)}" if value["deviation"] is not None else ""
    return significant(value["value"], 4) + spread
