"""Checkpoints: everything comes back to the bit, and nobody removes what is not his."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_tensors

from atoll.base.errors import ConfigError, StoreError
from atoll.base.processes import ProcessGroup
from atoll.campaign.settings.train import GuardConfig
from atoll.networks.families import family, initialise
from atoll.networks.settings import NetworkConfig
from atoll.store import ranges
from atoll.store.log import Commit, Fenced, Log
from atoll.store.manifest import verify
from atoll.store.store import Store
from atoll.train import state as module
from atoll.train.state import Ema, Files, Guard, Saver, TrainState, resume
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
        given = noise(4, seed=s), torch.full((4,), 0.5), conditions(4, CLASSES, s)
        (family("dit").predict(state.network, *given) - noise(4, seed=100 + s)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.samples = s + 1, state.samples + 4
        state.ema.update(state.samples, 4)


def save(store: Store, log: Log, state: TrainState, keep: int = 2, milestone: bool = False) -> None:
    saver = Saver(store, log, LEARNED, keep)
    try:
        saver.save(state, milestone)
        saver.settle(fatal=True)
    finally:
        saver.close()


def held(store: Store, name: str = "a") -> Log:
    log = Log(store, name)
    log.acquire()
    return log


def test_everything_comes_back_to_the_bit(store: Store) -> None:
    state, log = fresh(), held(store)
    steps(state, 5)
    state.seconds, state.tracker = 1.25, "mine"
    assert state.guard.admits(1.5, 1.0) and not state.guard.admits(float("nan"), 1.0)
    save(store, log, state)
    back = fresh(seed=9)
    assert resume(back, store, held(store, "b"), LEARNED)
    assert (back.step, back.samples, back.seconds, back.tracker) == (5, 20, 1.25, "mine")
    assert back.guard.counters() == {"window": [1.5], "skipped": 1, "in_a_row": 1}
    assert blobs(back) == blobs(state)
    assert len(blobs(state)["optimizer.safetensors"]) > 2 * len(blobs(state)["weights.safetensors"])
    steps(state, 5)
    steps(back, 5)
    assert blobs(back) == blobs(state)


def test_the_newest_whole_one_wins(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    state, log = fresh(), held(store)
    saved = {}
    for _ in range(3):
        steps(state, 1)
        save(store, log, state, keep=3)
        saved[state.step] = blobs(state)
    for step, harm in ((3, lambda d: d[:-1]), (2, lambda d: d[:-1] + bytes([d[-1] ^ 1]))):
        path = store.path(f"checkpoints/{step:08d}-a/ema.safetensors")
        path.write_bytes(harm(path.read_bytes()))
        back = fresh()
        assert resume(back, store, held(store, f"b{step}"), LEARNED)
        assert back.step == step - 1 and blobs(back) == saved[step - 1]
        assert "warning: checkpoint set aside" in capsys.readouterr().out
    store.path("checkpoints/00000001-a/weights.safetensors").unlink()
    assert not resume(fresh(), store, held(store, "c"), LEARNED)


def test_what_was_set_aside_is_said_in_the_log_and_not_tried_again(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    state, log = fresh(), held(store)
    for _ in range(2):
        steps(state, 1)
        save(store, log, state, keep=1 + state.step)
    path = store.path("checkpoints/00000002-a/COMMIT.json")
    path.write_bytes(path.read_bytes().replace(b'"samples": 8', b'"samples": 9'))
    second = held(store, "b")
    back = fresh()
    assert resume(back, store, second, LEARNED) and back.step == 1
    (aside,) = [entry for entry in second.entries() if entry.kind == "set_aside"]
    assert aside.checkpoint == "checkpoints/00000002-a" and "COMMIT.json is not what" in aside.reason
    capsys.readouterr()
    assert resume(fresh(), store, held(store, "c"), LEARNED)
    assert "set aside" not in capsys.readouterr().out
    steps(back, 3)
    save(store, held(store, "d"), back, keep=1)
    assert folders(store) == {"00000002-a", "00000004-d"}


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(store: Store) -> None:
    """Steps that are made while it is written do not get into it."""
    state, log = fresh(), held(store)
    steps(state, 2)
    then = blobs(state)
    saver = Saver(store, log, LEARNED, keep=2)
    saver.save(state)
    steps(state, 3)
    saver.close()  # as where the run fails meanwhile
    back = fresh()
    assert resume(back, store, held(store, "b"), LEARNED)
    assert back.step == 2 and blobs(back) == then != blobs(state)


def test_a_store_that_fails_for_a_while_costs_a_checkpoint_and_not_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, log = fresh(), held(store)
    saver = Saver(store, log, LEARNED, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_put", _full)
        patch.setattr(Store, "exists", lambda store, key: _full(store, key, b"", ""))  # an outage, not a disk
        steps(state, 1)
        saver.save(state)
        steps(state, 1)
        saver.save(state)
        with pytest.raises(StoreError, match="no space"):
            saver.settle(fatal=True)
        saver.save(state, milestone=True)
        with pytest.raises(StoreError, match="no space"):  # no later write makes up for a milestone
            saver.settle()
        saver.save(state, milestone=True)
        saver.close()  # as after an error, which it does not hide
    assert "warning: a checkpoint could not be saved or removed: no space left\n" in capsys.readouterr().out
    monkeypatch.setattr(Store, "delete", lambda store, *keys: _full(store, "", b"", ""))  # of old ones
    steps(state, 1)
    save(store, log, state)
    back = fresh()
    assert resume(back, store, held(store, "b"), LEARNED) and back.step == 3


def _full(self: Store, key: str, data: bytes, mode: str) -> None:
    raise StoreError("no space left")


def test_a_checkpoint_that_the_log_does_not_name_does_not_exist(store: Store) -> None:
    """Killed between the manifest and the log's entry, or fenced: it is not resumed from."""
    first, state = held(store, "a"), fresh()
    steps(state, 1)
    save(store, first, state)
    second = held(store, "b")
    steps(state, 1)
    with pytest.raises(Fenced):
        save(store, first, state)
    assert store.exists("checkpoints/00000002-a/COMMIT.json")
    back = fresh()
    assert resume(back, store, second, LEARNED) and back.step == 1


