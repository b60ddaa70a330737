"""Hostile inputs, one a row: what is forged, the command that meets it, and how it has to end."""

import base64
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file, save

from atoll.base.hashing import digest_tensors, sha256
from atoll.store.signatures import SIGNATURE, sign
from atoll.store.store import Store
from helpers_data import saved
from hostile.arena import Arena, edit, relisted, replace
from hostile.mutate import agree
from keys import key_pair

DEEP = b"[" * 100_000
DIGITS = b"1" * 5_000
WEIGHTS = "diffusion_pytorch_model.safetensors"
ASSEMBLE, AUDIT, PLAN = "assemble {campaign}", "data audit {campaign}", "plan {campaign}"
REPORT, STATUS, TRAIN = "report {campaign}", "status {campaign}", "train expert {campaign} --expert 0"
EXPORT, TO = "export {campaign} --to {inside}/out --no-picture", "export {campaign} --to"
DRAW, SAMPLE = "sample {campaign} house", "sample {campaign} house --out {inside}/x.png"
PIPE, INGEST = "data ingest {fresh} --set", "data ingest {fresh} --set data.source={source}"
PARQUET = f"{PIPE} data.source={{inside}}/source.parquet --set data.ingest.caption=caption"
TAR = f"{PIPE} data.source={{inside}}/source.tar --set data.ingest.size=8"
SCORE = "aesthetics score {source} --scorer {source}/scorer --out {inside}/scores.parquet"
SET = "plan {campaign} --set"

Forge = Callable[[Arena], object]


@dataclass(frozen=True)
class Row:
    """One input.

    Attributes:
        name: of the case.
        forge: makes it in the arena.
        argv: the command, with `{campaign}`, `{export}`, `{source}` and `{inside}` for paths.
        call: or a function of `faults.call` and its arguments, likewise.
        words: what the line of error holds; empty where the input is rightly accepted.
        slow: whether its like is met elsewhere too.
    """

    name: str
    forge: Forge
    argv: tuple[str, ...]
    words: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    slow: bool = False


ROWS: list[Row] = []


def row(name: str, forge: Forge, argv: str, *words: str, slow: bool = False) -> None:
    """Add an input that a command meets; with words, one that it refuses."""
    ROWS.append(Row(name, forge, tuple(argv.split()), words, slow=slow))


def load(name: str, forge: Forge, *words: str, call: str = "pipeline {export}", slow: bool = False) -> None:
    """Add a folder that a function of `faults.call` meets, by default `AtollPipeline.from_pretrained`."""
    ROWS.append(Row(name, forge, (), words, tuple(call.split()), slow))


def change(place: str, function: Callable[[Any], object]) -> Forge:
    """Change the content of a JSON file in place."""
    return lambda arena: edit(arena / place, lambda tree: [function(tree), tree][1])


def set_json(place: str, **values: Any) -> Forge:
    """Replace fields of a JSON file; `a__b` is b within a."""

    def assign(tree: Any) -> None:
        for key, value in values.items():
            *groups, last = key.split("__")
            group = tree
            for name in groups:
                group = group[int(name) if isinstance(group, list) else name]
            group[last] = value

    return change(place, assign)


def drop(place: str, key: str) -> Forge:
    """Remove a field of a JSON file."""
    return change(place, lambda tree: tree.pop(key))


def bytes_of(place: str, data: bytes) -> Forge:
    """Replace a file's bytes."""
    return lambda arena: replace(arena / place, data)


def link_to(place: str, target: str) -> Forge:
    """A link in a file's place."""
    return lambda arena: [(arena / place).unlink(missing_ok=True), (arena / place).symlink_to(target)]


def both(*forges: Forge) -> Forge:
    """One after the other."""
    return lambda arena: [forge(arena) for forge in forges]


def forged(*forges: Forge) -> Forge:
    """An export whose manifest agrees with what was forged."""
    return both(*forges, lambda arena: relisted(arena / "export"))


def agreed(part: str, **values: Any) -> Forge:
    """A changed `config.json` whose digests all agree."""
    place = f"export/{part}/config.json"
    return both(set_json(place, **values), lambda arena: agree(arena / "export", arena / place))


def nothing(arena: Arena) -> None:
    """The command line itself is what is hostile."""


# What is trusted.

PAYLOAD = "import pathlib; pathlib.Path({marker!r}).write_text('ran')\nclass Evil: pass\n"
ENSEMBLE, EXPORTED = "campaign/ensemble/ensemble.json", "export/ensemble.json"
INDEX, CARD = "export/model_index.json", "campaign/islands/0/expert/card.json"
TEXT = "export/text_encoder/config.json"
CARDS = [f"export/{part}/card.json" for part in ("router", "experts/0", "experts/1")]


def evil_code(arena: Arena) -> bytes:
    return PAYLOAD.format(marker=str(arena.folder / "ran.txt")).encode()


def nested_pipeline(component: str, depth: str) -> Forge:
    """A component that is a pipeline whose own component is a Python file, `depth` folders down."""
    code, inner = f"{component}/{depth}/evil.py", f"{component}/model_index.json"
    index = {"_class_name": [f"{depth}/evil", "Evil"], "_diffusers_version": "0.36.0"}
    files = [{"path": path, "bytes": 0, "sha256": ""} for path in (inner, code)]
    return forged(
        lambda arena: replace(arena / f"export/{code}", evil_code(arena)),
        bytes_of(f"export/{inner}", json.dumps(index).encode()),
        set_json(INDEX, **{component: ["diffusers", "DiffusionPipeline"]}),
        change(EXPORTED, lambda manifest: manifest["files"].extend(files)),
    )


