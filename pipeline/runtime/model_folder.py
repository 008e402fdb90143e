"""The model folder that prepare writes for the other stages.

model.json            `ModelConfig`, below
tokenizer.json        for the `tokenizers` package
chat_template.jinja   missing if the model has none
chat_template.tool_use.jinja   for chats with tools, if the model has a separate template
weights               safetensors files, named by `ModelConfig.weight_files` (absolute, or relative to the folder)
weights.panels        the matrices as the CPU library reads them; execute writes it after the first start

A quantized matrix [rows, columns] is stored as U8 [rows, bytes per row], in the block format of .gguf files. The
format, such as "q8_0" or "q4_k", is in the file's metadata under `format_key(name of the tensor)`.
"""

import fcntl
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

CONVERTED = "converted.txt"
"""A line that says what the source's matrices became. Only in prepared folders in which some have another format."""
PANELS = "weights.panels"
"""Belongs to execute, see stages/execute/cpu/panel_file.py. A folder is complete without it."""
STAMP = "complete.json"
"""The file that prepare writes last."""

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The RoPE scaling of Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder's configuration. Tensors in the weight files have the names and layout of Hugging Face (rotary halves,
    not interleaved pairs)."""

    format: Literal[2] = 2
    name: str
    """The model's name for clients, unless `served_model_name` is set."""
    architecture: Architecture
    """Selects the code that computes the model."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Number of rows of the embedding."""
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    sliding_window: int | None = None
    """Number of positions that attention sees, including its own; None: all up to its own."""
    sliding_layers: list[int] | None = None
    """The layers with the window; None: all layers."""
    tie_embeddings: bool
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys get an RMS norm before RoPE."""
    eos_ids: list[int]
    bos_id: int | None = None
    add_bos: bool = False
    """Whether the tokenizer's post-processor adds the BOS token; the chat template needs to know."""
    weight_files: list[str]

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer; None if it has none."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    @classmethod
    def load(cls, folder: str | Path) -> "ModelConfig":
        """Read `model.json`. Raises FileNotFoundError or msgspec.ValidationError; either is a bug in prepare."""
        return msgspec.json.decode((Path(folder) / "model.json").read_bytes(), type=cls)

    def save(self, folder: str | Path) -> None:
        (Path(folder) / "model.json").write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    def weight_paths(self, folder: str | Path) -> list[Path]:
        return [Path(folder) / name for name in self.weight_files]


def format_key(tensor: str) -> str:
    """The safetensors metadata key for the format of a quantized tensor."""
    return f"format:{tensor}"


def hold(folder: Path) -> BinaryIO | None:
    """Mark the folder as used, so that `pipeline cache prune` keeps it, until the file is closed or this process ends.
    Returns None if it can't be marked, as on a file system without locks."""
    try:
        file = (folder / STAMP).open("rb")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def is_held(folder: Path) -> bool:
    """Whether a process has marked the folder with `hold`."""
    try:
        with (folder / STAMP).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
