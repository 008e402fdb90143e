"""LoRA adapters in llama.cpp's format: what convert_lora_to_gguf.py makes of a PEFT adapter.

The keys are `general.type = adapter`, `adapter.type = lora` and `adapter.lora.alpha`; the tensors
`blk.N.attn_q.weight.lora_a` [rank, inputs] and `.lora_b` [outputs, rank]. The factor of B·A is alpha / rank, or 1 if
alpha is 0 (`get_scale` in llama-adapter.h). As in files of models, rows of q and k are in another order for some
architectures (`LlamaModel.permute`): this module reverses that.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from pipeline.lora.adapter_file import Target
from pipeline.lora.gguf_file import SmallGguf
from pipeline.lora.peft_config import AdapterError, NotAnAdapter
from pipeline.lora.tensors import FloatMatrix, scaled
from pipeline.runtime.files.regular_files import RegularFile
from pipeline.runtime.model.model_config import ModelConfig, Piece

SUFFIX = ".gguf"
PERMUTED = frozenset({"arcee", "granite", "llama", "olmo", "smollm3"})
"""Architectures whose q and k are in the order for rotary embeddings of adjacent pairs."""
PLAIN = frozenset(
    {
        *("bloom", "chatglm", "cohere2", "command-r", "ernie4_5", "ernie4_5-moe", "exaone4", "falcon"),
        *("gemma", "gemma2", "gemma3"),
        *(
            "glm4",
            "glm4moe",
            "gpt-oss",
            "gptneox",
            "mpt",
            "nemotron",
            "olmo2",
            "olmoe",
            "phi2",
            "phi3",
            "qwen2",
            "qwen2moe",
        ),
        *("apertus", "qwen3", "qwen3moe", "seed_oss", "stablelm", "starcoder2"),
    }
)
"""Those whose order is Hugging Face's. GPT-2 and the first StarCoder are missing: their PEFT adapters are refused,
too."""
TARGETS: dict[str, Target] = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_NAME = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<module>[a-z_]+)\.weight\.lora_(?P<part>[ab])\Z")

Part = tuple[int, Target, Piece]
"""A projection that a module holds, or a part of it: layer, target, and its rows."""


class Module(NamedTuple):
    """A module's matrices, which are read and widened only when they are needed."""

    name: str
    parts: list[Part]
    """The projections in it."""
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    read: Callable[[], tuple[FloatMatrix, FloatMatrix]]
    """A, and B with the scaling. Raises AdapterError."""


class GgufAdapter:
    """An adapter's file. Raises AdapterError if it can't be served, NotAnAdapter if it is something else, OSError if it
    can't be read."""

    def __init__(self, file: RegularFile, check: Callable[[Self], None] = lambda _: None) -> None:
        """`check` accepts the modules, or raises AdapterError, before the tensors are read."""
        self.path = file.path

        def check_tensors(tensors: SmallGguf) -> None:
            self._file = tensors
            check(self)

        self._file = SmallGguf(file, self._take_keys, check_tensors)
        self.data = self._file.data

    def _take_keys(self, keys: dict[str, Any]) -> None:
        path = self.path
        for key, value in (("general.type", "adapter"), ("adapter.type", "lora")):
            if keys.get(key) != value:
                kind = NotAnAdapter if key == "general.type" else AdapterError
                raise kind(f"{path}: {key} is {str(keys.get(key))[:40]!r}; supported is {value!r}")
        if "adapter.alora.invocation_tokens" in keys:
            raise AdapterError(f"{path}: adapter.alora.invocation_tokens is set, which is not supported")
        self._architecture = keys.get("general.architecture")
        if self._architecture not in PERMUTED | PLAIN:
            raise AdapterError(
                f"{path}: general.architecture is {str(self._architecture)[:40]!r}, whose adapters are not supported"
            )
        alpha = keys.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise AdapterError(f"{path}: adapter.lora.alpha is {str(alpha)[:40]}")
        self._alpha = float(alpha)

    def modules(self, model: ModelConfig) -> Iterator[Module]:
        """Each module, as the header describes it. Raises AdapterError."""
        found: dict[tuple[int, str], dict[str, str]] = {}
        for name in self._file.names:
            match = _NAME.match(name)
            if match is None:
                raise AdapterError(
                    f"{self.path}: {name[:200]!r} is a tensor that is not part of a LoRA adapter: it is not supported"
                )
            found.setdefault((int(match["layer"]), match["module"]), {})[match["part"]] = name
        if not found:
            raise AdapterError(f"{self.path}: it has no tensors of a LoRA adapter")
        for (layer, module), names in found.items():
            where = f"blk.{layer}.{module}"
            parts = self._parts(layer, module, model)
            if not parts:
                raise AdapterError(
                    f"{self.path}: {where!r} is not a projection of this model's layers that adapters may change"
                )
            if missing := {"a", "b"} - set(names):
                raise AdapterError(f"{self.path}: {where!r} has no lora_{missing.pop()}")
            a, b = self._file.shape(names["a"]), self._file.shape(names["b"])
            if a[0] != b[1]:
                raise AdapterError(f"{self.path}: {where!r} has matrices of the shapes {list(a)} and {list(b)}")
            head_dim = model.head_dim if self._architecture in PERMUTED and module in ("attn_q", "attn_k") else 0
            if head_dim and b[0] % head_dim:
                raise AdapterError(f"{self.path}: {where!r} has {b[0]} outputs, not whole heads of {head_dim}")
            yield Module(where, parts, a, b, partial(self._read, names["a"], names["b"], head_dim))

    def _read(self, a_name: str, b_name: str, head_dim: int) -> tuple[FloatMatrix, FloatMatrix]:
        """A, and B with the scaling; rows of heads of `head_dim` get Hugging Face's order, unless it is 0."""
        a, b = self._file.matrix(a_name), self._file.matrix(b_name)
        if head_dim:
            b = _unpermuted(b, head_dim)
        return a, scaled(b, self._alpha / len(a) if self._alpha else 1.0)

    def _parts(self, layer: int, module: str, model: ModelConfig) -> list[Part]:
        if layer >= model.num_layers:
            return []
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        if module == "attn_qkv":
            q, k = Piece("", end=queries), Piece("", begin=queries, end=queries + keys)
            v = Piece("", begin=queries + keys)  # all that is left: more rows are refused for their number
            return [(layer, "q_proj", q), (layer, "k_proj", k), (layer, "v_proj", v)]
        if module not in TARGETS or (module.startswith("ffn") and model.has_experts(layer)):
            return []
        if module == "ffn_gate" and not model.gated:
            return []
        if module == "ffn_up" and model.gated and self._is_stacked(layer, model):
            inner = model.intermediate_size
            return [
                (layer, "gate_proj", Piece("", end=inner)),
                (layer, "up_proj", Piece("", begin=inner)),
            ]
        return [(layer, TARGETS[module], Piece(""))]

    def _is_stacked(self, layer: int, model: ModelConfig) -> bool:
        """Whether `ffn_up` holds gate and up: then B has the rows of both."""
        name = f"blk.{layer}.ffn_up.weight.lora_b"
        return name in self._file.names and self._file.shape(name)[0] == 2 * model.intermediate_size


def _unpermuted(b: FloatMatrix, head_dim: int) -> FloatMatrix:
    """B with rows in Hugging Face's order. For a head of size 6 the file has rows 0 3 1 4 2 5."""
    rows = np.arange(len(b)).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    return b[rows]
