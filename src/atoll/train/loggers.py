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
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError, first_line
from atoll.campaign.runs import MetricsLine
from atoll.campaign.settings.train import TrackingConfig
from atoll.store.store import Store

CLOSE_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 30.0  # of Weights & Biases, at the start of a run


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker whose package is not installed, or whose key is not known."""
    for package, chosen in (("tensorboard", config.tensorboard), ("wandb", config.wandb != "off")):
        spec = importlib.util.find_spec(package) if chosen else None
        # A folder of that name, such as one that wandb has left behind, is a package without an origin.
        if chosen and (spec is None or spec.origin is None):
            fix = "pip install -e '.[tracking]' in the checkout, or leave the setting out"
            raise ConfigError(f"tracking.{package} needs the package {package}, which is not installed", fix)
    if config.wandb != "online" or any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))):
        return
    import wandb

    # Whether the key is valid is found out by the first connection.
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or str(wandb.Settings().base_url)).hostname
    try:
        known = host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        known = False
    if not known:
        fix = "set WANDB_API_KEY, or run 'wandb login'"
        raise ConfigError("tracking.wandb is online, but there is no key", fix)


@dataclass(frozen=True)
class RunInfo:
    """The run that is tracked."""

    id: str  # the same over all restarts
    name: str  # such as `expert 3`
    role: str
    start: int  # how many times the run has been started, this one included
    step: int  # optimizer steps done before this start
    settings: dict[str, Any]


Shown = Mapping[str, float | Image.Image]


class Trackers:
    """All trackers of a run; none of them can end it."""

    def __init__(self) -> None:
        self._trackers: dict[str, _TensorBoard | _Wandb] = {}
        self._sizes: dict[str, int] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, config: TrackingConfig, run: Store, holder: str, info: RunInfo) -> None:
        """Begin, or go on where an earlier process of this run stopped; files bear the holder's name."""
        self.run, suffix = run, f"{info.start:06d}-{holder}"
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-trackers-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        if config.tensorboard:
            self.start("tensorboard", lambda: _TensorBoard(folder / "tensorboard", suffix, info))
        if config.wandb != "off":
            self.start("wandb", lambda: _Wandb(config, folder, suffix, info))

    def start(self, name: str, make: "Callable[[], Tracker]") -> None:
        """Add one."""
        try:
            self._trackers[name] = make()
        except Exception as error:  # a third party may raise anything, and training is worth more
            say(f"warning: {name} does not start, the run goes on without it: {first_line(error)}")

    def line(self, line: MetricsLine) -> None:
        """Show a line of metrics.jsonl; numbers by time are named by it, `validation/t=0.0625`."""
        scalars: dict[str, float] = {}
        for name, value in line.model_dump(exclude_unset=True, exclude={"step", "times"}).items():
            if isinstance(value, list | tuple):
                scalars |= {f"{name}/t={t:g}": float(v) for t, v in zip(line.times, value, strict=True)}
            elif value is not None:
                scalars[name] = float(value)
        self._each(lambda tracker: tracker.show(line.step, scalars))

    def picture(self, step: int, png: bytes) -> None:
        """Show a preview."""
        with Image.open(io.BytesIO(png)) as image:
            preview = image.convert("RGB")
        self._each(lambda tracker: tracker.show(step, {"preview": preview}))

    def flush(self) -> None:
        """Put what was shown into the run's folder, where it stays."""
        self._each(self._put)

    def close(self) -> None:
        """End all of them; one that hangs is not waited for."""

        def end(tracker: "Tracker") -> None:
            tracker.close()
            self._put(tracker)

        # In a thread: one that waits for its server for ever must not keep a finished run from publishing.
        thread = threading.Thread(target=lambda: self._each(end), daemon=True, name="trackers")
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            say(f"warning: trackers did not end within {CLOSE_TIMEOUT_S:g} s, the run goes on without them")
        self._trackers = {}
        if self._folder is not None:
            self._folder.cleanup()

    def _put(self, tracker: "Tracker") -> None:
        for name, data in tracker.files():
            # Both kinds of file only grow, so the size tells whether there is something new to upload.
            if self._sizes.get(name) != len(data):
                self.run.put(name, data)
                self._sizes[name] = len(data)

    def _each(self, do: "Callable[[Tracker], None]") -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except StoreError as error:  # the next write may come through
                say(f"warning: {name}: {error}")
            except Exception as error:
                self._trackers.pop(name, None)
                say(f"warning: {name} failed, the run goes on without it: {first_line(error)}")


# Both kinds show what they are given of a step, and name the files that belong into the run's folder.
class _TensorBoard:
    def __init__(self, folder: Path, suffix: str, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers go through event files by name: the number of the start keeps them in order whatever the
        # clocks of the machines say. The first event of a start takes back what earlier ones told of later
        # steps, which a resumed run takes again.
        start, _, holder = suffix.partition("-")
        self.name = f"tensorboard/events.out.tfevents.{start}.{holder}"
        self._writer = SummaryWriter(str(folder), purge_step=info.step + 1)
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
    def __init__(self, config: TrackingConfig, folder: Path, suffix: str, info: RunInfo) -> None:
        import wandb

        self.suffix, self._offline = suffix, config.wandb == "offline"
        self._image, self._teardown = wandb.Image, wandb.teardown
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=f"{config.name} {info.name}" if config.name else info.name,
            group=config.name,
            job_type=info.role,
            id=info.id,
            resume="allow",
            mode="offline" if self._offline else "online",
            dir=str(folder),
            config=info.settings,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, init_timeout=CONNECT_TIMEOUT_S
            ),
        )
        # It refuses steps that it has; a resumed run comes to the same numbers, so they are passed over.
        self._first, self._root = int(self._run.step), Path(self._run.dir).parent

    def show(self, step: int, values: Shown) -> None:
        if step >= self._first:
            ours = {k: self._image(v) if isinstance(v, Image.Image) else v for k, v in values.items()}
            self._run.log(ours, step=step)

    def files(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted(self._root.rglob("*")) if self._offline else ():
            if path.is_file() and not path.is_symlink() and "logs" not in path.parts:
                name = path.relative_to(self._root).as_posix()
                yield f"wandb/{self._root.name}-{self.suffix}/{name}", path.read_bytes()

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # only then are offline files whole


Tracker = _TensorBoard | _Wandb
