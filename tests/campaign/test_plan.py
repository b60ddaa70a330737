"""What a campaign will cost: the arithmetic, what is assumed when, and what does not fit."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from atoll.base.errors import AtollError, ConfigError
from atoll.campaign.budget import divide
from atoll.campaign.data_spec import DataSpec, data_spec
from atoll.campaign.folder import Campaign, new
from atoll.campaign.gpus import Gpu, load_gpus
from atoll.campaign.plan import Plan, RunCost, denoiser_footprint, lines, make_plan
from atoll.campaign.prepare import encode_stage, ingest_stage
from atoll.campaign.runs import Run as Training
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.encoders.text import text_parameters
from atoll.networks.cost import OVERHEAD, Footprint, choose, mode
from atoll.networks.settings import DataShape
from atoll.recipes import catalogue
from atoll.train.run import train_run
from helpers import SMALL, Run, merged, partitioned, refused, write_campaign

SHAPE = DataShape(channels=1, size=8, classes=2)
MONOLITH = Training("monolith")
BIG = Footprint(3_000_000_000, 100_000_000, 30_000_000, 6_000_000_000, 1.2e9, 5e7)
TEXT: Any = {"condition": "text", "network": {"family": "pixart"}, "router": {"sees_condition": True}}


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("paper") / "c"
    new(folder, catalogue.text("paper-3b"), [])
    opened = Campaign.open(folder)
    return make_plan(opened.config, data_spec(opened, 153_600_000), load_gpus(), "h100", 8)


def planned(
    sizes: list[int], gpus_each: int = 1, table: dict[str, Gpu] | None = None, **changes: Any
) -> Plan:
    tree = merged(merged(SMALL, {"partition": {"k": len(sizes)}}), changes)
    data = DataSpec(SHAPE, sizes, sum(sizes), [128 * n for n in sizes], [])
    return make_plan(CampaignConfig.parse(tree, "a test"), data, table or load_gpus(), "h100", gpus_each)


def experts(plan: Plan) -> list[RunCost]:
    return [cost for run, cost in plan.runs.items() if run.expert is not None]


# Texts.


def test_bytes_of_captions_are_told_before_and_after_they_are_there(tmp_path: Path) -> None:
    campaign = Campaign.open(write_campaign(tmp_path, TEXT))
    assert data_spec(campaign).text is None
    ingest_stage(campaign)
    dataset, before = campaign.dataset(), data_spec(campaign)
    captions = dataset.table(["caption"]).column("caption").to_pylist()
    text = before.text
    assert text is not None and not text.counted and (text.captions, text.width) == (80, 384)
    assert text.tokens == pytest.approx(sum(2 + len(caption) / 4 for caption in captions) / 80)
    encode_stage(campaign)
    counted = data_spec(campaign).text
    assert counted is not None and counted.counted and counted.captions == 80
    stored = sum(path.stat().st_size for path in (tmp_path / "data/columns/text").glob("0*.safetensors"))
    assert counted.bytes == stored
    said = lines(make_plan(campaign.config, data_spec(campaign), load_gpus(), "h100"))
    assert any(line.endswith("captions of the data set") for line in said)
    assert any("80 distinct captions x" in line for line in said) and max(map(len, said)) <= 100
    many = replace(before, text=replace(text, captions=10**6))
    cheaper = "work: cheaper, data.precompute_text=false"
    plan = make_plan(campaign.config, many, load_gpus(), "h100")
    assert any(line.endswith(cheaper) for line in lines(plan))
    assert not any(line.endswith(cheaper) for line in said)


def test_texts_encoded_in_training(tmp_path: Path) -> None:
    """They are planned, and only the encoder of the tokens may encode them."""
    campaign = partitioned(tmp_path, {**TEXT, "data": {"precompute_text": False}})
    meta = tmp_path / "islands/0/data/columns/tokens/column.json"
    tree = json.loads(meta.read_text())
    for name, value, said in (
        ("name", "stranger/encoder", "which Atoll does not know"),
        ("hash", "0" * 64, "is not the one of the training"),
        ("hash", None, "is incomplete"),
    ):
        meta.write_text(json.dumps({**tree, "producer": {**tree["producer"], name: value}}))
        with pytest.raises(AtollError, match=said):
            train_run(campaign, "expert", 0)
    (tmp_path / "partition/partition.json").unlink()
    spec = data_spec(campaign)
    assert spec.text is not None and spec.text.counted and spec.text.width == 384
    plan = make_plan(campaign.config, spec, load_gpus(), "h100")
    assert {run.beside for run in plan.own} == {4.0 * 22_713_216}  # of MiniLM
    text = lines(plan)
    assert any("text encoded in training takes" in line for line in text)
    assert any("without the encoding of texts" in line for line in text)


def test_parameters_of_a_tower_are_those_of_its_text_half(tmp_path: Path) -> None:
    half = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(text_config={**half, "vocab_size": 40}, vision_config=half)
    config.save_pretrained(tmp_path)
    assert text_parameters(str(tmp_path)) == transformers.CLIPTextModel(config.text_config).num_parameters()
    assert text_parameters(str(tmp_path / "nowhere")) is None


# Arithmetic.


@pytest.mark.parametrize("compute", ["proportional", "equal"])
def test_operations_are_those_of_the_budget(compute: str) -> None:
    changes = {"budget": {"compute": compute, "samples": 100_000}}
    sizes = [100, 300, 50]
    plan = planned(sizes, **changes)
    tree = merged(merged(SMALL, {"partition": {"k": 3}}), changes)
    made = divide(CampaignConfig.parse(tree, ""), SHAPE, sizes)
    assert [run.budget for run in plan.runs.values()] == list(made.values())
    total = sum(run.budget.train_flops for run in plan.own)
    assert plan.to_json()["total"]["train_flops"] == total
    assert total == pytest.approx(made[MONOLITH].train_flops, rel=0.01)


def test_time_and_money_by_hand() -> None:
    table = {"h100": Gpu(memory_gib=80, tflops=100, utilisation=0.5, usd_per_hour=3)}
    plan = planned([100, 300], table=table, budget={"samples": 1_000_000})
    for run in [*plan.own, plan.monolith]:
        assert run.seconds == pytest.approx(run.budget.train_flops / (run.gpus * 50e12))
        assert run.usd == pytest.approx(run.gpus * run.seconds / 3600 * 3)
    assert plan.wall_seconds == max(run.seconds for run in plan.own)
    assert plan.monolith.gpus == 2
    # Equal operations on equal GPUs: the monolith costs what the islands cost together.
    assert sum(run.usd for run in plan.own) == pytest.approx(plan.monolith.usd, rel=0.01)


def test_gpus_beyond_the_samples_of_a_step_stand_idle() -> None:
    """And are not counted."""
    idle = planned([100, 300], 64)
    assert all(run.gpus == run.budget.batch == 16 for run in idle.own)
    assert any("expert 0 uses 16 of the 64 GPUs" in note for note in idle.notes)


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
    # A validation copies the weights.
    assert mode(BIG, 1, 1).activations == 4 * BIG.parameters
    assert mode(BIG, 4, 1, sharded=True, checkpointing=True).activations == BIG.parameters


@pytest.mark.parametrize(
    ("memory_gib", "gpus", "batch", "expected"),
    [
        (1000, 8, 64, (False, False, 64)),
        (110, 8, 64, (False, False, 32)),
        (80, 8, 64, (False, False, 8)),
        (60, 8, 64, (True, False, 32)),
        (16, 8, 64, (True, True, 64)),
        (12, 16, 64, (True, True, 64)),
        (11, 16, 4, (True, False, 4)),
        (40, 1, 64, None),
        (9, 8, 64, None),
    ],
)
def test_the_fastest_way_that_fits_is_taken(
    memory_gib: int, gpus: int, batch: int, expected: tuple[bool, bool, int] | None
) -> None:
    way = choose(BIG, gpus, batch, memory_gib * 2.0**30)
    assert (way and (way.sharded, way.checkpointing, way.micro_batch)) == expected
    assert way is None or way.total <= memory_gib * 2**30


def test_less_memory_never_gives_a_way_that_takes_more() -> None:
    totals = [m.total for gib in range(5, 200) if (m := choose(BIG, 8, 100, gib * 2.0**30)) is not None]
    assert len(totals) > 100 and len(set(totals)) > 5
    assert totals == sorted(totals)


def test_what_does_not_fit_says_what_would(run: Run, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", {"network": {"heads": 8, "head_width": 64, "depth": 4}})
    campaign = Campaign.open(folder)
    counted = denoiser_footprint(campaign.config.network, data_spec(campaign).shape, bf16=True)
    alone = mode(counted, 1, 1, False, True).total / 2**30
    shared = min(mode(counted, 4, 1, True, True, True).total, mode(counted, 4, 4, True, True).total) / 2**30
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


# Drawing.


def test_drawing_takes_the_networks_that_stay_and_a_batch_at_guidance() -> None:
    plan = planned([100, 300], student={"stock": False})
    trainings = Training("expert", 0), Training("router"), Training("student")
    expert, router, student = map(plan.runs.__getitem__, trainings)
    weights = 2 * (2 * expert.footprint.parameters + router.footprint.parameters)
    image = max(cost.footprint.drawing for cost in plan.runs.values())
    beside = {"sample": 0, "serve": 0, "compare": 2 * student.footprint.parameters * 2}
    for row in plan.drawing:
        assert row["state"] == weights + beside[row["run"]]
        assert row["plain"] == pytest.approx(row["state"] + OVERHEAD + row["batch"] * 2 * image)
    assert [row["batch"] for row in plan.drawing] == [64, 32, 10]

    # As the settings of sampling say: less guidance, more bytes a number, fewer experts.
    wide, unguided = (
        planned([100, 300], sampling=sampling).drawing[0]
        for sampling in ({"residency": {"dtype": "float32"}}, {"guidance": 1.0})
    )
    assert wide["plain"] - OVERHEAD == pytest.approx(2 * (weights + 128 * image))
    assert unguided["plain"] - OVERHEAD == pytest.approx(weights + 64 * image)
    for scales in ({"guidance": 2.0}, {"guidances": [1.0, 3.0]}):  # of `compare` alone
        guided = planned([100, 300], sampling={"guidance": 1.0}, student={"stock": False}, compare=scales)
        assert (guided.drawing[0]["plain"], guided.drawing[-1]) == (unguided["plain"], plan.drawing[-1])
    one = {"residency": {"experts": 1, "prefetch": False}}
    assert planned([100, 300], sampling=one).drawing[0]["state"] == weights - 2 * expert.footprint.parameters


@pytest.mark.parametrize("memory", [3.5, 2.5, 2.39])
def test_what_is_printed_fits_when_it_is_pasted(run: Run, tmp_path: Path, memory: float) -> None:
    table, changes = tmp_path / "table.yaml", {"network": {"heads": 8, "head_width": 64, "depth": 4}}
    own = {"train": {"parallel": {"checkpointing": True}}}
    folder = write_campaign(tmp_path / "c", {**changes, "islands": {1: own}, "compare": {"batch": 8192}})
    table.write_text(f"small: {{memory_gib: {memory}, tflops: 1, utilisation: 0.5, usd_per_hour: 0}}")
    argv = ["plan", folder, "--table", table, "--gpu", "small", "--gpus", "2"]
    first = run(*argv)
    pasted = [word for line in first.out.splitlines() if line.startswith("to ") for word in shlex.split(line)]
    settings = [word for word in pasted if "=" in word]
    assert bool(settings) == ("--set" in first.out), first
    again = run(*argv, *(word for setting in settings for word in ("--set", setting)))
    assert (len(settings) > 0, again.code) == (memory < 3.5, 0), again
    assert "--set" not in again.out and "DOES NOT FIT" not in again.out


def test_gpus_that_wait_for_their_host_are_told_to_be_fewer() -> None:
    table = {"h100": Gpu(memory_gib=80, tflops=1, utilisation=1, usd_per_hour=3)}
    notes = {gpus: planned([100, 300], gpus, table).notes for gpus in (1, 4)}
    assert not any("to start it" in note for note in notes[1])
    (expert,) = (note for note in notes[4] if note.startswith("expert 0") and "to start it" in note)
    assert "4 images a GPU take" in expert and expert.endswith("use --gpus 1")


# The paper's campaign.


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
    assert 1 < experts(paper)[0].seconds / 86400 < 13
    assert experts(paper)[0].mode is not None

    # Bytes. A ring over K nodes sends 2 (K - 1) / K of the gradients from each of K nodes, at every step.
    sent = paper.transfer
    assert sent.row == 2 * (4 * 32 * 32) + 4 * 77  # tokens: their states are made in training
    assert sent.data_out == 153_600_000 * sent.row
    assert sent.weights_out == 0
    assert sent.experts_in == 4 * sum(run.footprint.parameters for run in paper.own)
    assert sent.all_reduce == 2 * 7 * 4 * paper.monolith.footprint.parameters * 1_000_000
    assert planned([100]).transfer.all_reduce == 0

    text = lines(paper)
    assert max(map(len, text)) <= 100
    told = ["experts 0-7, each", "2.98 B", "960,000    128", "router ", "monolith, one site", "1.31 TB"]
    for words in (*told, "0 B  between islands while they train"):
        assert any(words in line for line in text), words
    assert not any("trains the monolith too" in line for line in text)


def test_experts_that_differ_have_lines_of_their_own() -> None:
    plan = planned([100, 100, 500], islands={1: {"network": {"depth": 4}}})
    first, other, _ = (cost.footprint.parameters for cost in experts(plan))
    assert first < other
    text = "\n".join(lines(plan))
    assert "expert 0 " in text and "expert 1 " in text and "expert 2 " in text
    assert "trains the monolith too" in text


# What is known when.


def test_from_the_settings_alone(tmp_path: Path) -> None:
    campaign = Campaign.open(write_campaign(tmp_path / "c"))
    spec = data_spec(campaign)
    assert spec.shape == DataShape(1, 8, classes=1000) and spec.rows is None and spec.stored is None
    assert spec.sizes == [1, 1]
    assert any("equal clusters" in note for note in spec.notes)
    assert any("no data set" in note for note in spec.notes)
    text = lines(make_plan(campaign.config, spec, load_gpus(), "l4"))
    assert "     128 B  for every row of the data sets out to the islands" in text
    with_rows = data_spec(campaign, 81)
    assert with_rows.sizes == [41, 40] and with_rows.stored == [41 * 128, 40 * 128]


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ({"vae": "stabilityai/sd-vae-ft-mse", "ingest": {"size": 256}}, DataShape(4, 32, 384, 77)),
        ({"ingest": {"size": 32, "mode": "rgb"}, "text_length": 9}, DataShape(3, 32, 384, 9)),
        ({"text_encoder": "google/t5-v1_1-xxl", "text_length": 120}, DataShape(1, 8, 4096, 120)),
        ({"text_encoder": "openai/clip-vit-large-patch14", "text_length": 120}, DataShape(1, 8, 768, 77)),
        (
            {"vae": "{folder}/vae", "text_encoder": "{folder}/text", "ingest": {"size": 64}},
            DataShape(16, 16, 48, 77),
        ),
    ],
)
def test_shapes_that_settings_and_configs_of_folders_name(
    data: dict[str, Any], shape: DataShape, tmp_path: Path
) -> None:
    for name, config in {
        "vae": {"_class_name": "AutoencoderKL", "latent_channels": 16, "block_out_channels": [8, 8, 8]},
        "text": {"model_type": "t5", "d_model": 48},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    named = json.loads(json.dumps(data).replace("{folder}", str(tmp_path)))
    assert data_spec(Campaign.open(write_campaign(tmp_path / "c", {**TEXT, "data": named}))).shape == shape


def test_by_the_data_set_and_by_the_partition(made: Path, run: Run, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    said = run("plan", made, "--json")
    assert said.code == 0
    plan = json.loads(said.out)
    for number, planned_run in enumerate(plan["runs"]):
        folder = "router" if planned_run["name"] == "router" else f"islands/{number}"
        island = json.loads((made / folder / "island.json").read_text())
        for key in ("rows", "steps", "batch", "train_flops", "parameters"):
            assert planned_run[key] == island[key], (folder, key)
    files = [p for k in (0, 1) for p in (made / f"islands/{k}/data").rglob("*") if p.is_file()]
    blobs = [path for path in files if path.suffix in (".parquet", ".safetensors", ".tar")]
    assert plan["bytes"]["data_out"] == sum(path.stat().st_size for path in blobs) > 0
    assert not any("assumed" in note for note in plan["assumptions"])
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before

    fresh = write_campaign(tmp_path / "c", {"data": {"path": str(made / "data")}})
    uncut, cut = data_spec(Campaign.open(fresh)), data_spec(Campaign.open(made))
    assert uncut.shape == cut.shape and uncut.rows == cut.rows == sum(uncut.sizes)
    assert abs(uncut.sizes[0] - uncut.sizes[1]) <= 1
    assert not any("no data set" in note for note in uncut.notes)


# The command and its table.


def test_json_is_json_and_holds_the_whole_plan(run: Run, tmp_path: Path) -> None:
    plan = json.loads(run("plan", write_campaign(tmp_path / "c"), "--json", "--gpus", "2").out)
    assert [r["name"] for r in plan["runs"]] == ["expert 0", "expert 1", "router"]
    assert plan["gpus_per_island"] == 2 and plan["gpu"]["name"] == "h100"
    assert plan["monolith"]["gpus"] == 4
    assert plan["bytes"]["data_out"] is None and plan["runs"][0]["rows"] is None
    chosen = plan["runs"][0]["memory"]["chosen"]
    assert chosen["total"] == chosen["state"] + chosen["copies"] + chosen["activations"] + OVERHEAD


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c")
    for argv, words in (
        (["--gpu", "h1000"], ["'h1000'", "did you mean 'h100'?"]),
        (["--gpus", "0"], ["--gpus"]),
        (["--table", tmp_path / "none.yaml"], ["cannot read", "none.yaml"]),
        (["--set", "data.vae=no/such-vae"], ["cannot load the VAE 'no/such-vae'"]),
        (
            ["--set", "data.vae=stabilityai/sd-vae-ft-mse", "--set", "data.ingest.size=36"],
            ["36 px do not divide by 8"],
        ),
    ):
        refused(run("plan", folder, *argv), *words)
    text = write_campaign(tmp_path / "text", TEXT)
    refused(run("plan", text, "--set", "data.text_encoder=no/such"), "cannot load the text encoder 'no/such'")


def test_the_table_can_be_edited(run: Run, tmp_path: Path) -> None:
    table, known = tmp_path / "gpus.yaml", load_gpus()
    assert {"h100", "a100-80gb", "l4", "rtx-4090"} <= set(known)
    for gpu in known.values():
        assert 10 < gpu.memory_gib < 300 and 50 < gpu.tflops < 3000 and 0.1 < gpu.utilisation <= 0.6
    table.write_text(
        "h100: {usd_per_hour: 9}\ntoaster: {memory_gib: 3, tflops: 0.5, utilisation: 0.5, usd_per_hour: 0}\n"
    )
    edited = load_gpus(table)
    assert edited["h100"].usd_per_hour == 9 and edited["h100"].tflops == known["h100"].tflops
    said = run("plan", write_campaign(tmp_path / "c"), "--table", table, "--gpu", "toaster")
    assert said.code == 0 and "2 islands of 1 toaster each: 0.5 TFLOP/s" in said.out
    for text, words in (
        ("h100: {usd: 9}", "unknown key 'usd'"),
        ("new: {tflops: 9}", "memory_gib"),
        ("h100: {utilisation: 35}", "utilisation"),
        ("h100: 9", "no table of GPUs"),
        ("[", "not valid YAML"),
    ):
        table.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_gpus(table)


def test_the_plan_runs_as_the_settings_say_and_else_says_how_to(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    run("new", folder, "--recipe", "paper-3b")
    argv = ["plan", folder, "--gpus", "8", "--rows", "153600000"]
    said = run(*argv)
    assert said.code == 0 and "sharded: 32.8" in said.out and "compare" in said.out
    for words in ("--set", "DOES NOT FIT", "to start it", "text states"):
        assert words not in said.out, said.out
    plain = run(*argv, "--set", "train.parallel.strategy=ddp")
    assert "\nto run so: --set train.parallel.micro_batch=8\n" in plain.out
    assert plain.code == 0
