"""Networks from a folder or the Hugging Face hub: where that fails, one line says why."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.base.errors import ConfigError, first_line


@contextmanager
def loading(
    what: str, name: str, fix: str = "give a folder, or a hub name that can be reached"
) -> Iterator[None]:
    """Load `what` of this name within.

    Raises:
        ConfigError: the library could not; what it tells of its retries on the way is left out.
    """
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except (OSError, ValueError, AttributeError, ImportError, TypeError) as error:
        reason = first_line(error).rstrip(".: ")
        raise ConfigError(f"cannot load the {what} {name!r}: {reason}", fix) from None
    finally:
        logger.setLevel(level)
