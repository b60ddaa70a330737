"""Training runs as Slurm jobs: a script per run, read by sbatch from its input."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from atoll.base.console import say
from atoll.base.errors import INTERRUPTED, AtollError, ConfigError
from atoll.base.safe_parse import expanded
from atoll.launch.job import Job, Site

LEFT = f"{INTERRUPTED}|143"
"""Codes of what a TERM ended: a run that saved, and a process that did not catch it yet."""
BROKE = "1|13[4-9]"
"""Codes of a run that broke: an error nobody foresaw, an abort as of NCCL, a kill. 2 is a user's mistake."""
PYTHON, WAITS, ASSEMBLES, ARRAYS = None, False, True, True

# The warning comes as USR1 to the shell alone. Slurm's own TERM (scancel, requeue, preemption) is not
# answered with a requeue: what was cancelled stays so, and the others come back by themselves.
# A trap ends `wait` early; it is then asked again, and still knows the code of a process that has gone.
BODY = """\
told=0 ended= child=
leave() {{ told=$((told + 1)); [ -z "$child" ] || {tell}; }}
trap leave USR1
trap 'ended=1; leave' TERM
{command} &
child=$! code=127
while :; do
    before=$told
    wait "$child"; now=$?
    [ "$now" -eq 127 ] || code=$now
    [ "$before" -ne "$told" ] || break
done
again=
case "$code" in
    {left}) again=1 ;;
    {broke})
        # Counted in its own log: Slurm's count has the requeues at time limits and preemptions too.
        log=/proc/$$/fd/1 times=${{SLURM_RESTART_COUNT:-0}} note="job {me} broke with code"
        [ ! -f $log ] || times=$(grep -ac "$note" $log)
        [ "$times" -ge 5 ] || again=1
        echo "$note $code" ;;
esac
if [ -n "$again" ] && [ -z "$ended" ]; then
    echo "queued again to go on"
    scontrol requeue "{me}"
fi
exit "$code"
"""


def script(job: Job, site: Site) -> str:
    """The sbatch script of a run."""
    slurm = job.place.slurm
    # In --output sbatch takes a percent sign for a pattern; %a is the number within an array.
    log = str(_prints(job, site) / job.slug).replace("%", "%%") + "-%a" * (job.count > 1) + ".out"
    # A bare number is minutes, and 0 would be no limit. A run that is warned at its start would take no step.
    minutes = slurm.hours and max(1, round(60 * slurm.hours))
    options = [
        f"--job-name={job.label(site.campaign)}",
        _quoted(f"--output={log}"),
        # A job that is queued again writes to the same file, and would by default empty it.
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{min(slurm.warn, 30 * minutes) if minutes else slurm.warn}",
        f"--nodes={job.place.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}",
    ]
    options += [f"--array=1-{job.count}"] * (job.count > 1)
    if job.gpus:
        options.append(_quoted(f"--gres=gpu:{slurm.gpu_type + ':' if slurm.gpu_type else ''}{job.gpus}"))
    if job.place.memory_gb:
        # Rounded up: Slurm's M are of 2**20 bytes, and a job over its memory is killed.
        options.append(f"--mem={-(-job.memory // 2**20)}M")
    options += [f"--time={minutes}"] if minutes else []
    for name in ("partition", "constraint", "account", "qos"):
        if (value := getattr(slurm, name)) is not None:
            options.append(_quoted(f"--{name}={value}"))

    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *slurm.lines)), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    if job.count > 1:
        lines.append('export ATOLL_PART="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"')
    if slurm.setup:
        # Off again: BODY looks at exit codes by itself, and `wait` gives those of the run.
        lines += ["set -e", *slurm.setup, "set +e"]
    command, tell = job.shell(), 'kill -TERM "$child"'
    # SLURM_JOB_ID of an array's last task is the number of the whole array.
    me = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.count > 1 else "$SLURM_JOB_ID"
    # A stage that is no run has no checkpoint, and what broke it would break it again.
    broke = BROKE if job.saves else "none"
    if job.place.nodes > 1:
        # One torchrun on each node; they meet at this first one. srun dies of a TERM, so its steps are told.
        # Jobs of several runs may share a first node, so one port for all would clash.
        lines += ["host=$(hostname) port=$((20000 + SLURM_JOB_ID % 20000))"]
        tasks = f"--ntasks={job.place.nodes} --ntasks-per-node=1 --cpus-per-task={job.cpus}"
        # With --kill-on-bad-exit, the first node that leaves would end the others before they have saved.
        command = f"srun {tasks} --kill-on-bad-exit=0 {job.shell('$host', '$port')}"
        tell = f'scancel --signal=TERM "{me}"'
    return "\n".join(lines) + "\n" + BODY.format(tell=tell, command=command, left=LEFT, broke=broke, me=me)


