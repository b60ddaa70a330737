"""Where torch computes."""

import os

import torch


def own_device() -> torch.device:
    """The device of this process: under `torchrun` each has a GPU of its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
