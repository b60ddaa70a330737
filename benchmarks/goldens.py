"""Goldens: what four tiny campaigns compute, to the bit, to prove that changed code computes the same.

    python benchmarks/goldens.py --record benchmarks/results/goldens.json
    python benchmarks/goldens.py --against benchmarks/results/goldens.json

Bits depend on the processor and on the versions of PyTorch and others: record and compare on one machine.
"""

import argparse
import csv
import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from harness import machine

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?")
CLOCKS = {"seconds", "validation_seconds", "times", "samples", "step", "lr", "skipped"}
"""Fields of metrics.jsonl that are no result."""
Numbers = dict[str, Any]
"""By path, such as `class/losses/router/loss/sha256`: a number, or a digest."""

EXPECTED = {
    "*/pictures/exported/ensemble/picture.png": (math.inf, "a seed's picture is that of `atoll sample`"),
    "unconditional/pictures/drawn/once null *": (math.inf, "the only branch there is routed by `once`"),
    "*/compare/models/*/gflops_per_step": (0.2, "the router's calls count by branch, as the experts' do"),
    "*/compare/models/*/router_share": (0.5, "likewise"),
    "unconditional/tables/compare/best/*": (math.inf, "an unconditional model has one guidance, 1"),
    "unconditional/tables/compare/guidance/*": (math.inf, "likewise"),
    "*/numbers/evaluate/*/frechet/value": (1e-12, "moments are of the projected features"),
    "unconditional/tables/diagnose/[ls]*": (1e-5, "no guidance: two equal branches' difference was rounded"),
}
"""Differences that are meant: a pattern of paths, the largest relative one, and why."""

# Names before and after: the only place that knows both. What is recorded has the new ones.
OLD_WORDS = {"pretrain": "seed", "--expert": "--island"}
OLD_SETTINGS = {"pretrain": "seed", "pretrain_lr_schedule": "seed_lr_schedule"}
NEW_PATHS = {"islands": "experts", "seed": "pretrain", "diagnostics": "diagnose"}


def canonical(text: str) -> str:
    """A name in a table or path in the new words."""
    return "/".join(NEW_PATHS.get(part, part) for part in re.sub(r"\bcommit\b", "once", text).split("/"))


