"""The README's first example, run on the tiny model without other changes."""

from __future__ import annotations

import re
from pathlib import Path

from tinkerflow.deployments.tiny_model import make_tiny

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_learns_and_saves(tmp_path, capsys):
    example = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)[0]
    assert example.count('"Qwen/Qwen3-0.6B"') == 2
    exec(example.replace("Qwen/Qwen3-0.6B", str(make_tiny(tmp_path / "tiny"))), {})
    said = capsys.readouterr().out
    said = said[said.index("ready: http://127.0.0.1:") :]
    losses = [float(line.split()[0]) for line in said.split("\n") if re.match(r"[\d.]+ [\d.]+$", line)]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert re.search(r"^tinker://\S+:train:0/weights/first$", said, re.M)
