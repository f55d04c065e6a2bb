"""Every command of the SDK's command line."""

from __future__ import annotations

import json

import tinker
from safetensors.numpy import load
from tests.compat.cli import Cli
from tests.compat.conftest import TOKENS, window
from tests.compat.hub import hub
from tests.compat.registry import exercises

FOLDERS = ("by-an-export-of-its-own", "as-exported")


@exercises("tinker version", "tinker model list", "tinker auth status")
def test_cli_lists_models_and_reports_its_version(cli: Cli, base_model: str) -> None:
    assert tinker.__version__ in cli("version")
    assert [each["model_name"] for each in cli.json("model", "list")["models"]] == [base_model]
    assert "Tinker accessible: yes" in cli("auth", "status")


@exercises("tinker auth login", "tinker auth whoami", "tinker auth logout")
def test_cli_stores_uses_and_deletes_a_key(cli: Cli) -> None:
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
    path, other = (trainer.save_state(name).result().path for name in ("by-hand", "other"))
    sampler = trainer.save_weights_for_sampler("by-hand", ttl_seconds=3600).result().path

    def now(one: str, *options: str) -> dict[str, object]:
        return next(each for each in cli.json("checkpoint", "list", *options)["checkpoints"] if _is(each, one))

    first = now(path, "--run-id", run)
    assert (first["checkpoint_id"], first["checkpoint_type"], first["public"]) == ("weights/by-hand", "training", False)
    assert now(sampler, "--run-id", run)["checkpoint_type"] == "sampler"
    assert "by-hand" in cli("checkpoint", "info", path)
    cli("checkpoint", "publish", path)
    cli("checkpoint", "set-ttl", path, "--ttl", "7200")
    for found in (now(path, "--limit", "0"), info := cli.json("checkpoint", "info", path)):
        assert (found["public"], found["expires_at"] is None) == (True, False)
    assert info["lora_rank"] == 4
    cli("checkpoint", "unpublish", path)
    for one in (path, sampler):
        cli("checkpoint", "set-ttl", one, "--remove")
        assert (now(one, "--limit", "0")["public"], now(one, "--limit", "0")["expires_at"]) == (False, None)
    assert cli.json("checkpoint", "info", path)["public"] is False
    assert cli.json("checkpoint", "delete", "--yes", path, sampler)["deleted_count"] == 2
    left = cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert any(_is(each, other) for each in left)
    assert not any(_is(each, path) or _is(each, sampler) for each in left)
    assert "by-hand" in cli("checkpoint", "info", path, fails=True)


@exercises("tinker checkpoint download")
def test_a_training_checkpoint_is_downloaded_as_an_adapter(cli: Cli, trainer: tinker.TrainingClient, run: str) -> None:
    path = trainer.save_state("downloaded").result().path
    exported = trainer.save_weights_external("downloaded").result().path
    for source, folder in ((path, FOLDERS[0]), (exported, FOLDERS[1])):
        cli("checkpoint", "download", source, "--output", folder)
    first, second = ({file.name: file.read_bytes() for file in cli.home.glob(f"{each}/**/*.*")} for each in FOLDERS)
    assert first.keys() >= {"adapter_model.safetensors", "adapter_config.json"}
    assert first["adapter_model.safetensors"] == second["adapter_model.safetensors"]
    assert json.loads(first["adapter_config.json"])["r"] == 4
    assert not any(
        "created_by" in (each["user_metadata"] or {}) for each in cli.json("checkpoint", "list")["checkpoints"]
    )


@exercises("tinker checkpoint push-hf")
def test_an_adapter_is_pushed_to_a_hub(cli: Cli, trainer: tinker.TrainingClient, base_model: str) -> None:
    path = trainer.save_weights_external("pushed").result().path
    with hub() as there:
        cli.more, cli.own_process = there.environment() | {"HF_HOME": str(cli.home)}, True
        cli("checkpoint", "push-hf", path, "--repo", "somebody/adapter")
    assert there.repositories == ["somebody/adapter"]
    assert json.loads(there.files["adapter_config.json"])["base_model_name_or_path"] == base_model
    assert load(there.files["adapter_model.safetensors"]).keys()
    assert f"tinker_path: {path}" in there.files["README.md"].decode()


@exercises("tinker session export-trace")
def test_a_trace_of_the_session(cli: Cli, run: str) -> None:
    session = run.split(":", maxsplit=1)[0]
    cli("session", "export-trace", session, "--output", "here.pftrace")
    events = json.loads((cli.home / "here.pftrace").read_text())["traceEvents"]
    assert run in [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert {"create_model 0", "forward_backward 1", "optim_step 2"} <= {event["name"] for event in events}


@exercises("tinker billing usage", "tinker billing checkpoint-storage")
def test_bills(cli: Cli, trainer: tinker.TrainingClient, run: str) -> None:
    trainer.save_state("billed").result()
    session = run.split(":", maxsplit=1)[0]
    events = cli.json("billing", "usage", *window())["data"]
    trained = [event["event_info"] for event in events if event["session_id"] == session]
    assert sum(info["token_count"] for info in trained if info["type"] == "training") >= len(TOKENS)
    assert session in cli("billing", "usage", *window(), "--csv", "-")
    listed = cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    stored = cli.json("billing", "checkpoint-storage")["data"]
    assert sum(row["checkpoint_count"] for row in stored) == len(listed)
    assert sum(row["size_bytes"] for row in stored) == sum(each["size_bytes"] for each in listed)


def _is(checkpoint: dict[str, object], path: str) -> bool:
    return checkpoint["tinker_path"] == path
