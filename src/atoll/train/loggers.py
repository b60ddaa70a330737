"""Trackers: the lines of metrics.jsonl and the previews, shown by TensorBoard or Weights & Biases as well.

A run has one name in them over all restarts. They only ever read what the loop gives them: weights do not
depend on them, and one that fails is named and dropped.
"""

import importlib.util
import io
import netrc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError, first_line
from atoll.campaign.results import MetricsLine
from atoll.campaign.settings.loggers import TrackingConfig
from atoll.store.store import Store

FAREWELL = 20.0
"""Seconds that trackers may take to end."""
CONNECT = 30.0
"""Seconds that Weights & Biases may take to answer at the start of a run."""


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker whose package is not installed, or whose key is not known, with a `ConfigError`."""
    for package, chosen in (("tensorboard", config.tensorboard), ("wandb", config.wandb != "off")):
        if chosen and not _installed(package):
            raise ConfigError(
                f"tracking.{package} needs the package {package}, which is not installed",
                "pip install 'atoll[tracking]', or leave the setting out",
            )
    if config.wandb == "online" and not _logged_in():
        raise ConfigError(
            "tracking.wandb is online, but there is no key", "set WANDB_API_KEY, or run 'wandb login'"
        )


@dataclass(frozen=True)
class Subject:
    """What is tracked.

    Attributes:
        id: the same over all restarts.
        name: of the run, such as `expert 3`.
        role: what is trained.
        start: how many times the run has been started, this one included.
        step: optimizer steps done before this start.
        settings: how it is trained.
    """

    id: str
    name: str
    role: str
    start: int
    step: int
    settings: dict[str, Any]


Shown = Mapping[str, float | Image.Image]


class Tracker(Protocol):
    """One place where a run is shown."""

    def show(self, step: int, values: Shown) -> None:
        """Show numbers or a picture of a step."""

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Write out what was shown, and name the files that belong into the run's folder."""

    def close(self) -> None:
        """End: nothing comes any more."""


class Tracks:
    """All trackers of a run; none of them can end it."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._sizes: dict[str, int] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, config: TrackingConfig, run: Store, holder: str, subject: Subject) -> None:
        """Begin, or go on where an earlier process of this run stopped.

        Args:
            config: which trackers.
            run: narrowed to the run's folder.
            holder: name of this process; its files bear it.
            subject: the run.
        """
        self.run, place = run, f"{subject.start:06d}-{holder}"
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-trackers-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        if config.tensorboard:
            self._start("tensorboard", lambda: _TensorBoard(folder / "tensorboard", place, subject))
        if config.wandb != "off":
            self._start("wandb", lambda: _Wandb(config, folder, place, subject))

    def line(self, line: MetricsLine) -> None:
        """Show a line of metrics.jsonl."""
        if self._trackers:
            scalars = dict(_scalars(line))
            self._each(lambda tracker: tracker.show(line.step, scalars))

    def picture(self, step: int, png: bytes) -> None:
        """Show a preview."""
        if self._trackers:
            with Image.open(io.BytesIO(png)) as image:
                preview = image.convert("RGB")
            self._each(lambda tracker: tracker.show(step, {"preview": preview}))

    def flush(self) -> None:
        """Put what was shown into the run's folder, where it stays."""
        self._each(self._put)

    def close(self) -> None:
        """End all of them; one that hangs is not waited for."""

        def end(tracker: Tracker) -> None:
            tracker.close()
            self._put(tracker)

        thread = threading.Thread(target=lambda: self._each(end), daemon=True, name="trackers")
        thread.start()
        thread.join(FAREWELL)
        if thread.is_alive():
            say(f"warning: trackers did not end within {FAREWELL:g} s, the run goes on without them")
        self._trackers = {}
        if self._folder is not None:
            self._folder.cleanup()

    def _put(self, tracker: Tracker) -> None:
        for name, data in tracker.files():
            if self._sizes.get(name) != len(data):
                self.run.put(name, data)
                self._sizes[name] = len(data)

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._trackers[name] = make()
        except Exception as error:  # whatever a third party raises: the run goes on without it
            say(f"warning: {name} does not start, the run goes on without it: {first_line(error)}")

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except StoreError as error:  # the next write may come through
                say(f"warning: {name}: {error}")
            except Exception as error:
                self._trackers.pop(name, None)
                say(f"warning: {name} failed, the run goes on without it: {first_line(error)}")


class _TensorBoard:
    """Event files, made in a temporary folder, one for each start of the run.

    They are named by the number of the start, so that readers meet them in this order whatever the clocks of
    the machines say. The first event of a start takes back what earlier ones told of later steps.
    """

    def __init__(self, folder: Path, place: str, subject: Subject) -> None:
        from torch.utils.tensorboard import SummaryWriter

        start, _, holder = place.partition("-")
        self.name = f"tensorboard/events.out.tfevents.{start}.{holder}"
        self._writer = SummaryWriter(str(folder), purge_step=subject.step + 1)
        (self._file,) = folder.iterdir()

    def show(self, step: int, values: Shown) -> None:
        for name, value in values.items():
            if isinstance(value, Image.Image):
                self._writer.add_image(name, np.asarray(value), step, dataformats="HWC")
            else:
                self._writer.add_scalar(name, value, step)

    def files(self) -> Iterator[tuple[str, bytes]]:
        self._writer.flush()
        yield self.name, self._file.read_bytes()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases.

    Steps that it has already are passed over: a resumed run comes to the same numbers.
    """

    def __init__(self, config: TrackingConfig, folder: Path, place: str, subject: Subject) -> None:
        import wandb

        self.place, self._offline = place, config.wandb == "offline"
        self._image, self._teardown = wandb.Image, wandb.teardown
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=f"{config.name} {subject.name}" if config.name else subject.name,
            group=config.name,
            job_type=subject.role,
            id=subject.id,
            resume="allow",
            mode="offline" if self._offline else "online",
            dir=str(folder),
            config=subject.settings,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, init_timeout=CONNECT
            ),
        )
        self._first, self._root = int(self._run.step), Path(self._run.dir).parent

    def show(self, step: int, values: Shown) -> None:
        if step >= self._first:
            ours = {k: self._image(v) if isinstance(v, Image.Image) else v for k, v in values.items()}
            self._run.log(ours, step=step)

    def files(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted(self._root.rglob("*")) if self._offline else ():
            if path.is_file() and not path.is_symlink() and "logs" not in path.parts:
                name = path.relative_to(self._root).as_posix()
                yield f"wandb/{self._root.name}-{self.place}/{name}", path.read_bytes()

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # only then are offline files whole


def _scalars(line: MetricsLine) -> Iterator[tuple[str, float]]:
    """The numbers of a line; those by time are named by it, `validation/t=0.0625`."""
    for name, value in line.model_dump(exclude_unset=True, exclude={"step", "times"}).items():
        if isinstance(value, list | tuple):
            for time, one in zip(line.times, value, strict=True):
                yield f"{name}/t={time:g}", float(one)
        elif value is not None:
            yield name, float(value)


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name is no package


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
