"""The service that commands and pipelines use: from TINKER_BASE_URL or the data dir, and never a stranger's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.health_server import health_server

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.deployments.data_dir import owned
from tinkerflow.deployments.parts import open_journal
from tinkerflow.tasks.pipelines.server_address import server_from_environment


@pytest.fixture
def port() -> Iterator[int]:
    """The port of an API."""
    with health_server() as port:
        yield port


@pytest.fixture(autouse=True)
def unset_server_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)


def test_the_service_of_the_data_dir_is_used_at_its_own_port(tmp_path: Path, port: int) -> None:
    with owned(tmp_path, "http://127.0.0.1:8137"):
        assert server_from_environment(Settings(data_dir=tmp_path, port=port)) == ("http://127.0.0.1:8137", "tml-local")


def test_service_of_another_data_dir_is_refused_unless_named(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, url = Settings(data_dir=tmp_path, port=port), f"http://127.0.0.1:{port}"
    fix = f"--data-dir or TINKERFLOW_DATA_DIR, or set TINKER_BASE_URL={url}"
    with pytest.raises(UserError, match=rf"{url}: serves a different data dir than '{tmp_path}': .*{fix}"):
        server_from_environment(settings)
    assert server_from_environment(settings, "http://given")[0] == "http://given"
    monkeypatch.setenv("TINKER_BASE_URL", url)
    assert server_from_environment(settings)[0] == url


def test_a_service_that_runs_as_parts_beats_in_the_journal(tmp_path: Path, port: int) -> None:
    settings = Settings(data_dir=tmp_path, port=port)
    with open_journal(settings) as journal:
        journal.leases.beat()
    assert server_from_environment(settings)[0] == f"http://127.0.0.1:{port}"


def test_server_address_falls_back_to_the_settings(tmp_path: Path) -> None:
    idle = free_port()
    assert server_from_environment(Settings(data_dir=tmp_path, port=idle))[0] == f"http://127.0.0.1:{idle}"
    on_ipv6 = Settings(data_dir=tmp_path, host="::1", port=idle)
    assert server_from_environment(on_ipv6)[0] == f"http://[::1]:{idle}"


def test_key_that_no_header_can_contain_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine\r\n")  # from a file with the line ends of Windows
    assert server_from_environment(Settings(data_dir=tmp_path))[1] == "tml-mine"
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine\ntml-other")
    with pytest.raises(UserError, match=r"^TINKER_API_KEY: must be one line of ASCII characters$"):
        server_from_environment(Settings(data_dir=tmp_path))