def pickled_component(arena: Arena) -> None:
    old, new = (f"text_encoder/{name}" for name in ("model.safetensors", "pytorch_model.bin"))
    data = io.BytesIO()
    torch.save(load_file(arena / f"export/{old}"), data)
    (arena / f"export/{old}").unlink()
    replace(arena / f"export/{new}", data.getvalue())

    def rename(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            entry["path"] = entry["path"].replace(old, new)

    edit(arena / EXPORTED, rename)
    relisted(arena / "export")


def vae_of_a_card(kind: str) -> Forge:
    """Cards that name a folder of the author's as the autoencoder."""

    def name_it(arena: Arena) -> None:
        replace(arena / "evil/evil.py", evil_code(arena))
        for card in CARDS:
            set_json(card, latents__name=str(arena / "evil"), latents__hash="0" * 64)(arena)

    return forged(
        bytes_of("evil/config.json", json.dumps({"_class_name": kind}).encode()),
        bytes_of("evil/diffusion_pytorch_model.bin", b"\x80\x04N."),
        bytes_of("evil/model_index.json", json.dumps({"_class_name": ["evil", "Evil"]}).encode()),
        name_it,
    )


def nudged_encoder(arena: Arena) -> None:
    path = arena / "export/text_encoder/model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if weights[name].ndim == 2)
    replace(path, save({**weights, name: weights[name] + 1}))


def lists(*paths: str) -> Forge:
    """The assembled folder's manifest names more files, as if they were the router's card."""

    def add(manifest: dict[str, Any]) -> None:
        card = next(entry for entry in manifest["files"] if entry["path"] == "router/card.json")
        manifest["files"] += [{**card, "path": path} for path in paths]

    return change(ENSEMBLE, add)


# Cards that name a hub repository of the author's as the text encoder, which is not in the export.
hub_encoder = forged(
    *(set_json(card, text__name="evil/encoder") for card in CARDS),
    set_json(INDEX, text_encoder=[None, None], tokenizer=[None, None]),
)
outside = lists("router/../../router/card.json", "../../../beside.txt")
removes = lists("../campaign.json", "../islands/0/data/manifest.json", "../../../beside.txt")
load("a nested pipeline runs code", nested_pipeline("scheduler", "sub"), "scheduler")
load("a nested pipeline two levels down", nested_pipeline("scheduler", "sub/sub"), "scheduler")
load("a text encoder that is a pipeline", nested_pipeline("text_encoder", "sub"), "text_encoder")
load("a card's autoencoder is a pipeline", vae_of_a_card("DiffusionPipeline"), "evil")
load("a card's autoencoder is pickle", vae_of_a_card("AutoencoderKL"), "evil")
load("a card's text encoder lies on the hub", hub_encoder, "evil/encoder")
load("a component is pickle", pickled_component, "pickle")
load("a tensor of the text encoder was changed", forged(nudged_encoder), "text encoder")
load("a manifest that lists nothing", set_json(EXPORTED, files=[]), "ensemble.json")
row("an ensemble that lists nothing", set_json(ENSEMBLE, files=[]), SAMPLE, "ensemble.json")
row("export writes beside its folder", outside, f"{TO} {{inside}}/out/exp --no-picture", "ensemble.json")
row("assemble removes what a manifest names", both(removes, set_json(CARD, rows=141)), ASSEMBLE, "card.json")
OTHERS = {"prediction": "eps", "schedule": "ddpm-linear", "rows": 10**40, "parameters": -5}
for field, value in {**OTHERS, "train_flops": 1e308}.items():
    name = f"a card that is not the published one: {field}"
    row(name, set_json(CARD, **{field: value}), ASSEMBLE, "card.json")


# Links that would be written through, and words that a terminal would obey.


def link(place: str, name: str) -> Forge:
    """A link to a folder of somebody else's."""

    def forge(arena: Arena) -> None:
        elsewhere = arena.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        (arena / place).mkdir(parents=True, exist_ok=True)
        (arena / place / name).symlink_to(elsewhere)

    return forge


for part in ("text_encoder", "tokenizer", "router", "scheduler", "experts"):
    forge = both(bytes_of("out/model_index.json", b'{"_class_name": "AtollPipeline"}'), link("out", part))
    row(f"export into a folder whose {part} is a link", forge, f"{TO} {{inside}}/out --no-picture", "a link")


def data_path(path: str) -> Forge:
    def forge(arena: Arena) -> None:
        settings = arena / "fresh/campaign.yaml"
        named = f"  path: {path.format(inside=arena.inside)} "
        replace(settings, settings.read_bytes().replace(b"  path: data ", named.encode()))

    return both(link("fresh", "data"), forge)


for place in ("data", "{inside}/fresh/data", "./data/deeper", "{inside}/fresh/data/deeper"):
    row(f"a data set at {place}, behind a link", data_path(place), INGEST, "runs through a link")
row("terminal codes as a column's name", nothing, f"{SET} data.source={{source}}/\x1b[2Jx\u202e", "source")
for where, key, value in (
    ("itself", "_attn_implementation", "evil/kernels"),
    ("within", "attn_implementation", {"": "flash_attention_2"}),
    ("deep", "text_config", {"_attn_implementation_internal": "evil/kernels:x"}),
):
    forge = forged(set_json(TEXT, **{key: value}))
    load(f"an attention that is fetched, named by the text encoder {where}", forge, "wants attention by")


# Files that are not what they should be.

PARTITION, COLUMN = "campaign/partition/partition.json", "campaign/data/columns/latents/column.json"
JSONS = {
    CARD: ASSEMBLE,
    ENSEMBLE: SAMPLE,
    "campaign/campaign.json": STATUS,
    "campaign/data/manifest.json": AUDIT,
    COLUMN: AUDIT,
    PARTITION: ASSEMBLE,
    "campaign/ensemble/experts/experts.json": EXPORT,
    "campaign/ensemble/model_index.json": EXPORT,
    "campaign/islands/0/run/log/000000.json": TRAIN,
    "campaign/islands/0/run/heartbeat.json": STATUS,
    "campaign/islands/0/island.json": TRAIN,
}
MAY_PASS = ("run/heartbeat.json", "run/log/000000.json", "0/island.json")
"""Files whose damage is told as a warning, or that a finished run does not need."""
DAMAGES = {"deep": DEEP, "a huge number": b'{"k": %s}' % DIGITS, "a list": b"[]", "null": b"null"}
DAMAGES |= {"empty": b"", "no text": b"\xff\xfe{}", "half": b'{"k": 4, "ro'}
for n, (place, argv) in enumerate(JSONS.items()):
    words = () if place.endswith(MAY_PASS) else (place.rsplit("/", 1)[-1],)
    for m, (name, data) in enumerate(DAMAGES.items()):
        # Each file meets two, and each damage several files, without those that are slow.
        row(f"{place}: {name}", bytes_of(place, data), argv, *words, slow=(m - n) % len(DAMAGES) > 1)

row("ensemble.json: k is a text", set_json(ENSEMBLE, k="4"), SAMPLE, "assemble again")
row("ensemble.json: k of 10**9", set_json(ENSEMBLE, k=10**9), SAMPLE, "ensemble.json")
row("ensemble.json: no experts", set_json(ENSEMBLE, experts=[]), SAMPLE, "ensemble.json")
row("ensemble.json: one expert four times", set_json(ENSEMBLE, experts=[0] * 4), SAMPLE, "ensemble.json")
row("ensemble.json: without parts", drop(ENSEMBLE, "parts"), SAMPLE, "ensemble.json")
for name, forge, argv in (
    ("without k", drop(PARTITION, "k"), ASSEMBLE),
    ("k of 10**9", set_json(PARTITION, k=10**9), ASSEMBLE),
    ("many rows", set_json(PARTITION, rows="many"), ASSEMBLE),
    ("another version", set_json(PARTITION, schema=99), ASSEMBLE),
    ("other sizes", set_json(PARTITION, sizes=[200, 60]), REPORT),
    ("another hash", set_json(PARTITION, hash="0" * 64), REPORT),
):
    row(f"partition.json: {name}", forge, argv, "partition.json")
ODD = {"shape": {}, "latents": {}, "text": {}, "condition": "magic", "provenance__init": [1], "island": 10**9}
for field, value in ODD.items():
    row(f"card.json: {field}", set_json(CARD, **{field: value}), ASSEMBLE, "card.json")
for name, forge, word in (
    ("model_index.json: guidance is a list", set_json(INDEX, guidance_scale=[1]), "model_index.json"),
    ("model_index.json: guidance of 10**9", set_json(INDEX, guidance_scale=1e9), "model_index.json"),
    ("experts.json: k is a text", set_json("export/experts/experts.json", k="x"), "experts.json"),
    ("layers as a text", set_json("export/experts/0/config.json", num_layers="six"), "experts/0"),
    ("10**9 layers", set_json("export/experts/0/config.json", num_layers=10**9), "experts/0"),
    ("router/config.json: no experts", drop("export/router/config.json", "num_experts"), "router"),
):
    load(name, forged(forge), word)
FILES = set_json("campaign/data/manifest.json", shards__0__files={})
row("manifest.json: a shard without files", FILES, AUDIT, "manifest.json")
row("column.json: numbers of no kind", set_json(COLUMN, dtype="nn", shape=[10**12]), AUDIT)
for name, data in {
    "a safetensors header of depth": len(DEEP).to_bytes(8, "little") + DEEP,
    "weights that end early": b"\x10\0\0\0\0\0\0\0{}",
}.items():
    row(name, bytes_of(f"campaign/ensemble/experts/0/{WEIGHTS}", data), SAMPLE, WEIGHTS)


def pipe(place: str) -> Forge:
    def forge(arena: Arena) -> None:
        (arena / place).unlink(missing_ok=True)
        os.mkfifo(arena / place)

    return forge


row("card.json is a pipe, so there is none", pipe(CARD), ASSEMBLE)


# Settings and command lines.

WORDS = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 110)
)
for name, data in {
    "a date that does not exist": b"seed: 2024-13-45\n",
    "deep": b"seed: " + b"[" * 10_000,
    "an object of Python": b"seed: !!python/object/apply:os.system ['true']\n",
    "aliases that multiply": WORDS,
}.items():
    row(f"campaign.yaml: {name}", bytes_of("campaign/campaign.yaml", data), PLAN, "campaign.yaml")
