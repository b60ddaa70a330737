"""From a campaign to jobs, and from jobs to this machine, Slurm or SkyPilot."""

import pkgutil
import shlex
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import cast

from atoll import launch
from atoll.base.console import say
from atoll.base.errors import ConfigError, nearest
from atoll.base.plain import expanded
from atoll.base.threads import cores
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign, sets_loose
from atoll.campaign.prepare import prepare
from atoll.campaign.pretrain import hand_over, pretrain_finished
from atoll.campaign.runs import BESIDE, RUNS, Run, RunPlan, experts_of, runs_of
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.launch import Placement, Target
from atoll.encoders.text import text_parameters
from atoll.launch import local
from atoll.launch.job import Job, Launcher, Site, command
from atoll.model.expert import published

_OWN = ("launch.", "sampling.", "compare.")  # settings that no training run looks at
BASE_MEMORY = 1_500_000_000  # bytes of a process before its network: torch, diffusers, mapped data
STATE_BYTES = 28  # per parameter: weights, gradient, two moments, average, and a copy of two while saving


@dataclass(frozen=True)
class Placed:
    """A job and its target."""

    job: Job
    target: Target


def launch_campaign(campaign: Campaign, on: Target | None, dry_run: bool, out: Path) -> None:
    """Prepare, train whatever is left where the settings say, and assemble.

    Runs on this machine are waited for; those of Slurm and SkyPilot are handed over.

    Args:
        campaign: the campaign.
        on: target of runs that name none of their own.
        dry_run: print what would run and change nothing.
        out: folder for SkyPilot's files.

    Raises:
        AtollError: a target is not there or refuses a job, or a run on this machine failed.
    """
    for run in runs_of(campaign.config):
        launcher(campaign.config.launch.target(*run, on))  # a wrong name is told before hours of preparing
    making = data_jobs(campaign, on)
    if making and launcher(making[0].target).WAITS:
        _do(campaign, making, dry_run, out)
        making = []
    elif dry_run and not making and not campaign.is_partitioned:
        say("# first, on this machine: whatever is missing of the data set, then the partition")
    if not dry_run and not making:
        prepare(campaign)
        if pretrain_finished(campaign):
            hand_over(campaign)  # it may have been stopped between its last step and this
    placed = plan_jobs(campaign, on, tuple(one.job.name for one in making[-1:]))
    if not placed:
        say("training: finished already")
    ready, held = _hold_back([*making, *placed])
    for one, need in held:
        say(f"{one.job.name}: waits for {need}, which trains elsewhere; launch again when that is finished")
    _do(campaign, ready, dry_run, out)
    _finish(campaign, [one for one in ready if one in placed], [one.job.name for one, _ in held], dry_run)


def _do(campaign: Campaign, placed: list[Placed], dry_run: bool, out: Path) -> None:
    """Hand jobs over to their launchers, or show what that would do."""
    site = Site(campaign.store.location, _output(campaign), out)
    jobs = {target: [one.job for one in placed if one.target == target] for target in _targets(placed)}
    for target in () if dry_run else jobs:
        launcher(target).check(jobs[target], site)
    for target in jobs:
        if dry_run:
            say(launcher(target).show(jobs[target], site))
        else:
            launcher(target).hand_over(jobs[target], site)


