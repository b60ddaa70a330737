"""Scripts and YAML of jobs, read back the way a shell, sbatch and SkyPilot read them."""

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import atoll
from atoll.base.errors import AtollError, ConfigError
from atoll.campaign.settings.launch import LaunchConfig, Placement, SkyConfig, SlurmConfig
from atoll.launch import sky, slurm
from atoll.launch.job import Job, Site, command

URL = "s3://bucket/campaign"
SITE = Site("/c", Path("/c/launch"), Path("launch"))
CODE = Placement(sky=SkyConfig(workdir="."))
HOSTILE = ["plain", "a b", "it's", 'a"b', "a;b", "$HOME", "`id`", "a%jb"]
HOSTILE += ["a#b", "ünï", "a&b|c", "a*b", "a\\b", "-x"]


def train(place: str, *more: str) -> tuple[str, ...]:
    return command("train", "expert", place, "--expert", "0", *more)


def options(script: str) -> dict[str, str]:
    """What sbatch reads of a script: quotes and backslashes in double quotes are its own rules."""
    found = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            text = line.removeprefix("#SBATCH ")
            if text.startswith('"'):
                text = re.sub(r"\\(.)", r"\1", text[1:-1])
            name, _, value = text.partition("=")
            found[name] = value
    return found


def parses(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# Slurm.


def test_what_a_job_asks_of_slurm() -> None:
    names = {"partition": "gpu,big", "constraint": "a100&ib", "account": "me", "qos": "long"}
    more = {"lines": ("--exclude=node7", "--nice"), "setup": ("module load cuda",)}
    asked = SlurmConfig(**names, **more, gpu_type="a100", hours=1.5, warn=300)  # type: ignore[arg-type]
    size: dict[str, Any] = {"cpus": 8, "gpus": 4, "processes": 4, "memory": 64 * 10**9}
    job = Job("expert 3", train("/c"), **size, place=Placement(memory_gb=64, slurm=asked))
    text = slurm.script(job, SITE)
    parses(text)
    found = options(text)
    assert found.pop("--job-name") == job.label("/d/../c") != job.label("/d")
    expected = {"--output": "/c/launch/expert-3.out", "--open-mode": "append", "--requeue": ""}
    expected |= {"--signal": "B:USR1@300", "--nodes": "1", "--ntasks-per-node": "1", "--cpus-per-task": "8"}
    expected |= {"--gres": "gpu:a100:4", "--mem": "61036M", "--time": "90", "--partition": "gpu,big"}
    expected |= {"--constraint": "a100&ib", "--account": "me", "--qos": "long"}
    assert found == expected | {"--exclude": "node7", "--nice": ""}
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash" and "export OMP_NUM_THREADS=2" in lines
    assert lines.index("module load cuda") < next(n for n, line in enumerate(lines) if " train " in line)
    assert "-m atoll.launch.torchrun --nnodes 1 --nproc-per-node 4 --standalone -m atoll train expert" in text


def test_what_is_not_set_is_left_to_the_cluster_and_tasks_have_logs_of_their_own() -> None:
    """Also under a name in which sbatch would otherwise see its own patterns."""
    bare = options(slurm.script(Job("router", train("/c"), memory=10**9), SITE))
    assert not {"--mem", "--time", "--partition", "--gres", "--account", "--qos", "--constraint"} & set(bare)
    brief = Placement(slurm=SlurmConfig(hours=0.05))
    short = options(slurm.script(Job("router", train("/c"), place=brief), SITE))
    assert (short["--time"], short["--signal"]) == ("3", "B:USR1@90")  # and not 120 s before the end of 180
    text = slurm.script(Job("data", train("/c"), count=3), Site("/c%a", Path("/c%a/launch"), Path("/c")))
    array = options(text)
    assert (array["--array"], array["--output"]) == ("1-3", "/c%%a/launch/data-%a.out")


def test_several_nodes_meet_at_the_first() -> None:
    job = Job("expert 0", train("/c"), cpus=4, gpus=2, processes=2, place=Placement(nodes=3))
    text = slurm.script(job, SITE)
    parses(text)
    assert options(text)["--nodes"] == "3"
    line = next(line for line in text.splitlines() if line.startswith("srun"))
    words = shlex.split(line.removesuffix(" &"))
    assert {"--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=4"} <= set(words)
    assert words[words.index("--nnodes") + 1] == "3" and words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "$host:$port"
    assert "kill -TERM" not in text  # srun would end its steps at once


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_path_reaches_the_command_and_sbatch_as_it_is(name: str, tmp_path: Path) -> None:
    """The script is run by a real bash, with a program in place of the training that tells its arguments."""
    place = f"/data/{name}"
    tell = tmp_path / "tell.py"
    tell.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['NAME']]))")
    job = Job("expert 0", (sys.executable, str(tell), "train", place), env={"NAME": name})
    text = slurm.script(job, Site(place, Path(place) / "launch", tmp_path))
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, check=True)
    assert yaml.safe_load(done.stdout) == [["train", place], name]
    assert options(text)["--output"].replace("%%", "%") == f"{place}/launch/expert-0.out"


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), time.sleep(0.5), sys.exit({code})))
print("ready", flush=True)
time.sleep(20)
"""


def stand_in(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("number", "code", "requeued"),
    [("USR1", 75, True), ("TERM", 75, False), ("USR1", 2, False), ("USR1", 0, False), ("USR1", 143, True)],
)
@pytest.mark.parametrize("saves", [True, False])
def test_a_warning_is_answered(number: str, code: int, requeued: bool, saves: bool, tmp_path: Path) -> None:
    """A real bash; `scontrol` is a stand-in that writes down what it was asked."""
    stand_in(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/asked')
    job = Job("expert 0", (sys.executable, "-S", "-c", CHILD.format(code=code)), saves=saves)
    place = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
    call = ["bash", "-c", slurm.script(job, SITE)]
    process = subprocess.Popen(call, env=place, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        subprocess.run(["kill", f"-{number}", str(process.pid)], check=True)
        assert process.stdout.readline() == "told\n"
        assert process.wait(15) == code
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 42\n"


@pytest.mark.parametrize(
    ("end", "breaks", "saves", "requeued"),
    [
        ("os.abort()", 0, True, True),
        ("os.kill(os.getpid(), 9)", 4, True, True),
        ("sys.exit(1)", 4, True, True),
        ("sys.exit(1)", 5, True, False),
        ("sys.exit(1)", 0, False, False),
        ("sys.exit(2)", 0, True, False),
        ("sys.exit(73)", 0, True, False),
    ],
)
def test_what_broke_starts_again(end: str, breaks: int, saves: bool, requeued: bool, tmp_path: Path) -> None:
    stand_in(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/asked')
    job = Job("expert 0", (sys.executable, "-S", "-c", f"import os, sys; {end}"), saves=saves)
    # However often Slurm restarted it, as at time limits, and whatever an earlier job wrote into this log.
    place = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "9"}
    log = tmp_path / "log"
    log.write_text("job 42 broke with code 1\n" * breaks + "job 41 broke with code 1\n" * 5)
    with log.open("a") as prints:
        done = subprocess.run(["bash", "-c", slurm.script(job, SITE)], env=place, stdout=prints, check=False)
    assert done.returncode != 0 and (tmp_path / "asked").exists() == requeued


def test_needs_become_dependencies_and_every_script_is_shown() -> None:
    needs = {"seed": (), "expert 0": ("seed",), "router": ()}
    text = slurm.show([Job(name, train("/c"), needs=before) for name, before in needs.items()], SITE)
    calls = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("$ ")]
    after = ["--dependency=afterok:JOB_OF_seed", "--kill-on-invalid-dep=yes"]
    plain = ["sbatch", "--parsable", "<<END"]
    assert calls == [plain, ["sbatch", "--parsable", *after, "<<END"], plain]
    assert text.count("#!/bin/bash") == 3


def test_a_slurm_that_says_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name in ("squeue", "sbatch"):
        stand_in(tmp_path, name, 'cat > /dev/null; echo "$BANNER"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("BANNER", "welcome to 9 nodes\n12;east")
    site = Site(URL, tmp_path, tmp_path)
    slurm.submit([Job("router", train(URL))], site)
    assert "submitted as job 12," in capsys.readouterr().out
    monkeypatch.setenv("BANNER", "welcome")
    with pytest.raises(AtollError, match=r"router: sbatch gives no number of a job \('welcome'\)"):
        slurm.submit([Job("router", train(URL))], site)


# SkyPilot.


def test_what_a_job_asks_of_skypilot() -> None:
    where: dict[str, Any] = {"cloud": "aws", "region": "us-east-1", "image": "docker:me/atoll", "disk": 500}
    asked = SkyConfig(accelerators="H100:8", workdir=".", secrets=("KEY",), **where)
    place = Placement(memory_gb=100, sky=asked)
    job = Job("expert 0", train(URL), cpus=64, gpus=8, processes=8, memory=10**11, place=place)
    made: dict[str, Any] = yaml.safe_load(sky.files([job], URL)["expert-0.yaml"])
    expected: dict[str, Any] = {"cpus": "64+", "memory": "100+", "accelerators": "H100:8", "use_spot": True}
    expected |= {"infra": "aws/us-east-1", "image_id": "docker:me/atoll", "disk_size": 500}
    expected |= {"job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}}
    assert made["resources"] == expected
    assert made["name"] == job.label(URL) and made["num_nodes"] == 1 and made["workdir"] == str(Path.cwd())
    assert "secrets" not in made and made["envs"]["OMP_NUM_THREADS"] == "8"
    assert "file_mounts" not in made
    assert made["setup"].splitlines() == ["set -e", "pip install ."]
    words = shlex.split(made["run"])
    assert words[:4] == ["exec", sys.executable, "-m", "atoll.launch.torchrun"] and "--standalone" in words
    assert words[-5:] == ["train", "expert", URL, "--expert", "0"]


def test_nodes_of_a_managed_job_meet_at_the_first() -> None:
    asked = SkyConfig(accelerators="A100:8", setup=())
    job = Job("expert 0", train(URL), gpus=8, processes=8, place=Placement(nodes=2, sky=asked))
    made = yaml.safe_load(sky.files([job], URL)["expert-0.yaml"])
    parses(made["run"])
    assert made["num_nodes"] == 2 and made["setup"] == "set -e\n"  # its image has Atoll
    assert '--rdzv-endpoint "$host:29500"' in made["run"] and "SKYPILOT_NODE_IPS" in made["run"]


def launched(jobs: list[Job], folder: Path, body: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script by a real sh; `sky` is a stand-in that writes down what it was asked."""
    sky.submit(jobs, Site(URL, folder, folder / "an out"))
    stand_in(folder, "sky", f'echo "$@" >> {folder}/asked\n{body}')
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    argv = ["sh", str(folder / "an out/launch.sh")]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    return done, (folder / "asked").read_text().splitlines()