NOBODY = "data ingest {campaign} --set data.source=~nosuchuser/x --set data.path={inside}/d"
for name, argv, *words in (
    ("a date that does not exist", f"{SET} seed=2024-13-45", "seed"),
    ("half a number", f"{SET} seed=0x_", "seed"),
    ("deep YAML", f"{SET} seed={'[' * 3000}", "seed"),
    ("endless clusters", f"{SET} partition.k=100000000", "k"),
    ("an endless network", f"{SET} network.depth=1000000000", "depth"),
    ("endless memory", f"{SET} launch.memory_gb=1e300", "memory_gb"),
    ("a strategy of more experts than there are", f"{SET} sampling.routing=top-99", "top-99"),
    ("a user who does not exist", "status ~nosuchuser/x", "nosuchuser"),
    ("a source of a user who does not exist", NOBODY, "nosuchuser"),
    ("export to a user who does not exist", f"{TO} ~nosuchuser/x", "nosuchuser"),
    ("export below a file", f"{TO} {{inside}}/campaign/campaign.json/x", "json/x"),
    ("export to /proc", f"{TO} /proc/x", "/proc/x"),
    ("a name of 300 letters", f"{TO} {{inside}}/{'x' * 300}", "xxx"),
    ("a picture of 300 letters", f"{DRAW} --out {{inside}}/{'x' * 300}.png", "xxx"),
    ("endless steps", f"{SAMPLE} --steps 99999999999999", "steps"),
    ("experts of many digits", f"{SAMPLE} --experts {'9' * 5000}", "experts"),
    ("endless samples", "evaluate {campaign} --samples 1000000000000000", "samples"),
    ("secrets of a URL", "status s3://KEY:SECRET@bucket/x"),
    ("a source that is a command", f"{PIPE} data.source=pipe:touch${{{{IFS}}}}{{inside}}/x", "no source"),
    ("a hub without a revision", f"{PIPE} data.source=hf://datasets/a/b", "names no revision"),
    ("a hub that climbs", f"{PIPE} data.source=hf:///../../nowhere", "there is no folder"),
    ("a pattern of many files", f"{PIPE} data.source={{source}}/{{{{0..999999999}}}}.tar", "files"),
    ("a source of that name", f"{PIPE} data.source.source.x=1", "data.source"),
):
    row(name, nothing, argv, *words)


