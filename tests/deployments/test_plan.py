"""The plan of a service on accelerators that this machine does not have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.accelerators.models import MODELS
from typer.testing import CliRunner

from tinkerflow.backend.compute.planning.array_sizes import row_devices
from tinkerflow.backend.compute.planning.memory_plan import MemoryUses
from tinkerflow.backend.compute.platforms import compiling_for
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import plan as plan_module
from tinkerflow.deployments.commands import every_command
from tinkerflow.deployments.plan import command_of, describe_plan, plan_service


def plan(folder: Path, model: str, topology: str, *, rank: int = 32, **settings: object) -> str:
    """The plan for one of MODELS. A model is only a config.json here."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    chosen = Settings(data_dir=folder / "data", **settings)  # type: ignore[arg-type]
    return describe_plan(plan_service(chosen, str(folder), topology, rank=rank))


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return float(found[1].replace(",", ""))


def test_8b_trains_at_8k_on_one_h100_with_16_adapters(tmp_path: Path) -> None:
    said = plan(tmp_path, "8B", "h100:1", max_context=8192)
    assert number(said, r"sequences of up to (\d+) tokens") == 8192
    assert number(said, r"adapters of rank 32 in training at the same time: (\d+)") >= 16
    assert number(said, r"all parameters in training \(rank 0\): [a-z ]+: it needs ([\d.]+) GB of each device") > 0
    assert number(said, r"weights +([\d.]+) GB") == pytest.approx(16.4, abs=0.1)


@pytest.mark.parametrize("model", ["4B", "8B"])
@pytest.mark.parametrize("topology", ["h100:1", "v6e:1x1", "h100:8", "v6e:2x4"])
@pytest.mark.parametrize("context", [0, 131072])
def test_training_has_at_most_twelve_shapes(tmp_path: Path, model: str, topology: str, context: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model] | {"max_position_embeddings": 131072}))
    settings = Settings(data_dir=tmp_path / "data", max_context=context)
    planned = plan_service(settings, str(tmp_path), topology, rank=32)
    with compiling_for(planned.target.device.platform):
        shapes = planned.memory.budget.grid(row_devices(planned.config)).shapes(planned.memory.context)
    assert 8 <= len(shapes) <= 12


def test_memory_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    said = plan(tmp_path, "4B", "v6e:1x1")
    parts = re.findall(r"^(?!of )[a-z ]+? {2,}([\d.]+) GB$", said, re.M)
    assert sum(map(float, parts)) == pytest.approx(number(said, r"of +([\d.]+) GB a device"), abs=0.1)
    assert len(parts) == len(fields(MemoryUses)) - 1, "no memory is reserved for sampling full models, which do not fit"


def test_plan_uses_the_memory_of_the_settings(tmp_path: Path) -> None:
    said = plan(tmp_path, "4B", "h100:1", device_memory=24)
    assert number(said, r"of +([\d.]+) GB a device") == 24


def test_a_cache_in_float8_has_more_sequences_where_the_device_has_such_numbers(tmp_path: Path) -> None:
    plain, small = (
        number(plan(tmp_path, "4B", "h100:1", kv_cache=kind), r"(\d+) positions to sample in")
        for kind in ("full", "float8")
    )
    assert small >= 2 * plain
    with pytest.raises(UserError, match="kv_cache is 'float8', and a100 does not support that type"):
        plan(tmp_path, "4B", "a100:1", kv_cache="float8")


def test_plan_warns_of_lower_throughput_in_float32(tmp_path: Path) -> None:
    told = "in float32 expect several times less"
    assert told in plan(tmp_path, "0.6B", "h100:1", dtype="float32")
    assert told not in plan(tmp_path, "0.6B", "h100:1")


def test_a_rank_twice_as_high_leaves_room_for_half_the_adapters(tmp_path: Path) -> None:
    pattern = r"adapters of rank \d+ in training at the same time: (\d+)"
    low, high = (number(plan(tmp_path, "4B", "h100:1", rank=rank), pattern) for rank in (32, 64))
    assert high == low // 2


def test_training_speed_is_at_most_the_peak_and_scales_at_most_linearly(tmp_path: Path) -> None:
    pattern = r"training.*at most ([\d,]+) tokens/s"
    one, eight = (number(plan(tmp_path, "4B", topology), pattern) for topology in ("h100:1", "h100:8"))
    assert one == pytest.approx(989e12 / 17.4e9, rel=0.02), "17.4 GFLOP a token"
    assert one < eight <= 8 * one * 1.001


def test_the_longest_sequence_grows_with_the_devices_that_it_is_split_over() -> None:
    name, longest = "meta-llama/Llama-3.1-8B-Instruct", {}
    for most in (1, 2, 8):
        planned = plan_service(Settings(context_parallel=most, max_context=131072), name, "rtx4090:8", rank=32)
        longest[most] = planned.memory.context
    assert longest == {1: 8192, 2: 16384, 8: 65536}
    assert "TINKERFLOW_CONTEXT_PARALLEL=8" in command_of(planned, Settings(context_parallel=8))


