"""Pictures that keep their aspect, from a folder to samples of two sizes."""

import asyncio
import base64
import io
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from atoll.base.errors import AtollError, ConfigError
from atoll.base.preemption import Interrupted
from atoll.campaign.assemble import assemble
from atoll.campaign.data_spec import data_spec
from atoll.campaign.folder import Campaign
from atoll.campaign.gpus import load_gpus
from atoll.campaign.measured import Comparison
from atoll.campaign.plan import make_plan
from atoll.campaign.runs import experts_of
from atoll.data.dataset import DataSet
from atoll.data.weights import write_weights
from atoll.measure.comparison import compare
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.serve.server import open_app
from atoll.serve.settings import ServeSettings
from atoll.train.run import train_run
from helpers import (
    Run,
    environment,
    merged,
    newest_checkpoint,
    partitioned,
    refused,
    same_bits,
    write_campaign,
)
from helpers_data import aspects
from helpers_export import LENGTH, load, small_vae, text_tower

PICTURES = {(40, 40): 60, (60, 30): 40, (30, 60): 16}
SETTINGS: dict[str, Any] = {
    "condition": "text",
    "data": {
        "ingest": {"size": 16, "mode": "rgb", "glyphs": {"faces": "core", "limit": None}, "shard_rows": 50},
        "text_length": LENGTH,
    },
    "network": {"family": "pixart"},
    "budget": {"samples": 640},
    "train": {"previews": 1, "validations": 2, "milestones": 2},
}
SIZES = {"none": ["16x16", "24x12", "12x24"], "vae": ["32x32", "48x24", "24x48"]}


def settings(folder: Path, vae: str) -> dict[str, Any]:
    """Those of a campaign of the pictures in a folder, which is filled."""
    data = {
        "source": str(aspects(folder / "pictures", PICTURES)),
        "text_encoder": str(text_tower(folder / "text")),
        "vae": "none" if vae == "none" else str(small_vae(folder / "vae")),
        "ingest": {"size": 16 if vae == "none" else 32, "buckets": {"sizes": SIZES[vae], "min_rows": 4}},
    }
    return merged(SETTINGS, {"data": data})


