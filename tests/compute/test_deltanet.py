"""Gated DeltaNet against Hugging Face's code in torch, with packed segments and with prompts in pieces."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compute.closeness import close
from transformers.models import qwen3_next  # a test loads its code, which takes seconds

from tinkerflow.backend.compute.kernels import delta_chunks_gpu
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.layers import DeltaRuleWeights, GatedDeltaNet
from tinkerflow.backend.compute.models.layers.delta_rule import (
    DeltaState,
    chunk_tokens,
    delta_rule_in_segments,
    empty_state,
    mix,
)
from tinkerflow.backend.compute.models.layers.norms import gated_norm
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, compiling_for

SHAPE = GatedDeltaNet(hidden=8, key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, fused=False, norm_eps=1e-6)


def weights(seed: int = 0) -> DeltaRuleWeights:
    rng = np.random.default_rng(seed)
    return DeltaRuleWeights(
        conv=rng.normal(size=(SHAPE.channels, 1, SHAPE.taps)).astype(np.float32),
        A_log=np.log(rng.uniform(0.1, 16, SHAPE.value_heads)).astype(np.float32),
        dt_bias=rng.normal(size=SHAPE.value_heads).astype(np.float32),
    )


def inputs(B: int, T: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = (SHAPE.channels, SHAPE.value_heads, SHAPE.value_heads)
    qkv, a, b = (rng.normal(size=(B, T, size)).astype(np.float32) for size in sizes)
    return qkv, a - 3, b  # with a - 3, some heads remember


@pytest.fixture(scope="module")
def mesh() -> Any:
    return make_mesh(1, 1)


@jax.jit
def _run(state: DeltaState, parts: Any, valid: Any) -> tuple[jax.Array, DeltaState]:
    return mix(SHAPE, make_mesh(1, 1), weights(), state, *map(jnp.asarray, parts), valid_B=valid)


def run(parts: Any, state: DeltaState | None = None, valid: Any = None) -> tuple[jax.Array, DeltaState]:
    B, T, _ = parts[0].shape
    state = state or empty_state(SHAPE, B, np.float32)
    return _run(state, tuple(parts), np.full(B, T, np.int32) if valid is None else np.array(valid, np.int32))


def in_torch(w: dict[str, torch.Tensor], qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rule: str) -> Any:
    """Qwen3NextGatedDeltaNet.forward between its projections and its norm. rule: "recurrent" or "chunk"."""
    B, T, C = qkv.shape
    mixed = torch.nn.functional.conv1d(qkv.mT, w["conv"], padding=SHAPE.taps - 1, groups=C)[..., :T]
    keys = SHAPE.key_heads * SHAPE.key_dim
    q, k, v = torch.split(torch.nn.functional.silu(mixed).mT, [keys, keys, SHAPE.values], dim=-1)
    q, k = (x.reshape(B, T, SHAPE.key_heads, -1).repeat_interleave(2, dim=2) for x in (q, k))
    g = -w["A_log"].exp() * torch.nn.functional.softplus(a + w["dt_bias"])
    value = v.reshape(B, T, SHAPE.value_heads, -1)
    more = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    in_steps = getattr(qwen3_next.modeling_qwen3_next, f"torch_{rule}_gated_delta_rule")
    return in_steps(q, k, value, g=g, beta=b.sigmoid(), **more)


@pytest.mark.parametrize(("T", "rule"), [(1, "recurrent"), (70, "recurrent"), (150, "chunk")])
def test_deltanet_matches_hugging_face(T, rule):
    parts = inputs(2, T)
    with torch.no_grad():
        expected, last = in_torch(
            {name: torch.tensor(w) for name, w in weights()._asdict().items()}, *map(torch.tensor, parts), rule
        )
    found, state = run(parts)
    close(found, expected.numpy(), ulps=512)
    close(state.S, last.numpy(), ulps=512)


def test_gated_norm_equals_hugging_face():
    rng = np.random.default_rng(0)
    x, z = (rng.normal(size=(2, 3, 4, 6)).astype(np.float32) for _ in range(2))
    norm = qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated(6, eps=1e-6)
    with torch.no_grad():
        norm.weight.normal_()
        expected = norm(torch.tensor(x), torch.tensor(z)).numpy()
    close(
        gated_norm(jnp.asarray(x), jnp.asarray(z), jnp.asarray(norm.weight.detach().numpy()), 1e-6), expected, ulps=16
    )
    assert qwen3_next.modeling_qwen3_next.l2norm(torch.tensor([3.0, 4.0]))[1] == pytest.approx(0.8)


def test_deltanet_gradients_equal_those_of_torch(mesh):
    parts, T = inputs(2, 70), 70
    pull = np.random.default_rng(5).normal(size=(2, T, SHAPE.value_heads, SHAPE.value_dim)).astype(np.float32)
    given_ = [torch.tensor(x, requires_grad=True) for x in parts]
    tensors = {name: torch.tensor(w) for name, w in weights()._asdict().items()}
    out, _ = in_torch(tensors, *given_, "recurrent")
    (out * torch.tensor(pull)).sum().backward()

    def loss(*parts: jax.Array) -> jax.Array:
        recur = delta_rule_in_segments(SHAPE, jnp.ones((2, T), jnp.int32), mesh)
        return jnp.sum(recur(weights(), *parts) * pull)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, parts))
    for mine, theirs in zip(found, given_, strict=True):
        assert theirs.grad is not None
        close(mine, theirs.grad.numpy(), ulps=4096)


def test_gradients_add_at_no_indices(mesh):
    """XLA:GPU would sort the index of each element, to fix the order of the additions."""
    segments = jnp.zeros((1, 70), jnp.int32)

    def total(*parts: jax.Array) -> jax.Array:
        return delta_rule_in_segments(SHAPE, segments, mesh)(weights(), *parts).sum()

    with compiling_for(CUDA):
        text = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(*map(jnp.asarray, inputs(1, 70))))
    assert "dot_general" in text and "scatter" not in text


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 1000))
def test_segments_of_a_row_are_independent(lengths: list[int], seed: int):
    """A segment gives the same outputs as alone, and its gradient reaches no other token of the row."""
    ends = np.cumsum(lengths)
    parts, segments = inputs(1, 256, seed), np.zeros((1, 256), np.int32)
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True), 1):
        segments[0, end - length : end] = number
    start, end = int(ends[-1] - lengths[-1]), int(ends[-1])
    found, slopes = _packed(parts, segments, segments == len(lengths))
    alone, _ = run([np.pad(x[:, start:end], ((0, 0), (0, 64 - end + start), (0, 0))) for x in parts])
    close(found[:, start:end], alone[:, : end - start], ulps=1024)
    assert np.any(slopes[0][:, start:end])
    for slope in slopes:
        assert not np.any(slope[:, :start]) and not np.any(slope[:, end:])


@jax.jit
def _packed(parts: Any, segments: jax.Array, mine: jax.Array) -> Any:
    """The outputs of a row, and the gradients of the squared outputs of the tokens `mine`."""
    recur = delta_rule_in_segments(SHAPE, segments, make_mesh(1, 1))
    squares = lambda parts: jnp.sum(jnp.where(mine[..., None, None], recur(weights(), *parts), 0) ** 2)  # noqa: E731
    return recur(weights(), *parts), jax.grad(squares)(parts)


def test_prefill_in_pieces_is_equal_and_bitwise_repeatable():
    """Pieces begin at multiples of a chunk. Padding fills the last piece."""
    T, parts = 150, inputs(1, 256)

    def through(*sizes: int) -> tuple[np.ndarray, DeltaState]:
        state, start, found = empty_state(SHAPE, 1, np.float32), 0, []
        for size in sizes:
            o, state = run([x[:, start : start + size] for x in parts], state, [min(size, T - start)])
            found.append(np.asarray(o))
            start += size
        return np.concatenate(found, axis=1)[:, :T], state

    whole, last = through(256)
    for sizes in [(32,) * 5, (64, 64, 32), (32, 128), (128, 64)]:
        found, state = through(*sizes)
        close(found, whole, ulps=1024)
        close(state.S, last.S, ulps=1024)
        np.testing.assert_array_equal(state.conv, last.conv)
        again, same = through(*sizes)
        np.testing.assert_array_equal(again, found)
        jax.tree.map(np.testing.assert_array_equal, same, state)
    for platform in (CPU, CUDA, TPU):
        with compiling_for(platform):
            assert platform.prefill_tokens[0] % chunk_tokens() == 0


@pytest.mark.parametrize("target", [CUDA, TPU], ids=["GPU", "TPU"])
def test_chunk_size_does_not_change_results_or_gradients(target, monkeypatch: pytest.MonkeyPatch):
    """GPUs and TPUs use larger chunks than CPUs and other backward passes, and GPUs use kernels."""
    parts, segments = inputs(1, 256), np.repeat([[1, 2, 3]], [100, 90, 66], axis=1).astype(np.int32)
    expected = _packed(parts, segments, segments == 2)
    kernel = Mock(wraps=partial(delta_chunks_gpu.mix_chunks, interpret=True))
    monkeypatch.setattr(delta_chunks_gpu, "mix_chunks", kernel)
    with compiling_for(target):
        assert chunk_tokens() == 64
        found = _packed.__wrapped__(parts, segments, segments == 2)
    assert kernel.called == (target is CUDA)
    jax.tree.map(lambda one, other: close(one, other, ulps=4096), found, expected)


def test_decode_continues_a_prefilled_prompt():
    parts = inputs(2, 70)
    whole, last = run(parts)
    _, state = run(parts, valid=[65, 60])
    for i in range(5):
        o, state = run([np.stack([x[0, 65 + i], x[1, 60 + i]])[:, None] for x in parts], state)
        close(o[0, 0], whole[0, 65 + i], ulps=1024)
        close(o[1, 0], whole[1, 60 + i], ulps=1024)
    close(state.S[0], last.S[0], ulps=1024)
    np.testing.assert_array_equal(state.conv[0], last.conv[0])