def test_the_script_launches_what_is_not_queued_in_the_order_of_needs(tmp_path: Path) -> None:
    asked = Placement(sky=SkyConfig(workdir=".", secrets=("KEY",)))
    needs = {"seed": (), "expert 0": ("seed",), "expert 1": ("seed",), "router": ()}
    jobs = [
        Job(name, train(URL), gpus=0, needs=needs[name], place=asked if "0" in name else CODE)
        for name in needs
    ]
    seed, one, two, router = (job.label(URL) for job in jobs)
    # A name may begin like another: expert 10 is queued, expert 1 is not.
    queued = f"{two}0 RUNNING 8 {router}"
    done, calls = launched(jobs, tmp_path, f'[ "$2" != queue ] || echo "7 {queued} RUNNING"')
    assert done.returncode == 0 and calls == [
        "jobs queue --skip-finished",
        f"jobs launch --name {seed} --detach-run --yes seed.yaml",
        f"jobs logs --name {seed}",
        f"jobs launch --name {one} --detach-run --yes --secret KEY expert-0.yaml",
        f"jobs launch --name {two} --detach-run --yes expert-1.yaml",
    ]
    assert done.stdout.count("is queued already") == 1 and f"{router} is queued already" in done.stdout
    assert f"atoll assemble {URL}" in done.stdout


