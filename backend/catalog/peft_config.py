"""PEFT's adapter_config.json: checks of its fields, and of its agreement with the adapter's tensors.

PEFT loads the tensors of the modules that the config targets, and ignores all others without an error. Here, tensors
that the config leaves out are rejected, because the two files contradict each other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson
import regex

from tinkerflow.backend.core.errors import UserError, shown
from tinkerflow.backend.spec.limits import MAX_RANK
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, EXPERT

_EXACT = {"peft_type": "LORA", "bias": "none"}
# Fields that do not change the adapter's function, or that its tensors determine.
_READ = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "init_lora_weights"),
    *("eva_config", "qalora_group_size"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping"),
    *("base_model_name_or_path", "revision", "peft_version", "inference_mode", "megatron_config", "megatron_core"),
}
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")  # other values change the base model's weights
_KEY = re.compile(r"\^?(experts\.\\d\+\.)?[\w.]+")
_ANY = r".*\."  # how PEFT 0.21 begins the keys that it adds for fused experts; it matches like nothing
_ALL_LINEAR = "all-linear"  # PEFT's name for every linear module except the unembedding
_FUSED = ("gate_up_proj", "down_proj")  # parameters that contain the matrices of all experts
_UNUSABLE = (re.error, regex.error, TimeoutError, OverflowError, RecursionError, MemoryError)  # errors of patterns
_PATTERN_SECONDS = 5.0  # limit for all patterns of a config, because a pattern may backtrack without end


def read_fields(config: bytes) -> Mapping[str, Any]:
    """The fields of adapter_config.json. UserError: a field is not supported."""
    try:
        values = orjson.loads(config)
        orjson.dumps(values)  # fails for values that nest too deeply to be shown
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise wrong_file(ADAPTER_CONFIG, f"it cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise wrong_file(ADAPTER_CONFIG, f"it contains a {type(values).__name__}: must be an object")
    for field, wanted in _EXACT.items():
        if values.get(field, wanted) != wanted:
            raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(values[field])}: must be {wanted!r}")
    if (init := values.get("init_lora_weights")) not in _INITS:
        raise wrong_file(
            ADAPTER_CONFIG, f"init_lora_weights is {shown(init)}: must not change the base model's weights"
        )
    for field, value in values.items():
        if field not in _READ and field not in _EXACT and value:
            raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(value)}: must be left out, it is not supported here")
    if not isinstance(rslora := values.get("use_rslora"), bool | None):
        raise wrong_file(ADAPTER_CONFIG, f"use_rslora is {shown(rslora)}: must be true or false")
    parameters = values.get("target_parameters") or []
    if not _is_list_of(parameters, str) or any(name.rpartition(".")[2] not in _FUSED for name in parameters):
        rule = f"must be a list of names that end in {' or '.join(_FUSED)}"
        raise wrong_file(ADAPTER_CONFIG, f"target_parameters is {shown(parameters)}: {rule}")
    _rank("r", values.get("r"))
    return values


def targets_parameter(targets: Collection[str], parameter: str) -> bool:
    """Whether `target_parameters` contains a parameter's name, or an end of it."""
    return any(parameter == target or parameter.endswith(f".{target}") for target in targets)


class Scales:
    """The rank and the alpha of each module. In a pattern, the first key that ends a module's name applies."""

    def __init__(self, values: Mapping[str, Any], parameters: Mapping[str, str] = {}) -> None:
        """values: the config's fields. parameters: the names to match instead of those of some modules.

        UserError: a key is not the end of a module's name, or lora_alpha is invalid.
        """
        self._parameters = parameters
        self._rank, self._alpha = values["r"], _alpha("lora_alpha", values.get("lora_alpha", 8))
        self._ranks, self._alphas = (_pattern(values, field) for field in ("rank_pattern", "alpha_pattern"))
        self._rslora = bool(values.get("use_rslora"))

    def rank(self, module: str) -> int:
        """The rank of a module. UserError: it is out of range."""
        return _rank(f"rank_pattern of {module!r}", _of(self._ranks, self._parameters.get(module, module), self._rank))

    def alpha(self, module: str, rank: int) -> float:
        """The alpha with which alpha / `rank` is the scale of a module's update in PEFT."""
        given = _of(self._alphas, self._parameters.get(module, module), self._alpha)
        own = _alpha(f"alpha_pattern of {module!r}", given)
        divisor = self.rank(module)
        return own * (rank / (math.sqrt(divisor) if self._rslora else divisor))


def _pattern(values: Mapping[str, Any], field: str) -> Mapping[str, tuple[int, Any]]:
    """The position and value of each key of a pattern."""
    pattern = values.get(field) or {}
    if not isinstance(pattern, dict):
        raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(pattern)}: must be an object")
    for key in pattern:
        if not _KEY.fullmatch(key.removeprefix(_ANY)):
            raise wrong_file(
                ADAPTER_CONFIG, f"{field} has the key {shown(key)}: must be a module's name or the end of one"
            )
    places = reversed([*enumerate(pattern.items())])  # of equal keys, the first remains
    return {key.removeprefix(_ANY): (place, value) for place, (key, value) in places}


