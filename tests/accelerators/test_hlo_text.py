"""Counts from the text of a compiled program. The texts are shortened output of XLA:TPU and XLA:GPU."""

from __future__ import annotations

import pytest
from tests.accelerators.hlo_text import Counts, Loop, Work, count, seconds

from tinkerflow.backend.compute.planning.topologies import DEVICES

MATMUL = 2 * 4096 * 2560 * 9728
LOOP = """HloModule jit_f, is_scheduled=true

%sliced (p: bf16[36,2560,2560], i: s32[]) -> bf16[2560,2560] {
  %p = bf16[36,2560,2560]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,2560,2560]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,2560,2560}
  ROOT %flat = bf16[2560,2560]{1,0:T(8,128)(2,1)} bitcast(%slice)
}

%matmul (x: bf16[4096,2560], w: bf16[36,2560,2560], i: s32[]) -> bf16[4096,2560] {
  %x = bf16[4096,2560]{1,0:T(8,128)(2,1)SPACE} parameter(0)
  %w = bf16[36,2560,2560]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %one = bf16[2560,2560]{1,0:T(8,128)(2,1)} fusion(%w, %i), kind=kLoop, calls=%sliced
  ROOT %product = bf16[4096,2560]{1,0:T(8,128)(2,1)SPACE} convolution(%x, %one), dim_labels=bf_io->bf
}

%body (state: (s32[], bf16[4096,2560], bf16[36,2560,2560])) -> (s32[], bf16[4096,2560], bf16[36,2560,2560]) {
  %state = (s32[]{:T(128)}, bf16[4096,2560]{1,0SPACE}, /*index=2*/bf16[36,2560,2560]{2,1,0}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[4096,2560]{1,0:T(8,128)(2,1)SPACE} get-tuple-element(%state), index=1
  %w = bf16[36,2560,2560]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %step = s32[]{:T(128)} constant(1)
  %fusion.1 = bf16[4096,2560]{1,0:T(8,128)(2,1)SPACE} fusion(%x, %w, %turn), kind=kOutput, calls=%matmul
  %next = s32[]{:T(128)S(6)} add(%turn, %step)
  ROOT %after = (s32[]{:T(128)}, bf16[4096,2560]{1,0SPACE}, bf16[36,2560,2560]{2,1,0}) tuple(%next, %fusion.1, %w)
}

%condition (state: (s32[], bf16[4096,2560], bf16[36,2560,2560])) -> pred[] {
  %state = (s32[]{:T(128)}, bf16[4096,2560]{1,0}, bf16[36,2560,2560]{2,1,0}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} constant(36)
  ROOT %less = pred[]{:T(512)} compare(%turn, %limit), direction=LT
}

ENTRY %main (x.1: bf16[4096,2560], w.1: bf16[36,2560,2560]) -> bf16[4096,2560] {
  %x.1 = bf16[4096,2560]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = bf16[36,2560,2560]{2,1,0:T(8,128)(2,1)} parameter(1)
  %first = s32[]{:T(128)} constant(0)
  %begin = s32[]{:T(128)S(6)} copy(%first)
  %before = (s32[]{:T(128)}, bf16[4096,2560]{1,0}, bf16[36,2560,2560]{2,1,0}) tuple(%begin, %x.1, %w.1)
  %while.1 = (s32[]{:T(128)}, bf16[4096,2560]{1,0}, bf16[36,2560,2560]{2,1,0}) while(%before), OF
  ROOT %result = bf16[4096,2560]{1,0:T(8,128)(2,1)} get-tuple-element(%while.1), index=1
}
""".replace("OF", 'condition=%condition, body=%body, metadata={op_name="jit(f)/while"}KNOWN')


def one(operation: str, shapes: str, *, before: str = "", **options: bool) -> Counts:
    """The counts of a program with one operation on parameters %a, %b, ... of these shapes."""
    named = enumerate(zip("abcdefgh", shapes.split(), strict=False))
    parameters = "\n".join(f"  %{name} = {shape} parameter({place})" for place, (name, shape) in named)
    text = f"HloModule m\n\n{before}\nENTRY %main (a: f32[1]) -> f32[1] {{\n{parameters}\n  ROOT %r = {operation}\n}}\n"
    return count(text, options.get("tpu", False))


