"""Goldens: what tiny campaigns compute, to the bit, to prove that changed code computes the same.

    python tests/goldens.py --record tests/goldens.json
    python tests/goldens.py --against tests/goldens.json
    python tests/goldens.py --against tests/goldens.json --only class --only adopted

Bits depend on the processor and on the versions of PyTorch and others: record and compare on one machine.
The code is that of this checkout, or with `--source DIR` that of another one's `src`: commands and
formats are all that is used of it. Each campaign takes under two minutes of one core, all of them under ten.
"""

import argparse
import csv
import fnmatch
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?")
CLOCKS = {"seconds", "validation_seconds", "times", "samples", "step", "lr", "skipped"}
"""Fields of metrics.jsonl that are no result."""
Numbers = dict[str, Any]
"""By path, such as `class/losses/router/loss/sha256`: a number, or a digest."""

EXPECTED: dict[str, tuple[float, str]] = {}
"""Differences that are meant: a pattern of paths, the largest relative one, and why."""

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
CHANGES: dict[str, dict[str, Any]] = yaml.safe_load("""
class:  # 200 steps and more of every network
  compare: {guidances: [1.0, 3.0], sweep: [once, once null sample-1], curve: true}
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
  compare: {strategies: [once, full]}
""")
"""Changes of `SMALL`. Beside these, `partial` is `class` without one of its experts."""
PROMPTS = {
    **{name: ["0", "1"] for name in ("class", "partial", "adopted", "optout", "weighted")},
    "text": ["a capital letter A", "a"],
    "buckets": ["a red bar", "a blue bar"],
}
ROUTINGS = ["full", "top-1", "once", "once null sample-1"]
MORE = {
    "class": ["top-2", "threshold(0.1)", "sample-1", "nucleus(0.9)", "top-1 every 2", "full null pretrain"],
    "weighted": ["top-1 null pretrain"],
}
"""Strategies drawn beside those."""
SERVED = ("class", "text", "buckets", "adopted")
"""Campaigns whose pictures are drawn by `atoll serve` and the diffusers pipeline too."""


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with some of them replaced."""
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


PLAIN = merged(
    SMALL,
    {"budget": {"samples": 400, "expert_batch": 4, "pretrain": 0}, "partition": {"k": 2}, "student": None},
)
LESS: dict[str, dict[str, Any]] = yaml.safe_load("""
adopted:  # expert 1 is a network that diffusers wrote, of another schedule and prediction
  data: {ingest: {size: 8, heldout: 0.1}}
optout: {}
weighted:
  data:
    weighted: true
    source: {plain: {source: PICTURES/plain, weight: 3}, fancy: {source: PICTURES/fancy}}
    ingest: {mode: rgb, label: label}
  budget: {pretrain: 0.3}
buckets:
  condition: text
  data:
    source: PICTURES
    text_encoder: minilm
    text_length: 12
    ingest: {size: 16, mode: rgb, buckets: {sizes: [16x16, 24x12, 12x24], min_rows: 4}}
  network: {family: pixart}
