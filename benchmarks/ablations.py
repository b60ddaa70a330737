"""What the choices of a finished campaign are worth: variants of it, each with one choice changed.

    python benchmarks/ablations.py CAMPAIGN --to FOLDER [--only NAME ...] [--json PATH]
    python benchmarks/ablations.py CAMPAIGN --to FOLDER --variant NAME KEY=VALUE ... [--variant ...]
    python benchmarks/ablations.py --quick

A variant is a campaign in FOLDER on the same data, with the same settings but for its own. Where CAMPAIGN
has shared pretraining, the variant's experts start from that one and have what it left of the budget, so
that experts, router and pretraining cost what CAMPAIGN's do, and only experts and router are trained.
Distances are over CAMPAIGN's monolith, from the same conditions and the same noise. Variants stay in
FOLDER; the same command again does only what is missing. Without `--variant` they are the paper's: K, and
random clusters. As in the paper K experts share one batch, so all of them take the same number of steps. `K
= 1` is no ensemble but the control: one network that goes on from pretraining on all the data, in the
batches of CAMPAIGN's experts.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from harness import comparison_of, finish, median_row, row, run_command, tiny

from atoll.campaign.measured import Comparison
from atoll.measure.seeds import unlike

STRATEGIES = ["once", "top-1"]
OWN = ("same_features_as_partition", "akin_to_partition", "sweep", "curve")
"""What a variant may have been asked for otherwise: it decides no number here."""
Result = dict[str, Any]
"""What `compare.json` says."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("campaign", type=Path, nargs="?", help="launched and compared")
    parser.add_argument("--to", type=Path, help="folder of the variants' campaigns")
    parser.add_argument("--variant", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"), default=[])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these of the paper's variants")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--threads", type=int, default=0, help="of the comparisons; 0 for all cores")
    parser.add_argument("--quick", action="store_true", help="a tiny campaign of its own, and one variant")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    if options.quick == bool(options.campaign) or bool(options.campaign) != bool(options.to):
        parser.error("give CAMPAIGN and --to FOLDER, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            options.to, options.strategies = Path(scratch) / "variants", ["once"]
            options.campaign = tiny(
                Path(scratch), 0, "partition.k=2", "budget.pretrain=0.5", "train.threads=1"
            )
            options.variant = [["random clusters", "partition.method=random"]]
        measure(parser, options)


def measure(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    if not (options.campaign / "reports/compare.json").is_file():
        parser.error(f"{options.campaign} has not been compared: atoll compare {options.campaign}")
    base = json.loads((options.campaign / "reports/compare.json").read_text())
    if "reference_hash" not in base["metric"]:
        old = f"{options.campaign}/reports/compare.json"
        parser.error(f"{old} is of an earlier version: remove it, and compare again (points are kept)")
    settings = derived(options.campaign, options.strategies, base["metric"])
    variants = {name: sets for name, *sets in options.variant} or of_the_paper(settings)
    if unknown := set(options.only or ()) - set(variants):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(variants)}")
    found = {}
    for name in options.only or variants:
        folder = options.to / "-".join(re.findall(r"\w+", name))
        found[name] = run(folder, settings, variants[name], options.threads, comparison_of(options.campaign))
    notes = {"metric": base["metric"], "quick": options.quick}
    finish("ablations", table(base, found, options.strategies), options.json, notes)


def of_the_paper(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The settings that make the paper's variants of a campaign, by their names."""
    k, budget, batch = settings["partition"]["k"], settings["budget"], settings["train"]["batch"]
    own = budget["expert_batch"] or (batch // k if budget["compute"] == "equal" else batch)
    others = {
        f"K = {n}": [f"partition.k={n}", f"budget.expert_batch={max(1, own * k // n)}"]
        for n in (2, 4, 8, 16)
        if n != k
    }
    control = {f"K = 1 in batches of {own}": ["partition.k=1", f"budget.expert_batch={own}"]}
    return {**control, **others, "random clusters": ["partition.method=random"]}


def derived(campaign: Path, strategies: list[str], metric: Mapping[str, Any]) -> dict[str, Any]:
    """The campaign's settings for a variant: no monolith, no student, experts that go on from its seed."""
    settings: dict[str, Any] = json.loads((campaign / "campaign.json").read_text())["config"]
    settings["data"]["path"] = str((campaign / settings["data"]["path"]).resolve())
    settings |= {"monolith": False, "student": None, "launch": {}, "tracking": {}}
    names = {"samples": "samples", "steps": "steps", "guidance": "guidance"}
    names |= {"name": "extractor", "size": "extractor_size", "components": "components"}
    names |= {"fit_rows": "fit_rows"}
    settings["compare"] = {to: metric[name] for name, to in names.items()} | {"strategies": strategies}
    settings["compare"]["conditions"] = metric["conditions"].split()[1]  # "of heldout rows"
    budget, share = settings["budget"], settings["budget"]["pretrain"]
    if share:
        settings["network"]["init"] = str((campaign / "pretrain/expert").resolve())
        settings["router"]["share"] /= 1 - share
        budget |= {"pretrain": 0.0, "samples": round(budget["samples"] * (1 - share))}
    return settings


def run(folder: Path, settings: dict[str, Any], sets: list[str], threads: int, base: Comparison) -> Result:
    """Train and compare a variant, as far as that has not happened yet; what its comparison says."""
    if not (folder / "campaign.yaml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "campaign.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    changes = [part for one in sets for part in ("--set", one)]
    for stage in (["launch"], ["compare", "--set", f"compare.threads={threads}"]):
        run_command(stage[0], folder, *changes, *stage[1:])
    made = json.loads((folder / "campaign.json").read_text())["config"]
    found: Result = json.loads((folder / "reports/compare.json").read_text())
    if differs := [name for name in unlike(base, comparison_of(folder)) if name not in OWN]:
        raise SystemExit(
            f"{folder} was measured otherwise: {', '.join(differs)}; remove its reports/compare.json"
        )
    return found | {"from_seed": made["network"]["init"] == settings["network"]["init"] != "scratch"}


def table(base: Result, found: Mapping[str, Result], strategies: list[str]) -> list[dict[str, Any]]:
    """Distances of every variant, and over those of the campaign's monolith."""
    own = {line["name"]: line["distance"] for line in base["rows"]}
    lines = [row("monolith", "distance", own["monolith"])]
    for name in (name for name in strategies if name in own):
        lines += pair("the campaign itself", name, own[name], own["monolith"])
    costs = []
    for variant, result in found.items():
        for line in result["rows"]:
            lines += pair(variant, line["name"], line["distance"], own["monolith"])
        costs.append((cost(result) + result["from_seed"] * base["train_flops"]["pretrain"]) / cost(base))
    lines.append(median_row("all variants", "training FLOPs / the campaign's", costs))
    return lines


def pair(case: str, strategy: str, distance: float, over: float) -> list[dict[str, Any]]:
    """A distance and its ratio to the monolith's."""
    case = f"{case}, {strategy}"
    return [row(case, "distance", distance), row(case, "distance / monolith", distance / over)]


def cost(result: Result) -> float:
    """Training operations of experts and router, and of the campaign's own shared pretraining."""
    return float(sum(result["train_flops"][name] for name in ("experts", "router", "pretrain")))


if __name__ == "__main__":
    main()
