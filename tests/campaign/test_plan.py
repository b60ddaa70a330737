"""What a campaign will cost: the arithmetic, what is assumed when, and what does not fit."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from atoll.base.condition import Condition
from atoll.base.errors import AtollError, ConfigError
from atoll.campaign import gpus
from atoll.campaign.budget import divide
from atoll.campaign.data_spec import DataSpec, data_spec
from atoll.campaign.folder import Campaign, new
from atoll.campaign.gpus import Gpu
from atoll.campaign.plan import OVERHEAD, Plan, RunCost, choose, denoiser_footprint, make_plan, mode
from atoll.campaign.plan_text import lines
from atoll.campaign.prepare import encode_stage, ingest_stage
from atoll.campaign.runs import Run as Training
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.encoders.text import text_parameters
from atoll.networks.families import family
from atoll.networks.memory import Footprint
from atoll.networks.settings import DataShape
from atoll.recipes import catalogue
from atoll.train.run import train_run
from helpers import SMALL, Run, merged, partitioned, refused, write_campaign

SHAPE = DataShape(channels=1, size=8, classes=2)
MONOLITH = Training("monolith")
BIG = Footprint(3_000_000_000, 100_000_000, 30_000_000, 6_000_000_000, 1.2e9, 5e7)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("paper") / "c"
    new(folder, catalogue.text("paper-3b"), [])
    opened = Campaign.open(folder)
    return make_plan(opened.config, data_spec(opened, 153_600_000), gpus.load(), "h100", 8)


def small(sizes: list[int], gpus_each: int = 1, table: dict[str, Gpu] | None = None, **changes: Any) -> Plan:
    tree = merged(merged(SMALL, {"partition": {"k": len(sizes)}}), changes)
    data = DataSpec(SHAPE, sizes, sum(sizes), [128 * n for n in sizes], True, [])
    config = CampaignConfig.parse(tree, "a test")
    return make_plan(config, data, table or gpus.load(), "h100", gpus_each)


def experts(plan: Plan) -> list[RunCost]:
    return [cost for run, cost in plan.runs.items() if run.expert is not None]


def test_bytes_of_captions_are_told_before_and_after_they_are_there(tmp_path: Path) -> None:
    changes = {"condition": "text", "network": {"family": "pixart"}, "router": {"sees_condition": True}}
    campaign = Campaign.open(write_campaign(tmp_path, changes))
    assert data_spec(campaign).text is None
    ingest_stage(campaign)
    dataset, outlook = campaign.dataset(), data_spec(campaign)
    captions = dataset.table(["caption"]).column("caption").to_pylist()
    text = outlook.text
    assert text is not None and not text.counted and (text.captions, text.width) == (80, 384)
    assert text.tokens == pytest.approx(sum(2 + len(one) / 4 for one in captions) / 80)
    encode_stage(campaign)
    counted = data_spec(campaign).text
    assert counted is not None and counted.counted and counted.captions == 80
    stored = sum(path.stat().st_size for path in (tmp_path / "data/columns/text").glob("0*.safetensors"))
    assert counted.bytes == stored
    said = lines(make_plan(campaign.config, data_spec(campaign), gpus.load(), "h100"))
    assert any(line.endswith("captions of the data set") for line in said)
    assert any("80 distinct captions x" in line for line in said) and max(map(len, said)) <= 100
    many = replace(outlook, text=replace(text, captions=10**6))
    plan = make_plan(campaign.config, many, gpus.load(), "h100")
    assert any(line.endswith("work: cheaper, data.precompute_text=false") for line in lines(plan))
    assert not any(line.endswith("work: cheaper, data.precompute_text=false") for line in said)


def test_texts_encoded_in_training_are_planned(tmp_path: Path) -> None:
    changes = {"condition": "text", "network": {"family": "pixart"}, "router": {"sees_condition": True}}
    folder = write_campaign(tmp_path, {**changes, "data": {"precompute_text": False}})
    campaign = Campaign.open(folder)
    ingest_stage(campaign)
    encode_stage(campaign)
    told = data_spec(campaign)
    assert told.text is not None and told.text.counted and told.text.width == 384
    plan = make_plan(campaign.config, told, gpus.load(), "h100")
    assert {run.beside for run in plan.own} == {4.0 * 22_713_216}  # of MiniLM
    said = lines(plan)
    assert any("text encoded in training takes" in line for line in said)
    assert any("without the encoding of texts" in line for line in said)


def test_parameters_of_a_tower_are_those_of_its_text_half(tmp_path: Path) -> None:
    half = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(text_config={**half, "vocab_size": 40}, vision_config=half)
    config.save_pretrained(tmp_path)
    tower = transformers.CLIPTextModel(config.text_config)
    assert text_parameters(str(tmp_path)) == tower.num_parameters()
    assert text_parameters(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("name", "stranger/encoder", "which Atoll does not know"),
        ("hash", "0" * 64, "is not the one of the training"),
        ("hash", None, "is incomplete"),
    ],
)
def test_only_the_encoder_of_the_tokens_encodes_them(
    tmp_path: Path, name: str, value: str, said: str
) -> None:
    changes = {"condition": "text", "network": {"family": "pixart"}}
    campaign = partitioned(tmp_path, {**changes, "data": {"precompute_text": False}})
    meta = tmp_path / "islands/0/data/columns/tokens/column.json"
    tree = json.loads(meta.read_text())
    tree["producer"][name] = value
    meta.write_text(json.dumps(tree))
    with pytest.raises(AtollError, match=said):
        train_run(campaign, "expert", 0)


# Arithmetic.


@pytest.mark.parametrize("compute", ["proportional", "equal"])
def test_operations_are_those_of_the_budget(compute: str) -> None:
    changes = {"budget": {"compute": compute, "samples": 100_000}}
    sizes = [100, 300, 50]
    plan = small(sizes, **changes)
    tree = merged(merged(SMALL, {"partition": {"k": 3}}), changes)
    made = divide(CampaignConfig.parse(tree, ""), SHAPE, sizes)
    assert [run.budget for run in plan.runs.values()] == list(made.values())
    total = sum(run.budget.train_flops for run in plan.own)
    assert plan.to_json()["total"]["train_flops"] == total
    assert total == pytest.approx(made[MONOLITH].train_flops, rel=0.01)


def test_time_and_money_by_hand() -> None:
    table = {"h100": Gpu(memory_gib=80, tflops=100, utilisation=0.5, usd_per_hour=3)}
    plan = small([100, 300], table=table, budget={"samples": 1_000_000})
    for run in [*plan.own, plan.monolith]:
        assert run.seconds == pytest.approx(run.budget.train_flops / (run.gpus * 50e12))
        assert run.usd == pytest.approx(run.gpus * run.seconds / 3600 * 3)
    assert plan.wall_seconds == max(run.seconds for run in plan.own)
    assert plan.monolith.gpus == 2
    # Equal operations on equal GPUs: the monolith costs what the islands cost together.
    assert sum(run.usd for run in plan.own) == pytest.approx(plan.monolith.usd, rel=0.01)


def test_more_is_more() -> None:
    base = small([100, 300], budget={"samples": 100_000})
    for change in (
        {"budget": {"samples": 200_000}},
        {"network": {"depth": 3}, "budget": {"samples": 100_000}},
    ):
        more = small([100, 300], **change)
        for one, other in zip(base.own[:2], more.own[:2], strict=True):
            assert other.budget.train_flops > one.budget.train_flops and other.seconds > one.seconds
    slower = {**gpus.load(), "h100": gpus.load()["h100"].model_copy(update={"utilisation": 0.1})}
    assert small([100, 300], table=slower).wall_seconds > small([100, 300]).wall_seconds
    two = small([100, 300], 2)
    for one, other in zip(small([100, 300]).own, two.own, strict=True):
        assert other.seconds == pytest.approx(one.seconds / 2)
        assert other.gpu_hours == pytest.approx(one.gpu_hours)


def test_a_gpu_needs_a_sample() -> None:
    """More GPUs than samples of a step stand idle, and are not counted."""
    plan = small([100, 300], 64)
    assert all(run.gpus == run.budget.batch == 16 for run in plan.own)
    assert any("expert 0 uses 16 of the 64 GPUs" in note for note in plan.notes)


# Memory.


def test_sharding_divides_the_state_and_not_the_activations() -> None:
    whole = mode(BIG, 8, 16)
    for n in (2, 4, 8):
        shared = mode(BIG, n, 16, sharded=True)
        assert shared.state == whole.state / n and shared.activations == whole.activations
        assert shared.copies == 4 * (30_000_000 + 2 * 100_000_000)
    assert mode(BIG, 1, 16, sharded=True) == replace(whole, sharded=True)
    assert mode(BIG, 8, 32).activations == 2 * mode(BIG, 8, 16).activations
    assert mode(BIG, 8, 16, checkpointing=True).total < whole.total
    assert whole.total == whole.state + whole.copies + whole.activations + OVERHEAD


def test_a_validation_copies_the_weights() -> None:
    assert mode(BIG, 1, 1).activations == 4 * BIG.parameters
    assert mode(BIG, 4, 1, sharded=True, checkpointing=True).activations == BIG.parameters


def test_the_fastest_way_that_fits_is_taken() -> None:
    def way(memory_gib: float, n: int = 8, batch: int = 64) -> tuple[bool, bool, int]:
        found = choose(BIG, n, batch, memory_gib * 2**30)
        assert found is not None and found.total <= memory_gib * 2**30
        return found.sharded, found.checkpointing, found.micro_batch

    assert way(1000) == (False, False, 64)
    assert way(110) == (False, False, 32)
    assert way(80) == (False, False, 8)
    assert way(60) == (True, False, 32)
    assert way(16) == (True, True, 64)
    assert way(12, n=16) == (True, True, 64)
    assert way(11, n=16, batch=4) == (True, False, 4)
    assert choose(BIG, 1, 64, 40 * 2**30) is None
    assert choose(BIG, 8, 64, 9 * 2**30) is None


def test_less_memory_never_gives_a_way_that_takes_more() -> None:
    totals = [m.total for gib in range(5, 200) if (m := choose(BIG, 8, 100, gib * 2**30)) is not None]
    assert len(totals) > 100 and len(set(totals)) > 5
    assert totals == sorted(totals)


def test_what_does_not_fit_says_what_would(run: Run, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", {"network": {"heads": 8, "head_width": 64, "depth": 4}})
    campaign = Campaign.open(folder)
    one = denoiser_footprint(campaign.config.network, data_spec(campaign).shape, bf16=True)
    alone, shared = (mode(one, n, 1, n > 1, checkpointing=True).total / 2**30 for n in (1, 4))
    table = tmp_path / "table.yaml"

    def write(**memory: float) -> None:
        rest = {"tflops": 1, "utilisation": 0.5, "usd_per_hour": 0}
        table.write_text(json.dumps({name: {"memory_gib": gib, **rest} for name, gib in memory.items()}))

    write(large=alone * 1.0001, small=shared * 1.0001)
    argv = ["plan", folder, "--table", table, "--gpu"]
    said = run(*argv, "small")
    refused(said, "expert 0 does not fit", "each of 1 small with 2.", "use --gpus 4 or --gpu large")
    assert "DOES NOT FIT" in said.out
    refused(run(*argv, "small", "--gpus", "3"), "each of 3 small", "--gpus 4")
    for fits in (["small", "--gpus", "4"], ["large"]):
        assert run(*argv, *fits).code == 0
    write(small=1)
    refused(run(*argv, "small"), "use --gpu a10g")


# The paper's campaign.


@pytest.mark.slow
def test_the_papers_eight_times_three_billion(paper: Plan) -> None:
    assert len(experts(paper)) == 8 and {run.gpus for run in experts(paper)} == {8}
    parameters = [run.footprint.parameters for run in experts(paper)]
    assert sum(parameters) == pytest.approx(24e9, rel=0.01)
    assert {run.budget.batch for run in experts(paper)} == {128}
    assert paper.monolith.budget.steps == 1_000_000 and paper.monolith.gpus == 64
    # 6 operations a parameter and token, but for modulation (a fifth of the parameters), which is once a
    # sample; and attention. The router's 4 % come out of the experts' steps.
    by_parameters = 6 * 0.8 * parameters[0] * (256 + 77) * 128 * 960_000
    assert experts(paper)[0].budget.train_flops == pytest.approx(by_parameters, rel=0.05)
    # The paper: 6.5 days of one 8-GPU node for each. It does not say which GPU our source knows of.
    days = experts(paper)[0].seconds / 86400
    assert 1 < days < 13
    assert experts(paper)[0].mode is not None


@pytest.mark.slow
def test_bytes_by_hand(paper: Plan) -> None:
    traffic = paper.transfer
    assert traffic.between_islands == 0
    assert traffic.row == 2 * (4 * 32 * 32 + 77 * 2048)
    assert traffic.data_out == 153_600_000 * traffic.row
    networks = sum(run.footprint.parameters for run in paper.own)
    assert traffic.experts_in == 4 * networks
    # A ring over K nodes sends 2 (K - 1) / K of the gradients from each of K nodes, at every step.
    assert traffic.all_reduce == 2 * 7 * 4 * paper.monolith.footprint.parameters * 1_000_000
    assert small([100]).transfer.all_reduce == 0


@pytest.mark.slow
def test_the_table_fits_a_terminal(paper: Plan) -> None:
    text = lines(paper)
    assert max(map(len, text)) <= 100
    joined = "\n".join(text)
    for word in (
        "experts 0-7, each",
        "2.98 B",
        "960,000    128",
        "router",
        "monolith, one site",
        "49.7 TB",
    ):
        assert word in joined
    assert "0 B  between islands while they train" in joined
    assert "trains the monolith too" not in joined
    assert "trains the monolith too" in "\n".join(lines(small([10, 20])))


def test_experts_that_differ_have_lines_of_their_own() -> None:
    text = "\n".join(lines(small([100, 100, 500], islands={1: {"network": {"depth": 4}}})))
    assert "expert 0 " in text and "expert 1 " in text and "expert 2 " in text


# What is known when.


def test_from_the_settings_alone(tmp_path: Path) -> None:
    campaign = Campaign.open(write_campaign(tmp_path / "c"))
    found = data_spec(campaign)
    assert found.shape == DataShape(1, 8, classes=1000) and found.rows is None and found.stored is None
    assert found.sizes == [1, 1] and not found.partitioned
    assert any("equal clusters" in note for note in found.notes)
    assert any("no data set" in note for note in found.notes)
    said = lines(make_plan(campaign.config, found, gpus.load(), "l4"))
    assert "     128 B  for every row of the data sets out to the islands" in said
    with_rows = data_spec(campaign, 81)
    assert with_rows.sizes == [41, 40] and with_rows.stored == [41 * 128, 40 * 128]


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ({"vae": "stabilityai/sd-vae-ft-mse", "ingest": {"size": 256}}, DataShape(4, 32, 384, 77)),
        ({"ingest": {"size": 32, "mode": "rgb"}, "text_length": 9}, DataShape(3, 32, 384, 9)),
        ({"text_encoder": "google/t5-v1_1-xxl", "text_length": 120}, DataShape(1, 8, 4096, 120)),
        ({"text_encoder": "openai/clip-vit-large-patch14", "text_length": 120}, DataShape(1, 8, 768, 77)),
    ],
)
def test_shapes_that_settings_name(data: dict[str, Any], shape: DataShape, tmp_path: Path) -> None:
    text = {"condition": "text", "network": {"family": "pixart"}, "data": data}
    assert data_spec(Campaign.open(write_campaign(tmp_path / "c", text))).shape == shape


T5, PARTS = "google/t5-v1_1-xxl", ("depth", "heads", "head_width")


@pytest.mark.slow
def test_families_side_by_side_are_planned(tmp_path: Path) -> None:
    """A large SD3 on one island; each is counted by itself, and all share one budget."""
    changes = {
        "condition": "text",
        "data": {"vae": "stabilityai/sd-vae-ft-mse", "ingest": {"size": 256}, "text_encoder": T5},
        "network": {"family": "pixart", "size": "XL", "patch": 2, **dict.fromkeys(PARTS)},
        "islands": {1: {"network": {"family": "sd3", "size": "2B"}}},
        "train": {"precision": "bf16"},
        "budget": {"samples": 10_000_000},
    }  # fmt: skip
    campaign = Campaign.open(write_campaign(tmp_path / "c", changes))
    plan = make_plan(campaign.config, data_spec(campaign), gpus.load(), "h100", 8)
    first, second = experts(plan)
    assert first.footprint.parameters == pytest.approx(611e6, rel=0.01)
    assert second.footprint.parameters == pytest.approx(2028e6, rel=0.01)
    assert second.budget.flops.train > 1.5 * first.budget.flops.train
    assert second.budget.steps < first.budget.steps / 1.5  # equal clusters: the same operations for each
    assert second.budget.train_flops == pytest.approx(first.budget.train_flops, rel=0.01)
    assert sum(run.budget.train_flops for run in plan.own) == pytest.approx(
        plan.monolith.budget.train_flops, rel=0.01
    )
    assert second.mode is not None and second.mode.total > first.footprint.state / 8


def test_configs_of_a_folder_tell_shapes_without_weights(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    vae = {"_class_name": "AutoencoderKL", "latent_channels": 16, "block_out_channels": [8, 8, 8]}
    (tmp_path / "vae/config.json").write_text(json.dumps(vae))
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text(json.dumps({"model_type": "t5", "d_model": 48}))
    data = {"vae": str(tmp_path / "vae"), "text_encoder": str(tmp_path / "text"), "ingest": {"size": 64}}
    text = {"condition": "text", "network": {"family": "flux"}, "data": data}
    shape = data_spec(Campaign.open(write_campaign(tmp_path / "c", text))).shape
    assert shape == DataShape(16, 16, 48, 77)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("data.vae=no/such-vae", ["cannot load the VAE 'no/such-vae'"]),
        ("data.text_encoder=no/such-text", ["cannot load the text encoder 'no/such-text'"]),
    ],
)
def test_what_nobody_knows_is_asked_for(key: str, words: list[str], run: Run, tmp_path: Path) -> None:
    text = {"condition": "text", "network": {"family": "pixart"}}
    refused(run("plan", write_campaign(tmp_path / "c", text), "--set", key), *words)


def test_a_size_that_a_vae_does_not_divide(run: Run, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", {"data": {"vae": "stabilityai/sd-vae-ft-mse"}})
    refused(run("plan", folder, "--set", "data.ingest.size=36"), "36 px do not divide by 8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "c"
    partitioned(folder)
    return folder


def test_after_the_partition_by_its_own_numbers(made: Path, run: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    said = run("plan", made, "--json")
    assert said.code == 0
    plan = json.loads(said.out)
    for number, found in enumerate(plan["runs"]):
        folder = "router" if found["name"] == "router" else f"islands/{number}"
        island = json.loads((made / folder / "island.json").read_text())
        for key in ("rows", "steps", "batch", "train_flops", "parameters"):
            assert found[key] == island[key], (folder, key)
    files = [p for k in (0, 1) for p in (made / f"islands/{k}/data").rglob("*") if p.is_file()]
    blobs = [path for path in files if path.suffix in (".parquet", ".safetensors", ".tar")]
    assert plan["bytes"]["data_out"] == sum(path.stat().st_size for path in blobs) > 0
    assert not any("assumed" in note for note in plan["assumptions"])
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before


def test_before_the_partition_by_the_data_set(made: Path, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", {"data": {"path": str(made / "data")}})
    found, after = data_spec(Campaign.open(folder)), data_spec(Campaign.open(made))
    assert found.shape == after.shape and found.rows == after.rows == sum(found.sizes)
    assert abs(found.sizes[0] - found.sizes[1]) <= 1 and not found.partitioned and after.partitioned
    assert [note for note in found.notes if "no data set" in note] == []


# The command and its table.


def test_json_is_json_and_holds_the_whole_plan(run: Run, tmp_path: Path) -> None:
    plan = json.loads(run("plan", write_campaign(tmp_path / "c"), "--json", "--gpus", "2").out)
    assert [r["name"] for r in plan["runs"]] == ["expert 0", "expert 1", "router"]
    assert plan["gpus_per_island"] == 2 and plan["gpu"]["name"] == "h100"
    assert plan["monolith"]["gpus"] == 4 and plan["bytes"]["between_islands"] == 0
    assert plan["bytes"]["data_out"] is None and plan["runs"][0]["rows"] is None
    chosen = plan["runs"][0]["memory"]["chosen"]
    parts = chosen["state"] + chosen["copies"] + chosen["activations"] + OVERHEAD
    assert chosen["total"] == parts


def test_a_gpu_that_is_none(run: Run, tmp_path: Path) -> None:
    refused(run("plan", write_campaign(tmp_path / "c"), "--gpu", "h1000"), "'h1000'", "did you mean 'h100'?")
    refused(run("plan", tmp_path / "c", "--gpus", "0"), "--gpus")
    refused(run("plan", tmp_path / "nowhere"), "there is no folder")


def test_the_table_can_be_edited(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.yaml"
    table.write_text(
        "h100: {usd_per_hour: 9}\ntoaster: {memory_gib: 3, tflops: 0.5, utilisation: 0.5, usd_per_hour: 0}\n"
    )
    known = gpus.load(table)
    assert known["h100"].usd_per_hour == 9 and known["h100"].tflops == gpus.load()["h100"].tflops
    said = run("plan", write_campaign(tmp_path / "c"), "--table", table, "--gpu", "toaster")
    assert said.code == 0 and "2 islands of 1 toaster each: 0.5 TFLOP/s" in said.out
    for text, word in (
        ("h100: {usd: 9}", "unknown key 'usd'"),
        ("new: {tflops: 9}", "memory_gib"),
        ("h100: {utilisation: 35}", "utilisation"),
        ("h100: 9", "no table of GPUs"),
        ("[", "not valid YAML"),
    ):
        table.write_text(text)
        refused(run("plan", tmp_path / "c", "--table", table), word)
    refused(run("plan", tmp_path / "c", "--table", tmp_path / "none.yaml"), "cannot read the table")


def test_every_gpu_of_the_table_is_sane() -> None:
    table = gpus.load()
    assert {"h100", "a100-80gb", "l4", "rtx-4090"} <= set(table)
    for gpu in table.values():
        assert 10 < gpu.memory_gib < 300 and 50 < gpu.tflops < 3000 and 0.1 < gpu.utilisation <= 0.6
    with pytest.raises(ConfigError, match="did you mean 'l40s'"):
        gpus.find(table, "l40")


def test_a_processor_as_a_gpu_of_the_table_gives_the_right_order_of_time() -> None:
    """The formula of time against a training step that is measured, within a wide band."""
    plan = small(
        [500, 500], network={"depth": 4, "heads": 4, "head_width": 32, "patch": 1}, train={"batch": 64}
    )
    config = CampaignConfig.parse(
        merged(SMALL, {"network": {"depth": 4, "heads": 4, "head_width": 32, "patch": 1}}), ""
    )
    adapter, x = family("dit"), torch.randn(64, 1, 8, 8)
    network = adapter.build(config.network, SHAPE)

    def best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    cond = Condition(labels=torch.zeros(64, dtype=torch.long))
    step = best(lambda: adapter.predict(network, x, torch.rand(64), cond).square().mean().backward())
    a = torch.randn(512, 512)
    peak = 2 * 512**3 * 20 / best(lambda: [a @ a for _ in range(20)])
    cpu = Gpu(memory_gib=4, tflops=peak / 1e12, utilisation=0.5, usd_per_hour=0)
    one = replace(experts(plan)[0], gpu=cpu)
    assert 0.2 < (one.seconds / one.budget.steps) / step < 5
