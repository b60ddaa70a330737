"""A square campaign goes on at five shapes: positions interpolated or not, time shift 1, 2 or 3.

    python benchmarks/resolution.py --prepare aspects.parquet --sources emoji64 icons
    python benchmarks/resolution.py --data aspects.parquet --to FOLDER [--jobs 6] [--device cuda] [--seeds N]
    python benchmarks/resolution.py --quick

`--prepare` crops the pictures of examples/emoji and of examples/icons (`--keep-aspect`) to what is drawn in
them, 48 pixels long, so that their aspects are real. On them a campaign of 16x16 pixels is trained: K = 4
experts of clusters of thumbnails that share nothing, a router, a single network of equal operations. By
`atoll new --from` and the recipe `high-resolution` it goes on at 32x32, 36x28, 28x36, 44x24 and 24x44 pixels,
of 252 to 264 patches, with each time shift in training and sampling, with positions interpolated
(`network.interpolation_scale` 2) and not (1). "Before" draws at these shapes with the first networks. Both
models of each draw a picture of every held-out caption, or of `--drawn` of them, at its picture's shape.
Distances are to those pictures, in features of a small network that was trained on the training pictures to
tell their kinds. Captions are read word by word by a random text encoder, which needs no download. `--quick`
trains for seconds on drawn pictures.
"""

import argparse
import io
import json
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
import yaml
from harness import Row, child, finish, flags, median_row, parsed, parser, row, run_command
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.base.device import own_device
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import runs_of
from atoll.campaign.settings.launch import merged
from atoll.data.cluster import fit, nearest_centroid, normalise
from atoll.data.dataset import DataSet
from atoll.measure.metrics.frechet import frechet_distance
from atoll.measure.metrics.mmd import kid
from atoll.model.model import Model
from atoll.train.run import train_run

SHIFTS, SCALES, DEFAULT = (1.0, 2.0, 3.0), (2.0, 1.0), "shift 2, interpolated"
LONGEST, CANVAS, WIDTH = 48, 48, 32
"""Longer side of prepared pictures, side of what the judge sees, and its features."""
SIZES = ["32x32", "36x28", "28x36", "44x24", "24x44"]
CLUSTERS = 4
"""Of the pictures, by k-means on their thumbnails."""
KINDS = 60
"""Most kinds of pictures that the judge tells apart: the first two words of captions."""
RATES = {"batch": 256, "lr": 1e-3, "lr_schedule": "cosine", "warmup": 20_000, "previews": 0}
BASE: dict[str, Any] = {
    "seed": 0,
    "condition": "text",
    "data": {
        "path": "data",
        "text_length": 12,
        "ingest": {
            "size": 16,
            "mode": "rgb",
            "heldout": 0.12,
            "group": "group",
            "caption": "caption",
            "label": "cluster",
        },
    },
    "partition": {"method": "label", "k": CLUSTERS},
    "network": {"family": "pixart", "size": "micro", "patch": 2},
    "train": {**RATES, "validations": 1},
    "router": {"patch": 4, "depth": 2, "heads": 2, "head_width": 32, "train": RATES},
    "sampling": {"steps": 20, "guidance": 2.0, "routing": "top-1"},
}
CPU: dict[str, Any] = {
    "network": {"size": "nano", "depth": 4, "heads": 3, "head_width": 32},
    "train": {"batch": 64},
    "router": {"train": {"batch": 64}},
    "sampling": {"steps": 10},
}
"""Of a width of 96, a fifth of the operations, in more and smaller steps."""
SMALL: dict[str, Any] = {
    "network": {"depth": 1, "heads": 2, "head_width": 24},
    "router": {"depth": 1, "heads": 1, "train": {"batch": 32}},
    "train": {"batch": 32},
    "sampling": {"steps": 3},
}


def main() -> None:
    """Prepare the pictures, or train and measure."""
    words = parser(__doc__, "tiny networks, and drawn pictures, of which the distances mean nothing")
    words.add_argument("--prepare", type=Path, metavar="FILE", help="write the pictures, and end")
    words.add_argument("--sources", type=Path, nargs="+", default=[], help="folders of parquet files")
    words.add_argument("--megabytes", type=float, default=13.0, help="of the file, about")
    words.add_argument("--data", type=Path, metavar="FILE", help="the pictures")
    words.add_argument("--to", type=Path, metavar="FOLDER", help="of the campaigns, for --data")
    words.add_argument("--jobs", type=int, default=6, help="trainings and measurings at once")
    words.add_argument("--seeds", type=int, default=1, help="of the second campaigns")
    words.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    words.add_argument("--base", type=int, default=640_000, help="training images of the first campaign")
    words.add_argument("--images", type=int, default=96_000, help="training images of the second ones")
    words.add_argument("--drawn", type=int, default=10**6, help="most pictures that a model draws")
    options = parsed(words, work)
    if options.prepare:
        return prepare(options.sources, options.prepare, int(options.megabytes * 1e6))
    if not options.quick and not (options.data and options.to):
        options.error("give --data FILE --to FOLDER, or --prepare FILE, or --quick")
    if options.quick or options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"] = "", "1"
    with tempfile.TemporaryDirectory() as scratch:
        to = options.to or Path(scratch)
        if options.quick:
            options.data, options.base, options.images = to / "drawn.parquet", 640, 320
            options.jobs, options.drawn = 2, 40
            draw(options.data)
        finish("resolution", measure_all(to, options), options, {"sizes": SIZES})


