"""The cookbook's own RL recipes with and without prefix optimizations: `python -m tests.benchmarks.cookbook`.

Two services take turns, one of them without shared prefixes and prefilled answers. Each runs the unmodified recipes
`math_rl` (arithmetic, one turn) and `guess_number` (several turns). Prints the tokens that training sent and computed,
the prompt tokens that sampling computed, and the server's CPU-seconds. The first round compiles and does not count.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import httpx
from tests.benchmarks.service import compared_services, cpu_seconds, offered_model

# Counts the tokens of each request, in total and with each shared prefix of 16 tokens or more counted once.
PROGRAM = """
import asyncio, itertools, os, sys
import tinker
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberDatasetBuilder
from tinker_cookbook.rl import train

recipe, model, log = sys.argv[1:]
sent = computed = 0
forward_backward = tinker.TrainingClient.forward_backward_async

async def counted(self, data, *args, **kwargs):
    global sent, computed
    before = []
    for tokens in sorted(datum.model_input.to_ints() for datum in data):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, tokens)))
        sent, computed, before = sent + len(tokens), computed + len(tokens) - (same if same >= 16 else 0), tokens
    return await forward_backward(self, data, *args, **kwargs)

tinker.TrainingClient.forward_backward_async = counted
common = dict(renderer_name="role_colon", batch_size=2)
if recipe == "math_rl":
    builder = ArithmeticDatasetBuilder(**common, model_name_for_tokenizer=model, n_batches=2, group_size=16)
else:
    builder = GuessNumberDatasetBuilder(**common, model_name=model, train_group_size=4, test_group_size=1)
config = train.Config(
    log_path=log, model_name=model, recipe_name=recipe, renderer_name="role_colon", dataset_builder=builder,
    learning_rate=1e-3, lora_rank=32, max_tokens=16, eval_every=0, save_every=0, max_steps=2,
    remove_constant_reward_groups=False)
asyncio.run(train.main(config))
print("tokens", sent, computed, flush=True)
os._exit(0)
"""
SIDES = {"with": {}, "without": {"SHARE_PREFIXES": "false", "PREFILL_ANSWERS": "false"}}


def run_recipe(recipe: str, url: str, pid: int, model: str, folder: Path) -> dict[str, float]:
    """Run a recipe, and return its token counts and the server's CPU-seconds."""
    before, spent = _prompt_tokens(url), sum(cpu_seconds(pid).values())
    with tempfile.TemporaryDirectory(dir=folder) as log:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, recipe, model, log],
            env=os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-benchmark", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    seconds = sum(cpu_seconds(pid).values()) - spent
    counts = re.search(r"^tokens (\d+) (\d+)$", done.stdout, re.MULTILINE)
    assert counts is not None, done.stdout[-2000:]
    return {
        "trained": float(counts[1]),
        "without repeats": float(counts[2]),
        "prompts": _prompt_tokens(url) - before,
        "CPU-seconds": seconds,
    }


def _prompt_tokens(url: str) -> float:
    """The prompt tokens that the server has computed."""
    text = httpx.get(f"{url}/metrics").text
    return sum(
        float(found[1]) for found in re.finditer(r'tinkerflow_tokens_total\{[^}]*kind="prefill"[^}]*\} (\S+)', text)
    )


def main() -> None:
    with compared_services(SIDES) as (folder, repeat, services):
        models = {name: offered_model(url) for name, (url, _) in services.items()}
        for recipe in ("math_rl", "guess_number"):
            found = defaultdict(list)
            for number in range(repeat + 1):
                for name, (url, pid) in services.items():
                    values = run_recipe(recipe, url, pid, models[name], folder)
                    if number:
                        found[name].append(values)
            for name, rounds in found.items():
                median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
                shown = ", ".join(f"{key} {value:.0f}" for key, value in median.items())
                print(f"{recipe:12} {name:8} {shown}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