@pytest.mark.parametrize("after_any", [False, True])
def test_a_job_that_looks_itself_starts_though_one_before_it_failed(after_any: bool, tmp_path: Path) -> None:
    jobs = [Job("data 1", train(URL), gpus=0, place=CODE)]
    jobs += [Job("partition", train(URL), gpus=0, needs=("data 1",), after_any=after_any, place=CODE)]
    done, calls = launched(jobs, tmp_path, '[ "$2" != logs ]')
    assert any("partition.yaml" in call for call in calls) == (done.returncode == 0) == after_any


@pytest.mark.parametrize("name", [n for n in HOSTILE if n != "plain"])
def test_a_hostile_url_stays_one_word(name: str) -> None:
    url = f"s3://bucket/{name}"
    texts = sky.files([Job("router", ("echo", "train", url), gpus=0, place=CODE)], url)
    done = subprocess.run(
        ["sh", "-c", yaml.safe_load(texts["router.yaml"])["run"]], capture_output=True, check=True
    )
    assert done.stdout.decode() == f"train {url}\n"
    parses(texts["launch.sh"])


def test_what_no_cloud_can_see_or_give_is_refused() -> None:
    with pytest.raises(AtollError, match="SkyPilot's nodes cannot see /data/c: copy it to a bucket"):
        sky.files([Job("router", train("/data/c"))], "/data/c")
    assert [sky.gpus(text) for text in (None, "A100", "H100:8", "{A100:4, H100:4}")] == [None, 1, 8, None]
    asked = Placement(sky=SkyConfig(accelerators="H100:8"))
    with pytest.raises(ConfigError, match=r"launch.gpus 4 and launch.sky.accelerators 'H100:8' do not agree"):
        sky.files([Job("router", train(URL), gpus=4, place=asked)], URL)