def _of(pattern: Mapping[str, tuple[int, Any]], module: str, default: Any) -> Any:
    """The value of the first key that matches a module, as in PEFT's `get_pattern_key`.

    The time does not depend on the number of keys.
    """
    keys = [f"^{module}"]
    for name in {module, EXPERT.sub(r".experts.\\d+.", module)}:  # the second form matches all experts
        parts = name.split(".")
        keys += (".".join(parts[n:]) for n in range(len(parts)))
    return min((pattern[key] for key in keys if key in pattern), default=(0, default))[1]


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(value)}: must be a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(value)}: must be a number above 0")
    return float(value)


class Targets:
    """The modules that a config targets: target_modules, exclude_modules, layers_to_transform and layers_pattern.

    A config with target_parameters targets no expert in any other way, and no module unless it has target_modules.

    Names are looked up by their ends, so the time does not depend on their number.
    """

    def __init__(self, values: Mapping[str, Any], unembed: str) -> None:
        """unembed: the name of the unembedding's module. UserError: a field has the wrong type."""
        self._values, self._unembed = values, unembed
        self._names: dict[str, frozenset[str]] = {}
        self._seconds_left = _PATTERN_SECONDS
        for field in ("target_modules", "exclude_modules", "layers_pattern"):
            value = values.get(field)
            if not (value is None or isinstance(value, str) or _is_list_of(value, str)):
                raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(value)}: must be text or a list of texts")
            self._names[field] = frozenset(value if isinstance(value, list) else ())
        layers = values.get("layers_to_transform")
        if not (layers is None or type(layers) is int or _is_list_of(layers, int)):
            rule = "must be a whole number or a list of them"
            raise wrong_file(ADAPTER_CONFIG, f"layers_to_transform is {shown(layers)}: {rule}")
        self._layers = frozenset([layers] if type(layers) is int else layers or ())

    def include(self, module: str) -> bool:
        """Whether the config targets a module. UserError: a field is a pattern that cannot be used."""
        return all(is_kept(module) for is_kept in self._rules.values())

    def check(self, modules: Collection[str]) -> None:
        """Raise UserError for the first module that the config does not target. modules: those with tensors."""
        for field, is_kept in self._rules.items():
            if (left_out := next((module for module in modules if not is_kept(module)), None)) is not None:
                value = shown(self._values[field])
                raise wrong_file(
                    ADAPTER_CONFIG,
                    f"{field} is {value}, which excludes {left_out!r}: must include it, as {ADAPTER} does",
                )

    @property
    def _rules(self) -> Mapping[str, Callable[[str], bool]]:
        """Whether a field keeps a module, for each field that is set."""
        rules: dict[str, Callable[[str], bool]] = {
            "exclude_modules": lambda module: not self._fits("exclude_modules", module),
            "target_parameters": lambda module: bool(self._values.get("target_modules")) and not EXPERT.search(module),
            "target_modules": self._is_targeted,
            "layers_to_transform": self._is_in_layers,
        }
        return {field: rule for field, rule in rules.items() if self._values.get(field) not in (None, [], "")}

    def _is_targeted(self, module: str) -> bool:
        if self._values["target_modules"] == _ALL_LINEAR:
            return module != self._unembed
        return self._fits("target_modules", module)

    def _is_in_layers(self, module: str) -> bool:
        targets, patterns = self._names["target_modules"], self._values.get("layers_pattern") or []
        if not targets or module in targets:
            return True  # PEFT checks layers only for ends of names
        parts = module.split(".")
        names = {patterns} if isinstance(patterns, str) else self._names["layers_pattern"]
        places = [n for n in range(1, len(parts) - 1) if parts[n].isdecimal() and (not names or parts[n - 1] in names)]
        return bool(places) and int(parts[places[0]]) in self._layers

    def _fits(self, field: str, module: str) -> bool:
        """Whether a field matches a module by its full name, by an end of it, or by a pattern of the full name."""
        pattern = self._values[field]
        if not isinstance(pattern, str):
            parts = module.split(".")
            return any(".".join(parts[n:]) in self._names[field] for n in range(len(parts)))
        began = time.monotonic()
        try:
            re.compile(pattern)  # PEFT's own module: it has no recursive patterns, for which the time limit fails
            return regex.fullmatch(pattern, module, timeout=max(self._seconds_left, 0.001)) is not None
        except _UNUSABLE as error:
            rule = f"must be a pattern that can be used ({error})"
            raise wrong_file(ADAPTER_CONFIG, f"{field} is {shown(pattern)}: {rule}") from error
        finally:
            self._seconds_left -= time.monotonic() - began


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def wrong_file(file: str, why: str) -> UserError:
    """The error for a wrong part of one of an adapter's files."""
    return UserError(f"{file}: {why}")