@pytest.fixture(scope="module", params=["none", pytest.param("vae", marks=pytest.mark.slow)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained and assembled campaign, on pixels and in latents of a VAE of factor 2."""
    folder = tmp_path_factory.mktemp(request.param)
    campaign = partitioned(folder / "campaign", settings(folder, request.param))
    shutil.copytree(folder / "campaign", folder / "untrained")
    for role, number in (("expert", 0), ("expert", 1), ("router", None), ("monolith", None)):
        train_run(campaign, role, number)
    assemble(campaign)
    return folder / "campaign"


def factor(campaign: Path) -> int:
    return 1 if Campaign.open(campaign).config.data.vae == "none" else 2


def opened(made: Path) -> Model:
    return Model.load(made, encoders=Campaign.open(made).config.encoders)


def test_a_cluster_counts_its_buckets(made: Path) -> None:
    campaign = Campaign.open(made)
    dataset, partition = campaign.clustered()
    assert dataset.buckets is not None and dataset.column("latents").meta.kind == "ragged"
    train = dataset.split("train")
    sizes = ["x".join(map(str, dataset.buckets[row])) for row in train]
    counts = Counter(zip(sizes, partition.clusters[train].tolist(), strict=True))
    assert {
        (size, k): number for size, each in partition.about.buckets.items() for k, number in enumerate(each)
    } == counts
    for k in (0, 1):
        island = DataSet.open(campaign.store, f"islands/{k}/data")
        assert island.buckets is not None
        assert (island.buckets == dataset.buckets[partition.clusters == k]).all()


def test_the_plan_counts_tokens(made: Path) -> None:
    """Each run's operations per sample are the mean over its own rows' buckets."""
    campaign = Campaign.open(made)
    known = data_spec(campaign)
    assert sorted(known.shape.latents) == sorted(
        (int(h) // factor(made), int(w) // factor(made))
        for w, h in (size.split("x") for size in SIZES["none" if factor(made) == 1 else "vae"])
    )
    plan = make_plan(campaign.config, known, load_gpus(), "l4")
    for run in experts_of(2):
        assert plan.runs[run].budget.train_flops == json.loads((made / run.plan).read_text())["train_flops"]
    spent = sum(cost.budget.train_flops for cost in plan.own)
    assert spent == pytest.approx(plan.monolith.budget.train_flops, rel=0.05)


def test_pictures_of_two_sizes(made: Path) -> None:
    torch.manual_seed(0)
    model, scale = opened(made), 8 * factor(made)
    wide, usual = f"{3 * scale}x{3 * scale // 2}", f"{2 * scale}x{2 * scale}"
    alone = model("one green bar", size=wide).images[0]
    assert alone.size == (3 * scale, 3 * scale // 2)
    assert {one.size for one in model(["a red square"] * 2).images} == {(2 * scale, 2 * scale)}
    assert model(["one green bar", "a red square"], size=wide).images[0].tobytes() == alone.tobytes()
    assert model("a", size=usual).images[0].tobytes() == model("a").images[0].tobytes()
    with pytest.raises(ConfigError, match="no pictures of 64x8: it was trained on"):
        model("a", size="64x8")
    with pytest.raises(ConfigError, match="'wide' is no size"):
        model("a", size="wide")


@pytest.mark.parametrize("residency", [None, Residency(experts=1, prefetch=False)])
def test_a_server_draws_every_size_as_the_model_does(made: Path, residency: Residency | None) -> None:
    """Requests of all sizes under way together, also where their experts take turns on the device."""
    campaign = Campaign.open(made)
    app, engine = open_app(str(made), ServeSettings(residency=residency or Residency()))
    engine.start()
    model, (width, height) = opened(made), (2 * 8 * factor(made),) * 2

    async def ask(client: httpx.AsyncClient, size: str | None, steps: int) -> httpx.Response:
        body = {"prompt": "a red square", "seed": 5, "steps": steps, "n": 2, "routing": "once", "size": size}
        return await client.post("/v1/images/generations", json=body)

    async def all_sizes() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)
            (about, *_) = (await client.get("/v1/models")).json()["data"]
            assert about["atoll"]["size"] == f"{width}x{height}" and len(about["atoll"]["sizes"]) == 3
            refused = await ask(client, "8x8", 2)
            assert refused.status_code == 400 and "valid: auto, " in refused.json()["error"]["message"]
            sizes = [None, "auto", *about["atoll"]["sizes"]]
            return await asyncio.gather(*(ask(client, size, 3 + n) for n, size in enumerate(sizes)))

    try:
        answers = asyncio.run(all_sizes())
    finally:
        engine.drain(5)
    for n, answer in enumerate(answers):
        size, data = answer.json()["size"], answer.json()["data"]
        how = campaign.config.sampling.with_(seed=5, steps=3 + n, routing="once", size=size)
        for picture, image in zip(data, model(["a red square"], 2, how).images, strict=True):
            drawn = Image.open(io.BytesIO(base64.b64decode(picture["b64_json"])))
            assert f"{drawn.width}x{drawn.height}" == size and drawn.tobytes() == image.tobytes()
    assert len({answer.json()["size"] for answer in answers}) == 3


@pytest.mark.slow
def test_it_is_measured_at_the_size_nearest_to_a_square(made: Path) -> None:
    """And one comparison is not taken for that of other strategies."""
    settings = ["compare.samples=6", "compare.extractor=pixels", "compare.fit_rows=20", "compare.curve=true"]
    for name in ("top-1", "once"):
        found = compare(Campaign.open(made, [*settings, f"compare.strategies=[{name}]"]))
        assert isinstance(found, Comparison) and found.metric["reference_rows"] < 20
        assert {row.name for row in found.rows} == {"monolith", name}


def test_held_out_rows_of_other_sizes_measure_nothing(made: Path, tmp_path: Path, run: Run) -> None:
    dataset = Campaign.open(copy := Path(shutil.copytree(made, tmp_path / "campaign"))).dataset()
    weights, rows = dataset.weights.copy(), dataset.split("heldout")
    assert dataset.buckets is not None
    weights[rows[np.ptp(dataset.buckets[rows], axis=1) == 0]] = 0
    write_weights(dataset, {"name": "no squares"}, weights)
    for stage in ("evaluate", "compare", "diagnose"):
        refused(run(stage, copy), "no held-out rows of the size nearest to a square", "=train")


def test_a_resumed_run_gives_the_same_bits_and_another_batch_is_refused(
    made: Path, tmp_path: Path, told_to_leave: Callable[[int], None]
) -> None:
    """Stopped in the middle of an epoch, with rows of every bucket left over for the next one."""
    copy = Path(shutil.copytree(made.parent / "untrained", tmp_path / "campaign"))
    told_to_leave(5)
    with pytest.raises(Interrupted):
        train_run(Campaign.open(copy), "expert", 0)
    plan = copy / "islands/0/island.json"
    text = plan.read_text()
    plan.write_text(json.dumps(json.loads(text) | {"batch": 8}))  # that would be another order
    with pytest.raises(AtollError, match="other settings"):
        train_run(Campaign.open(copy), "expert", 0)
    plan.write_text(text)
    told_to_leave(3)
    with pytest.raises(Interrupted):
        train_run(Campaign.open(copy), "expert", 0)
    train_run(Campaign.open(copy), "expert", 0)
    assert same_bits(copy / "islands/0", made / "islands/0")


@pytest.mark.slow
@pytest.mark.parametrize("made", ["none"], indirect=True)
def test_two_processes_see_the_same_rows(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made.parent / "untrained", tmp_path / "campaign"))
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "atoll"]
    train = ["train", "expert", str(copy), "--expert", "0", "--set", "train.parallel.micro_batch=3"]
    done = subprocess.run([sys.executable, *ranks, *train], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for file in ("weights", "ema"):
        runs = (newest_checkpoint(folder / "islands/0") for folder in (made, copy))
        one, two = (load_file(run / f"{file}.safetensors") for run in runs)
        assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4


def test_a_family_of_squares_is_told_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c")
    wrong = ("--set", "data.ingest.buckets={multiple: 4}")
    refused(run("launch", folder, *wrong), "the dit family takes square latents only", "network.family")
    tree = merged(SETTINGS, {"network": {"patch": 4}, "data": {"source": str(tmp_path)}})
    encoders = {"vae": "stabilityai/sd-vae-ft-mse", "text_encoder": "minilm"}
    data = {**encoders, "ingest": {"size": 256, "buckets": {}}}
    folder = write_campaign(tmp_path / "coarse", merged(tree, {"data": data, "network": {"patch": 2}}))
    refused(run("data", "ingest", folder), "do not divide into patches of 4: change router.patch")
    assert [path.name for path in folder.iterdir()] == ["campaign.yaml"]
    # The same of a data set that was made elsewhere.
    partitioned(tmp_path / "other", settings(tmp_path, "none"))
    no_source = {"condition": "none", "data": {"source": None, "path": str(tmp_path / "other/data")}}
    foreign = write_campaign(tmp_path / "foreign", no_source)
    refused(run("partition", foreign), "the dit family takes square latents only, not 12x24")
    assert [path.name for path in foreign.iterdir()] == ["campaign.yaml"]


def test_one_size_seed_and_prompt_is_one_picture_everywhere(made: Path, run: Run, tmp_path: Path) -> None:
    """By command, Python and pipeline, as by the server above; no size that was not trained is drawn."""
    pipe = load(made / "ensemble", encoders=Campaign.open(made).config.encoders)
    model, prompt = opened(made), "one green bar"
    argv = ["sample", made, prompt, "--routing", "once", "--steps", "3", "--seed", "7", "--count", "1"]

    def draw(**how: Any) -> Any:
        given = torch.Generator().manual_seed(7)
        return pipe(prompt, generator=given, num_inference_steps=3, **how).images[0]

    for width, height in model.sizes:
        size = f"{width}x{height}"
        assert run(*argv, "--size", size, "--out", f"{tmp_path}/{size}/").code == 0
        (file,) = (tmp_path / size).glob("*.png")
        piped = draw(width=width, height=height, routing="once")
        python = model(prompt, seed=7, size=size, routing="once", steps=3).images[0]
        pictures = [Image.open(file).convert("RGB"), piped, python]
        assert {picture.size for picture in pictures} == {(width, height)}
        assert len({picture.tobytes() for picture in pictures}) == 1
    assert len({*model.sizes}) == 3
    side = 16 * factor(made)
    assert draw().size == (side, side)
    for wrong in ({"width": side}, {"height": 5, "width": 5}, {"height": -1, "width": side}):
        with pytest.raises(ConfigError):
            draw(**wrong)
    argv += ["--out", f"{tmp_path}/none/", "--size"]
    refused(run(*argv, "8x8"), "this model draws no pictures of 8x8: it was trained on")
    refused(run(*argv, "8by8"), "'8by8' is no size: write width x height in pixels")
