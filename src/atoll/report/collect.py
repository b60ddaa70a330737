"""Everything that a campaign has to show, read from its store into small values.

A campaign may be at any stage: what is not there yet is None or empty, and the page says so.
"""

import base64
import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atoll.base.errors import DataError, PartitionError, StoreError
from atoll.report.campaign import (
    Campaign,
    Card,
    Comparison,
    Diagnosis,
    Evaluation,
    Measured,
    Pair,
    Partition,
    Picture,
    Plan,
    Run,
    Weights,
)
from atoll.report.wording import clean, finite
from atoll.store.store import Store

SCHEMA = 1
DIAGNOSED = {
    "router": "split t nll accuracy confidence ece ece_chance temperature prior_nll prior_accuracy",
    "errors": "split t cluster model error se",
    "differences": "split t cluster gap difference se",
    "experts": "split t cluster expert error",
    "missing": "split t cluster expert loss",
    "disagreement": "split t cluster angle",
    "usage": "strategy expert size asked used",
    "switches": "strategy step t rate ever",
    "landing": "strategy cluster landed served others own heldout_others",
    "stability": "strategy samples sensitivity sensitivity_se refinement refinement_se",
    "lipschitz": "strategy step t foreseen",
    "nearest": "cluster samples suspicious memorised memorised_heldout distance distance_heldout",
    "suspicious": "cluster ratio why",
    "closest": "cluster ratio why",
}
"""The columns of `reports/diagnostics.json` that the page shows, by table."""
COMPARED = {
    "pairs": "strategy space partner pairs mean low high effect higher",
    "guidance": "model guidance distance precision recall",
    "best": "model guidance distance edge ratio",
    "curve": "model share train_flops of_monolith distance precision recall",
    "reach": "model target train_flops of_monolith how",
}
"""The same of `reports/compare.json`."""
NAMES = {
    *("split", "t", "cluster", "model", "gap", "strategy", "step", "why"),
    *("space", "partner", "edge", "how"),
}
"""Columns that may hold a word."""


def collect(store: Store) -> Campaign:
    """Read a campaign.

    Raises:
        PartitionError: it has no partition yet, so there is nothing to show.
        DataError: a file is not what Atoll writes.
        StoreError: a file cannot be read or is not JSON.
    """
    if not store.exists("partition/partition.json"):
        where = store.location
        raise PartitionError(f"{where} has no partition", f"run 'atoll partition {where}' first")
    frozen = _json(store, "campaign.json")
    with _reading(store, "campaign.json"):
        code, config = clean(frozen["code"]), dict(frozen["config"])
    partition = _partition(store)
    return Campaign(
        name=clean(store.location.rstrip("/").rpartition("/")[2]),
        code=code,
        config=config,
        partition=partition,
        sheets=tuple(_picture(store, f"partition/sheets/{k}.png") for k in range(partition.k)),
        experts=tuple(_run(store, f"islands/{k}", "expert", k) for k in range(partition.k)),
        router=_run(store, "router", "router", None),
        monolith=_run(store, "monolith", "monolith", None),
        pretrain=_run(store, "pretrain", "pretrain", None) if store.exists("pretrain/island.json") else None,
        student=_run(store, "student", "student", None) if store.exists("student/island.json") else None,
        comparison=_comparison(store),
        diagnosis=_diagnosis(store),
        stages=_stages(store),
        evaluations=tuple(sorted(_evaluations(store), key=lambda one: one.name)),
        stale=tuple(_stale(store)),
    )


def _evaluations(store: Store) -> Iterator[Evaluation]:
    """Those of this version."""
    folder = "reports/evaluate"
    for key in store.list(folder):
        if not key.endswith(".json") or key.count("/") != folder.count("/") + 1:
            continue
        found = _json(store, key)
        with _reading(store, key):
            if found["schema"] != SCHEMA:
                continue
            values = {clean(name): _value(value) for name, value in found["values"].items()}
            protocol, subject = dict(found["protocol"]), dict(found["subject"])
            missing = {"samples", "reference", "reference_count", "extractor", "extractor_size"} - set(
                protocol
            )
            if missing:
                raise ValueError(f"the protocol lacks {', '.join(sorted(missing))}")
            weights = dict(subject.get("weights") or {})
            stale = bool(weights) and weights != _published(store, weights)
            yield Evaluation(clean(subject["name"]), protocol, values, stale)


def _value(found: Any) -> dict[str, Any]:
    """One value of an evaluation; `ValueError` or `KeyError` where it has another form."""
    if finite(found["value"]) is None or not isinstance(found["settings"], dict):
        raise ValueError("a value is no number")
    return {
        "label": clean(found["label"]),
        "value": finite(found["value"]),
        "deviation": finite(found["deviation"]),
        "settings": found["settings"],
        "note": clean(found["note"]) if found.get("note") else None,
    }


