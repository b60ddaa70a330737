"""Icons end to end: seconds of every stage before training, and what it found.

    python examples/icons/prepare.py iconify-json-2.2.535.tgz icons64 [--sets ...]
    python benchmarks/icons.py --source icons64 --to FOLDER [--sets NAME ...] [--workers 2] [--train N]
    python benchmarks/icons.py --quick

Every stage is a command of its own, as `examples/icons/README.md` gives them, so its start counts. Seconds
are those of the clock and those of the processors: the second hardly depend on what else the machine does.
`--train N` also trains islands, router and a single network of N training images, all in batches of 8, and
other islands of the same data set that are cut by the icons' sets, as if every set's owner kept his: their
distances to the same held-out icons. Nothing is shared by islands.
"""

import argparse
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import finish, row, run_command

from atoll.campaign.folder import Campaign
from atoll.campaign.measured import Comparison
from atoll.data.contents import contents

Row = dict[str, Any]
STAGES = ("ingest", "dedupe", "embed", "encode", "partition")
SHARED = ("ingest", "embed", "encode")
"""Stages that several processes may share."""
SETTINGS = ("data.ingest.id=id", "data.ingest.licence_column=licence", "data.dedupe={}", "student=null")
ALONE = ("budget.pretrain=0", "sampling.routing=once")
TRAINING = (*ALONE, "train.batch=8", "train.lr=0.002", "budget.expert_batch=8")
BY_SET, BY_FACE = ("partition.method=column", "partition.column=source"), ("partition.method=label",)
TINY = (
    *("data.source=glyphs", "data.ingest.glyphs.limit=400", "data.ingest.mode=rgb", "data.ingest.group=null"),
    *(
        "data.ingest.caption=null",
        "data.ingest.size=16",
        "partition.k=2",
        "partition.fine=8",
        "data.dedupe={}",
    ),
    *("network.depth=1", "student=null", "compare.samples=64"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="folder of parquet files that prepare.py wrote")
    parser.add_argument("--to", type=Path, help="folder of the campaign")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these of the folder's files")
    parser.add_argument("--workers", type=int, default=1, help="processes of the data set's stages")
    parser.add_argument("--train", type=int, metavar="N", help="training images of a single network")
    parser.add_argument("--quick", action="store_true", help="few glyphs, of which the times mean nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            campaigns = Campaigns(Path(folder), TINY, BY_FACE, alone=False)
            finish("icons", campaigns.stages(1) + campaigns.trained(640), options.json)
    elif options.source and options.to:
        campaigns = Campaigns(options.to, (sources(options.source, options.sets), *SETTINGS), BY_SET)
        rows = campaigns.stages(options.workers)
        finish("icons", rows + (campaigns.trained(options.train) if options.train else []), options.json)
    else:
        parser.error("give --source FOLDER --to FOLDER, or --quick")


def sources(folder: Path, sets: list[str] | None) -> str:
    """The setting that makes every set a source of its own, so that rows know theirs."""
    names = sets or sorted(path.stem for path in folder.glob("*.parquet"))
    files = {
        name.replace("-", "_"): {"source": str((folder / f"{name}.parquet").resolve())} for name in names
    }
    return f"data.source={json.dumps(files)}"


@dataclass(frozen=True)
class Campaigns:
    """Two campaigns on one data set, cut by its features and by its owners.

    Attributes:
        to: folder of both.
        settings: of both.
        by_owner: settings that cut by owners.
        alone: every command as a process of its own.
    """

    to: Path
    settings: tuple[str, ...]
    by_owner: tuple[str, ...]
    alone: bool = True

    def run(self, *words: str | Path) -> None:
        """A command."""
        run_command(*words, alone=self.alone)

    def new(self, name: str, *settings: str) -> Path:
        """A campaign's folder; one that is there stays."""
        if not (self.to / name / "campaign.yaml").exists():
            sets = [part for one in (*self.settings, *settings) for part in ("--set", one)]
            self.run("new", self.to / name, "--recipe", "emoji", *sets)
        return self.to / name

    def stages(self, workers: int) -> list[Row]:
        """Every stage, timed, and what the data set holds."""
        rows, made = list[Row](), self.new("features")
        for stage in STAGES:
            begun, before = time.monotonic(), spent()
            many = ("--workers", str(workers)) if workers > 1 and stage in SHARED else ()
            self.run(*(("partition",) if stage == "partition" else ("data", stage)), made, *many)
            rows.append(row(stage, "seconds", round(time.monotonic() - begun, 1), "s"))
            rows.append(row(stage, "seconds of processors", round(spent() - before, 1), "s"))
        found = contents(Campaign.open(made).data_store())
        counts = {**found.splits, "in all": len(found.dataset), "captions that differ": found.distinct}
        return rows + [row("rows", name, count) for name, count in counts.items()]

    def trained(self, images: int) -> list[Row]:
        """Distances of the models of both campaigns, and ratios to the single network's."""
        distances = dict[tuple[str, str], float]()
        for name in ("features", "owners"):
            data = [f"data.path={(self.to / 'features/data').resolve()}", f"budget.samples={images}"]
            data += ["monolith=false", *self.by_owner] if name == "owners" else []
            made = self.new(f"{name}-{images}", *TRAINING, *data)
            for stage in ("launch", "compare"):
                self.run(stage, made)
            compared = Comparison.read(Campaign.open(made).store, Comparison.PLACE)
            distances |= {(name, one.name): one.distance or float("nan") for one in compared.rows}
        single = distances.pop(("features", "monolith"))
        rows = [row("training", "distance of the single network", single)]
        for (name, model), distance in distances.items():
            rows.append(row(f"cut by {name}", f"distance of {model}", distance))
            rows.append(row(f"cut by {name}", f"distance of {model} / single", distance / single))
        return rows


def spent() -> float:
    """Seconds of processors that this process and those it waited for have had."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


if __name__ == "__main__":
    main()
