"""The text encoder of a campaign that encodes its captions in training."""

from functools import lru_cache

from atoll.base.device import own_device
from atoll.campaign.folder import Campaign
from atoll.data.dataset import DataSet
from atoll.encoders.registry import check_known
from atoll.encoders.text import TextEncoder, text_encoder_of
from atoll.model.card import check_producers


def token_encoder(campaign: Campaign, dataset: DataSet) -> TextEncoder | None:
    """What made the tokens of a data set, loaded once in a process; None where text states are stored."""
    if not campaign.config.encodes_text:
        return None
    by = dataset.column("tokens").meta.producer
    check_producers(dataset.column("latents").meta.producer, by)
    check_known(by["name"], campaign.config.encoders)
    return _loaded(by["name"], by["hash"], by["max_length"], str(own_device()))


@lru_cache(maxsize=1)
def _loaded(name: str, digest: str, length: int, device: str) -> TextEncoder:
    return text_encoder_of({"name": name, "hash": digest, "max_length": length}, device)