def _published(store: Store, measured: dict[str, Any]) -> dict[str, Any]:
    """Digests of what is published now, of the parts that were measured, and of the ensemble if it was."""
    key = "ensemble/ensemble.json"
    ensemble = _optional(store, key) or {}
    with _reading(store, key):
        parts = dict(ensemble.get("parts") or {})
    single = [name for name in measured if name in ("monolith", "student", "pretrain")]
    cards = {name: _card(store, f"{name}/expert/card.json") for name in single}
    own = {name: card.weights for name, card in cards.items() if card}
    return own if set(measured) == set(single) else parts | own


def _stale(store: Store) -> Iterator[str]:
    """Commands that measured other weights than are published now: something was trained since."""
    for name, command in (("compare", "atoll compare"), ("diagnostics", "atoll diagnose")):
        key = f"reports/{name}.json"
        found = _optional(store, key) or {}
        with _reading(store, key):
            measured = dict(found.get("parts") or {})  # an earlier version did not say
        if measured and measured != _published(store, measured):
            yield command


def _partition(store: Store) -> Partition:
    key = "partition/partition.json"
    about = _json(store, key)
    with _reading(store, key):
        if about["schema"] != SCHEMA:
            raise PartitionError(
                f"{store.name(key)} has schema {about['schema']}, this Atoll reads {SCHEMA}", "make it again"
            )
        return Partition(
            hash=str(about["hash"]),
            method=str(about["method"]),
            encoder=_about(about["encoder"]),
            rows=int(about["rows"]),
            sizes=tuple(int(size) for size in about["sizes"]),
            heldout=tuple(int(size) for size in about["heldout"]),
            warnings=tuple(clean(warning) for warning in about["warnings"]),
        )


def _run(store: Store, folder: str, role: str, island: int | None) -> Run:
    plan, card = _plan(store, f"{folder}/island.json"), _card(store, f"{folder}/expert/card.json")
    key = f"{folder}/run/metrics.jsonl"
    lines = _lines(store, key)
    with _reading(store, key):
        trained = [line for line in lines if "loss" in line]
        values = [(float(line["samples"]), finite(line["loss"])) for line in trained]
        checked = [line for line in lines if "validation" in line]
        last = checked[-1] if checked else {}
        seen = max((int(line["samples"]) for line in lines), default=0)
        return Run(
            role=role,
            island=island,
            plan=plan,
            card=card,
            losses=tuple((x, y) for x, y in values if y is not None),
            odd=sum(y is None for _, y in values),
            validation=tuple(finite(v) for v in last.get("validation", ())),
            accuracy=tuple(finite(v) for v in last.get("accuracy_by_time", ())),
            seen=card.samples if card else seen,
            spent=card.seconds if card else finite(_last(trained, "seconds")),
        )


def _plan(store: Store, key: str) -> Plan | None:
    found = _optional(store, key)
    if found is None:
        return None
    with _reading(store, key):
        rows, steps, batch = (int(found[name]) for name in ("rows", "steps", "batch"))
        return Plan(rows, steps, batch, finite(found["train_flops"]))


def _card(store: Store, key: str) -> Card | None:
    found = _optional(store, key)
    if found is None:
        return None
    with _reading(store, key):
        origin = dict(found["provenance"])
        return Card(
            family=clean(found["family"]),
            parameters=int(found["parameters"]),
            samples=int(found["samples"]),
            train_flops=finite(found["train_flops"]),
            weights=clean(found["weights_sha256"]),
            initial=clean(origin.get("initial_weights") or ""),
            torch=clean(origin.get("torch") or ""),
            latents=_about(found.get("latents")),
            text=_about(found.get("text")),
            seconds=finite(origin.get("seconds")),
        )


def _about(value: Any) -> dict[str, Any] | None:
    return dict(value) if value else None


def _check_schema(store: Store, key: str, found: dict[str, Any], command: str) -> None:
    if found["schema"] != SCHEMA:
        raise DataError(
            f"{store.name(key)} has schema {found['schema']}, this Atoll reads {SCHEMA}",
            f"run '{command}' again",
        )


