"""What a filter buys: real pictures, half of them spoiled, a scorer of a few labels, models at equal FLOPs.

    python benchmarks/filter.py --source emoji64 --to FOLDER [--samples 100000] [--json PATH]
    python benchmarks/filter.py --quick

Half of the training pictures get faults of random strength (`aesthetics.py`); held-out and test pictures
stay as they are. A scorer learns from `LABELS` training rows and scores all, and `atoll data filter --keep
"score >= q0.5"` draws the better half: of all rows, since spoiled pictures have clusters of their own. A
single network and islands train on all rows and on those that are kept, and are measured as in `headline.py`,
on the test pictures. No person scored anything here.
"""

import argparse
import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from aesthetics import SCALE, degraded
from harness import finish, row, run_command
from headline import ALONE, APART, SPLIT, TINY, Entry, Protocol, islands, single, train
from judges import JUDGES
from pyarrow import parquet

from atoll.campaign.folder import Campaign

LABELS = 400
SEED = 3
BACKBONE = "efficientnet-lite0@64"
"""Not the network whose features judge."""
LEAVES = [name for number, name in enumerate(SCALE.names) if not SCALE.parts[number]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="folder of parquet files")
    parser.add_argument("--to", type=Path, help="folder of the campaigns")
    parser.add_argument("--samples", type=int, default=100_000, help="training images of a single network")
    parser.add_argument("--quick", action="store_true", help="tiny campaigns, whose distances mean nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            run(None, Path(folder), 640, options.json)
    elif options.source and options.to:
        run(options.source, options.to, options.samples, options.json)
    else:
        parser.error("give --source FOLDER --to FOLDER, or --quick")


def run(source: Path | None, to: Path, samples: int, path: Path | None) -> None:
    """Everything, as far as it has not happened yet; without a source, of glyphs and tiny."""
    entries = [single(8, 0.002, samples), islands(APART, samples, *ALONE)]
    common, judges = ["emoji", *SPLIT], JUDGES
    if source is None:
        tiny = ("partition.k=2", "network.depth=1", "train.batch=16", "router.train.batch=16")
        entries = [
            Entry("single", (*tiny, f"budget.samples={samples}"), single=True),
            Entry("islands", (*tiny, f"budget.samples={samples}", "monolith=false")),
        ]
        common = ["quickstart", *SPLIT, *(one for one in TINY if one.startswith("data."))]
        judges = {"Lite2": {"extractor_size": 64, "components": 8}}
    good = spoil(source, to, common)
    places = [f"data.path={(to / 'data').resolve()}", f"data.source={(to / 'spoiled').resolve()}"]
    common = [*(one for one in common if "data.ingest.glyphs" not in one), *places]
    named = [
        [Entry(f"{e.name}, {name}", (*e.sets, *more), single=e.single) for e in entries]
        for name, more in (("all rows", ()), ("the better half", ("data.weighted=true",)))
    ]
    for one in reversed(named[0]):  # the islands first, whose clusters the filter looks at
        train(one, one.folder(to, SEED), SEED, common, alone=source is not None)
    filtered(named[0][1].folder(to, SEED), good)
    for one in named[1]:
        train(one, one.folder(to, SEED), SEED, common, alone=source is not None)
    protocol = Protocol((1.5, 2.0, 3.0), judges=judges)
    if source is None:
        protocol = Protocol((2.0,), 24, 24, 2, judges, 1, routings=("top-1",))
    rows, judge = [], next(iter(judges))
    for of_all, of_half in zip(*named, strict=True):
        model = "monolith" if of_all.single else "top-1"
        values = [protocol.point(e.folder(to, SEED), model)["test"][judge] for e in (of_all, of_half)]
        rows += [
            row(e.name, f"distance by {judge}", v, "") for e, v in zip((of_all, of_half), values, strict=True)
        ]
        rows.append(row(of_half.name, "ratio to all rows", values[1] / values[0], "", target=("<=", 1)))
    finish("filter", rows, path)


def spoil(source: Path | None, to: Path, common: list[str]) -> dict[str, float]:
    """Write the source again, with half of its training pictures spoiled, to `spoiled` below a folder.

    Returns:
        How good the picture of each caption is: 1 less the mean strength of its faults.
    """
    clean, spoiled = to / "clean", to / "spoiled"
    if not (clean / "campaign.yaml").exists():
        place = [f"data.source={source.resolve()}"] if source else []
        sets = [*common[1:], *place, f"data.path={(to / 'data-clean').resolve()}", f"seed={SEED}"]
        run_command("new", clean, "--recipe", common[0], *(part for one in sets for part in ("--set", one)))
    run_command("data", "ingest", clean)
    dataset, random = Campaign.open(clean).dataset(), np.random.default_rng(SEED)
    training = {*dataset.split("train").tolist()}
    good, rows = dict[str, float](), []
    pictures = (one for shard in range(len(dataset.manifest.shards)) for one in dataset.iter_images(shard))
    for number, (one, picture) in enumerate(
        zip(dataset.table(["caption", "group"]).to_pylist(), pictures, strict=True)
    ):
        shared, spoils = random.uniform(), number in training and random.uniform() < 0.5
        faults = {leaf: float(spoils * (shared + random.uniform()) / 2) for leaf in LEAVES}
        image, out = picture.convert("RGB"), io.BytesIO()
        (degraded(image, faults, random) if spoils else image).save(out, "PNG")
        good[one["caption"]] = 1 - float(np.mean([*faults.values()]))
        rows.append({"image": {"bytes": out.getvalue(), "path": ""}, **one})
    spoiled.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), spoiled / "rows.parquet")
    return good


def filtered(campaign: Path, good: dict[str, float]) -> None:
    """Train a scorer on some rows, score all, and weigh those that score well."""
    dataset = Campaign.open(campaign).dataset()
    table, random = dataset.table(["id", "caption"]).to_pylist(), np.random.default_rng(SEED)
    some = random.permutation(dataset.split("train"))[:LABELS]
    labels, scale = campaign.parent / "labels.parquet", campaign.parent / "scale.yaml"
    known = [{"id": table[n]["id"], "score": good[table[n]["caption"]]} for n in some]
    parquet.write_table(pa.Table.from_pylist(known), labels)
    scale.write_text("dimensions: [{name: Whole, parent: null}]\n")
    if not dataset.has_column("weights"):
        scorer = campaign.parent / "scorer"
        how = ("--campaign", campaign, "--scale", scale, "--backbone", BACKBONE)
        run_command("aesthetics", "train", labels, "--out", scorer, *how)
        run_command("aesthetics", "score", campaign, "--scorer", scorer)
        run_command("data", "filter", campaign, "--keep", "score >= q0.5")


if __name__ == "__main__":
    main()
