"""From a campaign to jobs, and from jobs to this machine, Slurm, Ray or SkyPilot."""

import math
import pkgutil
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, cast

from atoll import launch
from atoll.base.console import say
from atoll.base.cores import cores
from atoll.base.errors import ConfigError, nearest
from atoll.base.text import duration, many
from atoll.campaign.folder import Campaign, sets_loose
from atoll.campaign.roles import BESIDE
from atoll.campaign.runs import RunPlan, partition_finished, runs_of
from atoll.campaign.settings.launch import Placement, Target
from atoll.launch import local
from atoll.launch.job import Job, Launcher, Site, command
from atoll.store.lease import read_heartbeat

UNSEEN = ("launch.", "sampling.", "compare.")
"""Settings that no training run looks at."""
BASE_MEMORY = 1_500_000_000
"""Bytes of a process before its network: torch, diffusers, mapped data."""
LARGE = 12 * 384**2
"""Depth times width squared of a network that is large for CPUs: size S."""
STATE_BYTES = 28
"""Bytes per parameter: weights, gradient, two moments, average, and a copy of two while saving."""


def launch_campaign(campaign: Campaign, on: Target | None, dry_run: bool, out: Path) -> None:
    """Prepare, train whatever is left where the settings say, and assemble.

    Runs on this machine and on Ray are waited for, others are submitted. `on` is the target of runs
    that name none of their own, `out` the folder for SkyPilot's files.
    """
    root = campaign.store.location
    # A wrong name, and what can never run, are told before hours of preparing.
    for run in runs_of(campaign.config):
        launcher(campaign.config.launch.target(*run, on))
    if not dry_run:
        _check(plan_jobs(campaign, on), _site(campaign, out))
    for line in [] if campaign.is_partitioned else campaign.config.large_states():
        say(line)
    # Data are made by jobs of a queue, by processes here that are waited for, or within this process.
    making = data_jobs(campaign, on)
    if making and launcher(making[0].target).WAITS:
        _submit(campaign, making, dry_run, out)
        making = []
    elif dry_run and not making and not campaign.is_partitioned:
        say("# first, on this machine: whatever is missing of the data set, then the partition")
    left = not all(run.published(campaign.store) for run in runs_of(campaign.config))
    if not dry_run and not making and (left or not partition_finished(campaign)):
        from atoll.campaign.initial import copy_initial_weights, pretrain_finished
        from atoll.campaign.partition import make_islands
        from atoll.campaign.prepare import prepare_data

        if not (campaign.is_partitioned or launcher(campaign.config.launch.target("data", None, on)).WAITS):
            say("the data set is made here, within this command; launch.data.workers=1 makes it with a job")
        workers = campaign.config.launch.data.workers  # of this machine, as jobs elsewhere are done by now
        words = _set_words(campaign)
        prepare_data(campaign, share=lambda stage: not workers or run_workers(workers, "data", stage, *words))
        make_islands(campaign)
        if (cuda := getattr(sys.modules.get("torch"), "cuda", None)) and cuda.is_initialized():
            cuda.empty_cache()  # encoders' memory: a run may start on this GPU
        if pretrain_finished(campaign):
            copy_initial_weights(campaign)  # it may have been stopped between its last step and this
    training = plan_jobs(campaign, on, tuple(job.name for job in making[-1:]))
    say(f"# {forecast(campaign, training)}" if dry_run else forecast(campaign, training))
    # Where nothing is said a queue gives no GPU, and this machine gives one if there is any.
    depth, heads, width = campaign.config.network.dimensions()
    if depth * (heads * width) ** 2 >= LARGE:
        without = {"local"} if local.visible_gpus() else set[str]()
        slow = [job for job in (*making, *training) if job.gpus is None and job.target not in without]
        fix = "set launch.gpus and launch.data.gpus, or launch.sky.accelerators, or launch where a GPU is"
        for job in slow[:1]:
            say(f"warning: {job.name} ({len(slow)} in all) would compute on CPUs: {fix}")

    # No queue knows of the jobs of another: what needs one of those waits for the next launch, and so does
    # what needs such a job itself.
    jobs, submitted, held = [*making, *training], dict[str, Target](), list[str]()
    names = {job.name for job in jobs}
    for job in jobs:
        away = [need for need in job.needs if need in names and submitted.get(need) != job.target]
        if away:
            wait = f"waits for {away[0]}, which trains elsewhere; launch again when that is finished"
            say(f"{job.name}: {wait}")
            held.append(job.name)
        else:
            submitted[job.name] = job.target
    ready = [job for job in jobs if job.name in submitted]
    _submit(campaign, ready, dry_run, out)

    # Assemble now if all parts are there, or say who does it and when.
    if "assemble" in submitted:
        return
    queued = [job.name for job in ready if job in training and not launcher(job.target).WAITS]
    missing = [name for name in (*queued, *held) if name not in BESIDE]
    again = f"atoll assemble {shlex.quote(root)}"
    if missing:
        say(f"{'# ' if dry_run else ''}when {', '.join(missing)} are finished: {again}")
    elif dry_run:
        say(f"$ {again}")
    else:
        from atoll.campaign.assemble import assemble

        assemble(campaign)


