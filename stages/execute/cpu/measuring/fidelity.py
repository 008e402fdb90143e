"""Measures how far the next-token distributions of the CPU's kernels are from those of the same weights in float32.

The reference is the torch program, which dequantizes the weights: here each matrix whenever it is multiplied, because
all of them in float32 take several times the memory of the file. It and the measured programs stay loaded together.
They compute one chunk of text after the other, so that only the logits of one chunk are in memory.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from pipeline.cli.check.cases import Logits
from pipeline.cli.check.chunks import CHUNK_SIZE, COUNTED
from pipeline.cli.check.divergence import Divergence
from pipeline.cli.check.kl_base import KlBaseFile
from pipeline.config.sections.stages import ExecuteSettings
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.backend import Library, make_program
from pipeline.stages.execute.cpu.measuring.streamed_program import streamed_program
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.program import Program, ProgramPlan
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.kv import kv_block_bytes
from pipeline.stages.execute.measuring.planned import num_blocks, row_add, step, take

FEW_BITS = ("q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
"""The formats of 4 to 6 bits, for which execute.activations has an effect."""
K_QUANTS = ("q4_k", "q5_k", "q6_k")
WITH_BLOCKS = ("avx512_bf16", "avx512", "avx2")
"""Instruction sets that multiply K-quants with activations of 16 bits (`PREFERS_BLOCKS` in matrix.h)."""
WITH_BF16 = ("amx", "avx512_bf16")
"""Instruction sets whose matmuls with bf16 weights round activations to bf16. The others keep float32."""

Report = Callable[[int], None]
"""Called with the number of chunks that are done."""


@dataclass(slots=True)
class MeasuredProgram:
    """One program, and how far it is from the reference."""

    weights: str
    """Formats of the stored matrices, such as `q8_0+q4_1`."""
    activations: str
    """Precision of the activations for each of these formats, such as `int16+int12`; once if all are the same."""
    divergence: Divergence = field(default_factory=Divergence)
    kv_cache: str = ""
    """The type of the KV cache, and what it is compared with if that is not float32. Empty for bfloat16."""


@dataclass(slots=True)
class MeasuredFidelity:
    kernels: str
    """The measured back end, such as `cpu, amx`."""
    programs: list[MeasuredProgram]


def measure(
    settings: Settings,
    folder: Path,
    chunks: Sequence[Sequence[int]],
    report: Report,
    base: KlBaseFile | None = None,
) -> MeasuredFidelity:
    """Compare the kernels of `execute.kernels` with float32 over chunks of `CHUNK_SIZE` ids. With `execute.kv_dtype`
    int8, they are measured with a KV cache in bfloat16 and in 8 bits, and the second is compared with the first too.
    The reference's logits go to `base`.

    Raises UserError if the model can't run with these settings, or if its logits in float32 aren't finite.
    """
    config = ModelConfig.load(folder)
    if config.has_states:
        # The rows that share a chunk's blocks would need its state at each position.
        raise UserError(
            f"--fidelity is not supported for {config.name} ({config.architecture}): it has recurrent layers"
        )
    if config.max_position < CHUNK_SIZE:
        raise UserError(
            f"the model's context is {config.max_position} tokens, but the measurement takes {CHUNK_SIZE} at a time"
        )
    kernels = settings.execute.kernels
    with ExitStack() as stack:
        reference = stack.enter_context(closing(load(settings, folder, "float32", "torch", make=streamed_program)))
        measured = [stack.enter_context(closing(load(settings, folder, "bfloat16", kernels)))]
        programs = [_program(measured[0])]
        if isinstance(measured[0].program, NativeProgram) and set(FEW_BITS) & set(_formats(measured[0])):
            other = "int12" if measured[0].activations == "int8" else "int8"
            measured.append(stack.enter_context(closing(load(settings, folder, "bfloat16", kernels, other))))
            programs.append(_program(measured[1]))
        against_bf16: MeasuredProgram | None = None
        if (kv_dtype := settings.execute.kv_dtype) != "auto":
            measured.append(
                stack.enter_context(closing(load(settings, folder, "bfloat16", kernels, kv_dtype=kv_dtype)))
            )
            programs.append(_program(measured[-1], f"{kv_dtype} KV cache"))
            against_bf16 = _program(measured[-1], f"{kv_dtype} against bf16 KV cache")
        for i, chunk in enumerate(chunks):
            expected = logits_of(reference, chunk)
            if not np.isfinite(expected).all():
                raise UserError(f"the model's logits in float32 are not all finite in chunk {i + 1} of the text")
            if base is not None:
                base.add(chunks, expected)
            found = [logits_of(runner, chunk) for runner in measured]
            for logits, program in zip(found, programs, strict=True):
                program.divergence.add(expected, logits)
            if against_bf16 is not None:
                against_bf16.divergence.add(found[0], found[-1])
            report(i + 1)
        return MeasuredFidelity(measured[0].name, programs if against_bf16 is None else [*programs, against_bf16])


def load(
    settings: Settings,
    folder: Path,
    dtype: str,
    kernels: str,
    activations: str = "auto",
    kv_dtype: str = "auto",
    make: Callable[[Library | None, ProgramPlan], Program] = make_program,
) -> CpuRunner:
    """A runner with memory for one chunk, which keeps its logits. Raises UserError if it can't run here."""
    execute = msgspec.structs.replace(
        settings.execute, dtype=dtype, kernels=kernels, activations=activations, kv_dtype=kv_dtype
    )
    runner = CpuRunner(_settings(settings, execute, ModelConfig.load(folder)), folder, make=make)
    runner.program.keep_logits()
    return runner


