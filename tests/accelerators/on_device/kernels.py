"""Checks every kernel for the device at the shapes of real models: correct results, repeatable bits, and speed.

`error` is the relative distance from plain operations in float32. `share` is the reached part of the peak that bounds
the kernel, memory bandwidth or matmul rate, by the fewest bytes and flops that the operation needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.accelerators.on_device.measure import Run, peaks, relative_error, same_bits, seconds

from tinkerflow.backend.compute.kernels import (
    adapter_gpu,
    delta_gpu,
    delta_tpu,
    grouped_gpu,
    grouped_tpu,
    paged_gpu,
    paged_tpu,
)
from tinkerflow.backend.compute.kernels.delta_chunks_gpu import ChunkParts, mix_chunks
from tinkerflow.backend.compute.kernels.flash import flash_attention
from tinkerflow.backend.compute.kernels.matmul import OfLayer
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, Platform, compiling_for
from tinkerflow.backend.compute.sampler import kv_cache
from tinkerflow.backend.compute.training import logprobs
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.spec.losses import packed_inputs

_LEAST_SECONDS = 20  # seconds that a kernel needs to compile and run
_ROUNDED, _EXACT = 2e-2, 1e-4  # the largest errors with bfloat16 and with float32 inputs


def measure(run: Run) -> None:
    """Measure the kernels of the device. On a CPU, the kernels for GPUs and for TPUs are interpreted."""
    for platform in {"cuda": [CUDA], "tpu": [TPU], "cpu": [CUDA, TPU]}[run.platform]:
        kernels = _Kernels(run, platform)
        for group in (kernels.limits, kernels.attention, kernels.trees, kernels.loss, kernels.decode, kernels.prefill):
            with run.attempt(f"{platform.name} {group.__name__}"), compiling_for(platform):
                group()
        for group in (
            kernels.experts,
            kernels.delta,
            *((kernels.chunks, kernels.matrices) if platform is CUDA else ()),
        ):
            with run.attempt(f"{platform.name} {group.__name__}"):
                group()


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Normally distributed random numbers."""
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def wide(tree: Any) -> Any:
    """The tree of arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def masked_attention(q: Any, k: Any, v: Any, ends_BT: Any) -> jax.Array:
    """Attention that computes all scores together. Position i is visible to positions from i to `ends_BT[i]` - 1."""
    place, repeats = jnp.arange(q.shape[1]), q.shape[2] // k.shape[2]
    seen = (place <= place[:, None]) & (place[:, None] < ends_BT[:, None])
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v)


def with_gradients(attend: Any) -> Callable[..., Any]:
    """A function of (q, k, v, slope) that returns `attend`'s result and the gradients of its product with `slope`."""

    def both(q: Any, k: Any, v: Any, slope: Any) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(slope)

    return jax.jit(both)