# Sources.


def pixels(size: int = 16, red: int = 0) -> bytes:
    return saved(Image.new("RGB", (size, size), (red, 0, 0)))


def parquet(table: pa.Table) -> Forge:
    return lambda arena: pq.write_table(table, arena / "source.parquet")


def tar(*members: tuple[str, bytes], cut: int = 0, kind: bytes = b"") -> Forge:
    """A tar in place of the source, less its last bytes; its last member is of another kind."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if (name, content) == members[-1] and kind:
                info.type, info.linkname = kind, "/etc/hostname"
            file.addfile(info, io.BytesIO(content))
    return bytes_of("source.tar", data.getvalue()[: len(data.getvalue()) - cut])


for name in ("f.png", "f.txt", "metadata.jsonl"):
    row(f"a pipe as {name}", pipe(f"source/{name}"), INGEST, *([name] if name == "metadata.jsonl" else []))
NUMBER = b'{"file_name": "g1.png", "n": %s}\n' % DIGITS
row("a picture is an endless device", link_to("source/z.png", "/dev/zero"), INGEST)
row("a caption is an endless device", link_to("source/g1.txt", "/dev/zero"), INGEST)
row("metadata.jsonl: deep", bytes_of("source/metadata.jsonl", DEEP + b"\n"), INGEST)
row("metadata.jsonl: a huge number", bytes_of("source/metadata.jsonl", NUMBER), INGEST)

PICTURES = pa.array([{"bytes": pixels(), "path": "a.png"}] * 4)
CAPTIONS = pa.array(["a", "b", "c", "d"])
for name, images in {
    "text": pa.array([{"bytes": "x"}] * 4),
    "a list": pa.array([{"bytes": [1]}] * 4),
    "a number": pa.array([{"bytes": 5}] * 4),
    "a struct": pa.array([{"bytes": {"a": 1}}] * 4),
    "no struct": pa.array([1] * 4),
}.items():
    forge = parquet(pa.table({"image": images, "caption": CAPTIONS}))
    row(f"parquet: a picture's bytes are {name}", forge, PARQUET, "picture")
LATE = pa.table({"image": PICTURES, "caption": pa.array([2**62] * 4, pa.timestamp("us"))})
TWICE = pa.table([PICTURES, CAPTIONS, CAPTIONS], ["image", "caption", "caption"])
row("parquet: captions out of time", parquet(LATE), PARQUET, "caption")
row("parquet: two columns of one name", parquet(TWICE), PARQUET, "two columns")

HUGE = tarfile.TarInfo("x")
HUGE.type, HUGE.size = tarfile.XHDTYPE, 2**40
SAMPLES = [(f"{n}.{end}", data) for n in range(4) for end, data in (("png", pixels(8, n)), ("txt", b"x"))]
BESIDE = [(f"../../../beside.{end}", data) for end, data in (("png", pixels(8, 9)), ("txt", b"x"))]
PICKLE = b"\x80\x04cos\nsystem\n."
DAMAGED = "source.tar is cut off or damaged"
row("tar: cut", tar(*SAMPLES, cut=2_048), TAR, DAMAGED)
row("tar: cut within a picture", tar(*SAMPLES, cut=9_000), TAR, DAMAGED)
row("tar: names that climb", tar(*SAMPLES, *BESIDE), TAR)
row("tar: a link to a file of this machine", tar(*SAMPLES, ("4.txt", b""), kind=tarfile.SYMTYPE), TAR)
row("tar: a device", tar(*SAMPLES, ("4.png", b""), kind=tarfile.CHRTYPE), TAR)
row("tar: pickle", tar(*SAMPLES, ("0.pkl", PICKLE)), f"{TAR} --set data.ingest.caption=txt")
row("tar: headers of terabytes", bytes_of("source.tar", HUGE.tobuf(tarfile.GNU_FORMAT)), TAR, DAMAGED)
row("tar: zeros", bytes_of("source.tar", bytes(10_240)), TAR, "hold no samples")


# What the fuzzer met.

SPLIT = "campaign/data/columns/split/column.json"
for name, setting in {"activation_fn": "silu", "norm_eps": "1e-6"}.items():
    load(f"{name} of a network is {setting}", agreed("experts/0", **{name: setting}), "no network")
row("a column with a file too few", change(SPLIT, lambda tree: tree["shards"].pop(0)), AUDIT)
row("a column of negative shape", set_json(SPLIT, shape=[-1]), AUDIT)
row("a column of many dimensions", set_json(SPLIT, shape=[9] * 40), AUDIT)
row("initial weights whose digest is a number", set_json(CARD, provenance__initial_weights=0.5), REPORT)


def not_utf8(arena: Arena) -> None:
    """A parquet file whose schema is not text."""
    path = arena / "source.parquet"
    pq.write_table(pa.table({"image": [{"bytes": b"x"}], "abcde": ["a"]}), path)
    replace(path, path.read_bytes().replace(b"abcde", b"abcd\xf3"))


row("parquet: a schema that is not UTF-8", not_utf8, PARQUET)


# Scorers, which people hand on as they do models.


def scorer(data: bytes | None = None, **changes: Any) -> Forge:
    """A scorer's folder in `source`, with other weights or other fields."""
    weights = save({"x": torch.zeros(1)}) if data is None else data
    content = {
        "format": "atoll/scorer 1",
        "files": [{"path": "weights.safetensors", "bytes": len(weights), "sha256": sha256(weights)}],
        "backbone": "pixels@16",
        "producer": {"name": "pixels", "hash": digest_tensors({}), "size": 16, "resize": "bicubic"},
        "scale": {"dimensions": [{"name": "whole"}]},
        "training": {},
    }
    return both(
        bytes_of("source/scorer/weights.safetensors", weights),
        bytes_of("source/scorer/scorer.json", json.dumps({**content, **changes}).encode()),
    )