def test_the_expert_axis_is_for_models_with_experts_only(tmp_path: Path) -> None:
    assert plan(tmp_path, "4B", "h100:8", expert_parallel=8) == plan(tmp_path, "4B", "h100:8")
    assert "mesh fsdp 1, expert 8, tensor 1" in plan(tmp_path, "30B-A3B", "h100:8", expert_parallel=8)


def test_a_mixture_of_experts_is_shown_the_trade_of_the_expert_axis() -> None:
    _, text = said("Qwen/Qwen3-30B-A3B", "--for", "h100:2x8")
    trade = re.search(
        r"^with --expert-parallel 8: training at most ([\d,]+) tokens/s instead of ([\d,]+), "
        r"decode at most ([\d,]+) tokens/s instead of ([\d,]+), (\d+) positions to sample in instead of (\d+)$",
        text,
        re.M,
    )
    assert trade, text
    faster, training, slower, decode, fewer, positions = (int(figure.replace(",", "")) for figure in trade.groups())
    assert faster > 1.2 * training and slower < decode and fewer < positions
    _, split = said("Qwen/Qwen3-30B-A3B", "--for", "h100:2x8", "--expert-parallel", "8")
    assert f"at most {faster:,} tokens/s" in split and f"at most {slower:,} tokens/s" in split
    assert "with --expert-parallel" not in split + said("Qwen/Qwen3-8B", "--for", "h100:8")[1]


def test_the_command_for_two_hosts_waits_for_both() -> None:
    _, two = said("Qwen/Qwen3-8B", "--for", "h100:2x8")
    assert (
        "up --base-model Qwen/Qwen3-8B --processes 2 --group ADDRESS:7000\nand on each host: tinkerflow worker" in two
    )
    assert "Links between hosts count as local links." in two
    assert said("Qwen/Qwen3-8B", "--for", "h100:16")[1].endswith(
        "h100:16 is one host. Most hosts have at most 8 GPUs: h100:2x8 is two.\n"
    )
    for one in ("h100:8", "h100:1x8", "v6e:2x4"):
        assert "--group" not in said("Qwen/Qwen3-8B", "--for", one)[1]


def test_a_token_is_decoded_as_fast_with_the_defaults_as_with_a_tensor_axis(tmp_path: Path) -> None:
    pattern = r"decode, \d+ sequence\(s\) of 1024 tokens: +at most ([\d,]+) tokens/s"
    plain = plan(tmp_path, "32B", "h100:8")
    split = plan(tmp_path, "32B", "h100:8", tensor_parallel=8)
    assert number(split, pattern) == pytest.approx(number(plain, pattern), rel=1e-3)
    assert number(plain, pattern) > 20_000
    assert "limited by memory bandwidth" in plain


@pytest.mark.parametrize(
    ("model", "topology", "settings", "message"),
    [
        ("32B", "h100:1", {}, "its weights take 65.5 GB of the 78.1 GB of each device"),
        ("4B", "h900:1", {}, "topology 'h900:1': device 'h900' is unknown: must be one of v5e"),
        ("4B", "h100:8", {"tensor_parallel": 3}, "tensor_parallel 3 x expert_parallel 1 must divide them"),
        ("4B", "h100:8", {"context_parallel": 16}, "context_parallel 16; must divide the 8 device(s)"),
        ("4B", "h100:1", {"max_context": 50000}, "max_context 50000; the model allows at most 40960"),
        ("4B", "h100:1", {"rank": 4096}, "lora rank 4096: must be 1 to"),
    ],
)
def test_impossible_plan_is_refused_with_its_reason(
    tmp_path: Path, model: str, topology: str, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(tmp_path, model, topology, **settings)  # type: ignore[arg-type]
    assert message in caught.value.message


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(every_command(), ["plan", *words])
    return done.exit_code, done.output or str(done.exception)


def test_a_popular_model_is_planned_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "find_model", None)
    status, text = said("Qwen/Qwen3-8B", "--for", "h100:1", "--price", "2.5", "--max-context", "8192")
    assert status == 0, text
    assert text.startswith("yes: Qwen/Qwen3-8B fits, with sequences of up to 8192 tokens\n")
    assert text.endswith("start it: TINKERFLOW_MAX_CONTEXT=8192 tinkerflow up --base-model Qwen/Qwen3-8B\n")
    assert costs(text, 2.5) == pytest.approx((0.4, 0.2), rel=0.01)
    assert "No rate was measured" in text


def costs(text: str, price: float) -> tuple[float, ...]:
    """The shares of training's upper bound that give the lowest and the highest cost."""
    ends = (r"at most ([\d,]+) tokens/s", r"\$([\d.]+) to", r"\$[\d.]+ to \$([\d.]+) for a million")
    rate, *each = (number(text, rf"training.*{end}") for end in ends)
    low, high = (number(text, rf"training.*{end}") for end in (r"expect ([\d,]+) to", r"expect [\d,]+ to ([\d,]+)"))
    shares = tuple(price / (rate * 3600) * 1e6 / cost for cost in each)
    assert shares == pytest.approx((high / rate, low / rate), rel=0.01)
    return shares


