"""The package without extras is a client. A command that needs an extra names it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.client_environment import make_environment, tinkerflow

from tinkerflow.deployments.cassettes.file import CassetteWriter, Exchange
from tinkerflow.deployments.overview import CLIENT, MODULES, PREFECT

MOST_PACKAGES = 60  # the server has about 170 packages
ASK = """
import os, httpx
url = os.environ["TINKER_BASE_URL"] + "/api/v1/create_model"
print(httpx.post(url, json={"session_id": "s", "model_seq_id": 1}).json())
"""
REPLAY = """
pytest_plugins = ["tinkerflow.deployments.cassettes.testing"]

def test_replay(cassette):
    with cassette("a.cassette"):
        exec(open("ask.py").read())
"""
LOCAL = """
import tinkerflow
with tinkerflow.local():
    pass
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in an environment with the packages of the client and pytest."""
    return make_environment(tmp_path_factory.mktemp("client") / "venv", "pytest")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a cassette, a program whose request it contains, and a test."""
    with CassetteWriter(tmp_path / "a.cassette") as writer:
        body = b'{"session_id": "s", "model_seq_id": 1}'
        writer.write(Exchange(1, "POST", "/api/v1/create_model", body, 200, "application/json", b'{"m": 1}'))
        writer.close()
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "test_replay.py").write_text(REPLAY)
    return tmp_path


def test_client_has_few_packages(client: Path) -> None:
    found = list(client.parents[1].glob("lib/*/site-packages/*.dist-info"))
    assert 40 < len(found) <= MOST_PACKAGES, sorted(found)


def test_client_checks_data_of_all_forms(client: Path, folder: Path) -> None:
    (folder / "rows.csv").write_text("prompt,completion\nHi,Ho\n")
    (folder / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    write = "import pyarrow, pyarrow.parquet; "
    write += "pyarrow.parquet.write_table(pyarrow.table({'prompt': ['Hi'], 'completion': ['Ho']}), 'rows.parquet')"
    subprocess.run([client, "-c", write], check=True, cwd=folder)
    for name in ("rows.csv", "chat.jsonl", "rows.parquet"):
        options = ("--pipeline", "sft", "--base-model", "tinkerflow/tiny")
        assert "with the tokenizer of tinkerflow/tiny" in tinkerflow(
            client, "data", "check", name, *options, folder=folder
        )


def test_client_replays_cassettes(client: Path, folder: Path) -> None:
    said = tinkerflow(client, "cassette", "serve", "a.cassette", "--", str(client), "ask.py", folder=folder)
    assert "{'m': 1}" in said and "replayed all requests" in said
    done = subprocess.run([client, "-m", "pytest", "-q"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_other_commands_name_their_extra(client: Path, folder: Path) -> None:
    assert set(MODULES) > CLIENT | PREFECT
    for words, user, extra in (
        (["-m", "tinkerflow", "up"], "`tinkerflow up`", "server"),
        (["-m", "tinkerflow", "run", "sft"], "`tinkerflow run`", "pipelines"),
        (["-c", LOCAL], "a service on this machine", "server"),
    ):
        done = subprocess.run([client, *words], cwd=folder, capture_output=True, text=True, check=False)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and f"{user} needs packages that are not installed, such as aiohttp" in last, last
        assert last.endswith(f": pip install 'tinkerflow[{extra}]'")


def test_client_reads_no_block_of_prefect(client: Path, folder: Path) -> None:
    words = ["-m", "tinkerflow", "data", "check", "journal://mine?rated=true", "--pipeline", "sft"]
    done = subprocess.run([client, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "'mine' cannot be read, because prefect is not installed" in done.stderr, (
        done.stderr
    )
