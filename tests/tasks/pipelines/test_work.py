"""The work folder, names of runs, and the base model that a pipeline uses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinkerflow.backend.catalog.champions import checked_name
from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.connection import OfferedModel, ServerClients
from tinkerflow.tasks.pipelines.parameters import RunParameters
from tinkerflow.tasks.pipelines.work import create_json, create_once, digest, open_work, read_json


def test_objects_are_written_once(work: str) -> None:
    folder = open_work(work)
    assert open_work(work) is folder
    assert read_json(folder, "a/b.json") is None
    create_json(folder, "a/b.json", {"b": 1, "a": 2})
    create_json(folder, "a/b.json", {"a": 2, "b": 1})  # the same content
    with pytest.raises(FileExistsError):
        create_json(folder, "a/b.json", {"a": 3})
    assert read_json(folder, "a/b.json") == {"a": 2, "b": 1}
    create_once(folder, "c", b"one")
    create_once(folder, "c", b"two")
    assert folder.read("c") == b"one"


def test_digests_distinguish_content() -> None:
    assert digest("ab", "c") == digest(b"ab", b"c") != digest("a", "bc")
    assert len(digest("a")) == 32


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 129])
def test_unsafe_run_name_is_refused(name: str) -> None:
    assert checked_name("run", "run-1.2_x") == "run-1.2_x"
    with pytest.raises(UserError, match="run "):
        checked_name("run", name)


def test_work_folder_comes_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERFLOW_DATA_DIR", str(tmp_path))
    assert RunParameters().work_url == f"file://{tmp_path}/pipelines"
    monkeypatch.setenv("TINKERFLOW_PIPELINES", "gs://bucket/x")
    assert RunParameters().work_url == "gs://bucket/x"
    assert RunParameters(work="memory://here").work_url == "memory://here"


async def test_base_model_is_the_requested_one_or_the_first() -> None:
    class Rest:
        async def get_server_capabilities(self) -> Any:
            models = [SimpleNamespace(model_name=name, max_context_length=64) for name in ("", "tiny-a", "tiny-b")]
            return SimpleNamespace(supported_models=models)

    clients: Any = ServerClients(service=None, rest=Rest())  # type: ignore[arg-type]
    assert await clients.base_model("") == OfferedModel("tiny-a", 64)
    assert await clients.base_model("tiny-b") == OfferedModel("tiny-b", 64)
    with pytest.raises(
        UserError, match=r"model\.base_model 'tiny-c': the server offers tiny-a, tiny-b \(did you mean 'tiny-"
    ):
        await clients.base_model("tiny-c")
