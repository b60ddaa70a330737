"""File formats: one type for each JSON file that Atoll writes, with name, version and one way to read it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Protocol, Self

from atoll.base.config import Config
from atoll.base.errors import AtollError, ConfigError, StoreError

HEADER = "format"


class Readable(Protocol):
    """A store, as far as a format needs it."""

    def get_json(self, key: str) -> Any:
        """Plain data of an object."""

    def name(self, key: str) -> str:
        """The object's place, for messages."""


class File(Config):
    """One kind of JSON file. Unknown fields are refused: whoever adds one raises `VERSION`."""

    FORMAT: ClassVar[str] = ""
    """Name of the format, such as `atoll/card`."""
    VERSION: ClassVar[int] = 1
    """Raised when a reader of the earlier version would go wrong."""
    PLACE: ClassVar[str] = ""
    """Where the file lies, for the documentation."""
    HEADED: ClassVar[bool] = True
    """Whether a file says its format; lines of a `.jsonl` do not."""
    REMEDY: ClassVar[str] = "restore it from a copy, or make it again"
    """What a user does about a file that cannot be read, in the imperative."""
    ERROR: ClassVar[type[AtollError]] = StoreError
    """What an unreadable file raises."""

    @classmethod
    def header(cls) -> dict[str, Any]:
        """The first field of a file, such as `"format": "atoll/card 1"`; empty where it carries none."""
        return {HEADER: f"{cls.FORMAT} {cls.VERSION}"} if cls.HEADED else {}

    def to_json(self) -> dict[str, Any]:
        """Plain data of the file: its header, then its fields."""
        return {**self.header(), **self.model_dump(mode="json", by_alias=True)}

    @classmethod
    def of_json(cls, content: Any, where: str) -> Self:
        """Check plain data and make a value of it; `ERROR`, in one line, where it is of another kind."""
        if not isinstance(content, dict):
            raise cls.ERROR(f"{where} is not what Atoll writes", cls.REMEDY)
        other = content.get(HEADER)
        if other != cls.header().get(HEADER):
            said = other[:100] if isinstance(other, str) else "no format of Atoll's"
            raise cls.ERROR(f"{where} is of {said}, this Atoll reads {cls.FORMAT} {cls.VERSION}", cls.REMEDY)
        try:
            return cls.parse({key: value for key, value in content.items() if key != HEADER}, where)
        except ConfigError as error:
            raise cls.ERROR(f"{where} is not what Atoll writes ({error.what})", cls.REMEDY) from None

    @classmethod
    def read(cls, store: Readable, key: str) -> Self:
        """Read a file of a store; see `of_json`."""
        return cls.of_json(store.get_json(key), store.name(key))


def code_version() -> str:
    """Version of the installed package."""
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "0 (not installed)"
