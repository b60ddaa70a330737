"""The benchmarks measure what they say; how fast anything is depends on the machine and is no test."""

import importlib
import json
import math
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
from atoll.campaign.measured import BestRow, Comparison, ComparisonTables, PairRow, ReachRow
from atoll.model.bank import Bank
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.sampler import Row
from atoll.store.store import Store
from atoll.train import loop
from helpers import assembled, command

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
TINY = {"depth": 1, "heads": 1, "head_width": 8, "latents": 4, "batch": 2, "pairs": 2, "threads": 1}
Bench = Callable[[str], Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Imports a file of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for path in (ROOT / "benchmarks").glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def training(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loop, "Ema", loop.Ema)  # one variant replaces it
    return bench("training")


@pytest.fixture
def sampling(bench: Bench) -> Any:
    return bench("sampling")


def test_a_result_names_its_command_and_no_folder_of_the_machine(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = bench("harness")
    script = Path(harness.__file__).with_name("evaluate.py")
    monkeypatch.setattr(sys, "argv", [str(script), "K = 1", "--json", str(tmp_path / "found.json")])
    assert harness.command() == "python benchmarks/evaluate.py 'K = 1' --json found.json"


@pytest.fixture
def campaigns(bench: Bench) -> Any:
    return bench("campaigns")


def compared(rows: dict[str, float], **more: Any) -> Comparison:
    named = [{"name": name, "distance": distance} for name, distance in rows.items()]
    beside = {"metric": {}, "prompts": [], "clusters": [], "routing": {}}
    return Comparison.parse({"rows": named, **beside, **more}, "here")


def test_campaigns_are_held_against_their_own_monolith(campaigns: Any) -> None:
    spent = {"monolith": 100.0, "experts": 90.0, "router": 4.0, "pretrain": 5.0}
    pairs = ((10.0, 8.0), (20.0, 19.0), (40.0, 40.0))
    found = [compared({"monolith": m, "once": d}, train_flops=spent) for m, d in pairs]
    lines = {(line["case"], line["metric"]): line for line in campaigns.table(found, "monolith")}
    ratio = lines["once", "distance / monolith"]
    assert (ratio["value"], ratio["spread"]) == (0.95, [0.8, 1.0])
    apart = lines["once", "distance - monolith, 95 %"]
    half = 4.302653 / 3**0.5  # Student's t of two degrees of freedom; the differences' deviation is 1
    assert apart["value"] == -1.0 and apart["spread"] == pytest.approx([-1 - half, -1 + half], abs=1e-5)
    assert lines["ensemble", "training FLOPs / monolith"]["value"] == 0.99
    assert lines["once", "distance"]["spread"] == [8.0, 40.0]
    over = {(line["case"], line["metric"]) for line in campaigns.table(found, "once")}
    assert ("monolith", "distance / once") in over and ("once", "distance / monolith") not in over


def test_campaigns_tell_what_all_of_them_measured_beyond_the_table(campaigns: Any) -> None:
    def tables(guidance: float, ratio: float, mean: float, share: float | None, how: str) -> ComparisonTables:
        best = BestRow.model_construct(model="once", guidance=guidance, ratio=ratio)
        base = BestRow.model_construct(model="monolith", guidance=3.0, ratio=None)
        pair = PairRow.model_construct(strategy="once", space="pixels", partner="same noise", mean=mean)
        reach = ReachRow.model_construct(model="once", of_monolith=share, how=how)
        return ComparisonTables.model_construct(best=(base, best), reach=(reach,), pairs=(pair,))

    found = [
        compared({"monolith": 1.0}).model_copy(update={"tables": tables(*values)})
        for values in (
            (2.0, 0.8, 0.5, 0.4, "between points"),
            (3.0, 0.7, 0.7, None, "never"),
            (2.0, 0.9, 0.6, 0.5, "at the first point"),
        )
    ]
    lines = {(line["case"], line["metric"]): line for line in campaigns.table(found, "monolith")}
    assert lines["once", "distance / monolith, each at its best"]["value"] == 0.8
    assert lines["once", "best guidance"]["spread"] == [2.0, 3.0]
    assert lines["once, pixels, same noise", "correlation with the monolith's pictures"]["value"] == 0.6
    (reach,) = (line for line in lines.values() if "final distance" in line["metric"])
    assert reach["metric"].endswith("at most, in 2 of 3") and reach["value"] == pytest.approx(0.45)
    assert len(lines) == 6, "the monolith has a best guidance and no ratio"


@pytest.fixture
def distill(bench: Bench) -> Any:
    return bench("distill")


def test_the_distillation_benchmark_pairs_by_campaign(distill: Any, tmp_path: Path) -> None:
    """Three campaigns whose levels differ far more than student and monolith do within each."""
    import json

    folders = []
    for number, (base, more) in enumerate([(5.0, 0.1), (9.0, 0.2), (2.0, 0.3)]):
        rows = [("monolith", base), ("student", base + more), ("once", base - 1)]
        content = {
            "metric": {"name": "x"},
            "default": "once",
            "rows": [{"name": name, "distance": value} for name, value in rows],
            "train_flops": {"monolith": 3.0, "student": 1.0},
        }
        (tmp_path / str(number) / "reports").mkdir(parents=True)
        (tmp_path / str(number) / "reports/compare.json").write_text(json.dumps(content))
        folders.append(tmp_path / str(number))
    found = [distill.read(folder) for folder in folders]
    lines = {(line["case"], line["metric"]): line for line in distill.table(found, found)}
    made = lines["student", "distance - monolith's"]
    half = 4.302653 * 0.1 / 3**0.5
    assert made["value"] == pytest.approx(0.2) and made["spread"] == pytest.approx([0.2 - half, 0.2 + half])
    assert lines["student", "lower end of the difference"]["met"] is True
    assert lines["student", "FLOPs / monolith's"]["value"] == pytest.approx(1 / 3)
    assert lines["ensemble", "distance - monolith's"]["spread"] == pytest.approx([-1.0, -1.0])
    assert lines["student", "distance - monolith at a third's"]["value"] == pytest.approx(0.2)
    with pytest.raises(SystemExit, match="has not been compared"):
        distill.read(tmp_path)


@pytest.fixture
def mixed(bench: Bench) -> Any:
    return bench("mixed")


def summed_up(distance: float, experts: float = 100.0) -> dict[str, Any]:
    return {"distance": {"once": distance}, "train_flops": {"experts": experts, "router": 4.0}}


def test_mixed_pairs_are_compared_seed_by_seed(mixed: Any) -> None:
    pairs = [
        (summed_up(2.0), summed_up(1.0)),
        (summed_up(8.0), summed_up(8.0)),
        (summed_up(1.0), summed_up(2.0)),
    ]
    rows = mixed.table(pairs)
    cost, ratio, interval = rows[:3]
    assert cost["value"] == 0 and cost["met"]
    assert ratio["value"] == 1.0 and ratio["spread"] == [0.5, 2.0]
    assert interval["value"] == pytest.approx(1.0)
    assert interval["spread"][1] == pytest.approx(2 ** (student.ppf(0.975, 2) / 3**0.5), rel=1e-3)
    assert not mixed.table([(summed_up(1.0), summed_up(1.0, experts=110.0))])[0]["met"]


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
    rows = list(evaluate.times(setting, 1))
    assert [line["target"] for line in rows if line["target"]] == [
        {"op": "<=", "value": 1.0},
        {"op": "<=", "value": 1e-4},
        {"op": "<=", "value": 1.0},
    ]


@pytest.mark.parametrize("variant", [{}, {"average": False}, {"recompute": True}])
def test_every_turn_of_the_training_loop_writes_one_checkpoint(
    training: Any, variant: dict[str, Any]
) -> None:
    found = training.measure(**TINY, **variant)
    assert found["checkpoints"] == 1.0
    assert len(found["whole"]) == len(found["bare"]) == 2
    assert min(found["whole"] + found["bare"]) > 0
    ratio = training.ratio_rows("tiny", found)[0]
    assert ratio["target"] == {"op": "<=", "value": 1.05}
    assert ratio["met"] is (ratio["value"] <= 1.05)


def test_the_bare_loop_takes_the_very_step_of_the_whole_loop(training: Any, tmp_path: Path) -> None:
    """Without clipping, both lose the same on the same batch: nothing that costs time was left out."""
    import torch

    from atoll.campaign.settings.train import TrainConfig
    from atoll.networks.settings import NetworkConfig
    from atoll.store.store import Store

    settings = NetworkConfig(family="dit", patch=2, depth=1, heads=1, head_width=8)
    dataset = training.synthetic(Store.open(tmp_path), 4)
    make = training.maker(settings, TrainConfig(batch=8, threads=1), dataset, 100)
    (one, _), (other, _) = make(), make()
    batch = one.batch(range(8))
    optimizers = [torch.optim.AdamW(t.network.parameters(), lr=1e-3, fused=True) for t in (one, other)]
    training.bare_step(one.network, optimizers[0], batch)
    other.step(batch)[0].backward()
    optimizers[1].step()
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    for bare, whole in pairs:
        torch.testing.assert_close(bare.grad, whole.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(bare, whole, rtol=1e-4, atol=1e-6)


def test_the_sampling_benchmark_counts_what_each_strategy_does(sampling: Any) -> None:
    setting = sampling.Setting("nano", 4, 4, 2, depth=1, router_depth=1, router_heads=1, router_width=8, k=4)
    rows = {line["metric"]: line for line in sampling.against_monolith("tiny", setting, 1)}
    router = rows["router / expert, operations"]["value"]
    cost = {name: rows[f"{name} / monolith, operations"]["value"] for name in sampling.TARGETS}
    # Two steps of two branches; the router sees one branch at every step (once: one; full: both).
    expected = {
        "top-1": 1 + router / 2,
        "once": 1 + router / 4,
        "top-2": 2 + router / 2,
        "full": 4 + router,
    }
    assert cost == pytest.approx(expected)
    for name, bound in sampling.TARGETS.items():
        line = rows[f"{name} / monolith, time"]
        assert line["target"] == {"op": "<=", "value": bound} and line["met"] is (line["value"] <= bound)
    shares = [rows[f"router's share, {name}, 50 steps"]["value"] for name in sampling.SHARES]
    assert shares[0] == pytest.approx(router / (router + 2)) and shares == sorted(shares, reverse=True)


def test_the_sampling_benchmark_measures_memory_and_loads(sampling: Any) -> None:
    setting = sampling.Setting("S", 4, 4, 2, depth=2, router_depth=1, router_heads=1, router_width=8, k=4)
    rows = {line["metric"]: line for line in sampling.one_resident("tiny", setting, 1, 1)}
    for routing in ("top-1", "once"):
        line = rows[f"{routing}: (peak - monolith's) / expert"]
        assert line["target"] == {"op": "<=", "value": 1.0}
        assert -1 < line["value"] < 4
    assert 1 <= rows["once: experts brought, a turn"]["value"] <= setting.k


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
    control, *others = list(bench("ablations").of_the_paper(settings).values())[:4]
    assert control == ["partition.k=1", f"budget.expert_batch={batches[0]}"]
    for sets, k, batch in zip(others, (2, 4, 16), batches[1:], strict=True):
        assert sets == [f"partition.k={k}", f"budget.expert_batch={batch}"]


def test_variants_of_a_campaign_cost_what_it_costs(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["partition.k=2", "budget.pretrain=0.5", "compare.strategies=[once]", "train.threads=1"]
    sets += ["data.ingest.glyphs.limit=120", "budget.samples=1000", "compare.samples=24", "compare.steps=2"]
    changes = [part for one in sets for part in ("--set", one)]
    base = tmp_path / "base"
    command(capsys, "new", base, "--recipe", "quickstart", *changes)
    for stage in ("launch", "compare"):
        assert command(capsys, stage, base).code == 0
    argv = ["ablations.py", str(base), "--to", str(tmp_path / "to"), "--strategies", "once"]
    variant = ["--variant", "random", "partition.method=random", "partition.k=3"]
    monkeypatch.setattr(sys, "argv", [*argv, *variant, "--json", str(tmp_path / "found.json")])
    bench("ablations").main()
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(line["case"], line["metric"]): line for line in found["rows"]}
    assert rows["all variants", "training FLOPs / the campaign's"]["value"] == pytest.approx(
        1, abs=0.03
    )  # whole steps
    found = json.loads((base / "reports/compare.json").read_text())
    assert rows["monolith", "distance"]["value"] == found["rows"][0]["distance"]
    assert rows["the campaign itself, once", "distance"]["value"] == found["rows"][-1]["distance"]
    assert rows["random, once", "distance / monolith"]["value"] > 0
    made = json.loads((tmp_path / "to/random/campaign.json").read_text())["config"]
    assert made["partition"]["k"] == 3 and made["network"]["init"] == str(base / "pretrain/expert")
    monkeypatch.setattr(sys, "argv", [*argv, "--only", "K = 3"])
    with pytest.raises(SystemExit):
        bench("ablations").main()
    assert "no variant K = 3; there are K = 1 in batches of 32, K = 4, K = 8" in capsys.readouterr().err


def test_the_headline_is_over_the_best_single_network_of_equal_cost(bench: Bench, tmp_path: Path) -> None:
    headline = bench("headline")
    told = next(entry.name for entry in headline.ENTRIES if entry.told)

    def points(flops: float, heldout: float, *test: float) -> dict[int, Any]:
        return {
            seed: {"flops": flops, "all": {"2": heldout, "3": 99.0}, "test": {"Lite2": value, "recall": 0.5}}
            for seed, value in enumerate(test)
        }

    found = {
        "tuned": {"monolith": points(100.0, 5.0, 10.0, 20.0)},
        "plain": {
            "monolith": points(100.1, 6.0, 8.0, 9.0)
        },  # better on the test pictures, which do not choose
        told: {"monolith": points(100.0, 1.0, 4.0, 8.0)},  # it knows more than the others
        "untested": {"monolith": {seed: {"flops": 100.0, "all": {"2": 1.0}, "test": {}} for seed in (0, 1)}},
        "longer": {"monolith": points(200.0, 1.0, 2.0, 2.0)},
        "islands": {"top-1": points(100.0, 4.0, 5.0, 10.0)},
    }
    headline.report(found, tmp_path / "headline.json")
    rows = json.loads((tmp_path / "headline.json").read_text())["rows"]
    ratios = {line["case"]: line["value"] for line in rows if line["metric"].startswith("Lite2, over tuned")}
    assert ratios.pop(f"{told}: monolith") == pytest.approx(0.4)
    assert ratios == {"islands: top-1": 0.5, "plain: monolith": pytest.approx((0.8 * 0.45) ** 0.5)}
    assert not any("recall, over" in line["metric"] for line in rows)
    # Three ratios, each with an unpaired interval beside it: nothing costs as much as the longer one, and the
    # best is compared with nobody.
    assert len(rows) == 5 * 3 + 1 + 2 * 3
    headline.report(found, tmp_path / "headline.json", {"Lite2": 2.0})
    rows = json.loads((tmp_path / "headline.json").read_text())["rows"]
    excess = {line["case"]: line["value"] for line in rows if "excess" in line["metric"]}
    assert excess["islands: top-1"] == pytest.approx((3 / 8 * 8 / 18) ** 0.5)
    assert len({entry.folder(tmp_path, 3) for entry in headline.ENTRIES}) == len(headline.ENTRIES)


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
    levers = bench("levers")
    model = Model.load(Store.open(small_ensemble))
    plain = Generation(routing=routing, guidance=guidance, steps=3, seed=5)
    found = levers.Way(**way)
    guided = plain.with_(routing=found.routing, guidance=max(2.0, found.caption))

    sampler = partial(levers.GuidedSampler, found, ())
    assert torch.allclose(latents(model, plain), latents(model, guided, sampler=sampler), atol=1e-5)


def test_experts_that_are_guided_by_what_they_are_have_their_own_null_branch(
    bench: Bench, small_ensemble: Path
) -> None:
    model, plain = Model.load(Store.open(small_ensemble)), Generation(guidance=2.5, steps=3, seed=5)
    experts, kind = model.bank.experts, bench("guides").GuidedByThemselves
    guided, other = (kind(model.bank, model.card, earlier=way) for way in (experts, experts[::-1]))
    assert torch.allclose(latents(model, plain), latents(guided, plain), atol=1e-5)
    assert not torch.allclose(latents(model, plain), latents(other, plain), atol=1e-5)


def latents(model: Model, generation: Generation, **how: Any) -> Tensor:
    """Of four samples, in order."""
    parts = list(model.generate(model.conditions(["0", "1", "1", "0"]), generation, **how))
    order = torch.tensor([row for part in parts for row in part.rows]).argsort()
    return torch.cat([part.latents for part in parts])[order]


def test_heun_is_nearer_than_euler(bench: Bench) -> None:
    levers = bench("levers")

    class Growing:
        def velocity(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return x_t

    rows, nothing = Row.each(Generation(steps=10, guidance=1.0), [0]), Condition()
    way, start = levers.Way(steps=10, heun=True, caption=1.0), torch.ones(1, 1, 1, 1)
    found = levers.GuidedSampler(way, (), Bank([Growing()]), nothing, nothing, rows, start).run()
    assert abs(float(found) - math.exp(-1)) < 0.002 < math.exp(-1) - 0.9**10


def test_the_average_of_networks_has_the_average_of_their_weights(bench: Bench, small_ensemble: Path) -> None:
    one, other = list(Model.load(Store.open(small_ensemble)).bank.experts)
    mean, a, b = (n.network.state_dict() for n in (bench("levers").mean([one, other]), one, other))
    assert all(torch.allclose(mean[name], (a[name] + b[name]) / 2, atol=1e-6) for name in mean)


@pytest.fixture(scope="module")
def small_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assembled(tmp_path_factory.mktemp("levers") / "c", {"budget": {"samples": 128}, "monolith": False})


def test_the_concepts_benchmark_searches_the_glyphs(bench: Bench) -> None:
    concepts = bench("concepts")
    (found,) = concepts.speed("glyphs", concepts.glyph_captions(500))
    assert found["case"].startswith("500 glyphs, ") and found["value"] > 1000


def test_faults_that_are_seen_are_scored(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["aesthetics.py", "--quick", "--json", str(tmp_path / "found.json")])
    bench("aesthetics").main()
    rows = {
        (one["case"], one["metric"]): one for one in json.loads((tmp_path / "found.json").read_text())["rows"]
    }
    assert -1 <= rows["related: Whole", "SRCC"]["value"] <= 1
    assert rows["related: Whole", "SRCC"]["target"] == {"op": ">=", "value": 0.8}
    assert 0 < rows["scoring", "backbone's throughput"]["value"] < 2


def test_the_long_tail_is_drawn_as_it_is_and_by_weight(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tail.py", "--quick", "--json", str(tmp_path / "found.json")])
    bench("tail").main()
    rows = {(one["case"], one["metric"]) for one in json.loads((tmp_path / "found.json").read_text())["rows"]}
    for kind in ("tail", "head"):
        assert {(f"islands: {kind}", "hit"), (f"islands, drawn by weight: {kind}", "rank gained")} <= rows


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
    ours = found["Atoll"]
    lines = {(line["case"], line["metric"]): line for line in partition.table(found, (ours, ours, 10))}
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
    loading = bench("loading")
    monkeypatch.setattr(loading, "child", lambda kind, folder: {"rows_a_second": 9.0, "hashes": 2.0} | FIRST)
    monkeypatch.setattr(loading, "PEERS", ("no_such_loader",))
    lines, missing = loading.measure(tmp_path, 300, sys.executable, 1)
    assert missing == ["no_such_loader"]
    values = {(line["case"], line["metric"]): (line["value"], line["met"]) for line in lines}
    assert values["Atoll, resumed", "first batch"] == (1.5, False) and len(values) == 3


FIRST = {"first_batch": 1.5}
