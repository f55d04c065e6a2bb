"""The frozen vision tower of Qwen3-VL and Qwen3.5: vectors that replace the embeddings of placeholder tokens.

Each image is computed alone, on a complete copy of the tower on every device. Its patches are padded to one of a few
counts, so its vectors have the same bits in every batch. The host copies the vectors into arrays shaped like the
tokens, so training programs depend only on the shape of a micro-batch.

Letters: P patches, N tokens of an image, E vectors of a token, C numbers of a patch, W width of the tower, H its heads;
B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels.matmul import matmul
from tinkerflow.backend.compute.mesh import Array, Scalar, put, replicated
from tinkerflow.backend.compute.models.config import ModelConfig, Vision
from tinkerflow.backend.compute.models.rotary import rotate
from tinkerflow.backend.compute.models.transformer import ImageFeatures, Params
from tinkerflow.backend.compute.models.vision_config import open_processor
from tinkerflow.backend.compute.warming import Program, like, result_of
from tinkerflow.backend.spec.commands import ImagePixels, Int32
from tinkerflow.backend.spec.limits import MAX_IMAGE_TOKENS
from tinkerflow.backend.spec.packing import bucket

LEAST_PATCHES = 256
_QUERIES = 256  # patches whose attention is computed together
_EPS = 1e-6  # in the tower's norms
_THETA = 10_000.0
_MASKED = -1e30

Tower = Mapping[str, jax.Array]


@flax.struct.dataclass
class Patches:
    """One image, padded to P patches. The patches of a token are neighbors.

    colors_PC uint8: channel, row and column of a patch. rows_P, columns_P int32: the patch's place. corners_P4 int32
    and shares_P4 float32: the learned positions around it, and their weights. count: int32 scalar, real patches.
    """

    colors_PC: Array
    rows_P: Array
    columns_P: Array
    corners_P4: Array
    shares_P4: Array
    count: Scalar


def most_patches(vision: Vision, max_context: int) -> int:
    """The number of patches, with padding, of the largest image that is served."""
    return bucket(min(MAX_IMAGE_TOKENS, max_context) * vision.merge**2, LEAST_PATCHES)


def tower_bytes(vision: Vision, max_context: int, item: int) -> int:
    """The approximate bytes that the tower needs on a device for the largest image. item: the bytes of a weight."""
    patches = most_patches(vision, max_context)
    rows = patches * (4 * (8 * vision.hidden + 3 * vision.patch**2) + 2 * item * (vision.mlp + 2 * vision.hidden))
    return rows + 2 * 4 * _QUERIES * patches * vision.heads


def to_patches(vision: Vision, pixels_HWC: npt.NDArray[np.uint8]) -> Patches:
    """The patches of an image whose sides are multiples of `vision.token_side`."""
    side, merge = vision.patch, vision.merge
    height, width, colors = pixels_HWC.shape
    rows, columns = height // side, width // side

    def by_token(grid: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[rows, columns, ...] as [P, ...], the patches of a token together."""
        tail = grid.shape[2:]
        tokens = grid.reshape(rows // merge, merge, columns // merge, merge, *tail)
        padded = tokens.swapaxes(1, 2).reshape(rows * columns, *tail)
        missing = bucket(len(padded), LEAST_PATCHES) - len(padded)
        return np.pad(padded, [(0, missing), *((0, 0) for _ in tail)])

    cells = pixels_HWC.reshape(rows, side, columns, side, colors).transpose(0, 2, 4, 1, 3)
    places = np.indices((rows, columns), np.int32)
    (above, below, lower), (left, right, later) = (_between(vision.grid, count) for count in (rows, columns))
    vertical, horizontal = ((above, 1 - lower), (below, lower)), ((left, 1 - later), (right, later))
    pairs = [(one, other) for one in vertical for other in horizontal]
    corners = [row[:, None] * vision.grid + column for (row, _), (column, _) in pairs]
    shares = [one[:, None] * other for (_, one), (_, other) in pairs]
    return Patches(
        colors_PC=by_token(cells.reshape(rows, columns, -1)),
        rows_P=by_token(places[0]),
        columns_P=by_token(places[1]),
        corners_P4=by_token(np.stack(corners, axis=-1).astype(np.int32)),
        shares_P4=by_token(np.stack(shares, axis=-1).astype(np.float32)),
        count=np.int32(rows * columns),
    )


def _between(grid: int, count: int) -> tuple[Int32, Int32, npt.NDArray[np.float32]]:
    """For `count` places spread over `grid` learned ones: the learned place before, the one after, and its share."""
    at = np.linspace(0, grid - 1, count, dtype=np.float32)
    before = at.astype(np.int32)
    return before, np.minimum(before + 1, grid - 1), at - before


@partial(jax.jit, static_argnums=(0, 1))
def see(cfg: ModelConfig, mesh: Mesh, tower: Tower, scale: jax.Array, patches: Patches) -> jax.Array:
    """vectors_NED of an image, replicated: first the vector that replaces the embedding, then DeepStack's.

    The vectors of padding are not used.

    cfg, mesh: the base model's shape, and the devices. tower: its tensors. scale: float32 [2, 3], mean and standard
    deviation of each color, from 0 to 1. patches: the image.
    """
    vision, dtype = _vision(cfg), tower["qkv"].dtype
    P = patches.colors_PC.shape[0]
    colors = jnp.asarray(patches.colors_PC).reshape(P, 3, -1).astype(jnp.float32) / 255
    colors = ((colors - scale[0, :, None]) / scale[1, :, None]).astype(dtype)
    # All frames are the same, so their weights can be added.
    weights = tower["patch"][0].astype(jnp.float32).sum(axis=2).astype(dtype).reshape(vision.hidden, -1)
    x_PW = matmul(colors.reshape(P, -1), weights) + tower["patch_bias"][0]
    learned_P4W = tower["positions"][0][patches.corners_P4]
    x_PW = x_PW + (learned_P4W * jnp.asarray(patches.shares_P4)[..., None].astype(dtype)).sum(axis=1)
    turns = _turns(vision, patches)
    blocks = {name: tower[name] for name in tower if not name.startswith(("patch", "positions", "merge", "deep"))}
    vectors, start = [], 0
    for place, end in enumerate((*(number + 1 for number in vision.deep), vision.layers)):
        here = {name: stack[start:end] for name, stack in blocks.items()}
        x_PW, _ = jax.lax.scan(lambda x, own: (_block(vision, own, x, turns, patches.count), None), x_PW, here)
        start = end
        if place < len(vision.deep):
            vectors.append(_merged(vision, tower, "deep", place, x_PW))
    vectors_NED = jnp.stack([_merged(vision, tower, "merge", 0, x_PW), *vectors], axis=1)
    return jax.lax.with_sharding_constraint(vectors_NED, replicated(mesh))


def _turns(vision: Vision, patches: Patches) -> tuple[jax.Array, jax.Array]:
    """cos and sin [1, P, d/2]: the first half of the pairs turns with rows, the second with columns."""
    pairs = vision.hidden // vision.heads // 4
    frequencies = _THETA ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    places = (jnp.asarray(patches.rows_P), jnp.asarray(patches.columns_P))
    angles = jnp.concatenate([place[:, None].astype(jnp.float32) * frequencies for place in places], axis=-1)
    return jnp.cos(angles)[None], jnp.sin(angles)[None]


def _block(vision: Vision, own: Tower, x_PW: jax.Array, turns: Any, count: Scalar) -> jax.Array:
    """One block of the tower: every patch of the image attends to all of them."""
    P, W = x_PW.shape
    q, k, v = jnp.split(_linear(own, "qkv", _norm(own, "norm1", x_PW)).reshape(1, P, -1, W // vision.heads), 3, axis=2)
    q, k = rotate(q, turns)[0] * (W // vision.heads) ** -0.5, rotate(k, turns)[0]
    real_P = jnp.arange(P) < count

    def attended(q_QHd: jax.Array) -> jax.Array:
        scores = jnp.einsum("qhd,phd->hqp", q_QHd, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(real_P, scores, _MASKED), axis=-1)
        return jnp.einsum("hqp,phd->qhd", weights.astype(v.dtype), v[0])

    o = jax.lax.map(attended, q.reshape(-1, _QUERIES, *q.shape[1:])).reshape(P, W)
    x_PW = x_PW + _linear(own, "o", o)
    up = jax.nn.gelu(_linear(own, "up", _norm(own, "norm2", x_PW)), approximate=True)
    return x_PW + _linear(own, "down", up)


def _merged(vision: Vision, tower: Tower, name: str, place: int, x_PW: jax.Array) -> jax.Array:
    """The patches of each token as one vector of the text model's width."""
    own = {key.removeprefix(f"{name}_"): tower[key][place] for key in tower if key.startswith(f"{name}_")}
    wide = vision.merge**2 * vision.hidden
    normed = x_PW if name == "merge" else x_PW.reshape(-1, wide)  # one norm is for patches, the others for tokens
    x_NV = _norm(own, "norm", normed).reshape(-1, wide)
    return _linear(own, "down", jax.nn.gelu(_linear(own, "up", x_NV), approximate=False))


def _linear(own: Tower, name: str, x: jax.Array) -> jax.Array:
    return matmul(x, own[name]) + own[f"{name}_bias"]


def _norm(own: Tower, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPS)
    weight, bias = (own[each].astype(jnp.float32) for each in (name, f"{name}_bias"))
    return (wide * weight + bias).astype(x.dtype)


def _vision(cfg: ModelConfig) -> Vision:
    assert cfg.vision is not None, f"{cfg.architecture} takes text"
    return cfg.vision


class VisionTower:
    """The tower of a base model on its devices."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, params: Params, scale: npt.NDArray[np.float32]) -> None:
        """cfg: must have `vision`. scale: as in `see`."""
        assert params.tower is not None
        self._cfg, self._mesh, self._weights = cfg, mesh, params.tower
        self.vision, self.hidden, self.dtype = _vision(cfg), cfg.hidden, params.embed_VD.dtype
        self._scale = put(scale, replicated(mesh))

    def no_images(self, rows: int, tokens: int) -> ImageFeatures:
        """Host arrays for `rows` by `tokens` tokens without images."""
        vectors = np.zeros((rows, tokens, self.vision.vectors, self.hidden), self.dtype)
        return ImageFeatures(np.zeros((rows, tokens), np.bool_), np.zeros((rows, tokens, 3), np.int32), vectors)

    def encode(self, image: ImagePixels) -> jax.Array:
        """The vectors of an image, as `see` returns them."""
        patches = put(to_patches(self.vision, image.pixels_HWC), replicated(self._mesh))
        return see(self._cfg, self._mesh, self._weights, self._scale, patches)

    def programs(self, max_context: int) -> Iterator[Program]:
        """The programs that encode images of every size."""
        vision, whole = self.vision, replicated(self._mesh)
        patches, distance = LEAST_PATCHES, 1
        while patches <= most_patches(vision, max_context):
            one = like(patches_like(vision, patches), whole)
            run = partial(result_of, see, self._cfg, self._mesh, self._weights, self._scale, one)
            yield Program(f"an image of {patches} patches", distance, run)
            patches, distance = 2 * patches, distance + 1


def open_vision_tower(cfg: ModelConfig, folder: str, mesh: Mesh, params: Params) -> VisionTower | None:
    """The tower of the model in `folder`; None without an image processor. UserError: the processor is unsupported."""
    processor = open_processor(cfg, folder)
    return (
        None
        if processor is None
        else VisionTower(cfg, mesh, params, np.array([processor.mean, processor.deviation], "f4"))
    )


def patches_like(vision: Vision, patches: int) -> Patches:
    """An image of zeros with this number of padded patches."""
    numbers, flat = np.zeros((patches, 3 * vision.patch**2), np.uint8), np.zeros(patches, np.int32)
    four = np.zeros((patches, 4), np.int32)
    return Patches(numbers, flat, flat, four, four.astype(np.float32), np.int32(0))


def image_positions(vision: Vision, length: int, images: Sequence[ImagePixels]) -> Int32:
    """Time, row and column [T, 3] of each token of a sequence of `length`, its images in order (M-RoPE of Qwen3-VL).

    All tokens of an image have the time of its first token. The next token is later by the longer side of the image.
    """
    positions_T3 = np.empty((length, 3), np.int32)
    done = now = 0
    for image in [*images, None]:
        end = length if image is None else image.start
        positions_T3[done:end] = np.arange(now, now + end - done)[:, None]
        now += end - done
        if image is None:
            break
        rows, columns = (size // vision.token_side for size in image.pixels_HWC.shape[:2])
        grid = np.stack([np.zeros((rows, columns), np.int32), *np.indices((rows, columns))], axis=-1)
        positions_T3[end : end + rows * columns] = now + grid.reshape(-1, 3)
        done, now = end + rows * columns, now + max(rows, columns)
    return positions_T3


def image_shift(vision: Vision, images: Sequence[ImagePixels]) -> int:
    """The rotary position of a token after all images, minus its index. Most images make this negative.

    vision: the tower. images: the sequence's images.
    """
    sides = [tuple(size // vision.token_side for size in image.pixels_HWC.shape[:2]) for image in images]
    return sum(max(rows, columns) - rows * columns for rows, columns in sides)