def remote_code(arena: Arena) -> None:
    """An image-text model of classes that only lie beside it."""
    scorer(backbone=f"vlm:{arena / 'source/evil'}")(arena)
    auto = {"AutoConfig": "evil.C", "AutoModelForImageTextToText": "evil.Evil"}
    config = json.dumps({"model_type": "evil", "auto_map": auto}).encode()
    replace(arena / "source/evil/config.json", config)
    replace(arena / "source/evil/evil.py", evil_code(arena))


OUTSIDE = {"path": "../../../beside.txt", "bytes": 9, "sha256": "0" * 64}
WHEEL = {"dimensions": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}, {"name": "c"}]}
for name, forge, word in (
    ("of other weights", scorer(), "do not fit its scale"),
    ("whose weights are pickle", scorer(PICKLE), "is no safetensors"),
    ("that lists a file outside", scorer(files=[OUTSIDE]), "leads out of the folder"),
    ("without files", scorer(files=[]), "0 files of weights"),
    ("at a giant size", scorer(backbone="efficientnet-lite0@99999999"), "no size from 16"),
    ("of another backbone", scorer(producer={"name": "pixels"}), "another network"),
    ("of an unknown backbone", scorer(backbone="os.system"), "unknown extractor"),
    ("with code beside its model", remote_code, "cannot load the image-text model"),
    ("of a scale that is a circle", scorer(scale=WHEEL), "cycle"),
    ("that is deep JSON", both(scorer(), bytes_of("source/scorer/scorer.json", DEEP)), "scorer.json"),
):
    row(f"scorer {name}", forge, SCORE, word)


# Tables and lists of what is in the pictures, and of how good they are.


def parquet_bytes(table: pa.Table) -> bytes:
    data = io.BytesIO()
    pq.write_table(table, data)
    return data.getvalue()


NESTED = b'{"id": ' + DEEP + b', "concept": "a"}\n'
TABLES = {
    "deep.json": (NESTED, "is no parquet"),
    "digits.jsonl": (b'{"id": %s, "concept": "a", "score": 0.5}\n' % DIGITS, "is no parquet"),
    "lists.jsonl": (b'{"id": [1], "concept": [[1]], "score": 1}\n', "has no column"),
    "number.json": (b"5\n", "is no parquet"),
    "null.json": (b"null\n", "is no parquet"),
    "twice.csv": (b"id,id,concept,concept,score\n1,1,a,a,0.5\n", "two columns have one name"),
    "head.csv": (b"id,concept,score\n", "holds no rows"),
    "empty.csv": (b"", "is no parquet"),
    "latin.csv": (b"id,concept,score\n\xff\xfe,\xff\xfe,0.5\n", "is no parquet, CSV"),
    "nul.csv": (b"\0\0\0\0\0\0", "is no parquet"),
    "struct.parquet": (
        parquet_bytes(pa.table({"id": [{"a": 1}], "concept": [{"a": 1}], "score": [0.5]})),
        "has no column",
    ),
    "bytes.parquet": (
        parquet_bytes(pa.table({"id": [b"\xff"], "concept": [b"\xff"], "score": [0.5]})),
        "has no column",
    ),
    "cut.parquet": (parquet_bytes(pa.table({"id": ["a"], "concept": ["a"]}))[:-9], "is no parquet"),
}
FIT = "concepts fit --counts {{inside}}/{0} --results {{inside}}/{0} --out {{inside}}"
FROM = "aesthetics score {{campaign}} --from {{inside}}/{0}"
for n, (name, (data, word)) in enumerate(TABLES.items()):
    for m, argv in enumerate((FIT, FROM)):
        table_row = bytes_of(name, data), argv.format(name), word
        row(f"{argv.split()[0]}: a table {name}", *table_row, slow=(n + m) % 2 > 0)


