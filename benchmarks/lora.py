"""Experts as low-rank changes of one network (LoRA) against whole experts: distance, bytes, memory, time.

    python benchmarks/lora.py FOLDER [--ranks 2 8 32 64] [--rates 1 4] [--jobs 8] [--to SCRATCH]
    python benchmarks/lora.py --quick

FOLDER holds the parquet files of `examples/emoji/prepare.py`, or some of them: each is a style, and the
cluster of an expert. Images are conditioned on their category. All experts start from one shared pretraining
and have equal training FLOPs, so changes take more steps than whole experts. Every rank is trained at several
multiples of the whole experts' learning rate. Then the changes of the whole experts are cut to the same ranks
by their singular values, as `atoll export --lora` does: at one rank, both have the same bytes. Variants train
side by side, `--jobs` at a time; times are measured after them, alone. With `--to` a benchmark that was cut
off goes on. `--quick` draws its own images, and its distances mean nothing.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from emoji import SETTINGS, options_of, partitioned, side_by_side, words_of
from harness import Row, comparison_of, finish, median_row, moment, paired, ratios, row, run_command

from atoll.base.condition import Condition
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import initial_network
from atoll.campaign.roles import SINGLE
from atoll.campaign.runs import RunPlan, experts_of
from atoll.campaign.settings.launch import merged
from atoll.export.lora import low_rank
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.model import Model
from atoll.model.residency import ResidentExperts
from atoll.networks.families import family
from atoll.networks.lora import DOWN, UP, trainable
from atoll.networks.settings import NetworkConfig
from atoll.store.store import Store

ROUTING, WHOLE = SETTINGS["sampling"]["routing"], "whole"
CHANGES = {"train": {"threads": 1}, "budget": {"pretrain": 0.5}, "compare": {"steps": 20, "shown": 4}}


def main() -> None:
    """Train the variants side by side, measure each, and then time them."""
    words = words_of(__doc__, "drawn images, two ranks, a few steps", "variants")
    words.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    words.add_argument("--rates", type=float, nargs="+", default=[1.0, 4.0], help="over whole experts' rate")
    words.add_argument("--device", help="cpu or cuda, for the times; by default the GPU, if there is one")
    words.add_argument("--to", type=Path, metavar="FOLDER", help="keeps campaigns, to go on")
    options = options_of(words, work)
    if options.quick:
        options.ranks, options.rates = options.ranks[:2], options.rates[:1]
        options.jobs, options.samples = 2, 1600
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        lines, notes = measured(options.to or Path(scratch), options, device)
    finish("lora", lines, options, notes)


def measured(folder: Path, options: Any, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the result, and what they were measured with."""
    few = {"samples": 60, "fit_rows": 100, "steps": 4} if options.quick else {}
    changes = merged(CHANGES, {"budget": {"samples": options.samples}, "compare": few})
    base, settings = partitioned(folder, options.folder, changes)
    whole = folder / WHOLE
    variants: dict[str, dict[str, Any]] = {WHOLE: {}}
    for rank, rate in product(options.ranks, options.rates):
        variants[f"rank {rank}, lr x {rate:g}"] = {"rank": rank, "rate": rate}
    with ThreadPoolExecutor(options.jobs) as pool:
        each = partial(side_by_side, __file__, pool)
        # What all variants share: shared pretraining, router; the single network trains beside them.
        train = {"step": "train", "folder": str(base)}
        each([{**train, "role": role} for role in ("pretrain", "router")])
        make = {"step": "variant", "base": str(base)}
        calls = [{**make, "folder": str(folder / name), **how} for name, how in variants.items()]
        found = dict(zip(variants, each([*calls, {**train, "role": "monolith"}]), strict=False))
        make = {"step": "cut", "base": str(whole)}
        calls = [{**make, "folder": str(folder / f"cut to {n}"), "rank": n} for n in options.ranks]
        *cuts, single = each([*calls, {"step": "single", "folder": str(whole), "base": str(base)}])
        found |= dict(zip((f"{WHOLE}, cut to rank {n}" for n in options.ranks), cuts, strict=True))
    lines = [row(name, "distance", value) for name, value in single["single"].items()]
    for name, result in found.items():
        lines.append(row(name, "distance", result["distance"]))
        lines.append(row(name, "distance / whole experts'", result["distance"] / found[WHOLE]["distance"]))
        lines.append(row(name, "bytes of an expert", result["bytes"], "B"))
        if kept := result["kept"]:
            share = statistics.mean(kept)
            lines.append(row(name, "share of the change's norm", share, spread=(min(kept), max(kept))))
        else:
            lines.append(row(name, "steps of an expert", result["steps"]))
    timed = [name for name, how in variants.items() if how.get("rate", options.rates[0]) == options.rates[0]]
    lines += times(folder, timed, device)
    metric = comparison_of(whole).metric
    return lines, {"metric": metric, "device": str(device), "settings": {**settings, "data": {}}}


# Processes of their own.


def work(step: str, folder: str, **how: Any) -> Any:
    """What a child does: train a run, or make a variant and measure it."""
    if step == "train":
        return run_command("train", how["role"], folder, alone=False)
    if step == "single":
        copied(Path(folder), Path(how["base"]), "monolith")
    else:
        make = variant if step == "variant" else cut
        make(Path(folder), Path(how["base"]), how.get("rank"), how.get("rate"))
        run_command("assemble", folder, alone=False)
    run_command("compare", folder, alone=False)
    comparison, campaign = comparison_of(Path(folder)), Campaign.open(folder)
    parts = [Checkpoint(campaign.store, run.network) for run in experts_of(campaign.config.partition.k)]
    distances = {line.name: line.distance for line in comparison.rows}
    return {
        "distance": distances[ROUTING],
        "single": {name: value for name, value in distances.items() if name in SINGLE},
        "bytes": statistics.mean(
            part.card.provenance.get("bytes") or (Path(folder) / part.prefix / WEIGHTS).stat().st_size
            for part in parts
        ),
        "steps": statistics.mean(part.card.samples / part.card.batch for part in parts),
        "kept": [part.card.provenance["kept"] for part in parts if "kept" in part.card.provenance],
    }