def forecast(campaign: Campaign, jobs: Sequence[Job]) -> str:
    """How many runs train at once, and how long all take at the speed of this campaign so far."""
    runs = [job for job in jobs if job.name != "assemble"]
    if not runs:
        return "training: finished already"
    speeds = list[float]()  # operations a second
    for run in runs_of(campaign.config):
        beat = read_heartbeat(campaign.store, f"{run.folder}/run")
        if beat is not None and beat.speed and campaign.store.exists(run.plan):
            plan = RunPlan.read(campaign.store, run.plan)
            speeds.append(beat.speed * plan.train_flops / (plan.steps * plan.batch))
    here = all(job.target == "local" for job in runs)
    places = max(1, local.at_once(runs)) if here else len(runs)  # what fits nowhere is refused later
    side_by_side = f"training: {many(len(runs), 'run')}, {places} at once{' on this machine' * here}"
    if not speeds or not all(job.work for job in runs):
        return f"{side_by_side}; atoll plan estimates the time on GPUs, atoll status measures it"
    work = max(max(job.work for job in runs), sum(job.work for job in runs) / places)
    return f"{side_by_side}, about {duration(work / median(speeds))} at the speed measured so far"


def _submit(campaign: Campaign, jobs: list[Job], dry_run: bool, out: Path) -> None:
    """Give jobs to their launchers, or show what that would do; those last that are waited for."""
    site = _site(campaign, out)
    if not dry_run:
        _check(jobs, site)  # all, before any of them is started anywhere
    for target in sorted({job.target for job in jobs}, key=lambda target: (launcher(target).WAITS, target)):
        own = [job for job in jobs if job.target == target]
        if dry_run:
            say(launcher(target).show(own, site))
        else:
            launcher(target).submit(own, site)


def _site(campaign: Campaign, out: Path) -> Site:
    root = campaign.store.location
    return Site(root, Path("launch").absolute() if "://" in root else Path(root) / "launch", out)


def _check(jobs: Sequence[Job], site: Site) -> None:
    for target in {job.target for job in jobs}:
        own = [job for job in jobs if job.target == target]
        getattr(launcher(target), "check", lambda *_: None)(own, site)


def data_jobs(campaign: Campaign, on: Target | None = None) -> list[Job]:
    """Jobs that make the data set, and one that cuts it; none if that is done, not asked for, or local."""
    config = campaign.config.launch
    target = config.target("data", None, on)
    if not config.data.workers or campaign.is_partitioned or target == "local":
        return []
    jobs, words = _stages(campaign, target, config.data.workers), ("partition", *_set_words(campaign))
    return [*jobs, _job("partition", words, config.of("data"), target, needs=(jobs[-1].name,), gpus=0)]


