"""Checks before the weights are read that a GPU can run the model; the error is one line that says how to fix it."""

import importlib.util
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from pipeline.config.settings import Quantization, Settings
from pipeline.errors import UserError
from pipeline.kernels.stored_matrix import BLOCK_BYTES, BLOCK_COLUMNS, GPU_BLOCK_BYTES
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import format_key
from pipeline.stages.execute.kv import gib
from pipeline.stages.execute.models.features import TRITON, missing
from pipeline.stages.execute.weights import TensorFile
from pipeline.supervisor import gpu

OLDEST = (8, 0)
"""Ampere, the first architecture with bfloat16."""
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""In bfloat16 16 bytes, one load of a thread."""
GROUP = 128
"""Weights per scale in int8 and int4."""
BYTES_PER_SCALE = 2
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of the machine that matter here."""

    torch_version: str
    is_built_for_cuda: bool
    """Whether the installed torch supports CUDA."""
    has_triton: bool
    trouble: str = ""
    """CUDA's error if no GPU is usable, else empty."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    """Unused part of `total_bytes`."""
    num_gpus: int = 1
    """That this process can see."""


def require(settings: Settings, config: ModelConfig, folder: Path, rank: int = 0) -> None:
    """Raises UserError if there is no GPU for a rank, or if it can't run the model of a prepared folder."""
    if gpu.is_interpreted():
        require_features(config)
        return
    num = settings.execute.tensor_parallel
    # Nearly all weights are cut.
    problem = why_not(settings, config, look(rank), weight_bytes(settings, config, folder) // num)
    if problem is not None:
        raise UserError(problem)


def require_features(config: ModelConfig) -> None:
    """Raises UserError if the kernels lack something that a model needs."""
    if lacking := missing(config, TRITON):
        raise UserError(_lacks(config, lacking))


def look(index: int = 0) -> Facts:
    """The facts of this machine and one of its GPUs."""
    facts = Facts(torch.__version__, torch.version.cuda is not None, importlib.util.find_spec("triton") is not None)
    if not facts.is_built_for_cuda:
        return facts
    try:
        facts = replace(facts, num_gpus=torch.cuda.device_count())
        if 0 < facts.num_gpus <= index:
            return facts
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except (RuntimeError, AssertionError) as error:
        return replace(facts, trouble=str(error).strip().partition("\n")[0])
    capability = properties.major, properties.minor
    return replace(facts, name=properties.name, capability=capability, total_bytes=total, free_bytes=free)


def why_not(settings: Settings, config: ModelConfig, facts: Facts, num_bytes: int) -> str | None:
    """Why a GPU can't run a model whose weights take at least `num_bytes`, for the user; None if it can. Pure."""
    asked = "execute.device is 'cuda', but"
    if not facts.is_built_for_cuda:
        return f"{asked} the installed torch ({facts.torch_version}) supports only CPUs: install torch for CUDA"
    if facts.trouble:
        return f"{asked} no GPU is usable ({facts.trouble}): check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if (num := settings.execute.tensor_parallel) > facts.num_gpus:
        return (
            f"execute.tensor_parallel is {num}, and each rank needs a GPU of its own, but {facts.num_gpus} are "
            "visible: lower it, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if facts.capability < OLDEST:
        have, need = (".".join(map(str, version)) for version in (facts.capability, OLDEST))
        return f"{asked} {facts.name} is too old: it has compute capability {have}, but {need} (Ampere) is required"
    if not facts.has_triton:
        return f"{asked} triton is not installed: install torch for CUDA, which includes it, or run pip install triton"
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % HEAD_DIM_STEP:
        return (
            f"{asked} {config.name} has head_dim {config.head_dim}: supported are multiples of {HEAD_DIM_STEP} up to "
            f"{MAX_HEAD_DIM}"
        )
    if lacking := missing(config, TRITON):
        return _lacks(config, lacking)
    return _why_no_room(settings, config, facts, num_bytes)


def _lacks(config: ModelConfig, lacking: str) -> str:
    return (
        f"execute.device is 'cuda', but the GPU back end lacks what {config.name} ({config.architecture}) needs: "
        f"{lacking}. Set execute.device to 'cpu'"
    )


def _why_no_room(settings: Settings, config: ModelConfig, facts: Facts, num_bytes: int) -> str | None:
    execute = settings.execute
    needs = f"the weights of {config.name} take {gib(num_bytes)}"
    match settings.quantization:
        case "int4" | "q4_1":
            smaller = ""
        case "int8" | "q8_0":
            smaller = ", or set quantization to 'int4'"
        case _:
            smaller = ", or set quantization to 'int8' or 'int4'"
    if num_bytes >= facts.total_bytes:
        return f"{needs}, but {facts.name} has only {gib(facts.total_bytes)}: use a smaller model{smaller}"
    if num_bytes >= facts.free_bytes:
        return (
            f"{needs}, but of the {gib(facts.total_bytes)} of {facts.name} only {gib(facts.free_bytes)} are free: stop "
            f"the processes that use the rest (see nvidia-smi){smaller}"
        )
    if not execute.kv_cache_bytes and num_bytes >= execute.gpu_memory_utilization * facts.total_bytes:
        return (
            f"{needs}, more than execute.gpu_memory_utilization = {execute.gpu_memory_utilization:g} of the "
            f"{gib(facts.total_bytes)} of {facts.name}: raise it"
        )
    return None


def weight_bytes(settings: Settings, config: ModelConfig, folder: Path) -> int:
    """Least bytes of a model's weights on the GPU, by its files' headers. Raises UserError if a file can't be read."""
    dtype: torch.dtype = getattr(torch, settings.execute.dtype)
    head, embedding = (config.layout.find(name)[0] for name in (HEAD, "model.embed_tokens.weight"))
    total = 0
    for path in config.weight_paths(folder):
        try:
            file = TensorFile(path)
        except (OSError, ValueError, struct.error) as error:
            raise UserError(f"{path} can't be read: {error}") from error
        formats: dict[str, Any] = dict(file.metadata)
        for name, entry in file.entries.items():
            if name == head != embedding and config.tie_embeddings:
                continue  # not loaded
            shape = entry.shape
            num = prod(shape)
            format = formats.get(format_key(name))
            if format in GPU_BLOCK_BYTES:
                total += num // BLOCK_BYTES[format] * GPU_BLOCK_BYTES[format]
            elif format is not None:  # becomes floats
                total += num // BLOCK_BYTES[format] * BLOCK_COLUMNS[format] * dtype.itemsize
            elif len(shape) == 1:
                total += num * torch.float32.itemsize
            else:
                total += _matrix_bytes(num, dtype, settings.quantization)
    return total


def _matrix_bytes(num: int, dtype: torch.dtype, quantization: Quantization) -> int:
    """Bytes of `num` floats once they are loaded."""
    match quantization:
        case "int8":
            return num + num // GROUP * BYTES_PER_SCALE
        case "int4":
            return num // 2 + num // GROUP * 2 * BYTES_PER_SCALE  # a scale and a minimum
        case _:
            return num * dtype.itemsize
