"""Jobs as actors of a Ray cluster: each keeps one command going on its node, whether a launch watches or not.

Actors are detached: they outlive the launch that started them, and another one finds them by name. Ray starts
an actor again, and with it the command, on any node that has what it asks for; the command goes on from what
it saved. Nodes import this module from their own Atoll; what is sent are strings, numbers and lists of them.
"""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from atoll.base.console import say
from atoll.base.errors import INTERRUPTED, AtollError, ConfigError, extra, first_line
from atoll.base.format import code_version
from atoll.base.hashing import sha256
from atoll.base.preemption import SIGNALS, catch_signals
from atoll.base.text import many
from atoll.launch.job import Job, Site
from atoll.launch.local import GRACE

with extra("ray", "Ray is not installed here"):
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PYTHON, WAITS, ASSEMBLES, ARRAYS = None, True, False, False
NAMESPACE = "atoll"
TRIES = 5
"""Times that a command which broke is started again on its node; one that a signal told to leave, always."""
PATIENCE = 30.0
"""Seconds without a node that has what a job asks for, until the job is given up."""
LINGER = 60.0
"""Seconds that an actor whose command ended waits to be asked for the result; then it frees its node."""
# An actor that is killed takes its command along, which would else go on beside the one that replaces it. The
# child asks for that itself: code between fork and exec may hang in a process of as many threads as Ray's.
CHILD = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp('sh', ['sh', '-c', sys.argv[1]])"


