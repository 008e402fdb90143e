"""Logits processors: change a row's logits before sampling, with vLLM's meanings and in its order.

    grammar mask · allowed ids · bad words · no end before min_tokens · bias · penalties

Each of the first four sets logits to -inf, which later ones don't undo. kernels/cpu/logits_processors.h does the same.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.logits_processor_inputs import LogitsProcessors, WordArray
from pipeline.kernels.penalties import penalize
from pipeline.kernels.step_inputs import IntArray


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


def allows_any(processors: LogitsProcessors, num_known: int, vocab_size: int) -> bool:
    """Whether a row's logits processors leave any id, given its first `num_known` ids."""
    logits = torch.zeros(vocab_size)
    apply_logits_processors(logits, processors, num_known)
    return bool((logits > -torch.inf).any())


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