""")
"""Campaigns that are trained, sampled and compared with their monolith, and no more."""


def training(name: str, settings: Mapping[str, Any]) -> list[list[str]]:
    """Commands from nothing to an ensemble."""
    columns = ["embed", "encode"][settings["partition"]["method"] == "random" :]
    commands = [*(["data", stage] for stage in ("ingest", *columns)), ["partition"]]
    # A third of the pictures of one cluster and a few of the other leave.
    commands += [["partition", "--opt-out", "{folder}/leaving"]] if name == "optout" else []
    commands += [["adopt", "{folder}/theirs", "--expert", "1"]] if name == "adopted" else []
    roles = ["pretrain"] if settings["budget"]["pretrain"] else []
    roles += [f"expert --expert {k}" for k in range(1 if name == "adopted" else settings["partition"]["k"])]
    roles += ["router", "monolith", *(["student"] if settings["student"] else [])]
    return [*commands, *(["train", *role.split()] for role in roles), ["assemble"]]


def using(name: str, models: list[str]) -> list[list[str]]:
    """Commands on a finished ensemble, and on models beside it."""
    cases = {
        routing: ["--routing", routing] for routing in ROUTINGS[2 * (name in LESS) :] + MORE.get(name, [])
    }
    commands, dense = list[list[str]](), {model: ["--model", model] for model in models}
    for case, words in {**cases, **dense}.items():
        for guidance in ("1", "2"):
            out = ["--count", "2", "--out", f"{{folder}}/drawn/{case} at {guidance}.png"]
            commands.append(["sample", *PROMPTS.get(name, []), *words, "--guidance", guidance, *out])
    if name == "buckets":
        commands.append(["sample", *PROMPTS[name], "--size", "24x12", "--out", "{folder}/drawn/wide.png"])
    commands.append(["compare"])
    if name in LESS:
        return commands
    commands += [*(["evaluate", *words] for words in ([], *dense.values())), ["diagnose"]]
    # Of the students, `text` has the one that a stock pipeline runs.
    exported = ["ensemble", "student"] if name == "text" else ["ensemble"]
    return commands + [["export", "--to", f"{{folder}}/exported/{m}", "--model", m] for m in exported]


CHILD = """
import json, os, sys, time
os.cpu_count, start = lambda: 1, time.monotonic()  # some commands take all cores
try:
    from atoll.cli.main import atoll
except ImportError:
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


PICTURES = """
import sys
from pathlib import Path
import numpy as np
from PIL import Image
rng, folder = np.random.default_rng(0), Path(sys.argv[1])
for source, sizes in {"plain": {(40, 40): 40, (60, 30): 24}, "fancy": {(40, 40): 30, (30, 60): 16}}.items():
    (folder / source).mkdir(parents=True)
    lines = ["file_name,text,label"]
    for size, count in sizes.items():
        for number in range(count):
            red = number % 2
            pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8) // 2
            pixels[:, number % size[0] // 2 :, 2 * red] += 120
            name = f"{size[0]}-{number:02d}.png"
            Image.fromarray(pixels).save(folder / source / name)
            lines.append(f"{name},a {'blue' if red else 'red'} bar {number % 5},{red}")
    (folder / source / "metadata.csv").write_text("\\n".join(lines) + "\\n")
"""
THEIRS = """
import sys, torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
torch.manual_seed(0)
DiTTransformer2DModel(
    num_attention_heads=2, attention_head_dim=8, in_channels=1, out_channels=2, num_layers=2, sample_size=8,
    patch_size=4, num_embeds_ada_norm=2, norm_num_groups=1,
).save_pretrained(sys.argv[1] + "/transformer")
DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(sys.argv[1] + "/scheduler")
"""
LEAVING = """
import sys, json
from pathlib import Path
import pyarrow.parquet as pq
from safetensors.numpy import load_file
folder, ids = Path(sys.argv[1]), {}
for k in (0, 1):
    rows = [pq.read_table(path) for path in sorted((folder / f"islands/{k}/data/rows").glob("*.parquet"))]
    ids[k] = [name for table in rows for name in table["id"].to_pylist()]
(folder / "leaving").write_text("\\n".join(sorted(ids[0])[::3] + sorted(ids[1])[:4]) + "\\n")
"""
PIPELINE = """
import json, sys
from pathlib import Path
import torch
from diffusers import DPMSolverMultistepScheduler
from atoll import AtollPipeline
folder, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
pipe = AtollPipeline.from_pretrained(str(folder / "ensemble"))
pipe.set_progress_bar_config(disable=True)
asked = {"num_images_per_prompt": 2}
if prompts:
    labels = prompts[0].isdigit()
    asked = {"class_labels": [int(p) for p in prompts]} if labels else {"prompt": prompts}
def draw(name, **more):
    call = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 4, **asked, **more}
    for number, image in enumerate(pipe(**call).images):
        image.save(folder / "drawn" / f"pipeline {name} {number}.png")
for routing in ("full", "top-1", "once null sample-1", "top-2 every 2"):
    draw(routing, routing=routing, guidance_scale=2.0)
draw("unguided", guidance_scale=1.0)
draw("list", generator=[torch.Generator().manual_seed(n) for n in (3, 4)])
pipe.scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
draw("dpm++")
"""
SERVER = """
import base64, json, re, subprocess, sys, urllib.request
from pathlib import Path
folder, prompts = Path(sys.argv[1]), json.loads(sys.argv[2]) or [""]
command = [sys.executable, "-m", "atoll", "serve", str(folder), "--set", "port=0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
try:
    address = ""
    for line in server.stdout:
        address = address or "".join(re.findall(r"http://[^\\s/]+", line)[:1])
        if "ready" in line:
            break
    for name, more in {
        "plain": {}, "top-1": {"routing": "top-1", "guidance": 1.0}, "negative": {"negative": prompts[-1]},
        "full": {"routing": "full", "guidance": 2.0, "steps": 5}, "shifted": {"shift": 2.0, "steps": 6},
        "once": {"routing": "once null sample-1"}, "monolith": {"model": "monolith"},
    }.items():
        if name == "negative" and (not prompts[0] or prompts[0].isdigit()):
            continue
        fields = {"prompt": prompts[0], "n": 2, "seed": 7, "steps": 4, **more}
        request = urllib.request.Request(address + "/v1/images/generations", json.dumps(fields).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            for number, entry in enumerate(json.load(answer)["data"]):
                out = folder / "drawn" / f"served {name} {number}.png"
                out.write_bytes(base64.b64decode(entry["b64_json"]))
finally:
    server.terminate()
    server.wait(60)
"""


