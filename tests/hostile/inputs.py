"""Hostile inputs, one a row: what is forged, the command that meets it, and how it has to end."""

import io
import json
import os
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
from hostile.arena import Arena, edit, relisted, replace
from hostile.mutate import agree

DEEP = b"[" * 100_000
DIGITS = b"1" * 5_000
WEIGHTS = "diffusion_pytorch_model.safetensors"
LOAD = ("pipeline",)
HUGE = tarfile.TarInfo("x")
HUGE.type, HUGE.size = tarfile.XHDTYPE, 2**40

Forge = Callable[[Arena], None]


@dataclass(frozen=True)
class Row:
    """One input.

    Attributes:
        name: of the case.
        forge: makes it in the arena.
        argv: the command, with `{campaign}`, `{export}`, `{source}` and `{inside}` for paths.
        call: or a function of `faults.call` and its arguments, likewise.
        words: what the line of error holds; empty where the input is rightly accepted.
    """

    name: str
    forge: Forge
    argv: tuple[str, ...]
    words: tuple[str, ...] = ()
    call: tuple[str, ...] = ()


ROWS: list[Row] = []


def row(name: str, forge: Forge, argv: str, *words: str) -> None:
    """Add an input that a command meets; with words, one that it refuses."""
    ROWS.append(Row(name, forge, tuple(argv.split()), words))


def load(name: str, forge: Forge, *words: str) -> None:
    """Add an export that `AtollPipeline.from_pretrained` meets."""
    ROWS.append(Row(name, forge, (), words, ("pipeline", "{export}")))


def set_json(place: str, **values: Any) -> Forge:
    """Replace fields of a JSON file; `a__b` is b within a."""

    def forge(arena: Arena) -> None:
        def change(tree: dict[str, Any]) -> None:
            for key, value in values.items():
                *groups, last = key.split("__")
                group: Any = tree
                for name in groups:
                    group = group[int(name) if isinstance(group, list) else name]
                group[last] = value

        edit(arena / place, change)

    return forge


def drop(place: str, *keys: str) -> Forge:
    """Remove fields of a JSON file."""
    return lambda arena: edit(arena / place, lambda tree: {k: v for k, v in tree.items() if k not in keys})


def bytes_of(place: str, data: bytes) -> Forge:
    """Replace a file's bytes."""
    return lambda arena: replace(arena / place, data)


def both(*forges: Forge) -> Forge:
    """One after the other."""

    def forge(arena: Arena) -> None:
        for one in forges:
            one(arena)

    return forge


def forged(forge: Forge) -> Forge:
    """An export whose manifest agrees with what was forged."""
    return both(forge, lambda arena: relisted(arena / "export"))


def agreed(place: str) -> Forge:
    """The card's and the manifest's digests of a file of an export agree with it."""
    return lambda arena: agree(arena / "export", arena / place)


# A. What is trusted.

PAYLOAD = "import pathlib; pathlib.Path({marker!r}).write_text('ran')\nclass Evil: pass\n"


def nested_pipeline(component: str, depth: str) -> Forge:
    """A component that is a pipeline whose own component is a Python file, `depth` folders down."""

    def forge(arena: Arena) -> None:
        folder = arena / "export" / component
        code = PAYLOAD.format(marker=str(arena.folder / "ran.txt")).encode()
        replace(folder / depth / "evil.py", code)
        index = {"_class_name": [f"{depth}/evil", "Evil"], "_diffusers_version": "0.36.0"}
        replace(folder / "model_index.json", json.dumps(index).encode())
        edit(
            arena / "export/model_index.json",
            lambda tree: {**tree, component: ["diffusers", "DiffusionPipeline"]},
        )

        def list_them(manifest: dict[str, Any]) -> None:
            for path in (f"{component}/model_index.json", f"{component}/{depth}/evil.py"):
                manifest["files"].append({"path": path, "bytes": 0, "sha256": ""})

        edit(arena / "export/ensemble.json", list_them)
        relisted(arena / "export")

    return forge


