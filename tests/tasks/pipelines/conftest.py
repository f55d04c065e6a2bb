"""A work folder, and the embedded model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.tasks.pipelines import Renderer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(make_tiny(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


@pytest.fixture
def work(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'work'}"
