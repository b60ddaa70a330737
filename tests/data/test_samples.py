"""Rows as a network sees them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.base.errors import DataError
from atoll.data.dataset import DataSet
from atoll.data.encode import latents_job, text_job
from atoll.data.samples import Samples, data_shape
from atoll.data.settings import IngestConfig
from atoll.data.sources.several import open_source
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from helpers_data import ingest


@pytest.fixture(scope="module")
def encoded(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """40 gray pictures of 8x8 with latents and text states."""
    dataset = DataSet.open(Store.open(shutil.copytree(drawn, tmp_path_factory.mktemp("samples") / "data")))
    latents_job(dataset, autoencoder("none")).run()
    text_job(dataset, text_encoder("minilm", 12)).run()
    return dataset


def test_shapes_are_read_from_the_columns(encoded: DataSet) -> None:
    longest = encoded.column("text").meta.max_length
    assert 5 < longest <= 12
    assert data_shape(encoded, "text") == DataShape(1, 8, 384, longest)
    assert data_shape(encoded, "class") == DataShape(1, 8, classes=8)
    assert data_shape(encoded, "none") == DataShape(1, 8)


def test_samples_are_the_rows_asked_for(encoded: DataSet) -> None:
    rows = encoded.split("train")
    samples = Samples(encoded, rows, "text", data_shape(encoded, "text"))
    assert len(samples) == len(rows) < len(encoded)
    index = np.array([3, 0, len(rows) - 1, 3])
    for value, row in zip(samples.latents(index), rows[index], strict=True):
        pixels = np.asarray(encoded.image(int(row)), dtype=np.float32) / 127.5 - 1
        np.testing.assert_allclose(value[0].numpy(), pixels, atol=1e-3)  # float16
    states, mask = text_encoder("minilm", 12).encode(encoded.take(rows[index]).column("caption").to_pylist())
    cond = samples.conditions(index)
    assert cond.text is not None and cond.mask is not None
    assert cond.text.shape[1] == cond.mask.shape[1] == samples.shape.text_length
    assert cond.mask.sum(1).tolist() == mask.sum(1).tolist()
    torch.testing.assert_close(cond.text[:, : states.shape[1]], states, rtol=1e-2, atol=1e-3)


def test_the_null_condition_is_the_empty_caption(encoded: DataSet) -> None:
    null = Samples(encoded, encoded.split("train"), "text", data_shape(encoded, "text")).null
    states, mask = text_encoder("minilm", 12).encode([""])
    assert null.text is not None and null.mask is None and null.real.shape == mask.shape
    torch.testing.assert_close(null.text.float(), states, rtol=1e-2, atol=1e-3)


def test_tokens_are_encoded_to_the_states_that_are_stored(encoded: DataSet, tmp_path: Path) -> None:
    """Beside states of another encoder, which must not be taken for theirs."""
    store = Store.open(shutil.copytree(encoded.store.path(""), tmp_path / "tokens"))
    dataset, encoder = DataSet.open(store, ""), text_encoder("minilm", 6)
    text_job(dataset, encoder, precompute=False).run()
    assert dataset.column("tokens").meta.dtype == "int32"
    assert dataset.producers("tokens") != dataset.producers() == encoded.producers()
    shape = data_shape(dataset, "text", "tokens")
    assert shape.text_length == 6 < data_shape(dataset, "text").text_length
    index, rows = np.array([5, 0, 7, 5]), dataset.split("train")
    samples = Samples(dataset, rows, "text", shape, encoder)
    with torch.autocast("cpu", torch.bfloat16):
        ours = samples.conditions(index)
    shutil.rmtree(tmp_path / "tokens/columns/text")
    text_job(DataSet.open(store, ""), encoder).run()
    stored = Samples(DataSet.open(store, ""), rows, "text", shape)
    for one, other in ((ours, stored.conditions(index)), (samples.null, stored.null)):
        assert one.text is not None and other.text is not None
        assert torch.equal(one.text, other.text) and torch.equal(one.real, other.real)
        assert not one.text.is_inference()


def test_labels_and_their_null(encoded: DataSet) -> None:
    rows = encoded.split("heldout")
    samples = Samples(encoded, rows, "class", data_shape(encoded, "class"))
    labels = samples.conditions(np.arange(len(rows))).labels
    assert labels is not None
    assert labels.tolist() == encoded.take(rows).column("label").to_pylist()
    null = samples.null.labels
    assert null is not None and null.tolist() == [8]


def test_without_condition_there_is_none(encoded: DataSet) -> None:
    samples = Samples(encoded, encoded.split("train"), "none", data_shape(encoded, "none"))
    for cond in (samples.conditions(np.arange(3)), samples.null):
        assert set(vars(cond).values()) == {None}


def test_rows_without_labels_are_refused(folder, store) -> None:  # type: ignore[no-untyped-def]
    config = IngestConfig(size=8, heldout=0.2)
    dataset = ingest(open_source(folder, config), store, "x", config)
    with pytest.raises(DataError, match="6 rows have no label"):
        _ = dataset.labels
    latents_job(dataset, autoencoder("none")).run()
    dataset.labels = torch.tensor([0, 1, 2_119_789])
    with pytest.raises(DataError, match=r"3 class labels, the largest of them 2,119,789: number them from 0"):
        data_shape(dataset, "class")


def test_latents_that_are_not_square_are_refused(glyphs: DataSet) -> None:
    values = np.zeros((len(glyphs), 4, 8, 6), dtype=np.float32)
    glyphs.write_values("latents", {"name": "x", "hash": ""}, values)
    with pytest.raises(DataError, match="latents of 8x6 are not square"):
        data_shape(glyphs, "none")
