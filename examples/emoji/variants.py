"""Campaigns that differ in one choice, each held against the others: of K and clusters, and of objectives."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from harness import (
    TINY,
    Row,
    asked,
    comparison_of,
    finish,
    flags,
    median_row,
    ratio_interval,
    ratios,
    row,
    run_command,
    tiny,
    train,
)

from atoll.campaign.folder import Campaign
from atoll.campaign.measured import Comparison
from atoll.measure.seeds import unlike

SMALL = ("budget.samples=1280", "network.depth=1", "partition.k=2", "train.batch=16", "router.train.batch=16")
"""Of tiny campaigns, beside `TINY`."""
OWN = ("same_features_as_partition", "akin_to_partition", "sweep", "curve")
"""What a variant may have been asked for otherwise: it decides no number here."""
METRIC = {"name": "extractor", "size": "extractor_size"} | {
    name: name for name in ("samples", "steps", "guidance", "components", "fit_rows")
}
"""What a comparison says of its metric, and the setting of it."""


def ablations(options: argparse.Namespace, scratch: Path) -> None:
    """Train and compare what is missing of the variants, and hold them against the campaign."""
    if options.quick:
        options.to, options.strategies = scratch / "variants", ["once"]
        options.campaign = tiny(scratch, 0, *SMALL, "budget.pretrain=0.5", "train.threads=1")
        options.variant = [["random clusters", "partition.method=random"]]
    if not options.campaign or not options.to:
        options.error("give CAMPAIGN and --to FOLDER, or --quick")
    base = comparison_of(options.campaign)
    if "reference_hash" not in base.metric:
        old = f"{options.campaign}/reports/compare.json"
        options.error(f"{old} is of an earlier version: remove it, and compare again (points are kept)")
    settings = derived(options.campaign, options.strategies, base.metric)
    every = {name: sets for name, *sets in options.variant} or of_the_paper(settings)
    chosen = {name: sets for name, sets in every.items() if asked(options, name)}
    if not chosen:
        options.error(f"no variant {', '.join(options.only)}; there are {', '.join(every)}")
    rows, costs = [row("monolith", "distance", distances(base)["monolith"])], []

    def add(case: str, of: Comparison) -> None:
        for strategy in (name for name in options.strategies if name in distances(of)):
            distance, case_of = distances(of)[strategy], f"{case}, {strategy}"
            rows.append(row(case_of, "distance", distance))
            rows.append(row(case_of, "distance / monolith", distance / distances(base)["monolith"]))

    add("the campaign itself", base)
    for name, sets in chosen.items():
        folder = options.to / "-".join(re.findall(r"\w+", name))
        if not (folder / "campaign.yaml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "campaign.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        if options.quick:
            train(folder, sets=sets, alone=False)
        else:
            run_command("launch", folder, *flags(sets))  # several processes at once, where there are cores
        run_command("compare", folder, "--set", f"compare.threads={options.threads}", alone=not options.quick)
        found = comparison_of(folder)
        if differs := [setting for setting in unlike(base, found) if setting not in OWN]:
            other = f"{folder} was measured otherwise: {', '.join(differs)}"
            raise SystemExit(f"{other}; remove its reports/compare.json")
        add(name, found)
        init = Campaign.open(folder).config.network.init
        shared = base.train_flops["pretrain"] if init == settings["network"]["init"] != "scratch" else 0
        costs.append((cost(found.train_flops) + shared) / cost(base.train_flops))
    rows.append(median_row("all variants", "training FLOPs / the campaign's", costs))
    finish("ablations", rows, options, {"metric": base.metric})


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
    compare = {setting: metric[name] for name, setting in METRIC.items()}
    conditions = metric["conditions"].split()[1]  # "of heldout rows"
    settings["compare"] = {**compare, "strategies": strategies, "conditions": conditions}
    budget, share = settings["budget"], settings["budget"]["pretrain"]
    if share:
        settings["network"]["init"] = str((campaign / "pretrain/expert").resolve())
        settings["router"]["share"] /= 1 - share
        budget |= {"pretrain": 0.0, "samples": round(budget["samples"] * (1 - share))}
    return settings


def distances(found: Comparison) -> dict[str, float]:
    """Of all models."""
    return {line.name: line.distance for line in found.rows if line.distance is not None}


def cost(train_flops: Mapping[str, float]) -> float:
    """Training operations of experts and router, and of the campaign's own shared pretraining."""
    return float(sum(train_flops.get(name, 0) for name in ("experts", "router", "pretrain")))


# Mixed ensembles.

NOISE = "{objective: {schedule: vp-cosine, prediction: eps}}"
MIXED = f"islands={{1: {NOISE}, 3: {NOISE}}}"
PAIR = ("monolith=false", "budget.samples=150000", "compare.strategies=[once, top-1, full]")


def mixed(options: argparse.Namespace, scratch: Path) -> None:
    """Pairs of campaigns that differ in what half of the experts learn."""
    root, pairs = options.campaigns or scratch, []
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    for seed in seeds:
        pair, sets = [], [*PAIR, *(TINY if options.quick else ()), f"seed={seed}"]
        flow = root / f"flow-{seed}"
        shared = (MIXED, f"data.path={(flow / 'data').absolute()}")
        for folder, own in ((flow, ()), (root / f"mixed-{seed}", shared)):
            run_command("quickstart", "--dir", folder, *flags((*sets, *own)), alone=not options.quick)
            pair.append(json.loads((folder / "reports/summary.json").read_text()))
        if pair[0]["partition"] != pair[1]["partition"]:
            raise SystemExit(f"the campaigns of seed {seed} below {root} have different partitions")
        pairs.append(pair)
    finish("mixed", mixed_rows(pairs), options, {"metric": pairs[0][0]["metric"], "seeds": seeds})


def mixed_rows(pairs: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """Costs, distances and their ratios, from what the reports of both campaigns of a seed sum up."""
    costs = [abs(cost(mixed["train_flops"]) / cost(flow["train_flops"]) - 1) for flow, mixed in pairs]
    rows = [median_row("training", "|FLOPs mixed / flow - 1|", costs, target=("<=", 0.01))]
    for name in pairs[0][0]["distance"]:
        flow, mixed = ([pair[number]["distance"][name] for pair in pairs] for number in (0, 1))
        pairwise = ratios(mixed, flow)
        rows.append(median_row(name, "distance, mixed / flow", pairwise))
        if len(pairwise) > 1:
            mean, spread = ratio_interval(pairwise)
            rows.append(row(name, "the same, mean and 95 % interval", mean, spread=spread))
        rows.append(median_row(f"{name}, flow", "distance", flow))
        rows.append(median_row(f"{name}, mixed", "distance", mixed))
    return rows
