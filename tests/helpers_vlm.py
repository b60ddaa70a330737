"""A tiny image-text model with its processor, as transformers saves one."""

from pathlib import Path

import torch

WORDS = (
    "<image> <unk> <pad> <eos> Rate the aesthetics of this picture . The is bad poor fair good excellent "
    "1. 2. 3. : Sharp Bright All from different dimensions"
)


def save_llava(folder: Path) -> Path:
    """LLaVA with one layer of 16 channels, random but the same every time."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = folder / "llava"
    numbers = {word: number for number, word in enumerate(WORDS.split())}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=["<image>"], **special
    )
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**small, image_size=16, patch_size=8)
    text = transformers.Qwen2Config(**small, num_key_value_heads=2, vocab_size=len(numbers))
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=0, image_seq_length=4
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(place)
    crop = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    parts = {"image_processor": transformers.CLIPImageProcessor(**crop), "tokenizer": tokenizer}
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(**parts, patch_size=8, **more).save_pretrained(place)
    return place