def child(code: str, *words: str | Path, log: Path, source: Path) -> None:
    """Run Python code to its end, its output in a file: with the code in `source`, no hub, one thread."""
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **fixed, "PYTHONPATH": str(source), "MPLBACKEND": "agg"}
    with log.open("a") as out:
        command = [sys.executable, "-c", code, *map(str, words)]
        ended = subprocess.run(command, env=environment, stdout=out, stderr=out)
    if ended.returncode:
        sys.exit(f"{log} ends with\n{log.read_text()[-3000:]}")


def run(folder: Path, commands: list[list[str]], source: Path) -> None:
    """Run commands on the campaign in a folder."""
    whole = []
    for words in commands:
        verb = 2 if words[0] in ("data", "train") else 1
        whole.append([word.format(folder=folder) for word in (*words[:verb], "{folder}", *words[verb:])])
    child(CHILD, json.dumps(whole), log=folder.with_suffix(".log"), source=source)


def made(name: str, folder: Path, source: Path) -> None:
    """Train a campaign and use it."""
    of = {"log": folder.with_suffix(".log"), "source": source}
    settings = merged(PLAIN, LESS[name]) if name in LESS else merged(SMALL, CHANGES[name])
    models = ["monolith", *(["student"] if settings["student"] else [])]
    (folder / "drawn").mkdir(parents=True)
    if settings["data"]["vae"] != "none":
        settings["data"]["vae"] = str(folder / "vae")
        child(VAE, folder / "vae", **of)
    if name in ("weighted", "buckets"):
        child(PICTURES, folder / "pictures", **of)
    if name == "adopted":
        child(THEIRS, folder / "theirs", **of)
    text = yaml.safe_dump(settings).replace("PICTURES", str(folder / "pictures"))
    (folder / "campaign.yaml").write_text(text)
    commands = [*training(name, settings), *using(name, models)]
    if name == "optout":  # the rows are known once they are on islands
        cut = commands.index(["partition"]) + 1
        run(folder, commands[:cut], source)
        child(LEAVING, folder, **of)
        commands = commands[cut:]
    run(folder, commands, source)
    if name in SERVED:
        child(PIPELINE, folder, json.dumps(PROMPTS.get(name, [])), **of)
        child(SERVER, folder, json.dumps(PROMPTS.get(name, [])), **of)


