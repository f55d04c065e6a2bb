"""tinker-cookbook's own training programs, unmodified, against `tinkerflow up` with a local model path.

They run behind a recorder. Then they run again on the recordings, which fail a changed program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker_cookbook
from tests.test_layers import SEE_TORCH

pytestmark = pytest.mark.thorough

EXAMPLES = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"

SUPERVISED = """
import asyncio, sys
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

model, log, data = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="role_colon", max_length=256, batch_size=4,
    train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)
config = train.Config(
    log_path=log, model_name=model, recipe_name="sl_basic", renderer_name="role_colon",
    dataset_builder=FromConversationFileBuilder(common_config=common, file_path=data),
    learning_rate=2e-3, lora_rank=8, num_epochs=1, eval_every=0, save_every=2, max_steps=4)
asyncio.run(train.main(config))
"""

RL = """
import asyncio, sys
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train

model, log, _ = sys.argv[1:]
builder = ArithmeticDatasetBuilder(
    model_name_for_tokenizer=model, renderer_name="role_colon", batch_size=2, n_batches=2, group_size=2)
config = train.Config(
    log_path=log, model_name=model, recipe_name="math_rl", renderer_name="role_colon",
    dataset_builder=builder, learning_rate=1e-3, lora_rank=8, max_tokens=8, eval_every=0, save_every=1,
    remove_constant_reward_groups=False)
asyncio.run(train.main(config))
"""


# Once, after complete training, daemon threads of SDK 0.38.0 aborted the interpreter at its shutdown.
LEAVE = "import os; sys.stdout.flush(); os._exit(0)"


def run(program: str, server, log: Path, *cassette: str) -> subprocess.CompletedProcess[str]:
    """Run a program behind `tinkerflow cassette` with these arguments. It writes metrics and checkpoints to `log`."""
    command = [
        sys.executable,
        "-m",
        "tinkerflow",
        "cassette",
        *cassette,
        "--",
        sys.executable,
        "-c",
        SEE_TORCH + program + LEAVE,
    ]
    names = {"TINKER_BASE_URL": server.api_url, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
    return subprocess.run(
        [*command, server.base_model, str(log), str(EXAMPLES)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=os.environ | names | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(program: str, server, log: Path, *cassette: str) -> list[dict[str, Any]]:
    """Run a program, which must succeed, and return its metrics without times."""
    done = run(program, server, log, *cassette)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [{key: value for key, value in step.items() if "time" not in key} for step in lines(log / "metrics.jsonl")]


def recorded_and_replayed(program: str, server, folder: Path) -> list[dict[str, Any]]:
    """Record a program and return its metrics; fail unless its replay gives the same metrics bit for bit."""
    file = str(folder / "loop.cassette")
    metrics = metrics_of(program, server, folder / "first", "record", "-o", file)
    assert metrics_of(program, server, folder / "again", "serve", file) == metrics
    assert lines(folder / "first" / "checkpoints.jsonl") == lines(folder / "again" / "checkpoints.jsonl")
    return metrics


def test_supervised_training_runs_unmodified(server, tmp_path):
    metrics = recorded_and_replayed(SUPERVISED, server, tmp_path)
    nll = [m["train_mean_nll"] for m in metrics if "train_mean_nll" in m]
    assert len(nll) == 4
    assert nll[-1] < nll[0]
    assert lines(tmp_path / "first" / "checkpoints.jsonl")[-1]["state_path"].startswith("tinker://")
    changed = SUPERVISED.replace("learning_rate=2e-3", "learning_rate=1e-3")
    failed = run(changed, server, tmp_path / "changed", "serve", str(tmp_path / "loop.cassette"))
    text = "(optim_step of model 0): adam_params.learning_rate is 0.001, but was 0.002 in the recording"
    assert failed.returncode != 0
    assert text in failed.stderr, "the program's exception"
    assert any(text in line for line in failed.stdout.splitlines())


def test_rl_training_runs_unmodified(server, tmp_path):
    metrics = recorded_and_replayed(RL, server, tmp_path)
    assert len(metrics) >= 2
    assert any("reward" in key for key in metrics[0])