class Keeper:
    """Keeps a command going on the node of this actor until it has ended for good."""

    def __init__(self, version: str, command: str, env: dict[str, str], folder: str, saves: bool) -> None:
        self.lines, self.count, self.code = deque[str](maxlen=200), 0, -1  # -1 until it has ended
        self.process: subprocess.Popen[str] | None = None
        self.stopped, self.lock, self.asked = False, threading.Lock(), time.monotonic()
        self.place = f"{ray.util.get_node_ip_address()} (process {os.getpid()})"
        self.itself = ray.get_runtime_context().current_actor
        if version != code_version():
            what = f"error: the node has Atoll {code_version()}, the launch has {version}"
            self._print(f"{what}: install the same version on all nodes")
            self.code = 2
        threading.Thread(target=self._keep, args=(command, env, folder, saves), daemon=True).start()

    def look(self, seen: int) -> tuple[int, int, list[str], str]:
        """Exit code or -1, lines printed so far, those after the first `seen`, and where this is."""
        self.asked = deadline = time.monotonic()
        while self.code < 0 and self.count == seen and time.monotonic() < deadline + 1:
            time.sleep(0.05)
        code = self.code  # first: all its lines are there
        with self.lock:
            count, lines = self.count, [*self.lines]
        # An actor that was started again counts from 0.
        return code, count, lines[-(count - seen if count >= seen else count) or len(lines) :], self.place

    def stop(self) -> None:
        """Tell the command to save and leave."""
        with self.lock:
            if not self.stopped and self.process is not None:
                self.process.terminate()
            self.stopped = True

    def _keep(self, command: str, env: dict[str, str], folder: str, saves: bool) -> None:
        tries = 0
        while self.code < 0:
            with self.lock:
                if self.stopped:
                    self.code = INTERRUPTED
                    break
                self.process = subprocess.Popen(
                    [sys.executable, "-c", CHILD, command],
                    env={**os.environ, **env, "ATOLL_HOST": _first_host()},
                    cwd=folder if os.path.isdir(folder) else None,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self._print(line.rstrip())
            code = self.process.wait()
            # What an error broke that is no run has no checkpoint, and would break again.
            broke = code < 0 or code >= 128 or (code == 1 and saves)
            tries += broke
            if code != INTERRUPTED and not (broke and tries <= TRIES):
                self.code = code if code >= 0 else 128 - code
            elif not self.stopped:
                self._print(f"ended with code {code}, started again to go on")
        while time.monotonic() < self.asked + LINGER:
            time.sleep(1)
        if (group := ray.util.get_current_placement_group()) is not None:
            ray.util.remove_placement_group(group)  # and with it what waits here of the same job
        ray.kill(self.itself)

    def _print(self, line: str) -> None:
        with self.lock:
            self.lines.append(line)
            self.count += 1


def _first_host() -> str:
    """The node on which the processes of a job meet; asked at each start, since Ray may have replaced it."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return ""
    first = ray.util.placement_group_table(group)["bundles_to_node_id"][0]
    return next((str(n["NodeManagerAddress"]) for n in ray.nodes() if n["NodeID"] == first), "")


class _Actor:
    """What a launch knows of one node of a job: found if an earlier launch left it, else started."""

    def __init__(self, job: Job, site: Site, number: int) -> None:
        self.job, self.group, self.number = job, job.label(site.campaign), number
        self.code, self.seen, self.place, self.last, self.lost = -1, 0, "", "no output", 0
        self.answered = time.monotonic()
        self.start()

    def start(self) -> None:
        job, demand, name = self.job, _demand(self.job), f"{self.group}.{self.number}"
        names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {names[key]: value for key, value in demand.items() if key in names}
        options["resources"] = {key: value for key, value in demand.items() if key not in names}
        if job.place.nodes > 1:
            try:
                group = ray.util.get_placement_group(self.group)
            except ValueError:
                bundles, lifetime = [demand] * job.place.nodes, "detached"
                group = ray.util.placement_group(bundles, "STRICT_SPREAD", self.group, lifetime=lifetime)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, self.number)
        try:
            self.keeper = ray.get_actor(name, NAMESPACE)
            if not self.lost:
                say(f"{job.name}: is there already, from an earlier launch")
        except ValueError:
            options |= {"lifetime": "detached", "max_restarts": -1, "max_task_retries": -1}
            # Jobs of several runs may share a first node, so one port for all would clash.
            port = 20000 + int(sha256(self.group.encode())[:6], 16) % 20000
            command = f"exec {job.shell('$ATOLL_HOST', str(port))}"
            actor = ray.remote(Keeper).options(name=name, namespace=NAMESPACE, **options)
            arguments = (command, job.environment, os.getcwd(), job.saves)
            try:
                self.keeper = actor.remote(code_version(), *arguments)
            except ValueError:  # another launch was faster
                self.keeper = ray.get_actor(name, NAMESPACE)
        self.future = self.keeper.look.remote(self.seen)

    def answer(self) -> list[str]:
        """Take what the actor has said, ask again, and return its new lines."""
        lines: list[str]
        try:
            self.code, self.seen, lines, place = ray.get(self.future)
        except ray.exceptions.RayActorError as error:
            # It ended while nobody asked, and what it did is looked at once more; or it cannot even start.
            self.lost += 1
            if self.lost > 2:
                self.code, self.last = 1, str(error).strip().splitlines()[-1]
            else:
                self.start()
            return []
        self.answered = time.monotonic()
        self.last = next((line for line in reversed(lines) if line.strip()), self.last)
        if place != self.place:
            say(f"{self.job.name}: {'runs again' if self.place else 'runs'} on {place}")
        self.place = place
        if self.code < 0:
            self.future = self.keeper.look.remote(self.seen)
        return lines

    def problem(self) -> str:
        """Why its job can never end well; empty while it may."""
        if self.code > 0 and self.code != INTERRUPTED:
            where = f" on {self.place}" * bool(self.place)
            return f"{self.job.name} ended with code {self.code}{where} ({self.last})"
        lacking = _lacking(self.job) if time.monotonic() - self.answered > PATIENCE else ""
        return lacking and f"{self.job.name} asks for {lacking} any more"


def check(jobs: Sequence[Job], site: Site) -> None:
    """Refuse an address without a cluster, and jobs that no node has room for even when it is idle."""
    addresses = {job.place.ray.address or os.environ.get("RAY_ADDRESS") or "auto" for job in jobs}
    if len(addresses) > 1:
        raise ConfigError(f"launch.ray.address is {' and '.join(sorted(addresses))}", "name one cluster")
    (address,) = addresses
    fix = "start one (ray start --head), or launch from one of its nodes with launch.ray.address=HOST:6379"
    try:
        # Where nothing listens ray.init would wait for minutes, and then end this process.
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        quiet = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address, namespace=NAMESPACE, ignore_reinit_error=True, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError, SystemExit) as error:
        raise AtollError(f"there is no Ray cluster at {address} ({first_line(error)})", fix) from None
    for job in jobs:
        if lacking := _lacking(job):
            raise AtollError(f"{job.name} asks for {lacking}", "ray status lists them; correct launch.ray")


def show(jobs: Sequence[Job], site: Site) -> str:
    """What every actor asks for and runs."""
    lines = []
    for job in jobs:
        asked = ", ".join(f"{name} {amount:g}" for name, amount in _demand(job).items())
        lines.append(f"# {job.name} on {many(job.place.nodes, 'node')} of Ray, with {asked}")
        lines.append(f"$ {job.shell('$ATOLL_HOST', '$ATOLL_PORT')}")
    return "\n".join(lines)


def _demand(job: Job) -> dict[str, float]:
    memory = job.memory if job.place.memory_gb else 0
    amounts = {"CPU": job.cpus, "GPU": job.gpus or 0, "memory": memory, **job.place.ray.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def _lacking(job: Job) -> str:
    """What a job asks for in vain of the nodes that there are, busy or not; empty if it can run."""
    demand, nodes = _demand(job), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node.get(name, 0) >= demand[name] for name in demand)]
    if len(fitting) >= job.place.nodes:
        return ""
    missing = [name for name in demand if all(node.get(name, 0) < demand[name] for node in nodes)]
    asked = " with ".join(f"{name} {demand[name]:g}" for name in missing or demand)
    if job.place.nodes > 1:
        return f"{job.place.nodes} nodes with {asked}, {len(fitting)} of the cluster have that"
    return f"{asked}, which no node of the cluster has"


def submit(jobs: Sequence[Job], site: Site) -> None:
    """Run the jobs to their end, those of an earlier launch too; a failure stops only what needs it.

    Ctrl-C lets all save and leave; a launch that is killed leaves them running. `AtollError` names failures.
    """
    waiting, running, failed = [*jobs], dict[str, list[_Actor]](), dict[str, str]()
    printed: dict[tuple[tuple[str, ...], str], str] = {}  # workers of one command print much alike
    deadline = math.inf
    with catch_signals(SIGNALS[:2]) as signals:  # without a terminal it ends, and they go on
        while (waiting or running) and time.monotonic() < deadline:
            if signals and deadline == math.inf:
                say("all save and leave: launch again to go on")
                deadline = time.monotonic() + GRACE
                waiting.clear()
                for actor in (actor for actors in running.values() for actor in actors):
                    actor.keeper.stop.remote()

            left = {job.name for job in waiting} | running.keys()
            for job in [job for job in waiting if not left.intersection(job.needs)]:
                waiting.remove(job)
                if not job.after_any and (broken := failed.keys() & set(job.needs)):
                    failed[job.name] = f"{job.name} needs {min(broken)}"
                else:
                    running[job.name] = [_Actor(job, site, number) for number in range(job.place.nodes)]

            every = [actor for actors in running.values() for actor in actors]
            asked = {actor.future: actor for actor in every if actor.code < 0}
            done = ray.wait([*asked], num_returns=len(asked), timeout=1.0)[0] if asked else []
            for actor in (asked[future] for future in done):
                for line in actor.answer():
                    if printed.setdefault((actor.job.argv, line), actor.job.name) == actor.job.name:
                        say(f"  {line}")

            for name, actors in [*running.items()]:
                if not signals and any(actor.code == INTERRUPTED for actor in actors):
                    failed[name] = f"{name} was told to leave, by another launch"
                elif problem := next(filter(None, (actor.problem() for actor in actors)), ""):
                    failed[name] = problem
                    say(f"warning: {problem}")
                elif any(actor.code < 0 for actor in actors):
                    continue
                _free(running.pop(name))
        for actors in running.values():
            _free(actors)
        if signals:
            raise KeyboardInterrupt
    # A worker that failed is not missed where the job after it made its part.
    ends = [job for job in jobs if job.after_any and job.name not in failed]
    failed = {n: problem for n, problem in failed.items() if not any(n in job.needs for job in ends)}
    if failed:
        raise AtollError("; ".join(failed.values()), "correct it and launch again; finished work stays")


def _free(actors: list[_Actor]) -> None:
    for actor in actors:
        ray.kill(actor.keeper)
    if len(actors) > 1:
        ray.util.remove_placement_group(ray.util.get_placement_group(actors[0].group))