def test_loop_counts_every_trip_and_reads_one_slice_of_the_weights_per_trip() -> None:
    counts = count(LOOP.replace("SPACE", "").replace("KNOWN", ""), True)
    assert counts.loops == [Loop("jit(f)/while", 36, 0)]
    assert counts.flops == 36 * 2 * 4096 * 2560 * 2560
    assert counts.matmuls() == {"bf16[4096,2560] x bf16[2560,2560] -> bf16[4096,2560]": counts.flops}
    activations, weight = 2 * 4096 * 2560, 2 * 2560 * 2560
    moved = 36 * (2 * activations + weight)
    assert moved <= counts.bytes < moved * 1.001, "and a few bytes of counters"


def test_on_chip_memory_costs_nothing_on_a_tpu() -> None:
    text = LOOP.replace("SPACE", "S(1)").replace("KNOWN", "")
    weights = 36 * 2 * 2560 * 2560
    assert weights <= count(text, True).bytes < weights * 1.001
    assert count(text, False, unknown_trips=36).bytes > 2 * weights, "GPUs use other memory spaces for main memory, too"


def test_gpu_loop_has_a_known_trip_count_only_where_xla_states_one() -> None:
    text = LOOP.replace("SPACE", "")
    known = ', backend_config={"known_trip_count":{"n":"36"},"known_init_step":{"init":"0","step":"1"}}'
    assert count(text.replace("KNOWN", known), False).loops == [Loop("jit(f)/while", 36, 0)]
    unknown = count(text.replace("KNOWN", ""), False, unknown_trips=8)
    assert unknown.loops == [Loop("jit(f)/while", None, 0)]
    assert unknown.flops == 8 * 2 * 4096 * 2560 * 2560


def test_operation_text_of_several_lines_does_not_end_a_computation() -> None:
    kernel = '%kernel = bf16[4096,2560]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", OF'
    of = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"q\\": 512}"\n}}, metadata={op_name="kernel"}'
    text = LOOP.replace("SPACE", "").replace("KNOWN", "").replace("  %fusion.1 =", f"  {kernel}\n  %fusion.1 =")
    counts = count(text.replace("OF", of), True)
    assert counts.flops == 36 * 2 * 4096 * 2560 * 2560
    assert counts.kernels == {"tpu_custom_call": 36}


def test_tpu_loop_with_an_argument_as_limit_has_no_known_trip_count() -> None:
    text = (
        LOOP.replace("SPACE", "").replace("KNOWN", "").replace("tuple(%begin, %x.1, %w.1)", "tuple(%begin, %x.1, %n)")
    )
    text = text.replace("  %first =", "  %n = s32[]{:T(128)} parameter(2)\n  %first =")
    text = text.replace(
        "%limit = s32[]{:T(128)} constant(36)", "%limit = s32[]{:T(128)} get-tuple-element(%state), index=2"
    )
    assert count(text, True).loops == [Loop("jit(f)/while", None, 0)]


@pytest.mark.parametrize(
    ("operation", "shapes", "flops"),
    [
        (
            "f32[4096,9728]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
            "bf16[4096,2560]{1,0} bf16[9728,2560]{1,0}",
            MATMUL,
        ),
        (
            '(bf16[4096,9728]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            "bf16[4096,2560]{1,0} bf16[9728,2560]{1,0}",
            MATMUL,
        ),
        (  # a batch of 4 matmuls, as XLA:TPU writes it: the batch is a spatial dimension with one valid position
            "f32[4,128,64]{2,1,0} convolution(%a, %b), window={size=4 stride=3 pad=3_3 lhs_dilate=4}, "
            "dim_labels=0bf_0io->0bf",
            "bf16[4,128,256]{2,1,0} bf16[4,256,64]{2,1,0}",
            2 * 4 * 128 * 256 * 64,
        ),
        (
            'bf16[128,64]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config='
            '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"12345","bytes_accessed":"1"}}}',
            "bf16[128,256]{1,0}",
            12345,
        ),
        ("f32[128]{0} add(%a, %b)", "f32[128]{0} f32[128]{0}", 0),
    ],
)
def test_flops(operation: str, shapes: str, flops: int) -> None:
    assert one(operation, shapes).flops == flops