def _prints(job: Job, site: Site) -> Path:
    return site.prints if job.place.slurm.output is None else expanded(job.place.slurm.output).absolute()


def _quoted(option: str) -> str:
    # sbatch reads options from a script in double quotes, in which a backslash keeps the next character.
    if not option.isprintable():
        raise ConfigError(f"{option!r} has a line break or control character", "use names without them")
    plain = re.fullmatch(r"[\w@%+=:,./&|*\[\]-]+", option)
    return option if plain else '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


def show(jobs: Sequence[Job], site: Site) -> str:
    """What `submit` would run, with every script."""
    numbers = {job.name: f"JOB_OF_{job.slug}" for job in jobs}
    return "\n".join(f"$ {shlex.join(_sbatch(job, numbers))} <<'END'\n{script(job, site)}END" for job in jobs)


def submit(jobs: Sequence[Job], site: Site) -> None:
    """Submit every job that is not queued already; needs become dependencies.

    `AtollError` if Slurm is not here or refuses a job; it names those that are submitted already.
    """
    # What Slurm knows already, waiting or running, is not submitted twice by a launch that is run again.
    names = {job.label(site.campaign): job.name for job in jobs}
    # %F is the number of a whole array, which a dependency names; %i would list its tasks.
    answer = _call(["squeue", "--noheader", "--format=%F %j", f"--name={','.join(names)}"], "the queue")
    found = re.findall(r"^(\d+) +(\S+) *$", answer, re.MULTILINE)
    queued = {names[name]: number for number, name in found if name in names}
    for folder in {_prints(job, site) for job in jobs}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AtollError(f"cannot make {folder}: {error.strerror}", "set launch.slurm.output") from None
    numbers = dict(queued)
    for job in jobs:
        if job.name in queued:
            say(f"{job.name}: queued already as job {queued[job.name]}")
            continue
        try:
            answer = _call(_sbatch(job, numbers), job.name, script(job, site))
            # --parsable prints NUMBER;CLUSTER where there are several clusters, and a site a greeting before.
            if (number := re.search(r"^\d+(?=;|\s*$)", answer, re.MULTILINE)) is None:
                raise AtollError(f"{job.name}: sbatch gives no number of a job ({answer.strip()[:80]!r})")
        # Some jobs may be in the queue by now, and a launch that ends must not leave them unnamed.
        except AtollError as error:
            new = [f"{name} (job {number})" for name, number in numbers.items() if name not in queued]
            done = f"; submitted before it: {', '.join(new)}" if new else ""
            fix = "correct launch in campaign.yaml and launch again: what is queued is not submitted twice"
            raise AtollError(error.what + done, error.fix or fix) from None
        numbers[job.name] = number[0]
        log = f"{_prints(job, site) / job.slug}{'-*' * (job.count > 1)}.out"
        say(f"{job.name}: submitted as job {numbers[job.name]}, prints to {log}")


def _sbatch(job: Job, numbers: dict[str, str]) -> list[str]:
    needed = [numbers[name] for name in job.needs if name in numbers]
    kind = "afterany" if job.after_any else "afterok"
    # Slurm keeps a job whose dependency has failed in its queue for ever, unless it is told not to.
    after = [f"--dependency={kind}:{':'.join(needed)}", "--kill-on-invalid-dep=yes"] if needed else []
    return ["sbatch", "--parsable", *after]


def _call(argv: list[str], what: str, text: str = "") -> str:
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        fix = "launch from a machine of the cluster, or look at what would run with --dry-run"
        raise AtollError(f"{argv[0]} is not installed here", fix) from None
    if done.returncode:
        raise AtollError(f"{what}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
