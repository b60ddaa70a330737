"""Settings: frozen pydantic models whose errors say which key is wrong and what was meant."""

from collections.abc import Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from atoll.base.errors import ConfigError, nearest


class Config(BaseModel):
    """A group of settings. Immutable; unknown keys are errors; docstrings describe the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, tree: Mapping[str, Any], where: str) -> Self:
        """Build from plain data, or raise `ConfigError` that names the first wrong key."""
        if not isinstance(tree, Mapping):
            raise ConfigError(
                f"{where} holds a {type(tree).__name__}", "write settings as 'key: value' lines"
            )
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise _explain(cls, error, where) from None


def loose(**options: Any) -> Any:
    """Mark a field as one that decides no result, so that it may be changed at any time; else as `Field`."""
    return Field(json_schema_extra={"loose": True}, **options)


def loose_fields(model: type[BaseModel]) -> tuple[str, ...]:
    """Names of the fields that are marked as `loose`."""
    return tuple(name for name, field in model.model_fields.items() if _has_mark(field, "loose"))


def _has_mark(field: FieldInfo, mark: str) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get(mark))


def set_value(tree: dict[str, Any], assignment: str) -> None:
    """Apply one `a.b=value` override to nested plain data, in place; the value is read as YAML."""
    from atoll.base.plain import read_yaml

    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {assignment!r} is not of the form key=value", "write for example --set partition.k=8"
        )
    value = read_yaml(text, f"--set {assignment[:100]!r}: the value")
    *groups, last = key.strip().split(".")
    for group in groups:
        below = tree.setdefault(_key_in(tree, group), {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {assignment!r}: {group!r} is not a group of settings", "check the key")
        tree = below
    tree[_key_in(tree, last)] = value


def _key_in(tree: dict[Any, Any], name: str) -> Any:
    """The key of this name, which YAML may have read as a number (`islands: {0: ...}`)."""
    return next((key for key in tree if str(key) == name), name)


def _explain(model: type[BaseModel], error: ValidationError, where: str) -> ConfigError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        valid = _fields_at(model, path[:-1])
        return ConfigError(f"unknown key {key!r} in {where}{more}", nearest(path[-1], valid))
    message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list, such as [2, 1]")
    at = f"{key!r} in {where}" if key else where
    return ConfigError(f"{at}: {message}{more}", "correct it and run the command again")


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the group of settings that `path` leads to."""
    here: type[BaseModel] = model
    for part in path:
        field = here.model_fields.get(part)
        if field is None:
            continue  # a key of a mapping, such as an island's number
        options = [field.annotation, *get_args(field.annotation)]
        groups = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        here = groups[0] if groups else here
    return list(here.model_fields)
