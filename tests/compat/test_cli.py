"""Every command of the SDK's command line, as a process of its own."""

from __future__ import annotations

import pytest
import tinker

from tests.compat.cli import Cli
from tests.compat.registry import exercises


@pytest.fixture(scope="module")
def run(trainer: tinker.TrainingClient) -> str:
    return trainer.get_info().model_id


@exercises("tinker version", "tinker model list", "tinker auth status")
def test_what_is_there(cli: Cli, base_model: str) -> None:
    assert tinker.__version__ in cli("version")
    assert [each["model_name"] for each in cli.json("model", "list")["models"]] == [base_model]
    assert "Tinker accessible: yes" in cli("auth", "status")


@exercises("tinker auth login", "tinker auth whoami", "tinker auth logout")
def test_a_key_is_stored_used_and_forgotten(cli: Cli) -> None:
    cli.key = ""
    cli("auth", "status", fails=True)
    assert "Logged in as" in cli("auth", "login", stdin="tml-of-a-user\n")
    assert "tml-of-a-user" in (cli.home / ".tinker" / "credentials.json").read_text()
    assert cli.json("auth", "whoami")["org_urn"].startswith("tml:organization:")
    assert "Removed credential" in cli("auth", "logout")
    assert "tml-of-a-user" not in (cli.home / ".tinker" / "credentials.json").read_text()


@exercises("tinker run list", "tinker run info")
def test_runs(cli: Cli, run: str, base_model: str) -> None:
    assert run in [each["training_run_id"] for each in cli.json("run", "list", "--limit", "0")["runs"]]
    info = cli.json("run", "info", run)
    assert (info["base_model"], info["lora_rank"], info["user_metadata"]) == (base_model, 4, {"made": "here"})


@exercises(
    "tinker checkpoint list",
    "tinker checkpoint info",
    "tinker checkpoint publish",
    "tinker checkpoint unpublish",
    "tinker checkpoint set-ttl",
    "tinker checkpoint delete",
)
def test_checkpoints(cli: Cli, trainer: tinker.TrainingClient, run: str) -> None:
    path = trainer.save_state("by-hand").result().path

    def now() -> dict[str, object]:
        return next(each for each in cli.json("checkpoint", "list", "--run-id", run)["checkpoints"] if _is(each, path))

    assert (now()["checkpoint_id"], now()["public"]) == ("weights/by-hand", False)
    assert "by-hand" in cli("checkpoint", "info", path)
    cli("checkpoint", "publish", path)
    cli("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert now()["public"] is True
    assert now()["expires_at"] is not None
    cli("checkpoint", "unpublish", path)
    cli("checkpoint", "set-ttl", path, "--remove")
    assert (now()["public"], now()["expires_at"]) == (False, None)
    cli("checkpoint", "delete", "--yes", path)
    assert not any(_is(each, path) for each in cli.json("checkpoint", "list")["checkpoints"])
    assert "by-hand" in cli("checkpoint", "info", path, fails=True)


def _is(checkpoint: dict[str, object], path: str) -> bool:
    return checkpoint["tinker_path"] == path