def broken(whole: Path, folder: Path, source: Path) -> None:
    """Use a copy of a finished campaign that has lost an expert."""
    shutil.copytree(whole, folder)
    lost = (*folder.glob("*/1/run"), *folder.glob("*/1/expert"))
    for path in (*lost, *(folder / name for name in ("ensemble", "student", "reports", "drawn", "exported"))):
        shutil.rmtree(path)
    (folder / "drawn").mkdir()
    run(folder, [["assemble"], *using("partial", ["monolith"])], source)


def record(name: str, scratch: Path, source: Path) -> Numbers:
    """Everything of a campaign that is compared, by path."""
    folder, start = scratch / name, time.monotonic()
    if name == "partial":
        if not (scratch / "class").exists():
            made("class", scratch / "class", source)
        broken(scratch / "class", folder, source)
    else:
        made(name, folder, source)
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    sections = (losses, pictures, tables, numbers, weights, data)
    return {
        f"{name}/{section.__name__}/{path}": value
        for section in sections
        for path, value in section(folder).items()
    }


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
            texts = " ".join(cell for column, cell in row.items() if column not in values)
            name = f"{path.parent.name}/{path.stem}/{texts.strip()}"
            seen[name] += 1
            found |= {f"{name} {seen[name]}/{c}": value for c, value in values.items() if c != "seconds"}
    return found


def numbers(place: Path) -> Numbers:
    """The essence of the JSONs of `compare`, `diagnose` and `evaluate`."""
    compared = json.loads((place / "reports/compare.json").read_text())
    looked = [json.loads(path.read_text()) for path in place.glob("reports/diagnos*.json")]
    (diagnosed,) = looked or [{"copies": None}]
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


def data(place: Path) -> Numbers:
    """Rows of every data set and island, and the tensors of every column."""
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file

    found = Numbers()
    for path in place.glob("**/rows/*.parquet"):
        found[path.relative_to(place).as_posix()] = sha(repr(pq.read_table(path, columns=["id"]).to_pylist()))
    for path in (
        path for pattern in ("**/columns/*/*", "partition/*") for path in place.glob(f"{pattern}.safetensors")
    ):
        parts = [
            (key, str(value.dtype), value.shape, sha(value.tobytes()))
            for key, value in sorted(load_file(path).items())
        ]
        found[path.relative_to(place).as_posix()] = sha(repr(parts))
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
    what.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what the code computes, in place of what FILE has of the same",
    )
    what.add_argument("--against", type=Path, metavar="FILE", help="compare it with what was recorded")
    names = [*CHANGES, "partial", *LESS]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument(
        "--source", type=Path, default=ROOT / "src", metavar="DIR", help="where the code lies"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new folder and leave it there")
    asked = parser.parse_args()
    chosen = [name for name in names if name in (asked.only or names)]
    file = asked.record or asked.against
    content = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    found = Numbers()
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen:
            found |= record(name, (asked.keep or Path(scratch)).resolve(), asked.source.resolve())
    old = {
        f"{row}/{last}": value for row, values in content["rows"].items() for last, value in values.items()
    }
    mine = {path for path in old if path.partition("/")[0] in chosen}
    if asked.record:  # what was recorded of other campaigns stays
        versions = {package: version(package) for package in ("torch", "diffusers", "numpy")}
        rows: dict[str, Numbers] = {}
        for path, value in sorted({**{path: old[path] for path in old.keys() - mine}, **found}.items()):
            rows.setdefault(path.rpartition("/")[0], {})[path.rpartition("/")[2]] = value
        content = {"machine": platform.platform(), "versions": versions, "rows": rows}
        file.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n")
    else:
        sys.exit(not compare({path: old[path] for path in mine}, found))


if __name__ == "__main__":
    main()
