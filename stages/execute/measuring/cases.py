"""What `pipeline profile execute` measures, and on which machine: the same for every device."""

import platform
from collections.abc import Sequence

from pipeline.cli.profile.results import Case, Floor
from pipeline.errors import UserError
from pipeline.kernels.cpu.isa import cpuinfo
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime.model.model_config import ModelConfig


def check_positions(cases: Sequence[Case], config: ModelConfig, most: int) -> None:
    """Raises UserError if a case's sequences have more than `most` tokens."""
    for case in cases:
        if case.context > most:
            option = "--prefill" if case.phase == "prefill" else "--context"
            raise UserError(f"{option} {case.context}: the sequences of {config.name} have at most {most} tokens")


def num_blocks_of(case: Case) -> int:
    """Blocks of all of a case's sequences."""
    return case.num_seqs * -(-case.context // BLOCK_SIZE)


def floor_of(least_s: float, seconds: float) -> Floor | None:
    """A lower bound and its share of a time; None if either is zero."""
    return Floor(least_s * 1e3, least_s / seconds) if least_s and seconds else None


def cpu_name() -> str:
    """The CPU's model name, else its architecture."""
    for line in cpuinfo().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
