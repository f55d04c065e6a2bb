"""The loss of a request and its configuration; `backend/spec/losses` says what each loss takes."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from tinkerflow.backend.errors import UserError, broken, shown
from tinkerflow.backend.spec.losses import LossSpec
from tinkerflow.backend.wire import tinker_pb2 as pb

_TARGETS = "target_tokens"


def check_inputs(spec: LossSpec, names: AbstractSet[str], index: int) -> None:
    """UserError unless `names` are the loss's inputs: none missing, none unknown. `index` counts data from 0."""
    taken = {_TARGETS, *(one.name for one in spec.inputs)}
    required = taken - {one.name for one in spec.inputs if not one.required}
    if missing := sorted(required - names):
        needs = ", ".join(sorted(required))
        raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}: {spec.name} needs {needs}")
    if unknown := sorted(names - taken):
        takes = ", ".join(sorted(taken))
        raise UserError(f"data[{index}].loss_fn_inputs has {shown(unknown[0])}: {spec.name} takes {takes}")


def read_config(spec: LossSpec, request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The loss's whole configuration, {} for a traced loss; UserError for unknown keys and bad values."""
    return {} if spec.traced else spec.read_config(_given(request))


def read_loss_id(spec: LossSpec, request: pb.ForwardBackwardRequest) -> str | None:
    """The id of the traced loss that the request names, None for other losses."""
    if not spec.traced:
        return None
    given = _given(request)
    if unknown := sorted(given.keys() - {"loss_id"}):
        raise UserError(f"loss_fn_config has the key {shown(unknown[0])}: must be loss_id")
    loss_id = given.get("loss_id")
    if not isinstance(loss_id, str) or not loss_id or "\0" in loss_id:
        raise broken("loss_fn_config['loss_id']", loss_id, "the id that create_custom_loss gave")
    return loss_id


def _given(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in request.loss_fn_config_v2.items()
    }
