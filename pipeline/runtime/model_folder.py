"""The folder that prepare leaves for the other stages: what is in it, and how to read it.

model.json            `ModelConfig`, below
tokenizer.json        for the `tokenizers` package
chat_template.jinja   absent where the model has none
chat_template.tool_use.jinja   for chats with tools, where the model has one of its own
weights               safetensors files, named by `ModelConfig.weight_files` (absolute, or relative to the folder)

A quantised matrix [rows, columns] stands in a weight file as U8 [rows, bytes of a row], in the blocks of a .gguf file;
the file's metadata say which ones ("q8_0", "q4_1", "q4_0") under `format_key(name of the tensor)`.
"""

from pathlib import Path
from typing import Literal

import msgspec

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rope scaling as Llama 3.1 does it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder's shape, in our words. Tensor names in the weight files are Hugging Face's for its architecture,
    with Hugging Face's layout (rotary halves, not interleaved pairs)."""

    format: Literal[2] = 2
    name: str
    """What clients call the model unless the settings say otherwise."""
    architecture: Architecture
    """Which code computes it. What that code must know of a model is in the fields below."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding."""
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    sliding_window: int | None = None
    """How many positions attention sees, its own among them; None: all before it."""
    sliding_layers: list[int] | None = None
    """The layers that have the window; None: every layer."""
    tie_embeddings: bool
    qkv_bias: bool = False
    """Of queries, keys and values."""
    out_bias: bool = False
    """Of attention's output."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's queries and keys go through an RMS norm before they turn."""
    eos_ids: list[int]
    bos_id: int | None = None
    add_bos: bool = False
    """The tokenizer's own post-processor already adds it where true; kept as a fact for the chat template."""
    weight_files: list[str]

    def window_of(self, layer: int) -> int | None:
        """How many positions the attention of a layer sees, None for all."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    @classmethod
    def load(cls, folder: str | Path) -> "ModelConfig":
        """Read `model.json`. Raises FileNotFoundError or msgspec.ValidationError, both of them bugs of prepare."""
        return msgspec.json.decode((Path(folder) / "model.json").read_bytes(), type=cls)

    def save(self, folder: str | Path) -> None:
        (Path(folder) / "model.json").write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    def weight_paths(self, folder: str | Path) -> list[Path]:
        return [Path(folder) / name for name in self.weight_files]


def format_key(tensor: str) -> str:
    """The key in a safetensors file's metadata of the format that a quantised tensor has."""
    return f"format:{tensor}"
