"""Configuration files of pipelines: YAML that may not repeat a name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean


class _ConfigLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML. A name that appears twice in one section is an error, and not silently replaced."""


def _mapping(loader: _ConfigLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | None):
            raise yaml.MarkedYAMLError(problem=f"the name {key!r} is not a string", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"the name {key!r} appears twice", problem_mark=key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return dict(loader.construct_mapping(node, deep=True))


_ConfigLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def import_beside(config: Path) -> None:
    """Make modules in the file's folder importable, for rewards and environments."""
    sys.path.insert(0, str(config.resolve().parent))


def read_yaml(text: str) -> Any:
    """Parse a YAML text. yaml.YAMLError: the text is invalid, or a name appears twice in one section."""
    return yaml.load(text, _ConfigLoader)


_HINTS = {  # the parser's problem: its usual cause
    "mapping values are not allowed": "a value that contains ': ' needs quotes, and a name must begin in the column "
    "of the names above it",
    "could not find expected ':'": "a name and its value are written as `name: value`",
    "expected <block end>": "names of one section must begin in one column",
    "cannot start any token": "indent with spaces; a value that begins with @, ` or % needs quotes",
    "expected ',' or": "a bracket is not closed, or a value between brackets needs quotes",
    "unexpected end of stream": "a quote is not closed",
}


def _in_words(error: yaml.YAMLError) -> str:
    """Describe an error in YAML on one line: its place, the problem, and the usual cause."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    hint = next((f"; {hint}" for problem, hint in _HINTS.items() if problem in str(error.problem)), "")
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{hint}"


def read_config(file: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Read parameters from a YAML file. Relative paths of data are relative to the file.

    changes: parameters that replace those of the file, as in `training.steps=10`. An empty value, or null, removes the
    parameter, so that its default applies. UserError: the file cannot be read, or a change is not NAME.NAME=VALUE.
    """
    try:
        values = read_yaml(file.read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        near = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UserError(f"config {file}: does not exist{did_you_mean(file.name, near)}") from error
    except yaml.YAMLError as error:
        raise UserError(f"config {file}: {_in_words(error)}") from error
    except IsADirectoryError as error:
        raise UserError(f"config {file}: is a folder; give a YAML file in it") from error
    except (OSError, ValueError) as error:
        raise UserError(f"config {file}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"config {file}: must contain names and values")
    for change in changes:
        names, separator, value = change.partition("=")
        if not separator:
            raise UserError(f"--set {change!r}: must be NAME=VALUE, as in training.steps=10")
        *outer, last = names.split(".")
        section = values
        for name in outer:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise UserError(f"--set {change!r}: {name} is not a section with names")
        try:
            section[last] = read_yaml(value)
            if section[last] is None:
                del section[last]
        except yaml.YAMLError as error:
            raise UserError(f"--set {change!r}: {_in_words(error)}") from error
    make_absolute(file.resolve().parent, values)
    return values


def make_absolute(folder: Path, values: dict[str, Any]) -> None:
    """Resolve relative paths of data, the values of `url`, against `folder`."""
    for name, value in values.items():
        if isinstance(value, dict):
            make_absolute(folder, value)
        elif name == "url" and isinstance(value, str) and value and "://" not in value:
            values[name] = str(folder / value)