def test_other_settings_are_refused(store: Store) -> None:
    save(store, held(store), fresh())
    other = fresh(seed=3)
    before = blobs(other)
    with pytest.raises(ConfigError, match="was made with other settings: restore them, or remove "):
        resume(other, store, held(store, "b"), {"lr": 2e-3})
    assert blobs(other) == before


def folders(store: Store) -> set[str]:
    return {key.split("/")[1] for key in store.list("checkpoints")}


def names(files: Files) -> list[tuple[str, str]]:
    """Every tensor with the kind of its file."""
    return sorted((file.partition(".")[0].partition("-")[0], name) for file in files for name in files[file])


def test_large_states_lie_in_several_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state, log = fresh(), held(store)
    steps(state, 3)
    one = state.tensors()
    assert [*one] == ["weights.safetensors", "ema.safetensors", "optimizer.safetensors"]
    monkeypatch.setattr(module, "LARGEST", bound := 20_000)
    several = state.tensors()
    assert names(several) == names(one)
    for file, tensors in several.items():
        assert re.fullmatch(r"(weights|ema|optimizer)-\d{5}-of-\d{5}\.safetensors", file)
        assert [*tensors] == sorted(tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= bound
    save(store, log, state)
    commit = Commit.read(store, "checkpoints/00000003-a/COMMIT.json")
    assert [entry.path for entry in commit.files] == [*several]
    monkeypatch.undo()
    back = fresh(seed=9)
    assert resume(back, store, held(store, "b"), LEARNED) and blobs(back) == blobs(state)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_holds_its_share(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 20_000)
    state = fresh()
    steps(state, 1)
    every = state.tensors()
    shares = [state.tensors(ProcessGroup(rank, size)) for rank in range(size)]
    assert sorted(file for share in shares for file in share) == sorted(every)
    bytes_of = [sum(t.nbytes for tensors in share.values() for t in tensors.values()) for share in shares]
    largest = max(sum(t.nbytes for t in tensors.values()) for tensors in every.values())
    assert sum(bytes_of) == sum(t.nbytes for tensors in every.values() for t in tensors.values())
    assert max(bytes_of) <= sum(bytes_of) / size + largest


def test_a_file_is_written_in_blocks_and_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat's thread gets its turn between any two of them; nothing of a file is kept after it."""
    monkeypatch.setattr(ranges, "PART", part := 5_000)
    state, log, blocks = fresh(), held(store), list[int]()
    steps(state, 1)
    write = Store.write

    def watched(self: Store, key: str, given: Iterable[bytes]) -> tuple[int, str]:
        return write(self, key, (blocks.append(len(block)) or block for block in given))

    monkeypatch.setattr(Store, "write", watched)
    whole = state.tensors()
    files = {file: dict(parts) for file, parts in whole.items()}
    saver = Saver(store, log, LEARNED, keep=2)
    entries = saver._write("checkpoints/x", files)
    saver.close()
    assert files == {} and max(blocks) == part and sum(blocks) == sum(entry.bytes for entry in entries)
    for entry in entries:
        data = store.get(f"checkpoints/x/{entry.path}")
        assert data == save_tensors(whole[entry.path])
        verify(data, entry, entry.path)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_older_ones_go_and_milestones_stay(store: Store, keep: int) -> None:
    state, log = fresh(), held(store)
    for step in range(1, 6):
        steps(state, 1)
        save(store, log, state, keep, milestone=step == 2)
        kept = set(range(max(1, step - keep + 1), step + 1)) | ({2} if step > 1 else set())
        assert folders(store) == {f"{s:08d}-a" for s in kept}
    assert {Path(key).suffix for key in store.list()} == {".json", ".safetensors"}  # nothing that runs code


def test_a_milestone_at_a_step_that_was_just_saved_is_kept(store: Store) -> None:
    state, log = fresh(), held(store)
    saver = Saver(store, log, LEARNED, keep=1)
    for milestone in (False, True):
        saver.save(state, milestone)
    saver.settle(fatal=True)
    saver.close()
    assert [entry.milestone for entry in log.commits()] == [False, True] and len(folders(store)) == 1


def test_leavings_of_earlier_holders_go_too(store: Store) -> None:
    held(store, "dead")
    store.put("checkpoints/00000007-dead/weights.safetensors", b"half")
    save(store, held(store, "b"), fresh())
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
            save(store, second, later, keep=1)
            store.put("checkpoints/00000009-b/weights.safetensors", b"being written")
        return found

    monkeypatch.setattr(Log, "entries", hang)
    save(store, first, state, keep=1)
    assert overtaken
    assert {"00000004-b", "00000009-b"} <= folders(store)
