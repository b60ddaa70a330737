"""A small autoencoder of a campaign's pictures in diffusers' layout: 64 px become latents of 4 x 16 x 16.

    atoll new CAMPAIGN --recipe emoji --set data.source=$PWD/emoji64 --set data.ingest.size=64 \
        --set data.vae=$PWD/autoencoder --set network.patch=2 --set router.patch=4
    atoll data ingest CAMPAIGN --set data.vae=none
    python examples/emoji/autoencoder.py CAMPAIGN --to autoencoder [--steps 20000] [--batch 16]
    atoll launch CAMPAIGN

It sees the campaign's training rows alone. The loss is the absolute difference of pixels, and that of
features of EfficientNet-Lite0 (a perceptual loss, Johnson et al. 2016): pixels alone would leave a blur. A
penalty keeps latents small, and noise is added before they are decoded, so that the decoder bears what a
diffusion model draws. At the end they are scaled to standard deviation 1. A run that was stopped
goes on from its last minute, with the optimizer's moments anew.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.base.errors import AtollError
from atoll.campaign.folder import Campaign
from atoll.data.dataset import DataSet
from atoll.encoders.vae import Autoencoder
from atoll.encoders.vision import vision_encoder

RATE, WARMUP = 2e-3, 0.02
"""Highest learning rate, and the share of the training after which it is reached."""
PERCEPTUAL, SMALL, NOISE = 0.5, 1e-3, 0.1
"""Weight of the features' difference and of the latents' squares; deviation of the noise."""
BLOCKS = (0, 2, 4, 10)
"""Blocks of EfficientNet-Lite0 whose outputs are compared: of strides 2, 4, 8 and 16."""
SHOWN = 12
"""Held-out pictures on the sheet, above what is left of them."""


def main() -> None:
    """Train, measure on the held-out pictures, and write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("campaign", type=Path, help="whose pictures are ingested")
    parser.add_argument("--to", type=Path, required=True, help="folder of the autoencoder")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--channels", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    try:
        dataset = Campaign.open(options.campaign).dataset()
    except AtollError as error:
        parser.error(str(error))
    width = (options.channels,) * 3
    network = AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(0, 2, 3),
        num_decoder_blocks=(3, 2, 1),
    )
    # Convolutions of a CPU are a fifth faster so.
    network.to(memory_format=torch.channels_last)
    options.to.mkdir(parents=True, exist_ok=True)
    train(network, levels_of(dataset, "train"), options)
    network.to(memory_format=torch.contiguous_format)  # as files hold it

    heldout, vae = levels_of(dataset, "heldout"), Autoencoder("it", network.eval().requires_grad_(False))
    latents = vae.encode([Image.fromarray(one) for one in heldout.permute(0, 2, 3, 1).numpy()])
    # No shift, which stock PixArt pipelines do not take: the mean is near 0 by itself.
    network.register_to_config(scaling_factor=1 / float(latents.std()))
    network.save_pretrained(options.to)
    drawn = vae.decode(latents)
    errors = (drawn - scaled(heldout)).square().mean(dim=(1, 2, 3)).clamp(min=1e-9)
    psnr = 10 * torch.log10(4 / errors)
    shares = f"{psnr.mean():.2f} dB, a tenth of them under {psnr.quantile(0.1):.2f}"
    print(f"PSNR of {len(psnr):,} held-out pictures: {shares}")
    some = torch.linspace(0, len(heldout) - 1, SHOWN).long()
    rows = [torch.cat([*part[some]], dim=2) for part in (scaled(heldout), drawn)]
    sheet = ((torch.cat(rows, dim=1).permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
    Image.fromarray(sheet).save(options.to / "reconstructed.png")


def levels_of(dataset: DataSet, split: str) -> Tensor:
    """Pictures of a split (N, 3, H, W) from 0 to 255."""
    pictures = [np.asarray(dataset.image(int(row)).convert("RGB")) for row in dataset.split(split)]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def scaled(levels: Tensor) -> Tensor:
    """The same in [-1, 1]."""
    return levels.float() / 127.5 - 1


def train(network: AutoencoderTiny, levels: Tensor, options: argparse.Namespace) -> None:
    """Train for the steps that are left of `--steps`; every minute the weights are written."""
    features, state, first = features_of(), options.to / "training.safetensors", 0
    if state.exists():
        tensors = load_file(state)
        first = int(tensors.pop("step"))
        network.load_state_dict(tensors)
    optimizer, said = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.99)), time.monotonic()
    for step in range(first, options.steps):
        share = step / options.steps
        optimizer.param_groups[0]["lr"] = RATE * min(share / WARMUP, 0.5 + 0.5 * math.cos(math.pi * share))
        chosen = levels[torch.randint(len(levels), (options.batch,))]
        mirrored = torch.rand(len(chosen), 1, 1, 1) < 0.5
        pixels = scaled(torch.where(mirrored, chosen.flip(-1), chosen)).contiguous(
            memory_format=torch.channels_last
        )
        latents = network.encode(pixels).latents
        drawn = network.decode(latents + NOISE * torch.randn_like(latents)).sample
        with torch.no_grad():
            real = features(pixels)
        pairs = zip(features(drawn), real, strict=True)
        seen = sum((one - own).abs().mean() / own.abs().mean() for one, own in pairs) / len(BLOCKS)
        pixel = (drawn - pixels).abs().mean()
        loss = pixel + PERCEPTUAL * seen + SMALL * latents.square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if time.monotonic() > said + 60:
            said = time.monotonic()
            print(f"{share:4.0%}, step {step:,}: pixels {pixel:.4f}, features {seen:.3f}", flush=True)
            tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
            save_file({**tensors, "step": torch.tensor(step + 1)}, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)


def features_of() -> Callable[[Tensor], list[Tensor]]:
    """What gives the outputs of the blocks for pictures in [-1, 1]."""
    encoder, found = vision_encoder("efficientnet-lite0"), list[Tensor]()
    network: Any = encoder.network
    for number in BLOCKS:
        network._blocks[number].register_forward_hook(lambda *call: found.append(call[-1]))

    def features(pixels: Tensor) -> list[Tensor]:
        found.clear()
        network.extract_features(encoder.normalise((pixels + 1) * 127.5))
        return [*found]

    return features


if __name__ == "__main__":
    main()
