"""What the tests of this folder share."""

from typing import Any

import pytest

from helpers_export import small_vae, text_tower


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A text encoder and an autoencoder with random weights."""
    folder = tmp_path_factory.mktemp("encoders")
    text, vae = text_tower(folder / "text"), small_vae(folder / "vae")
    return {"text_encoder": str(text), "text_length": 24, "vae": str(vae)}
