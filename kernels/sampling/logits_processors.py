"""Logits processors: change a row's logits before sampling, with vLLM's meanings and in its order.

    grammar mask · allowed ids · bad words · no end before min_tokens · bias · penalties

Each of the first four sets logits to -inf, which later ones don't undo. kernels/cpu/logits_processors.h does the same.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.sampling.logits_processor_inputs import BEGIN, LogitsProcessors, WordArray
from pipeline.kernels.sampling.penalties import penalize
from pipeline.kernels.step_inputs import IntArray

RUN = 16
"""Ids of a bad word that are compared together."""


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
    """The last id of each bad word, if the output ends with the word's other ids. BEGIN stands before the output."""
    said_before = np.concatenate(([BEGIN], output))
    ends = runs[1 : num_runs + 1]
    num_before = ends - runs[:num_runs] - 1
    candidates = np.flatnonzero(num_before <= len(said_before))
    found = [candidates[:0]]
    for begin in itertools.count(0, RUN):
        # Those that match so far; of these, `begin` ids are compared, from the last one back.
        found.append(candidates[num_before[candidates] <= begin])
        candidates = candidates[num_before[candidates] > begin]
        if not len(candidates):
            break
        back = begin + np.arange(RUN)
        inside = back < num_before[candidates, None]
        word = runs[np.where(inside, ends[candidates, None] - 2 - back, 0)]
        said = said_before[len(output) - np.minimum(back, len(output))]
        candidates = candidates[((word == said) | ~inside).all(axis=1)]
    forbidden: list[int] = runs[ends[np.concatenate(found)] - 1].tolist()
    return forbidden
