"""Jobs as real processes: as many at once as fit, and an orderly end."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import AtollError
from atoll.campaign.settings.launch import Placement
from atoll.launch import local
from atoll.launch.job import Job
from helpers import environment

CORES = len(os.sched_getaffinity(0))


def job(
    name: str, code: str, cpus: int = 1, work: float = 0.0, memory: int = 0, needs: tuple[str, ...] = ()
) -> Job:
    return Job(name, (sys.executable, "-S", "-c", code), cpus, memory, work, needs=needs)


def waiting(folder: Path, name: str, seconds: float = 0.4) -> str:
    """Notes when it began and ended."""
    return (
        f"import time, pathlib; p = pathlib.Path({str(folder)!r}) / {name!r}; a = time.time(); "
        f"time.sleep({seconds}); p.write_text(f'{{a}} {{time.time()}}')"
    )


def times(folder: Path) -> dict[str, tuple[float, float]]:
    found = {}
    for path in folder.iterdir():
        begin, end = map(float, path.read_text().split())
        found[path.name] = (begin, end)
    return found


def most_at_once(spans: dict[str, tuple[float, float]]) -> int:
    return max(sum(a <= begin < b for a, b in spans.values()) for begin, _ in spans.values())


def test_all_run_and_their_lines_are_shown_whatever_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = "import os; print([os.environ[n] for n in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')])"
    odd = r"import sys; sys.stdout.buffer.write(b'\xff\xfe ok\n')"
    loud = "for i in range(20000): print('x' * 50)"
    jobs = [job("a", f"print('hello from a'); {waiting(tmp_path, 'a', 0)}"), job("loud", loud)]
    local.run([*jobs, job("odd", odd), job("threads", threads, cpus=3)])
    out = capsys.readouterr().out
    assert "  hello from a\n" in out and "started a (process " in out and "4 runs finished in" in out
    assert out.count("  " + "x" * 50) == 20000 and " ok\n" in out and "['3', '3']" in out
    assert set(times(tmp_path)) == {"a"}


def test_as_many_at_once_as_cores_allow(tmp_path: Path) -> None:
    local.run([job(str(n), waiting(tmp_path, str(n))) for n in range(CORES + 2)])
    assert most_at_once(times(tmp_path)) == CORES


def test_a_job_waits_for_those_it_names_and_others_do_not(tmp_path: Path) -> None:
    """The one that is waited for starts first, however short; a name that is not launched does not count."""
    jobs = [job("expert", waiting(tmp_path, "expert", 0), work=9, needs=("seed", "finished before"))]
    jobs += [job("monolith", waiting(tmp_path, "monolith"), work=5), job("seed", waiting(tmp_path, "seed"))]
    local.run(jobs)
    spans = times(tmp_path)
    assert spans["seed"][1] <= spans["expert"][0]
    if CORES > 1:
        assert spans["monolith"][0] < spans["seed"][1]
    else:
        assert spans["seed"][0] < spans["monolith"][0]


def test_what_takes_the_machine_runs_alone_the_longest_first(tmp_path: Path) -> None:
    """A job that is larger than the machine runs all the same."""
    local.run([job(str(n), waiting(tmp_path, str(n), 0.1), cpus=CORES, work=n) for n in (2, 9, 5)])
    spans = times(tmp_path)
    assert most_at_once(spans) == 1 and sorted(spans, key=lambda n: spans[n]) == ["9", "5", "2"]
    large = [job(f"c{n}", waiting(tmp_path, f"c{n}", 0.1), cpus=10 * CORES) for n in range(2)]
    large += [job(f"m{n}", waiting(tmp_path, f"m{n}", 0.1), memory=10**18) for n in range(2)]
    local.run(large)
    assert len(times(tmp_path)) == 7 and most_at_once(times(tmp_path)) == 1


def test_a_failure_names_its_job_and_stops_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "cores", lambda: 2)
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    patient = (
        "import signal, sys, time, pathlib\n"
        f"def leave(*_): pathlib.Path({str(saved)!r}).write_text('x'); sys.exit(75)\n"
        f"signal.signal(signal.SIGTERM, leave); pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    waits = f"import sys, time, pathlib\nwhile not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.1)"
    bad = f"{waits}\nprint('error: no such thing'); print(); sys.exit(3)"
    jobs = [job("patient", patient, work=2), job("bad", bad, work=1)]
    jobs += [job("never", waiting(tmp_path, "never"), needs=("bad",))]
    words = r"^bad ended with code 3 \(error: no such thing\): correct it"
    with pytest.raises(AtollError, match=words) as caught:
        local.run(jobs)
    assert "\n" not in str(caught.value)
    assert saved.read_text() == "x" and not (tmp_path / "never").exists()


def test_what_processes_of_one_command_say_alike_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    code = "print('twice'); print('twice'); print('same'); "
    local.run([job("worker 1", code), job("worker 2", code), job("other", code + "print('own')")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(one) for one in ("twice", "same", "own")] == [4, 2, 1]


def test_gpus_are_shared_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    """The rule alone: each process sees the numbers of its own devices."""
    code = "import os, time; print('gpu', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(0.4)"

    def seen(gpus: int, *wanted: int | None) -> list[str]:
        jobs = [replace(job(str(n), f"{code}  # {n}", CORES, 9 - n), gpus=g) for n, g in enumerate(wanted)]
        local.run(jobs, gpus=gpus)
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "  gpu" in line]
        return [line.removeprefix("gpu").strip() for line in lines]

    each = seen(2, None, None, None)
    assert sorted(each[:2]) == ["0", "1"] and len(each) == 3
    # The longer one that wants two waits until three are free again; nothing shorter goes before it.
    several = seen(4, 3, 2, 1, 0)
    assert several[0] == "0,1,2" and sorted(several[1:]) == ["", "0,1", "2"]


TWO = Placement(nodes=2)
UNFIT = [({"gpus": 2}, "b asks for 2 GPUs, this machine has 1"), ({"place": TWO}, "2 nodes, here is one")]
UNFIT += [({"gpus": 1, "env": {local.DEVICES: "1"}}, "launch.env sets CUDA_VISIBLE_DEVICES, which this")]
UNFIT += [({"processes": 2}, "b: 2 processes would share a GPU: set launch.gpus")]


@pytest.mark.parametrize(("asked", "words"), UNFIT)
def test_what_this_machine_does_not_have_is_refused_before_anything_starts(
    asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    jobs = [job("a", waiting(tmp_path, "a")), replace(job("b", "pass"), **asked)]
    with pytest.raises(AtollError, match=words):
        local.run(jobs, gpus=1)
    assert times(tmp_path) == {}


RANKS = """
import torch, torch.distributed as dist
from atoll.base.preemption import exit_process
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("together", int(total), flush=True)
dist.destroy_process_group()
exit_process(75)
"""


@pytest.mark.slow
def test_several_processes_end_with_the_code_of_the_training(tmp_path: Path) -> None:
    """torchrun alone would make 1 of it. After a signal, of 1 and of 2: `tests/chaos/test_elastic.py`."""
    (tmp_path / "ranks.py").write_text(RANKS)
    argv = Job("a", (sys.executable, str(tmp_path / "ranks.py")), processes=2).local_argv()
    done = subprocess.run(argv, env=environment(), stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout.startswith("together 2\n") and done.returncode == 75, done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_launch_that_is_stopped_stops_its_processes(number: signal.Signals, tmp_path: Path) -> None:
    def note(name: str) -> str:
        file = f"pathlib.Path({str(tmp_path / name)!r})"
        return f"import os, time, pathlib; {file}.write_text(str(os.getpid())); time.sleep(60)"

    def stop() -> None:
        while sum(bool(path.read_text()) for path in tmp_path.iterdir()) < min(2, CORES):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        local.run([job(name, note(name)) for name in "ab"])
    stopper.join()
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == min(2, CORES) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_signal_between_the_start_of_a_process_and_its_entry_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Signalled(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("atoll.launch.local.subprocess.Popen", Signalled)
    with pytest.raises(KeyboardInterrupt):
        local.run([job("a", "import time; time.sleep(60)")])
    assert [process.poll() for process in started] == [-signal.SIGTERM]