def variant(folder: Path, base: Path, rank: int | None, rate: float | None) -> None:
    """Train experts from the shared pretraining that lies in the base: changes of a rank, or whole ones."""
    settings = yaml.safe_load((base / "campaign.yaml").read_text())
    if rank is not None:
        settings["network"]["lora"] = {"rank": rank}
    if rank is not None and rate is not None:
        # The rate of experts alone: pretraining's and the router's are the base's.
        own_rate = {"train": {"lr": rate * settings["train"]["lr"]}}
        settings["islands"] = dict.fromkeys(range(settings["partition"]["k"]), own_rate)
    folder.mkdir(exist_ok=True)
    (folder / "campaign.yaml").write_text(yaml.safe_dump(settings))
    run_command("partition", folder, alone=False)
    copied(folder, base, "pretrain", "router")
    run_command("train", "pretrain", folder, alone=False)  # hands its weights over
    for run in experts_of(settings["partition"]["k"]):
        run_command("train", "expert", folder, "--expert", str(run.expert), alone=False)


def copied(folder: Path, base: Path, *runs: str) -> None:
    """Take runs over that are alike in both campaigns."""
    for run, part in product(runs, ("run", "expert")):
        shutil.copytree(base / run / part, folder / run / part, dirs_exist_ok=True)


def cut(folder: Path, base: Path, rank: int, _: None) -> None:
    """The campaign of whole experts, each the shared network plus its own change cut to a rank."""
    if folder.exists():
        return
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(base, unfinished, ignore=shutil.ignore_patterns("reports", "ensemble", "checkpoints"))
    store, campaign = Store.open(unfinished), Campaign.open(unfinished)
    for run in experts_of(campaign.config.partition.k):
        part = Checkpoint(store, run.network)
        (matrices, kept, _), card, plan = low_rank(part, rank), part.card, RunPlan.read(store, run.plan)
        weights = dict(part.beside(card.provenance["initial_weights"]))
        for layer in {name.rpartition(".lora_")[0] for name in matrices}:
            up, down = (matrices[f"{layer}.{matrix}.weight"] for matrix in (UP, DOWN))
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + up @ down
        network = initial_network(campaign.config.network, plan.shape, SETTINGS["seed"])
        network.load_state_dict(weights)
        for gone in ("run", "expert"):  # its log names the whole expert
            shutil.rmtree(unfinished / run.folder / gone)
        size = sum(tensor.nbytes for tensor in matrices.values())
        provenance = {**card.provenance, "kept": kept, "bytes": size}
        part.write(network, weights, card.model_copy(update={"provenance": provenance}))
    unfinished.rename(folder)


# Times and memory.


def times(folder: Path, names: Sequence[str], device: torch.device) -> Iterator[Row]:
    """Training steps over the whole experts', sampling over a single network, and memory of the weights."""
    configs = {name: Campaign.open(folder / name).config for name in names}
    plan = RunPlan.read(Store.open(folder / WHOLE), "islands/0/island.json")
    whole = step_of(configs[WHOLE].network, plan, device)
    for name in names:
        if name != WHOLE:
            own_step, theirs = paired([step_of(configs[name].network, plan, device), whole], 9)
            yield median_row(name, "training step / whole experts'", ratios(own_step[2:], theirs[2:]))
    single = Model.load(folder / WHOLE, "pretrain", device=device)
    labels = [n % max(1, plan.shape.classes) for n in range(configs[WHOLE].compare.samples // 16)]
    for name in names:
        model = Model.load(folder / name, device=device)
        sides = [partial(each, labels, steps=configs[WHOLE].compare.steps) for each in (model, single)]
        ensemble, alone = paired(sides, 5)
        yield median_row(name, "sampling / single network", ratios(ensemble[2:], alone[2:]))
        yield row(name, "weights in memory", weights_in_memory(model), "B")


def weights_in_memory(model: Model) -> int:
    """Bytes of experts on the device, with what they share; the router and the guide not counted."""
    experts: Any = model.bank.experts
    if isinstance(experts, ResidentExperts):
        networks = [module.network for module in experts._modules.values()]
        shared = [p for network in networks for p in network.parameters()]
        slots = {slot.block.untyped_storage().data_ptr() for slot in experts._slots}
        base = sum(p.nbytes for p in shared if p.untyped_storage().data_ptr() not in slots)
        return base + experts.device_bytes
    return sum(p.nbytes for expert in experts for p in expert.network.parameters())


def step_of(config: NetworkConfig, plan: RunPlan, device: torch.device) -> Any:
    """One step of training on a batch that lies ready: forward, backward, AdamW."""
    network = initial_network(config, plan.shape, SETTINGS["seed"]).to(device).train()
    parameters, adapter = list(trainable(network).values()), family(config.family)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    shape = (plan.batch, plan.shape.channels, *plan.shape.usual)
    x, t = torch.randn(shape, device=device), torch.rand(plan.batch, device=device)
    labels = torch.zeros(plan.batch, dtype=torch.long, device=device) if plan.shape.classes else None

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = adapter.predict(network, x, t, Condition(labels=labels)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    moment()
    return step


if __name__ == "__main__":
    main()
