"""A fuzzer of every file that Atoll reads.

    python tests/hostile/fuzz.py --count 20000 [--seed 0] [--jobs 2] [--seconds 3600] [--json PATH]
    python tests/hostile/fuzz.py --seed 0 --only 137 2113    # these mutations, with all that they printed

Mutation N of a seed is always the same: a file of a campaign, of an export or of a source folder is changed
in structure or in bytes, half of the time with the digests that name it made to agree, and a command that
reads the file is run. It must end within `SECONDS` by one line or by success, within the memory that
`watch.py` gives it, without a traceback, an unpickling, a process, or a change beside its folder.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from hostile import calls
from hostile.arena import Arena, Outcome
from hostile.mutate import agree, linked, mutated
from nursery import Nursery

SECONDS = 40.0  # a comparison alone takes 3, and other jobs may share the machine
SAMPLE = "sample {campaign} house --steps 1 --out {inside}/x.png"
EXPORT = "export {campaign} --to {inside}/out --no-picture --encoders name"
TRAIN = "train expert {training} --expert 0"
READERS = {
    "campaign/campaign.*": ["status {campaign}", "plan {campaign}", SAMPLE, "report {campaign}"],
    "campaign/data/*": ["data audit {campaign}", "data show {campaign}"],
    "campaign/partition/*": ["assemble {campaign}", "report {campaign}", "partition {campaign}", EXPORT],
    "campaign/islands/*/expert/*": ["assemble {campaign}", "status {campaign}", "report {campaign}"],
    "campaign/islands/*/run/*": ["status {campaign}", "report {campaign}", "assemble {campaign}"],
    "campaign/islands/*": ["status {campaign}", "assemble {campaign}", "report {campaign}"],
    "campaign/router/*": ["assemble {campaign}", "status {campaign}"],
    "campaign/monolith/*": [
        "report {campaign}",
        "sample {campaign} house --model monolith --steps 1 --out {inside}/x.png",
    ],
    "campaign/ensemble/*": [SAMPLE, EXPORT, "assemble {campaign}"],
    "campaign/reports/*": ["report {campaign}", EXPORT, "compare {campaign}"],
    "training/islands/0/*": [TRAIN],
    "export/*": ["pipeline"],
    "source/*": ["data ingest {fresh} --set data.source={source}"],
    "listed/*": ["data ingest {fresh} --set data.source={listed}"],
    "commas/*": ["data ingest {fresh} --set data.source={commas}"],
    "tar/*": ["data ingest {fresh} --set data.source={tar}/a.tar --set data.ingest.size=8"],
    "bodies/*": ["asked"],
    "table/*": ["data ingest {fresh} --set data.source={table}/a.parquet --set data.ingest.caption=caption"],
}
"""Patterns of files and the commands that read them; the first that fits a file counts."""


@dataclass(frozen=True)
class Found:
    """A mutation (file, change and command), what is wrong with its end or None, and what was printed."""

    number: int
    mutation: str
    cause: str | None
    said: str


class Fuzzer:
    """Mutations of one seed, of folders by name as `mutable` makes them, in an empty folder."""

    def __init__(self, seed: int, templates: dict[str, Path], nursery: Nursery, scratch: Path) -> None:
        self.seed, self.templates, self.nursery, self.scratch = seed, templates, nursery, scratch
        self.files: dict[str, list[tuple[str, list[str]]]] = {}
        for name, folder in sorted(templates.items()):
            for path in sorted(folder.rglob("*")):
                place = f"{name}/{path.relative_to(folder).as_posix()}"
                reader = next((pattern for pattern in READERS if fnmatch(place, pattern)), None)
                if path.is_file() and reader is not None:
                    self.files.setdefault(reader, []).append((place, READERS[reader]))

    def run(self, number: int) -> Found:
        """Make one mutation, and run a command that reads what it changed."""
        random = Random(f"{self.seed}/{number}")
        place, commands = random.choice(self.files[random.choice(sorted(self.files))])
        command, template = random.choice(commands), place.split("/")[0]
        wanted = {template} | ({"fresh"} if "{fresh}" in command else set())
        wanted |= {"campaign"} if command == "asked" else set()
        folder = self.scratch / str(number)
        places = {name: self.templates[name] for name in sorted(wanted)}
        arena = Arena(folder, places, self.nursery, SECONDS, large=0)
        try:
            if random.random() < 0.05:
                how = linked(arena / place, arena.folder / "beside.txt", random)
            else:
                data, how = mutated(arena / place, random)
                (arena / place).unlink()
                (arena / place).write_bytes(data)
            if random.random() < 0.5 and (arena / place).is_file():
                how += ", digests agree"
                agree(arena / template, arena / place)
            names = {name: str(arena / name) for name in self.templates} | {"inside": str(arena.inside)}
            call = (command, str(arena / template)) if hasattr(calls, command) else ()
            if command == "asked":
                call = command, str(arena / "campaign"), str(arena / place)
            argv = () if call else [part.format(**names) for part in command.split()]
            outcome = arena.run(*argv, call=call)
            return Found(number, f"{place}: {how}: {command}", cause(outcome), outcome.said)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def cause(outcome: Outcome) -> str | None:
    """What is wrong with how a command ended, without what differs from case to case; None if nothing is."""
    if outcome.code is None:
        return "hang"
    if match := re.search(r"\(traceback: (\S+)\)", outcome.said):
        text = Path(match[1]).read_text() if Path(match[1]).is_file() else outcome.said
    elif "Traceback" in outcome.said:
        text = outcome.said
    elif outcome.code == 1 and "error: " not in outcome.said:
        return cause(replace(outcome, code=0))  # `status` says so that somebody has to look at a run
    else:
        try:
            outcome.check()
        except AssertionError as error:
            return re.sub(r"/\S+?/inside/", "", " ".join(str(error).split()))[:200]
        return None
    frames = re.findall(r'File ".*?/(atoll/\S+?)", line (\d+)', text)
    named = [line for line in text.splitlines() if re.match(r"[\w.]+: ", line)] or text.strip().splitlines()
    last = re.sub(r"/tmp/\S+|0x\w+|\d+", "N", named[-1])[:120]
    return f"{last} at {':'.join(frames[-1]) if frames else '?'}"


def mutable(handed: dict[str, Path], folder: Path) -> dict[str, Path]:
    """What is mutated: folders that a stranger hands over, a campaign before an expert, more sources."""
    from whole import run

    made = {**handed, "campaign": folder / "campaign"}
    shutil.copytree(handed["campaign"], made["campaign"])
    for stage in ("compare", "diagnose"):
        run(stage, made["campaign"], "--set", "diagnose.samples=4", "--set", "compare.strategies=[top-1]")
    shutil.copytree(made["campaign"], folder / "training")
    for part in ("expert", "run"):
        shutil.rmtree(folder / "training/islands/0" / part)
    for name in ("listed", "commas", "table"):
        shutil.copytree(made["source"], folder / name, ignore=shutil.ignore_patterns("*.txt"))
    files = [f"g{number}.png" for number in range(4)]
    lines = [json.dumps({"file_name": file, "text": f"picture {file}"}) for file in files]
    (folder / "listed/metadata.jsonl").write_text("\n".join(lines))
    lines = ["file_name,text", *(f'{file},"picture, {file}"' for file in files)]
    (folder / "commas/metadata.csv").write_text("\n".join(lines))
    pictures = [{"bytes": (folder / "table" / file).read_bytes(), "path": file} for file in files]
    pq.write_table(pa.table({"image": pictures, "caption": files}), folder / "table/a.parquet")
    (folder / "tar").mkdir()
    with tarfile.open(folder / "tar/a.tar", "w") as archive:
        for file in files:
            archive.add(folder / "table" / file, file)
            archive.add(made["source"] / f"{file[:-4]}.txt", f"{file[:-4]}.txt")
            (folder / "table" / file).unlink()
    (folder / "bodies").mkdir()
    for number, more in enumerate(({}, {"n": 2, "size": "16x16"}, {"steps": 1, "shift": 2.0, "seed": 1})):
        body = {"prompt": "house", "model": "ensemble:top-1", **more}
        (folder / f"bodies/{number}.json").write_text(json.dumps(body))
    return made | {name: folder / name for name in ("training", "listed", "commas", "table", "tar", "bodies")}


def fuzz(numbers: Sequence[int], fuzzer: Fuzzer, seconds: float) -> list[Found]:
    """Mutations of these numbers, until the time is over."""
    found, deadline = list[Found](), time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > deadline:
            break
        found.append(fuzzer.run(number))
        fuzzer.nursery.children.pop().out.unlink()
        if found[-1].cause is not None:
            print(f"{number}: {found[-1].cause}\n    {found[-1].mutation}", flush=True)
    return found


def _digests(made: dict[str, Path]) -> dict[Path, str]:
    """Of all files of the templates, which the mutations link to."""
    files = (path for folder in made.values() for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(quick=False)
    options = parser.parse_args()
    start = time.monotonic()
    numbers = options.only or range(options.first, options.first + options.count)
    jobs = 1 if options.only else options.jobs
    from hostile.conftest import handed_over
    from whole import whole_campaign

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        made = mutable(handed_over(whole_campaign(folder / "whole"), folder), folder)
        before = _digests(made)

        def part(job: int) -> list[Found]:
            (folder / f"said{job}").mkdir()
            nursery = stack.enter_context(Nursery(folder / f"said{job}"))
            fuzzer = Fuzzer(options.seed, made, nursery, folder / str(job))
            return fuzz(numbers[job::jobs], fuzzer, options.seconds)

        with ThreadPoolExecutor(jobs) as pool:
            found = [one for some in pool.map(part, range(jobs)) for one in some]
        assert _digests(made) == before, "a command wrote into a file in place"
    for one in found if options.only else ():
        print(one.mutation, one.said, one.cause or "as it should be", sep="\n")
    causes = Counter(one.cause for one in found if one.cause is not None)
    for name, count in causes.most_common():
        print(f"{count:5d}  {name}")
    print(f"{len(found):,} mutations in {time.monotonic() - start:.0f} s, {sum(causes.values())} failures")
    if options.json is not None:
        from harness import finish, row

        rows = [
            row("mutations", "run", float(len(found)), "", target=(">=", float(options.count))),
            row("mutations", "failures", float(sum(causes.values())), "", target=("<=", 0.0)),
        ]
        wrong = [[one.number, one.mutation, one.cause] for one in found if one.cause is not None]
        finish("fuzz", rows, options, {"found": wrong})
    sys.exit(bool(causes))


if __name__ == "__main__":
    main()