def data_jobs(campaign: Campaign, on: Target | None = None) -> list[Placed]:
    """Jobs that make the data set, and one that cuts it; none if that is done, or not asked for.

    Several workers write the shards of the data set, each its part, and a job after them finishes it; then
    the same for its columns.
    """
    launch = campaign.config.launch
    if not launch.data.workers or campaign.is_partitioned:
        return []
    place, target, count = launch.of("data"), launch.target("data", None, on), launch.data.workers
    python = place.python or launcher(target).PYTHON
    gpus, arrays = launcher(target).gpus_of(place), launcher(target).ARRAYS
    # The campaign is not frozen yet, so these jobs have to be told all that the launch was told.
    told = [part for one in campaign.overrides if not one.startswith("launch.") for part in ("--set", one)]
    jobs, needs = list[Job](), tuple[str, ...]()
    steps = {"columns": "prepare"} if campaign.has_dataset() else {"ingest": "ingest", "columns": "prepare"}
    for name, stage in steps.items():
        argv = command("data", stage, campaign.store.location, *told, python=python)
        # What a worker wrote is there, shard by shard: it has nothing to save.
        worker = replace(_job(name, argv, place, needs=needs, gpus=gpus), saves=False)
        workers = [replace(worker, count=count)] if arrays else parts(worker, count)
        # A worker that fails is not missed: the job that follows writes what is missing, or says why not.
        last = replace(worker, name=f"{name} end", needs=tuple(job.name for job in workers), after_any=True)
        jobs += [*workers, last]
        needs = (last.name,)
    cut = command("partition", campaign.store.location, *told, python=python)
    jobs.append(_job("partition", cut, place, needs=needs, gpus=0))
    return [Placed(job, target) for job in jobs]


def parts(job: Job, count: int) -> list[Job]:
    """As many jobs of one data command, each with its part of the shards."""
    return [
        replace(job, name=f"{job.name} {number}", env={**job.env, "ATOLL_PART": f"{number}/{count}"})
        for number in range(1, count + 1)
    ]