class _Kernels:
    """The kernels of one platform."""

    def __init__(self, run: Run, platform: Platform) -> None:
        self._run, self._platform, self._tiny, self._peaks = run, platform, run.tiny, peaks()
        self._mesh = make_mesh(1, 1)

    def _case(
        self,
        name: str,
        call: Callable[[], Any],
        wanted: Callable[[], Any] | None = None,
        *,
        limit: float = _ROUNDED,
        flops: float = 0,
        moved: float = 0,
        beside: Mapping[str, Callable[[], Any]] | None = None,
        pick: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        """Measure one kernel.

        wanted: computes the correct `pick` of the kernel's result in float32. limit: the largest relative error. flops,
        moved: the fewest flops and bytes. beside: alternatives, whose times are listed.
        """
        name = f"{self._platform.name}: {name}"
        if not self._run.has_time(name, _LEAST_SECONDS):
            return
        with self._run.attempt(name):
            began = time.perf_counter()
            first = jax.block_until_ready(call())
            figures: dict[str, Any] = {"compile_s": time.perf_counter() - began}
            figures["same_bits"] = ok = same_bits(first, call())
            if wanted is not None:
                with jax.default_matmul_precision("highest"), compiling_for(CPU):
                    figures["error"] = relative_error(pick(first), jax.jit(wanted)())
                ok = ok and figures["error"] <= limit
            if not self._tiny:
                took = seconds(call)
                figures |= {"us": took * 1e6, "gb_per_s": moved / took / 1e9, "tflop_per_s": flops / took / 1e12}
                if self._peaks is not None:
                    figures["share"] = max(moved / self._peaks.bandwidth, flops / self._peaks.flops) / took
                for label, other in (beside or {}).items():
                    figures[f"{label}_us"] = seconds(other) * 1e6
            self._run.add(name, ok, **figures)

    def limits(self) -> None:
        """A large matmul and a copy, which show the rates that this device reaches."""
        n = 64 if self._tiny else 8192
        a, b, x = draw(1, n, n), draw(2, n, n), draw(3, n if self._tiny else 2**30)
        self._case("matmul in bfloat16", partial(jax.jit(jnp.matmul), a, b), flops=2 * n**3)
        self._case("copy", partial(jax.jit(lambda x: x + jnp.bfloat16(1)), x), moved=2 * x.nbytes)

    def attention(self) -> None:
        """Training attention in packed rows, compared with masked attention, and in long rows."""
        H, G, d = (4, 2, 64) if self._tiny else (32, 8, 128)
        for B, T, examples in [(1, 128, 2)] if self._tiny else [(4, 1024, 2), (1, 8192, 1), (1, 32768, 1)]:
            ends = jnp.asarray(np.repeat(np.arange(1, examples + 1), T // examples) * (T // examples), jnp.int32)
            ends = jnp.broadcast_to(ends, (B, T))
            kernel = flash_attention(self._mesh, T, head_dim=d, interpret=self._tiny)
            assert kernel is not None, f"no kernel for rows of {T} tokens"
            q, k, v, slope = (draw(seed, B, T, heads, d) for seed, heads in enumerate((H, G, G, H)))
            ours = with_gradients(lambda q, k, v, kernel=kernel, ends=ends: kernel(q, k, v, ends))
            plain = with_gradients(partial(masked_attention, ends_BT=ends))
            wanted = partial(plain, *wide((q, k, v, slope))) if T <= 1024 else None
            beside = {}
            if self._run.platform == "cuda" and examples == 1:
                cudnn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
                beside["cudnn"] = partial(with_gradients(cudnn), q, k, v, slope)
            flops = 3.5 * 2 * B * H * T * T * d / examples  # causal: two products forward and five backward
            name = f"attention and gradients, {B} x {T} tokens"
            self._case(name, partial(ours, q, k, v, slope), wanted, flops=flops, beside=beside)

    def trees(self) -> None:
        """Training attention in a tree: half of the row is a prefix that four branches share."""
        H, G, d, T = (4, 2, 64, 128) if self._tiny else (32, 8, 128, 1024)
        own, branch = T // 2, T // 8
        ends = np.concatenate([np.full(own, T), own + branch * np.repeat(np.arange(1, 5), branch)])
        depths = np.concatenate([np.arange(own), np.tile(own + np.arange(branch), 4)])
        ends_BT, depths_BT = (jnp.asarray(x[None], jnp.int32) for x in (ends, depths))
        kernel = flash_attention(self._mesh, T, head_dim=d, tree=True, interpret=self._tiny)
        assert kernel is not None, f"no kernel for trees of {T} tokens"
        q, k, v, slope = (draw(seed, 1, T, heads, d) for seed, heads in enumerate((H, G, G, H)))
        ours = with_gradients(lambda q, k, v: kernel(q, k, v, ends_BT, None, depths_BT))
        wanted = partial(with_gradients(partial(masked_attention, ends_BT=ends_BT)), *wide((q, k, v, slope)))
        self._case(f"attention in a tree of {T} tokens", partial(ours, q, k, v, slope), wanted)

    def loss(self) -> None:
        """The loss and its gradients, with the logits of a large vocabulary on the chip."""
        B, T, D, V, R = (1, 32, 16, 300, 4) if self._tiny else (4, 1024, 2560, 151936, 32)
        dtype = jnp.float32 if self._tiny else jnp.bfloat16  # CPUs cannot interpret the kernel for TPUs in bfloat16
        params = Params(draw(1, V, D, dtype=dtype, scale=D**-0.5), {}, jnp.ones(D), None)
        pair = LoraPair(draw(2, R, D, dtype=jnp.float32, scale=D**-0.5), draw(3, R, V, dtype=jnp.float32, scale=0.1))
        targets = jax.random.randint(jax.random.key(4), (B, T, 1), 0, V)
        inputs = {name: jnp.full((B, T, 1), fill) for name, fill in packed_inputs().items()}
        inputs["weights"] = jnp.ones((B, T, 1))
        hidden, choice = draw(5, B, T, D, dtype=dtype), choose("cross_entropy", {})
        few = (slice(0, 1), slice(0, min(T, 128)))
        score = partial(logprobs.score_and_grads, mesh=self._mesh)

        @jax.jit
        def ours(params: Params, pair: LoraPair, hidden: Any) -> Any:
            scored, slope, _ = score(params, pair, hidden, targets, choice, inputs, interpret=self._tiny)
            return scored.logprobs_BTK, slope

        def wanted() -> Any:
            part = {name: value[few] for name, value in inputs.items()}
            scored, slope, _ = score(wide(params), pair, wide(hidden[few]), targets[few], choice, part)
            return scored.logprobs_BTK, slope

        flops = 4 * B * T * V * D  # the gradient of the unembedding is not computed
        name = f"loss and gradients of {B * T} tokens, {V} tokens in the vocabulary"
        call = partial(ours, params, pair, hidden)
        self._case(name, call, wanted, flops=flops, pick=lambda found: [part[few] for part in found])

    def decode(self) -> None:
        """Attention over pages, with one query per sequence."""
        cases = [(1, 200)] if self._tiny else [(64, 500), (1, 500), (256, 500), (8, 8000), (64, 2000), (1, 32000)]
        for rows, length in cases:
            self._paged(f"{rows} sequences at {length}", rows, 1, length - 1)
        self._paged("float8, 64 sequences at 500", 2 if self._tiny else 64, 1, 199 if self._tiny else 499, small=True)

    def prefill(self) -> None:
        """Attention over pages, for a piece of a prompt."""
        for queries, before in [(32, 96)] if self._tiny else [(512, 0), (512, 2048), (2048, 8192)]:
            self._paged(f"{queries} queries after {before}", 1, queries, before)

    def _paged(self, name: str, rows: int, queries: int, before: int, *, small: bool = False) -> None:
        if self._platform is TPU and self._tiny:
            return  # JAX cannot interpret its kernel of paged attention for TPUs
        H, G, d, page = (8, 4, 128, 32) if self._tiny else (32, 8, 128, 128)
        pages = -(-(before + queries) // page)
        k, v = draw(1, 2, rows * pages + 1, G, d, page), draw(2, 2, rows * pages + 1, G, page, d)
        if small:
            k, v = (x.astype(jnp.float8_e4m3fn) for x in (k, v))
        order = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages)
        tables = np.zeros((rows, max(pages, 8 if self._tiny else 256)), np.int32)  # as wide as the sampler's
        tables[:, :pages] = 1 + order
        start, q = jnp.full(rows, before, jnp.int32), draw(3, rows, queries, H, d, scale=d**-0.5)
        layer, few = jnp.int32(1), min(rows, 8)

        def wanted() -> jax.Array:
            return kv_cache._attend_by_page(
                wide(k), wide(v), layer, jnp.asarray(tables[:few]), start[:few], wide(q[:few])
            )

        if self._platform is TPU:
            cache = paged_tpu.interleaved(k.transpose(0, 1, 4, 2, 3), v.transpose(0, 1, 3, 2, 4))
            call = partial(jax.jit(paged_tpu.attend), cache, layer, jnp.asarray(tables), start, q)
        else:
            attend = jax.jit(partial(paged_gpu.attend, interpret=self._tiny))
            call = partial(attend, k, v, layer, jnp.asarray(tables), start, q)
        positions = rows * queries * (before + (queries + 1) / 2)
        moved = rows * (before + queries) * G * 2 * d * k.dtype.itemsize
        flops = 4 * positions * H * d
        self._case(f"paged attention, {name}", call, wanted, moved=moved, flops=flops, pick=lambda found: found[:few])

    def experts(self) -> None:
        """Grouped matmuls of a mixture of experts, with uneven groups."""
        module: ModuleType = grouped_tpu if self._platform is TPU else grouped_gpu
        shapes: Iterable[tuple[str, int, int, int, int]] = (
            ("30B-A3B", 32768, 128, 2048, 768),
            ("gpt-oss-20b", 16384, 32, 2880, 2880),
        )
        for model, M, E, i, o in [("tiny", 40, 4, 48, 64)] if self._tiny else shapes:
            x, y, weight = draw(1, M, i), draw(2, M, o), draw(3, E, i, o, scale=i**-0.5)
            cuts = np.sort(np.random.default_rng(0).integers(0, M, E - 1))
            sizes = jnp.asarray(np.diff([0, *cuts, M]), jnp.int32)
            first = int(sizes[0])
            product = jax.jit(partial(module.product, transposed=False, interpret=self._tiny))
            outer = jax.jit(partial(module.outer, interpret=self._tiny))

            def product_of_first(x: Any = x, weight: Any = weight, first: int = first) -> Any:
                return wide(x[:first]) @ wide(weight[0])

            def outer_of_first(x: Any = x, y: Any = y, first: int = first) -> Any:
                return wide(x[:first].T) @ wide(y[:first])

            name, flops = f"experts of {model}", 2 * M * i * o
            pick = partial(lambda found, first: found[:first], first=first)
            self._case(f"{name}: product", partial(product, x, weight, sizes), product_of_first, flops=flops, pick=pick)
            call = partial(outer, x, y, sizes)
            self._case(f"{name}: gradient", call, outer_of_first, flops=flops, pick=lambda found: found[0])

    def delta(self) -> None:
        """One token of linear attention, which updates the pool of states in place."""
        module: ModuleType = delta_tpu if self._platform is TPU else delta_gpu
        H, k, v, B = (2, 24, 40, 3) if self._tiny else (32, 128, 128, 64)
        pool = draw(1, 2, B + 1, H, k, v, dtype=jnp.float32)
        q, key = (draw(seed, B, H, k, dtype=jnp.float32, scale=0.1) for seed in (2, 3))
        value = draw(4, B, H, v, dtype=jnp.float32, scale=0.1)
        decay, beta = (jax.nn.sigmoid(draw(seed, B, H, dtype=jnp.float32)) for seed in (5, 6))
        places = jnp.arange(1, B + 1, dtype=jnp.int32)
        step = jax.jit(partial(module.step, interpret=self._tiny))

        def wanted() -> Any:
            S = pool[1, places] * decay[..., None, None]
            change = (value - jnp.einsum("bhkv,bhk->bhv", S, key)) * beta[..., None]
            S += key[..., None] * change[:, :, None]
            return jnp.einsum("bhkv,bhk->bhv", S, q), S

        self._case(
            f"linear attention, {B} sequences",
            partial(step, pool, jnp.int32(1), places, q, key, value, decay, beta),
            wanted,
            limit=_EXACT,
            moved=2 * B * H * k * v * 4,
            pick=lambda found: (found[0], found[1][1, np.asarray(places)]),
        )

    def chunks(self) -> None:
        """Linear attention in training, chunk by chunk, and its gradients."""
        n, B, h, H, c, k, v = (3, 1, 1, 2, 16, 24, 40) if self._tiny else (16, 4, 16, 32, 64, 128, 128)
        shapes = (h, c, k), (h, c, k), (H, c, v), (H, c, k), (H, c, c), (H, c), (H, c)
        *tokens, last, kept = (draw(i, n, B, *each, dtype=jnp.float32, scale=0.1) for i, each in enumerate(shapes))
        parts = ChunkParts._make([*tokens, jax.nn.sigmoid(last), jax.nn.sigmoid(kept)])
        S_BHkv = draw(7, B, H, k, v, dtype=jnp.float32)

        def by_kernel(S: jax.Array, parts: ChunkParts) -> Any:
            return mix_chunks(S, parts, None, jnp.float32, interpret=self._tiny)

        def one_by_one(S: jax.Array, parts: ChunkParts) -> Any:
            found = []
            for i in range(n):
                q, key, values, readers, reads, last, kept = (part[i] for part in parts)
                q, key = (jnp.repeat(x, H // h, axis=1) for x in (q, key))
                change = values - readers @ S
                found.append(q @ S * kept[..., None] + reads @ change)
                S = S * kept[..., -1:, None] + key.mT @ (last[..., None] * change)
            return jnp.concatenate(found, axis=2).swapaxes(1, 2), S

        def differentiated(mix: Any) -> Any:
            found, pull = jax.vjp(mix, S_BHkv, parts)
            return found, pull(found)

        self._case(
            f"linear attention, {B} x {n * c} tokens",
            partial(jax.jit(differentiated, static_argnums=0), by_kernel),
            partial(differentiated, one_by_one),
            flops=6 * n * B * H * c * (3 * k + c) * v,
        )

    def matrices(self) -> None:
        """Products of few rows with a layer's matrix and with adapters in the stack of all layers, on GPUs."""
        sizes = {"q, k, v": (2560, (4096, 1024, 1024)), "gate, up": (2560, (9728, 9728)), "down": (9728, (2560,))}
        for name, (i, outs) in {"q, k": (48, (64, 32))}.items() if self._tiny else sizes.items():
            # Four layers in turn, because a single one would stay in the cache.
            stacks = [draw(1, 4, o, i, scale=i**-0.5) for o in outs]
            for M in (2,) if self._tiny else (1, 64, 256):
                x = draw(2, M, i)

                @jax.jit
                def ours(x: Any, stacks: Any, layer: Any) -> Any:
                    return grouped_gpu.layer_products(x, stacks, [layer] * len(stacks), interpret=self._tiny)

                @jax.jit
                def plain(x: Any, stacks: Any, layer: Any) -> Any:
                    return [jnp.einsum("mi,oi->mo", x, stack[layer]) for stack in stacks]

                def four(products: Any, x: Any = x, stacks: Any = stacks) -> Any:
                    return [products(x, stacks, jnp.int32(layer)) for layer in range(4)]

                self._case(
                    f"matrices {name} x {M} rows, 4 layers",
                    partial(four, ours),
                    partial(four, plain, wide(x), [wide(stack) for stack in stacks]),
                    moved=4 * 2 * sum(outs) * i,
                    flops=4 * 2 * M * sum(outs) * i,
                    beside={"xla": partial(four, plain)},
                )
        i, outs, rank = (48, (64, 32), 32) if self._tiny else (2560, (4096, 1024, 1024), 32)  # q, k, v
        stacks = [draw(1, 4, o, i, scale=i**-0.5) for o in outs]
        pairs = [LoraPair(draw(1, 4, rank, i, scale=0.1), draw(2, 4, rank, o, scale=0.1)) for o in outs]
        for M in (2,) if self._tiny else (1, 64):
            columns = np.tile(np.array([[0, rank]], np.int32), (M, 1))
            x = draw(3, M, 1, i)

            def updates(x: Any, pairs: Any, columns: Any = columns) -> adapter_gpu.Updates:
                of_layer = [OfLayer(pair, jnp.int32(1)) for pair in pairs]
                return adapter_gpu.in_place(columns, rank, interpret=self._tiny)(x, of_layer)

            def adapted(x: Any, pairs: Any, stacks: Any, M: int = M) -> Any:
                last, layers = updates(x, pairs).last_step(), [jnp.int32(1)] * len(stacks)
                return grouped_gpu.layer_products(x.reshape(M, -1), stacks, layers, last, interpret=self._tiny)

            def wanted(x: Any = x) -> Any:
                return tuple(wide(x) @ wide(pair.A[1]).T @ wide(pair.B[1]) for pair in pairs)

            def wanted_adapted(x: Any = x, stacks: Any = stacks, wanted: Any = wanted, M: int = M) -> Any:
                sums = zip(stacks, wanted(), strict=True)
                return tuple((wide(x) @ wide(stack[1]).T + update).reshape(M, -1) for stack, update in sums)

            call, moved = (
                partial(jax.jit(lambda *given: tuple(updates(*given))), x, pairs),
                sum(2 * rank * (i + o) for o in outs),
            )
            self._case(f"adapters of rank {rank} x {M} rows", call, wanted, moved=moved)
            call, moved = partial(jax.jit(adapted), x, pairs, stacks), moved + sum(2 * o * i for o in outs)
            self._case(f"matrices with adapters of rank {rank} x {M} rows", call, wanted_adapted, moved=moved)