SMALL: dict[str, Any] = yaml.safe_load("""
seed: 3
condition: class
data:
  {path: data, source: glyphs, vae: none, ingest: {size: 8, mode: gray, heldout: 0.2,
   shard_rows: 32, label: null, glyphs: {faces: [DejaVuSans, DejaVuSerif], characters: basic, limit: 120}}}
partition: {method: random, k: 3}
network: {family: dit, size: nano, patch: 4, depth: 1, heads: 2, head_width: 16}
train: {batch: 8, lr: 1.0e-3, validations: 3, previews: 1, log_every: 1, milestones: 2}
router: {patch: 4, depth: 1, heads: 1, head_width: 16, share: 0.13, train: {batch: 8, log_every: 1}}
budget: {samples: 3840, expert_batch: 2, pretrain: 0.42, pretrain_lr_schedule: cosine}
student: {stock: false, step_share: 0.45}
sampling: {steps: 4}
compare: {samples: 24, steps: 3, shown: 3, fit_rows: 60, batch: 10, extractor_size: 64}
diagnose: {samples: 24, steps: 3, rows: 24, probed: 6, times: [0.25, 0.75, 1.0], extractor_size: 64}
evaluate: {samples: 24, extractor_size: 64, components: 8, kid_subsets: 10, kid_size: 12}
""")
CAMPAIGNS: dict[str, dict[str, Any]] = yaml.safe_load("""
class:  # 200 steps and more of every network
  compare: {guidances: [1.0, 3.0], sweep: [commit, commit null sample-1], curve: true}
  diagnose: {extractor: efficientnet-lite2}
unconditional:
  condition: none
  data: {vae: of factor 2}  # pictures of 8 px are latents of 4
  partition: {k: 2}
  network: {patch: 2}
  router: {patch: 2}
  budget: {samples: 400, expert_batch: 4, pretrain: 0}
  student: null
  compare: {guidances: [1.0], strategies: [top-1], sweep: [top-1]}
  diagnose: {extractor: efficientnet-lite2}
text:
  condition: text
  data: {text_encoder: minilm, text_length: 12}
  partition: {method: kmeans, k: 2, encoder: efficientnet-lite0, encoder_size: 64}
  network: {family: pixart}
  budget: {samples: 400, expert_batch: 4, pretrain: 0}
  student: {teacher: routed, routing: top-2, start: average, stock: true}
  compare: {strategies: [commit, full]}
""")
"""Changes of `SMALL`. Beside these, `partial` is `class` without one of its experts."""
PROMPTS = {"class": ["0", "1"], "partial": ["0", "1"], "text": ["a capital letter A", "a"]}
ROUTINGS = ["full", "top-1", "commit", "commit null sample-1"]
MORE = ["top-2", "threshold(0.1)", "sample-1", "nucleus(0.9)", "top-1 every 2"]
"""Strategies drawn of `class` beside those."""


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with some of them replaced."""
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def training(settings: Mapping[str, Any]) -> list[list[str]]:
    """Commands from nothing to an ensemble."""
    columns = ["embed", "encode"][settings["partition"]["method"] == "random" :]
    roles = ["pretrain"] if settings["budget"]["pretrain"] else []
    roles += [f"expert --expert {k}" for k in range(settings["partition"]["k"])]
    roles += ["router", "monolith", *(["student"] if settings["student"] else [])]
    prepared = [*(["data", stage] for stage in ("ingest", *columns)), ["partition"]]
    return [*prepared, *(["train", *role.split()] for role in roles), ["assemble"]]


def using(name: str, models: list[str]) -> list[list[str]]:
    """Commands on a finished ensemble, and on models beside it."""
    cases = {routing: ["--routing", routing] for routing in ROUTINGS + (MORE if name == "class" else [])}
    found, dense = list[list[str]](), {model: ["--model", model] for model in models}
    for case, words in {**cases, **dense}.items():
        for guidance in ("1", "2"):
            out = ["--count", "2", "--out", f"{{folder}}/drawn/{case} at {guidance}.png"]
            found.append(["sample", *PROMPTS.get(name, []), *words, "--guidance", guidance, *out])
    found += [["compare"], *(["evaluate", *words] for words in ([], *dense.values())), ["diagnose"]]
    exported = (
        ["ensemble", "student"] if name == "text" else ["ensemble"]
    )  # a stock pipeline runs that student
    return found + [["export", "--to", f"{{folder}}/exported/{m}", "--model", m] for m in exported]


CHILD = """
import json, os, sys, time
os.cpu_count, start = lambda: 1, time.monotonic()  # some commands take all cores
try:
    from atoll.cli.main import atoll
except ImportError:  # code of before there was the package
    from atoll.cli import atoll
for argv in json.loads(sys.argv[1]):  # in one process: to import everything for each takes longer than they
    print(f"{time.monotonic() - start:6.1f} s: atoll", *argv, flush=True)
    atoll.main(argv, standalone_mode=False)
