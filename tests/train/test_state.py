"""Checkpoints: everything comes back to the bit, and nobody removes what is not his."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_tensors

from atoll.base.errors import ConfigError, StoreError
from atoll.campaign.settings.train import GuardConfig
from atoll.networks.families import family, initialise
from atoll.networks.settings import NetworkConfig
from atoll.store.log import Commit, Fenced, Log
from atoll.store.store import Store
from atoll.train.state import Ema, Guard, Saver, TrainState, newest, restore
from helpers_networks import CLASSES, TINY, conditions, noise

LEARNED = {"lr": 1e-3}


def fresh(seed: int = 0) -> TrainState:
    network = family("dit").build(NetworkConfig.parse({**TINY, "family": "dit"}, ""), CLASSES)
    initialise(network, seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    return TrainState(network, Ema(network, 100.0, 0.05), optimizer, Guard(GuardConfig()), tracker="t")


def blobs(state: TrainState) -> dict[str, bytes]:
    return {name: save_tensors(tensors) for name, tensors in state.tensors().items()}


def steps(state: TrainState, count: int) -> None:
    for _ in range(count):
        s = state.step
        out = family("dit").predict(
            state.network, noise(4, seed=s), torch.full((4,), 0.5), conditions(4, CLASSES, s)
        )
        (out - noise(4, seed=100 + s)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.samples = s + 1, state.samples + 4
        state.ema.update(state.samples, 4)


def save(
    store: Store, log: Log, state: TrainState, learned: dict[str, float], keep: int, milestone: bool = False
) -> None:
    saver = Saver(store, log, learned, keep)
    try:
        saver.save(state, state.tensors(), milestone)
        saver.settle(fatal=True)
    finally:
        saver.close()


def resume(store: Store, log: Log, state: TrainState, learned: dict[str, float]) -> bool:
    found = newest(store, log)
    if found is not None:
        restore(state, *found, learned)
    return found is not None


def held(store: Store, name: str = "a") -> Log:
    log = Log(store, name)
    log.acquire()
    return log


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path)


def test_everything_comes_back_to_the_bit(store: Store) -> None:
    state, log = fresh(), held(store)
    steps(state, 5)
    state.seconds, state.tracker = 1.25, "mine"
    assert state.guard.admits(1.5, 1.0) and not state.guard.admits(float("nan"), 1.0)
    save(store, log, state, LEARNED, keep=2)
    back = fresh(seed=9)
    assert resume(store, held(store, "b"), back, LEARNED)
    assert (back.step, back.samples, back.seconds, back.tracker) == (5, 20, 1.25, "mine")
    assert back.guard.counters() == {"window": [1.5], "skipped": 1, "in_a_row": 1}
    assert blobs(back) == blobs(state)
    assert len(blobs(state)["optimizer.safetensors"]) > 2 * len(blobs(state)["weights.safetensors"])
    steps(state, 5)
    steps(back, 5)
    assert blobs(back) == blobs(state)


def test_without_the_optimizer_the_run_would_differ(store: Store) -> None:
    """What the test above rests on: the moments count."""
    state, back = fresh(), fresh()
    steps(state, 5)
    back.restore(
        Commit(samples=20, step=5, seconds=0.0, recipe="", guard=state.guard.counters(), tracker="t"),
        {**blobs(state), "optimizer.safetensors": blobs(fresh())["optimizer.safetensors"]},
    )
    assert blobs(back)["weights.safetensors"] == blobs(state)["weights.safetensors"]
    steps(state, 2)
    steps(back, 2)
    assert blobs(back)["weights.safetensors"] != blobs(state)["weights.safetensors"]


def test_the_newest_whole_one_wins(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    state, log = fresh(), held(store)
    saved = {}
    for _ in range(3):
        steps(state, 1)
        save(store, log, state, LEARNED, keep=3)
        saved[state.step] = blobs(state)
    for step, harm in ((3, lambda d: d[:-1]), (2, lambda d: d[:-1] + bytes([d[-1] ^ 1]))):
        path = store.path(f"checkpoints/{step:08d}-a/ema.safetensors")
        path.write_bytes(harm(path.read_bytes()))
        back = fresh()
        assert resume(store, held(store, f"b{step}"), back, LEARNED)
        assert back.step == step - 1 and blobs(back) == saved[step - 1]
        assert "warning: checkpoint set aside" in capsys.readouterr().out
    path = store.path("checkpoints/00000001-a/weights.safetensors")
    path.unlink()
    assert not resume(store, held(store, "c"), fresh(), LEARNED)


def test_what_was_set_aside_is_said_in_the_log_and_not_tried_again(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    state, log = fresh(), held(store)
    for _ in range(2):
        steps(state, 1)
        save(store, log, state, LEARNED, keep=1 + state.step)
    path = store.path("checkpoints/00000002-a/COMMIT.json")
    path.write_bytes(path.read_bytes().replace(b'"samples": 8', b'"samples": 9'))
    second = held(store, "b")
    back = fresh()
    assert resume(store, second, back, LEARNED) and back.step == 1
    (aside,) = [entry for entry in second.entries() if entry.kind == "set_aside"]
    assert aside.checkpoint == "checkpoints/00000002-a" and "COMMIT.json is not what" in aside.reason
    capsys.readouterr()
    assert resume(store, held(store, "c"), fresh(), LEARNED)
    assert "set aside" not in capsys.readouterr().out
    steps(back, 3)
    save(store, held(store, "d"), back, LEARNED, keep=1)
    assert folders(store) == {"00000002-a", "00000004-d"}


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(store: Store) -> None:
    """Steps that are made while it is written do not get into it."""
    state, log = fresh(), held(store)
    steps(state, 2)
    then = blobs(state)
    saver = Saver(store, log, LEARNED, keep=2)
    saver.save(state, state.tensors())
    steps(state, 3)
    saver.settle(fatal=True)
    saver.close()
    back = fresh()
    assert resume(store, held(store, "b"), back, LEARNED)
    assert back.step == 2 and blobs(back) == then != blobs(state)


def test_a_store_that_fails_for_a_while_costs_a_checkpoint_and_not_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, log = fresh(), held(store)
    saver = Saver(store, log, LEARNED, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", _full)
        steps(state, 1)
        saver.save(state, state.tensors())
        steps(state, 1)
        saver.save(state, state.tensors())
        with pytest.raises(StoreError, match="no space"):
            saver.settle(fatal=True)
    assert "could not be saved" in capsys.readouterr().out
    steps(state, 1)
    saver.save(state, state.tensors())
    saver.settle(fatal=True)
    saver.close()
    back = fresh()
    assert resume(store, held(store, "b"), back, LEARNED) and back.step == 3


def _full(self: Store, key: str, data: bytes) -> None:
    raise StoreError("no space left")


def test_a_checkpoint_that_the_log_does_not_name_does_not_exist(store: Store) -> None:
    """Killed between the manifest and the log's entry, or fenced: it is not resumed from."""
    first, state = held(store, "a"), fresh()
    steps(state, 1)
    save(store, first, state, LEARNED, keep=2)
    second = held(store, "b")
    steps(state, 1)
    with pytest.raises(Fenced):
        save(store, first, state, LEARNED, keep=2)
    assert store.exists("checkpoints/00000002-a/COMMIT.json")
    back = fresh()
    assert resume(store, second, back, LEARNED) and back.step == 1


