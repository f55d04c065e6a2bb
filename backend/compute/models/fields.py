"""The fields of a Hugging Face `config.json`, and errors that name them. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinkerflow.backend.core.errors import UserError


@dataclass(frozen=True)
class ConfigFields:
    """The fields of a `config.json`, or of an object in it. name: the model's name in errors."""

    name: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A field; `default` when it is absent."""
        return self.values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        """A field; UserError when it is absent."""
        if key not in self.values:
            raise self.error(f"config.json has no field {key!r}")
        return self.values[key]

    def size(self, key: str, default: int | None = None) -> int:
        """A field that is a positive integer; `default` when it is absent or null. UserError for anything else."""
        value = self.get(key)
        if value is None:
            value = self[key] if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} is {value!r} in config.json; must be a positive whole number")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A field that is true or false; `default` when it is absent or null. UserError for anything else."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} is {value!r} in config.json; must be true or false")
        return default if value is None else value

    def number(self, key: str, default: float) -> float:
        """A field that is a positive number; `default` when it is absent or null. UserError for anything else."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"{key} is {value!r} in config.json; must be a positive number")
        return float(value)

    def items(self, key: str) -> list[Any] | None:
        """A field that is a list; None when it is absent, null or empty. UserError for anything else."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{key} is {value!r} in config.json; must be a list")
        return value or None

    def types(self, key: str, usual: Sequence[str], *allowed: str) -> list[str]:
        """A field with a type for each layer. usual: the default. UserError: a type, or their number, is wrong."""
        types = self.items(key) or list(usual)
        if len(types) != len(usual) or any(kind not in allowed for kind in types):
            raise self.error(f"{key} {types!r}; must be {len(usual)} of {', '.join(allowed)}")
        return types

    def inner(self, key: str) -> ConfigFields:
        """The fields of an object that a field holds; UserError when it is absent or holds something else."""
        value = self[key]
        if not isinstance(value, dict):
            raise self.error(f"{key} is {value!r} in config.json; must be an object")
        return replace(self, values=value)

    def with_values(self, **values: Any) -> ConfigFields:
        """The fields with these values added or replaced."""
        return replace(self, values={**self.values, **values})

    def with_defaults(self, **values: Any) -> ConfigFields:
        """The fields with these values for fields that the file leaves out: a family's defaults in transformers."""
        return replace(self, values={**values, **self.values})

    def without(self, *keys: str) -> ConfigFields:
        """The fields without `keys`, which a family reads itself: the shared readers refuse some of their values."""
        return replace(self, values={key: value for key, value in self.values.items() if key not in keys})

    @property
    def rope(self) -> Mapping[str, Any]:
        """The object with the parameters of rotary embeddings; transformers 4 and 5 name it differently.

        UserError: a field is not an object.
        """
        for key in ("rope_parameters", "rope_scaling"):
            if (value := self.get(key) or {}) and not isinstance(value, dict):
                raise self.error(f"{key} is {value!r} in config.json; must be an object")
        return self.get("rope_parameters") or self.get("rope_scaling") or {}

    def chosen_experts(self, experts: int, key: str = "num_experts_per_tok") -> int:
        """How many of a layer's experts each token goes to, by the field `key`; UserError unless 1 to `experts`."""
        chosen = self.size(key)
        if chosen > experts:
            raise self.error(f"{key} {chosen} of {experts} experts; must be from 1 to their number")
        return chosen

    def refuse_others(self, **supported: Any) -> None:
        """Check fields. UserError: a field is present, not null, and differs from the only supported value."""
        for key, value in supported.items():
            if self.get(key) not in (None, value):
                raise self.error(f"{key} {self[key]!r} is not supported; must be {value!r}")

    def error(self, text: str) -> UserError:
        """An error about this model."""
        return UserError(f"base model {self.name!r}: {text}")
