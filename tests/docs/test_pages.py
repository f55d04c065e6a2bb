"""All names in the documentation exist: files, links, commands, settings, metrics, endpoints and messages."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from tests.docs.generate import command_line, parameters
from tests.docs.metrics import families
from tests.docs.pages import DOCS, ROOT, anchors, links, paths, tracked, written
from tests.docs.python_api import PUBLIC
from tests.docs.website import page_map

import tinkerflow.api.routes as routes
from tinkerflow.api.schemas import API, OPEN_API
from tinkerflow.backend.compute.models.families import registered
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.launchers import LAUNCHERS
from tinkerflow.tasks.execution.sequencer import SaveState

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in written()}
ROOMS = ("api", "flows", "tasks", "backend", "deployments")

of_each_page = pytest.mark.parametrize("page", sorted(PAGES))


@of_each_page
def test_page_links_resolve(page: str) -> None:
    for target in links(PAGES[page]):
        file, _, anchor = target.partition("#")
        found = (ROOT / page).parent / file if file else ROOT / page
        assert found.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{page} links to {target}"


@of_each_page
def test_named_files_exist(page: str) -> None:
    missing = sorted(name for name in paths(PAGES[page]) if not list(ROOT.glob(name)))
    assert not missing


@of_each_page
def test_names_that_programs_on_a_page_import_are_public(page: str) -> None:
    public = {(module, name) for modules in PUBLIC.values() for module, names in modules.items() for name in names}
    for module, names in re.findall(r"^\s*from (tinkerflow[\w.]*) import ([\w, ]+)", PAGES[page], re.M):
        assert {(module, name.split()[0]) for name in names.split(",")} <= public, module


@of_each_page
def test_named_settings_exist(page: str) -> None:
    known = {"TINKERFLOW_" + name.upper() for name in Settings.model_fields}
    assert set(re.findall(r"TINKERFLOW_[A-Z_]*[A-Z]", PAGES[page])) <= known


@of_each_page
def test_named_commands_and_options_exist(page: str) -> None:
    known = command_line()
    first_words = {path.split()[1] for path in known}
    for words in re.findall(r"(?:^ {4}|`|&& \S*/)tinkerflow ([a-z][\w -]*)", PAGES[page], re.M):
        first, *rest = words.split()
        assert first in first_words, f"tinkerflow {words}"
        path = f"tinkerflow {first}"
        if path not in known and rest:
            path += f" {rest[0]}"
            assert path in known, f"tinkerflow {words}"
        shown = parameters(known[path]) if path in known else []
        options = {name for one in shown for name in (*one.opts, *one.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[\w-]+", words)) <= options or path not in known, f"tinkerflow {words}"


@of_each_page
def test_named_programs_have_the_named_options_and_tests(page: str) -> None:
    for name, arguments in re.findall(r"python -m (tests\.[\w.]+)([^`\n#]*)", PAGES[page]):
        file = ROOT / Path(*name.split("."))
        source = file.with_suffix(".py") if not file.is_dir() else file / "__main__.py"
        text = source.read_text() + (ROOT / "tests" / "benchmarks" / "service.py").read_text()
        assert [one for one in re.findall(r"--[a-z][\w-]*", arguments) if f'"{one}"' not in text] == [], name
    for file, test in re.findall(r"pytest [^`\n]*?(tests/\S+\.py) -k (\w+)", PAGES[page]):
        assert re.search(rf"def test_\w*{test}", (ROOT / file).read_text()), f"{file}: no test is named {test}"


@of_each_page
def test_named_metrics_exist(page: str) -> None:
    assert set(re.findall(r"\btinkerflow_[a-z_]+\b", PAGES[page])) <= {family.name for family in families()}


def test_every_endpoint_is_on_its_page() -> None:
    served = {(API, "GET", "healthz")}
    for module in pkgutil.iter_modules(routes.__path__):
        found = importlib.import_module(f"{routes.__name__}.{module.name}")
        for router in (getattr(found, name, None) for name in ("router", "link_router")):
            for route in router.routes if router is not None else ():
                served |= {
                    (getattr(router, "at", API), method, _plain(route.path)) for method in route.methods - {"HEAD"}
                }
    named = set()
    for at, page in ((API, "docs/protocol.md"), (OPEN_API, "docs/endpoints.md")):
        rows = re.findall(rf"^\| `([A-Z]+) {at}/([^`]+)` \|", PAGES[page], re.M)
        named |= {(at, method, _plain(path)) for method, path in rows}
    assert named == served


def _plain(path: str) -> str:
    return re.sub(r"\{\w+(:path)?\}", "{}", path).strip("/")


def test_troubleshooting_messages_occur_in_the_code() -> None:
    texts = _texts()
    section = PAGES["docs/troubleshooting.md"]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(messages) > 20
    for message in messages:
        for part in (part for part in message.split("…") if len(part.strip()) > 3):
            assert any(part in text for text in texts), f"{message!r}: nothing in the code says {part!r}"


def _texts() -> set[str]:
    """Every text in our code: constants, and the literal parts of f-strings."""
    found: set[str] = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        found |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    return found


def test_files_named_in_an_extension_guide_contain_the_names_it_mentions() -> None:
    for section in PAGES["docs/extending.md"].split("\n## ")[1:]:
        held = " ".join(file.read_text() for name in paths(section) for file in _files_of(name))
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*?\))?`", section):
            if name.endswith(".py") or (ROOT / name).exists():
                continue
            absent = [part for part in name.split(".") if not re.search(rf"\b{part}\b", held)]
            assert not absent, f"{section.splitlines()[0]}: `{name}` is in none of {sorted(paths(section))}"


def _files_of(name: str) -> list[Path]:
    found = list(ROOT.glob(name))
    return [file for one in found for file in ([one] if one.is_file() else one.rglob("*.py"))]


def test_readme_is_short_and_covers_the_first_steps() -> None:
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 200
    for needed in (".venv/bin/tinkerflow quickstart", "bash .ci/test", "tinkerflow up --base-model", "docs/images/"):
        assert needed in readme


def test_the_readme_names_every_model_family() -> None:
    for family in registered().values():
        assert family.title in PAGES["README.md"], f"{family.title} is served: name it beside the other families"


def test_every_launcher_is_on_its_page_and_in_the_text_of_its_setting() -> None:
    for name in LAUNCHERS:
        assert f"| `{name}` |" in PAGES["docs/many-hosts.md"]
        assert re.search(rf"\b{name}\b", str(Settings.model_fields["launcher"].description)), name


def test_every_page_is_in_the_map_once() -> None:
    mapped = [entry.file for entries in page_map().values() for entry in entries]
    top_level = {f"../{name}" for name in PAGES if "/" not in name}
    assert sorted(mapped) == sorted(
        {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"index.md"} | top_level - {"../README.md"}
    )


@of_each_page
def test_code_blocks_are_valid(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", PAGES[page], re.S | re.M):
        ast.parse(block)


def test_pages_describe_prefect_in_the_same_words() -> None:
    said = re.compile(
        r"Prefect(\]\([^)]*\))? observes: operations\s+start immediately and are mirrored as flow and task\s+runs"
    )
    for page in ("README.md", "docs/architecture.md", "docs/single-host.md", "CONTRIBUTING.md"):
        assert said.search(PAGES[page]), page


def test_pictures_are_small_and_used() -> None:
    used = {Path(target).name for text in PAGES.values() for target in links(text)}
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 200_000, picture.name
        assert picture.name in used, picture.name


def test_the_picture_of_a_save_has_its_states() -> None:
    picture = (DOCS / "images" / "save.svg").read_text()
    assert set(re.findall(r'class="name"[^>]*>(\w+)<', picture)) == {state.value for state in SaveState}


def test_glossary_terms_are_sorted_and_unique() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*", PAGES["docs/glossary.md"], re.M)
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)


def test_referenced_documents_exist() -> None:
    files = tracked()
    known = {Path(name).name for name in files}
    missing = []
    for name in (name for name in files if not name.endswith((".png", ".svg"))):
        text = (ROOT / name).read_text(errors="replace")
        missing += [f"{name}: {found}" for found in re.findall(r"\b([A-Z][A-Z_]+\.md)\b", text) if found not in known]
    assert not missing