@pytest.mark.parametrize(
    ("model", "topology", "fix"),
    [
        ("Qwen/Qwen3-32B", "h100:1", "--base-weights int8"),
        ("meta-llama/Llama-3.3-70B-Instruct", "h100:1", "--base-weights nf4"),
        ("Qwen/Qwen3-32B", "rtx5090:1", "--base-weights nf4 --for rtx5090:2"),
        ("Qwen/Qwen3-32B", "a10:1", "--base-weights nf4 --for a10:4"),
    ],
)
def test_negative_answer_names_a_sufficient_option(model: str, topology: str, fix: str) -> None:
    status, text = said("--base-model", model, "--topology", topology)
    assert status == 1
    assert text.startswith(f"no: {model} does not fit {topology}: ") and text.endswith(f"; it fits with {fix}")


@pytest.mark.parametrize("topology", ["rtx3090", "rtx4090", "a10", "l4"])
def test_an_8b_model_trains_on_24_gb_with_weights_of_4_bits(topology: str) -> None:
    status, text = said("Qwen/Qwen3-8B", "--for", topology)
    assert status == 1 and text.endswith("; it fits with --base-weights int8")
    status, text = said("Qwen/Qwen3-8B", "--for", topology, "--base-weights", "nf4")
    assert status == 0, text
    assert text.startswith("yes: Qwen/Qwen3-8B fits, with sequences of up to 8192 tokens\n")
    assert number(text, r"adapters of rank 32 in training at the same time: (\d+)") >= 4
    assert number(text, r"weights +([\d.]+) GB") == pytest.approx(6.2, abs=0.1)
    assert "TINKERFLOW_BASE_WEIGHTS=nf4" in text
    assert said("Qwen/Qwen3-14B", "--for", topology)[1].endswith("; it fits with --base-weights nf4")


def test_a_4b_model_trains_on_a_t4_with_weights_of_4_bits() -> None:
    status, text = said("Qwen/Qwen3-4B", "--for", "t4", "--base-weights", "nf4", "--price", "0.35")
    assert status == 0, text
    assert text.startswith("yes: Qwen/Qwen3-4B fits, with sequences of up to 4096 tokens\n")
    assert costs(text, 0.35) == pytest.approx((0.2, 0.1), rel=0.01), "Turing has no kernels of ours"
    assert number(text, r"decode, 9 .* at most ([\d,]+) tokens/s") < 9 * 320 / 16, (
        "8 GB are written and read in float16"
    )


def test_plan_with_the_smallest_weights_does_not_suggest_them() -> None:
    _, text = said("Qwen/Qwen3-32B", "--for", "rtx3090", "--base-weights", "nf4")
    assert text.startswith("no: ") and "BASE_WEIGHTS" not in text and "--base-weights" not in text


def test_unknown_device_has_no_distant_suggestion() -> None:
    _, text = said("Qwen/Qwen3-8B", "--for", "rtx2080ti:2")
    assert "device 'rtx2080ti' is unknown" in text and "did you mean" not in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["Qwen/Qwen3-8B", "--for", "v100:1"], "topology 'v100:1': CUDA 13 has dropped Volta GPUs; Turing and newer"),
        (["Qwen/Qwen3-8B", "--for", "rtx409"], "(did you mean 'rtx4090'?)"),
        (["Qwen/Qwen3-8B"], "plan: name one model and the devices, as in `tinkerflow plan Qwen/Qwen3-8B --for h100:1`"),
    ],
)
def test_invalid_device_is_named(words: list[str], line: str) -> None:
    status, text = said(*words)
    assert status == 1 and line in text


def test_misspelt_model_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, _: object) -> Path:
        raise UserError(f"base model {name!r}: the hub cannot be reached")

    monkeypatch.setattr(plan_module, "find_model", missing)
    with pytest.raises(UserError, match=r"the hub cannot be reached \(did you mean 'Qwen/Qwen3-0.6B'\?\)$"):
        plan_service(Settings(), "Qwen/Qwen3-06B", "h100:1", rank=32)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        plan_service(Settings(data_dir=tmp_path), str(tmp_path), "h100:1", rank=32)


def test_plan_without_the_compiler_names_the_missing_compiler(tmp_path: Path) -> None:
    if find_spec("libtpu") is not None:
        pytest.skip("this environment has the compiler")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["0.6B"]))
    command = [sys.executable, "-m", "tests.accelerators.plan", "v6e:1x1", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "on v6e:1x1, 1 device(s)" in done.stdout
    assert "topology 'v6e:1x1': no compiler for it here; it needs libtpu" in done.stderr