def pickled_component(arena: Arena) -> None:
    folder = arena / "export/text_encoder"
    data = io.BytesIO()
    torch.save(load_file(folder / "model.safetensors"), data)
    (folder / "model.safetensors").unlink()
    replace(folder / "pytorch_model.bin", data.getvalue())

    def relist(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            entry["path"] = (
                entry["path"].replace("model.safetensors", "pytorch_model.bin")
                if (entry["path"].startswith("text_encoder"))
                else entry["path"]
            )

    edit(arena / "export/ensemble.json", relist)
    relisted(arena / "export")


def vae_of_a_card(kind: str) -> Forge:
    """Cards that name a folder of the author's as the autoencoder."""

    def forge(arena: Arena) -> None:
        folder = arena / "evil"
        replace(folder / "config.json", json.dumps({"_class_name": kind}).encode())
        replace(folder / "diffusion_pytorch_model.bin", b"\x80\x04N.")
        replace(folder / "model_index.json", json.dumps({"_class_name": ["evil", "Evil"]}).encode())
        replace(folder / "evil.py", PAYLOAD.format(marker=str(arena.folder / "ran.txt")).encode())
        for part in ("router", "experts/0", "experts/1"):
            edit(
                arena / "export" / part / "card.json",
                lambda card: card["latents"].update(name=str(folder), hash="0" * 64),
            )
        relisted(arena / "export")

    return forge


def text_of_a_card(arena: Arena) -> None:
    """Cards that name a hub repository of the author's as the text encoder, which is not in the export."""
    for part in ("router", "experts/0", "experts/1"):
        edit(arena / "export" / part / "card.json", lambda card: card["text"].update(name="evil/encoder"))
    edit(
        arena / "export/model_index.json",
        lambda tree: {**tree, "text_encoder": [None, None], "tokenizer": [None, None]},
    )
    relisted(arena / "export")


def nudged_encoder(arena: Arena) -> None:
    path = arena / "export/text_encoder/model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if weights[name].ndim == 2)
    weights[name] = weights[name] + 1
    replace(path, save(weights))
    relisted(arena / "export")


def listed_outside(arena: Arena) -> None:
    """An entry that is read within the campaign and written beside the target."""

    def add(manifest: dict[str, Any]) -> None:
        entry = next(e for e in manifest["files"] if e["path"] == "router/card.json")
        manifest["files"].append({**entry, "path": "router/../../router/card.json"})
        manifest["files"].append({**entry, "path": "../../../beside.txt"})

    edit(arena / "campaign/ensemble/ensemble.json", add)


def deletes_outside(arena: Arena) -> None:
    def add(manifest: dict[str, Any]) -> None:
        for path in ("../campaign.json", "../islands/0/data/manifest.json", "../../../beside.txt"):
            manifest["files"].append({"path": path, "bytes": 1, "sha256": "0" * 64})

    edit(arena / "campaign/ensemble/ensemble.json", add)
    edit(arena / "campaign/islands/0/expert/card.json", lambda card: card.update(rows=141))


CODE = ("refuse", "class")
load("a nested pipeline runs code", nested_pipeline("scheduler", "sub"), "scheduler")
load("a nested pipeline two levels down", nested_pipeline("scheduler", "sub/sub"), "scheduler")
load("a text encoder that is a pipeline", nested_pipeline("text_encoder", "sub"), "text_encoder")
load("a card's autoencoder is a pipeline", vae_of_a_card("DiffusionPipeline"), "evil")
load("a card's autoencoder is pickle", vae_of_a_card("AutoencoderKL"), "evil")
load("a card's text encoder lies on the hub", text_of_a_card, "evil/encoder")
load("a component is pickle", pickled_component, "pickle")
load("a tensor of the text encoder was changed", nudged_encoder, "text encoder")
load("a manifest that lists nothing", set_json("export/ensemble.json", files=[]), "ensemble.json")
row(
    "an ensemble that lists nothing",
    set_json("campaign/ensemble/ensemble.json", files=[]),
    "sample {campaign} house --out {inside}/x.png",
    "ensemble.json",
)
row(
    "export writes beside its folder",
    listed_outside,
    "export {campaign} --to {inside}/out/exp --no-picture",
    "ensemble.json",
)
row("assemble removes what a manifest names", deletes_outside, "assemble {campaign}", "card.json")
for field, value in [
    ("prediction", "eps"),
    ("schedule", "ddpm-linear"),
    ("rows", 10**40),
    ("parameters", -5),
    ("train_flops", 1e308),
]:
    row(
        f"a card that is not the published one: {field}",
        set_json("campaign/islands/0/expert/card.json", **{field: value}),
        "assemble {campaign}",
        "card.json",
    )

# D. Files that are not what they should be.

JSONS = {
    "campaign/islands/0/expert/card.json": "assemble {campaign}",
    "campaign/ensemble/ensemble.json": "sample {campaign} house --out {inside}/x.png",
    "campaign/campaign.json": "status {campaign}",
    "campaign/data/manifest.json": "data audit {campaign}",
    "campaign/data/columns/latents/column.json": "data audit {campaign}",
    "campaign/partition/partition.json": "assemble {campaign}",
    "campaign/ensemble/experts/experts.json": "export {campaign} --to {inside}/out --no-picture",
    "campaign/ensemble/model_index.json": "export {campaign} --to {inside}/out --no-picture",
    "campaign/islands/0/run/log/000000.json": "train expert {campaign} --expert 0",
    "campaign/islands/0/run/heartbeat.json": "status {campaign}",
    "campaign/islands/0/island.json": "train expert {campaign} --expert 0",
}
MAY_PASS = {
    "campaign/islands/0/run/heartbeat.json",
    "campaign/islands/0/run/log/000000.json",
    "campaign/islands/0/island.json",
}
"""Files whose damage is told as a warning, or that a finished run does not need."""
for place, argv in JSONS.items():
    file = place.rsplit("/", 1)[-1]
    for name, data in {
        "deep": DEEP,
        "a huge number": b'{"k": %s}' % DIGITS,
        "a list": b"[]",
        "null": b"null",
        "empty": b"",
        "no text": b"\xff\xfe{}",
        "half": b'{"k": 4, "ro',
    }.items():
        ROWS.append(
            Row(
                f"{place}: {name}",
                bytes_of(place, data),
                tuple(argv.split()),
                () if place in MAY_PASS else (file,),
            )
        )

ENSEMBLE, SAMPLE = "campaign/ensemble/ensemble.json", "sample {campaign} house --out {inside}/x.png"
row("ensemble.json: k is a text", set_json(ENSEMBLE, k="4"), SAMPLE, "assemble again")
row("ensemble.json: k of 10**9", set_json(ENSEMBLE, k=10**9), SAMPLE, "ensemble.json")
row("ensemble.json: no experts", set_json(ENSEMBLE, experts=[]), SAMPLE, "ensemble.json")
row("ensemble.json: one expert four times", set_json(ENSEMBLE, experts=[0, 0, 0, 0]), SAMPLE, "ensemble.json")
row("ensemble.json: without parts", drop(ENSEMBLE, "parts"), SAMPLE, "ensemble.json")
row(
    "partition.json: without k",
    drop("campaign/partition/partition.json", "k"),
    "assemble {campaign}",
    "partition.json",
)
row(
    "partition.json: k of 10**9",
    set_json("campaign/partition/partition.json", k=10**9),
    "assemble {campaign}",
    "partition.json",
)
row(
    "partition.json: many rows",
    set_json("campaign/partition/partition.json", rows="many"),
    "assemble {campaign}",
    "partition.json",
)
row(
    "partition.json: another version",
    set_json("campaign/partition/partition.json", schema=99),
    "assemble {campaign}",
    "partition.json",
)
row(
    "partition.json: other sizes",
    set_json("campaign/partition/partition.json", sizes=[200, 60]),
    "report {campaign}",
    "partition.json",
)
row(
    "partition.json: another hash",
    set_json("campaign/partition/partition.json", hash="0" * 64),
    "report {campaign}",
    "partition.json",
)
CARD = "campaign/islands/0/expert/card.json"
for field, bad in [
    ("shape", {}),
    ("latents", {}),
    ("text", {}),
    ("condition", "magic"),
    ("provenance__init", [1]),
    ("island", 10**9),
]:
    row(f"card.json: {field}", set_json(CARD, **{field: bad}), "assemble {campaign}", "card.json")
load(
    "model_index.json: guidance is a list",
    forged(set_json("export/model_index.json", guidance_scale=[1])),
    "model_index.json",
)
load(
    "model_index.json: guidance of 10**9",
    forged(set_json("export/model_index.json", guidance_scale=1e9)),
    "model_index.json",
)
load("experts.json: k is a text", forged(set_json("export/experts/experts.json", k="x")), "experts.json")
load(
    "config.json: layers as a text",
    forged(set_json("export/experts/0/config.json", num_layers="six")),
    "experts/0",
)
load(
    "config.json: 10**9 layers",
    forged(set_json("export/experts/0/config.json", num_layers=10**9)),
    "experts/0",
)
load("router/config.json: no experts", forged(drop("export/router/config.json", "num_experts")), "router")
row(
    "manifest.json: a shard without files",
    set_json("campaign/data/manifest.json", shards__0__files={}),
    "data audit {campaign}",
    "manifest.json",
)
row(
    "column.json: numbers of no kind",
    set_json("campaign/data/columns/latents/column.json", dtype="nn", shape=[10**12]),
    "data audit {campaign}",
)
row(
    "a safetensors header of depth",
    bytes_of(f"campaign/ensemble/experts/0/{WEIGHTS}", len(DEEP).to_bytes(8, "little") + DEEP),
    SAMPLE,
    WEIGHTS,
)
row(
    "weights that end early",
    bytes_of(f"campaign/ensemble/experts/0/{WEIGHTS}", b"\x10\0\0\0\0\0\0\0{}"),
    SAMPLE,
    WEIGHTS,
)


def card_fifo(arena: Arena) -> None:
    path = arena / CARD
    path.unlink()
    os.mkfifo(path)


row("card.json is a pipe, so there is none", card_fifo, "assemble {campaign}")

# Settings and command lines.


def nothing(arena: Arena) -> None:
    """The command line itself is what is hostile."""


row("a date that does not exist", nothing, "plan {campaign} --set seed=2024-13-45", "seed")
row("half a number", nothing, "plan {campaign} --set seed=0x_", "seed")
row("deep YAML", nothing, f"plan {{campaign}} --set seed={'[' * 3000}", "seed")
row(
    "campaign.yaml: a date that does not exist",
    bytes_of("campaign/campaign.yaml", b"seed: 2024-13-45\n"),
    "plan {campaign}",
    "campaign.yaml",
)
row(
    "campaign.yaml: deep",
    bytes_of("campaign/campaign.yaml", b"seed: " + b"[" * 10_000),
    "plan {campaign}",
    "campaign.yaml",
)
row(
    "campaign.yaml: an object of Python",
    bytes_of("campaign/campaign.yaml", b"seed: !!python/object/apply:os.system ['true']\n"),
    "plan {campaign}",
    "campaign.yaml",
)
row(
    "campaign.yaml: aliases that multiply",
    bytes_of(
        "campaign/campaign.yaml",
        b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(
            b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % ((c, c) + (c - 1,) * 9)
            for c in range(98, 110)
        ),
    ),
    "plan {campaign}",
    "campaign.yaml",
)
row("a user who does not exist", nothing, "status ~nosuchuser/x", "nosuchuser")
row(
    "a source of a user who does not exist",
    nothing,
    "data ingest {campaign} --set data.source=~nosuchuser/x --set data.path={inside}/d",
    "nosuchuser",
)
row("export to a user who does not exist", nothing, "export {campaign} --to ~nosuchuser/x", "nosuchuser")
row(
    "export below a file",
    nothing,
    "export {campaign} --to {inside}/campaign/campaign.json/x",
    "json/x",
)
row("export to /proc", nothing, "export {campaign} --to /proc/x", "/proc/x")
row("a name of 300 letters", nothing, f"export {{campaign}} --to {{inside}}/{'x' * 300}", "xxx")
row("a picture of 300 letters", nothing, f"sample {{campaign}} house --out {{inside}}/{'x' * 300}.png", "xxx")
row("endless steps", nothing, "sample {campaign} house --steps 99999999999999 --out {inside}/x.png", "steps")
row("endless clusters", nothing, "plan {campaign} --set partition.k=100000000", "k")
row("an endless network", nothing, "plan {campaign} --set network.depth=1000000000", "depth")
row(
    "an endless width",
    nothing,
    "plan {campaign} --set network.head_width=1000000000000000000000",
    "head_width",
)
row("endless memory", nothing, "plan {campaign} --set launch.memory_gb=1e300", "memory_gb")
row(
    "experts of many digits",
    nothing,
    f"sample {{campaign}} house --experts {'9' * 5000} --out {{inside}}/x.png",
    "experts",
)
row(
    "a strategy of more experts than there are",
    nothing,
    "plan {campaign} --set sampling.routing=top-99",
    "top-99",
)
row("endless samples", nothing, "evaluate {campaign} --samples 1000000000000000", "samples")
row("secrets of a URL", nothing, "status s3://KEY:SECRET@bucket/x")

# Sources.

INGEST = "data ingest {fresh} --set data.source={source}"


def link_to(name: str, target: str) -> Forge:
    def forge(arena: Arena) -> None:
        (arena / "source" / name).unlink(missing_ok=True)
        (arena / "source" / name).symlink_to(target)

    return forge


def pipe(name: str) -> Forge:
    return lambda arena: os.mkfifo(arena / "source" / name)


def parquet(**columns: Any) -> Forge:
    def forge(arena: Arena) -> None:
        picture = io.BytesIO()
        Image.new("RGB", (16, 16)).save(picture, "PNG")
        good = {"bytes": picture.getvalue(), "path": "a.png"}
        table = {"image": pa.array([good] * 4), "caption": pa.array(["a", "b", "c", "d"])}
        pq.write_table(pa.table({**table, **columns}), arena / "source.parquet")

    return forge


for name in ("f.png", "f.txt", "metadata.jsonl"):
    row(f"a pipe as {name}", pipe(name), INGEST, *(["metadata.jsonl"] if name == "metadata.jsonl" else []))
row("a picture is an endless device", link_to("z.png", "/dev/zero"), INGEST)
row("a caption is an endless device", link_to("g1.txt", "/dev/zero"), INGEST)
row("a caption from outside", both(bytes_of("source/z.png", b""), link_to("z.txt", "/etc/hostname")), INGEST)
row("metadata.jsonl: deep", bytes_of("source/metadata.jsonl", DEEP + b"\n"), INGEST)
row(
    "metadata.jsonl: a huge number",
    bytes_of("source/metadata.jsonl", b'{"file_name": "g1.png", "n": %s}\n' % DIGITS),
    INGEST,
)
PARQUET = "data ingest {fresh} --set data.source={inside}/source.parquet --set data.ingest.caption=caption"
for kind, values in {
    "text": pa.array([{"bytes": "x"}] * 4),
    "a list": pa.array([{"bytes": [1]}] * 4),
    "a number": pa.array([{"bytes": 5}] * 4),
    "a struct": pa.array([{"bytes": {"a": 1}}] * 4),
    "no struct": pa.array([1] * 4),
}.items():
    row(f"parquet: a picture's bytes are {kind}", parquet(image=values), PARQUET, "picture")
row(
    "parquet: captions out of time",
    parquet(caption=pa.array([2**62] * 4, pa.timestamp("us"))),
    PARQUET,
    "caption",
)


def pixels(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(data, "PNG")
    return data.getvalue()


def tar(*members: tuple[str, bytes], cut: int = 0, **options: bytes) -> Forge:
    """A tar in place of the source, less its last bytes; `type` is that of its last member."""

    def forge(arena: Arena) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as file:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                if (name, content) == members[-1] and options:
                    info.type, info.linkname = options["type"], "/etc/hostname"
                file.addfile(info, io.BytesIO(content))
        replace(arena / "source.tar", data.getvalue()[: len(data.getvalue()) - cut])

    return forge


TAR = "data ingest {fresh} --set data.source={inside}/source.tar --set data.ingest.size=8"
SAMPLES = [(f"{n}.{end}", data) for n in range(4) for end, data in (("png", pixels(n)), ("txt", b"x"))]
BESIDE = [(f"../../../beside.{end}", data) for end, data in (("png", pixels(9)), ("txt", b"x"))]
row("tar: cut", tar(*SAMPLES, cut=2_048), TAR, "source.tar is cut off or damaged")
row("tar: cut within a picture", tar(*SAMPLES, cut=9_000), TAR, "source.tar is cut off or damaged")
row("tar: names that climb", tar(*SAMPLES, *BESIDE), TAR)
row("tar: a link to a file of this machine", tar(*SAMPLES, ("4.txt", b""), type=tarfile.SYMTYPE), TAR)
row("tar: a device", tar(*SAMPLES, ("4.png", b""), type=tarfile.CHRTYPE), TAR)
row(
    "tar: pickle", tar(*SAMPLES, ("0.pkl", b"\x80\x04cos\nsystem\n.")), TAR + " --set data.ingest.caption=txt"
)
row(
    "tar: headers of terabytes",
    bytes_of("source.tar", HUGE.tobuf(tarfile.GNU_FORMAT)),
    TAR,
    "source.tar is cut off or damaged",
)
row("tar: zeros", bytes_of("source.tar", bytes(10_240)), TAR, "hold no samples")
PIPE = "data ingest {fresh} --set"
row("a source that is a command", nothing, PIPE + " data.source=pipe:touch${{IFS}}{inside}/x", "no source")
row("a hub without a revision", nothing, PIPE + " data.source=hf://datasets/a/b", "names no revision")
row("a hub that climbs", nothing, PIPE + " data.source=hf:///../../nowhere", "there is no folder")
row("a pattern of many files", nothing, PIPE + " data.source={source}/{{0..999999999}}.tar", "files")
row("a source of that name", nothing, PIPE + " data.source.source.x=1", "data.source")


def twice(arena: Arena) -> None:
    names = ["image", "caption", "caption"]
    pq.write_table(
        pa.table([pa.array([{"bytes": b"x"}]), pa.array(["a"]), pa.array(["b"])], names),
        arena / "source.parquet",
    )


row("parquet: two columns of one name", twice, PARQUET, "two columns")


# What the fuzzer met.

COLUMN = "campaign/data/columns/split/column.json"


def less_a_shard(tree: dict[str, Any]) -> None:
    del tree["shards"][0]


for name, setting in {"activation_fn": "silu", "norm_eps": "1e-6"}.items():
    config = "export/experts/0/config.json"
    load(
        f"{name} of a network is {setting}",
        both(set_json(config, **{name: setting}), agreed(config)),
        "no network",
    )
row("a column with a file too few", lambda arena: edit(arena / COLUMN, less_a_shard), "data audit {campaign}")
row("a column of negative shape", set_json(COLUMN, shape=[-1]), "data audit {campaign}")
row("a column of many dimensions", set_json(COLUMN, shape=[9] * 40), "data audit {campaign}")
row(
    "initial weights whose digest is a number",
    set_json("campaign/islands/0/expert/card.json", provenance__initial_weights=0.5),
    "report {campaign}",
)


def not_utf8(arena: Arena) -> None:
    """A parquet file whose schema is not text."""
    path = arena / "source.parquet"
    pq.write_table(pa.table({"image": [{"bytes": b"x"}], "abcde": ["a"]}), path)
    replace(path, path.read_bytes().replace(b"abcde", b"abcd\xf3"))


row("parquet: a schema that is not UTF-8", not_utf8, PARQUET)


# Scorers, which people hand on as they do models.


def scorer(data: bytes | None = None, **changes: Any) -> Forge:
    """A scorer's folder in `source`, with other weights or other fields."""

    def forge(arena: Arena) -> None:
        place = arena / "source" / "scorer"
        place.mkdir()
        weights = save({"x": torch.zeros(1)}) if data is None else data
        (place / "weights.safetensors").write_bytes(weights)
        entry = {"path": "weights.safetensors", "bytes": len(weights), "sha256": sha256(weights)}
        content = {
            "format": "atoll/scorer 1",
            "files": [entry],
            "backbone": "pixels@16",
            "producer": {"name": "pixels", "hash": digest_tensors({}), "size": 16, "resize": "bicubic"},
            "scale": {"dimensions": [{"name": "whole"}]},
            "training": {},
        }
        replace(place / "scorer.json", json.dumps({**content, **changes}).encode())

    return forge


def remote_code(arena: Arena) -> None:
    """An image-text model of classes that only lie beside it."""
    scorer(backbone=f"vlm:{arena / 'source' / 'evil'}")(arena)
    place = arena / "source" / "evil"
    place.mkdir()
    auto = {"AutoConfig": "evil.C", "AutoModelForImageTextToText": "evil.Evil"}
    (place / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (place / "evil.py").write_text(PAYLOAD.format(marker=str(arena / "ran")))


SCORE = "aesthetics score {source} --scorer {source}/scorer --out {inside}/scores.parquet"
OUTSIDE = {"path": "../../../beside.txt", "bytes": 9, "sha256": "0" * 64}
row("scorer of other weights", scorer(), SCORE, "do not fit its scale")
row("scorer whose weights are pickle", scorer(b"\x80\x04cos\nsystem\n."), SCORE, "is no safetensors")
row("scorer that lists a file outside", scorer(files=[OUTSIDE]), SCORE, "leads out of the folder")
row("scorer without files", scorer(files=[]), SCORE, "0 files of weights")
row("scorer at a giant size", scorer(backbone="efficientnet-lite0@99999999"), SCORE, "no size from 16")
row("scorer of another backbone", scorer(producer={"name": "pixels"}), SCORE, "another network")
row("scorer of an unknown backbone", scorer(backbone="os.system"), SCORE, "unknown extractor")
row("scorer with code beside its model", remote_code, SCORE, "cannot load the image-text model")
WHEEL = {"dimensions": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}, {"name": "c"}]}
row("scorer of a scale that is a circle", scorer(scale=WHEEL), SCORE, "cycle")
row(
    "scorer that is deep JSON",
    both(scorer(), bytes_of("source/scorer/scorer.json", DEEP)),
    SCORE,
    "scorer.json",
)
