"""Classes that may be loaded from a folder or a hub: Atoll runs the code of no other. Imports no torch."""

AUTOENCODERS = ("AutoencoderDC", "AutoencoderKL", "AutoencoderTiny")
"""Of diffusers."""
TOWERS = {
    "bert": "BertModel",
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
    "distilbert": "DistilBertModel",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "mpnet": "MPNetModel",
    "mt5": "MT5EncoderModel",
    "qwen2": "Qwen2Model",
    "roberta": "RobertaModel",
    "siglip": "SiglipTextModel",
    "t5": "T5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "xlm-roberta": "XLMRobertaModel",
}
"""Class of the text tower in transformers by the `model_type` of its config."""
_TOKENIZED = (
    "Bert",
    "CLIP",
    "DistilBert",
    "Gemma",
    "MPNet",
    "Qwen2",
    "Roberta",
    "Siglip",
    "T5",
    "XLMRoberta",
)
TOKENIZERS = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    *(f"{name}Tokenizer{speed}" for name in _TOKENIZED for speed in ("", "Fast")),
)
"""Of transformers, whose versions call the same tokenizer by different names."""
SCHEDULERS = (
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "SASolverScheduler",
    "UniPCMultistepScheduler",
)
"""Of diffusers: those that can integrate a flow."""
COMPONENTS = {
    "scheduler": ("diffusers", SCHEDULERS),
    "vae": ("diffusers", AUTOENCODERS),
    "text_encoder": ("transformers", tuple(TOWERS.values())),
    "tokenizer": ("transformers", TOKENIZERS),
}
"""Library and classes of the parts of a pipeline that diffusers and transformers load."""
SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".sig", ".txt")
"""Files that the folder of such a part may hold; neither code nor pickle is among them."""
