"""Quantizes tiny models into the layouts of other libraries, written from the layouts' public definitions.

Each packer takes a weight [N, K] and returns the tensors of its module and the values that they stand for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.stages.prepare import checkpoints

NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
"""The published table of QLoRA's 4-bit NormalFloat."""
FP4 = [0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25, -0.0, -0.0052, -0.6667, -1.0, -0.3333, -0.5, -0.1667, -0.25]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass
class Packed:
    """A quantized module."""

    tensors: dict[str, Tensor]
    """By the last part of their names."""
    values: Tensor
    """[N, K] float32"""


Packer = Callable[[str, Tensor], Packed | None]
"""Takes the name of a module and its weight; None leaves it as it is."""

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save(folder: Path, model: Any, config: Mapping[str, Any], pack: Packer, **extra: Tensor) -> dict[str, Packed]:
    """A checkpoint whose linear layers are packed; all else is rounded to bfloat16, as files are.

    Returns what was packed, by the weight's name.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    checkpoints.save_folder(folder, model)
    packed: dict[str, Packed] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        found = pack(module, tensor) if module.rpartition(".")[2] in LINEAR else None
        if found is None or not name.endswith(".weight"):
            tensors[name] = tensor.to(torch.bfloat16)
            continue
        packed[name] = found
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in found.tensors.items()}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    checkpoints.edit_config(folder, quantization_config=dict(config))
    return packed


def load_values(model: Any, values: Mapping[str, Tensor]) -> Any:
    """Replace weights of a model."""
    state = model.state_dict()
    for name, tensor in values.items():
        state[name].copy_(tensor)
    return model


# ------------------------------------------------------------------------------------------------------ integers


def grid(
    weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, ...]:
    """Scales [N, G] `dtype`, zero points [N, G] and codes [N, K] int64, rounded to nearest; `group` divides K."""
    num_rows, num_columns = weight.shape
    groups = weight.reshape(num_rows, -1, group)
    if symmetric:
        scale = (groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).to(dtype)
        zero = torch.full_like(scale, 2 ** (bits - 1), dtype=torch.int64)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, 2**bits - 1).long()
    codes = (groups / scale.float().unsqueeze(-1)).round().long() + zero.unsqueeze(-1)
    return scale, zero, codes.clamp(0, 2**bits - 1).view(num_rows, num_columns)


def worth(scale: Tensor, zero: Tensor, codes: Tensor, group_of: Tensor) -> Tensor:
    """The values of codes, float32."""
    return (codes - zero[:, group_of]).float() * scale.float()[:, group_of]


def to_words(values: Tensor, bits: int) -> Tensor:
    """Values [..., n] as words [..., n * bits / 32] int32, as AutoGPTQ packs them: `bits` bits each, from the lowest
    bits on. With 3 bits, 32 values take three words, and values 10 and 21 are in two of them."""
    words = []
    per_word = 32 if bits == 3 else 32 // bits
    for start in range(0, values.shape[-1], per_word):
        v = values[..., start : start + per_word].long()
        if bits == 3:
            first = sum((v[..., j] << (3 * j) for j in range(10)), (v[..., 10] & 3) << 30)
            second = sum((v[..., 11 + j] << (3 * j + 1) for j in range(10)), (v[..., 10] >> 2) | (v[..., 21] & 1) << 31)
            third = sum((v[..., 22 + j] << (3 * j + 2) for j in range(10)), v[..., 21] >> 1)
            words += [first, second, third]
        else:
            words.append(sum((v[..., j] << (bits * j) for j in range(1, per_word)), v[..., 0]))
    return torch.from_numpy(torch.stack(words, -1).numpy().astype(np.uint32).view(np.int32))


def minus_one(words: Tensor, bits: int) -> Tensor:
    """1 less in each field of a word. The subtraction is of whole words, so that a zero borrows from the next field."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return torch.from_numpy((words.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))


Always = Callable[[str, Tensor], Packed]
"""Packs every module."""


def gptq(bits: int, group: int, *, symmetric: bool = True, v1: bool = True, g_idx: bool = True) -> Always:
    """Groups of consecutive columns; all columns are a group if `group` is -1."""

    def pack(module: str, weight: Tensor) -> Packed:
        size = weight.shape[1] if group < 0 else group
        scale, zero, codes = grid(weight, bits, size, symmetric)
        group_of = torch.arange(weight.shape[1]) // size
        tensors = _gptq_tensors(bits, v1, scale, zero, codes)
        if g_idx:
            tensors["g_idx"] = group_of.int()
        return Packed(tensors, worth(scale, zero, codes, group_of))

    return pack


def gptq_act_order(bits: int, group: int, *, symmetric: bool = True, seed: int = 0) -> Packer:
    """Columns in a random order of importance are grouped; the tensors have them in their own order."""
    random = np.random.default_rng(seed)

    def pack(module: str, weight: Tensor) -> Packed:
        order = torch.from_numpy(random.permutation(weight.shape[1]))
        back = order.argsort()
        scale, zero, codes = grid(weight[:, order], bits, group, symmetric)
        codes, group_of = codes[:, back], back // group
        tensors = _gptq_tensors(bits, True, scale, zero, codes) | {"g_idx": group_of.int()}
        return Packed(tensors, worth(scale, zero, codes, group_of))

    return pack


def _gptq_tensors(bits: int, v1: bool, scale: Tensor, zero: Tensor, codes: Tensor) -> dict[str, Tensor]:
    zeros = to_words(zero.T.contiguous(), bits)
    if v1 and bits == 3:
        zeros = to_words((zero.T.contiguous() - 1) % 8, bits)
    elif v1:
        zeros = minus_one(zeros, bits)
    return {"qweight": to_words(codes, bits).T, "qzeros": zeros, "scales": scale.T}


