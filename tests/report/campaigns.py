"""Campaign folders written by hand: real files in a real store, numbers chosen to be told apart."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.base.table import Tables
from atoll.campaign.diagnosed import Diagnosis, DiagnosisTables
from atoll.campaign.folder import Frozen
from atoll.campaign.measured import ComparisonTables
from atoll.campaign.runs import RunPlan
from atoll.model.card import Card
from atoll.store.store import Store
from helpers_data import saved

HASH = "ab" * 32
SHAPE = {"channels": 1, "size": 16, "text_width": 384, "text_length": 20, "classes": 0}
PROMPTS = [
    "digit two, sans",
    '<script>alert("1")</script>',
    'a "quoted" & \'single\' caption" onload="alert(2)',
    "two\nlines\tand \x00 a null, \u202e backwards",
    "https://example.org/" + "long" * 200,
    "{{ 7 * 7 }} {% raw %}",
]
DISTANCES = {"monolith": 20.0, "once": 18.0, "top-1": 19.0, "top-2": 17.0, "full": 23.0, "oracle": 15.0}
METRIC: dict[str, Any] = {"name": "efficientnet-lite2", "hash": HASH, "size": 64, "components": 64}
METRIC |= {"reference": "held-out pictures", "reference_rows": 920, "samples": 500, "guidance": 2.0}
METRIC |= {"seed": 0, "conditions": "of held-out rows", "sampler": "Euler", "ema": True}
METRIC |= {"real_training_pictures": 2.125}


def png(side: int, level: int, mode: str = "L") -> bytes:
    pixels = np.arange(side * side, dtype=np.uint8).reshape(side, side) // 2 + level
    return saved(Image.fromarray(pixels).convert(mode))


def table(columns: str, rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    return {"columns": columns.split(), "rows": [list(row) for row in rows]}


def complete(tables: dict[str, Any], types: type[Tables]) -> dict[str, Any]:
    """Tables with 0 in the columns that no page reads."""
    for name, content in tables.items():
        fields = types.record(name).model_fields
        rest = [field for field in fields if fields[field].is_required() and field not in content["columns"]]
        content["columns"] += rest
        content["rows"] = [[*row, *(0 for _ in rest)] for row in content["rows"]]
    return tables


class Builder:
    """Writes the files of a campaign, as the stages do, one stage at a time."""

    def __init__(self, root: Path, k: int = 4, side: int = 16) -> None:
        self.store = Store.open(root, create=True)
        self.k, self.side = k, side
        self.sizes = [1000 - 100 * n for n in range(k)] if k < 10 else [500 + 10 * n for n in range(k)]
        self.rng = np.random.default_rng(0)

    def campaign(self, **config: Any) -> "Builder":
        tree = {"seed": 0, "condition": "text", "partition": {"method": "kmeans", "k": self.k}}
        content = {"code": "0.1.0", "config": {**tree, "monolith": True, **config}}
        self.store.put_json("campaign.json", Frozen.header() | content)
        return self

    def partition(self, **fields: Any) -> "Builder":
        heldout = [10 * (n + 1) for n in range(self.k)]
        about: dict[str, Any] = {"format": "atoll/partition 1", "method": "kmeans"}
        about |= {"k": self.k, "seed": 0, "data": HASH, "hash": HASH}
        about |= {"encoder": {"name": "efficientnet-lite0", "hash": HASH, "size": 64}, "warnings": []}
        about |= {"rows": sum(self.sizes) + sum(heldout), "sizes": self.sizes, "heldout": heldout}
        self.store.put_json("partition/partition.json", about | fields)
        for number, size in enumerate(self.sizes):
            self.store.put(f"partition/sheets/{number}.png", png(48, number, "RGB"))
            self.plan("expert", size // 10, rows=size, island=number)
        self.plan("router", 50, flops=1e6)
        return self.plan("monolith", sum(self.sizes) // 10)

    def plan(self, role: str, steps: int, *, flops: float = 3e8, **fields: Any) -> "Builder":
        """The numbers of a run, on all rows unless it is told."""
        folder = role if "island" not in fields else f"islands/{fields['island']}"
        plan = {"role": role, "steps": steps, "batch": 64, "partition": HASH}
        plan |= {"rows": sum(self.sizes), **fields}
        plan |= {"seed": 0, "init_seed": 0, "init_sha256": None, "shape": SHAPE}
        plan |= {"forward_flops": flops / 3, "train_flops": steps * plan["batch"] * flops}
        self.store.put_json(f"{folder}/island.json", RunPlan.parse(plan, folder).to_json())
        return self

    def run(self, folder: str, *, finished: bool = True, losses: list[Any] | None = None) -> "Builder":
        """Log a run and, if it is finished, publish its network."""
        plan = self.store.get_json(f"{folder}/island.json")
        count, batch = plan["steps"] // 10, plan["batch"]
        values = losses or [1.5 / math.sqrt(n + 1) + 0.01 * self.rng.random() for n in range(count)]
        lines = [
            {"step": 10 * n, "samples": 10 * n * batch, "loss": loss, "lr": 1e-3, "seconds": 2.5 * n}
            for n, loss in enumerate(values, 1)
        ]
        router = plan["role"] == "router"
        check: dict[str, Any] = {"times": [*((n + 0.5) / 8 for n in range(8)), *([1.0] if router else [])]}
        check |= {"validation": [0.8 - 0.05 * n for n in range(len(check["times"]))]}
        check["validation_loss"] = sum(check["validation"]) / len(check["validation"])
        check |= {"accuracy_by_time": [0.9 - 0.05 * n for n in range(9)]} if router else {}
        lines.append({"step": lines[-1]["step"], "samples": lines[-1]["samples"], **check})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.store.put(f"{folder}/run/metrics.jsonl", text.encode())
        if finished:
            self._card(folder, plan)
        return self

    def _card(self, folder: str, plan: dict[str, Any]) -> None:
        kept = ("role", "island", "rows", "batch", "partition", "shape", "train_flops", "forward_flops")
        card = {name: plan[name] for name in kept} | {"condition": "text", "parameters": 1234567}
        card |= {"family": "router" if plan["role"] == "router" else "pixart", "weights_sha256": "cd" * 32}
        card |= {"samples": plan["steps"] * plan["batch"]}
        card |= {"latents": {"name": "none", "hash": "", "shift": 0.0, "scale": 1.0}}
        card |= {"text": {"name": "minilm", "hash": HASH, "max_length": 20}}
        card |= {"provenance": {"torch": "2.13.0", "seconds": 61.5, "initial_weights": "ef" * 32}}
        self.store.put_json(f"{folder}/expert/card.json", Card.parse(card, folder).to_json())

    def train(self) -> "Builder":
        """All runs, finished."""
        for folder in [*(f"islands/{n}" for n in range(self.k)), "router", "monolith"]:
            self.run(folder)
        return self

    def compare(self, prompts: list[str] | None = None, steps: int = 6, **fields: Any) -> "Builder":
        prompts = PROMPTS if prompts is None else prompts
        weights = self.rng.dirichlet(np.ones(self.k), (steps, len(prompts)))
        sharp = np.eye(self.k)
        once = np.broadcast_to(sharp[np.arange(len(prompts)) % self.k], weights.shape)
        routing = {"once": once, "top-1": sharp[weights.argmax(-1)], "full": weights.round(4)}
        cost = {"seconds": 20.0, "gflops_per_step": 0.07, "experts_per_step": 1.0}
        cost |= {"router_calls_per_step": 0.25}
        content: dict[str, Any] = {"format": "atoll/comparison 1", "code": "0.1.0", "default": "once"}
        content |= {"metric": METRIC | {"steps": steps}}
        content |= {
            "rows": [{"name": name, "distance": value, **cost} for name, value in DISTANCES.items()],
            "prompts": prompts,
            "clusters": [n % self.k for n in range(len(prompts))],
            "routing": {name: array.tolist() for name, array in routing.items()},
        }
        self.store.put("reports/compare.json", json.dumps(content | fields).encode())
        for name in ("data", *DISTANCES):
            for n in range(len(prompts)):
                self.store.put(f"reports/compare/{name}/{n:02d}.png", png(self.side, 7 * n))
        return self

    def beyond(self, **change: Any) -> "Builder":
        """A comparison with sweeps, pairs and a curve. `change` replaces tables; None leaves one out."""
        content = self.store.get_json("reports/compare.json")
        for row in content["rows"]:
            row |= {"precision": 0.625, "recall": 0.375}
        content["metric"]["neighbours"] = {"k": 3, "real_precision": 0.75, "real_recall": 0.875}
        alike = (("same noise", 0.81), ("same cluster", 0.32), ("any", -0.14))
        ways = [(name, space) for name in ("top-1", "once") for space in ("pixels", "features")]
        others = {"same noise": (None, None)}
        each: Iterable[Sequence[Any]] = (
            (*way, partner, 500, mean, mean - 0.01, mean + 0.01, *others.get(partner, (1.75, 0.96)))
            for way, (partner, mean) in itertools.product(ways, alike)
        )
        tables = {"pairs": table("strategy space partner pairs mean low high effect higher", each)}
        swept = {"monolith": (21.0, 20.0, 19.0), "once": (16.0, 18.0, 17.0)}
        each = ((name, n + 1.0, swept[name][n], 0.5, 0.5) for name, n in itertools.product(swept, range(3)))
        tables["guidance"] = table("model guidance distance precision recall", each)
        each = [("monolith", 3, 19, 0.5, None, "high", None), ("once", 1, 16, 0.5, None, "low", 0.842)]
        tables["best"] = table("model guidance distance precision recall edge ratio", each)
        courses = {"pretrain": [(0.5, 0.125, 60.0), (1.0, 0.25, 40.0)]}
        courses |= {"monolith": [(0.5, 0.5, 40.0), (1.0, 1.0, 20.0)]}
        courses |= {"once": [(0.5, 0.625, 30.0), (1.0, 1.0, 18.0)]}
        each = (
            (name, share, 1e12 * spent, spent, distance, None, None)
            for name, points in courses.items()
            for share, spent, distance in points
        )
        tables["curve"] = table("model share train_flops of_monolith distance precision recall", each)
        each = [("once", 20, 9.375e11, 0.9375, "between points")]
        tables["reach"] = table("model target train_flops of_monolith how", each)
        tables = complete(tables, ComparisonTables) | change
        content["tables"] = {name: rows for name, rows in tables.items() if rows}
        self.store.put_json("reports/compare.json", content)
        return self

    def diagnose(
        self, splits: Sequence[str] = ("heldout",), monolith: bool = True, **fields: Any
    ) -> "Builder":
        """Experts whose error on cluster j is 1 + |j - k|, a monolith at 2, a router that learns with t."""
        pairs = []
        for n in range(2):
            keys = {name: f"reports/diagnostics/pairs/{n:02d}-{name}.png" for name in ("sample", "training")}
            for key in keys.values():
                self.store.put(key, png(self.side, n))
            pairs.append({**keys, "caption": PROMPTS[n]})
        content = {"settings": {"splits": list(splits), "quantile": 0.01}, "missing": []}
        content |= {"strategies": ["once", "top-1"], "copies": {"leaked": 0}}
        content |= {"pictures": pairs, "closest": pairs[:1]}
        content |= {"tables": complete(self._errors(splits, monolith) | self._sampled(), DiagnosisTables)}
        self.store.put_json("reports/diagnostics.json", Diagnosis.header() | content | fields)
        return self

    def _errors(self, splits: Sequence[str], monolith: bool) -> dict[str, Any]:
        times, clusters, experts = (0.25, 0.75, 1.0), ["all", *range(self.k)], range(self.k)
        places = [(split, t, c) for split in splits for t in (*times, "mean") for c in clusters]
        models = {"own": 1.0, "selected": 1.5, "others": 3.0, "mixture": 1.25}
        models |= {"monolith": 2.0} if monolith else {}
        gaps = [("selected", "own")]
        gaps += [("selected", "monolith"), ("mixture", "monolith")] if monolith else []
        product = itertools.product
        each: Iterable[Sequence[Any]] = (
            (split, t, 0.5 + t, 0.9 - 0.5 * t, 0.95, 0.05 + 0.5 * t, 0.03, 2.0, 1.3, 0.3)
            for split, t in product(splits, times)
        )
        columns = "nll accuracy confidence ece ece_chance temperature prior_nll prior_accuracy"
        tables = {"router": table(f"split t {columns}", each)}
        each = ((*place, model, error, 0.01) for place in places for model, error in models.items())
        tables["errors"] = table("split t cluster model error se", each)
        each = ((*p, f"{a}-{b}", models[a] - models[b], 0.01) for p, (a, b) in product(places, gaps))
        tables["differences"] = table("split t cluster gap difference se", each)
        each = ((*p, e, 1.5 if p[2] == "all" else 1.0 + abs(p[2] - e)) for p, e in product(places, experts))
        tables["experts"] = table("split t cluster expert error", each)
        each = ((*p, e, 0.25 if p[2] == e else -0.05) for p, e in product(places, experts))
        tables["missing"] = table("split t cluster expert loss", each)
        angles = {t: 20 + 10 * t for t in times}
        each = ((split, t, "all", angles.get(t)) for split, t in product(splits, (*times, "mean")))
        return tables | {"disagreement": table("split t cluster angle", each)}

    def _sampled(self) -> dict[str, Any]:
        names, dense = ("once", "top-1"), ("once", "top-1", "monolith")
        clusters, share = ["all", *range(self.k)], 1 / self.k
        product, experts = itertools.product, range(self.k)
        each: Iterable[Sequence[Any]] = ((n, e, share, share, share) for n, e in product(names, experts))
        tables = {"usage": table("strategy expert size asked used", each)}
        steps, rates = [("all", None), (1, 0.5), (2, 0.25)], {"once": (0.0, 0.0), "top-1": (0.125, 0.4)}
        each = ((name, *step, *rates[name]) for name, step in product(names, steps))
        tables["switches"] = table("strategy step t rate ever", each)
        each = ((*place, 0.75, 0.5, 0.8, 0.4, 0.9) for place in product(names, clusters))
        tables["landing"] = table("strategy cluster landed served others own heldout_others", each)
        each = ((name, 100, 1.5, 0.1, 0.05, 0.002) for name in dense)
        columns = "strategy samples sensitivity sensitivity_se refinement refinement_se"
        tables["stability"] = table(columns, each)
        each = ((n, step, t, 1 - t / 2) for n, (step, t) in product(dense, ((0, 1.0), (1, 0.5))))
        tables["lipschitz"] = table("strategy step t foreseen", each)
        each = ((cluster, 50, 0.06, 0.04, 0.0, 3.5, 4.5) for cluster in (*clusters, "monolith"))
        columns = "cluster samples suspicious memorised memorised_heldout distance distance_heldout"
        tables["nearest"] = table(columns, each)
        each = ((n % self.k, 0.1 * n, "ratio, distance") for n in range(2))
        tables["suspicious"] = table("cluster ratio why", each)
        return tables | {"closest": table("cluster ratio why", [(0, 0.1, "")])}

    def change(self, name: str, change: dict[str, object], **where: object) -> "Builder":
        """Change columns in the rows of a diagnosis' table that have these values."""
        content = self.store.get_json("reports/diagnostics.json")
        columns, rows = (content["tables"][name][part] for part in ("columns", "rows"))
        chosen = [r for r in rows if all(r[columns.index(key)] == value for key, value in where.items())]
        assert chosen
        for row, (key, value) in itertools.product(chosen, change.items()):
            row[columns.index(key)] = value
        self.store.put_json("reports/diagnostics.json", content)
        return self

    def evaluate(self, key: str, name: str, value: float, weights: str = "", **protocol: Any) -> "Builder":
        """A point of `atoll evaluate`."""
        how = {"extractor": "net", "extractor_size": 64, "samples": 1000, "reference": "the campaign's data"}
        how |= {"reference_count": 1512, "reference_split": "heldout", "guidance": 2.0, "routing": "top-1"}
        how |= {"extractor_hash": "ab", "reference_hash": "cd", "resize": "area", "rounding": "8 bits"}
        how |= {"picture_size": [16, 16], "code": "0.1.0"}
        frechet = {"label": "Fréchet distance on net", "value": value, "deviation": None, "settings": {}}
        kid = {"label": "kernel distance on net", "value": 0.01234, "deviation": 0.002, "settings": {}}
        subject = {"name": name} | ({"weights": {name: weights}} if weights else {})
        content: dict[str, Any] = {"format": "atoll/point 1", "subject": subject}
        content |= {"protocol": how | protocol, "cost": {}}
        content["values"] = {"frechet": frechet | {"notes": ["the covariance is singular"]}, "kid": kid}
        self.store.put_json(f"reports/evaluate/{key}.json", content)
        return self

    def stages(self) -> "Builder":
        self.store.put_json("reports/stages.json", {"data ingest": 4.5, "partition": 1.25, "launch": 100.0})
        return self

    def whole(self) -> "Builder":
        """A finished quickstart."""
        return self.campaign().partition().train().compare().diagnose().stages()
