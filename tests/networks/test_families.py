"""The denoiser families: sizes, what stands for no condition, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.model.expert import settings_of
from atoll.networks.families import family, parameter_count
from atoll.networks.settings import DataShape, NetworkConfig
from helpers_networks import CLASSES, TEXT, TINY, conditions, denoiser, noise, null, random_weights

LATENTS = DataShape(channels=4, size=32, classes=1000)
T5 = DataShape(channels=4, size=32, text_width=4096, text_length=120)


def built(name: str, size: str, patch: int = 2) -> torch.nn.Module:
    with torch.device("meta"):
        shape = LATENTS if name == "dit" else T5
        return family(name).build(NetworkConfig(family=name, size=size, patch=patch), shape)  # type: ignore[arg-type]


# millions of parameters. DiT: arXiv 2212.09748, table 1, gives 33, 130 and 675 for the networks with one
# label embedding; diffusers' class has one in every block, hence more.
@pytest.mark.parametrize(
    ("name", "size", "millions"),
    [("dit", "XL", 750), ("pixart", "XL", 611), ("sd3", "2B", 2028), ("flux", "3B", 2989)],
)
def test_the_large_sizes_have_the_parameters_of_the_design(name: str, size: str, millions: float) -> None:
    assert parameter_count(built(name, size)) / 1e6 == pytest.approx(millions, abs=0.5)


def test_parts_of_a_preset_can_be_replaced() -> None:
    assert NetworkConfig(size="S", depth=3).dimensions() == (3, 6, 64)
    assert NetworkConfig(size="S", heads=2, head_width=16).dimensions() == (12, 2, 16)


# Behaviour.

B = 8


def config(name: str, **fields: object) -> NetworkConfig:
    return NetworkConfig.parse({**TINY, "family": name, **fields}, "")


def call(name: str, network: torch.nn.Module, cond: Condition, x: torch.Tensor | None = None) -> torch.Tensor:
    x = noise(B, CLASSES if name == "dit" else TEXT) if x is None else x
    return family(name).predict(network, x, torch.linspace(0, 1, len(x)), cond)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_labels_are_not_dropped_in_train_mode() -> None:
    """diffusers' LabelEmbedding drops a tenth of the labels in train mode, anew in every call and block."""
    network, cond = denoiser(0, CLASSES, depth=3).train(), conditions(64, CLASSES)
    x = noise(64, CLASSES)
    first = call("dit", network, cond, x)
    assert all(torch.equal(call("dit", network, cond, x), first) for _ in range(3))
    assert torch.equal(call("dit", network.eval(), cond, x), first)


def test_no_label_is_the_null_label() -> None:
    network = denoiser(0, CLASSES)
    without = call("dit", network, Condition())
    assert torch.equal(without, call("dit", network, null(CLASSES).expand(B)))
    for label in range(CLASSES.classes):
        given = call("dit", network, Condition(labels=torch.full((B,), label)))
        assert float((given - without).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["pixart", "flux", "sd3"])
def test_text_counts_and_its_padding_does_not(name: str) -> None:
    """Flux's class has no mask and SD3's forgets it: left alone, a picture would depend on its neighbours."""
    network, cond = denoiser(0, name=name, depth=2), conditions(B)
    assert cond.text is not None and cond.mask is not None
    first = call(name, network, cond)
    dirty = torch.where(cond.mask[..., None], cond.text, torch.full_like(cond.text, 50.0))
    longer = torch.nn.functional.pad(cond.text, (0, 0, 0, 4), value=9.0)
    mask = torch.nn.functional.pad(cond.mask, (0, 4))
    torch.testing.assert_close(call(name, network, Condition(text=dirty, mask=cond.mask)), first)
    padded = call(name, network, Condition(text=longer, mask=mask))
    torch.testing.assert_close(padded, first, rtol=1e-5, atol=1e-5)
    for other in (Condition(text=longer, mask=torch.ones_like(mask)), conditions(B, seed=1)):
        assert apart(call(name, network, other), first) > 1e-3


@pytest.mark.parametrize("name", ["dit", "pixart", "sd3", "flux"])
def test_the_time_embedding_is_given_thousandths(name: str) -> None:
    """Flux takes t as it is and its class scales it; the others are told 1000 t."""
    shape = CLASSES if name == "dit" else TEXT
    network, x, cond = denoiser(0, shape, name=name), noise(1, shape), conditions(1, shape)
    seen = {}
    embedder = next(m for n, m in network.named_modules() if n.endswith("time_proj"))
    embedder.register_forward_pre_hook(lambda module, args: seen.update(t=args[0].clone()))
    family(name).predict(network, x, torch.tensor([0.25]), cond)
    assert seen["t"].tolist() == [250.0]


# Flux and SD3, whose text runs through the same attention as the picture.


@pytest.mark.parametrize(("name", "pooled"), [("flux", 768), ("sd3", 2048)])
def test_without_a_pooled_text_it_gets_zeros(name: str, pooled: int) -> None:
    network, cond = denoiser(0, name=name), conditions(B)
    zeros = Condition(text=cond.text, mask=cond.mask, pooled=torch.zeros(B, pooled))
    assert torch.equal(call(name, network, cond), call(name, network, zeros))
    ones = Condition(text=cond.text, mask=cond.mask, pooled=torch.ones(B, pooled))
    assert apart(call(name, network, cond), call(name, network, ones)) > 1e-3


