"""Which optimizer a model is made with, and the parameters of a step, checked by `backend/spec/optimizers`."""

from __future__ import annotations

from tinkerflow.backend.commands import Optimizer
from tinkerflow.backend.errors import UserError, broken, shown
from tinkerflow.backend.spec.optimizers import OPTIMIZERS, OptimizerParams, OptimizerSpec
from tinkerflow.backend.wire.fields import Fields


def optimizer_config(body: Fields) -> Optimizer | None:
    """The optimizer that `optimizer_config` names, None when it is absent; UserError for one that is not known here."""
    config = body.object("optimizer_config")
    if config is None:
        return None
    kind, version = config.get("type"), config.get("version")
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise broken("optimizer_config.type", kind, f"one of {', '.join(OPTIMIZERS)}")
    known = OPTIMIZERS[kind].config
    if "version" in known and version not in (None, known["version"]):
        raise broken("optimizer_config.version", version, str(known["version"]))
    if unknown := sorted(config.names() - known.keys()):
        raise UserError(f"optimizer_config has the key {shown(unknown[0])}: {kind} takes {', '.join(sorted(known))}")
    return kind


def decode_optim_step(payload: bytes) -> OptimizerParams:
    """The parameters of an optim_step body; UserError names the field, its value and the rule.

    The worker checks that the model was made with that optimizer.
    """
    body = Fields.parse(payload)
    adam, other = body.object("adam_params"), body.object("optimizer_params")
    if adam is not None and other is not None:
        raise UserError("adam_params and optimizer_params are both given: exactly one must be")
    if other is not None:
        return _by_type(other.get("type")).read(body.get("optimizer_params"))
    if adam is None:
        rule = "an object of AdamW parameters, or optimizer_params one of another optimizer's"
        raise broken("adam_params", None, rule)
    (spec,) = (spec for spec in OPTIMIZERS.values() if spec.request_field == OptimizerSpec.ADAM_FIELD)
    return spec.read(body.get("adam_params"))


def _by_type(kind: object) -> OptimizerSpec:
    typed = {name: spec for name, spec in OPTIMIZERS.items() if spec.request_field != OptimizerSpec.ADAM_FIELD}
    if not isinstance(kind, str) or kind not in typed:
        known = " or ".join(repr(name) for name in typed)
        raise broken("optimizer_params.type", kind, f"{known} (AdamW's parameters are adam_params)")
    return typed[kind]