INDEX_OF = "concepts index {campaign} --vocabulary {inside}/x.txt"
LISTS = {
    "a vocabulary": INDEX_OF,
    "counts": FIT.format("x.txt"),
    "scores": FROM.format("x.txt"),
    "a scale": "aesthetics train {inside}/x.txt --scale {inside}/x.txt --out {inside}/s",
    "an opt-out": "partition {campaign} --opt-out {inside}/x.txt",
    "prompts": "sample {campaign} --prompts {inside}/x.txt",
    "GPUs": "plan {campaign} --table {inside}/x.txt",
}
for n, (name, argv) in enumerate(LISTS.items()):
    row(f"a pipe as {name}", pipe("x.txt"), argv, "x.txt is no file")
    if n < 2:  # where a pipe is refused a device is, too
        row(f"a device without an end as {name}", link_to("x.txt", "/dev/zero"), argv, "x.txt is no file")


# What would take without end.


def many_files(arena: Arena) -> None:
    for number in range(20_001):
        (arena / f"export/tokenizer/{number}.txt").touch()


def circle(arena: Arena) -> None:
    for mine, other in (("g1.txt", "l.txt"), ("l.txt", "g1.txt")):
        link_to(f"source/{mine}", other)(arena)


def million(arena: Arena) -> None:
    entry = b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(b'"%d%s' % (n, entry) for n in range(200_000)) + b"}"
    replace(arena / f"export/router/{WEIGHTS}", len(header).to_bytes(8, "little") + header)


def pax(place: str, **headers: str) -> Forge:
    info = tarfile.TarInfo("0.png")
    info.pax_headers = headers
    return bytes_of(place, info.tobuf(tarfile.PAX_FORMAT) + bytes(10_240))


LEAVES = [{"name": "0"}, *({"name": str(n), "parent": str(n - 1)} for n in range(1, 3_000))]
SPACES = " " * 100_000
load("a part of many files", many_files, "holds more than")
load("a million tensors of nothing", forged(million), "is damaged, or no safetensors")
for key, value in {"sample_size": 20_000, "pos_embed_max_size": 100_000}.items():
    load(f"{key} of {value}", agreed("experts/0", **{key: value}), f"{key} is {value}")
for key, value in {"num_hidden_layers": 10**5, "num_layers": 10**9, "vocab_size": 10**12}.items():
    load(f"a text encoder of {key} {value}", forged(set_json(TEXT, **{key: value})), key)
row("links that lead in a circle", circle, INGEST)
row("tar: a header of digits", pax("source.tar", comment="1" * 2**18), TAR, DAMAGED)
IMAGES = "campaign/data/images/00000.tar"
digits = both(pax(IMAGES, size="1" * 40), lambda arena: agree(arena / "campaign", arena / IMAGES))
row("images: a size of digits", digits, AUDIT, "problems in the data set")
NETWORK = f"campaign/ensemble/experts/0/{WEIGHTS}"
row("weights of an ensemble: a pipe", pipe(NETWORK), ASSEMBLE)
ITSELF = link_to("source/metadata.jsonl", "metadata.jsonl")
row("metadata.jsonl: a link to itself", ITSELF, INGEST, "is not read")
row("scorer of a chain of leaves", scorer(scale={"dimensions": LEAVES}), SCORE, "scorer.json")
CONDITIONS = {"spaces": f"a{SPACES}", "brackets": f"a in {'(' * 10_000}", "words": f"{SPACES}>= x"}
for name, keep in CONDITIONS.items():
    filtering = ("data", "filter", "{campaign}", "--keep", keep)
    ROWS.append(Row(f"a condition of {name}", nothing, filtering, ("no condition",)))


# Signatures of those whom one trusts, or of those who pretend to be them.

SIGNED, TRUSTED = f"export/{SIGNATURE}", "trusted {export} {inside}/mine.pub"


def sign_as(name: str) -> Forge:
    """An export with a signature by a key of this name, which lies beside it."""

    def forge(arena: Arena) -> None:
        private, _ = key_pair(arena / name)
        folder = Store.open(arena / "export")
        sign(folder, "", {path: sha256(folder.path(path)) for path in folder.list()}, private)

    return forge


def resigned(**ignored: Any) -> Forge:
    """Signed by somebody else, with what names the trusted key in it."""

    def forge(arena: Arena) -> None:
        named = json.loads((arena / SIGNED).read_bytes())["verificationMaterial"]
        sign_as("other")(arena)
        edit(arena / SIGNED, lambda tree: {**tree, "verificationMaterial": named, **ignored})

    return forge


def swapped(arena: Arena) -> None:
    folders = [arena / f"export/experts/{number}" for number in (0, 1)]
    folders[0].rename(arena / "export/experts/x")
    folders[1].rename(folders[0])
    (arena / "export/experts/x").rename(folders[1])
    relisted(arena / "export")


