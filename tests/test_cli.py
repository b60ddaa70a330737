"""What users type by mistake: one line, exit code 2, and nothing that a later run would trust."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from atoll.campaign.folder import Campaign
from atoll.cli import main as cli
from atoll.train.run import train_run
from helpers import Answer, Run, assembled, atoll, flip, partitioned, refused, start, write_campaign

CHANGES = {"budget": {"samples": 320}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that is assembled, with a monolith beside it."""
    folder = assembled(tmp_path_factory.mktemp("trained") / "campaign", CHANGES)
    train_run(Campaign.open(folder), "monolith")
    return folder


def state(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Folders that are none, or none of ours.

COMMANDS = [["data", stage] for stage in ("ingest", "embed", "encode", "show", "audit")]
COMMANDS += [["partition"], ["plan"], ["train", "router"], ["status"], ["launch"], ["assemble"]]
COMMANDS += [["compare"], ["diagnose"], ["sample"], ["report"]]


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_folder_that_is_not_there_or_a_file(argv: list[str], run: Run, tmp_path: Path) -> None:
    refused(run(*argv, tmp_path / "nowhere"), "there is no folder", "nowhere")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    refused(run(*argv, tmp_path / "file"), "file is a file: give a folder")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("argv", COMMANDS[:10], ids=" ".join)
def test_a_folder_that_is_no_campaign_or_one_of_another_schema(
    argv: list[str], run: Run, made: Path, tmp_path: Path
) -> None:
    refused(run(*argv, tmp_path), "is not a campaign (no campaign.yaml)", "atoll new")
    assert list(tmp_path.iterdir()) == []
    shutil.copy(made / "campaign.yaml", tmp_path)
    content = json.loads((made / "campaign.json").read_text())
    (tmp_path / "campaign.json").write_text(json.dumps({**content, "format": "atoll/campaign 7"}))
    refused(run(*argv, tmp_path), "campaign.json is of atoll/campaign 7, this Atoll reads atoll/campaign 1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["campaign.json", "campaign.yaml"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        *(
            ("campaign.json", text, "campaign.json")
            for text in ("{", "[]", '{"format": "atoll/campaign 1"}', "\xff")
        ),
        ("campaign.yaml", "a: [", "not valid YAML"),
        ("campaign.yaml", "", "no settings"),
        ("campaign.yaml", "- a", "no settings"),
        ("campaign.yaml", "\xff", "not valid YAML"),
    ],
)
def test_a_damaged_campaign(name: str, text: str, words: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    refused(run("launch", tmp_path), words)


def test_a_new_campaign_where_there_is_something(run: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = state(made)
    for argv, words in (
        (["new", tmp_path / "file"], "is a file"),
        (["new", tmp_path / "file/below"], "is a file or lies inside one"),
        (["quickstart", "--dir", tmp_path / "file"], "is a file"),
        (["new", made, "--recipe", "cpu"], "campaign.yaml exists already"),
        (["new", tmp_path / "c", "--recipe", "quikstart"], "did you mean 'quickstart'?"),
    ):
        refused(run(*argv), words)
    assert state(made) == before and not (tmp_path / "c").exists()


# Settings.


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("partition.kk=3", ["unknown key 'partition.kk'", "did you mean 'k'?"]),
        ("train.learning_rate=1", ["unknown key 'train.learning_rate'", "valid: batch"]),
        ("budjet.samples=10", ["unknown key 'budjet'", "did you mean 'budget'?"]),
        ("islands.0.train.btch=3", ["unknown key 'btch' in islands.0.train", "did you mean 'batch'?"]),
        ("islands.9.train.batch=3", ["islands.9: there is no such island", "use 0 to 3"]),
        ("partition.k=many", ["'partition.k'", "integer"]),
        ("partition.k", ["not of the form key=value"]),
        ("seed.a=1", ["'seed' is not a group of settings"]),
        ("compare.strategies=[", ["not valid YAML"]),
        ("train.batch=0", ["'train.batch'", "greater than or equal to 1"]),
        ("train.lr=.nan", ["'train.lr'", "finite"]),
        ("train.lr=.inf", ["'train.lr'", "finite"]),
        ("train.betas=[0.9, 1.0]", ["'train.betas.1'", "less than 1"]),
        ("train.log_every=0", ["'train.log_every'"]),
        ("router.train.batch=-1", ["'router.train.batch'"]),
        ("network.patch=0", ["'network.patch'"]),
        ("network.size=nanno", ["unknown network size 'nanno'", "did you mean 'nano'?"]),
        ("sampling.routing=onze", ["no routing 'onze'", "did you mean 'once'?"]),
        ("sampling.routing=oracle", ["needs known clusters", "compare.strategies"]),
        ("sampling.routing=top1", ["did you mean 'top-1'? valid: full, top-K, threshold(P), "]),
        ("train.betas=[0.9]", ["'train.betas.1' in the new campaign is missing: give it a value"]),
        ("compare.strategies=[top]", ["'top'"]),
        ("compare.strategies=[top-1 null once]", ["the null branch takes full, top-K"]),
        ("student.routing=top-1 null sample-1", ["the teacher is not guided", "leave 'null' out"]),
        ("student.routing=oracle", ["needs no router", "teacher: cluster"]),
        ("data.ingest.glyphs.faces=cor", ["no faces 'cor'", "did you mean 'core'?"]),
        ("objective.prediction=velocity", ["'objective.prediction'", "'v'"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_setting(setting: str, words: list[str], run: Run, tmp_path: Path) -> None:
    refused(run("new", tmp_path / "c", "--recipe", "quickstart", "--set", setting), *words)
    assert not (tmp_path / "c").exists()


def test_a_wrong_setting_in_the_file_is_found_by_every_command(run: Run, tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c", {"train": {"batsh": 3}})
    for argv in COMMANDS[:10]:
        refused(run(*argv, folder), f"unknown key 'train.batsh' in {folder}", "did you mean 'batch'?")
    # The file is blamed before what --set adds to it, and --set where the file is right.
    answer = run("compare", folder, "--set", "compare.samples=9")
    refused(answer, f"unknown key 'train.batsh' in {folder / 'campaign.yaml'}")
    assert [p.name for p in folder.iterdir()] == ["campaign.yaml"]
    whole = write_campaign(tmp_path / "d", {})
    refused(run("compare", whole, "--set", "compare.samples=.nan"), "'compare.samples' in --set: ")


# Sources. After each mistake, the same folder and the right command.


def goes_on(run: Run, folder: Path, *sets: str) -> None:
    """The right command works where the wrong one was tried."""
    done = run("data", "ingest", folder, *[part for s in sets for part in ("--set", s)])
    assert done.code == 0, done
    assert run("data", "audit", folder).out == "no problems\n"


def own(folder: Path, source: Path) -> Path:
    data = {"source": str(source), "ingest": {"mode": "auto", "glyphs": {"limit": None}}}
    return write_campaign(folder, {"condition": "none", "data": data})


def pictures(folder: Path, lines: list[str] | None = None, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (9, 9), (40 * number, 10, 10)).save(folder / f"{number}.png")
    right = [json.dumps({"file_name": f"{n}.png", "text": f"red {n}"}) for n in range(count)]
    (folder / "metadata.jsonl").write_text("\n".join(right if lines is None else lines))
    return folder


def test_sources_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "pictures"
    folder = own(tmp_path / "c", source)
    for argv in (["data", "ingest"], ["launch"]):
        refused(run(*argv, folder), "there is no source", "pictures")
        assert [p.name for p in folder.iterdir()] == ["campaign.yaml"]
    pictures(source)
    for path in source.glob("*.png"):
        path.write_bytes(path.read_bytes()[:20])
    refused(run("launch", folder), "no usable rows in folder pictures")
    pictures(source)
    (source / "metadata.jsonl").unlink()
    refused(run("data", "ingest", folder), "6 images but no captions", "metadata.jsonl")
    for line, words in (
        ('{"file": "0.png", "text": "a"}', ["not file_name"]),
        ('{"file_name": "0.png", "words": "a"}', ["words", "none of text, caption, prompt"]),
        ("not json", ["no readable row"]),
    ):
        pictures(source, [line])
        refused(run("data", "ingest", folder), *words)
    pictures(source)
    wrong = run("data", "ingest", folder, "--set", "data.ingest.caption=title")
    refused(wrong, "has no column 'title'", "it has file_name, text")
    assert not (folder / "data/manifest.json").exists()
    goes_on(run, folder)
    before = state(folder)
    for command in (["data", "ingest"], ["launch"]):  # a data set of other settings is not taken for this one
        refused(run(*command, folder, "--set", "data.ingest.size=4"), "with other settings")
    assert state(folder) == before


def test_one_picture_that_cannot_be_read_is_counted_and_named(run: Run, tmp_path: Path) -> None:
    source = pictures(tmp_path / "pictures")
    (source / "3.png").write_bytes(b"no picture")
    folder = own(tmp_path / "c", source)
    said = run("data", "ingest", folder)
    assert said.code == 0 and "1 left out:" in said.out and "5 rows" in said.out
    assert "3.png" in (folder / "data/rejects.jsonl").read_text()


def test_settings_that_do_not_fit_the_data(run: Run, tmp_path: Path) -> None:
    folder = own(tmp_path / "c", pictures(tmp_path / "pictures"))
    for setting, words in (
        ("network.family=pixart", "the pixart family does not take condition 'none'"),
        ("network.patch=3", "8 px do not divide into patches of 3"),
        ("router.patch=3", "8 px do not divide into patches of 3"),
        ("network.head_width=5", "network.head_width is 2 x 5, which gives no positions"),
        ("router.head_width=6", "router.head_width is 1 x 6, which gives no positions"),
        ("student.batch_share=1e308", "less than or equal to 1000"),
        (f"data.ingest.buckets.multiple={10**400}", "less than or equal to 8192"),
        ("partition.k=60", "K = 60 clusters for 5 training rows"),
    ):
        refused(run("launch", folder, "--set", setting), words)
    assert not any((folder / name).exists() for name in ("campaign.json", "partition", "islands"))
    said = run("partition", folder)
    assert said.code == 0 and "2 clusters of 5 training rows" in said.out
    assert Campaign.open(folder).config.partition.k == 2


def test_stages_in_the_wrong_order(run: Run, tmp_path: Path) -> None:
    folder = own(tmp_path / "c", pictures(tmp_path / "pictures"))
    refused(run("data", "encode", folder), "there is no data set", "atoll data ingest")
    refused(run("partition", folder), "there is no data set")
    refused(run("train", "expert", folder, "--expert", "0"), "no island.json", "atoll partition")
    refused(run("assemble", folder), "has no partition")
    refused(run("partition", folder, "--assign", folder), "has no partition: run 'atoll partition' first")
    goes_on(run, folder)
    refused(run("partition", folder), "column 'latents'", "is missing", "atoll data encode")
    kmeans = ["--set", "partition.method=kmeans", "--set", "partition.encoder=efficientnet-lite0"]
    assert run("data", "encode", folder).code == 0
    words = "'features-efficientnet-lite0'", "is missing", "atoll data embed"
    refused(run("partition", folder, *kmeans), *words)
    assert not (folder / "campaign.json").exists()
    assert run("partition", folder).code == 0
    (folder / "data/images/00000.tar").unlink()
    refused(run("data", "audit", folder), "00000.tar is missing", "or remove the folder and ingest again")


# A campaign that has begun.


@pytest.mark.parametrize("key", ["train.batch=8", "partition.k=3", "data.vae=other", "monolith=false"])
def test_a_fixed_setting_cannot_change(key: str, run: Run, made: Path) -> None:
    before = state(made)
    name, _value = key.split("=")
    refused(run("launch", made, "--set", key), f"{name} is ", "was started with", "put it back")
    assert state(made) == before


def test_a_fixed_setting_cannot_change_in_the_file_either(run: Run, copy: Path) -> None:
    text = (copy / "campaign.yaml").read_text()
    (copy / "campaign.yaml").write_text(text.replace("samples: 320", "samples: 321"))
    words = "budget.samples is 321, but", "with 320: runs cannot be longer", "--recipe NAME --set data.path="
    refused(run("train", "router", copy), *words)


def test_what_cannot_be_trained(run: Run, made: Path) -> None:
    before = state(made)
    for argv, words in (
        (["expert", "--expert", "2"], ["no expert 2", "give an expert from 0 to 1"]),
        (["expert"], ["no expert is named", "give an expert from 0 to 1"]),
        (["router", "--expert", "0"], ["router is no expert"]),
        (["expret"], ["expert", "router", "monolith"]),
    ):
        refused(run("train", argv[0], made, *argv[1:]), *words)
    assert state(made) == before


def test_a_url_is_no_local_path_and_its_key_is_not_repeated(run: Run, made: Path) -> None:
    refused(run("export", made, "--to", "s3://x/y"), "s3://x/y is a URL")
    said = refused(run("status", "s3://KEY:SECRET@bucket/x"), "s3://...@bucket/x", "environment")
    assert "SECRET" not in str(said)


def test_before_training(run: Run, made: Path, tmp_path: Path) -> None:
    before = state(made)
    refused(run("assemble", made), "has no expert yet", "atoll launch")
    refused(run("compare", made), "has no ensemble", "atoll assemble")
    refused(run("diagnose", made), "has no ensemble", "atoll assemble")
    refused(run("sample", made, "1", "--out", tmp_path / "a.png"), "has no ensemble", "atoll assemble")
    sample = "sample", made, "1", "--model", "monolith", "--out", tmp_path / "a.png"
    refused(run(*sample), "has no monolith yet")
    assert state(made) == before and not (tmp_path / "a.png").exists()


def test_a_wrong_request_for_samples(run: Run, trained: Path, tmp_path: Path) -> None:
    before = state(trained)
    for argv, words in (
        ([], ["needs prompts (class)"]),
        (["2"], ["'2' is no class label", "0 to 1"]),
        (["²"], ["'²' is no class label"]),
        (["1" * 5_000], ["1111 is no class label", "0 to 1"]),
        (["--", "-1"], ["'-1' is no class label"]),
        (["1", "--guidance", "-1"], ["--guidance"]),
        (["1", "--guidance", "nan"], ["guidance"]),
        (["1", "--steps", "0"], ["--steps"]),
        (["1", "--routing", ""], ["no routing ''"]),
        (["1", "--routing", "onze"], ["no routing 'onze'", "did you mean 'once'?"]),
        (["1", "--routing", "top-3"], ["'top-3' with 2 experts"]),
        (["1", "--routing", "oracle"], ["'oracle' needs known clusters"]),
        (["1", "--model", "students"], ["ensemble", "monolith"]),
        (["1", "--set", "sampling.stepz=3"], ["unknown key 'sampling.stepz'", "did you mean 'steps'?"]),
        (["1", "--device", "cudaa"], ["no device 'cudaa'", "give cpu"]),
        (["--prompts", tmp_path / "absent"], ["cannot read", "absent"]),
        (["1", "--out", tmp_path / "a.gif"], ["a.gif is no name of a picture", ".png, .jpg"]),
        (["1", "--out", tmp_path / "a"], ["a is no name of a picture", "that of a folder in /"]),
        (["1", "--out", tmp_path / "no/a.png"], ["no is no folder that can be written"]),
    ):
        refused(run("sample", trained, "--out", tmp_path / "a.png", *argv), *words)
    assert list(tmp_path.iterdir()) == [] and state(trained) == before


def test_samples_are_a_sheet_or_a_file_a_picture(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts from a file, in formats that the names say; any setting of `sampling` is an option's equal."""
    (tmp_path / "prompts.txt").write_text("0\n\n 1 \n")
    names = [f"a{ending}" for ending in (".png", ".jpg", ".webp")]
    monkeypatch.setenv("HOME", str(tmp_path))
    outs = [part for name in (*names, "made/single/") for part in ("--out", f"~/{name}")]
    argv = ["sample", trained, "--prompts", tmp_path / "prompts.txt", "--count", "2", "--device", "cpu"]
    assert run(*argv, *outs, "--steps", "2").code == 0

    def opened(path: Path) -> tuple[str | None, tuple[int, int]]:
        with Image.open(path) as picture:
            return picture.format, picture.size

    assert [opened(tmp_path / name)[0] for name in names] == ["PNG", "JPEG", "WEBP"]
    single = sorted((tmp_path / "made/single").iterdir())
    assert [path.name for path in single] == ["0000-0.png", "0001-0.png", "0002-1.png", "0003-1.png"]
    assert {opened(path) for path in single} == {("PNG", (8, 8))}
    assert min(opened(tmp_path / "a.png")[1]) > 2 * 128  # small pictures are magnified
    sets = ["--set", "sampling.steps=2", "--set", "sampling.residency.experts=1"]
    assert run("sample", trained, "0", "1", "--count", "2", *sets, "--out", tmp_path / "b.png").code == 0
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "a.png").read_bytes()


def test_prompts_for_a_model_without_condition(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    campaign = partitioned(folder, {"condition": "none", "budget": {"samples": 64}, "monolith": True})
    train_run(campaign, "monolith")
    argv = ["sample", folder, "--model", "monolith", "--out", tmp_path / "a.png"]
    refused(run(*argv, "a prompt"), "this model is unconditional")
    assert run(*argv).code == 0


def test_a_damaged_ensemble_is_not_sampled_and_can_be_mended(run: Run, trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "c"))
    argv = ["sample", folder, "1", "--out", tmp_path / "a.png"]
    flip(folder / "ensemble/experts/1/diffusion_pytorch_model.safetensors")
    refused(run(*argv), "is not what its card says")
    assert run("assemble", folder).code == 0
    path = folder / "ensemble/ensemble.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": content["format"].rpartition(" ")[0] + " 9"}))
    refused(run(*argv), " 9, this Atoll reads", "atoll assemble")
    assert run("assemble", folder).code == 0
    assert run(*argv).code == 0 and (tmp_path / "a.png").exists()


# The rest of the entry point.


def test_ctrl_c_is_130_and_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert cli.run_command(interrupted) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to go on\n"


def test_recipes_are_listed_with_their_first_line(run: Run) -> None:
    lines = run("recipes").out.splitlines()
    assert {"cpu", "quickstart"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_every_command(option: str, run: Run) -> None:
    said = run(option)
    names = {"quickstart", "new", "data", *(argv[0] for argv in COMMANDS)}
    assert said.code == 0 and all(f"\n  {name} " in said.out for name in names)


@pytest.mark.slow
def test_real_processes_say_one_line_and_a_stopped_launch_goes_on(copy: Path) -> None:
    done = atoll("launch", copy / "nowhere")
    assert done.stdout == ""
    refused(Answer(done.returncode, done.stdout, done.stderr), "there is no folder")
    process = start("launch", copy)
    out = ""
    assert process.stdout is not None
    while "started" not in out:
        out += process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.strip() == "interrupted; run the same command again to go on"
    again = atoll("launch", copy)
    assert again.returncode == 0, again.stderr
    assert (copy / "ensemble/ensemble.json").exists()