def _stages(campaign: Campaign, target: Target, count: int) -> list[Job]:
    place, jobs = campaign.config.launch.of("data"), list[Job]()
    steps = {} if campaign.has_dataset() else {"ingest": "ingest"}
    steps |= {} if campaign.config.data.captioner is None else {"captions": "caption"}
    steps["columns"] = "prepare"
    for name, stage in steps.items():
        needs = tuple(job.name for job in jobs[-1:])
        jobs += _sharded(name, ("data", stage, *_set_words(campaign)), place, target, count, needs)
    return jobs


def _set_words(campaign: Campaign) -> list[str]:
    # The campaign is not frozen yet, so these jobs have to be told all that the launch was told.
    sets = (setting for setting in campaign.overrides if not setting.startswith("launch."))
    return [campaign.store.location, *_options(sets)]


def _sharded(
    name: str, words: Sequence[str], place: Placement, target: Target, count: int, needs: tuple[str, ...] = ()
) -> list[Job]:
    # What a worker wrote is there, shard by shard: it has nothing to save.
    worker = replace(_job(name, words, place, target, needs=needs), saves=False, processes=1)
    workers = [replace(worker, count=count)] if launcher(target).ARRAYS else parts(worker, count)
    # A worker that fails is not missed: the job that follows writes what is missing, or says why not.
    last = replace(worker, name=f"{name} end", needs=tuple(job.name for job in workers), after_any=True)
    return [*workers, last]