def measure_all(to: Path, options: argparse.Namespace) -> list[Row]:
    """Train the first campaign, go on from it in every way, and tell the distances."""
    base, pool = to / "base", ThreadPoolExecutor(options.jobs)

    def each(works: Sequence[dict[str, Any]]) -> list[Any]:
        return list(pool.map(lambda work: child(__file__, **work), works))

    # The first campaign: its runs side by side.
    tower = text_encoder(to / "text", captions(options.data))
    tree = merged(BASE, SMALL if options.quick else CPU if options.device == "cpu" else {})
    data = {"source": str(options.data.resolve()), "text_encoder": str(tower.resolve())}
    tree = merged(tree, {"data": data, "budget": {"samples": options.base}})
    base.mkdir(parents=True, exist_ok=True)
    if not (base / "campaign.yaml").exists():
        (base / "campaign.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    run_command("data", "prepare", base, alone=False)
    run_command("partition", base, alone=False)
    runs = [[*run] for run in longest_first(base)]
    parts = [runs] if options.quick else [[run] for run in runs]
    each([{"kind": "train", "folder": str(base), "runs": part} for part in parts])
    assemble(Campaign.open(base))

    # The second ones share a data set and a judge, which are made for the first of them.
    batch, judge = tree["train"]["batch"] // 2, {"judge": str(to / "judge.safetensors")}
    folders, shifts = list[Path](), (0.0, *(SHIFTS[1:2] if options.quick else SHIFTS))
    for seed, scale, shift in product(range(options.seeds), SCALES, shifts):
        # Shift 0 is "before": a step that moves nothing.
        if not shift and seed:
            continue
        rate, images = ("5e-4", options.images) if shift else ("1e-12", 1)
        settings = {
            "data.ingest.size": 32,
            "data.ingest.buckets": {"sizes": SIZES, "multiple": 4, "min_rows": batch // 4, "max_upscale": 4},
            "data.path": str((to / "large").resolve()),
            "network.interpolation_scale": scale,
            "objective.time.shift": shift or 1.0,
            "sampling.shift": shift or 1.0,
            "budget.samples": images,
            **{f"{group}train.batch": batch for group in ("", "router.")},
            **{f"{group}train.warmup": 4000 for group in ("", "router.")},
            **{f"{group}train.lr": rate for group in ("", "router.")},
            "seed": seed,
        }
        name = f"shift {shift:g}" if shift else "before"
        folders.append(to / f"{name}, {'interpolated' if scale > 1 else 'not interpolated'}-{seed}")
        sets = flags(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in settings.items()
        )
        if not (folders[-1] / "campaign.yaml").exists():
            recipe = ["--from", base, "--recipe", "high-resolution"]
            run_command("new", folders[-1], *recipe, *sets, alone=False)
        if len(folders) == 1:
            run_command("data", "prepare", folders[0], alone=False)
            child(__file__, kind="judge", folder=str(folders[0]), quick=options.quick, **judge)
    judge |= {"drawn": options.drawn}
    found = each([{"kind": "go on", "folder": str(folder), **judge} for folder in folders])
    pool.shutdown()

    cases = dict[str, list[dict[str, float]]]()
    for folder, answer in zip(folders, found, strict=True):
        cases.setdefault(folder.name.rpartition("-")[0], []).append(answer)
    rows = [
        median_row(name, metric, [answer[metric] for answer in answers])
        for name, answers in cases.items()
        for metric in answers[0]
    ]
    for model in ("single", "ensemble"):
        of = {
            name: statistics.median(answer[f"{model}: distance"] for answer in answers)
            for name, answers in cases.items()
            if "shift" in name
        }
        best = min(of, key=lambda name: of[name])
        rows.append(row("defaults", f"{model}: distance over {best}", of[DEFAULT] / of[best]))
    return rows


def longest_first(folder: Path) -> list[Any]:
    """Runs of a campaign, those on all rows first: none is then alone at the end."""
    return sorted(runs_of(Campaign.open(folder).config), key=lambda run: run.role != "monolith")


# What the child processes do.


def work(kind: str, folder: str, **more: Any) -> Any:
    """Train some runs, train the judge, or go on and measure."""
    torch.set_num_threads(1)
    campaign = Campaign.open(folder)
    if kind == "train":
        for role, expert in more["runs"]:
            train_run(campaign, role, expert)
        return None
    if kind == "judge":
        return train_judge(campaign, Path(more["judge"]), more["quick"])
    run_command("partition", folder, alone=False)
    campaign = Campaign.open(folder)
    for run in longest_first(Path(folder)):
        train_run(campaign, *run)
    assemble(campaign)
    judge = Judge().to(own_device())
    judge.load_state_dict(load_file(more["judge"]))
    return distances(campaign, judge.eval(), most=more["drawn"])


class Judge(nn.Module):
    """A small network that tells kinds of pictures apart; what it sees before it tells is its features."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (3, 32, 64, 96, 128), list[nn.Module]()
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.SiLU()]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * (CANVAS // 16) ** 2, WIDTH))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits of kinds of pictures `(B, 3, CANVAS, CANVAS)` in [-1, 1]."""
        return self.head(nn.functional.silu(self.body(pictures)))

    @torch.no_grad()
    def features(self, pictures: Sequence[Image.Image]) -> np.ndarray[Any, Any]:
        """Of pictures of any shape `(N, WIDTH)`."""
        device, parts = own_device(), []
        for first in range(0, len(pictures), 256):
            parts.append(self.body(canvases(pictures[first : first + 256]).to(device)).cpu())
        return torch.cat(parts).numpy()


def canvases(pictures: Sequence[Image.Image]) -> Tensor:
    """Pictures in the middle of white squares, in [-1, 1]."""
    whole = torch.ones(len(pictures), 3, CANVAS, CANVAS)
    for canvas, picture in zip(whole, pictures, strict=True):
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1) / 127.5 - 1
        top, left = ((CANVAS - side) // 2 for side in pixels.shape[1:])
        canvas[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return whole


def texts_of(dataset: DataSet) -> list[str]:
    """All captions."""
    return [str(text) for text in dataset.table(["caption"]).column("caption").to_pylist()]


def train_judge(campaign: Campaign, to: Path, quick: bool) -> None:
    """On the training pictures of all shapes; kinds are the first two words of captions."""
    dataset, device = campaign.dataset(), own_device()
    kinds = [" ".join(text.split()[:2]) for text in texts_of(dataset)]
    known = {kind: n for n, (kind, _) in enumerate(Counter(kinds).most_common(KINDS))}
    rows = [int(n) for n in dataset.split("train") if kinds[n] in known]
    labels = torch.tensor([known[kinds[n]] for n in rows]).to(device)
    pictures = canvases([dataset.image(n) for n in rows]).to(device)
    torch.manual_seed(0)
    judge = Judge().to(device)
    steps, batch = (20, 64) if quick else (1500, 256)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(steps):
        some = torch.randint(len(rows), (batch,)).to(device)
        loss = nn.functional.cross_entropy(judge(pictures[some]), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    save_file({name: value.cpu().contiguous() for name, value in judge.state_dict().items()}, to)


def distances(campaign: Campaign, judge: Judge, most: int) -> dict[str, float]:
    """Of single network and ensemble, to the held-out pictures, at their shapes."""
    dataset, texts, config = campaign.dataset(), texts_of(campaign.dataset()), campaign.config
    rows = np.random.default_rng(0).permutation(dataset.split("heldout"))[:most]
    assert dataset.buckets is not None
    shapes = [f"{width}x{height}" for width, height in dataset.buckets[rows].tolist()]
    square = np.array([shape == SIZES[0] for shape in shapes])
    real, found = judge.features([dataset.image(int(n)) for n in rows]), dict[str, float]()
    device = own_device()
    for name in ("single", "ensemble"):
        which = {"single": "monolith"}.get(name, name)
        model = Model.load(campaign.store, which, device=device, encoders=config.encoders)
        drawn: dict[int, Image.Image] = {}
        for shape in dict.fromkeys(shapes):
            places = [n for n, other in enumerate(shapes) if other == shape]
            conditions = model.conditions([texts[rows[n]] for n in places], cut=True)
            generation = config.sampling.with_(size=shape)
            for batch in model.generate(conditions, generation, batch=256):
                pictures = model.pictures(batch.latents, batch.rows)
                drawn |= {places[n]: picture for n, picture in zip(batch.rows, pictures, strict=True)}
        features = judge.features([drawn[n] for n in range(len(rows))])
        found[f"{name}: distance"] = frechet_distance(features, real)
        for part, chosen in (("square", square), ("not square", ~square)):
            pair, size = (features[chosen], real[chosen]), int(chosen.sum())
            found[f"{name}: KID, {part}"] = kid(*pair, size=size).value
    losses = [
        line["validation_loss"]
        for line in map(json.loads, (Path(campaign.store.location) / "monolith/run/metrics.jsonl").open())
        if line.get("validation_loss") is not None
    ]
    return {**found, "single: loss on held-out pictures": losses[-1]}


# The pictures and their captions.


def captions(data: Path) -> list[str]:
    """All of a file."""
    return [str(text) for text in pq.read_table(data, columns=["caption"]).column("caption").to_pylist()]


def text_encoder(folder: Path, texts: Sequence[str]) -> Path:
    """A random T5 of two layers that reads words, those that are in many captions."""
    words = Counter(word for text in texts for word in set(text.lower().split()))
    known = [(f"▁{word}", -1.0) for word, count in words.most_common(4000) if count >= 4]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -9.0), *known]
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(pieces), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    transformers.T5EncoderModel(config).save_pretrained(folder)
    transformers.T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder)
    return folder


def prepare(sources: Sequence[Path], to: Path, limit: int) -> None:
    """Crop pictures to what is drawn in them; those that are not square first, and as many that are."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for path in sorted(path for folder in sources for path in folder.glob("*.parquet")):
        for record in rows_of(path):
            found[record.pop("square")].append(record)
    draws = np.random.default_rng(0)
    chosen, size = list[dict[str, Any]](), 0
    for some in zip(*(draws.permutation(len(part)).tolist() for part in found.values()), strict=False):
        records = [part[n] for part, n in zip(found.values(), some, strict=True)]
        size += sum(len(record["image"]["bytes"]) + 100 for record in records)
        if size > limit:
            break
        chosen += records
    chosen.sort(key=lambda record: str(record["id"]))
    small = np.stack([np.frombuffer(record.pop("thumbnail"), np.uint8) for record in chosen])
    points = normalise(small.astype(np.float32) / 255 - 0.5)
    clusters = nearest_centroid(points, fit(points, CLUSTERS, 64, 0))
    chosen = [record | {"cluster": int(n)} for record, n in zip(chosen, clusters, strict=True)]
    to.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(chosen), to, compression="zstd")
    squares = f"{len(found[True]):,} that are square and {len(found[False]):,} that are not"
    print(f"{to}: {len(chosen):,} pictures of {squares}, {to.stat().st_size / 1e6:.1f} MB")


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Pictures of a file, cropped and made smaller, with what they are."""
    for record in pq.read_table(path).to_pylist():
        with Image.open(io.BytesIO(record["image"]["bytes"])) as opened:
            whole = opened.convert("RGB")
        seen = (np.asarray(whole) < 248).any(-1)
        ys, xs = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
        if len(ys) < 12 or len(xs) < 12:
            continue
        picture = whole.crop((int(xs[0]), int(ys[0]), int(xs[-1]) + 1, int(ys[-1]) + 1))
        aspect = max(picture.size) / min(picture.size)
        if aspect > 4:
            continue
        picture.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
        content = io.BytesIO()
        picture.save(content, "WEBP", lossless=True)
        words = [record.get(name) or "" for name in ("subcategory", "category")]
        kind = re.sub(r"[^a-z]+", "-", (words[0] or words[1]).lower())
        yield {
            "id": record["id"],
            "image": {"bytes": content.getvalue(), "path": None},
            "caption": f"{path.stem} {kind} {record['concept']}",
            "group": record["concept"],
            "thumbnail": picture.resize((8, 8), Image.Resampling.BOX).tobytes(),
            "square": aspect < 1.15,
        }


def draw(to: Path, rows: int = 600) -> None:
    """Coloured ellipses on white, of five aspects."""
    draws, records = np.random.default_rng(0), []
    sides = [[int(side) for side in size.split("x")] for size in SIZES]
    for number in range(rows):
        (width, height), colour = sides[number % 5], draws.integers(0, 200, 3)
        y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        inside = (x**2 + y**2 < draws.uniform(0.3, 1))[..., None]
        content = io.BytesIO()
        Image.fromarray(np.where(inside, colour, 255).astype(np.uint8)).save(content, "PNG")
        name = ("red", "green", "blue")[int(colour.argmax())]
        records.append({"id": f"{number}", "image": {"bytes": content.getvalue(), "path": None}})
        records[-1] |= {
            "caption": f"drawn {name} ellipse",
            "group": f"{number}",
            "cluster": number % CLUSTERS,
        }
    pq.write_table(pa.Table.from_pylist(records), to)


if __name__ == "__main__":
    main()