def test_other_settings_are_refused(store: Store) -> None:
    state = fresh()
    save(store, held(store), state, LEARNED, keep=2)
    other = fresh(seed=3)
    before = blobs(other)
    with pytest.raises(ConfigError, match="was made with other settings"):
        resume(store, held(store, "b"), other, {"lr": 2e-3})
    assert blobs(other) == before


def folders(store: Store) -> set[str]:
    return {key.split("/")[1] for key in store.list("checkpoints")}


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_older_ones_go_and_milestones_stay(store: Store, keep: int) -> None:
    state, log = fresh(), held(store)
    for step in range(1, 6):
        steps(state, 1)
        save(store, log, state, LEARNED, keep, milestone=step == 2)
        kept = set(range(max(1, step - keep + 1), step + 1)) | ({2} if step > 1 else set())
        assert folders(store) == {f"{s:08d}-a" for s in kept}
    assert {Path(key).suffix for key in store.list()} == {".json", ".safetensors"}  # nothing that runs code


def test_leavings_of_earlier_holders_go_too(store: Store) -> None:
    held(store, "dead")
    store.put("checkpoints/00000007-dead/weights.safetensors", b"half")
    state = fresh()
    save(store, held(store, "b"), state, LEARNED, keep=2)
    assert folders(store) == {"00000000-b"}


def test_a_holder_that_was_overtaken_removes_nothing_of_its_successor(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs after its commit, when it is about to remove what is old; meanwhile another one goes on."""
    state, first = fresh(), held(store, "a")
    entries = Log.entries
    overtaken = []

    def hang(self: Log) -> list:  # type: ignore[type-arg]
        found = entries(self)
        if self is first and not overtaken:  # what it knows was read before the other one came
            overtaken.append(True)
            second, later = held(store, "b"), fresh()
            steps(later, 4)
            save(store, second, later, LEARNED, keep=1)
            store.put("checkpoints/00000009-b/weights.safetensors", b"being written")
        return found

    monkeypatch.setattr(Log, "entries", hang)
    save(store, first, state, LEARNED, keep=1)
    assert overtaken
    assert {"00000004-b", "00000009-b"} <= folders(store)