def test_attention_kernels_have_the_products_of_half_the_keys() -> None:
    shapes = "bf16[4,1024,32,128]{3,2,1,0} bf16[4,1024,8,128]{3,2,1,0} bf16[4,1024,8,128]{3,2,1,0} s32[4,1024]{1,0}"
    scores = 4 * 32 * 1024 * 1024 // 2
    counts = one(
        "(bf16[4,1024,32,128]{3,2,1,0}, f32[4,32,1024]{2,1,0}) custom-call(%a, %b, %c, %d), "
        'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/tree_attention_forward/pallas_call"}',
        shapes,
    )
    assert counts.flops == 2 * 2 * scores * 128
    assert not counts.kernels


def test_tpu_attention_counts_queries_and_keys_but_no_mask_tables() -> None:
    tables = "s32[32,2,2]{2,1,0} s32[32,2,2]{2,1,0} "
    of_heads = "bf16[2,32,1024,128]{3,2,1,0} bf16[2,8,1024,128]{3,2,1,0} bf16[2,8,1024,128]{3,2,1,0}"
    for name, products in (("splash_mha_fwd", 2), ("splash_mha_dkv", 4), ("splash_mha_dq", 3)):
        counts = one(
            "bf16[2,32,1024,128]{3,2,1,0} custom-call(%a, %b, %c, %d, %e), "
            f'custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/{name}_residuals/pallas_call"}}',
            tables + of_heads,
        )
        assert counts.flops == products * 2 * 32 * 1024 * 1024 * 128


def test_kernel_without_stated_flops_is_named() -> None:
    call = 'bf16[8]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"'
    counts = one(call, "bf16[8]{0}")
    assert counts.kernels == {"__gpu$xla.gpu.triton": 1}
    assert counts.bytes == 32
    ours = one(f'{call}, metadata={{op_name="jit(f)/unknown/pallas_call"}}', "bf16[8]{0}")
    assert ours.kernels == {"jit(f)/unknown/pallas_call": 1}


@pytest.mark.parametrize(
    ("operation", "shapes", "nbytes"),
    [
        ("f32[128]{0} add(%a, %b)", "f32[128]{0} f32[128]{0}", 3 * 512),
        ("f32[1,128]{1,0} dynamic-slice(%a, %b, %b), dynamic_slice_sizes={1,128}", "f32[64,128]{1,0} s32[]", 2 * 512),
        ("f32[64,128]{1,0} dynamic-update-slice(%a, %b, %c, %c)", "f32[64,128]{1,0} f32[1,128]{1,0} s32[]", 2 * 512),
        ("f32[128]{0} bitcast(%a)", "f32[128]{0}", 0),
        ('f32[999]{0} custom-call(), custom_call_target="AllocateBuffer"', "", 0),
        ("pred[128]{0} compare(%a, %a), direction=LT", "s4[128]{0}", 128 + 2 * 64),
    ],
)
def test_bytes(operation: str, shapes: str, nbytes: int) -> None:
    assert one(operation, shapes).bytes == nbytes


def test_pass_through_fusion_does_not_make_its_argument_free() -> None:
    """XLA:TPU passes operands of matmuls through such fusions."""
    inner = """%handed (p: bf16[512,256]) -> bf16[512,256] {
  %p = bf16[512,256]{1,0} parameter(0)
  ROOT %q = bf16[512,256]{1,0} bitcast(%p)
}

%matmul (x: bf16[128,256], w: bf16[512,256]) -> bf16[128,512] {
  %x = bf16[128,256]{1,0} parameter(0)
  %w = bf16[512,256]{1,0} parameter(1)
  %same = bf16[512,256]{1,0} fusion(%w), kind=kLoop, calls=%handed
  ROOT %product = bf16[128,512]{1,0} convolution(%x, %same), dim_labels=bf_oi->bf
}
"""
    shapes = "bf16[128,256]{1,0} bf16[512,256]{1,0}"
    counts = one("bf16[128,512]{1,0} fusion(%a, %b), kind=kOutput, calls=%matmul", shapes, before=inner, tpu=True)
    assert counts.bytes == 2 * (128 * 256 + 512 * 256 + 128 * 512)


