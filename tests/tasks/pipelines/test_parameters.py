"""What may be filled in: bounds, and who says no to what."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tinkerflow.flows.pipelines import PIPELINES
from tinkerflow.tasks.pipelines.parameters import DistillParameters, DpoParameters, RlParameters

DATA: dict[str, Any] = {"data": {"url": "rows.jsonl"}}


def test_every_parameter_is_described() -> None:
    for _flow, parameters in PIPELINES.values():
        schema = parameters.model_json_schema()
        for name, model in {"": schema, **schema["$defs"]}.items():
            found = model.get("properties", {}).items()
            # One that is a model itself shows that model's docstring when the two say the same.
            missing = [field for field, shown in found if "description" not in shown and "$ref" not in shown]
            assert not missing, f"{parameters.__name__}.{name}: {missing}"


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (DpoParameters, {"beta": 0}, "beta\n  Input should be greater than 0"),
        (RlParameters, {}, "give either reward or environment"),
        (RlParameters, {"reward": "a:b", "environment": "c:D"}, "give either reward or environment"),
        (RlParameters, {"reward": "a.b"}, "reward\n  String should match pattern"),
        (RlParameters, {"reward": "a:b", "group_size": 1}, "group_size\n  Input should be greater than or equal to 2"),
        (RlParameters, {"reward": "a:b", "loss": "cross_entropy"}, "loss\n  Input should be 'importance_sampling' or"),
        (DistillParameters, {"teacher": {"weights": "a/b"}}, "teacher.weights\n  String should match pattern"),
        (DistillParameters, {"reward": "a:b"}, "reward\n  Extra inputs are not permitted"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate(DATA | values)
    assert message in str(error.value)
