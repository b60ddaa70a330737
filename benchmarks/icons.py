"""Icons end to end: seconds of every stage before training, and what it found.

    python examples/icons/prepare.py iconify-json-2.2.535.tgz icons64 [--sets ...]
    python benchmarks/icons.py --source icons64 --to FOLDER [--sets NAME ...] [--workers 2] [--train N]
    python benchmarks/icons.py --quick

Every stage is a command of its own, as `examples/icons/README.md` gives them, so its start counts. Seconds
are those of the clock and those of the processors: the second hardly depend on what else the machine does.
`--train N` also trains islands, router and a single network of N training images, all in batches of 8, and
but for `--by-features` other islands of the same data set, cut by the icons' sets, as if every set's owner
kept his: their distances to the same held-out icons. Nothing is shared by islands.
"""

import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Row, comparison_of, finish, new, parsed, parser, row, run_command, train

from atoll.campaign.folder import Campaign
from atoll.data.contents import contents

STAGES = ("ingest", "dedupe", "embed", "encode", "partition")
SHARED = ("ingest", "embed", "encode")
"""Stages that several processes may share."""
SETTINGS = ("data.ingest.id=id", "data.ingest.licence_column=licence", "data.dedupe={}", "student=null")
FASTER = ("train.parallel.compile=true", "train.validations=2", "train.previews=0")
ROUTINGS = ("sampling.routing=once", "compare.strategies=[top-1,once,once null sample-1,top-1 null sample-1]")
TRAINING = (*ROUTINGS, "budget.pretrain=0", "train.batch=8", "train.lr=0.002", "budget.expert_batch=8")
BY_SET, BY_FACE = ("partition.method=column", "partition.column=source"), ("partition.method=label",)
TINY = (
    "data.source=glyphs",
    "data.ingest={size: 16, mode: rgb, glyphs: {limit: 400}}",
    "data.dedupe={}",
    "partition.k=2",
    "partition.fine=8",
    "network.depth=1",
    "student=null",
    "compare.samples=64",
)


def main() -> None:
    """Time the stages, and train what `--train` asks for."""
    words = parser(__doc__, "few glyphs, of which the times mean nothing")
    words.add_argument("--source", type=Path, help="folder of parquet files that prepare.py wrote")
    words.add_argument("--to", type=Path, help="folder of the campaign")
    words.add_argument("--sets", nargs="+", metavar="NAME", help="only these of the folder's files")
    words.add_argument("--workers", type=int, default=1, help="processes of the data set's stages")
    words.add_argument("--train", type=int, metavar="N", help="training images of a single network")
    words.add_argument("--by-features", action="store_true", help="no islands by owner")
    options = parsed(words)
    if not options.quick and not (options.source and options.to):
        options.error("give --source FOLDER --to FOLDER, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            campaigns = Campaigns(Path(scratch), TINY, BY_FACE, alone=False)
            options.workers, options.train = 1, 640
        else:
            # Every set is a source of its own, so that rows know theirs.
            names = options.sets or sorted(path.stem for path in options.source.glob("*.parquet"))
            files = {name: str((options.source / f"{name}.parquet").resolve()) for name in names}
            sources = {name.replace("-", "_"): {"source": file} for name, file in files.items()}
            settings = (f"data.source={json.dumps(sources)}", *SETTINGS, *FASTER)
            campaigns = Campaigns(options.to, settings, BY_SET)
        rows = campaigns.stages(options.workers)
        rows += campaigns.trained(options.train, options.by_features) if options.train else []
        finish("icons", rows, options)


@dataclass(frozen=True)
class Campaigns:
    """Two campaigns on one data set, cut by its features and by its owners."""

    to: Path
    settings: Sequence[str]
    by_owner: Sequence[str]
    alone: bool = True
    """Every command as a process of its own."""

    def new(self, name: str, *settings: str) -> Path:
        """A campaign's folder; one that is there stays."""
        return new(self.to / name, "emoji", (*self.settings, *settings), self.alone)

    def stages(self, workers: int) -> list[Row]:
        """Every stage, timed, and what the data set holds."""

        def spent() -> float:
            """Seconds of processors that this process and those it waited for have had."""
            both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            return sum(one.ru_utime + one.ru_stime for one in both)

        rows, made = list[Row](), self.new("features")
        for stage in STAGES:
            begun, before = time.monotonic(), spent()
            many = ("--workers", str(workers)) if workers > 1 and stage in SHARED else ()
            words = (stage,) if stage == "partition" else ("data", stage)
            run_command(*words, made, *many, alone=self.alone)
            rows.append(row(stage, "seconds", round(time.monotonic() - begun, 1), "s"))
            rows.append(row(stage, "seconds of processors", round(spent() - before, 1), "s"))
        found = contents(Campaign.open(made).data_store())
        counts = {**found.splits, "in all": len(found.dataset), "captions that differ": found.distinct}
        return rows + [row("rows", name, count) for name, count in counts.items()]

    def trained(self, images: int, by_features: bool) -> list[Row]:
        """Distances of the models of these campaigns, and ratios to the single network's."""
        distances = dict[tuple[str, str], float]()
        for name in ("features",) if by_features else ("features", "owners"):
            data = [f"data.path={(self.to / 'features/data').resolve()}", f"budget.samples={images}"]
            data += ["monolith=false", *self.by_owner] if name == "owners" else []
            made = self.new(f"{name}-{images}", *TRAINING, *data)
            if self.alone:
                run_command("launch", made)  # several processes at once, where there are cores
            else:
                train(made, alone=False)
            run_command("compare", made, alone=self.alone)
            compared = comparison_of(made).rows
            distances |= {(name, one.name): one.distance or float("nan") for one in compared}
        single = distances.pop(("features", "monolith"))
        rows = [row("training", "distance of the single network", single)]
        for (name, model), distance in distances.items():
            rows.append(row(f"cut by {name}", f"distance of {model}", distance))
            rows.append(row(f"cut by {name}", f"distance of {model} / single", distance / single))
        return rows


if __name__ == "__main__":
    main()
