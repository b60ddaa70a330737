"""The one family of exceptions a user can cause, and how a wrong name is answered."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

INTERRUPTED = 75
"""Exit code of a run that was told to leave, saved its state and can be resumed (EX_TEMPFAIL)."""


class AtollError(Exception):
    """A mistake of the user or of the input: `what` is wrong and where; `fix` says what to do about it.

    The command line prints it as one line and exits with code 2; there is no traceback.
    """

    alone = False
    """Whether of several processes that do the same only this one met it."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        self.what, self.fix = what, fix
        super().__init__(" ".join(f"{what.rstrip('.')}: {fix}".split()) if fix else " ".join(what.split()))


class PeerFailed(AtollError):
    """Another process of the same run failed; what happened is for that one to tell."""

    exit_code = 1  # no mistake of the user's: a job may be tried again


class ConfigError(AtollError):
    """A setting that does not exist, has the wrong type, or contradicts another."""


class DataError(AtollError):
    """A source, data set or column that is missing, damaged or of the wrong kind."""


class StoreError(AtollError):
    """A store that cannot be read or written, or bytes that are not what their hash says."""


class PartitionError(AtollError):
    """Parts that do not belong together: another partition, other latents, other text states."""


def first_line(error: BaseException) -> str:
    """The first line of a message, or the error's name: libraries go on for a page."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Imports inside are of packages that an extra installs; `ConfigError` says so where one is not here."""
    try:
        yield
    except ImportError as error:
        fix = f"install the extra: pip install -e '.[{name}]' in the checkout"
        raise ConfigError(f"{what} ({first_line(error)})", fix) from None


def nearest(name: str, names: Iterable[str], forms: Sequence[str] = ()) -> str:
    """A hint for a wrong name: the closest valid one if any is close, and all of them, or their `forms`."""
    valid = sorted(names)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(forms or valid)}"
