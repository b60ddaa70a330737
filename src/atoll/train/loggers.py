"""Trackers: the lines of metrics.jsonl and the previews, shown by TensorBoard or Weights & Biases as well.

A run has one name in them over all restarts. They only ever read what the loop gives them: weights do not
depend on them, and one that fails is told and left out.
"""

import importlib.util
import io
import netrc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from atoll.base.config import Config
from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError
from atoll.campaign.settings.loggers import TrackingConfig
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.store.store import Store

PART = 4 * 2**20
"""Bytes of an event file after which a new one is begun, so that no write to the store grows for ever."""
FAREWELL = 20.0
"""Seconds that a tracker may take to end."""

CONNECT = 30.0
"""Seconds that Weights & Biases may take to answer at the start of a run."""

_TIMES = (*VALIDATION_TIMES, 1.0)


def check_trackers(config: TrackingConfig) -> None:
    """`ConfigError` if a tracker is wanted whose package is not installed, or whose key is not known."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb != "off")):
        if wanted and not _installed(package):
            raise ConfigError(
                f"tracking.{package} needs the package {package}, which is not installed",
                "pip install 'atoll[tracking]', or leave the setting out",
            )
    if config.wandb == "online" and not _logged_in():
        raise ConfigError(
            "tracking.wandb is online, but there is no key", "set WANDB_API_KEY, or run 'wandb login'"
        )


class Subject(Config):
    """What is tracked."""

    id: str
    """The same over all restarts."""
    name: str
    """The run, such as `island 3`."""
    role: str
    """What is trained."""
    start: int
    """How many times the run has been started, this one included."""
    step: int
    """Optimizer steps done before this start."""
    settings: dict[str, Any]
    """How it is trained."""


class Tracker(Protocol):
    """One place where metrics are shown."""

    def line(self, step: int, scalars: dict[str, float]) -> None:
        """Show numbers of a step."""

    def picture(self, step: int, png: bytes) -> None:
        """Show a preview."""

    def flush(self) -> None:
        """Bring what was shown to where it stays."""

    def close(self) -> None:
        """Nothing comes any more."""


class Tracks:
    """All trackers of a run; none of them can end it."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}

    def open(self, config: TrackingConfig, run: Store, holder: str, subject: Subject) -> None:
        """Begin, or go on where an earlier process of this run stopped.

        Args:
            config: which trackers.
            run: narrowed to the run's folder.
            holder: name of this process; its files bear it.
            subject: the run.
        """
        place = f"{subject.start:06d}-{holder}"
        if config.tensorboard:
            self._start("tensorboard", lambda: _TensorBoard(run, place, subject))
        if config.wandb != "off":
            self._start("wandb", lambda: _Wandb(config, run, place, subject))

    def line(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        scalars = dict(_scalars(line))
        self._each(lambda tracker: tracker.line(line["step"], scalars))

    def picture(self, step: int, png: bytes) -> None:
        """Show a preview."""
        self._each(lambda tracker: tracker.picture(step, png))

    def flush(self) -> None:
        """Bring what was shown to where it stays."""
        self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        """End all of them, in a bounded time."""
        self._each(lambda tracker: _bounded(tracker.close))
        self._trackers = {}

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._trackers[name] = make()
        except Exception as error:  # whatever a third party raises: the run goes on without it
            say(f"warning: {name} does not start, the run goes on without it: {_line(error)}")

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except StoreError as error:  # the next write may come through
                say(f"warning: {name}: {error}")
            except Exception as error:
                del self._trackers[name]
                say(f"warning: {name} failed, the run goes on without it: {_line(error)}")


class _TensorBoard:
    """Event files, made in a temporary folder and put into the store.

    They are named by the number of the start, so that readers meet them in this order whatever the clocks of
    the machines say. The first event of a start takes back what earlier ones told of later steps.
    """

    def __init__(self, run: Store, place: str, subject: Subject) -> None:
        self.run, self.place = run, place
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-tensorboard-")
        self._part, self._sent = 0, 0
        self._writer = self._open(subject.step + 1)

    def line(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, png: bytes) -> None:
        with Image.open(io.BytesIO(png)) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image("preview", pixels, step, dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()
        data = b"".join(path.read_bytes() for path in self._own().iterdir())
        if len(data) != self._sent:
            start, _, holder = self.place.partition("-")
            name = f"events.out.tfevents.{start}.{self._part:06d}.{holder}"
            self.run.put(f"tensorboard/{name}", data)
            self._sent = len(data)
        if len(data) > PART:
            self._writer.close()
            self._part, self._sent = self._part + 1, 0
            self._writer = self._open(None)

    def close(self) -> None:
        self._writer.flush()
        try:
            self.flush()
        finally:
            self._writer.close()
            self._folder.cleanup()

    def _open(self, purge: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._own()), purge_step=purge)

    def _own(self) -> Path:
        return Path(self._folder.name) / str(self._part)


class _Wandb:
    """A run of Weights & Biases.

    Steps that it has already are left out: a resumed run comes to the same numbers.
    """

    def __init__(self, config: TrackingConfig, run: Store, place: str, subject: Subject) -> None:
        import wandb

        self.run, self.place = run, place
        self._offline = config.wandb == "offline"
        self._sent: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-wandb-", ignore_cleanup_errors=True)
        self._picture, self._teardown = wandb.Image, wandb.teardown
        self._wandb = wandb.init(
            project=config.project,
            entity=config.entity,
            name=f"{config.name} {subject.name}" if config.name else subject.name,
            group=config.name,
            job_type=subject.role,
            id=subject.id,
            resume="allow",
            mode="offline" if self._offline else "online",
            dir=self._folder.name,
            config=subject.settings,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, init_timeout=CONNECT
            ),
        )
        self._first = int(self._wandb.step)

    def line(self, step: int, scalars: dict[str, float]) -> None:
        if step >= self._first:
            self._wandb.log(scalars, step=step)

    def picture(self, step: int, png: bytes) -> None:
        if step >= self._first:
            with Image.open(io.BytesIO(png)) as image:
                self._wandb.log({"preview": self._picture(image)}, step=step)

    def flush(self) -> None:
        if not self._offline:
            return
        root = Path(self._wandb.dir).parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink() and "logs" not in path.parts:
                self._put(path, path.relative_to(root).as_posix(), root.name)

    def _put(self, path: Path, name: str, folder: str) -> None:
        """Put a file into the store if it has grown."""
        size = path.stat().st_size
        if self._sent.get(name) != size:
            self.run.put(f"wandb/{folder}-{self.place}/{name}", path.read_bytes())
            self._sent[name] = size

    def close(self) -> None:
        self._wandb.finish()
        self._teardown()  # only then are offline files whole
        self.flush()
        self._folder.cleanup()


def _scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line; those by time are named by it, `validation/t=0.0625`."""
    for name, value in line.items():
        if isinstance(value, list):
            for time, one in zip(_TIMES, value, strict=False):
                yield f"{name}/t={time:g}", float(one)
        elif name != "step" and value is not None:
            yield name, float(value)


def _installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # a folder of that name is no package


def _logged_in() -> bool:
    """Whether there is a key; whether it is valid is found out by the first connection."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    import wandb

    host = urlsplit(os.environ.get("WANDB_BASE_URL") or str(wandb.Settings().base_url)).hostname
    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _bounded(do: Callable[[], None]) -> None:
    """Do it within a time, or go on without waiting any longer; what it raises is raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tracker")
    thread.start()
    thread.join(FAREWELL)
    if thread.is_alive():
        raise TimeoutError(f"it did not end within {FAREWELL:g} s")
    if raised:
        raise raised[0]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
