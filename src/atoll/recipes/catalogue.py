"""The ready-made campaigns: YAML files beside this module, each opening with what it is."""

from importlib.resources import files

from atoll.base.errors import ConfigError, nearest


def names() -> list[str]:
    """Names of all recipes."""
    return sorted(
        f.name.removesuffix(".yaml") for f in files("atoll.recipes").iterdir() if f.name.endswith(".yaml")
    )


def text(name: str) -> str:
    """A recipe's text; `ConfigError` if there is none of this name."""
    if name not in names():
        raise ConfigError(f"there is no recipe {name!r}", nearest(name, names()))
    return (files("atoll.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def title(name: str) -> str:
    """The first line of a recipe's head."""
    return text(name).splitlines()[0].removeprefix(f"# {name}: ")
