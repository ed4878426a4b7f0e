"""Reads a configuration file; every mistake becomes one line that names file, line, key and the way out."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from hotspa_plugin.config.training import TrainingConfig

Location = tuple[str | int, ...]


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainingConfig:
    """The configuration in the YAML file ``path``; ``overrides`` ("run.steps": 3) win over it.

    Raises ValueError with one line per mistake.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: there is no such file; hotspa train --print-config prints one to start from"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error})") from None
    return parse_config(text, name=str(path), overrides=overrides)


def parse_config(text: str, *, name: str = "config", overrides: Mapping[str, Any] | None = None) -> TrainingConfig:
    """As ``read_config``, from text; ``name`` stands for the file in messages."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_repeated_keys(root, name)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{name}: holds {_described(content)}, not sections; known are {_listed(_keys(()))}")
    # "data:" with nothing behind it means its defaults.
    content = {
        key: {} if value is None and isinstance(key, str) and _keys((key,)) else value for key, value in content.items()
    }
    for key, value in (overrides or {}).items():
        section, _, field = key.partition(".")
        inner = content.setdefault(section, {})
        if isinstance(inner, dict):
            inner[field] = value
    try:
        return TrainingConfig.model_validate(content)
    except pydantic.ValidationError as error:
        lines = list(dict.fromkeys(_explain(error, root, name)))
        raise ValueError("\n".join(lines)) from None


def _explain(error: pydantic.ValidationError, root: yaml.Node | None, name: str) -> Iterator[str]:
    by_location: dict[Location, list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        # Behind a union's field pydantic puts the member that it tried: not a place in the file.
        while location and _node(root, location) is None and _node(root, location[:-1]) is not None:
            if detail["type"] in ("missing", "extra_forbidden") or location[-1] in _keys(location[:-1]):
                break
            location = location[:-1]
        by_location.setdefault(location, []).append(detail)
    for location, details in by_location.items():
        node = _node(root, _sharpened(root, location, details[0])) or _node(root, location[:-1])
        where = f"{name}:{node.start_mark.line + 1}" if node is not None else name
        key = ".".join(map(str, location))
        yield f"{where}: {_message(location, key, details)}"


def _sharpened(root: yaml.Node | None, location: Location, detail: dict[str, Any]) -> Location:
    """A check of a whole section says the key it is about first: that key's place, where the file has it."""
    words = re.match(r"[\w.]+", detail["msg"].removeprefix("Value error, "))
    if detail["type"] == "value_error" and words:
        sharper = (*location, *words[0].split("."))
        if _node(root, sharper) is not None:
            return sharper
    return location


def _message(location: Location, key: str, details: list[dict[str, Any]]) -> str:
    detail = details[0]
    kind, given = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        known = _keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        elsewhere = [section for section in _keys(()) if location[-1] in _keys((section,))]
        if close:
            return f"unknown key {key}; did you mean {close[0]}?"
        if elsewhere:
            return f"unknown key {key}; {location[-1]} belongs under {' or '.join(elsewhere)}"
        return f"unknown key {key}; known here are {_listed(known)}"
    if kind == "invalid_key":
        return f"unknown key {key}; keys are text"
    if kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return message if not key or message.startswith((f"{key}:", f"{key}.")) else f"{key}: {message}"
    if kind == "missing":
        return f"{key} is missing"
    choices = _choices(details)
    if choices:
        close = difflib.get_close_matches(str(given), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{key} {_described(given)} is not one of {_listed(choices)}{hint}"
    wanted = " or ".join(dict.fromkeys(_wanted(detail) for detail in details))
    return f"{key} {_described(given)} must be {wanted}"


def _choices(details: list[dict[str, Any]]) -> list[str]:
    for detail in details:
        if detail["type"] == "literal_error":
            expected = detail["ctx"]["expected"]
            return [choice.strip().strip("'") for part in expected.split(" or ") for choice in part.split(",")]
    return []


def _wanted(detail: dict[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    plain = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "dict_type": "a mapping",
        "tuple_type": "a list",
        "model_type": "a section with keys of its own",
        "model_attributes_type": "a section with keys of its own",
        "finite_number": "a finite number",
    }
    if kind in plain:
        return plain[kind]
    for symbol, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if symbol in context:
            return f"{words} {context[symbol]:g}"
    if kind in ("too_long", "too_short"):
        return f"a list of {context.get('max_length', context.get('min_length'))}"
    message = detail["msg"]
    return message[0].lower() + message[1:]


def _keys(location: Location) -> list[str]:
    """The keys that the configuration knows at ``location``; empty where that is no section."""
    model: type[pydantic.BaseModel] = TrainingConfig
    for part in location:
        field = model.model_fields.get(str(part))
        candidates = [] if field is None else [field.annotation, *typing.get_args(field.annotation)]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, pydantic.BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)


def _node(root: yaml.Node | None, location: Location) -> yaml.Node | None:
    """Where ``location`` stands in the file: the key's node in a mapping, the item's in a list."""
    value, found = root, root
    for part in location:
        if isinstance(value, yaml.MappingNode):
            pairs = [(key, item) for key, item in value.value if getattr(key, "value", None) == str(part)]
            if not pairs:
                return None
            found, value = pairs[-1]
        elif isinstance(value, yaml.SequenceNode) and isinstance(part, int) and part < len(value.value):
            found = value = value.value[part]
        else:
            return None
    return found


def _refuse_repeated_keys(node: yaml.Node | None, name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ValueError(
                        f"{name}:{line}: key {key.value} stands on line {seen[key.value]} already: keep one"
                    )
                seen[key.value] = line
            _refuse_repeated_keys(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, name)


def _described(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(names: list[str]) -> str:
    return ", ".join(names)