"""
VAE = """
import sys, torch
from diffusers import AutoencoderKL
torch.manual_seed(0)
sides = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
AutoencoderKL(**sides, block_out_channels=(8, 8), norm_num_groups=4).save_pretrained(sys.argv[1])
"""


def environment() -> dict[str, str]:
    """That of a child process: the code of this checkout, no hub, one thread."""
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **fixed, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"}


def child(code: str, *words: str, log: Path) -> None:
    """Run Python code to its end, its output in a file."""
    command = [sys.executable, "-c", code, *words]
    with log.open("a") as out:
        ended = subprocess.run(command, env=environment(), stdout=out, stderr=out)
    if ended.returncode:
        sys.exit(f"{log} ends with\n{log.read_text()[-3000:]}")


def run(folder: Path, commands: list[list[str]], new: bool) -> None:
    """Run commands on the campaign in a folder."""
    (folder / "drawn").mkdir()
    whole = []
    for words in commands:
        verb = 2 if words[0] in ("data", "train") else 1
        words = [word.format(folder=folder) for word in (*words[:verb], "{folder}", *words[verb:])]
        whole.append(words if new else [OLD_WORDS.get(word, word) for word in words])
    child(CHILD, json.dumps(whole), log=folder.with_suffix(".log"))
    print(f"{folder.name}: {len(whole)} commands", flush=True)


def campaigns(folder: Path, new: bool) -> Iterator[tuple[str, Path]]:
    """Train and use every campaign; their names and folders."""
    for name, changes in CAMPAIGNS.items():
        settings, place = merged(SMALL, changes), folder / name
        place.mkdir(parents=True)
        if settings["data"]["vae"] != "none":
            settings["data"]["vae"] = str(place / "vae")
            child(VAE, settings["data"]["vae"], log=folder / "vae.log")
        budget = {key if new else OLD_SETTINGS.get(key, key): n for key, n in settings["budget"].items()}
        (place / "campaign.yaml").write_text(yaml.safe_dump({**settings, "budget": budget}))
        models = ["monolith", *(["student"] if settings["student"] else [])]
        run(place, [*training(settings), *using(name, models)], new)
        yield name, place
    place = shutil.copytree(folder / "class", folder / "partial")
    lost = (*place.glob("*/1/run"), *place.glob("*/1/expert"))
    for path in (*lost, *(place / name for name in ("ensemble", "student", "reports", "drawn", "exported"))):
        shutil.rmtree(path)
    run(place, [["assemble"], *using("partial", ["monolith"])], new)
    yield "partial", place


def record(folder: Path) -> Numbers:
    """Everything that is compared, by path."""
    command = [sys.executable, "-m", "atoll", "train", "--help"]
    new = b"pretrain" in subprocess.check_output(command, env=environment())
    found = Numbers()
    for name, place in campaigns(folder, new):
        for section in (losses, pictures, tables, numbers, weights):
            prefix = f"{name}/{section.__name__}/"
            found |= {prefix + canonical(path): value for path, value in section(place).items()}
    return found


def sha(data: bytes | str) -> str:
    """The first half of a SHA-256."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:32]


