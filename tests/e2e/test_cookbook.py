"""tinker-cookbook's own training programs, unmodified, against `tinkerflow up` with a local model path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinker_cookbook

pytestmark = pytest.mark.thorough

EXAMPLES = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"

SUPERVISED = """
import asyncio, sys
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

url, model, log, data = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="role_colon", max_length=256, batch_size=4,
    train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)
config = train.Config(
    log_path=log, model_name=model, recipe_name="sl_basic", renderer_name="role_colon", base_url=url,
    dataset_builder=FromConversationFileBuilder(common_config=common, file_path=data),
    learning_rate=2e-3, lora_rank=8, num_epochs=1, eval_every=0, save_every=2, max_steps=4)
asyncio.run(train.main(config))
"""

RL = """
import asyncio, sys
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train

url, model, log, _ = sys.argv[1:]
builder = ArithmeticDatasetBuilder(
    model_name_for_tokenizer=model, renderer_name="role_colon", batch_size=2, n_batches=2, group_size=2)
config = train.Config(
    log_path=log, model_name=model, recipe_name="math_rl", renderer_name="role_colon", base_url=url,
    dataset_builder=builder, learning_rate=1e-3, lora_rank=8, max_tokens=8, eval_every=0, save_every=1,
    remove_constant_reward_groups=False)
asyncio.run(train.main(config))
"""


# Seen once with SDK 0.38.0: training complete, then its daemon threads abort the interpreter while it shuts down.
LEAVE = "import os; sys.stdout.flush(); os._exit(0)"


def run(program: str, server, log: Path) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-c", program + LEAVE, server.api_url, server.base_model, str(log), str(EXAMPLES)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=os.environ
        | {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_supervised_training_runs_unmodified(server, tmp_path):
    metrics = run(SUPERVISED, server, tmp_path / "sl")
    nll = [m["train_mean_nll"] for m in metrics if "train_mean_nll" in m]
    assert len(nll) == 4
    assert nll[-1] < nll[0]
    checkpoints = [json.loads(line) for line in (tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()]
    assert checkpoints[-1]["state_path"].startswith("tinker://")


def test_rl_training_runs_unmodified(server, tmp_path):
    metrics = run(RL, server, tmp_path / "rl")
    assert len(metrics) >= 2
    assert any("reward" in key for key in metrics[0])
