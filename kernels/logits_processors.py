"""Logits processors: change a row's logits before sampling, with vLLM's meanings and in its order.

    grammar mask · allowed ids · bad words · no end before min_tokens · bias · penalties

Each of the first four sets logits to -inf, which later ones don't undo. kernels/cpu/logits_processors.h does the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.penalties import penalize
from pipeline.kernels.step_inputs import IntArray

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
WordArray = np.ndarray[Any, np.dtype[np.uint32]]

NO_IDS: IntArray = np.zeros(0, np.int32)
NO_VALUES: FloatArray = np.zeros(0, np.float32)

LOGITS_PROCESSORS = np.dtype(
    [
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("num_prompt", "<i4"),
        ("ids", "<u8"),
        ("allowed", "<u8"),
        ("bias_ids", "<u8"),
        ("bias_values", "<u8"),
        ("enders", "<u8"),
        ("runs", "<u8"),
        ("num_bias", "<i4"),
        ("num_enders", "<i4"),
        ("min_tokens", "<i4"),
        ("num_runs", "<i4"),
    ]
)
"""`LogitsProcessors` of kernels/cpu/logits_processors.h: numbers, and addresses of the arrays of the class below."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitsProcessors:
    """The logits processors of a row. All ids are below V."""

    ids: IntArray
    """The row's ids; a step knows the first `num_known`."""
    num_prompt: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    """Parallel; added to their logits."""
    allowed: WordArray | None = None
    """[ceil(V / 32)]; as `bits_of` makes it"""
    runs: IntArray = field(default_factory=lambda: NO_IDS)
    """Bad words, concatenated: each is its number of ids, then the ids."""
    num_runs: int = 0
    enders: IntArray = field(default_factory=lambda: NO_IDS)
    """Ids that are not sampled before the output has `min_tokens` ids. No duplicates."""
    min_tokens: int = 0

    def write(self, to: "np.ndarray[Any, Any]", place: int) -> None:
        """Write it to an array of `LOGITS_PROCESSORS` for the CPU library; valid while this object lives."""
        to[place] = (
            *(self.repetition, self.presence, self.frequency, self.num_prompt),
            self.ids.ctypes.data,
            0 if self.allowed is None else self.allowed.ctypes.data,
            *(array.ctypes.data for array in (self.bias_ids, self.bias_values, self.enders, self.runs)),
            *(len(self.bias_ids), len(self.enders), self.min_tokens, self.num_runs),
        )


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def bits_of(ids: IntArray, vocab_size: int) -> WordArray:
    """A mask that allows these ids: bit v % 32 of word v / 32, as llguidance writes it."""
    bits = np.zeros(num_words(vocab_size) * 32, np.uint8)
    bits[ids] = 1
    words: WordArray = np.packbits(bits, bitorder="little").view("<u4")
    return words


def pack_runs(runs: Sequence[Sequence[int]], vocab_size: int) -> tuple[IntArray, int]:
    """Bad words in the format of `LogitsProcessors.runs`, and their number. Words that are empty or have ids outside
    the vocabulary are left out."""
    kept = [run for run in runs if run and min(run) >= 0 and max(run) < vocab_size]
    return np.array([number for run in kept for number in (len(run), *run)], np.int32), len(kept)


def mask(logits: Tensor, allowed: WordArray) -> None:
    """Set the logits [V] of ids that `allowed` excludes to -inf."""
    bits = np.unpackbits(allowed.view(np.uint8), count=len(logits), bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


def apply_logits_processors(
    logits: Tensor, processors: LogitsProcessors, num_known: int, grammar: WordArray | None = None
) -> None:
    """Apply a row's logits processors to its logits [V] in place, given its first `num_known` ids. `grammar` is the
    mask that was applied: if it allows only the end, `min_tokens` does not forbid that."""
    output = processors.ids[processors.num_prompt : num_known]
    if processors.allowed is not None:
        mask(logits, processors.allowed)
    forbidden = forbidden_by(processors.runs, processors.num_runs, output)
    if len(output) < processors.min_tokens and (grammar is None or not allows_only(grammar, processors.enders)):
        forbidden += processors.enders.tolist()
    if forbidden:
        logits[torch.tensor(forbidden, device=logits.device)] = -torch.inf
    if len(processors.bias_ids):
        logits[torch.from_numpy(processors.bias_ids).long()] += torch.from_numpy(processors.bias_values).to(
            logits.device
        )
    if (processors.repetition, processors.presence, processors.frequency) != (1, 0, 0):
        known = torch.from_numpy(processors.ids[:num_known]).to(logits.device)
        penalize(logits, known, processors.num_prompt, processors.repetition, processors.presence, processors.frequency)


def allows_only(grammar: WordArray, ids: IntArray) -> bool:
    """Whether a grammar allows only ids of this list."""
    bits = np.unpackbits(grammar.view(np.uint8), bitorder="little")
    bits[ids] = 0
    return not bits.any()


def forbidden_by(runs: IntArray, num_runs: int, output: IntArray) -> list[int]:
    """The last id of each bad word, if the output ends with the word's other ids."""
    forbidden, begin = [], 0
    for _ in range(num_runs):
        *before, last = runs[begin + 1 : begin + 1 + int(runs[begin])].tolist()
        begin += 1 + int(runs[begin])
        if len(before) <= len(output) and output[len(output) - len(before) :].tolist() == before:
            forbidden.append(last)
    return forbidden
