"""Settings: frozen pydantic models whose errors say which key is wrong and what was meant."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.base.errors import ConfigError, nearest


class Config(BaseModel):
    """A group of settings. Immutable; unknown keys are errors; docstrings describe the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, tree: Any, where: str) -> Self:
        """Build from plain data, or raise `ConfigError` that names the first wrong key."""
        if not isinstance(tree, Mapping):
            fix = "write settings as 'key: value' lines"
            raise ConfigError(f"{where} holds a {type(tree).__name__}", fix)
        try:
            return cls.model_validate(tree)
        except ValidationError as failure:
            errors = failure.errors()
        error, more = errors[0], f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        path = [str(part) for part in error["loc"]]
        key = ".".join(path)
        if error["type"] == "extra_forbidden":
            valid = _groups_along(cls, path)[-1].model_fields
            raise ConfigError(f"unknown key {key!r} in {where}{more}", nearest(path[-1], valid))
        message = error["msg"].removeprefix("Value error, ")
        message = message.replace("a valid tuple", "a list, such as [2, 1]")
        at = f"{key!r} in {where}" if key else where
        if error["type"] == "missing":
            raise ConfigError(f"{at} is missing{more}", "give it a value")
        raise ConfigError(f"{at}: {message}{more}", "correct it and run the command again")


def loose(**options: Any) -> Any:
    """Mark a field as one that decides no result, so that it may be changed at any time; else as `Field`."""
    return Field(json_schema_extra={"loose": True}, **options)


def loose_fields(model: type[BaseModel]) -> set[str]:
    """Names of the fields that are marked as `loose`."""
    return {name for name, field in model.model_fields.items() if field.json_schema_extra == {"loose": True}}


def is_loose(root: type[BaseModel], path: Sequence[str]) -> bool:
    """Whether the setting at this path, or a group that it is in, is marked as `loose`."""
    groups = _groups_along(root, path)
    return any(name in loose_fields(group) for name, group in zip(path, groups, strict=False))


def differences(root: type[BaseModel], old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted names of the settings in which two trees of plain data differ, but for `loose` ones."""
    # A group without settings and no group say the same: `islands: {}`, `islands: {0: {train: {}}}`.
    old, new = (None if value == {} else value for value in (old, new))
    if isinstance(old, dict | None) and isinstance(new, dict | None):
        old, new = old or {}, new or {}
        for key in sorted(old.keys() | new.keys()):
            yield from differences(root, old.get(key), new.get(key), (*path, key))
    elif old != new and not is_loose(root, path):
        yield ".".join(path)


def value_at(tree: Any, name: str) -> Any:
    """The value of a dotted name; None where there is none."""
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def set_value(tree: dict[str, Any], assignment: str) -> None:
    """Apply one `a.b=value` override to nested plain data, in place; the value is read as YAML."""
    from atoll.base.safe_parse import read_yaml

    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        fix = "write for example --set partition.k=8"
        raise ConfigError(f"--set {assignment!r} is not of the form key=value", fix)
    value = read_yaml(text, f"--set {assignment[:100]!r}: the value")
    *groups, last = key.strip().split(".")
    for group in groups:
        key = _key_in(tree, group)
        if tree.get(key) is None:  # `null` in the file, or not there
            tree[key] = {}
        if not isinstance(tree[key], dict):
            raise ConfigError(f"--set {assignment!r}: {group!r} is not a group of settings", "check the key")
        tree = tree[key]
    tree[_key_in(tree, last)] = value


def commented(root: type[BaseModel], tree: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines of YAML, one for each setting, with the first sentence of its docstring as a comment."""
    import yaml

    for key, value in tree.items():
        here, indent = (*path, str(key)), "  " * len(path)
        group = _groups_along(root, here)[-1]
        field, about = group.model_fields.get(str(key)), ""
        if field is not None:
            about = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
            kind: Any = field.annotation
            # What overrides its own group stays closed: it would say the same again.
            again = isinstance(kind, type(Config)) and issubclass(group, kind)
            value = {} if again and value == kind().model_dump(mode="json") else value
        nested = isinstance(value, dict) and bool(value)
        pair = {key: {} if nested else value}
        text = yaml.safe_dump(pair, default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
        yield indent + text.removesuffix(" {}" if nested else "\n") + (f"  # {about}" if about else "")
        if nested:
            yield from commented(root, value, here)
        elif value is None and field is not None:  # what the group would hold
            kinds = [k for k in get_args(field.annotation) if isinstance(k, type(Config)) and k is not group]
            below = (commented(root, kind().model_dump(mode="json"), here) for kind in kinds)
            yield from (f"# {line}" for lines in below for line in lines)


def _key_in(tree: dict[Any, Any], name: str) -> Any:
    # The key of this name, which YAML may have read as a number (`islands: {0: ...}`).
    return next((key for key in tree if str(key) == name), name)


def _groups_along(root: type[BaseModel], path: Sequence[str]) -> list[type[BaseModel]]:
    groups = [root]
    for part in path[:-1]:
        here = groups[-1]
        field = here.model_fields.get(part)
        if field is not None and field.annotation == dict[str, Any]:
            # Overrides, such as `islands.0.train`, hold settings of the root's group of the same name.
            field = root.model_fields.get(part, field)
        # A key of a mapping, such as an island's number, is no field: its values are of the same group.
        options = [] if field is None else [field.annotation, *get_args(field.annotation)]
        groups.append(next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), here))
    return groups