@pytest.mark.parametrize("stated", ["", ',"cost_estimate":{"flops":"1","bytes_accessed":"777"}'])
def test_loss_kernels_count_matmuls_and_reads_of_the_unembedding_as_stated(stated: str) -> None:
    shapes = "bf16[128,256]{1,0} bf16[3000,256]{1,0} s32[128,1]{1,0}"
    counts = one(
        '(f32[24,128]{1,0}, f32[128,1]{1,0}) custom-call(%a, %b, %c), custom_call_target="any", '
        'metadata={op_name="jit(f)/softmax_totals/pallas_call"}, backend_config={"custom_call_config":{"body":"x"'
        f"{stated}}}}}",
        shapes,
    )
    assert counts.matmuls() == {"bf16[128,256] x bf16[3000,256] -> f32[128,3000]": 2 * 128 * 256 * 3000}
    assert counts.flops == 2 * 128 * 256 * 3000 and not counts.kernels
    assert counts.bytes == (777 if stated else 2 * 256 * 3128 + 4 * 128 * (1 + 24 + 1))


def test_the_kernel_that_multiplies_gradients_by_an_adapter_has_both_products() -> None:
    given = "bf16[128,3000]{1,0} f32[24,128]{1,0} s32[128,1]{1,0} f32[128,1]{1,0}"
    call = '(bf16[128,3000]{1,0}, f32[2,128,8]{2,1,0}) custom-call(%a, %b, %c, %d, %e, %f), custom_call_target="any", '
    named = 'metadata={op_name="jit(f)/softmax_slopes_by_adapter/pallas_call"}'
    counts = one(call + named, f"{given} bf16[128,8]{{1,0}} f32[8,3000]{{1,0}}")
    assert counts.flops == 2 * 2 * 128 * 3000 * 8 and not counts.kernels
    without = one(call.replace(", %e, %f", "") + named.replace("_by_adapter", ""), given)
    assert without.flops == 0 and not without.kernels


def test_an_update_in_place_within_a_fusion_writes_the_update() -> None:
    fused = """%fused (p: f32[64,128], u: f32[1,128], i: s32[]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %u = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %put = f32[64,128]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}
"""
    shapes = "f32[64,128]{1,0} f32[1,128]{1,0} s32[]"
    assert (
        one("f32[64,128]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused", shapes, before=fused).bytes == 2 * 512 + 4
    )