def losses(place: Path) -> Numbers:
    """Every number of every `metrics.jsonl` but the time: a digest of all, and a few to see how far off."""
    found = Numbers()
    for path in place.glob("**/run/metrics.jsonl"):
        by_key: dict[str, list[float]] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            for key in set(line) - CLOCKS:
                by_key.setdefault(key, []).extend(line[key] if isinstance(line[key], list) else [line[key]])
        for key, values in by_key.items():
            name = f"{path.parents[1].relative_to(place)}/{key}"
            found[f"{name}/all {len(values)}"] = sha(repr(values))
            found |= {f"{name}/{n}": values[n] for n in (0, len(values) // 2, len(values) - 1)}
    return found


def pictures(place: Path) -> Numbers:
    """Pixels of all that was drawn: by `sample`, as previews, for reports and model cards."""
    from PIL import Image

    images = {path.relative_to(place).as_posix(): Image.open(path) for path in place.glob("**/*.png")}
    return {path: sha(f"{im.mode} {im.size}".encode() + im.tobytes()) for path, im in images.items()}


def tables(place: Path) -> Numbers:
    """Cells of the CSVs of `compare` and `diagnose`; a row is named by its texts, and numbered."""
    found, seen = Numbers(), Counter[str]()
    for path in (path for path in place.glob("reports/*/*.csv") if path.parent.name != "evaluate"):
        for row in csv.DictReader(path.read_text().splitlines()):
            values = {column: float(cell) for column, cell in row.items() if NUMBER.fullmatch(cell)}
            texts = " ".join(canonical(cell) for column, cell in row.items() if column not in values)
            name = f"{path.parent.name}/{path.stem}/{texts.strip()}"
            seen[name] += 1
            found |= {f"{name} {seen[name]}/{c}": value for c, value in values.items() if c != "seconds"}
    return found


def numbers(place: Path) -> Numbers:
    """The essence of the JSONs of `compare`, `diagnose` and `evaluate`."""
    compared = json.loads((place / "reports/compare.json").read_text())
    (diagnosed,) = (json.loads(path.read_text()) for path in place.glob("reports/diagnos*.json"))
    evaluated = [json.loads(path.read_text()) for path in place.glob("reports/evaluate/*.json")]
    kept = ("components", "real_training_pictures", "reference_rows", "neighbours")
    tree = {
        "compare": {name: compared[name] for name in ("train_flops", "routing")},
        "metric": {name: compared["metric"][name] for name in kept},
        "diagnose": (diagnosed["copies"] or {}).get("limits") or {},
        "evaluate": {result["subject"]["name"]: result["values"] for result in evaluated},
    }
    return dict(leaves(tree))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of a tree by path, and digests of its lists."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}" if path else key)
    elif isinstance(tree, list):
        yield path, sha(repr(tree))
    elif isinstance(tree, int | float):
        yield path, float(tree)


def weights(place: Path) -> Numbers:
    """Digests of the tensors of all that was drawn, published, assembled and exported."""
    from safetensors.torch import load_file

    found = Numbers()
    paths = place.glob("**/diffusion_pytorch_model.safetensors")
    for path in (path for path in paths if "run" not in path.parts):
        tensors = sorted(load_file(path).items())
        parts = [(key, str(value.dtype), value.shape, sha(value.numpy().tobytes())) for key, value in tensors]
        found[path.parent.relative_to(place).as_posix()] = sha(repr(parts))
    return found


def apart(old: Any, new: Any) -> float:
    """The relative difference of numbers; infinite of anything else."""
    known = isinstance(old, float) and isinstance(new, float)
    return abs(new - old) / max(abs(old), abs(new)) if known else math.inf


def kind_of(path: str, old: Any, new: Any) -> str:
    """How a value compares, where None is none."""
    if old is None or old == new:
        return "added" if old is None else "equal"
    near = (most for pattern, (most, _) in EXPECTED.items() if fnmatch.fnmatch(path, pattern))
    return "expected" if apart(old, new) <= next(near, -1) else "missing" if new is None else "different"


def compare(old: Numbers, new: Numbers) -> bool:
    """Print what is equal and what is not; whether all differences are expected."""
    groups: dict[str, dict[str, list[str]]] = {}
    for path in sorted({*old, *new}):
        group = groups.setdefault("/".join(path.split("/")[:3]), {})
        group.setdefault(kind_of(path, old.get(path), new.get(path)), []).append(path)
    kinds = ("equal", "different", "missing", "expected", "added")
    print(f"{'':<33}" + "".join(f"{kind:>10}" for kind in kinds) + "  largest relative difference")
    for name, group in groups.items():
        paths = [path for kind in kinds[1:4] for path in group.get(kind, [])]
        far = max(((apart(old[path], new.get(path)), path) for path in paths), default=(0.0, ""))
        most = f"  {far[0]:.2g}: {far[1]}" if far[0] else ""
        print(f"{name:<33}" + "".join(f"{len(group.get(kind, [])):>10}" for kind in kinds) + most)
    for kind in ("different", "missing", "added"):
        for path in [path for group in groups.values() for path in group.get(kind, [])][:40]:
            print(f"{kind}: {path}: {old.get(path)} -> {new.get(path)}")
    for pattern, (bound, why) in EXPECTED.items():
        print(f"expected of {pattern}, at most {bound:g}: {why}")
    return not any(group.keys() & {"different", "missing"} for group in groups.values())


def main() -> None:
    """Record, and keep or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE", help="write what the code at hand computes")
    what.add_argument("--against", type=Path, metavar="FILE", help="compare it with what was recorded")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new folder and leave it there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = record((asked.keep or Path(scratch)).resolve())
    if asked.record:
        versions = {package: version(package) for package in ("torch", "diffusers", "numpy")}
        rows: dict[str, Numbers] = {}
        for path, value in sorted(found.items()):
            rows.setdefault(path.rpartition("/")[0], {})[path.rpartition("/")[2]] = value
        content = {"benchmark": "goldens", "machine": machine(), "versions": versions, "rows": rows}
        asked.record.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n")
    else:
        rows = json.loads(asked.against.read_text())["rows"]
        old = {f"{name}/{last}": value for name, row in rows.items() for last, value in row.items()}
        sys.exit(not compare(old, found))


if __name__ == "__main__":
    main()