def payload(change: Callable[[Any], object]) -> Forge:
    """Another statement under the same signature."""

    def forge(arena: Arena) -> None:
        def alter(tree: Any) -> None:
            statement = json.loads(base64.b64decode(tree["dsseEnvelope"]["payload"]))
            change(statement)
            tree["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()

        edit(arena / SIGNED, alter)

    return forge


def gone(place: str) -> Forge:
    return lambda arena: (arena / place).unlink()


NOT_IT, NOT_TRUSTED, NONE = "not what its signature says", "which is not trusted", f"{SIGNATURE} is no"
SCHEDULER, GARBAGE = "export/scheduler/scheduler_config.json", {"certificate": {"rawBytes": "AAAA"}}
ALTERED: dict[str, tuple[Forge, str]] = {
    "README.md changed": (bytes_of("export/README.md", b"run this"), NOT_IT),
    "a file beside": (bytes_of("export/setup.sh", b""), NOT_IT),
    "a file within": (bytes_of("export/tokenizer/more.json", b"{}"), NOT_IT),
    "experts swapped, all digests agree": (swapped, "its files are not those of"),
    "a scheduler changed, all digests agree": (forged(set_json(SCHEDULER, shift=9.0)), NOT_IT),
    "a manifest that lists less": (change(EXPORTED, lambda tree: tree["files"].pop()), NOT_IT),
    "its scheduler gone": (gone(SCHEDULER), "is missing"),
    "README.md gone": (gone("export/README.md"), NOT_IT),
    "no signature": (gone(SIGNED), "is unsigned"),
    "another signer in its name": (resigned(), NOT_TRUSTED),
    "another signer of another type": (resigned(mediaType="text/plain"), NOT_TRUSTED),
    "a statement of fewer files": (payload(lambda tree: tree["predicate"]["resources"].pop()), NOT_TRUSTED),
    "a statement that ignores all": (
        payload(lambda tree: tree["predicate"]["serialization"].update(ignore_paths=["."])),
        NOT_TRUSTED,
    ),
    "no signatures": (set_json(SIGNED, dsseEnvelope__signatures=[]), NOT_TRUSTED),
    "a signature of zeros": (set_json(SIGNED, dsseEnvelope__signatures=[{"sig": "AAAA"}]), NOT_TRUSTED),
    "a certificate of garbage": (set_json(SIGNED, verificationMaterial=GARBAGE), NOT_TRUSTED),
    "a key's name for a terminal": (
        set_json(SIGNED, verificationMaterial__publicKey__hint="\x1b[2J\u202e"),
        NONE,
    ),
    "deep JSON": (bytes_of(SIGNED, DEEP), NONE[:-3]),
    "a huge number": (bytes_of(SIGNED, b'{"verificationMaterial": %s}' % DIGITS), NONE),
    "empty": (bytes_of(SIGNED, b""), NONE[:-3]),
    "a pipe": (pipe(SIGNED), "is unsigned"),
    "a link to a device": (link_to(SIGNED, "/dev/zero"), "is unsigned"),
}
for n, (name, (forge, word)) in enumerate(ALTERED.items()):
    altered = both(sign_as("mine"), forge)
    load(f"a signed export: {name}", altered, word, call=TRUSTED, slow=n % 3 > 0)
load("a signed export as it was", sign_as("mine"), call=TRUSTED)
for name, (forge, word) in {
    "a pipe": (pipe("x.txt"), "x.txt is no file"),
    "a device": (link_to("x.txt", "/dev/zero"), "x.txt is no file"),
    "pictures": (bytes_of("x.txt", pixels()), "no public key"),
    "large": (bytes_of("x.txt", bytes(2**21)), "bytes"),
    "deep": (bytes_of("x.txt", b"-----BEGIN PUBLIC KEY-----" + DEEP), "no public key"),
    "a private one": (lambda arena: key_pair(arena / "x")[0].rename(arena / "x.txt"), "no public key"),
    "of no curve of the standard": (
        lambda arena: key_pair(arena / "x", "secp256k1")[1].rename(arena / "x.txt"),
        "no public key",
    ),
}.items():
    row(f"a trusted key that is {name}", forge, f"{ASSEMBLE} --trusted {{inside}}/x.txt", word)
    call = f"{EXPORT} --sign {{inside}}/x.txt"
    if name != "a private one":
        row(f"a signing key that is {name}", forge, call, word.replace("public", "private"), slow=True)


# Cards and networks of two minds.


def shaped(part: str, **values: Any) -> Forge:
    named = {f"shape__{key}": value for key, value in values.items()}
    return forged(set_json(f"export/{part}/card.json", **named))


TWO, OF = "are of two networks", "card.json"
DIFFERENT: list[tuple[str, Callable[..., Forge], dict[str, Any], str]] = [
    ("3 channels", shaped, {"channels": 3}, TWO),
    ("60,000 channels", shaped, {"channels": 60_000}, TWO),
    ("a size of 65,536", shaped, {"size": 65_536}, TWO),
    ("a size of no patches", shaped, {"size": 15}, TWO),
    ("sizes of no patches", shaped, {"sizes": [[15, 17]]}, TWO),
    ("a size of infinity", shaped, {"size": 10**400}, OF),
    ("texts of 9 numbers", shaped, {"text_width": 9}, TWO),
    ("channels of a text", shaped, {"channels": "x"}, OF),
    ("a network of 3 channels", agreed, {"in_channels": 3}, TWO),
    ("a network of no channels", agreed, {"in_channels": None}, TWO),
    ("a network of patches of 0", agreed, {"patch_size": 0}, TWO),
    ("a network of patches of 3", agreed, {"patch_size": 3}, TWO),
    ("a network of patches of a list", agreed, {"patch_size": [2]}, TWO),
    ("a network of texts of 9 numbers", agreed, {"caption_channels": 9}, TWO),
]
for n, (name, changed, values, word) in enumerate(DIFFERENT):
    for m, part in enumerate((f"experts/{n // 2 % 2}", "router")):  # experts are checked one like the other
        load(f"{part}: {name}", changed(part, **values), word, slow=(m + n) % 2 > 0)
sizes = both(*(set_json(card, shape__size=8) for card in CARDS[:2]), lambda arena: relisted(arena / "export"))
load("an expert of another size than the others", sizes, "another latents than")


# What torch, transformers and Python say of a stranger's files.


def header(change: Callable[[dict[str, Any]], object], part: str = "experts/0") -> Forge:
    """Another header of an expert's weights, all digests agreeing."""

    def forge(arena: Arena) -> None:
        path = arena / f"export/{part}/{WEIGHTS}"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8 : 8 + length])
        change(next(value for name, value in tree.items() if name != "__metadata__"))
        text = json.dumps(tree).encode()
        replace(path, len(text).to_bytes(8, "little") + text + data[8 + length :])
        card = arena / f"export/{part}/card.json"
        edit(card, lambda tree: {**tree, "weights_sha256": sha256(path.read_bytes())})
        relisted(arena / "export")
        edit(
            arena / EXPORTED,
            lambda tree: {**tree, "parts": {**tree["parts"], part: sha256(path.read_bytes())}},
        )

    return forge


