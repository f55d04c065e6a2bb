"""Reading one JSON object, field by field, with errors that name the field, its value and the rule.

The SDK drops nulls, other clients send them: a null is an absent field everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from tinkerflow.backend.errors import UserError, broken


class Fields:
    """A JSON object being read. `where` prefixes its field names in errors (`adam_params.`)."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """Read from `values`."""
        self._values = values
        self._where = where

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        """Read from a JSON text; UserError unless it is an object."""
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError as e:
            raise UserError(f"the request body is not JSON: {e}") from e
        if not isinstance(values, dict):
            raise broken("the request body", values, "a JSON object")
        return cls(values)

    def get(self, name: str) -> Any:
        """The field as it is, None when absent."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def names(self) -> set[str]:
        """Of the fields that are there and not null."""
        return {name for name, value in self._values.items() if value is not None}

    def present(self, name: str) -> bool:
        """Whether the field is there at all, null included."""
        return name in self._values

    def named(self, name: str) -> str:
        """The field's full name for a message."""
        return self._where + name

    def object(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise broken(self.named(name), value, "a JSON object")
        return Fields(value, f"{self.named(name)}.")

    def text(self, name: str) -> str:
        """A required, non-empty string without NUL characters (Postgres cannot store them)."""
        value = self.optional_text(name)
        if not value:
            raise broken(self.named(name), value, "a non-empty string")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string without NUL characters, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or "\0" in value:
            raise broken(self.named(name), value, "a string without NUL characters")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings without NUL characters; () when absent."""
        values = self._values.get(name)
        if values is None:
            return ()
        if not isinstance(values, list) or not all(isinstance(v, str) and "\0" not in v for v in values):
            raise broken(self.named(name), values, "a list of strings without NUL characters")
        return tuple(values)

    def whole(self, name: str, low: int, high: int) -> int:
        """A required whole number, low <= n <= high."""
        value = self.optional_whole(name, low, high)
        if value is None:
            raise broken(self.named(name), None, f"a whole number from {low} to {high}")
        return value

    def optional_whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number, low <= n <= high, or None when absent. 3.0 counts as 3."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise broken(self.named(name), value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float = math.inf, *, below: bool = False) -> float:
        """A finite number, low <= x <= high (x < high when `below`); `default` when absent."""
        value = self._values.get(name)
        if value is None:
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (below and value == high):
            bound = f" and {'<' if below else '<='} {high:g}" if math.isfinite(high) else ""
            raise broken(self.named(name), value, f"a finite number >= {low:g}{bound}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; `default` when absent."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise broken(self.named(name), value, "true or false")
        return value

    def metadata(self, name: str) -> dict[str, str]:
        """A string-to-string object; {} when absent."""
        values = self._values.get(name)
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise broken(self.named(name), values, "a JSON object of strings")
        for key, value in values.items():
            if not isinstance(value, str) or "\0" in key + value:
                raise broken(f"{self.named(name)}[{key!r}]", value, "a string without NUL characters")
        return values