@pytest.mark.parametrize(
    ("kernel", "shapes", "result", "nbytes"),
    [
        (  # the keys and values of 4 x 16 pages of one layer
            "paged_attention",
            "s32[1]{0} s32[4,16]{1,0} s32[4]{0} bf16[4,8,4,128]{3,2,1,0} bf16[36,65,8,128,128]{4,3,2,1,0} "
            "bf16[36,65,8,128,128]{4,3,2,1,0}",
            "bf16[4,8,4,128]{3,2,1,0}",
            64 * 2 * 8 * 128 * 128 * 2 + 2 * (4 * 32 * 128 * 2),
        ),
        (
            "ragged_paged_attention_kernel",
            "s32[4]{0} s32[4,16]{1,0} s32[5]{0} s32[2]{0} s32[1]{0} bf16[4,32,128]{2,1,0} "
            "bf16[2340,128,16,128]{3,2,1,0}",
            "bf16[4,32,128]{2,1,0}",
            64 * 2 * 8 * 128 * 128 * 2 + 2 * (4 * 32 * 128 * 2),
        ),
        (  # a window of 300 positions touches 4 of 16 pages
            "paged_attention_of_300",
            "s32[1]{0} s32[4,16]{1,0} s32[4]{0} bf16[4,8,4,128]{3,2,1,0} bf16[36,65,8,128,128]{4,3,2,1,0} "
            "bf16[36,65,8,128,128]{4,3,2,1,0}",
            "bf16[4,8,4,128]{3,2,1,0}",
            4 * 4 * 2 * 8 * 128 * 128 * 2 + 2 * (4 * 32 * 128 * 2),
        ),
        (  # keys [L, N, G, d, P] whose first dimensions are the values
            "paged_attention",
            "s32[1]{0} s32[4,16]{1,0} s32[4]{0} bf16[4,1,20,576]{3,2,1,0} bf16[47,65,1,576,128]{4,3,2,1,0}",
            "bf16[4,1,20,512]{3,2,1,0}",
            64 * 576 * 128 * 2 + 4 * 20 * (576 + 512) * 2,
        ),
        (  # the matrices of all experts of one of 24 layers
            "grouped_product",
            "bf16[256,2880]{1,0} bf16[24,32,2880,2880]{3,2,1,0} s32[1]{0} s32[48]{0} s32[48]{0} s32[48]{0}",
            "bf16[256,2880]{1,0}",
            2 * (256 * 2880 + 32 * 2880 * 2880 + 256 * 2880),
        ),
        (  # the matrices of two experts of one of 3 layers, on a TPU
            "jit(gmm)",
            "s32[] s32[3]{0} s32[4]{0} s32[4]{0} s32[1]{0} bf16[16,256]{1,0} bf16[6,256,128]{2,1,0}",
            "bf16[16,128]{1,0}",
            2 * (16 * 256 + 2 * 256 * 128 + 16 * 128),
        ),
        (  # two projections, with two partial sums in float32
            "adapter_low",
            "bf16[64,2560]{1,0} bf16[36,128,2560]{2,1,0} bf16[24,128,2560]{2,1,0} s32[1]{0} s32[1]{0} s32[4]{0}",
            "f32[2,64,256]{2,1,0}",
            2 * (64 * 2560 + 2 * 128 * 2560) + 4 * 2 * 64 * 256,
        ),
        (
            "layer_product",
            "bf16[64,2560]{1,0} bf16[36,1,9728,2560]{3,2,1,0} s32[1]{0} s32[1]{0} s32[1]{0}",
            "bf16[64,9728]{1,0}",
            2 * (64 * 2560 + 9728 * 2560 + 64 * 9728),
        ),
        (
            "packed_product",
            "bf16[16,2048]{1,0} bf16[16,2048]{1,0} u8[36,1,12288,2048]{3,2,1,0} bf16[36,1,12288,64]{3,2,1,0} "
            "s32[1]{0} s32[1]{0} s32[1]{0}",
            "bf16[16,12288]{1,0}",
            2 * (16 * 4096 + 16 * 12288) + 12288 * (2048 + 2 * 64),
        ),
        (  # and the updates of two parts of sums in float32
            "layer_product_adapted",
            "bf16[64,2560]{1,0} bf16[36,1,9728,2560]{3,2,1,0} f32[2,64,128]{2,1,0} bf16[36,128,9728]{2,1,0} s32[1]{0} "
            "s32[4]{0} s32[1]{0}",
            "bf16[64,9728]{1,0}",
            2 * (64 * 2560 + 9728 * 2560 + 64 * 9728) + 4 * 2 * 64 * 128 + 2 * 128 * 9728,
        ),
        (
            "packed_product_adapted",
            "bf16[16,2048]{1,0} bf16[16,2048]{1,0} u8[36,1,12288,2048]{3,2,1,0} bf16[36,1,12288,64]{3,2,1,0} "
            "f32[2,16,128]{2,1,0} bf16[36,128,12288]{2,1,0} s32[1]{0}",
            "bf16[16,12288]{1,0}",
            2 * (16 * 4096 + 16 * 12288) + 12288 * (2048 + 2 * 64) + 4 * 2 * 16 * 128 + 2 * 128 * 12288,
        ),
    ],
)
def test_kernel_given_all_layers_counts_the_bytes_of_the_layer_it_reads(
    kernel: str, shapes: str, result: str, nbytes: int
) -> None:
    operands = ", ".join(f"%{name}" for name in "abcdefg"[: len(shapes.split())])
    counts = one(
        f'{result} custom-call({operands}), custom_call_target="x", metadata={{op_name="jit(f)/{kernel}/pallas_call"}}',
        shapes,
    )
    assert counts.bytes == nbytes
    assert counts.flops > 0 or counts.kernels