FOREIGN: dict[str, Forge] = {
    "a shape of infinity": header(lambda entry: entry.update(shape=[1e400])),
    "a shape of 10**30": header(lambda entry: entry.update(shape=[10**30])),
    "a negative shape": header(lambda entry: entry.update(shape=[-1, -1])),
    "numbers of float8": header(lambda entry: entry.update(dtype="F8_E4M3")),
    "offsets of infinity": header(lambda entry: entry.update(data_offsets=[0, 1e400])),
    "a text encoder without a vocabulary": forged(set_json(TEXT, vocab_size=0)),
    "a text encoder of few positions": forged(set_json(TEXT, max_position_embeddings=1)),
    "a text encoder of an unknown activation": forged(set_json(TEXT, hidden_act="evil")),
    "a text encoder of another width": forged(set_json(TEXT, hidden_size=7)),
    "a text encoder of a text as width": forged(set_json(TEXT, hidden_size="x")),
    "a tokenizer that is a list": forged(bytes_of("export/tokenizer/tokenizer.json", b"[]")),
}
for n, (name, forge) in enumerate(FOREIGN.items()):
    for m, function in enumerate(("pipeline", "model")):
        load(f"{function}: {name}", forge, "error", call=f"{function} {{export}}", slow=(n + m) % 2 > 0)
for length in (-1, 0.5, 10**9):
    forge = forged(*(set_json(card, text__max_length=length) for card in CARDS))
    load(f"texts of at most {length} tokens", forge, "card.json" if length < 1 else "")


# Numbers without an end, and none.

for n, (name, argv) in enumerate(
    {
        "islands": f"{SET} islands={DIGITS.decode()}",
        "an island's number": f"{SET} islands={{{{{DIGITS.decode()}:{{{{}}}}}}}}",
        "a seed": f"{SET} seed=-{DIGITS.decode()}",
        "a list": f"{SET} quarantine=[{DIGITS.decode()}]",
        "quarantined experts": f"{ASSEMBLE} --quarantine {DIGITS.decode()}",
        "an option": f"{SAMPLE} --steps {DIGITS.decode()}",
        "a seed's option": f"{SAMPLE} --seed {DIGITS.decode()}",
        "a guidance": f"{SAMPLE} --guidance {DIGITS.decode()}",
        "GPUs": f"{PLAN} --gpus {DIGITS.decode()}",
        "a part": f"data ingest {{campaign}} --part {DIGITS.decode()}/{DIGITS.decode()}",
    }.items()
):
    row(f"5,000 digits as {name}", nothing, argv, "error", slow=n % 2 > 0)
for key in ("sampling.guidance", "sampling.shift", "launch.memory_gb", "partition.max_share"):
    for number in (".nan", ".inf"):
        row(f"{key} of {number}", nothing, f"{SET} {key}={number}", key, slow=number != ".nan")


# Results of an island that lead elsewhere, and curves of no training.

RUN_FOLDER = "campaign/islands/0/run"


def untrained(arena: Arena) -> None:
    for part in ("expert", "run"):
        shutil.rmtree(arena / "campaign/islands/0" / part)
    (arena / RUN_FOLDER).mkdir()


pooled = both(untrained, set_json("campaign/islands/0/island.json", shape__pooled_width=5))
row("an island of another text", pooled, TRAIN, "a pooled text of 5 numbers")
for n, (place, name) in enumerate(
    {
        "a tracker's folder": (RUN_FOLDER, "tensorboard"),
        "previews": (RUN_FOLDER, "previews2"),
        "a file of a tracker": (f"{RUN_FOLDER}/wandb/run-1", "logs"),
        "a checkpoint": (f"{RUN_FOLDER}/checkpoints", "000000001-x"),
    }.items()
):
    forge = both(untrained, link(*name))
    row(f"results of an island: {place} is a link", forge, TRAIN, "is a link", slow=n > 1)


def linked_file(arena: Arena) -> None:
    replace(arena.folder / "elsewhere.jsonl", b"not yours")
    untrained(arena)
    (arena / RUN_FOLDER / "metrics.jsonl").symlink_to(arena.folder / "elsewhere.jsonl")


row("results of an island: its metrics are a link", linked_file, TRAIN, "is a link")
for loss in ("0", "5e-324", "1e308", "-1e308", "1e-200"):
    lines = b"".join(b'{"step": %d, "samples": %d, "loss": %s}\n' % (n, n, loss.encode()) for n in range(9))
    row(f"a loss of {loss}", bytes_of(f"{RUN_FOLDER}/metrics.jsonl", lines), REPORT, slow=loss != "5e-324")


# Requests to a server.

LONG = "x" * 50_000
for n, (name, body, word) in enumerate(
    (
        ("a shift of 1e-300", {"prompt": "a", "shift": 1e-300}, "shift"),
        ("a long model", {"prompt": "a", "model": LONG}, "there is no model"),
        ("a long field", {"prompt": "a", LONG: 1}, "there is no field"),
        ("a long size", {"prompt": "a", "size": LONG}, "size"),
        ("a long routing", {"prompt": "a", "routing": LONG}, "routing"),
        ("a seed of 2**64", {"prompt": "a", "seed": 2**64}, "seed"),
    )
):
    forge, call = bytes_of("body.json", json.dumps(body).encode()), "asked {campaign} {inside}/body.json"
    load(f"a request: {name}", forge, word, call=call, slow=n % 4 > 0)
