"""The generated parts of the documentation are current and complete."""

from __future__ import annotations

import pytest
from tests.docs.generate import (
    BLOCKS,
    CHART_SCHEMA,
    LLMS,
    blocks_of,
    chart_schema,
    command_line,
    llms,
    parameters,
    rewritten,
)
from tests.docs.metrics import families
from tests.docs.pages import ROOT, written
from tests.docs.sizing import MODELS

from tinkerflow.backend.settings import Settings


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in written()))
def test_generated_pages_are_current(name: str) -> None:
    page = (ROOT / name).read_text()
    assert page == rewritten(page), "run `python -m tests.docs.generate`"


def test_llms_file_lists_the_pages_of_the_map() -> None:
    assert LLMS.read_text() == llms(), "run `python -m tests.docs.generate`"


def test_chart_schema_has_every_setting() -> None:
    assert CHART_SCHEMA.read_text() == chart_schema(), "run `python -m tests.docs.generate`"


def test_every_block_is_in_one_page_and_on_both_front_pages() -> None:
    found = [name for path in written() for name in blocks_of(path.read_text())]
    assert sorted(found) == sorted([*BLOCKS, "what-ran-where"])


def test_an_unknown_block_is_named() -> None:
    with pytest.raises(KeyError, match="nothing"):
        rewritten("<!-- generated: nothing -->\n<!-- end -->")


def test_every_setting_is_documented_with_a_sentence() -> None:
    page = BLOCKS["settings"]()
    for name, field in Settings.model_fields.items():
        assert f"`TINKERFLOW_{name.upper()}`" in page
        assert len(field.description or "") > 10, f"{name} says too little"


def test_every_command_and_option_is_documented() -> None:
    page = BLOCKS["commands"]()
    assert len(command_line()) > 10 and "[default: ]" not in page
    for path, command in command_line().items():
        assert f"## `{path}`\n" in page
        assert command.help, f"{path} has no help"
        for option in (name for one in parameters(command) for name in (*one.opts, *one.secondary_opts)):
            assert option.upper() in page.upper()
    for usage in ("plan [MODEL] [OPTIONS]", "verify [PATHS...] [OPTIONS]", "set PROJECT LIMITS... [OPTIONS]"):
        assert f" {usage}\n" in page


def test_every_metric_is_documented() -> None:
    page = BLOCKS["metrics"]()
    assert families()
    for family in families():
        assert f"| `{family.name}` | {family.kind} |" in page
        assert family.text


def test_model_sizes_match_their_names() -> None:
    for shape in MODELS:
        named = float(next(part for part in shape.name.split("-")[1:] if part.endswith("B")).removesuffix("B"))
        assert shape.parameters / 1e9 == pytest.approx(named, rel=0.25), shape.name
