"""Image-text models of transformers by folder or hub name: loaded in one place, and asked for captions."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from atoll.base.device import weights_dtype
from atoll.base.errors import ConfigError, first_line
from atoll.encoders.registry import loading, weights_hash


def load_image_text(name: str) -> tuple[Any, Any]:
    """A model of this name, in the type of its weights, and its processor.

    Code beside the weights is not run. Prompts are padded on the left: all end at the same place, behind
    which the answers begin. `ConfigError` if there is no such model, or its processor cannot be used here.
    """
    import transformers

    with loading("image-text model", name):
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False
        )
    with loading("processor of", name, "add its files, or install the torchvision of your torch"):
        processor = transformers.AutoProcessor.from_pretrained(name, trust_remote_code=False)
    processor.tokenizer.padding_side = "left"
    if processor.tokenizer.pad_token_id is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return model, processor


def chat_prompt(processor: Any, question: str) -> str:
    """A question about one image in the words that the model was trained on."""
    if not getattr(processor, "chat_template", None):
        # BLIP and its like have no token for the image, and go on with the words they are given.
        image = getattr(processor, "image_token", None)
        return question if image is None else f"{image} {question} "
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    return str(processor.apply_chat_template(chat, add_generation_prompt=True))


def inputs_of(processor: Any, prompts: Sequence[str], pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
    """Inputs of a model that is asked by one prompt about each image."""
    nested = getattr(processor, "chat_template", None)  # some take a flat list for the images of one chat
    images = [[picture.convert("RGB")] if nested else picture.convert("RGB") for picture in pictures]
    return dict(processor(images=images, text=prompts, return_tensors="pt", padding=True))


class Captioner:
    """Describes images by the likeliest `tokens`, at most so many, so that a second run says the same."""

    def __init__(self, name: str, prompt: str, tokens: int, device: str = "cpu") -> None:
        model, self.processor = load_image_text(name)
        self.name, self.prompt, self.tokens = name, prompt, tokens
        # Hashed as saved: workers with and without a GPU write shards of one column.
        self._hash = weights_hash(model)
        dtype = weights_dtype("auto", device) or torch.float32
        self.model = model.eval().requires_grad_(False).to(device, dtype)

    def producer(self) -> Mapping[str, Any]:
        """The model by name and hash, and what it is asked."""
        return {"name": self.name, "hash": self._hash, "prompt": self.prompt, "tokens": self.tokens}

    @torch.no_grad()
    def describe(self, pictures: Sequence[Image.Image]) -> list[str]:
        """One caption for each image, without line breaks; "" where the model answers nothing."""
        texts = [chat_prompt(self.processor, self.prompt)] * len(pictures)
        try:
            inputs = {
                key: value.to(self.model.device, self.model.dtype if value.is_floating_point() else None)
                for key, value in inputs_of(self.processor, texts, pictures).items()
            }
            said = self.model.generate(**inputs, max_new_tokens=self.tokens, do_sample=False, num_beams=1)
        except (ValueError, TypeError, IndexError) as error:
            what = f"{self.name!r} takes no such prompt with one image ({first_line(error)[:120]})"
            raise ConfigError(what, "set data.captioner.prompt, or name another image-text model") from None
        # Decoders repeat the prompt before the answer; encoder-decoders do not.
        prompt, length = inputs["input_ids"], inputs["input_ids"].shape[1]
        if said.shape[1] >= length and bool((said[:, :length] == prompt).all()):
            said = said[:, length:]
        decoded = partial(self.processor.tokenizer.batch_decode, skip_special_tokens=True)
        # BLIP repeats it with other special tokens around it.
        pairs = zip(decoded(said), decoded(prompt), strict=True)
        return [" ".join(answer.removeprefix(before).split()) for answer, before in pairs]