def test_nodes_install_the_atoll_that_launches(tmp_path: Path) -> None:
    """The wheel of this checkout, installed for itself, runs; its versions fit those that run here."""
    sky.submit([Job("router", train(URL), gpus=0)], Site(URL, tmp_path, tmp_path / "files"))
    made = yaml.safe_load((tmp_path / "files/router.yaml").read_text())
    files = {Path(name).name: tmp_path / "files" / source for name, source in made["file_mounts"].items()}
    wheel, versions = (files[name] for name in (sky.WHEEL, sky.VERSIONS))
    assert made["setup"] == f"set -e\npip install -c {sky.REMOTE}/{versions.name} {sky.REMOTE}/{wheel.name}\n"
    pins = versions.read_text().splitlines()
    assert f"click=={metadata.version('click')}" in pins and not [pin for pin in pins if "+" in pin]
    assert [pin for pin in pins if pin.startswith("atoll==")] == []

    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, tmp_path / "site", wheel], check=True, capture_output=True)
    child = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    show = [sys.executable, tmp_path / "site/bin/atoll", "--version"]
    done = subprocess.run(show, env=child, capture_output=True, text=True, check=True)
    assert atoll.__version__ in done.stdout
    code = "import atoll.launch.sky as m; print(m.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=child, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "site"))
    package = Path(atoll.__file__).parent
    names = {path.relative_to(package) for path in package.rglob("*.*") if "__pycache__" not in path.parts}
    assert [name for name in names if not (tmp_path / "site/atoll" / name).exists()] == []


# Settings.


def test_a_run_says_itself_what_it_does_differently() -> None:
    config = LaunchConfig.parse(
        {
            "on": "slurm",
            "gpus": 4,
            "env": {"A": "1", "B": "2"},
            "slurm": {"partition": "gpu", "lines": ["--nice"], "hours": 4},
            "islands": {1: {"on": "sky", "gpus": 1, "env": {"B": "3"}, "slurm": {"partition": "big"}}},
            "router": {"slurm": {"lines": []}},
        },
        "here",
    )
    one, other, router = config.of("expert", 1), config.of("expert", 0), config.of("router")
    assert (one.on, one.gpus, one.env, one.slurm.partition) == ("sky", 1, {"A": "1", "B": "3"}, "big")
    assert one.slurm.lines == ("--nice",) and one.slurm.hours == 4
    assert (other.on, other.gpus, other.slurm.partition) == ("slurm", 4, "gpu")
    assert router.slurm.lines == () and router.slurm.partition == "gpu"
    assert config.of("assemble").gpus is None and config.of("assemble").slurm.partition == "gpu"
    targets = [config.target("expert", n, on) for n in (0, 1) for on in (None, "local")]
    assert targets == ["slurm", "local", "sky", "sky"]
    assert LaunchConfig().target("expert", 0, None) == "local"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"on": "a cloud"}, "on"),
        ({"slurm": {"partition": "a\n#SBATCH --exclusive"}}, "slurm.partition"),
        ({"slurm": {"setup": ["a\nb"]}}, "setup"),
        ({"env": {"A B": "1"}}, "env"),
        ({"islands": {"0": {"nodes": 0}}}, "nodes"),
        ({"gpus": 2, "processes": 4}, "4 processes for 2 GPUs"),
    ],
)
def test_wrong_settings_are_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LaunchConfig.parse(tree, "campaign.yaml")