def awq(group: int, *, symmetric: bool = False) -> Packer:
    def pack(module: str, weight: Tensor) -> Packed:
        scale, zero, codes = grid(weight, 4, group, symmetric)
        values = worth(scale, zero, codes, torch.arange(weight.shape[1]) // group)
        return Packed({"qweight": _interleaved(codes.T), "qzeros": _interleaved(zero.T), "scales": scale.T}, values)

    return pack


def _interleaved(values: Tensor) -> Tensor:
    """Values [..., N] of 4 bits as words [..., N / 8]: AutoAWQ's order_map."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int64)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        words |= values[..., column::8] << (4 * i)
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))


def pack_quantized(bits: int, group: int, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Packer:
    """compressed-tensors' packed integers; one group per row if `group` is -1."""

    def pack(module: str, weight: Tensor) -> Packed:
        size = weight.shape[1] if group < 0 else group
        scale, zero, codes = grid(weight, bits, size, symmetric, dtype)
        tensors = {
            "weight_packed": to_words(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = to_words(zero.T.contiguous(), bits).T
        return Packed(tensors, worth(scale, zero, codes, torch.arange(weight.shape[1]) // size))

    return pack


def int_quantized(*, symmetric: bool = True, per_row: bool = True) -> Packer:
    """compressed-tensors' int8, with a scale per row or for the whole weight."""

    def pack(module: str, weight: Tensor) -> Packed:
        flat = weight if per_row else weight.reshape(1, -1)
        scale, zero, codes = grid(flat, 8, flat.shape[1], symmetric, torch.bfloat16)
        values = worth(scale, zero, codes, torch.zeros(flat.shape[1], dtype=torch.long)).view_as(weight)
        tensors = {
            "weight": (codes - 128).to(torch.int8).view_as(weight),
            "weight_scale": scale if per_row else scale[0],
        }
        if not symmetric:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        return Packed(tensors | {"input_scale": torch.ones(1)}, values)

    return pack


def llm_int8(module: str, weight: Tensor) -> Packed:
    """bitsandbytes' LLM.int8()."""
    absmax = weight.abs().amax(1)
    codes = (weight / absmax.unsqueeze(1) * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Packed(tensors, codes.float() * (absmax / 127).unsqueeze(1))


# ------------------------------------------------------------------------------------------------------- floats


def bnb4(kind: str, block: int = 64, *, nested: bool = False) -> Packer:
    """bitsandbytes' blocks of flat values; with `nested`, scales are quantized to 8 bits too."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def pack(module: str, weight: Tensor) -> Packed:
        flat = weight.reshape(-1, block)
        absmax = flat.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors: dict[str, Tensor] = {"weight.absmax": absmax}
        if nested:
            offset = float(absmax.mean())
            levels = torch.linspace(-1, 1, 256)
            parts = (absmax - offset).split(256)
            largest = torch.stack([part.abs().amax() for part in parts])
            codes = torch.cat(
                [(part[:, None] / most - levels).abs().argmin(1) for part, most in zip(parts, largest, strict=True)]
            )
            absmax = (
                torch.cat([levels[code] * most for code, most in zip(codes.split(256), largest, strict=True)]) + offset
            )
            tensors = {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": largest,
                "weight.nested_quant_map": levels.clone(),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        code = (flat[:, :, None] / absmax[:, None, None] - table).abs().argmin(-1)
        pairs = code.view(-1, 2)
        tensors |= {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
            "weight.quant_map": table.clone(),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return Packed(tensors, (table[code] * absmax[:, None]).view_as(weight))

    return pack


def fp8(
    rows: int | None,
    columns: int | None,
    *,
    name: str = "weight_scale_inv",
    kind: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
) -> Packer:
    """8-bit floats with a scale for each block of rows × columns; None is all of them."""

    def pack(module: str, weight: Tensor) -> Packed:
        num_rows, num_columns = weight.shape
        high, wide = rows or num_rows, columns or num_columns
        scale = torch.empty(-(-num_rows // high), -(-num_columns // wide))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                scale[i, j] = part.abs().amax() / torch.finfo(kind).max
        if scale_dtype == torch.float8_e8m0fnu:
            scale = torch.exp2(scale.log2().ceil())
        scale = scale.to(scale_dtype)
        each = scale.float().repeat_interleave(high, 0)[:num_rows].repeat_interleave(wide, 1)[:, :num_columns]
        codes = (weight / each).to(kind)
        stored = scale.reshape(1) if rows is None and columns is None else scale
        return Packed({"weight": codes, name: stored}, codes.float() * each)

    return pack


def mxfp4(*, is_packed: bool = False) -> Packer:
    """gpt-oss' blocks and scales, or compressed-tensors' packed weight."""
    table = torch.tensor(E2M1)

    def pack(module: str, weight: Tensor) -> Packed:
        num_rows = len(weight)
        groups = weight.view(num_rows, -1, 32)
        exponent = groups.abs().amax(-1).log2().floor().int() - 2
        scaled = groups / torch.exp2(exponent.float()).unsqueeze(-1)
        code = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1)
        values = table[code] * scaled.sign() * torch.exp2(exponent.float()).unsqueeze(-1)
        code = torch.where(scaled < 0, code + 8, code)
        pairs = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
        scales = (exponent + 127).to(torch.uint8)
        names = ("weight_packed", "weight_scale") if is_packed else ("weight_blocks", "weight_scales")
        stored = pairs.view(num_rows, -1) if is_packed else pairs
        return Packed(dict(zip(names, (stored, scales), strict=True)), values.view_as(weight))

    return pack
