"""The optimizers, one file each: parameters with their bounds, state, update. See `OptimizerSpec`.

To add an optimizer, add a file here: requests, workers, checkpoints and the common test find it. Loading this package
does not load JAX: the files import JAX inside `update`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeAlias, get_type_hints

import numpy as np
import numpy.typing as npt
from msgspec.structs import fields

from tinkerflow.backend.core.errors import UserError, broken, shown
from tinkerflow.backend.spec.limits import Bounds
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.spec.registry import registered

_FLUSHED = float(np.finfo(np.float32).tiny)  # devices flush smaller numbers to 0
_NULL = "(null is how NaN and infinity arrive)"  # the SDK writes them as null; a default would hide them

Tree: TypeAlias = Any  # a pytree of float32 arrays of the shapes of an adapter's weights


NotNegative = Annotated[float, Bounds(low=0.0)]
Positive = Annotated[float, Bounds(low=0.0, above=True)]
Fraction = Annotated[float, Bounds(low=0.0, below=1.0)]
Finite = Annotated[float, Bounds()]


class OptimizerParams(PoolMessage, frozen=True):
    """Base of every optimizer's parameters: numbers annotated with their `Bounds`, including `grad_clip_norm`.

    `grad_clip_norm` is the global norm that gradients are clipped to before `update`; 0 or less = off.
    """


# (weights, gradients, state, steps made before, parameters) -> (weights, state). The gradients are
# clipped. The parameters' fields are float32 scalars on the devices, so a new value compiles nothing.
Update: TypeAlias = Callable[[Tree, Tree, Mapping[str, Tree], Any, Any], tuple[Tree, dict[str, Tree]]]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer.

    name: the name in requests, the journal and checkpoints, and the file's name.
    params: the class of its parameters. A request must give the fields without a default.
    state: names of the parts of the optimizer's state, each shaped like the weights and initially zero. In a
    checkpoint, these names are the suffixes of the state's tensors.
    update: makes a step; see `Update`.
    version: the version of its configuration on the wire, None if it has no version.
    of_adapters: whether the optimizer supports only matrices of adapters, so it cannot train all parameters of a model.
    """

    name: str
    params: type[OptimizerParams]
    state: tuple[str, ...]
    update: Update
    version: int | None = None
    of_adapters: bool = False

    @property
    def request_field(self) -> str:
        """The object of an optim_step request with its parameters. `optimizer_params` also contains the type."""
        return "adam_params" if self.name == DEFAULT_OPTIMIZER else "optimizer_params"

    @cached_property
    def bounds(self) -> Mapping[str, Bounds]:
        """The bounds of each parameter, in the order of `vector`."""
        hints = get_type_hints(self.params, include_extras=True)
        return {f.name: hints[f.name].__metadata__[0] for f in fields(self.params)}

    @property
    def config(self) -> dict[str, str | int]:
        """The optimizer's type and version, as in answers."""
        return {"type": self.name, **({} if self.version is None else {"version": self.version})}

    @property
    def example(self) -> OptimizerParams:
        """Valid parameters: the defaults, and 1e-3 for fields without a default."""
        return self.params(**{f.name: 1e-3 for f in fields(self.params) if f.required})

    def read(self, given: Mapping[str, object]) -> OptimizerParams:
        """Read the parameters of a request. UserError names the field, its value and the rule."""
        unknown = sorted(name for name, value in given.items() if value is not None and name not in self.bounds)
        if self.name != DEFAULT_OPTIMIZER and (unknown := [name for name in unknown if name != "type"]):
            takes = ", ".join(self.bounds)
            raise UserError(f"{self.request_field} has the key {shown(unknown[0])}: {self.name} takes {takes}")
        values: dict[str, float] = {}
        for parameter in fields(self.params):
            name, value, rule = parameter.name, given.get(parameter.name), self.bounds[parameter.name]
            where = f"{self.request_field}.{name}"
            if value is None:
                if name in given:
                    raise broken(where, None, f"{rule.rule} {_NULL}")
                if parameter.required:
                    raise broken(where, None, rule.rule)
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not rule.hold(value):
                raise broken(where, value, rule.rule)
            values[name] = float(value)
        return self.params(**values)

    def vector(self, params: OptimizerParams) -> npt.NDArray[np.float32]:
        """The parameters in float32, as input for a step. UserError: a parameter breaks its rule in float32."""
        with np.errstate(over="ignore"):
            vector = np.array([getattr(params, name) for name in self.bounds], np.float32)
        for (name, rule), number in zip(self.bounds.items(), vector.tolist(), strict=True):
            value, computed = getattr(params, name), 0.0 if abs(number) < _FLUSHED else number
            if not rule.hold(computed):
                rounded = "" if computed == value or math.isnan(value) else f", which is {computed:g} in float32"
                raise UserError(f"optim_step: {name} is {shown(value)}{rounded}: must be {rule.rule}")
        return vector


DEFAULT_OPTIMIZER = "adamw"
OPTIMIZERS = registered(__name__, "OPTIMIZER", OptimizerSpec)


def check_classes(optimizers: Mapping[str, OptimizerSpec]) -> None:
    """Raise TypeError unless each optimizer has its own parameter class with its own class name.

    The class of a step's parameters identifies the optimizer. So does the class name in messages to workers.
    """
    owners: dict[str, str] = {}
    for name, spec in optimizers.items():
        if (other := owners.setdefault(spec.params.__name__, name)) != name:
            raise TypeError(f"optimizer {name}: {spec.params.__name__} is also the name of {other}'s parameters")


check_classes(OPTIMIZERS)


def optimizer_of(params: OptimizerParams) -> OptimizerSpec:
    """The optimizer that takes these parameters."""
    return next(spec for spec in OPTIMIZERS.values() if type(params) is spec.params)