def _options(settings: Iterable[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def parts(job: Job, count: int) -> list[Job]:
    """As many jobs of one data command, each with its part of the shards."""
    return [
        replace(job, name=f"{job.name} {number}", env={**job.env, "ATOLL_PART": f"{number}/{count}"})
        for number in range(1, count + 1)
    ]


def run_workers(count: int, *words: str, on: Target = "local", campaign: Campaign | None = None) -> bool:
    """Run the parts of one sharded command where `on` says, as the campaign's `launch.data` places them.

    Those of this machine share its cores and GPUs, whatever that says. Returns whether all have ended,
    so that the caller puts their work together; where they only wait in a queue, a job after them does that.
    Words name files as nodes see them.
    """
    name = " ".join(takewhile(str.isalpha, words))
    if campaign is None or on == "local":
        workers = parts(Job(name, command(*words), cpus=max(1, cores() // count), gpus=0), count)
        if gpus := local.visible_gpus():  # more workers than GPUs share them
            names = [{local.DEVICES: local.device_name(n % gpus)} for n in range(count)]
            workers = [replace(w, env={**w.env, **name}) for w, name in zip(workers, names, strict=True)]
        local.submit(workers, Site("", Path(), Path()))
        return True
    if name == "data prepare" and not launcher(on).WAITS:
        jobs = _stages(campaign, on, count)
    else:
        jobs = _sharded(name, words, campaign.config.launch.of("data"), on, count)
    _submit(campaign, jobs[:-1] if launcher(on).WAITS else jobs, False, Path("launch", jobs[0].slug))
    return launcher(on).WAITS


def launcher(name: str) -> Launcher:
    """Find a launcher by its name: the module of this package that is called so and has `submit`."""
    names = {module.name for module in pkgutil.iter_modules(launch.__path__)} - {"job", "submit", "torchrun"}
    if name not in names:
        raise ConfigError(f"launch.on: there is no launcher {name!r}", nearest(name, names))
    module = import_module(f"atoll.launch.{name}")
    members = ("PYTHON", "WAITS", "ASSEMBLES", "ARRAYS", "show", "submit")
    if missing := [member for member in members if not hasattr(module, member)]:
        raise ConfigError(f"launcher {name!r} has no {missing[0]}", "see Launcher in atoll/launch/job.py")
    return cast(Launcher, module)


def plan_jobs(campaign: Campaign, on: Target | None = None, first: tuple[str, ...] = ()) -> list[Job]:
    """Jobs of all runs that are not finished, every job after those that it needs; the assembly last.

    `first` are names of jobs that all of them need.
    """
    config, store, jobs = campaign.config, campaign.store, list[Job]()
    left = [run for run in runs_of(config) if not run.published(store)]
    plans = {run: RunPlan.read(store, run.plan) for run in runs_of(config) if store.exists(run.plan)}
    encoder = 0
    if left and config.encodes_text:
        from atoll.encoders.text import text_parameters

        encoder = 4 * (text_parameters(config.data.text_encoder) or 0)
    # Loose settings are not frozen, so the runs would not know of them.
    loose = [setting for setting in campaign.overrides if sets_loose(setting)]
    sets = _options(setting for setting in loose if not setting.startswith(UNSEEN))
    for run in left:
        place, target = config.launch.of(*run), config.launch.target(*run, on)
        options = ["--expert", str(run.expert)] if run.expert is not None else []
        # Elsewhere a job may come back before the lease of a holder that was lost has expired.
        options += [] if target == "local" else ["--wait"]
        memory, work = BASE_MEMORY, 0.0
        if (plan := plans.get(run)) is not None:
            beat = read_heartbeat(store, f"{run.folder}/run")
            memory = BASE_MEMORY + STATE_BYTES * plan.parameters + 4 * plan.frozen + encoder
            work = plan.train_flops * (1 - min(1.0, ((beat and beat.step) or 0) / max(1, plan.steps)))
            if run.kind.task == "distill" and (student := config.student):
                # Its teachers and their answers, as if one process held all.
                experts = [plans[other] for other in plans if other.expert is not None]
                memory += 4 * sum(one.parameters for one in experts)
                memory += 4 * max((one.frozen for one in experts), default=0)
                kept = student.kept(plan.steps) * (student.reuse > 1)
                memory += 4 * kept * plan.batch * plan.shape.channels * math.prod(plan.shape.largest)
        needs = first + tuple(other.name for other in left if other.role in run.kind.needs(config))
        words = ("train", run.role, store.location, *options, *sets)
        threads = config.training(*run).threads
        job = _job(run.name, words, place, target, threads, memory, needs=needs, work=work)
        if plan is not None and (ranks := job.place.nodes * job.processes) > plan.batch:
            what = f"{run.name} asks for {ranks} processes, and its steps have {plan.batch} samples"
            raise ConfigError(what, "give it fewer GPUs, processes or nodes in launch")
        jobs.append(job)

    # Here the launch assembles by itself. Of several queues none could say when all are finished.
    assembled = [job for job in jobs if job.name not in BESIDE]
    targets = {job.target for job in assembled}
    target = targets.pop() if len(targets) == 1 else "local"
    if launcher(target).ASSEMBLES and config.launch.target("assemble", None, target) == target:
        needs = tuple(job.name for job in assembled)
        words = ("assemble", store.location, *_options(s for s in loose if not s.startswith("launch.")))
        jobs.append(_job("assemble", words, config.launch.of("assemble"), target, needs=needs, gpus=0))
    return jobs


def _job(
    name: str,
    words: Sequence[str],
    place: Placement,
    target: Target,
    threads: int = 1,
    memory: int = BASE_MEMORY,
    gpus: int | None = None,
    **options: Any,
) -> Job:
    """A job; `threads` and `memory` (bytes) are those of one process."""
    where = launcher(target)
    if gpus is None:
        gpus = getattr(where, "gpus_of", lambda place: place.gpus)(place)
    else:
        place = place.model_copy(update={"sky": place.sky.model_copy(update={"accelerators": None})})
    # One process for each GPU, as torchrun would have it; without any GPU there is one process.
    processes = place.processes or max(1, gpus or 1)
    memory = memory * processes if place.memory_gb is None else round(place.memory_gb * 10**9)
    return Job(
        name,
        command(*words, python=place.python or where.PYTHON),
        target=target,
        cpus=place.cpus or threads * processes,
        memory=memory,
        gpus=gpus,
        processes=processes,
        env=place.env,
        place=place,
        **options,
    )
