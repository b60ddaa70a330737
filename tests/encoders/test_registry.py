"""Loading from a folder or the hub, where it fails."""

import logging

import pytest

from atoll.base.errors import ConfigError
from atoll.encoders.registry import loading


def test_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("huggingface_hub.utils._http")
    before = logging.getLogger("huggingface_hub").level

    def load() -> None:
        with loading("VAE", "a/b", "give another"):
            logger.warning("retrying in 1 s")
            raise OSError("We could not connect, nor find it.\nCheck your connection.")

    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value) == "cannot load the VAE 'a/b': We could not connect, nor find it: give another"
    assert not caplog.records and logging.getLogger("huggingface_hub").level == before
    with pytest.raises(ConfigError, match="OSError"), loading("VAE", "a/b"):
        raise OSError
    with pytest.raises(ConfigError, match="cannot load the VAE"), loading("VAE", "a/b"):
        raise KeyError("num_layers")  # of a library, about a folder from outside