@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        ("adapter_update", "f32[2,64,256]{2,1,0} bf16[36,128,4096]{2,1,0} bf16[36,128,1024]{2,1,0}"),
        ("layer_product", "bf16[64,128]{1,0} bf16[36,1,4096,128]{3,2,1,0} bf16[9,1,1024,128]{3,2,1,0}"),
        (
            "packed_product",
            "bf16[64,64]{1,0} bf16[64,64]{1,0} u8[36,1,4096,64]{3,2,1,0} bf16[36,1,4096,2]{3,2,1,0} "
            "u8[36,1,1024,64]{3,2,1,0} bf16[36,1,1024,2]{3,2,1,0}",
        ),
    ],
)
def test_a_kernel_multiplies_rows_by_one_layer_of_each_stack(kernel: str, shapes: str) -> None:
    operands = ", ".join(f"%{name}" for name in "abcdefg"[: 1 + len(shapes.split())])
    counts = one(
        f'(bf16[64,4096]{{1,0}}, bf16[64,1024]{{1,0}}) custom-call({operands}), custom_call_target="x", '
        f'metadata={{op_name="jit(f)/{kernel}/pallas_call"}}',
        f"{shapes} s32[1]{{0}}",
    )
    assert counts.flops == 2 * 64 * 128 * (4096 + 1024)


def test_kernel_that_updates_states_in_place_counts_only_its_rows() -> None:
    pool, tokens = "f32[24,65,32,128,128]{4,3,2,1,0}", "f32[4,32,128]{2,1,0}"
    counts = one(
        f'({tokens}, {pool}) custom-call(%a, %b, %c, %d, %e), custom_call_target="x", '
        'output_to_operand_aliasing={{1}: (0, {})}, metadata={op_name="jit(f)/delta_step/pallas_call"}',
        f"{pool} s32[1]{{0}} s32[4]{{0}} {tokens} {tokens}",
    )
    assert counts.bytes == 4 * 4 * 32 * (2 * 128 * 128 + 3 * 128)
    assert counts.flops == 8 * 4 * 32 * 128 * 128


def test_flops_of_linear_attention_in_chunks() -> None:
    state, keys, of_head, square, decay = (
        f"f32[{','.join(map(str, dims))}]{{0}}"
        for dims in ((4, 32, 128, 96), (16, 4, 16, 64, 128), (16, 4, 32, 64, 128), (16, 4, 32, 64, 64), (16, 4, 32, 64))
    )
    values, tokens = "f32[16,4,32,64,96]{0}", 16 * 4 * 32 * 64
    for name, operands, each in (
        ("delta_chunks", (state, keys, keys, values, of_head, square, decay, decay), 3 * 128 + 64),
        ("delta_chunk_states", (state, keys, values, of_head, decay, decay), 2 * 128),
        ("delta_chunks_backward", (state, keys, keys, of_head, square, decay, decay, values), 3 * 128 + 64),
    ):
        names = ", ".join(f"%{letter}" for letter, _ in zip("abcdefgh", operands, strict=False))
        call = f'{values} custom-call({names}), custom_call_target="x"'
        text = f'{call}, metadata={{op_name="jit(f)/{name}/pallas_call"}}'
        assert one(text, " ".join(operands)).flops == 2 * tokens * each * 96


def test_a_scatter_within_a_fusion_writes_its_updates() -> None:
    fused = """%fused (p: f32[64,128], i: s32[2,1], u: f32[2,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %i = s32[2,1]{1,0} parameter(1)
  %u = f32[2,128]{1,0} parameter(2)
  ROOT %put = f32[64,128]{1,0} scatter(%p, %i, %u), to_apply=%region
}
"""
    shapes = "f32[64,128]{1,0} s32[2,1]{1,0} f32[2,128]{1,0}"
    counts = one("f32[64,128]{1,0} fusion(%a, %b, %c), kind=kInput, calls=%fused", shapes, before=fused)
    assert counts.bytes == 2 * 2 * 512 + 8


def test_the_longest_sort_counts_the_elements_of_one_list() -> None:
    fused = """%fused (k: s32[4,64], v: f32[4,64]) -> (s32[4,64], f32[4,64]) {
  %k = s32[4,64]{1,0} parameter(0)
  %v = f32[4,64]{1,0} parameter(1)
  ROOT %sorted = (s32[4,64]{1,0}, f32[4,64]{1,0}) sort(%k, %v), dimensions={1}, to_apply=%compare
}
"""
    shapes = "s32[4,64]{1,0} f32[4,64]{1,0}"
    result = "(s32[4,64]{1,0}, f32[4,64]{1,0})"
    assert one(f"{result} fusion(%a, %b), kind=kLoop, calls=%fused", shapes, before=fused).longest_sort == 64
    assert one("f32[4,64]{1,0} negate(%b)", shapes).longest_sort == 0


