"""Licenses and code on model cards. Other parts of cards are tested with runs (tests/flows/test_fork.py)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.compute.conftest import FAMILY_SHAPE, SHAPE, random_model

from tinkerflow.backend.catalog.card import card, license_of
from tinkerflow.backend.spec.checkpoint import CheckpointMeta
from tinkerflow.backend.spec.commands import LoraSpec


@pytest.mark.parametrize(
    ("files", "stated"),
    [
        ({"README.md": "---\nlicense: apache-2.0\ntags: [x]\n---\n# Model\n"}, ("apache-2.0", "its README.md")),
        ({"README.md": "---\nlicense: other\nlicense_name: gemma\n---\n"}, ("gemma", "its README.md")),
        ({"README.md": "# No header\n", "LICENSE.txt": "\n  MIT License\n"}, ("MIT License", "its file LICENSE.txt")),
        ({"README.md": "---\n[broken\n---\n", "LICENSE": "MIT"}, ("MIT", "its file LICENSE")),
        ({}, ("", "its folder has no README.md or LICENSE that states it")),
    ],
)
def test_license_comes_from_the_readme_or_the_license_file(
    tmp_path: Path, files: dict[str, str], stated: tuple[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == stated


def saved_on(base_model: str, **metadata: str) -> Any:
    meta = CheckpointMeta(base_model=base_model, owner="team", user_metadata=metadata)
    when = datetime(2026, 11, 28, tzinfo=UTC)
    return SimpleNamespace(meta=meta, spec=LoraSpec(4), step=2, optimizer="adamw", name="final", created_at=when,
                           path="tinker://a/weights/final")  # fmt: skip


def test_card_shows_how_to_load_an_adapter_of_a_hub_model(tmp_path: Path) -> None:
    text = card(None, None, saved_on("Qwen/Qwen3-0.6B", parent=""), tmp_path)  # type: ignore[arg-type]
    assert "# final\n" in text and "- parent: the base model\n" in text
    code = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert len(code) == 2 and [compile(part, "card", "exec") for part in code]
    assert 'PeftModel.from_pretrained(model, "FOLDER")' in code[0] and "checkpoint merge" not in text


@pytest.mark.parametrize(
    ("family", "train_mlp", "kind"),
    [
        ("qwen3_moe", True, "AutoModelForCausalLM"),
        ("qwen3_next", True, None),
        ("qwen3_next", False, "AutoModelForCausalLM"),
        ("qwen3_5", True, "AutoModelForImageTextToText"),
        ("qwen3_vl_moe", True, None),
    ],
)
def test_card_shows_code_that_loads_the_whole_adapter(
    tmp_path: Path, family: str, train_mlp: bool, kind: str | None
) -> None:
    """None: PEFT omits experts, or MLPs beside them, without an error."""
    pytest.importorskip("torch")
    random_model(family, {**SHAPE, **FAMILY_SHAPE.get(family, {})}).config.save_pretrained(tmp_path)
    saved = saved_on("org/model")
    saved.spec = LoraSpec(4, train_mlp=train_mlp)
    text = card(None, None, saved, tmp_path)  # type: ignore[arg-type]
    assert ("`tinkerflow checkpoint merge tinker://a/weights/final --to FOLDER`" in text) == (kind is None)
    assert (f'model = {kind}.from_pretrained("org/model")' in text) == (kind is not None)
