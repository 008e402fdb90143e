"""The schemes that tests convert: a config, a packer, and what must come out."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.stages.prepare.quantized import packers
from tests.stages.prepare.quantized.packers import Packer


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    pack: Packer
    format: str
    """Of all packed matrices."""
    error: float = 0.0
    """Largest error of a value, in units of the largest value of its row."""
    shape: dict[str, int] = field(default_factory=dict)
    """Changes of the tiny model's config."""


def gptq(bits: int, group: int, sym: bool = True, **keys: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False, **keys}


def auto_round(layout: str, bits: int = 4, sym: bool = True) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": bits,
        "group_size": 32,
        "sym": sym,
        "data_type": "int",
        "packing_format": layout,
        "block_name_to_quantize": "model.layers",
    }


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def bnb(kind: str) -> dict[str, Any]:
    four = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    eight = {"load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return {"quant_method": "bitsandbytes", **(eight if kind == "int8" else four)}


HALF = 2.0**-11
"""The largest relative error of float16."""
BF16 = 2.0**-8
"""The same of bfloat16."""

V2: dict[str, Any] = {"checkpoint_format": "gptq_v2"}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Columns for blocks of fp8."""
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}

CASES: dict[str, Case] = {
    "gptq": Case(gptq(4, 32), packers.gptq(4, 32), "q4_0"),
    "gptq, a group per row": Case(gptq(4, -1), packers.gptq(4, -1), "q4_0"),
    "gptq v2": Case(gptq(4, 32, **V2), packers.gptq(4, 32, v1=False), "q4_0"),
    "gptq asym": Case(gptq(4, 32, False), packers.gptq(4, 32, symmetric=False), "q4_1", HALF),
    "gptq v2 asym": Case(gptq(4, 32, False, **V2), packers.gptq(4, 32, symmetric=False, v1=False), "q4_1", HALF),
    "gptq 8": Case(gptq(8, 32), packers.gptq(8, 32), "q8_0"),
    "gptq 8 asym": Case(gptq(8, 32, False), packers.gptq(8, 32, symmetric=False), "bf16", BF16),
    "gptq 3": Case(gptq(3, 32), packers.gptq(3, 32), "q4_0"),
    "gptq 3 asym": Case(gptq(3, 32, False), packers.gptq(3, 32, symmetric=False), "q4_1", HALF),
    "gptq 2": Case(gptq(2, 32), packers.gptq(2, 32), "q4_0"),
    "gptq, groups of 16": Case(gptq(4, 16), packers.gptq(4, 16), "bf16", BF16),
    "awq": Case(AWQ, packers.awq(32), "q4_1", HALF),
    "auto-round": Case(auto_round("auto_round:auto_gptq"), packers.gptq(4, 32, g_idx=False), "q4_0"),
    "auto-round asym": Case(
        auto_round("auto_round", sym=False), packers.gptq(4, 32, symmetric=False, v1=False, g_idx=False), "q4_1", HALF
    ),
    "auto-round awq": Case(auto_round("auto_round:auto_awq"), packers.awq(32, symmetric=True), "q4_0"),
    "packed": Case(compressed("pack-quantized", num_bits=4, group_size=32), packers.pack_quantized(4, 32), "q4_0"),
    "packed asym": Case(
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
        packers.pack_quantized(4, 32, symmetric=False),
        "q4_1",
        HALF,
    ),
    "packed 8": Case(
        compressed("pack-quantized", num_bits=8, strategy="channel"), packers.pack_quantized(8, -1), "q8_0"
    ),
    "int8": Case(compressed("int-quantized", num_bits=8, strategy="channel"), packers.int_quantized(), "q8_0"),
    "int8, one scale": Case(
        compressed("int-quantized", num_bits=8, strategy="tensor"), packers.int_quantized(per_row=False), "q8_0"
    ),
    "int8 asym": Case(
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        packers.int_quantized(symmetric=False),
        "bf16",
        BF16,
    ),
    "compressed fp8": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        packers.fp8(1, None, name="weight_scale", scale_dtype=torch.bfloat16),
        "bf16",
        BF16,
    ),
    "compressed fp8, blocks": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 40]),
        packers.fp8(48, 40, name="weight_scale"),
        "bf16",
        BF16,
    ),
    "compressed mxfp4": Case(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        packers.mxfp4(is_packed=True),
        "q8_0",
    ),
    "nf4": Case(bnb("nf4"), packers.bnb4("nf4"), "bf16", BF16),
    "nf4, quantized scales": Case(bnb("nf4"), packers.bnb4("nf4", nested=True), "bf16", BF16),
    "fp4": Case(bnb("fp4"), packers.bnb4("fp4"), "bf16", BF16),
    "llm.int8": Case(bnb("int8"), packers.llm_int8, "q8_0", HALF),
    "fp8": Case(FP8, packers.fp8(None, None, name="weight_scale"), "bf16", BF16),
    "fp8, blocks": Case({**FP8, "weight_block_size": [48, 40]}, packers.fp8(48, 40), "bf16", BF16),
    "fp8, powers of two": Case(
        {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        packers.fp8(32, 32, scale_dtype=torch.float8_e8m0fnu),
        "bf16",
    ),
    "fp8, kept": Case(FP8, packers.fp8(None, None, name="weight_scale"), "fp8", shape=WIDE),
    "fp8, kept blocks": Case({**FP8, "weight_block_size": [48, 128]}, packers.fp8(48, 128), "fp8", shape=WIDE),
    "fbgemm, kept": Case({"quant_method": "fbgemm_fp8"}, packers.fp8(1, None, name="weight_scale"), "fp8", shape=WIDE),
    "compressed fp8, kept": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        packers.fp8(1, None, name="weight_scale", scale_dtype=torch.bfloat16),
        "fp8",
        shape=WIDE,
    ),
    "fp8, wide columns with small blocks": Case(
        {**FP8, "weight_block_size": [32, 64]}, packers.fp8(32, 64), "bf16", BF16, shape=WIDE
    ),
    "fp8 e5m2": Case(FP8, packers.fp8(None, None, name="weight_scale", kind=torch.float8_e5m2), "bf16", BF16),
    "fbgemm": Case({"quant_method": "fbgemm_fp8"}, packers.fp8(1, None, name="weight_scale"), "bf16", BF16),
    "mxfp4": Case({"quant_method": "mxfp4"}, packers.mxfp4(), "q8_0"),
}
