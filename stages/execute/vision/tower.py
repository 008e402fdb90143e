"""Records the program of a vision tower.

patches → + positions → layers × (norm → attention → + → norm → feed-forward → +) → norm; squares of patches → matrices
"""

from dataclasses import replace

import msgspec
import numpy as np

from pipeline.errors import UserError
from pipeline.kernels.patches import CENTER
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_angles import StepAngles
from pipeline.kernels.step_inputs import LongArray
from pipeline.kernels.stored_matrix import BLOCK_BYTES, FloatFormat, StoredMatrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.vision_config import Projector, VisionConfig
from pipeline.stages.execute.layers.attention import attention_weights
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.layers.norm import norm_weights
from pipeline.stages.execute.layers.rope import rope_frequencies, rope_table
from pipeline.stages.execute.program import AnyMatrix, AttentionWeights, Linear, Norm
from pipeline.stages.execute.vision.builder import PatchWeights, ProjectorMatrix, TowerBuilder
from pipeline.stages.execute.weights import Weights, converted

HEAD_STEP = 16
"""Kernels compute heads of a multiple of so many dimensions."""


def computed_config(vision: VisionConfig) -> ModelConfig:
    """The config of the layers as they are computed: heads are padded with zeros, which change no score."""
    config = vision.encoder
    padded = -(-config.head_dim // HEAD_STEP) * HEAD_STEP
    if padded == config.head_dim:
        return config
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    return msgspec.structs.replace(config, head_dim=padded, query_scale=scale)


def build(
    vision: VisionConfig, weights: Weights, program: TowerBuilder, max_num_rows: int, to: FloatFormat
) -> FloatArray:
    """Record a tower whose projector computes up to `max_num_rows` rows; its matrices are `to` when they are
    multiplied. Returns what is added to the hidden state of each position, float32 [positions, hidden_size]. Raises
    UserError if a tensor is missing or has the wrong shape."""
    config, computed = vision.encoder, computed_config(vision)
    program.capture(tuple(layer + 1 for layer in vision.layer_rows.layers if layer + 1 < config.num_layers))
    patches = _patch_weights(vision, weights, to)
    program.patches(patches)
    for i in range(config.num_layers):
        attention = attention_weights(config, weights, i)
        if computed is not config:
            attention = _padded(attention, config.head_dim, computed.head_dim)
        if vision.windows is not None and i not in vision.windows.full_layers:
            attention = replace(attention, in_windows=True)
        program.attention(attention)
        program.mlp(mlp_weights(config, weights, i))
    program.pool(norm_weights(config, weights, "model.norm") if vision.final_norm else None)
    for name, projector in projectors(vision).items():
        program.project(_matrices(vision, projector, weights, name), max_num_rows)
    return _positions(vision, weights, np.asarray(patches.linear.bias))


def _patch_weights(vision: VisionConfig, weights: Weights, to: FloatFormat) -> PatchWeights:
    """The bias is that of the rounded matrix: else what it takes back would not be what the matrix adds."""
    hidden, size, channels, pixels = vision.encoder.hidden_size, vision.patch_size, vision.num_channels, vision.pixels
    frames = () if vision.frames is None else (vision.frames,)
    stored = weights.floats("vision.patches.weight", (hidden, channels, *frames, size, size)).astype(np.float64)
    stored = stored.sum(2) if frames else stored
    std, mean = np.array(pixels.std, np.float64), np.array(pixels.mean, np.float64)
    scaled = stored * (pixels.scale / std)[:, None, None]
    data = np.ascontiguousarray(scaled.reshape(hidden, -1), np.float32)
    rounded = converted(data, "F32", to)
    values = data if to == "f32" else (rounded.astype(np.uint32) << np.uint32(16)).view(np.float32)
    behind = values.astype(np.float64).reshape(hidden, channels, -1).sum(2) @ (CENTER - mean / pixels.scale)
    if vision.patch_bias:
        behind = behind + np.asarray(weights.vector("vision.patches.bias", hidden))
    norm = norm_weights(vision.encoder, weights, "model.embed_norm") if vision.encoder.embedding_norm else None
    matrix = StoredMatrix(to, rounded, hidden, vision.patch_width)
    return PatchWeights(Linear((matrix,), behind.astype(np.float32)), norm)


def _positions(vision: VisionConfig, weights: Weights, patch_bias: FloatArray) -> FloatArray:
    """A class token also gets its embedding, and loses the bias that all tokens get."""
    if vision.positions == "rope" and not vision.interpolates:
        return np.zeros((1, vision.encoder.hidden_size), np.float32)
    table = weights.floats("vision.positions.weight", (vision.encoder.max_position, vision.encoder.hidden_size))
    if vision.class_token:
        embedding = weights.vector("vision.class.weight", vision.encoder.hidden_size)
        table = table.copy()
        table[0] += np.asarray(embedding) - patch_bias
    return table


def projectors(vision: VisionConfig) -> dict[str, Projector]:
    """The projectors by the names of their tensors, in the order of their results in a row."""
    of_layers = {f"vision.layer_rows.{i}": one for i, one in enumerate(vision.layer_rows.projectors)}
    return {"vision.projector": vision.projector, **of_layers}


def projector_norms(vision: VisionConfig, weights: Weights) -> list[Norm | None]:
    """The norm of each projector, in host memory."""
    found: list[Norm | None] = []
    for name, projector in projectors(vision).items():
        if projector.norm is None:
            found.append(None)
            continue
        width = vision.encoder.hidden_size * (projector.merge**2 if projector.norms_squares else 1)
        weight = weights.vector(f"{name}.norm.weight", width) + projector.norm_offset
        bias = weights.vector(f"{name}.norm.bias", width) if projector.norm == "layer" else None
        found.append(Norm(weight, bias).as_arrays())
    return found


def newline_of(vision: VisionConfig, weights: Weights) -> FloatArray | None:
    """The row behind each line of an image in tiles, float32 [hidden_size]."""
    return None if vision.anyres is None else np.asarray(weights.vector("vision.newline.weight", vision.hidden_size))


def angles_of(vision: VisionConfig, max_num_tokens: int) -> StepAngles | None:
    """The angles by lines and columns of patches; None if the tower has no rotary embedding. The padding of heads does
    not turn."""
    if vision.positions != "rope":
        return None
    config = vision.encoder
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, None)
    of_lines, of_columns = frequencies[::2], frequencies[::2] if vision.shares_frequencies else frequencies[1::2]
    turning = np.zeros(computed_config(vision).head_dim // 2, np.float32)
    axes = np.zeros(len(turning), np.int64)
    turning[: len(frequencies)] = np.concatenate([of_lines, of_columns])
    axes[len(of_lines) : len(frequencies)] = 1
    return StepAngles(*rope_table(turning, vision.side), axes, max_num_tokens)


def _matrices(vision: VisionConfig, projector: Projector, weights: Weights, prefix: str) -> tuple[ProjectorMatrix, ...]:
    width, found = vision.encoder.hidden_size * projector.merge**2, []
    for i, matrix in enumerate(projector.matrices):
        name, outputs = f"{prefix}.{i}", matrix.num_outputs
        bias = weights.vector(f"{name}.bias", outputs) if matrix.bias else None
        stored = weights.matrix(f"{name}.weight", outputs, width)
        if i == 0 and projector.by_number:
            order = np.arange(width).reshape(vision.encoder.hidden_size, -1).T.reshape(-1)
            stored = _take(stored, order, rows=False)
        found.append(ProjectorMatrix(Linear((stored,), bias), matrix.activation))
        width = outputs
    return tuple(found)


def _padded(weights: AttentionWeights, head_dim: int, padded: int) -> AttentionWeights:
    """The weights for heads with zeros after each of their halves, which rotate together."""
    half = head_dim // 2
    order = np.full((2, padded // 2), -1, np.int64)
    order[:, :half] = np.arange(head_dim).reshape(2, half)
    qkv = Linear(
        tuple(_take(matrix, _of_heads(order, matrix.num_rows), rows=True) for matrix in weights.qkv.matrices),
        None if weights.qkv.bias is None else _taken(np.asarray(weights.qkv.bias), order),
    )
    (out,) = weights.out.matrices
    columns = _take(out, _of_heads(order, out.num_columns), rows=False)
    heads = weights.heads._replace(dim=padded)
    return replace(weights, heads=heads, qkv=qkv, out=Linear((columns,), weights.out.bias))


def _of_heads(order: LongArray, size: int) -> LongArray:
    """The order of every head, for `size` numbers; -1 stands for a zero."""
    head_dim = int(order.max()) + 1
    first = np.arange(0, size, head_dim)[:, None]
    indices: LongArray = np.where(order.reshape(-1) < 0, -1, first + order.reshape(-1)).reshape(-1)
    return indices


def _taken(vector: FloatArray, order: LongArray) -> FloatArray:
    found: FloatArray = np.append(vector, np.float32(0))[_of_heads(order, len(vector))]
    return found


def _take(matrix: AnyMatrix, order: LongArray, *, rows: bool) -> StoredMatrix:
    """Row or column i of the result is that of order[i], or zeros. Raises UserError for blocks."""
    if not isinstance(matrix, StoredMatrix) or matrix.format in BLOCK_BYTES:
        raise UserError(f"a vision tower's heads can't be padded in the format {matrix.format!r}: use one of floats")
    axis = 0 if rows else 1
    behind = np.zeros((1, matrix.num_columns) if rows else (matrix.num_rows, 1), matrix.data.dtype)
    data = np.ascontiguousarray(np.concatenate([matrix.data, behind], axis).take(order, axis))
    return StoredMatrix(matrix.format, data, len(data), data.shape[1], f"{matrix.name}, padded" if matrix.name else "")
