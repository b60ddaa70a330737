"""Training runs as SkyPilot managed jobs: a YAML file per run, and one script that launches them all."""

import re
import shlex
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import yaml

from atoll.base.console import say
from atoll.base.errors import INTERRUPTED, AtollError, ConfigError
from atoll.base.format import code_version
from atoll.base.safe_parse import expanded
from atoll.campaign.settings.launch import Placement
from atoll.launch.job import Job, Site

PYTHON, WAITS, ASSEMBLES, ARRAYS = "python", False, False, False

SCRIPT = "launch.sh"
WHEEL, VERSIONS = f"atoll-{code_version()}-py3-none-any.whl", "constraints.txt"
REMOTE = "~/atoll-wheel"
"""Folder of both on a node."""
RESTARTS = 3  # after errors that are not the loss of a node; a run that cannot go on is not repeated for ever
PORT = 29500  # where the processes of several nodes meet: a managed job has its nodes for itself


def gpus_of(place: Placement) -> int | None:
    """GPUs of a node: what is set, else those of the accelerators."""
    return gpus(place.sky.accelerators) if place.gpus is None else place.gpus


def check(jobs: Sequence[Job], site: Site) -> None:
    """Refuse a campaign that no node can see, and GPUs that are said in two ways."""
    files(jobs, site.campaign)


def show(jobs: Sequence[Job], site: Site) -> str:
    """The texts that `submit` would write, each under its name."""
    return "\n".join(f"# {name}\n{text}" for name, text in files(jobs, site.campaign).items())


def submit(jobs: Sequence[Job], site: Site) -> None:
    """Write the files and say how to launch them."""
    folder, script = site.files, site.files / SCRIPT
    texts = files(jobs, site.campaign)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
        if any(_sends_wheel(job) for job in jobs):
            write_wheel(folder)
    except OSError as error:
        raise AtollError(f"cannot write {folder}: {error.strerror}", "give another --out") from None
    say(f"wrote {script}; where sky is installed: sh {shlex.quote(str(script))}")


def files(jobs: Sequence[Job], campaign: str) -> dict[str, str]:
    """Names and texts of everything that `submit` writes.

    `AtollError` if the campaign is a folder of this machine, which no node of a cloud can see.
    """
    if "://" not in campaign:
        fix = "copy it to a bucket and launch from its URL, such as s3://bucket/campaign"
        raise AtollError(f"SkyPilot's nodes cannot see {campaign}", fix)
    texts: dict[str, str] = {}
    for job in jobs:
        count = 0 if job.place.sky.accelerators is None else gpus(job.place.sky.accelerators)
        if count is not None and count != (job.gpus or 0):
            conflict = f"launch.gpus {job.gpus} and launch.sky.accelerators {job.place.sky.accelerators!r}"
            raise ConfigError(f"{job.name}: {conflict} do not agree", "set only launch.sky.accelerators")
        task = _task(job, campaign)
        texts[f"{job.slug}.yaml"] = yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=1000)

    # SkyPilot knows no dependencies, so the script waits for the jobs that the next one needs.
    lines = ["#!/bin/sh", "# Launches the runs of a campaign; run again, it leaves out what is queued."]
    lines += ["set -eu", 'cd "$(dirname "$0")"', "queued=$(sky jobs queue --skip-finished)"]
    lines += ['queued=" $(printf "%s" "$queued" | tr -s "[:space:]" " ") "']  # words, each between spaces
    waited: set[str] = set()
    names = {job.name: job.label(campaign) for job in jobs}
    for job in jobs:
        for need in (n for n in job.needs if n in names and n not in waited):
            lines.append(f"sky jobs logs --name {names[need]}{' || true' * job.after_any}  # until it ends")
            waited.add(need)
        name = names[job.name]
        # Secrets are not in the YAML: there, one without a value is looked up at SkyPilot's server.
        secrets = "".join(f" --secret {secret}" for secret in job.place.sky.secrets)
        launch = f"sky jobs launch --name {name} --detach-run --yes{secrets} {job.slug}.yaml"
        # With the spaces around it: `expert-1` is also the beginning of `expert-10`.
        lines += ['case "$queued" in', f'    *" {name} "*) echo {name} is queued already ;;']
        lines += [f"    *) {launch} ;;", "esac"]
    advice = f"when all have SUCCEEDED in sky jobs queue: atoll assemble {shlex.quote(campaign)}"
    return {**texts, SCRIPT: "\n".join([*lines, f"echo {shlex.quote(advice)}"]) + "\n"}


