"""Blocks, registers and spills of kernels, from XLA's dump and from the real `ptxas`. No kernel is executed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from tests.accelerators import environment
from tests.accelerators.budgets import FAULTS, Budget, Case, faults
from tests.accelerators.gpu_kernels import Kernel, Multiprocessors, assembled, kernels, launches, reported
from tests.accelerators.hlo_text import Work

from tinkerflow.backend.compute.planning.topologies import DEVICES

H100 = Multiprocessors(132, 2048, 233472)
MATRIX = 2560 * 1024 * 2  # bytes of the key matrix of one layer of Qwen3-4B
SEQUENCE = """001: kCopy         [source       | next=002 (1) ] kCopy
002: kWhile        [prev=001 (1) | sink        ]
  body:
    003: kCustomKernel       [source        | next=004 (1) ] adapter_low__1 grid: [1, 3, 2] threads: [128, 1, 1]  \
shared_memory: 73728 bytes
    004: kCustomKernel       [prev=003 (1)  | sink         ] loop_add_fusion grid: [1, 1, 1] threads: [4, 8, 1]  \
shared_memory: 0 bytes
"""
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
    for number, name in enumerate(("copy.1", "while.7", "pallas_call.2", "loop_add_fusion.clone"), 1)
)


def ptx(registers: int) -> str:
    """PTX of a kernel `planted` that needs 64 numbers at the same time, compiled for at most `registers` registers."""
    loads = "".join(f"ld.volatile.global.f32 %f{one}, [%rd2+{4 * one}];\n" for one in range(64))
    stores = "".join(f"st.volatile.global.f32 [%rd2+{4 * one}], %f{63 - one};\n" for one in range(64))
    head = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry planted(.param .u64 p)\n"
    return (
        f"{head}.maxnreg {registers}\n{{\n.reg .f32 %f<64>;\n.reg .b64 %rd<3>;\n"
        f"ld.param.u64 %rd1, [p];\ncvta.to.global.u64 %rd2, %rd1;\n{loads}{stores}ret;\n}}\n"
    )


def of(kernel: Kernel, *, decode: bool = True, name: str = "planted") -> list[str]:
    """The faults of a program with this kernel."""
    record = {"kernels": {name: asdict(kernel)}} | ({"step": 1} if decode else {})
    budget = Budget(Case("4B", "h100:1", "decode", (1, 512)), FAULTS, 0)
    assert budget.holds(FAULTS.of(record)) == (not faults(record))
    assert all(fault in budget.describe(record) for fault in faults(record))
    return faults(record)


def one(blocks: int, *, nbytes: int = MATRIX, opcode: str = "custom-call", times: int = 36) -> dict[str, Kernel]:
    work = Work("jit(f)/planted/pallas_call", opcode, times, 0, nbytes * times, operation="pallas_call.2")
    often = Work("jit(f)/add", "fusion", 36, 0, 0, operation="loop_add_fusion.clone")
    launch = {"kernel": "planted__3", "blocks": blocks, "threads": 128, "shared": 61440}
    launched = {"pallas_call.2": launch, "loop_add_fusion.clone": launch | {"kernel": "loop_add_fusion"}}
    code = {"registers": 60, "spilled": 0, "serialized": False}
    each = {"planted__3": code, "loop_add_fusion": code}
    return kernels([work, often], DEVICES["h100"], H100, launched, each)


def test_the_dump_has_the_blocks_of_each_operation(tmp_path: Path) -> None:
    (tmp_path / "module_1.jit_f.thunk_sequence.txt").write_text(SEQUENCE)
    (tmp_path / "module_1.jit_f.thunk_metadata.txt").write_text(METADATA)
    assert launches(tmp_path) == {
        "pallas_call.2": {"kernel": "adapter_low__1", "blocks": 6, "threads": 128, "shared": 73728},
        "loop_add_fusion.clone": {"kernel": "loop_add_fusion", "blocks": 1, "threads": 32, "shared": 0},
    }


def test_kernel_that_spills_registers_breaks_its_budget(tmp_path: Path) -> None:
    ptxas = next(environment.place().glob("lib/*/site-packages/nvidia/*/bin/ptxas"), None)
    if ptxas is None:
        pytest.skip("no compilers for accelerators: python tests/accelerators/environment.py installs them (4 GB)")
    spilled = {}
    for registers in (24, 128):
        folder = tmp_path / str(registers)
        folder.mkdir()
        (folder / "module.1.ptx").write_text(ptx(registers))
        (folder / "module.2.ptx").write_text("")  # of a module without kernels
        spilled[registers] = assembled(folder, ptxas)["planted"]
    assert spilled[24]["spilled"] > 100 and spilled[24]["registers"] <= 24
    assert spilled[128]["spilled"] == 0 and spilled[128]["registers"] > 64
    (fault,) = of(Kernel(132, 1, 24, 0, spilled[24]["spilled"], serialized=False, idle=0.0), decode=False)
    assert fault == f"planted: {spilled[24]['spilled']} bytes of spilled registers, at most 0"


def test_kernel_with_serialized_matmuls_breaks_its_budget() -> None:
    text = (
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized "
        "due to non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline "
        "stage in the function 'planted' in line 1338\n"
        "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'planted' for 'sm_90a'\n"
        "ptxas info    : Function properties for planted\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    assert reported(text) == {"planted": {"registers": 255, "spilled": 0, "serialized": True}}
    kernel = Kernel(2048, 1, 255, 107264, 0, serialized=True, idle=0.0)
    assert of(kernel, decode=False) == ["planted: serialized wgmma"]


def test_decode_kernel_needs_a_block_for_each_multiprocessor() -> None:
    (kernel,) = one(64).values()
    assert kernel.idle == pytest.approx(1e6 * MATRIX / 3352e9 * 132 / 64, rel=0.01)
    assert of(kernel) == [f"planted: 64 blocks, {kernel.idle} us, at most 0.0"]
    for fine in (one(132), one(64, nbytes=MATRIX // 4)):  # the second ends before another kernel can start
        assert not of(fine["planted"])
    assert not of(one(64)["planted"], decode=False)


def test_kernel_missing_from_the_dump_raises_an_error() -> None:
    work = Work("jit(f)/planted/pallas_call", "custom-call", 1, 0, MATRIX, operation="pallas_call.2")
    with pytest.raises(KeyError, match=r"pallas_call\.2"):
        kernels([work], DEVICES["h100"], H100, {}, {})


def test_xla_kernels_are_checked_only_inside_the_layer_loop() -> None:
    assert of(one(64, opcode="fusion")["planted"])
    assert not one(64, opcode="fusion", times=1)


def test_registers_threads_and_shared_memory_limit_the_blocks_of_a_multiprocessor() -> None:
    assert one(132)["planted"].resident == 3  # 233,472 bytes over 61,440 and CUDA's 1,024
    assert of(Kernel(132, 1, 255, 98304, 0, serialized=False, idle=0.0), name="layer_product_adapted") == [
        "layer_product_adapted: 1 blocks on a multiprocessor, at least 2 (255 registers, 98304 bytes of shared memory)"
    ]
