"""Checkpoints that Atoll did not write: found in a folder or on the hub, and what of them fits a network.

Only `config.json` and safetensors are read: never pickle, and no code that lies beside them.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.base.errors import ConfigError, StoreError, first_line
from atoll.base.safe_parse import expanded, read_json
from atoll.base.text import shorten
from atoll.encoders.registry import AUTOENCODERS, check_config
from atoll.encoders.vae import constants_of
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import CARD
from atoll.model.expert import FileWeights
from atoll.networks.families import Family, kept_buffers
from atoll.networks.lora import shared
from atoll.networks.settings import DataShape
from atoll.store.store import Absent

INDEX = f"{WEIGHTS}.index.json"
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_FIX = f"give a folder with config.json and {WEIGHTS}, or a hub name such as OWNER/MODEL"
_SHOWN = 3  # names of tensors in a message; `init.json` has all


@dataclass(frozen=True)
class DiffusersCheckpoint:
    """A checkpoint of the diffusers layout; nothing but `config.json`, its `settings`, was read yet."""

    name: str
    folder: Path
    class_name: str
    settings: Mapping[str, Any]
    files: tuple[str, ...]

    def beside(self, part: str, file: str) -> dict[str, Any] | None:
        """Settings of another part of the pipeline, such as its scheduler; None where there are none.

        They lie in the part's folder beside `transformer/`, or beside the weights.
        """
        places = [self.folder / part / file]
        places += [self.folder.parent / part / file] if self.folder.name == "transformer" else []
        places += [self.folder / file] if file != "config.json" else []
        found = next((place for place in places if place.is_file()), None)
        return None if found is None else _json(self.name, found)

    def check_text(self, adapter: Family, shape: DataShape) -> None:
        """Refuse data whose text, or networks whose guidance, is not what the checkpoint was trained with."""
        settings, index = {**adapter.defaults(), **self.settings}, self.beside("..", "model_index.json") or {}
        pooled, guidance = settings.get("pooled_projection_dim") or 0, bool(settings.get("guidance_embeds"))
        trained = (self.beside("..", CARD) or {}).get("shape")
        if isinstance(trained, dict) and not trained.get("pooled_width"):
            pooled = 0  # Atoll's own may have learned without one
        parts = [p for p in sorted(index) if p.startswith("text_encoder") and index[p] != [None, None]]
        root = self.name.removesuffix("/transformer")
        encoders = ", ".join(f"{root}/{p}" for p in parts) or "those of its pipeline, in their order"
        tokens = shape.text_length - (77 if adapter.name == "sd3" else 0)  # CLIP's come first
        least, most = adapter.tokens or (tokens, tokens)
        if pooled != shape.pooled_width:
            what = f"takes a pooled text of {pooled} numbers, data.text_encoder gives {shape.pooled_width}"
            raise ConfigError(f"{self.name!r} {what}", f"set data.text_encoder: [{encoders}]")
        if guidance != shape.guidance:
            what = f"has {'an' if guidance else 'no'} input for guidance, network.arguments say otherwise"
            fix = f"set network.arguments: {{guidance_embeds: {str(guidance).lower()}}}"
            raise ConfigError(f"{self.name!r} {what}", fix)
        if shape.pooled_width and not least <= tokens <= most:
            what = f"was trained on {least} to {most} tokens of T5, the campaign's data have {tokens}"
            fix = f"set data.text_length={least} or {most}, as its pipeline does"
            raise ConfigError(f"{self.name!r} {what}", fix)

    def other_latents(self, latents: Mapping[str, Any]) -> str | None:
        """What sets the latents that it was trained on apart from these, if anything does."""
        if (vae := self.beside("vae", "config.json")) is None:
            return None
        if vae.get("scaling_factor") is None and vae.get("_class_name") in AUTOENCODERS:
            import diffusers

            made = inspect.signature(getattr(diffusers, vae["_class_name"])).parameters
            vae["scaling_factor"] = made["scaling_factor"].default
        # Latents of the same VAE with other constants look alike, and would give grey pictures.
        theirs, ours = constants_of(vae), constants_of(latents)
        if theirs == ours and latents["name"] != "none":
            return None
        own = "are pixels" if latents["name"] == "none" else f"have {ours['shift']:g} and {ours['scale']:g}"
        trained = f"latents with shift {theirs['shift']:g} and scale {theirs['scale']:g}"
        return f"{self.name!r} was trained on {trained}, the campaign's {own}"

    def network(self, adapter: Family) -> nn.Module:
        """The network of its own settings, without memory; `ConfigError` where they make none."""
        try:
            with torch.device("meta"):  # settings that config.json leaves out have their defaults then
                return adapter.load(self.settings)
        except Exception as error:  # a class of diffusers that meets odd settings raises of every kind
            raise _refusal(self.name, f"config.json makes no network ({first_line(error)[:200]})") from None

    def check_positions(self, adapter: Family, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Refuse a network that would meet other positions than the checkpoint was trained with."""
        (there, size), (here, own) = map(reach, (self.network(adapter), network))
        # With another size of patches no patch is embedded as it was.
        if size == own and abs(there / here - 1) > 1e-6:
            what = f"{self.name!r} has positions up to {there:g} patches, the network up to {here:g}"
            fix = f"set network.interpolation_scale={here / there:g}, or one of your choice"
            raise ConfigError(what, fix)
        for name, table in kept_buffers(network).items():
            theirs = weights.get(name, table)
            if theirs.shape[-1] != table.shape[-1]:
                what = f"{self.name!r} is {theirs.shape[-1]} wide, the network {table.shape[-1]}"
                raise ConfigError(what, "give network its depth, heads and head_width")
            if theirs.shape != table.shape or not torch.allclose(theirs.float(), table, atol=1e-2):
                fix = "set sample_size and pos_embed_max_size in network.arguments as in its config.json"
                what = f"{self.name!r} has another table of positions ({name})"
                raise ConfigError(what, f"{fix}, or a network.interpolation_scale of your choice")

    def weights(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU; `ConfigError` if a file is missing or damaged."""
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            try:
                read = FileWeights(self.folder / file).items()
                # Those of one byte are exact in two, and torch computes little in one.
                tensors |= {n: v.half() if v.is_floating_point() and v.itemsize == 1 else v for n, v in read}
            except Absent:
                raise _refusal(self.name, f"{file} is missing") from None
            except StoreError as error:
                raise _refusal(self.name, f"{file} cannot be read ({first_line(error)})") from None
        return tensors

    def weights_of(self, network: nn.Module) -> dict[str, Tensor]:
        """All weights of the network of its own settings, in float32; `ConfigError` if they are not those."""
        wanted, there = network.state_dict(), self.weights()
        # Files of some classes also hold tables that the network computes by itself.
        known = wanted.keys() | dict(network.named_buffers()).keys()
        reshaped = {n for n in wanted.keys() & there.keys() if wanted[n].shape != there[n].shape}
        infinite = {n for n, v in there.items() if not torch.isfinite(v).all()}
        for fault, names in (
            ("has no", wanted.keys() - there.keys()),
            ("has, and its class does not,", there.keys() - known),
            ("has in another shape", reshaped),
            ("has numbers that are not finite in", infinite),
        ):
            if names:
                raise _refusal(self.name, f"it {fault} {shorten(sorted(names), _SHOWN)}")
        return {name: there[name].float().contiguous() for name in wanted}


def find(name: str, beside: Path) -> DiffusersCheckpoint:
    """Find a checkpoint; `ConfigError` if there is none, or it holds no safetensors.

    Args:
        name: a folder, relative to `beside` or absolute, or a hub name. A pipeline's folder is one too: its
            `transformer/` counts. Hub names come from the hub's own cache, or are fetched into it.
        beside: the folder that relative paths start from.
    """
    folder = beside / expanded(name)
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(f"there is no folder {folder}", _FIX)
        names = ["config.json", WEIGHTS, INDEX, WEIGHTS.replace(".", "-*-of-*.", 1)]
        # What it was trained on.
        others = ["scheduler/scheduler_config.json", "vae/config.json", "model_index.json"]
        folder = fetch(name, [*names, *others, *(f"transformer/{n}" for n in names)], _FIX)
    if not (folder / "config.json").is_file() and (folder / "transformer" / "config.json").is_file():
        folder = folder / "transformer"
    if not (folder / "config.json").is_file():
        raise _refusal(name, "it has no config.json")
    check_config(settings := _json(name, folder / "config.json"), f"config.json of {name!r}")
    class_name = str(settings.get("_class_name"))
    if class_name == "Transformer2DModel":  # early checkpoints name the class that DiT and PixArt once shared
        norms = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}
        class_name = norms.get(str(settings.get("norm_type")), class_name)
    return DiffusersCheckpoint(name, folder, class_name, settings, _files(name, folder))


def fetch(name: str, patterns: list[str], fix: str, ignored: list[str] | None = None, **hub: Any) -> Path:
    """The local copy of these files of a hub's repository; `hub` are options of `snapshot_download`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored, **hub))
    except Exception as error:  # the hub's client has several families of them
        what = f"{name!r} is no folder, and as a hub name it cannot be had ({first_line(error)})"
        raise ConfigError(what, fix) from None


@dataclass(frozen=True)
class Fit:
    """What of a checkpoint a network can take over."""

    kept: tuple[str, ...]
    drawn: Mapping[str, str]
    unused: tuple[str, ...]
    share: float

    def lines(self, name: str) -> list[str]:
        """What a person should know of it: counts, and the first names of what is not taken over."""
        total = len(self.kept) + len(self.drawn)
        kept = f"{len(self.kept)} of {total} tensors, {self.share:.1%} of the numbers"
        lines = [f"initial weights from {name}: {kept}"]
        if self.drawn:
            named = [f"{key} ({why})" for key, why in self.drawn.items()]
            lines.append(f"  warning: {len(named)} are drawn instead: {shorten(named, _SHOWN)}")
        if self.unused:
            unused = shorten(self.unused, _SHOWN)
            lines.append(f"  warning: {len(self.unused)} of its tensors have no place: {unused}")
        return lines


def compare(network: nn.Module, weights: Mapping[str, Tensor]) -> Fit:
    """Which of these weights fit the network's parameters, by name and shape; a change (LoRA) is its own."""
    kept, drawn, numbers, total = [], {}, 0, 0
    for name, parameter in shared(network, dict(network.named_parameters())).items():
        total += parameter.numel()
        if name not in weights:
            drawn[name] = "not there"
        elif weights[name].shape != parameter.shape:
            drawn[name] = f"{_shape(weights[name])} there, {_shape(parameter)} here"
        elif not weights[name].is_floating_point():
            drawn[name] = f"{weights[name].dtype} there"
        else:
            kept.append(name)
            numbers += parameter.numel()
    computed = drawn.keys() | kept_buffers(network).keys()  # what a network computes by itself is not learned
    unused = tuple(sorted(weights.keys() - set(kept) - computed))
    return Fit(tuple(kept), drawn, unused, numbers / max(1, total))


@torch.no_grad()
def take_over(network: nn.Module, weights: Mapping[str, Tensor], name: str) -> Fit:
    """Copy into the network what fits; `ConfigError` if nothing does, or it is not finite."""
    fit = compare(network, weights)
    if not fit.kept:
        why = shorten([f"{key} ({reason})" for key, reason in fit.drawn.items()], _SHOWN)
        what = f"none of the {len(weights)} tensors of {name} fits the network: {why}"
        fix = "give the network the checkpoint's family and dimensions"
        raise ConfigError(what, f"{fix} (network.depth, heads, head_width, patch)")
    parameters = dict(network.named_parameters())
    # A damaged checkpoint would only show as a loss that is NaN, hours of queueing later.
    for key in fit.kept:
        if not torch.isfinite(weights[key]).all():
            raise ConfigError(f"{key} of {name} holds numbers that are not finite", "use another checkpoint")
        parameters[key].copy_(weights[key])
    return fit


def reach(network: nn.Module) -> tuple[float, int]:
    """Where positions end, or of those without an end the step, in patches; and the size of patches."""
    embed, config = cast(Any, network).pos_embed, cast(Any, network).config
    scale = getattr(embed, "interpolation_scale", config.get("interpolation_scale", 1))
    computed = getattr(embed, "pos_embed_max_size", None) is None  # else the table is in the file
    return getattr(embed, "base_size", 1) / scale if computed else 1.0, int(config.patch_size)


def _files(name: str, folder: Path) -> tuple[str, ...]:
    if (folder / WEIGHTS).is_file():
        return (WEIGHTS,)
    if not (folder / INDEX).is_file():
        others = [path.name for path in folder.glob("*.bin")]
        more = f" ({others[0]} is pickle, which is not read)" if others else ""
        raise _refusal(name, f"it has no {WEIGHTS}{more}")
    places = _json(name, folder / INDEX).get("weight_map")
    files = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    # An index comes from outside: a path in it could lead out of the folder.
    if not files or any(Path(file).name != file or not file.endswith(".safetensors") for file in files):
        raise _refusal(name, f"{INDEX} names no safetensors beside it")
    return tuple(files)


def _json(name: str, path: Path) -> dict[str, Any]:
    try:
        tree = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _refusal(name, f"{path.name} cannot be read ({first_line(error)})") from None
    if not isinstance(tree, dict):
        raise _refusal(name, f"{path.name} holds no settings")
    return tree


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name!r} cannot be used: {why}", _FIX)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