def test_patches_of_flux_are_those_of_its_published_pipeline() -> None:
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    x, seen = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0)), {}
    network = family("flux").build(config("flux", patch=2), TEXT)
    network.register_forward_pre_hook(lambda module, args, kw: seen.update(x=args[0], **kw), with_kwargs=True)
    assert call("flux", network, conditions(2), x).shape == x.shape
    assert torch.equal(seen["x"], FluxPipeline._pack_latents(x, 2, 3, 8, 16))
    places = FluxPipeline._prepare_latent_image_ids(2, 4, 8, "cpu", torch.float32)
    assert torch.equal(seen["img_ids"], places) and not seen["txt_ids"].any()


@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
def test_sd3_without_padding_is_diffusers_own_computation(dual: bool) -> None:
    """Also a published one of SD3.5, some of whose blocks have a second attention, on the picture alone."""
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    arguments = family("sd3").arguments(config("sd3", depth=3), TEXT)
    arguments |= {"dual_attention_layers": (0, 1)} if dual else {}
    network = random_weights(family("sd3").load(arguments), 0)
    text = torch.randn(B, 5, 12, generator=torch.Generator().manual_seed(0))
    cond, x = Condition(text=text, mask=torch.ones(B, 5, dtype=torch.bool)), noise(B)
    ours = call("sd3", network, cond, x)
    network.set_attn_processor(JointAttnProcessor2_0())  # type: ignore[operator]
    theirs = network(x, text, torch.zeros(B, 2048), torch.linspace(0, 1, B) * 1000).sample
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_sd3_takes_the_sides_that_it_has_positions_for() -> None:
    network = denoiser(0, name="sd3")
    wide = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    out = call("sd3", network, conditions(2), wide)
    assert out.shape == wide.shape and float(out.std()) > 0.01
    for height, width in ((8, 12), (6, 8), (8, 10)):  # too large, or cut to a smaller picture without a word
        with pytest.raises(ConfigError, match=f"takes no latents of {height}x{width}: .* of 4 up to 8"):
            call("sd3", network, conditions(2), torch.zeros(2, 3, height, width))


def test_a_variance_that_sd3_predicts_too_is_cut() -> None:
    network = family("sd3").load(family("sd3").arguments(config("sd3"), TEXT) | {"out_channels": 6})
    assert call("sd3", random_weights(network, 0), conditions(B)).shape == (B, 3, 8, 8)


@pytest.mark.parametrize("name", ["pixart", "sd3", "flux"])
def test_one_network_takes_pictures_of_several_aspects(name: str) -> None:
    network = denoiser(0, replace(TEXT, sizes=((16, 4), (8, 8), (4, 16))), name=name)
    for height, width in ((16, 4), (8, 8), (4, 16)):
        x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
        times = torch.tensor([0.2, 0.7])
        out = family(name).predict(network, x, times, conditions(2))
        assert out.shape == x.shape and float(out.std()) > 0.01
        # It knows where a patch lies.
        moved = family(name).predict(network, x.roll((4, 4), (2, 3)), times, conditions(2))
        assert not torch.allclose(moved, out.roll((4, 4), (2, 3)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: family("pixar"), "did you mean 'pixart'"),
        (lambda: NetworkConfig(size="mikro").dimensions(), "did you mean 'micro'"),
        *(
            (lambda n=name: family(n).build(config(n), CLASSES), f"the {name} family needs text states")
            for name in ("pixart", "sd3", "flux")
        ),
        (lambda: family("dit").build(config("dit"), TEXT), "the dit family takes no text"),
        (lambda: family("flux").build(config("flux", head_width=5), TEXT), "flux heads are 5 wide"),
        *(
            (lambda n=name: call(n, denoiser(0, name=n), Condition()), f"{title} was called without text")
            for name, title in (("pixart", "PixArt"), ("sd3", "SD3"), ("flux", "Flux"))
        ),
        (
            lambda: call("dit", denoiser(0, CLASSES), conditions(B, CLASSES), torch.zeros(B, 3, 8, 16)),
            "square images, not 8x16: use the pixart family",
        ),
        *(
            (
                lambda name=name, shape=shape: family(name).build(config(name, patch=3), shape),
                "latents of 8 px do not divide into patches of 3",
            )
            for name, shape in (("dit", CLASSES), ("pixart", TEXT), ("sd3", TEXT), ("flux", TEXT))
        ),
    ],
)
def test_what_a_family_cannot_take_is_refused(run: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run()


def test_names() -> None:
    assert family("DiTTransformer2DModel") is family("dit")


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_attention_gets_a_mask_only_where_a_text_is_padded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's flash attention takes none."""
    attend, masks = torch.nn.functional.scaled_dot_product_attention, list[torch.Tensor | None]()

    def watched(*args: torch.Tensor, attn_mask: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    network, states = denoiser(0, name=name, depth=2), conditions(B).text
    assert states is not None
    whole = Condition.of_text(states, None)
    first = call(name, network, whole)
    assert len(masks) == 2 and masks == [None, None]
    # Beside a text that is padded it has one, and the same output.
    longer = Condition.of_text(
        torch.nn.functional.pad(states, (0, 0, 0, 2)), torch.arange(7).expand(B, 7) < states.shape[1]
    )
    for cond in (longer, replace(whole, mask=whole.real)):
        masks.clear()
        torch.testing.assert_close(call(name, network, cond), first, rtol=1e-6, atol=1e-6)
        assert len(masks) == 2 and all(mask is not None for mask in masks)


def test_an_argument_that_the_class_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no argument 'guidance_embed'.*did you mean 'guidance_embeds'"):
        family("flux").build(config("flux", arguments={"guidance_embed": True}), TEXT)
    dual = config("sd3", arguments={"dual_attention_layers": [0]})
    settings = settings_of(family("sd3").build(dual, replace(TEXT, pooled_width=20)))
    assert settings["pooled_projection_dim"] == 20 and settings["dual_attention_layers"] == [0]
