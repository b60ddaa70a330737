"""A low-rank change of a network: peft's arithmetic and names, and what does not fit."""

import copy

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model, set_peft_model_state_dict

from atoll.base.errors import ConfigError
from atoll.networks.families import FAMILIES, family, initialise, parameter_count
from atoll.networks.lora import own, shared, trainable
from atoll.networks.settings import TAKES_TEXT, DataShape, NetworkConfig
from helpers_networks import CLASSES, TEXT, TINY, conditions, denoiser, noise, random_weights

B, T = 3, torch.tensor([0.1, 0.5, 0.9])


def changed(name: str, **lora: object) -> tuple[torch.nn.Module, DataShape]:
    """A change of a network, all of whose numbers count."""
    shape = TEXT if TAKES_TEXT[name] else CLASSES
    config = NetworkConfig.parse({**TINY, "family": name, "lora": {"rank": 3, **lora}}, "a test")
    network = family(name).build(config, shape)
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    random_weights(network, 1)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return network, shape


@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_computes_what_peft_does(name: str) -> None:
    network, shape = changed(name, alpha=6)
    stock = denoiser(0, shape, name=name)
    stock.load_state_dict(shared(network, network.state_dict()))
    change = own(network, network.state_dict())
    layers = sorted({key.rpartition(".lora_")[0] for key in change})
    inject_adapter_in_model(PeftConfig(r=3, lora_alpha=6, target_modules=layers), stock)
    missing = set_peft_model_state_dict(stock, change)
    assert not missing.unexpected_keys and all("transformer_blocks." in layer for layer in layers)
    x, cond = noise(B, shape), conditions(B, shape)
    with torch.no_grad():
        mine, theirs = (family(name).predict(one, x, T, cond) for one in (network, stock))
        plain = family(name).predict(denoiser(1, shape, name=name), x, T, cond)
    assert torch.allclose(mine, theirs, atol=1e-6) and not torch.allclose(mine, plain, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_starts_as_the_network_and_trains_alone(name: str) -> None:
    network, shape = changed(name)
    whole = denoiser(0, shape, name=name)
    initialise(network, 5)
    initialise(whole, 5)
    x, cond = noise(B, shape), conditions(B, shape)
    assert torch.equal(*(family(name).predict(one, x, T, cond) for one in (network, whole)))
    before = copy.deepcopy(network.state_dict())
    parameters = trainable(network)
    assert own(network, dict(network.named_parameters())).keys() == parameters.keys()
    assert parameter_count(network) == sum(p.numel() for p in parameters.values()) > 0
    random_weights(network.get_submodule(next(iter(parameters)).rpartition(".lora_")[0]).lora_B, 2)
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    family(name).predict(network, x, T, cond).square().sum().backward()
    optimizer.step()
    moved = {key for key, value in network.state_dict().items() if not torch.equal(value, before[key])}
    assert moved and moved <= parameters.keys()


def test_targets_are_names_or_their_ends() -> None:
    network, _ = changed("pixart", targets=["attn1.to_q", "proj_out"])
    layers = {key.rpartition(".lora_")[0] for key in trainable(network)}
    assert layers == {"transformer_blocks.0.attn1.to_q", "proj_out"}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["to_w"]}, ["PixArtTransformer2DModel", "to_w", "attn1.to_q"]),
        ({"rank": 17}, ["rank 17", "16", "to_q"]),
        ({"rank": 8, "targets": ["proj_out"], "alpha": 0}, ["alpha"]),
        ({"rank": 0}, ["rank"]),
    ],
)
def test_what_does_not_fit_is_refused(lora: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        changed("pixart", **lora)
    assert all(word in str(refusal.value) for word in words), refusal.value
