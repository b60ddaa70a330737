"""Campaign folders written by hand: real files in a real store, numbers chosen to be told apart."""

import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.campaign.settings.train import RunPlan
from atoll.ensemble.card import Card
from atoll.store.store import Store

HASH = "ab" * 32
SHAPE = {"channels": 1, "size": 16, "text_width": 384, "text_length": 20, "classes": 0}
PROMPTS = [
    "digit two, sans",
    '<script>alert("1")</script>',
    'a "quoted" & \'single\' caption" onload="alert(2)',
    "two\nlines\tand \x00 a null, \ud800 a surrogate, \u202e backwards",
    "https://example.org/" + "long" * 200,
    "{{ 7 * 7 }} {% raw %}",
]
DISTANCES = {"monolith": 20.0, "once": 18.0, "top-1": 19.0, "top-2": 17.0, "full": 23.0, "oracle": 15.0}


def png(side: int, level: int, mode: str = "L") -> bytes:
    pixels = np.arange(side * side, dtype=np.uint8).reshape(side, side) // 2 + level
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


class Builder:
    """Writes the files of a campaign, as the stages do, one stage at a time."""

    def __init__(self, root: Path, k: int = 4, side: int = 16) -> None:
        self.store = Store.open(root, create=True)
        self.k, self.side = k, side
        self.sizes = [1000 - 100 * n for n in range(k)] if k < 10 else [500 + 10 * n for n in range(k)]
        self.rng = np.random.default_rng(0)

    def campaign(self, **config: Any) -> "Builder":
        tree = {
            "seed": 0,
            "condition": "text",
            "partition": {"method": "kmeans", "k": self.k},
            "monolith": True,
        }
        self.store.put_json("campaign.json", {"schema": 1, "code": "0.1.0", "config": {**tree, **config}})
        return self

    campaign_again = campaign

    def partition(self, **fields: Any) -> "Builder":
        heldout = [10 * (n + 1) for n in range(self.k)]
        about = {
            "schema": 1,
            "method": "kmeans",
            "k": self.k,
            "seed": 0,
            "encoder": {"name": "efficientnet-lite0", "hash": HASH, "size": 64},
            "rows": sum(self.sizes) + sum(heldout),
            "data": HASH,
            "sizes": self.sizes,
            "heldout": heldout,
            "warnings": [],
            "hash": HASH,
        }
        self.store.put_json("partition/partition.json", about | fields)
        for number in range(self.k):
            self.store.put(f"partition/sheets/{number}.png", png(48, number, "RGB"))
            self._plan(f"islands/{number}", "expert", number)
        self._plan("router", "router", None)
        self._plan("monolith", "monolith", None)
        return self

    def _plan(self, folder: str, role: str, island: int | None) -> None:
        rows = sum(self.sizes) if island is None else self.sizes[island]
        steps = {"expert": rows // 10, "router": 50, "monolith": sum(self.sizes) // 10}[role]
        self._write_plan(folder, role, island, rows, steps, 64, 1e6 if role == "router" else 3e8)

    def _write_plan(
        self, folder: str, role: str, island: int | None, rows: int, steps: int, batch: int, flops: float
    ) -> None:
        plan = {"role": role, "island": island, "rows": rows, "steps": steps, "batch": batch, "shape": SHAPE}
        plan |= {"partition": HASH, "seed": 0, "init_seed": 0, "init_sha256": None}
        plan |= {"train_flops": steps * batch * flops, "forward_flops": flops / 3}
        self.store.put_json(f"{folder}/island.json", RunPlan.parse(plan, folder).to_json())

    def seed(self, steps: int) -> "Builder":
        """The plan of shared pretraining on all rows."""
        self._write_plan("pretrain", "pretrain", None, sum(self.sizes), steps, 64, 3e8)
        return self

    def student(self, steps: int) -> "Builder":
        """The plan of a student."""
        self._write_plan("student", "student", None, sum(self.sizes), steps, 16, 4e8)
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
        check: dict[str, Any] = {"validation": [0.8 - 0.05 * n for n in range(9 if router else 8)]}
        check |= {"accuracy_by_time": [0.9 - 0.05 * n for n in range(9)]} if router else {}
        lines.append({"step": lines[-1]["step"], "samples": lines[-1]["samples"], **check})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.store.put(f"{folder}/run/metrics.jsonl", text.encode())
        if finished:
            self._card(folder, plan)
        return self

    def _card(self, folder: str, plan: dict[str, Any]) -> None:
        kept = ("role", "island", "rows", "batch", "partition", "shape", "train_flops", "forward_flops")
        card = {
            **{name: plan[name] for name in kept},
            "condition": "text",
            "family": "router" if plan["role"] == "router" else "pixart",
            "samples": plan["steps"] * plan["batch"],
            "latents": {"name": "none", "hash": ""},
            "text": {"name": "minilm", "hash": HASH, "max_length": 20},
            "parameters": 1234567,
            "weights_sha256": "cd" * 32,
            "provenance": {"torch": "2.13.0", "seconds": 61.5, "initial_weights": "ef" * 32},
        }
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
        routing = {
            "once": np.broadcast_to(sharp[np.arange(len(prompts)) % self.k], weights.shape),
            "top-1": sharp[weights.argmax(-1)],
            "full": weights.round(4),
        }
        content = {
            "schema": 1,
            "code": "0.1.0",
            "default": "once",
            "metric": {
                "name": "efficientnet-lite2",
                "hash": HASH,
                "size": 64,
                "components": 64,
                "reference": "held-out pictures",
                "reference_rows": 920,
                "samples": 500,
                "conditions": "of held-out rows",
                "steps": steps,
                "guidance": 2.0,
                "sampler": "Euler",
                "ema": True,
                "seed": 0,
                "same_features_as_partition": False,
                "real_training_pictures": 2.125,
            },
            "rows": [
                {
                    "name": name,
                    "distance": value,
                    "seconds": 20.0,
                    "gflops_per_step": 0.07,
                    "experts_per_step": 1.0,
                    "router_calls_per_step": 0.25,
                }
                for name, value in DISTANCES.items()
            ],
            "prompts": prompts,
            "clusters": [n % self.k for n in range(len(prompts))],
            "routing": {name: array.tolist() for name, array in routing.items()},
        }
        # Not put_json: a lone surrogate cannot be encoded, but JSON can hold it as an escape.
        self.store.put("reports/compare.json", json.dumps(content | fields).encode())
        for name in ("data", *DISTANCES):
            for n in range(len(prompts)):
                self.store.put(f"reports/compare/{name}/{n:02d}.png", png(self.side, 7 * n))
        return self

    def beyond(self, **change: Any) -> "Builder":
        """A comparison with sweeps, pairs and a curve. `change` replaces tables; None leaves one out."""
        found = self.store.get_json("reports/compare.json")
        for row in found["rows"]:
            row |= {"precision": 0.625, "recall": 0.375}
        found["metric"]["neighbours"] = {"k": 3, "real_precision": 0.75, "real_recall": 0.875}
        swept = {"monolith": (21.0, 20.0, 19.0), "once": (16.0, 18.0, 17.0)}
        courses = {"pretrain": (0.0, 0.25, (60.0, 40.0)), "monolith": (0.0, 1.0, (40.0, 20.0))}
        courses |= {"once": (0.25, 0.75, (30.0, 18.0))}
        tables: dict[str, Any] = {
            "pairs": [
                {
                    "strategy": name,
                    "space": space,
                    "partner": partner,
                    "pairs": 500,
                    "mean": mean,
                    "low": mean - 0.01,
                    "high": mean + 0.01,
                    "effect": None if partner == "same noise" else 1.75,
                    "higher": None if partner == "same noise" else 0.96,
                }
                for name, space in itertools.product(("top-1", "once"), ("pixels", "features"))
                for partner, mean in (("same noise", 0.81), ("same cluster", 0.32), ("any", -0.14))
            ],
            "guidance": [
                {"model": n, "guidance": s, "distance": d, "precision": 0.5, "recall": 0.5}
                for n, distances in swept.items()
                for s, d in zip((1.0, 2.0, 3.0), distances, strict=True)
            ],
            "best": [
                {"model": n, "guidance": s, "distance": d, "precision": 0.5, "recall": None}
                | {"edge": edge, "ratio": ratio}
                for n, s, d, edge, ratio in (
                    ("monolith", 3.0, 19.0, "high", None),
                    ("once", 1.0, 16.0, "low", 0.842),
                )
            ],
            "curve": [
                {
                    "model": n,
                    "share": (place + 1) / 2,
                    "train_flops": 1e12 * (start + length * (place + 1) / 2),
                    "of_monolith": start + length * (place + 1) / 2,
                    "distance": d,
                    "precision": None,
                    "recall": None,
                }
                for n, (start, length, distances) in courses.items()
                for place, d in enumerate(distances)
            ],
            "reach": [
                {
                    "model": "once",
                    "target": 20.0,
                    "train_flops": 9.375e11,
                    "of_monolith": 0.9375,
                    "how": "between points",
                }
            ],
        } | change
        found["tables"] = {
            name: {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
            for name, rows in tables.items()
            if rows
        }
        self.store.put_json("reports/compare.json", found)
        return self

    def diagnose(
        self, splits: tuple[str, ...] = ("heldout",), monolith: bool = True, **fields: Any
    ) -> "Builder":
        """Experts whose error on cluster j is 1 + |j - k|, a monolith at 2, a router that learns with t."""
        times, k = [0.25, 0.75, 1.0], self.k
        places = [(split, t) for split in splits for t in (*times, "mean")]
        clusters = ["all", *range(k)]
        models = {"own": 1.0, "selected": 1.5, "others": 3.0, "mixture": 1.25}
        models |= {"monolith": 2.0} if monolith else {}
        pairs = [
            ("selected", "own"),
            *([("selected", "monolith"), ("mixture", "monolith")] if monolith else []),
        ]
        wrong = {"t": "mean", "angle": None}
        tables = {
            "router": [
                {
                    "split": split,
                    "t": t,
                    "nll": 0.5 + t,
                    "accuracy": 0.9 - 0.5 * t,
                    "confidence": 0.95,
                    "ece": 0.05 + 0.5 * t,
                    "ece_chance": 0.03,
                    "temperature": 2.0,
                    "prior_nll": 1.3,
                    "prior_accuracy": 0.3,
                }
                for split, t in itertools.product(splits, times)
            ],
            "errors": [
                {"split": s, "t": t, "cluster": c, "model": m, "error": v, "se": 0.01}
                for (s, t), c, (m, v) in itertools.product(places, clusters, models.items())
            ],
            "differences": [
                {
                    "split": s,
                    "t": t,
                    "cluster": c,
                    "gap": f"{a}-{b}",
                    "difference": models[a] - models[b],
                    "se": 0.01,
                }
                for (s, t), c, (a, b) in itertools.product(places, clusters, pairs)
            ],
            "experts": [
                {
                    "split": s,
                    "t": t,
                    "cluster": c,
                    "expert": e,
                    "error": 1.5 if c == "all" else 1.0 + abs(c - e),
                }
                for (s, t), c, e in itertools.product(places, clusters, range(k))
            ],
            "missing": [
                {"split": s, "t": t, "cluster": c, "expert": e, "loss": 0.25 if c == e else -0.05}
                for (s, t), c, e in itertools.product(places, clusters, range(k))
            ],
            "disagreement": [
                {"split": s, "t": t, "cluster": "all", **(wrong if t == "mean" else {"angle": 20 + 10 * t})}
                for s, t in places
            ],
            "usage": [
                {"strategy": n, "expert": e, "size": 1 / k, "asked": 1 / k, "used": 1 / k}
                for n, e in itertools.product(("once", "top-1"), range(k))
            ],
            "switches": [
                {
                    "strategy": n,
                    "step": step,
                    "t": t,
                    "rate": 0.125 * (n == "top-1"),
                    "ever": 0.4 * (n == "top-1"),
                }
                for n, (step, t) in itertools.product(("once", "top-1"), (("all", None), (1, 0.5), (2, 0.25)))
            ],
            "landing": [
                {
                    "strategy": n,
                    "cluster": c,
                    "landed": 0.75,
                    "served": 0.5,
                    "others": 0.8,
                    "own": 0.4,
                    "heldout_others": 0.9,
                }
                for n, c in itertools.product(("once", "top-1"), clusters)
            ],
            "stability": [
                {
                    "strategy": n,
                    "samples": 100,
                    "sensitivity": 1.5,
                    "sensitivity_se": 0.1,
                    "refinement": 0.05,
                    "refinement_se": 0.002,
                }
                for n in ("once", "top-1", "monolith")
            ],
            "lipschitz": [
                {"strategy": n, "step": step, "t": t, "foreseen": 1.0 - t / 2}
                for n, (step, t) in itertools.product(("once", "top-1", "monolith"), ((0, 1.0), (1, 0.5)))
            ],
            "nearest": [
                {
                    "cluster": c,
                    "samples": 50,
                    "suspicious": 0.06,
                    "memorised": 0.04,
                    "memorised_heldout": 0.0,
                    "distance": 3.5,
                    "distance_heldout": 4.5,
                }
                for c in clusters
            ],
            "suspicious": [{"cluster": n % k, "ratio": 0.1 * n, "why": "ratio, distance"} for n in range(2)],
            "closest": [{"cluster": 0, "ratio": 0.1, "why": ""}],
        }
        pictures = []
        for n in range(2):
            keys = {name: f"reports/diagnostics/pairs/{n:02d}-{name}.png" for name in ("sample", "training")}
            for key in keys.values():
                self.store.put(key, png(self.side, n))
            pictures.append({**keys, "caption": PROMPTS[n]})
        content = {
            "schema": 1,
            "settings": {"splits": list(splits), "quantile": 0.01},
            "strategies": ["once", "top-1"],
            "missing": [],
            "copies": {"leaked": 0},
            "pictures": pictures,
            "closest": pictures[:1],
            "tables": {
                name: {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
                for name, rows in tables.items()
            },
        }
        self.store.put_json("reports/diagnostics.json", content | fields)
        return self

    def stages(self) -> "Builder":
        self.store.put_json("reports/stages.json", {"data ingest": 4.5, "partition": 1.25, "launch": 100.0})
        return self

    def whole(self) -> "Builder":
        """A finished quickstart."""
        return self.campaign().partition().train().compare().diagnose().stages()
