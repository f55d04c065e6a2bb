"""Compiled programs and stored figures against the budgets. Tests that compile are skipped without the compilers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from tests.accelerators import environment
from tests.accelerators.budgets import BUDGETS, CHUNK, DECISIONS, FAULTS, KERNELS, Budget, Case, KernelBudget, Record
from tests.accelerators.compile import MissingFlopsError, check_flops
from tests.accelerators.efficiency import expected, expected_mfu
from tests.accelerators.gate import FIGURES, compile_cases
from tests.accelerators.hlo_kernels import KERNELS as FLOPS
from tests.accelerators.hlo_text import PALLAS, count

from tinkerflow.backend.compute.planning.roofline import DECODE_SHARE, TRAINING_SHARE
from tinkerflow.backend.compute.planning.topologies import DEVICES
from tinkerflow.backend.compute.platforms import CUDA
from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.spec.commands import Example

H100 = DEVICES["h100"]
QUICK = [budget for budget in BUDGETS if budget.quick]


@pytest.fixture(scope="module")
def records() -> Mapping[str, Record | str]:
    """The records of all cases with a quick budget, and of `PLANTED`."""
    if not environment.python().exists():
        pytest.skip("no compilers for accelerators: python tests/accelerators/environment.py installs them (4 GB)")
    return compile_cases([*(budget.case for budget in QUICK), PLANTED])


PLANTED = Case("0.6B", "h100:1", "decode", (1, 512), (("traced", 1),))


@pytest.mark.parametrize("budget", QUICK, ids=lambda budget: f"{budget.case.name}: {budget.measure.name}")
def test_a_program_keeps_its_budget(budget: Budget, records: Mapping[str, Record | str]) -> None:
    record = records[budget.case.name]
    assert not isinstance(record, str), record
    value = budget.measure.of(record)
    said = budget.describe(record)
    if budget.met:
        assert budget.holds(value), said
    else:
        assert not budget.holds(value), f"{said}: the budget is met now; remove its met=False in budgets.py"
        pytest.xfail(said)


def test_loops_and_branches_decided_on_the_device_break_the_budget(
    records: Mapping[str, Record | str],
) -> None:
    record = records[PLANTED.name]
    assert not isinstance(record, str), record
    assert record["unknown_loops"] == ["jit(decode)/while"]
    assert len(record["branches"]) == 2 and all("/cond" in name for name in record["branches"])
    broken = Budget(PLANTED, DECISIONS, 0)
    assert not broken.holds(DECISIONS.of(record))
    assert "limit 0: jit(decode)/while; " in broken.describe(record)


def test_programs_of_the_page_have_at_least_the_useful_flops() -> None:
    for name, record in json.loads(FIGURES.read_text()).items():
        assert record["flops"] >= record["useful_flops"], name


def test_kernel_without_flops_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"""ENTRY %main (q: bf16[4,1024,32,128], k: bf16[4,1024,8,128]) -> bf16[4,1024,32,128] {{
  %q = bf16[4,1024,32,128]{{3,2,1,0}} parameter(0)
  %k = bf16[4,1024,8,128]{{3,2,1,0}} parameter(1)
  ROOT %o = bf16[4,1024,32,128]{{3,2,1,0}} custom-call(%q, %k), custom_call_target="__gpu$xla.gpu.triton", \
metadata={{op_name="jit(f)/tree_attention_forward{PALLAS}"}}
}}"""
    counts = count(text, on_chip_spaces=False)
    check_flops(counts, counts.flops)
    with pytest.raises(MissingFlopsError, match=r"0\.03 TFLOP were counted, but 0\.07 are useful"):
        check_flops(counts, 2 * counts.flops)
    monkeypatch.delitem(FLOPS, "tree_attention_forward")
    with pytest.raises(MissingFlopsError, match=r"has no flops for jit\(f\)/tree_attention_forward/pallas_call"):
        check_flops(count(text, on_chip_spaces=False), 0)


def test_figures_on_the_page_match_met_budgets() -> None:
    figures = json.loads(FIGURES.read_text())
    known = [budget for budget in BUDGETS if budget.case.name in figures]
    assert known
    for budget in known:
        assert budget.holds(budget.measure.of(figures[budget.case.name])) == budget.met, budget


def test_measured_kernels_match_the_plans_expected_utilization() -> None:
    """For dense models. The plan's bounds count fewer bytes than the programs."""
    figures = json.loads(FIGURES.read_text())
    for name in ("4B h100:1 forward_backward 4x1024", "Gemma-3-12B h100:1 forward_backward 4x1024"):
        low, high = expected_mfu(figures[name])
        assert TRAINING_SHARE[0] <= low <= high <= TRAINING_SHARE[1], name
    for sizes in ("1x512", "64x512", "256x512"):
        record = figures[f"4B h100:1 decode {sizes}"]
        low, high = (CHUNK * record["needed"] / H100.bandwidth / seconds for seconds in reversed(expected(record)))
        assert low == pytest.approx(DECODE_SHARE[0], abs=0.03) and high == pytest.approx(DECODE_SHARE[1], abs=0.04)


def test_no_kernel_has_a_wider_budget_than_it_needs() -> None:
    figures = json.loads(FIGURES.read_text())
    programs = [figures[budget.case.name]["kernels"] for budget in BUDGETS if budget.measure is FAULTS]
    for name, limits in KERNELS.items():
        found = [kernels[name] for kernels in programs if name in kernels]
        assert min(one["resident"] for one in found) == limits.resident, name
        assert max(one["spilled"] for one in found) == limits.spilled, name
        assert limits.idle == KernelBudget.idle or max(one["idle"] for one in found) > limits.idle - 1, name


def test_every_figure_of_the_page_has_a_budget() -> None:
    assert set(json.loads(FIGURES.read_text())) <= {budget.case.name for budget in BUDGETS}


def test_a_group_of_answers_takes_two_fifths_of_the_flops_with_a_shared_prompt() -> None:
    """GRPO with 16 answers of 256 tokens to a prompt of 1,024, on an H100."""
    rng, figures = np.random.default_rng(0), json.loads(FIGURES.read_text())
    prompt = rng.integers(0, 9000, 1024)
    group = []
    for _ in range(16):
        tokens_T = np.concatenate([prompt, rng.integers(0, 9000, 256)]).astype(np.int32)
        weights_TK = (np.arange(len(tokens_T) - 1)[:, None] >= len(prompt) - 1).astype(np.float32)
        group.append(Example(tokens_T[:-1], tokens_T[1:, None], weights_TK))

    def flops(branch_tokens: int) -> float:
        how = {"attention_tokens": CUDA.attention_tokens, "few_shapes": CUDA.few_shapes}
        batches = pack(group, microbatch_tokens=4096, branch_tokens=branch_tokens, **how)
        sizes = ["x".join(map(str, batch.tokens_BT.shape)) for batch in batches]
        return sum(figures[f"4B h100:1 forward_backward {size}"]["flops"] for size in sizes)

    assert flops(1) < 0.4 * flops(0)