def logits_of(runner: CpuRunner, chunk: Sequence[int]) -> Logits:
    """The logits of a chunk's `COUNTED` positions: [positions, vocab_size]. They are valid until the runner's next
    step."""
    blocks = range(num_blocks(len(chunk)))
    prompt = chunk[: COUNTED.stop]
    runner.step(step([(0, 0, len(prompt), False)], [row_add(0, prompt, blocks)]), take)
    # A step returns the logits of a row's last position only, so that each position is a row over the same blocks. It
    # computes and writes its own keys and values once more.
    rows = range(1, 1 + len(COUNTED))
    adds = [
        row_add(row, chunk[: position + 1], blocks[: num_blocks(position + 1)])
        for row, position in zip(rows, COUNTED, strict=True)
    ]
    entries = [(row, position, 1, True) for row, position in zip(rows, COUNTED, strict=True)]
    runner.step(step(entries, adds), take)
    logits = runner.logits()
    runner.step(step(drops=[0, *rows]), take)
    return logits


def _settings(settings: Settings, execute: ExecuteSettings, config: ModelConfig) -> Settings:
    """Settings with just enough memory for one chunk."""
    replace = msgspec.structs.replace
    execute = replace(execute, hybrid_kv_cache_manager=False)
    return replace(
        settings,
        max_model_len=CHUNK_SIZE,
        execute=replace(execute, kv_cache_bytes=CHUNK_SIZE // BLOCK_SIZE * kv_block_bytes(execute, config)),
        schedule=replace(
            settings.schedule,
            max_num_seqs=1 + len(COUNTED),
            max_num_batched_tokens=CHUNK_SIZE,
            max_num_prefill_tokens=CHUNK_SIZE,
        ),
    )


def _formats(runner: CpuRunner) -> list[str]:
    return runner.weight_formats.split("+")


def _program(runner: CpuRunner, kv_cache: str = "") -> MeasuredProgram:
    used = [_activations(runner, format) for format in _formats(runner)]
    form = used[0] if len(set(used)) == 1 else "+".join(used)
    return MeasuredProgram(runner.weight_formats, form, kv_cache=kv_cache)


def _activations(runner: CpuRunner, format: str) -> str:
    if not isinstance(runner.program, NativeProgram):
        return "bf16"
    if format == "bf16":
        return "bf16" if runner.program.isa in WITH_BF16 else "f32"
    if format in K_QUANTS and runner.activations == "int12" and runner.program.isa in WITH_BLOCKS:
        return "int16"
    return runner.activations if format in FEW_BITS else "int16"
