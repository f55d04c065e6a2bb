"""What each loss takes: its per-token inputs, and its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import cast, get_args

from tinkerflow.backend.commands import LOSS_CONFIG, Loss
from tinkerflow.backend.errors import UserError, broken, shown
from tinkerflow.backend.wire import tinker_pb2 as pb

_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
INPUTS: dict[Loss, tuple[frozenset[str], frozenset[str]]] = {
    # loss: (required, optional); weights multiply a token's loss and are 1 where they may be left out
    "cross_entropy": (frozenset({"target_tokens", "weights"}), frozenset()),
    "importance_sampling": (frozenset({"target_tokens", "logprobs", "advantages"}), frozenset({"weights"})),
    "ppo": (frozenset({"target_tokens", "logprobs", "advantages"}), frozenset({"weights", *_THRESHOLDS})),
    "cispo": (frozenset({"target_tokens", "logprobs", "advantages"}), frozenset({"weights", *_THRESHOLDS})),
    "dro": (frozenset({"target_tokens", "logprobs", "advantages"}), frozenset({"weights"})),
    "gspo": (
        frozenset({"target_tokens", "logprobs", "advantages"}),
        frozenset({"weights", "sequence_ratio_mask", *_THRESHOLDS}),
    ),
    # What was recorded at sampling is used in place of logprobs, which RL code sends with every datum.
    "stable_reinforce": (frozenset({"target_tokens", "advantages"}), frozenset({"weights", "logprobs"})),
}
INPUT_NAMES = ("target_tokens", "weights", "logprobs", "advantages", *_THRESHOLDS, "sequence_ratio_mask")


def known_loss(name: str) -> Loss:
    """`name` as a loss we have, else UserError."""
    if name not in get_args(Loss):
        raise broken("loss_fn", name, f"one of {', '.join(get_args(Loss))}")
    return cast(Loss, name)


def check_inputs(loss: Loss, names: AbstractSet[str], index: int) -> None:
    """UserError unless `names` are the loss's inputs: none missing, none unknown. `index` counts data from 0."""
    required, optional = INPUTS[loss]
    if missing := sorted(required - names):
        raise UserError(
            f"data[{index}].loss_fn_inputs lacks {missing[0]!r}: {loss} needs {', '.join(sorted(required))}"
        )
    if unknown := sorted(names - required - optional):
        raise UserError(
            f"data[{index}].loss_fn_inputs has {shown(unknown[0])}: "
            f"{loss} takes {', '.join(sorted(required | optional))}"
        )


def read_config(loss: Loss, request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The loss's whole config: what the request gives, else the defaults. Unknown keys and bad values: UserError."""
    given = _given(request)
    if loss == "custom":
        return {}  # its config is `loss_id`, see read_loss_id
    defaults = LOSS_CONFIG[loss]
    for key, value in given.items():
        if key not in defaults:
            takes = f"one of {', '.join(defaults)}" if defaults else f"absent, {loss} takes no config"
            raise UserError(f"loss_fn_config has the key {shown(key)}: must be {takes}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise broken(f"loss_fn_config[{key!r}]", value, "a finite number >= 0")
    config = {**defaults, **cast(Mapping[str, float], given)}
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", math.inf)
    if low > high:
        raise broken("loss_fn_config['clip_low_threshold']", low, f"<= clip_high_threshold, {high:g}")
    return config


def read_loss_id(loss: Loss, request: pb.ForwardBackwardRequest) -> str | None:
    """The id of the traced loss that the loss `custom` names, None for other losses."""
    if loss != "custom":
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
