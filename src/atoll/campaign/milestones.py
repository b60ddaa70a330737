"""What a run was on its way: the checkpoints that `train.milestones` kept, and their averaged weights."""

from dataclasses import dataclass

from safetensors.torch import load as load_tensors
from torch import Tensor

from atoll.base.hashing import sha256
from atoll.campaign.publication import CARD
from atoll.store.log import COMMIT, Commit, Entry, Log
from atoll.store.manifest import read_file
from atoll.store.store import Damaged, Store

AVERAGE = "ema.safetensors"


@dataclass(frozen=True)
class Milestone:
    """A checkpoint that stays for good.

    Attributes:
        step: optimizer steps done.
        folder: of the checkpoint, from the run's folder.
        sha256: of its `COMMIT.json`, as the log says.
    """

    step: int
    folder: str
    sha256: str


def milestones(run: Store, part: Store) -> list[Milestone]:
    """Milestones of the run that published a part, by rising step; none if it published another one.

    Only the log is read, and nothing is written.

    Args:
        run: narrowed to the run's folder.
        part: narrowed to where the published network lies now.
    """
    log = Log(run, "")
    published = log.publication()
    if published is None or not _is_of(published, part):
        return []
    kept = {
        entry.step: Milestone(entry.step, entry.checkpoint, entry.sha256)
        for entry in log.commits()
        if entry.milestone
    }
    return [kept[step] for step in sorted(kept) if run.exists(f"{kept[step].folder}/{COMMIT}")]


def _is_of(published: Entry, part: Store) -> bool:
    """Whether the part's card is the one that the run published."""
    return any(file.path == CARD and file.sha256 == sha256(part.get(CARD)) for file in published.files)


def averaged(run: Store, milestone: Milestone) -> dict[str, Tensor]:
    """The averaged weights of a milestone, verified; the rest of the checkpoint is not read.

    Raises:
        Damaged: the commit or the weights are not what the log and the commit say.
        Absent: one of them is missing.
    """
    name = f"{milestone.folder}/{COMMIT}"
    if sha256(run.get(name)) != milestone.sha256:
        raise Damaged(f"{run.name(name)} is not what the log says", "restore it, or leave out compare.curve")
    (entry,) = (entry for entry in Commit.read(run, name).files if entry.path == AVERAGE)
    return load_tensors(read_file(run, milestone.folder, entry))
