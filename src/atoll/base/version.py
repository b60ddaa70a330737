"""Which code made something."""

from importlib.metadata import PackageNotFoundError, version


def code_version() -> str:
    """Version of the installed package."""
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "0 (not installed)"
