"""The README's example, run as it stands against the service on the tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tinkerflow.deployments.testing"]
pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_learns_and_saves(tiny_service, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    for shown, here in (("http://127.0.0.1:8000", tiny_service.url), ("Qwen/Qwen3-0.6B", tiny_service.base_model)):
        assert shown in example
        example = example.replace(shown, here)
    names: dict[str, Any] = {}
    exec(example, names)
    names["service"].close("success").result()
    *steps, path = capsys.readouterr().out.split("\n")[:-1]
    losses = [float(line.split()[0]) for line in steps]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert re.fullmatch(r"tinker://\S+:train:0/weights/first", path)
