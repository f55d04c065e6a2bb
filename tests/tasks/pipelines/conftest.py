"""A work folder, and the embedded model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.tasks.pipelines import DataReport, DataSource, Renderer, Row, RowReader, Use, check_source, guess_form

SFT = Use("sft", ("chat", "prompt_completion", "text"), 2048)
ANY = Use("data check", ("chat", "prompt_completion", "preference", "prompt", "text"), 2048, extra=None)


def parse(raw: Any) -> Row:
    """Parse a row in the form that its fields indicate, and keep other fields."""
    return RowReader(guess_form(raw), extra=None).parse(raw)


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


@pytest.fixture
def check(tmp_path: Path, work: str, renderer: Renderer) -> Callable[..., DataReport]:
    """check(rows, use): writes rows (values, or lines as text or bytes) to a file, and checks them for `use`."""

    def check(rows: Iterable[Any], use: Use = SFT, **source: Any) -> DataReport:
        file = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
                 for row in rows]  # fmt: skip
        file.write_bytes(b"\n".join(lines) + b"\n")
        return check_source(DataSource(url=str(file), **source), work, renderer, use)

    return check
