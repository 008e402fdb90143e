"""Whether a GPU can run a model, found out before its weights are read, in one line that says what would help."""

import importlib.util
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pipeline.config.settings import Quantization, Settings
from pipeline.errors import UserError
from pipeline.runtime.model_folder import ModelConfig, format_key
from pipeline.stages.execute.kv import gib
from pipeline.supervisor import gpu

OLDEST = (8, 0)
"""Ampere: the first with bfloat16."""
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Of bfloat16 these are 16 bytes, what a thread loads at once."""
GROUP = 128
"""Weights that have a scale together where they are made int8 or int4."""
BYTES_PER_SCALE = 2
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found."""

    torch_version: str
    is_built_for_cuda: bool
    """Whether that torch is."""
    has_triton: bool
    trouble: str = ""
    """What CUDA said where there is no GPU to be used; as below, nothing where there is one."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    """Of `total_bytes`, what nobody has."""


def require(settings: Settings, config: ModelConfig, folder: Path) -> None:
    """Raises UserError where the GPU can't run the model of a prepared folder, or there is none."""
    if gpu.is_interpreted():
        return
    problem = why_not(settings, config, look(), weight_bytes(settings, config, folder))
    if problem is not None:
        raise UserError(problem)


def look() -> Facts:
    """The facts of this machine, of its first GPU where it has some."""
    facts = Facts(torch.__version__, torch.version.cuda is not None, importlib.util.find_spec("triton") is not None)
    if not facts.is_built_for_cuda:
        return facts
    try:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
    except (RuntimeError, AssertionError) as error:
        return replace(facts, trouble=str(error).strip().partition("\n")[0])
    capability = properties.major, properties.minor
    return replace(facts, name=properties.name, capability=capability, total_bytes=total, free_bytes=free)


def why_not(settings: Settings, config: ModelConfig, facts: Facts, num_bytes: int) -> str | None:
    """Why a GPU can't run a model whose weights take `num_bytes` at least, in the user's words; None where nothing
    speaks against it. Pure."""
    asked = "execute.device is 'cuda', but"
    if not facts.is_built_for_cuda:
        return f"{asked} the torch that is installed ({facts.torch_version}) is for CPUs alone: install one for CUDA"
    if facts.trouble:
        return f"{asked} no GPU can be used ({facts.trouble}): see what nvidia-smi says, and CUDA_VISIBLE_DEVICES"
    if facts.capability < OLDEST:
        have, need = (".".join(map(str, version)) for version in (facts.capability, OLDEST))
        return f"{asked} {facts.name} is too old: it has compute capability {have}, and {need} (Ampere) is needed"
    if not facts.has_triton:
        return f"{asked} triton is not installed: it comes with torch for CUDA, or by pip install triton"
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % HEAD_DIM_STEP:
        return (
            f"{asked} {config.name} has heads of {config.head_dim} dimensions: there are kernels for multiples of "
            f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    return _why_no_room(settings, config, facts, num_bytes)


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
        return f"{needs}, and {facts.name} has {gib(facts.total_bytes)} in all: take a smaller model{smaller}"
    if num_bytes >= facts.free_bytes:
        return (
            f"{needs}, and of the {gib(facts.total_bytes)} of {facts.name} only {gib(facts.free_bytes)} are free: end "
            f"what has the rest (nvidia-smi shows it){smaller}"
        )
    if not execute.kv_cache_bytes and num_bytes >= execute.gpu_memory_utilization * facts.total_bytes:
        return (
            f"{needs}, more than execute.gpu_memory_utilization = {execute.gpu_memory_utilization:g} of the "
            f"{gib(facts.total_bytes)} of {facts.name}: raise it"
        )
    return None


def weight_bytes(settings: Settings, config: ModelConfig, folder: Path) -> int:
    """What a model's weights take on the GPU at least, by the headers of its files. Raises UserError where one is
    missing."""
    dtype: torch.dtype = getattr(torch, settings.execute.dtype)
    total = 0
    for path in config.weight_paths(folder):
        try:
            file: Any = safe_open(path, framework="pt")
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{path}: can't be read: {error}") from error
        formats = file.metadata() or {}
        for name in file.keys():  # noqa: SIM118 - the file is no dict
            if name == HEAD and config.tie_embeddings:
                continue  # nobody reads it
            shape = file.get_slice(name).get_shape()
            num = prod(shape)
            if format_key(name) in formats:
                total += num  # it has a byte for each
            elif len(shape) == 1:
                total += num * torch.float32.itemsize
            else:
                total += _matrix_bytes(num, dtype, settings.quantization)
    return total


def _matrix_bytes(num: int, dtype: torch.dtype, quantization: Quantization) -> int:
    """Of so many floats, as they are loaded."""
    match quantization:
        case "int8":
            return num + num // GROUP * BYTES_PER_SCALE
        case "int4":
            return num // 2 + num // GROUP * 2 * BYTES_PER_SCALE  # a scale and a minimum
        case _:
            return num * dtype.itemsize