def _comparison(store: Store) -> Comparison | None:
    key = "reports/compare.json"
    found = _optional(store, key)
    if found is None:
        return None
    with _reading(store, key):
        _check_schema(store, key, found, "atoll compare")
        rows = tuple(
            Measured(
                str(row["name"]),
                *(finite(row.get(name)) for name in ("distance", "seconds", "gflops_per_step")),
                *(finite(row.get(name)) for name in ("experts_per_step", "router_calls_per_step")),
                *(finite(row.get(name)) for name in ("precision", "recall")),
            )
            for row in found["rows"]
        )
        prompts = tuple(clean(prompt) for prompt in found["prompts"])
        if len(found["clusters"]) != len(prompts):
            raise ValueError("prompts and clusters differ in number")
        return Comparison(
            rows=rows,
            metric=_without_nan(dict(found["metric"])),
            prompts=prompts,
            clusters=tuple(int(number) for number in found["clusters"]),
            routing=_routing(found["routing"]),
            pictures={
                name: tuple(
                    _picture(store, f"reports/compare/{name}/{n:02d}.png") for n in range(len(prompts))
                )
                for name in ("data", *(row.name for row in rows))
            },
            default=clean(found["default"]) if found.get("default") else None,
            tables=_tables(_without_nan(found.get("tables") or {}), COMPARED),
        )


def _diagnosis(store: Store) -> Diagnosis | None:
    key = "reports/diagnostics.json"
    found = _optional(store, key)
    if found is None:
        return None
    with _reading(store, key):
        _check_schema(store, key, found, "atoll diagnose")
        return Diagnosis(
            tables=_tables(found["tables"], DIAGNOSED),
            splits=tuple(clean(split) for split in found["settings"]["splits"]),
            strategies=tuple(clean(name) for name in found["strategies"]),
            settings=dict(found["settings"]),
            missing=tuple(int(number) for number in found["missing"]),
            leaked=int(found["copies"]["leaked"]) if found["copies"] else None,
            pairs=_pairs(store, found["pictures"]),
            closest=_pairs(store, found.get("closest") or []),
        )


def _pairs(store: Store, found: list[dict[str, Any]]) -> tuple[Pair, ...]:
    return tuple(
        Pair(
            clean(pair["caption"]),
            _picture(store, str(pair["sample"])),
            _picture(store, str(pair["training"])),
        )
        for pair in found
    )


def _tables(found: dict[str, Any], forms: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Tables as rows by column; `ValueError` or `KeyError` where one that the page shows has another form."""
    tables = {
        clean(name): [dict(zip(table["columns"], map(_cell, row), strict=True)) for row in table["rows"]]
        for name, table in found.items()
    }
    for name, columns in forms.items():
        for row in tables.get(name, []):
            for column in columns.split():
                value = row[column]
                named = column in NAMES or value is None
                if not named and (isinstance(value, bool) or not isinstance(value, int | float)):
                    raise ValueError(f"{name}.{column} is no number")
    return tables


def _cell(value: Any) -> Any:
    return clean(value) if isinstance(value, str) else value


def _routing(traces: dict[str, Any]) -> dict[str, Weights]:
    return {
        str(name): [[[finite(w) or 0.0 for w in sample] for sample in step] for step in steps]
        for name, steps in traces.items()
    }


def _stages(store: Store) -> dict[str, float] | None:
    found = _optional(store, "reports/stages.json")
    if found is None:
        return None
    return {clean(name): value for name, raw in found.items() if (value := finite(raw)) is not None}


def _lines(store: Store, key: str) -> list[dict[str, Any]]:
    """Lines of a metrics file; the last one may be torn while the run writes it, and is left out then."""
    if not store.exists(key):
        return []
    found = []
    for line in store.get(key).decode("utf-8", "replace").splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "samples" in value:
            found.append(value)
    return found


def _last(lines: list[dict[str, Any]], name: str) -> Any:
    return lines[-1].get(name) if lines else None


def _picture(store: Store, key: str) -> Picture | None:
    """A PNG; None where there is none or something else lies there."""
    if not store.exists(key):
        return None
    data = store.get(key)
    if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    width, height = struct.unpack(">II", data[16:24])
    return Picture("data:image/png;base64," + base64.b64encode(data).decode(), width, height)


def _json(store: Store, key: str) -> dict[str, Any]:
    value = store.get_json(key)
    if not isinstance(value, dict):
        raise DataError(f"{store.name(key)} is not what Atoll writes", "restore it or make it again")
    return value


def _optional(store: Store, key: str) -> dict[str, Any] | None:
    return _json(store, key) if store.exists(key) else None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _reading(store: Store, key: str) -> Iterator[None]:
    """A file whose content has another form than Atoll's is one line, not a traceback."""
    try:
        yield
    except (DataError, PartitionError, StoreError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__} {error}"
        raise DataError(
            f"{store.name(key)} is not what Atoll writes ({reason})", "restore it or make it again"
        ) from None