def _task(job: Job, campaign: str) -> dict[str, Any]:
    # Nothing of the campaign is mounted or copied: the run reads and writes the store at its URL by itself.
    sky, setup = job.place.sky, job.place.sky.setup
    if setup is None:
        file = f"{REMOTE}/{WHEEL}"
        setup = (f"pip install -c {REMOTE}/{VERSIONS} {file}",) if _sends_wheel(job) else ("pip install .",)
    infra = f"{sky.cloud or '*'}/{sky.region}" if sky.region else sky.cloud
    resources: dict[str, Any] = {
        "use_spot": sky.use_spot,
        "job_recovery": {"max_restarts_on_errors": RESTARTS, "recover_on_exit_codes": [INTERRUPTED]},
        # With a plus: an exact number would rule out most machines.
        "cpus": f"{job.cpus}+",
        "accelerators": sky.accelerators,
        "memory": f"{-(-job.memory // 10**9)}+" if job.place.memory_gb else None,
        "infra": infra,
        "image_id": sky.image,
        "disk_size": sky.disk,
    }
    meet = 'host=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n' if job.place.nodes > 1 else ""
    task: dict[str, Any] = {
        "name": job.label(campaign),
        "resources": {key: value for key, value in resources.items() if value is not None},
        "num_nodes": job.place.nodes,
        # Absolute, as the script changes folders.
        "workdir": None if sky.workdir is None else str(expanded(sky.workdir).absolute()),
        "envs": dict(job.environment),
        "file_mounts": {f"{REMOTE}/{n}": n for n in (WHEEL, VERSIONS)} if _sends_wheel(job) else None,
        "setup": "\n".join(("set -e", *setup)) + "\n",
        # With exec, since a shell in between would not pass a signal on.
        "run": f"{meet}exec {job.shell('$host', str(PORT))}\n",
    }
    return {key: value for key, value in task.items() if value is not None}


def _sends_wheel(job: Job) -> bool:
    return job.place.sky.setup is None and job.place.sky.workdir is None


def write_wheel(folder: Path) -> None:
    """Write this installation as a wheel, with the versions of all that is installed beside it.

    It is made of the files that run here, a checkout's or a wheel's, without build, registry or compiler.
    """
    package = Path(__file__).parents[1]
    files = {
        f"atoll/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and path.suffix not in (".pyc", ".pyo")
    }
    try:
        own = metadata.distribution("atoll")
    except metadata.PackageNotFoundError:
        raise AtollError("this Atoll is not installed", "install its checkout: pip install -e .") from None
    about = f"atoll-{code_version()}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        files[f"{about}/{name}"] = (own.read_text(name) or "").encode()
    files[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    hashes = [urlsafe_b64encode(sha256(data).digest()).decode().rstrip("=") for data in files.values()]
    rows = [f"{name},sha256={hash_},{len(files[name])}" for name, hash_ in zip(files, hashes, strict=True)]
    files[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,\n"]).encode()
    with ZipFile(folder / WHEEL, "w", ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # Of a fixed date: the same files, the same wheel.
            archive.writestr(ZipInfo(name), data, ZIP_DEFLATED)
    # Without the part after a plus: it names a build, for CPUs for example, and a node needs its own.
    pins = {d.name: d.version.partition("+")[0] for d in metadata.distributions() if d.name != "atoll"}
    (folder / VERSIONS).write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))


def gpus(accelerators: str | None) -> int | None:
    """GPUs of a node: 4 for `A100:4`, 1 for `A100`; None if nothing or a choice of several is asked for."""
    match = re.fullmatch(r"[^:{}\[\],]+(?::(\d+))?", accelerators or "")
    return int(match[1] or 1) if match else None