def test_in_place_retiling_fusion_counts_only_the_bytes_that_its_consumer_uses() -> None:
    fused = """%retiled (p: f8e4m3fn[48,256,128], n: f8e4m3fn[64]) -> f8e4m3fn[48,256,128] {
  %p = f8e4m3fn[48,256,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %n = f8e4m3fn[64]{0} parameter(1)
  %unused = f8e4m3fn[64]{0} negate(%n)
  ROOT %copy = f8e4m3fn[48,256,128]{2,1,0:T(8,128)(4,1)} copy(%p)
}

%fused (q: f8e4m3fn[48,256,128], u: f8e4m3fn[1,256,128], i: s32[], n: f8e4m3fn[64]) -> f8e4m3fn[48,256,128] {
  %q = f8e4m3fn[48,256,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %u = f8e4m3fn[1,256,128]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %n = f8e4m3fn[64]{0} parameter(3)
  %t = f8e4m3fn[48,256,128]{2,1,0} fusion(%q, %n), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retiled
  ROOT %put = f8e4m3fn[48,256,128]{2,1,0:T(32,128)(4,1)} dynamic-update-slice(%t, %u, %i, %i, %i)
}
"""
    shapes = "f8e4m3fn[48,256,128]{2,1,0} f8e4m3fn[1,256,128]{2,1,0} s32[] f8e4m3fn[64]{0}"
    counts = one("f8e4m3fn[48,256,128]{2,1,0} fusion(%a, %b, %c, %d), kind=kLoop, calls=%fused", shapes, before=fused)
    assert counts.bytes == 2 * 256 * 128 + 4 + 64


def test_gather_on_a_sparse_core_counts_the_rows_and_has_the_name_of_the_gather() -> None:
    table, rows = "bf16[65536,2048]{1,0}", "bf16[512,2048]{1,0}"
    before = f"""%on_core (t: bf16[65536,2048], i: s32[512]) -> bf16[512,2048] {{
  %t = {table} parameter(0)
  %i = s32[512]{{0}} parameter(1)
  ROOT %rows = {rows} gather(%t, %i), offset_dims={{1}}, metadata={{op_name="jit(f)/jvp()/gather"}}
}}, execution_thread="sparsecore"
"""
    called = 'custom_call_target="TODO(b/1)", called_computations={%on_core}'
    found = one(f"{rows} custom-call(%a, %b), {called}", f"{table} s32[512]{{0}}", before=before)
    assert [(work.name, work.bytes) for work in found.work] == [("jit(f)/jvp()/gather", 2 * 512 * 2048 * 2)]


def test_most_expensive_branch_of_a_conditional_counts() -> None:
    branch = """%{name} (x: f32[{size}]) -> f32[{size}] {{
  %x = f32[{size}]{{0}} parameter(0)
  ROOT %n = f32[{size}]{{0}} negate(%x)
}}
"""
    both = branch.format(name="small", size=8) + "\n" + branch.format(name="large", size=64)
    counts = one(
        'f32[64]{0} conditional(%a, %b, %c), branch_computations={%small, %large}, metadata={op_name="jit(f)/cond"}',
        "s32[] f32[8]{0} f32[64]{0}",
        before=both,
    )
    assert counts.bytes == 2 * 64 * 4
    assert counts.branches == ["jit(f)/cond"]


def test_collectives_have_the_bytes_of_their_result() -> None:
    counts = one(
        "(bf16[320,2560]{1,0}, bf16[2560,2560]{1,0}) all-gather-start(%a), dimensions={0}, "
        'metadata={op_name="jit(f)/gather"}',
        "bf16[320,2560]{1,0}",
    )
    (gather,) = counts.collectives
    assert (gather.kind, gather.name, gather.bytes, gather.times) == ("all-gather", "jit(f)/gather", 2 * 2560**2, 1)


def test_text_without_an_hlo_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        count("module @jit_f {}", False)


def test_an_operation_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    device = DEVICES["h100"]
    matmul = Work("a", "dot", 1, int(device.flops), 0)
    copy = Work("b", "copy", 1, 0, int(device.bandwidth))
    both = Work("c", "dot", 1, int(device.flops), int(device.bandwidth) // 2)
    assert seconds([matmul, copy, both], device) == pytest.approx(3)
