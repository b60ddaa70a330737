"""The benchmarks measure what they say; how fast anything is depends on the machine and is no test."""

import argparse
import importlib
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor

from atoll.base.condition import Condition
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import BestRow, Comparison, ComparisonTables, PairRow, ReachRow
from atoll.campaign.settings.train import TrainConfig
from atoll.model.bank import Bank
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.sampler import Row
from atoll.networks.settings import NetworkConfig
from atoll.store.store import Store
from helpers import ROOT, assembled, write_campaign

pytestmark = pytest.mark.slow
SCRIPTS = ("benchmarks", "examples/emoji")
TINY = {"depth": 1, "heads": 1, "head_width": 8, "latents": 4, "batch": 2, "pairs": 2, "threads": 1}
Bench = Callable[[str], Any]
Lines = dict[tuple[str, str], Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Imports a file of benchmarks/ or examples/emoji/ by name."""
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(str(ROOT / folder))
        for path in (ROOT / folder).glob("*.py"):
            monkeypatch.delitem(sys.modules, path.stem, raising=False)  # tests/curate is a `curate` too
    yield importlib.import_module
    for path in (path for folder in SCRIPTS for path in (ROOT / folder).glob("*.py")):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def call(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Lines]:
    """Calls a program as a user does; the rows of its JSON by case and metric."""

    def run(script: str, *words: str | Path) -> Lines:
        path = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words), "--json", str(path)])
        bench(script).main()
        return by_name(json.loads(path.read_text())["rows"])

    return run


def by_name(rows: list[dict[str, Any]]) -> Lines:
    return {(line["case"], line["metric"]): line for line in rows}


# Commands, and what they write.


def commands() -> list[list[str]]:
    """Every command of a benchmark in the docs, in docstrings and in results."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages += [*(path for folder in SCRIPTS for path in (ROOT / folder).glob("*.py"))]
    texts = [page.read_text().replace("\\\\\n", " ").replace("\\\n", " ") for page in pages]
    results = (json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json"))
    texts += [f"`{part}`" for one in results for part in one.get("command", "").split("; ")]
    program = r"python ((?:benchmarks|examples/emoji)/\w+\.py[^`#|\n;]*)"
    spans = [re.sub(r"\s+", " ", span) for text in texts for span in re.findall(r"`(python [^`]+)`", text)]
    lines = [re.sub(r"[\[\]]", "", found) for text in (*texts, *spans) for found in re.findall(program, text)]
    known = {
        line: shlex.split(line) if line.count('"') % 2 == line.count("'") % 2 == 0 else line.split()
        for line in lines
    }
    return list(known.values())


def test_every_command_of_a_benchmark_is_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file, its case and its options are there."""
    helps: dict[tuple[str, ...], str] = {}
    assert len(commands()) > 50
    for script, *words in commands():
        name = Path(script).stem
        if name.endswith("_peers") or name == "prepare":
            continue
        case = tuple(words[:1]) if name in ("curate", "experiment") else ()
        for one in case[0].split("|") if case else [""]:
            if (name, one) not in helps:
                monkeypatch.setattr(sys, "argv", [script, *filter(None, [one]), "--help"])
                with pytest.raises(SystemExit) as ended:
                    bench(name).main()
                assert ended.value.code == 0, (script, words)
                helps[name, one] = capsys.readouterr().out
            for option in (word.split("=")[0] for word in words if word.startswith("--")):
                assert re.search(rf"{option}\b", helps[name, one]), (script, words, option)


def test_a_result_names_its_command_and_no_folder_of_the_machine(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = bench("harness")
    script = Path(harness.__file__).with_name("evaluate.py")
    monkeypatch.setattr(sys, "argv", [str(script), "K = 1", "--json", str(tmp_path / "found.json")])
    assert harness.command() == "python benchmarks/evaluate.py 'K = 1' --json found.json"


@pytest.mark.parametrize(
    ("words", "replaced"),
    [
        ((), True),
        (("--only", "single"), False),
        (("--only", "single", "--json", "OWN"), False),
        (("--quick",), False),
    ],
)
def test_a_part_or_a_quick_look_never_replaces_a_committed_result(
    words: tuple[str, ...], replaced: bool, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, own, committed = bench("harness"), tmp_path / "own.json", tmp_path / "headline.json"
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    committed.write_text("committed")
    monkeypatch.setattr(sys, "argv", ["x.py", *(str(own) if word == "OWN" else word for word in words)])
    options = harness.parsed(harness.parser("A benchmark.", "small", only="cases"))
    assert harness.asked(options, "single, batch 8") and harness.asked(options, "islands") is not options.only
    harness.finish("headline", [harness.row("a", "b", 1.0)], options)
    assert (committed.read_text() != "committed") is replaced and own.exists() is ("OWN" in words)


def test_the_experiment_measures_a_part_without_replacing_the_headline(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench("harness"), "RESULTS", tmp_path)
    argv = ["experiment.py", "measure", "--to", str(tmp_path), "--only", "232,791 images"]
    monkeypatch.setattr(sys, "argv", argv)
    bench("experiment").main()
    said = capsys.readouterr().out
    assert said.count("not trained yet") == 1 and "not written: give --json PATH" in said
    assert list(tmp_path.iterdir()) == []


# Campaigns side by side.


def compared(rows: dict[str, float], **more: Any) -> Comparison:
    named = [{"name": name, "distance": distance} for name, distance in rows.items()]
    beside = {"metric": {}, "prompts": [], "clusters": [], "routing": {}}
    return Comparison.parse({"rows": named, **beside, **more}, "here")


def test_campaigns_are_held_against_their_own_monolith(bench: Bench) -> None:
    """Also in what all of them measured beyond the table."""

    def tables(guidance: float, ratio: float, mean: float, share: float | None, how: str) -> ComparisonTables:
        best = BestRow.model_construct(model="once", guidance=guidance, ratio=ratio)
        base = BestRow.model_construct(model="monolith", guidance=3.0, ratio=None)
        pair = PairRow.model_construct(strategy="once", space="pixels", partner="same noise", mean=mean)
        reach = ReachRow.model_construct(model="once", of_monolith=share, how=how)
        return ComparisonTables.model_construct(best=(base, best), reach=(reach,), pairs=(pair,))

    spent = {"monolith": 100.0, "experts": 90.0, "router": 4.0, "pretrain": 5.0}
    found = [
        compared({"monolith": m, "once": d}, train_flops=spent).model_copy(update={"tables": tables(*values)})
        for m, d, *values in (
            (10.0, 8.0, 2.0, 0.8, 0.5, 0.4, "between points"),
            (20.0, 19.0, 3.0, 0.7, 0.7, None, "never"),
            (40.0, 40.0, 2.0, 0.9, 0.6, 0.5, "at the first point"),
        )
    ]
    lines = by_name(bench("campaigns").table(found, "monolith"))
    ratio = lines["once", "distance / monolith"]
    assert (ratio["value"], ratio["spread"]) == (0.95, [0.8, 1.0])
    apart = lines["once", "distance - monolith, 95 %"]
    half = 4.302653 / 3**0.5  # Student's t of two degrees of freedom; the differences' deviation is 1
    assert apart["value"] == -1.0 and apart["spread"] == pytest.approx([-1 - half, -1 + half], abs=1e-5)
    assert lines["ensemble", "training FLOPs / monolith"]["value"] == 0.99
    assert lines["once", "distance"]["spread"] == [8.0, 40.0]
    assert lines["once", "distance / monolith, each at its best"]["value"] == 0.8
    assert lines["once", "best guidance"]["spread"] == [2.0, 3.0]
    assert lines["once, pixels, same noise", "correlation with the monolith's pictures"]["value"] == 0.6
    (reach,) = (line for line in lines.values() if "final distance" in line["metric"])
    assert reach["metric"].endswith("at most, in 2 of 3") and reach["value"] == pytest.approx(0.45)
    assert len(lines) == 10, "the monolith has a best guidance and no ratio"
    over = by_name(bench("campaigns").table(found, "once"))
    assert ("monolith", "distance / once") in over and ("once", "distance / monolith") not in over


def test_the_distillation_benchmark_pairs_by_campaign(bench: Bench, tmp_path: Path) -> None:
    """Three campaigns whose levels differ far more than student and monolith do within each."""
    distill, spent = bench("distill"), {"monolith": 3.0, "student": 1.0}
    found = [
        compared({"monolith": a, "student": a + more, "once": a - 1}, default="once", train_flops=spent)
        for a, more in [(5.0, 0.1), (9.0, 0.2), (2.0, 0.3)]
    ]
    lines = by_name(distill.table(found, found))
    made = lines["student", "distance - monolith's"]
    half = 4.302653 * 0.1 / 3**0.5
    assert made["value"] == pytest.approx(0.2) and made["spread"] == pytest.approx([0.2 - half, 0.2 + half])
    assert lines["student", "lower end of the difference"]["met"] is True
    assert lines["student", "FLOPs / monolith's"]["value"] == pytest.approx(1 / 3)
    assert lines["ensemble", "distance - monolith's"]["spread"] == pytest.approx([-1.0, -1.0])
    assert lines["student", "distance - monolith at a third's"]["value"] == pytest.approx(0.2)
    with pytest.raises(SystemExit, match="has not been compared"):
        bench("harness").comparison_of(tmp_path)


def test_mixed_pairs_are_compared_seed_by_seed(bench: Bench) -> None:
    def pair(flow: float, mixed: float, experts: float = 100.0) -> list[dict[str, Any]]:
        return [
            {"distance": {"once": distance}, "train_flops": {"experts": spent, "router": 4.0}}
            for distance, spent in ((flow, 100.0), (mixed, experts))
        ]

    mixed_rows = bench("variants").mixed_rows
    cost, ratio, interval = mixed_rows([pair(2.0, 1.0), pair(8.0, 8.0), pair(1.0, 2.0)])[:3]
    assert cost["value"] == 0 and cost["met"]
    assert ratio["value"] == 1.0 and ratio["spread"] == [0.5, 2.0]
    assert interval["value"] == pytest.approx(1.0)
    assert interval["spread"][1] == pytest.approx(2 ** (student.ppf(0.975, 2) / 3**0.5), rel=1e-3)
    assert not mixed_rows([pair(1.0, 1.0, experts=110.0)])[0]["met"]


# The emoji experiment.


@pytest.mark.parametrize(
    ("budget", "batches"),
    [
        ({"compute": "proportional", "expert_batch": 16}, [16, 64, 32, 8]),
        ({"compute": "proportional", "expert_batch": None}, [64, 256, 128, 32]),
        ({"compute": "equal", "expert_batch": None}, [8, 32, 16, 4]),
    ],
)
def test_experts_of_the_papers_variants_share_one_batch(
    bench: Bench, budget: dict[str, Any], batches: list[int]
) -> None:
    settings = {"partition": {"k": 8}, "train": {"batch": 64}, "budget": budget}
    control, *others = list(bench("variants").of_the_paper(settings).values())[:4]
    assert control == ["partition.k=1", f"budget.expert_batch={batches[0]}"]
    for sets, k, batch in zip(others, (2, 4, 16), batches[1:], strict=True):
        assert sets == [f"partition.k={k}", f"budget.expert_batch={batch}"]


def test_variants_of_a_campaign_cost_what_it_costs(
    bench: Bench,
    call: Callable[..., Lines],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trained within this process, on letters of 8 px that pixels judge."""
    variants, harness, base = bench("variants"), bench("harness"), tmp_path / "base"

    def here(command: str, folder: Path, *words: str, **how: Any) -> None:
        if command == "launch":
            harness.train(folder, sets=words[1::2], alone=False)
        else:
            harness.run_command(command, folder, *words, alone=False)

    monkeypatch.setattr(variants, "run_command", here)
    compare = {"strategies": ["once"], "extractor": "pixels", "extractor_size": 16, "samples": 24, "steps": 2}
    train = {"threads": 1, "validations": 0, "previews": 0}
    settings = {"budget": {"samples": 1280, "pretrain": 0.5}, "compare": compare, "train": train}
    here("launch", write_campaign(base, settings))
    here("compare", base)
    words = ("ablations", base, "--to", tmp_path / "to", "--strategies", "once")
    rows = call("experiment", *words, "--variant", "three", "partition.k=3")
    assert rows["all variants", "training FLOPs / the campaign's"]["value"] == pytest.approx(1, abs=0.03)
    told = harness.comparison_of(base)
    assert rows["monolith", "distance"]["value"] == told.rows[0].distance
    assert rows["the campaign itself, once", "distance"]["value"] == told.rows[-1].distance
    assert rows["three, once", "distance / monolith"]["value"] > 0
    made = json.loads((tmp_path / "to/three/campaign.json").read_text())["config"]
    assert made["partition"]["k"] == 3 and made["network"]["init"] == str(base / "pretrain/expert")
    with pytest.raises(SystemExit):
        call("experiment", *words, "--only", "K = 3")
    assert "no variant K = 3; there are K = 1 in batches of 16, K = 4, K = 8" in capsys.readouterr().err


def test_the_headline_is_over_the_best_single_network_of_equal_cost(bench: Bench, tmp_path: Path) -> None:
    experiment, entries = bench("experiment"), bench("entries").ENTRIES
    told = next(entry.name for entry in entries if entry.told)

    def points(flops: float, heldout: float, *test: float) -> dict[int, Any]:
        return {
            seed: {"flops": flops, "all": {"2": heldout, "3": 99.0}, "test": {"Lite2": value, "recall": 0.5}}
            for seed, value in enumerate(test)
        }

    found = {
        "tuned": {"monolith": points(100.0, 5.0, 10.0, 20.0)},
        "plain": {"monolith": points(100.1, 6.0, 8.0, 9.0)},  # better on test pictures, which do not choose
        told: {"monolith": points(100.0, 1.0, 4.0, 8.0)},  # it knows more than the others
        "untested": {"monolith": {seed: {"flops": 100.0, "all": {"2": 1.0}, "test": {}} for seed in (0, 1)}},
        "longer": {"monolith": points(200.0, 1.0, 2.0, 2.0)},
        "islands": {"top-1": points(100.0, 4.0, 5.0, 10.0)},
    }
    options = argparse.Namespace(json=tmp_path / "headline.json", quick=False)

    def report(*floor: dict[str, float]) -> list[dict[str, Any]]:
        experiment.report(found, options, *floor)
        return json.loads(options.json.read_text())["rows"]

    rows = report()
    ratios = {line["case"]: line["value"] for line in rows if line["metric"].startswith("Lite2, over tuned")}
    assert ratios.pop(f"{told}: monolith") == pytest.approx(0.4)
    assert ratios == {"islands: top-1": 0.5, "plain: monolith": pytest.approx((0.8 * 0.45) ** 0.5)}
    assert not any("recall, over" in line["metric"] for line in rows)
    # Three ratios, each with an unpaired interval beside it: nothing costs as much as the longer one, and the
    # best is compared with nobody.
    assert len(rows) == 5 * 3 + 1 + 2 * 3
    excess = {line["case"]: line["value"] for line in report({"Lite2": 2.0}) if "excess" in line["metric"]}
    assert excess["islands: top-1"] == pytest.approx((3 / 8 * 8 / 18) ** 0.5)
    assert len({entry.folder(tmp_path, 3) for entry in entries}) == len(entries)
    # Beside the best of all stands the best of the same learning rate.
    kinds = (True, "0.001"), (True, "0.004"), (False, "0.004")
    slow, quick, islands = (next(e.name for e in entries if (e.single, e.rate) == kind) for kind in kinds)
    found = {
        slow: {"monolith": points(100.0, 5.0, 10.0, 20.0)},
        quick: {"monolith": points(100.0, 6.0, 20.0, 30.0)},
        islands: {"top-1": points(100.0, 4.0, 5.0, 10.0)},
    }
    over = {line["metric"]: line["value"] for line in report() if line["case"] == f"{islands}: top-1"}
    assert over[f"Lite2, over {slow}, 95 %"] == pytest.approx(0.5)
    assert over[f"Lite2, over {quick}, 95 %"] == pytest.approx((5 / 20 * 10 / 30) ** 0.5)


@pytest.mark.parametrize(
    ("way", "routing", "guidance"),
    [
        ({"null": "own", "caption": 2.5}, "top-1", 2.5),
        ({"null": "mixture", "caption": 2.5}, "top-1 null sample-1", 2.5),
        ({"null": "mixture", "caption": 2.5, "cluster": 2.5, "routing": "once"}, "once null sample-1", 2.5),
        ({"null": "mixture", "caption": 1.0, "cluster": 1.0}, "top-1", 1.0),
        ({"null": "own", "caption": 4.0, "interval": (2.0, 3.0)}, "top-1", 1.0),
    ],
)
def test_ways_of_guiding_are_the_routings_where_there_is_one(
    bench: Bench, small_ensemble: Path, way: dict[str, Any], routing: str, guidance: float
) -> None:
    guides, model = bench("guides"), Model.load(Store.open(small_ensemble))
    plain, found = Generation(routing=routing, guidance=guidance, steps=3, seed=5), guides.Way(**way)
    guided = plain.with_(routing=found.routing, guidance=max(2.0, found.caption))
    sampler = partial(guides.GuidedSampler, found, ())
    assert torch.allclose(latents(model, plain), latents(model, guided, sampler=sampler), atol=1e-5)


def test_experts_that_are_guided_by_what_they_are_have_their_own_null_branch(
    bench: Bench, small_ensemble: Path
) -> None:
    model, plain = Model.load(Store.open(small_ensemble)), Generation(guidance=2.5, steps=3, seed=5)
    experts, kind = model.bank.experts, bench("guides").GuidedByThemselves
    guided, other = (kind(model, way) for way in (experts, experts[::-1]))
    assert torch.allclose(latents(model, plain), latents(guided, plain), atol=1e-5)
    assert not torch.allclose(latents(model, plain), latents(other, plain), atol=1e-5)


def latents(model: Model, generation: Generation, **how: Any) -> Tensor:
    """Of four samples, in order."""
    parts = list(model.generate(model.conditions(["0", "1", "1", "0"]), generation, **how))
    order = torch.tensor([row for part in parts for row in part.rows]).argsort()
    return torch.cat([part.latents for part in parts])[order]


def test_heun_is_nearer_than_euler(bench: Bench) -> None:
    guides = bench("guides")

    class Growing:
        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return x_t

    rows, nothing = Row.each(Generation(steps=10, guidance=1.0), [0]), Condition()
    way, start = guides.Way(steps=10, heun=True, caption=1.0), torch.ones(1, 1, 1, 1)
    found = guides.GuidedSampler(way, (), Bank([Growing()]), nothing, nothing, rows, start).run()
    assert abs(float(found) - math.exp(-1)) < 0.002 < math.exp(-1) - 0.9**10


def test_the_average_of_networks_has_the_average_of_their_weights(bench: Bench, small_ensemble: Path) -> None:
    one, other = list(Model.load(Store.open(small_ensemble)).bank.experts)
    average = bench("guides").mean([one, other])
    mean, a, b = (n.network.state_dict() for n in (average, one, other))
    assert all(torch.allclose(mean[name], (a[name] + b[name]) / 2, atol=1e-6) for name in mean)
    one.network.load_state_dict(mean)
    state = torch.ones(2, 1, 8, 8), torch.full((2,), 0.5), Condition(labels=torch.tensor([0, 1]))
    assert torch.equal(average.velocity(*state), one.velocity(*state))


def test_ways_and_pictures_are_measured(bench: Bench, small_ensemble: Path, tmp_path: Path) -> None:
    """By pixels: a way to guide, which is kept apart from plain guidance, and an album by several judges."""
    guides, campaign = bench("guides"), Campaign.open(small_ensemble)
    ways = guides.Bench(small_ensemble, "ensemble", 12, "heldout", size=8)
    nulls = "own", "mixture", "own milestone 1"
    plain, guided, earlier = (ways.measured(guides.Way(null, steps=2)) for null in nulls)
    assert plain.keys() == guided.keys() == {"frechet", "precision", "recall"} and plain != guided != earlier
    for null in ("pretrain", "average", "milestone 1"):
        with pytest.raises(LookupError):
            ways.measured(guides.Way(null))
    album = bench("judges").Album.of(campaign, "ensemble", Generation(steps=2), "heldout", 12, tmp_path)
    found = album.distances({f"{axes} axes": {"extractor_size": 8, "components": axes} for axes in (2, 4)})
    assert list(found) == ["2 axes", "precision", "recall", "4 axes"]
    assert 0 < found["2 axes"] < found["4 axes"]


@pytest.fixture(scope="module")
def small_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    judge = {"extractor": "pixels", "extractor_size": 16}
    settings = {"budget": {"samples": 128}, "monolith": False, "evaluate": judge}
    settings |= {"data": {"ingest": {"heldout": 0.4}}, "train": {"milestones": 2}}
    return assembled(tmp_path_factory.mktemp("guides") / "c", settings)


# Curation.


def test_the_concepts_benchmark_searches_the_glyphs(bench: Bench) -> None:
    curate = bench("curate")
    (found,) = curate.speed("glyphs", curate.glyph_captions(500))
    assert found["case"].startswith("500 glyphs, ") and found["value"] > 1000


def test_faults_that_are_seen_are_scored(call: Callable[..., Lines]) -> None:
    rows = call("curate", "aesthetics", "--quick")
    assert -1 <= rows["related: Whole", "SRCC"]["value"] <= 1
    assert rows["related: Whole", "SRCC"]["target"] == {"op": ">=", "value": 0.8}
    assert 0 < rows["scoring", "backbone's throughput"]["value"] < 2


def test_planted_duplicates_are_found(call: Callable[..., Lines]) -> None:
    rows = call("curate", "dedupe", "--quick")
    assert rows["noise, as by default", "found: JPEG 90"]["value"] == 1
    assert rows["noise, as by default", "lost originals"]["value"] == 0


def test_the_long_tail_is_drawn_as_it_is_and_by_weight(call: Callable[..., Lines]) -> None:
    rows = call("curate", "tail", "--quick")
    for kind in ("tail", "head"):
        assert {(f"islands: {kind}", "hit"), (f"islands, drawn by weight: {kind}", "rank gained")} <= {*rows}


# Speed and memory.


@pytest.mark.filterwarnings("ignore:Metric `Kernel Inception Distance` will save")
def test_both_sides_of_the_evaluation_benchmark_find_the_same(bench: Bench) -> None:
    """KID's subsets are drawn, so that it is the same where a subset is everything."""
    evaluate = bench("evaluate")
    setting = evaluate.Setting(count=120, width=6, batch=20, subsets=2, subset=120, neighbours=60)
    features = evaluate.Features(setting)
    found = {name: turn(features) for name, turn in evaluate.TURNS.items()}
    assert found["Fréchet"] == pytest.approx(found["Fréchet, torchmetrics"], rel=1e-9)
    assert found["KID"] == pytest.approx(evaluate.their_kid(features), rel=1e-9)
    assert found["Fréchet"] > 0 and 0 < found["neighbours"] < 2
    targets = [line["target"] for line in evaluate.times(setting, 1) if line["target"]]
    assert targets == [{"op": "<=", "value": value} for value in (1.0, 1e-4, 1.0)]


def test_every_turn_of_the_training_loop_writes_one_checkpoint(bench: Bench) -> None:
    training = bench("training")
    found = training.measure(**TINY)
    assert found["checkpoints"] == 1.0
    assert len(found["whole"]) == len(found["bare"]) == 2
    assert min(found["whole"] + found["bare"]) > 0
    ratio = training.ratio_rows("tiny", found, ("<=", 1.05))[0]
    assert ratio["target"] == {"op": "<=", "value": 1.05}
    assert ratio["met"] is (ratio["value"] <= 1.05)


def test_the_bare_loop_takes_the_very_step_of_the_whole_loop(bench: Bench, tmp_path: Path) -> None:
    """Without clipping, both lose the same on the same batch: nothing that costs time was left out."""
    training = bench("training")
    settings = NetworkConfig(family="dit", patch=2, depth=1, heads=1, head_width=8)
    dataset = training.random_latents(Store.open(tmp_path), 4)
    make = training.maker(settings, TrainConfig(batch=8, threads=1), dataset, 100)
    (one, _), (other, _) = make(), make()
    batch = one.batch(range(8))
    optimizers = [torch.optim.AdamW(t.network.parameters(), lr=1e-3, fused=True) for t in (one, other)]
    training.bare_step(one.network, optimizers[0], batch)
    other.step(batch)[0].backward()
    optimizers[1].step()
    for bare, whole in zip(one.network.parameters(), other.network.parameters(), strict=True):
        torch.testing.assert_close(bare.grad, whole.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(bare, whole, rtol=1e-4, atol=1e-6)


def test_the_sampling_benchmark_counts_what_each_strategy_does(bench: Bench) -> None:
    sampling = bench("sampling")
    setting = sampling.Setting("nano", 4, 4, 2, depth=1, router_depth=1, router_heads=1, router_width=8, k=4)
    rows = {line["metric"]: line for line in sampling.against_monolith("tiny", setting, 1)}
    router = rows["router / expert, operations"]["value"]
    cost = {name: rows[f"{name} / monolith, operations"]["value"] for name in sampling.TARGETS}
    # Two steps of two branches; the router sees one branch at every step (once: one; full: both).
    expected = {"top-1": 1 + router / 2, "once": 1 + router / 4, "top-2": 2 + router / 2, "full": 4 + router}
    assert cost == pytest.approx(expected)
    for name, bound in sampling.TARGETS.items():
        line = rows[f"{name} / monolith, time"]
        assert line["target"] == {"op": "<=", "value": bound} and line["met"] is (line["value"] <= bound)
    shares = [rows[f"router's share, {name}, 50 steps"]["value"] for name in sampling.SHARES]
    assert shares[0] == pytest.approx(router / (router + 2)) and shares == sorted(shares, reverse=True)


def test_the_sampling_benchmark_measures_memory_and_loads(bench: Bench) -> None:
    sampling = bench("sampling")
    setting = sampling.Setting("S", 4, 4, 2, depth=2, router_depth=1, router_heads=1, router_width=8, k=4)
    rows = {line["metric"]: line for line in sampling.one_resident("tiny", setting, 1, 1)}
    for routing in ("top-1", "once"):
        line = rows[f"{routing}: (peak - monolith's) / expert"]
        assert line["target"] == {"op": "<=", "value": 1.0}
        assert -1 < line["value"] < 4
    assert 1 <= rows["once: experts brought, a turn"]["value"] <= setting.k


@pytest.mark.parametrize("start", [1.0, 7.0, 30.0])
def test_the_rate_that_a_server_carries_is_found(
    bench: Bench, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = bench("serving")

    async def arrivals(server: None, rate: float, count: int, seed: int, known: dict[str, str]) -> Any:
        return serving.Point(rate, [0.1] * (count - 2) + [0.1 if rate <= 7.3 else 9.0] * 2, 0)

    monkeypatch.setattr(serving, "arrivals", arrivals)
    rate, tried = serving.search(None, start, 100, 0, 1.0, {})
    assert 7.3 / 1.06 <= rate <= 7.3 and all((one["p99"] == 0.1) is (one["rate"] <= 7.3) for one in tried)
    some = serving.requests(50, 3)
    assert some == serving.requests(50, 3) and len({one["routing"] for one in some}) == 3


def test_the_partition_benchmark_measures_what_peers_measure(bench: Bench, tmp_path: Path) -> None:
    """Every contestant ends near the inertia of 8 clusters, in a process of its own."""
    partition = bench("partition")
    partition.write_features(tmp_path / "data", 3000, 16)
    everybody = partition.contestants(sys.executable)
    found = {
        name: partition.measure(tmp_path / "data", tmp_path, everybody[name], 32)
        for name in ("Atoll", "faiss, all rows")
    }
    inertias = [one["inertia"] for one in found.values()]
    assert min(inertias) > 0.2 and max(inertias) < 1.1 * min(inertias)
    assert all(1e8 < one["peak"] < 2e9 for one in found.values())
    lines = by_name(partition.table(found, (found["Atoll"], found["Atoll"], 10)))
    assert lines["Atoll", "peak memory"]["met"] is True
    assert lines["Atoll", "inertia / best"]["value"] == pytest.approx(inertias[0] / min(inertias))


def test_latents_are_read_in_a_shuffled_order_and_on_from_the_middle(bench: Bench, tmp_path: Path) -> None:
    loading = bench("loading")
    loading.write(tmp_path / "data", 1500)
    latents, train, order = loading.opened(tmp_path / "data")
    assert len(train) == 1500 and latents.meta.shape == [4, 32, 32] and len(latents.meta.shards) == 2
    assert sorted(order.at(range(1500)).tolist()) == list(range(1500))
    assert loading.turn(tmp_path / "data")["rows_a_second"] > 0
    found = loading.resumed(tmp_path / "data")
    assert found.keys() == {"first_batch", "hashes"} and min(found.values()) > 0


def test_a_loader_that_is_not_installed_is_left_out(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, said = bench("loading"), {"rows_a_second": 9.0, "hashes": 2.0, "first_batch": 1.5}
    monkeypatch.setattr(loading, "child", lambda script, **work: said)
    lines, missing = loading.measure(tmp_path, 300, sys.executable, 1, ("no_such_loader",))
    assert missing == ["no_such_loader"]
    values = {(line["case"], line["metric"]): (line["value"], line["met"]) for line in lines}
    assert values["Atoll, resumed", "first batch"] == (1.5, False) and len(values) == 3


def test_the_engines_benchmark_compares_what_a_pool_makes_with_what_one_process_makes(
    call: Callable[..., Lines], bench: Bench
) -> None:
    found = call("engines", "--quick", "--only", "pool", "--samples", "0")
    assert found["pool", "shards"]["value"] == found["serial", "shards"]["value"] > 10
    for stage in bench("engines").STAGES:
        seconds = [found[name, f"{stage}: seconds"]["value"] for name in ("serial", "pool")]
        overhead = found["pool", f"{stage}: overhead a shard"]["value"]
        assert overhead * found["pool", "shards"]["value"] == pytest.approx(
            1000 * (2 * seconds[1] - seconds[0])
        )


@pytest.mark.timeout(600)
def test_islands_on_two_nodes_of_ray_lose_nothing_though_some_are_killed(call: Callable[..., Lines]) -> None:
    pytest.importorskip("ray")
    found = call("engines", "--islands", "4")
    assert all(line["met"] is not False for line in found.values()), found
    assert found["islands", "processes of training"]["value"] >= 6  # 4, the router, and one again


def test_a_quick_look_at_icons_measures_both_cuts(call: Callable[..., Lines]) -> None:
    assert ("cut by owners", "distance of top-1 / single") in call("icons", "--quick")


def test_a_quick_look_at_students_measures_them(call: Callable[..., Lines]) -> None:
    assert ("student", "FLOPs / monolith's") in call("distill", "--quick")


def test_every_case_of_the_gpu_benchmark_runs_on_a_cpu(call: Callable[..., Lines]) -> None:
    found = call("gpu", "--device", "cpu", "--quick")
    cases = "ceiling step rows sampling swapped storage checkpoint encoding serving"
    assert {case.split(",")[0] for case, _ in found} == {*cases.split()}
    assert all(math.isfinite(line["value"]) and line["value"] > 0 for line in found.values())


def test_a_law_of_isolation_is_found_where_there_is_one(bench: Bench) -> None:
    isolation = bench("isolation")
    sizes = [{"steps": 400.0 * 2**n, "inertia": 0.5 + 0.1 * (n % 3), "epochs": 5.0 + n} for n in range(6)]
    facts = {f"campaign {n}": each for n, each in enumerate(sizes)}
    for each in facts.values():
        each["ratio"] = 20 * each["steps"] ** -0.4 * each["inertia"] ** 0.5
    rows = by_name(isolation.rows_of(facts))
    law = "line of steps of an expert, inertia over random clusters'"
    assert rows[law, "largest error of a campaign left out"]["value"] == pytest.approx(0, abs=1e-9)
    assert rows[law, "exponent of steps of an expert"]["value"] == pytest.approx(-0.4)
    assert rows[law, "exponent of inertia over random clusters'"]["value"] == pytest.approx(0.5)
    assert rows["line of nothing: their mean", "largest error of a campaign left out"]["value"] > 0.2