def run_workers(count: int, *words: str) -> None:
    """Run the parts of one data command as processes of this machine, which share its cores and GPUs."""
    worker = Job("worker", command(*words), cpus=max(1, cores() // count))
    local.hand_over(parts(worker, count), Site("", Path(), Path()))


def launcher(name: str) -> Launcher:
    """Find a launcher by its name: the module of this package that is called so and has `hand_over`."""
    names = {module.name for module in pkgutil.iter_modules(launch.__path__)}
    module = import_module(f"atoll.launch.{name}") if name in names else None
    others = sorted(names - {"job", "submit", "torchrun"})
    if module is None or name not in others:
        raise ConfigError(f"launch.on: there is no launcher {name!r}", nearest(name, others))
    members = ("PYTHON", "WAITS", "ASSEMBLES", "ARRAYS", "gpus_of", "check", "show", "hand_over")
    if missing := [member for member in members if not hasattr(module, member)]:
        raise ConfigError(f"launcher {name!r} has no {missing[0]}", "see Launcher in atoll/launch/job.py")
    return cast(Launcher, module)


def _targets(placed: list[Placed]) -> list[Target]:
    """Targets that have jobs, those last that are waited for."""
    return sorted({one.target for one in placed}, key=lambda target: (launcher(target).WAITS, target))


def plan_jobs(campaign: Campaign, on: Target | None = None, first: tuple[str, ...] = ()) -> list[Placed]:
    """Jobs of all runs that are not finished, every job after those that it needs; the assembly last.

    `first` are names of jobs that all of them need.
    """
    left = [run for run in runs_of(campaign.config) if not published(campaign.store, run.network)]
    placed = [_run(campaign, run, on, first + _needs(campaign.config, run.role, left)) for run in left]
    parts = [one for one in placed if one.job.name not in BESIDE]
    # On this machine the launch assembles by itself.
    targets = {one.target for one in parts}
    if len(targets) == 1 and launcher(target := targets.pop()).ASSEMBLES:
        place = campaign.config.launch.of("assemble")
        argv = command("assemble", campaign.store.location, python=place.python)
        needs = tuple(one.job.name for one in parts)
        placed.append(Placed(_job("assemble", argv, place, needs=needs, gpus=0), target))
    return placed


def _needs(config: CampaignConfig, role: str, left: list[Run]) -> tuple[str, ...]:
    """Names of the jobs that a run waits for, of those that are left."""
    wanted = RUNS[role].needs(config)
    return tuple(run.name for run in left if run.role in wanted)


def _run(campaign: Campaign, run: Run, on: Target | None, needs: tuple[str, ...]) -> Placed:
    config, role = campaign.config, run.role
    place, target = config.launch.of(*run), config.launch.target(*run, on)
    options = ["--expert", str(run.expert)] if run.expert is not None else []
    # Elsewhere a job may come back before the lease of a holder that was lost has expired.
    options += [] if launcher(target).WAITS else ["--wait"]
    # These are not frozen, so the run would not know of them.
    loose = [one for one in campaign.overrides if sets_loose(one) and not one.startswith(_OWN)]
    options += [part for one in loose for part in ("--set", one)]
    python = place.python or launcher(target).PYTHON
    argv = command("train", role, campaign.store.location, *options, python=python)
    gpus = launcher(target).gpus_of(place)
    memory, work = BASE_MEMORY, 0.0
    if campaign.store.exists(run.plan):
        plan = RunPlan.read(campaign.store, run.plan)
        memory, work = BASE_MEMORY + STATE_BYTES * plan.parameters, plan.train_flops
        memory += _teacher_bytes(campaign) if role == "student" else 0
        if config.encodes_text:
            memory += 4 * (text_parameters(config.data.text_encoder) or 0)
    threads = config.training(*run).threads
    return Placed(_job(run.name, argv, place, threads, memory, work, needs, gpus), target)


def _teacher_bytes(campaign: Campaign) -> int:
    """Memory of the networks that a student learns from, as if all were loaded."""
    runs = experts_of(campaign.config.partition.k)
    return sum(4 * RunPlan.read(campaign.store, run.plan).parameters for run in runs)


def _job(
    name: str,
    argv: tuple[str, ...],
    place: Placement,
    threads: int = 1,
    memory: int = BASE_MEMORY,
    work: float = 0.0,
    needs: tuple[str, ...] = (),
    gpus: int | None = None,
) -> Job:
    """A job; `threads` and `memory` (bytes) are those of one process."""
    processes = place.processes or max(1, gpus or 1)
    memory_set = None if place.memory_gb is None else round(place.memory_gb * 10**9)
    return Job(
        name,
        argv,
        cpus=place.cpus or threads * processes,
        memory=memory_set or memory * processes,
        work=work,
        gpus=gpus,
        processes=processes,
        nodes=place.nodes,
        needs=needs,
        env=place.env,
        memory_asked=memory_set is not None,
        slurm=place.slurm,
        sky=place.sky,
        options=place.options,
    )


def _hold_back(placed: list[Placed]) -> tuple[list[Placed], list[tuple[Placed, str]]]:
    """Jobs that can be handed over, and those that need one of another target or one that is held back."""
    kept: dict[str, Target] = {}
    held: list[tuple[Placed, str]] = []
    names = {one.job.name for one in placed}
    for one in placed:
        away = [n for n in one.job.needs if n in names and kept.get(n) != one.target]
        if away:
            held.append((one, away[0]))
        else:
            kept[one.job.name] = one.target
    return [one for one in placed if one.job.name in kept], held


def _finish(campaign: Campaign, placed: list[Placed], held: list[str], dry_run: bool) -> None:
    """Assemble now if all parts are there, or say who does it and when."""
    if any(one.job.name == "assemble" for one in placed):
        return
    away = [one.job.name for one in placed if not launcher(one.target).WAITS and one.job.name not in BESIDE]
    away += [name for name in held if name not in BESIDE]
    again = f"atoll assemble {shlex.quote(campaign.store.location)}"
    if away:
        say(f"{'# ' if dry_run else ''}when {', '.join(away)} are finished: {again}")
    elif dry_run:
        say(f"$ {again}")
    else:
        assemble(campaign)


def _output(campaign: Campaign) -> Path:
    named = campaign.config.launch.slurm.output
    if named is not None:
        return expanded(named).absolute()
    root = campaign.store.location
    return Path("launch").absolute() if "://" in root else Path(root) / "launch"
