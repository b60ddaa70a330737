"""Icons end to end: seconds of every stage before training, and what it found.

    python examples/icons/prepare.py iconify-json-2.2.535.tgz icons64 [--sets ...]
    python benchmarks/icons.py --source icons64 --to FOLDER [--sets NAME ...] [--json PATH]
    python benchmarks/icons.py --quick

Every stage is a command of its own, as `examples/icons/README.md` gives them, so its start counts. Seconds
are those of the clock and those of the processors: the second hardly depend on what else the machine does.
`--train N` also trains islands, router and a single network of N training images, and tells their distances.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

from harness import finish, row, run_command

from atoll.campaign.folder import Campaign
from atoll.campaign.results import Comparison
from atoll.data.contents import contents

STAGES = ("ingest", "dedupe", "embed", "encode", "partition")
SETTINGS = ("data.ingest.id=id", "data.dedupe={}", "student=null")
TINY = (
    *("data.source=glyphs", "data.ingest.glyphs.limit=400", "data.ingest.mode=rgb", "data.ingest.group=null"),
    *(
        "data.ingest.caption=null",
        "data.ingest.size=16",
        "partition.k=2",
        "partition.fine=8",
        "data.dedupe={}",
    ),
    *("network.depth=1", "student=null"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="folder of parquet files that prepare.py wrote")
    parser.add_argument("--to", type=Path, help="folder of the campaign")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these of the folder's files")
    parser.add_argument("--train", type=int, metavar="N", help="training images of a single network")
    parser.add_argument("--quick", action="store_true", help="few glyphs, of which the times mean nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder) / "glyphs", TINY, None, options.json, alone=False)
    elif options.source and options.to:
        source = chosen(options.source, options.sets, options.to)
        run(options.to / "campaign", (f"data.source={source}", *SETTINGS), options.train, options.json)
    else:
        parser.error("give --source FOLDER --to FOLDER, or --quick")


def chosen(source: Path, sets: list[str] | None, to: Path) -> Path:
    """The folder of all sets, or one with links to some."""
    if sets is None:
        return source.resolve()
    (to / "sets").mkdir(parents=True, exist_ok=True)
    for name in sets:
        if not (link := to / "sets" / f"{name}.parquet").exists():
            link.hardlink_to(source.resolve() / link.name)
    return (to / "sets").resolve()


def run(
    made: Path, settings: tuple[str, ...], images: int | None, path: Path | None, alone: bool = True
) -> None:
    """Every stage, timed."""
    budget = (f"budget.samples={images}",) if images else ()
    sets = [part for one in (*settings, *budget) for part in ("--set", one)]
    run_command("new", made, "--recipe", "emoji", *sets, alone=alone)
    rows = []
    for stage in STAGES:
        begun, before = time.monotonic(), spent()
        run_command(*(("partition",) if stage == "partition" else ("data", stage)), made, alone=alone)
        rows.append(row(stage, "seconds", round(time.monotonic() - begun, 1), "s"))
        rows.append(row(stage, "seconds of processors", round(spent() - before, 1), "s"))
    campaign = Campaign.open(made)
    found = contents(campaign.data_store())
    for name, count in found.splits.items():
        rows.append(row("rows", name, count))
    rows.append(row("rows", "in all", len(found.dataset)))
    rows.append(row("rows", "captions that differ", found.distinct))
    if images:
        for stage in ("launch", "compare"):
            run_command(stage, made, alone=alone)
        for one in Comparison.read(campaign.store, Comparison.PLACE).rows:
            rows.append(row("training", f"distance of {one.name}", one.distance))
    finish("icons", rows, path)


def spent() -> float:
    """Seconds of processors that this process and those it waited for have had."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


if __name__ == "__main__":
    main()
