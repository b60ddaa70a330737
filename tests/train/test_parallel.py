"""How a step is spread over processes: the same samples, the same number of parts on each."""

import itertools
from typing import Any

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.base.processes import ProcessGroup
from atoll.campaign.settings import train
from atoll.campaign.settings.train import ParallelConfig
from atoll.networks.families import family
from atoll.networks.settings import TAKES_TEXT, DataShape, FamilyName, NetworkConfig
from atoll.train import parallel
from atoll.train.parallel import StepSharding


@pytest.mark.parametrize(
    ("batch", "size", "micro"), [(16, 2, 3), (5, 2, 2), (256, 3, 85), (7, 7, 1), (9, 4, 1), (8, 1, None)]
)
def test_every_process_takes_as_many_parts(batch: int, size: int, micro: int | None) -> None:
    """Under FSDP every part brings collectives, so that another number of them would hang."""
    config = ParallelConfig(micro_batch=micro)
    network = torch.nn.Linear(1, 1)
    steps = [StepSharding(network, config, ProcessGroup(rank, size), batch) for rank in range(size)]
    parts = [step.parts(100) for step in steps]
    assert len({(len(own), step.at_once) for own, step in zip(parts, steps, strict=True)}) == 1
    assert list(itertools.chain(*itertools.chain(*parts))) == list(range(100, 100 + batch))
    assert max(len(part) for own in parts for part in own) <= (micro or batch) + (micro == 1)
    for step, own in zip(steps, parts, strict=True):
        assert all(len(part) > 0 for part in own)
        assert sum(step.weight(part) for part in own) / size == pytest.approx(sum(map(len, own)) / batch)


def test_more_processes_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 processes for 2 samples a step: use fewer processes"):
        StepSharding(torch.nn.Linear(1, 1), ParallelConfig(), ProcessGroup(0, 3), 2)


@pytest.mark.parametrize(
    ("compile", "cpu", "flops", "compiler", "compiles"),
    [
        ("auto", False, 2e17, "gcc", True),
        ("auto", False, 2e17, "clang", True),
        ("auto", False, 2e17, "", False),
        ("auto", False, 9e16, "gcc", False),
        ("auto", True, 1e20, "gcc", False),
        (True, True, 0.0, "g++", True),
        (False, False, 1e20, "gcc", False),
    ],
)
def test_auto_compiles_where_a_gpu_has_enough_to_do_and_something_compiles(
    compile: Any, cpu: bool, flops: float, compiler: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(train, "which", lambda name: name == compiler)
    done, network = list[bool](), torch.nn.Linear(1, 1)
    monkeypatch.setattr(network, "compile", lambda: done.append(True))
    StepSharding(network, ParallelConfig(compile=compile).decided(cpu, flops), ProcessGroup(), 2)
    assert done == [True] * compiles
    monkeypatch.setattr(train, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile needs g\+\+.* is not here: install it"):
        ParallelConfig(compile=True).decided(True, flops)


@pytest.mark.parametrize("name", TAKES_TEXT)
def test_a_network_is_compiled_block_by_block(name: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one class share their code: one piece of 28 takes a minute and a half in place of seconds."""
    compiled = list[torch.nn.Module]()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part: compiled.append(part))
    text = {"text_width": 32, "text_length": 8} if TAKES_TEXT[name] else {"classes": 10}
    config = NetworkConfig(family=name, depth=3, heads=2, head_width=16)
    network = family(name).build(config, DataShape(4, 8, **text))
    StepSharding(network, ParallelConfig(compile=True), ProcessGroup(), 2)
    assert len(compiled) >= 3 and all("Block" in type(part).__name__ for part in compiled)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_sharded_network_is_moved_in_parts(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole it may not fit there: FLUX.1 takes 45 GiB in float32, of which each of eight GPUs holds 6."""
    network, sharded = torch.nn.Linear(1, 1), list[bool]()
    monkeypatch.setattr(parallel, "_shard", lambda *_: sharded.append(network.weight.is_meta))
    StepSharding(network, ParallelConfig(strategy=strategy), ProcessGroup(0, 2, torch.device("meta")), 2)
    assert sharded == [False] * (strategy == "fsdp") and network.weight.is_meta == (strategy == "ddp")
