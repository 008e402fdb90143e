"""Counts the tokens of the reasoning in a reply, for its usage."""

import numpy as np

from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import ReasoningFormat, ReasoningStage

NUM_FIRST = 16
"""The mark that begins the reasoning is one of the first ids, if there is one."""


def num_reasoning_tokens(formats: ChatFormats, sequence: SequenceOutput) -> int | None:
    """Output tokens up to the mark that ends the reasoning, or all if there is none, of a reply that has reasoning.
    None if the mark is not one token."""
    form = formats.reasoning
    if form is None or (mark := formats.added.get(form.end)) is None:
        return None
    found = np.flatnonzero(_ids_of(sequence) == mark.id)
    return int(found[0]) + 1 if found.size else sequence.num_ids


def of_chat(formats: ChatFormats, prompt_request: PromptRequest) -> int | None:
    """Those of all choices of a chat. None if they are not known."""
    form, num = formats.reasoning, 0
    if form is None:
        return None
    for sequence in prompt_request.sequences:
        if (its := num_reasoning_tokens(formats, sequence)) is None:
            return None
        num += its if _reasons(formats, form, prompt_request.tail, sequence) else 0
    return num


def _reasons(formats: ChatFormats, form: ReasoningFormat, tail: str | None, sequence: SequenceOutput) -> bool:
    stage = form.default_stage if tail is None else form.stage_of(tail)
    if stage is not ReasoningStage.OPTIONAL:
        return stage is ReasoningStage.OPEN
    starts = [token.id for text, token in formats.added.items() if any(one.startswith(text) for one, _ in form.pairs)]
    return bool(np.isin(_ids_of(sequence)[:NUM_FIRST], starts).any())


def _ids_of(sequence: SequenceOutput) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.frombuffer(bytes(sequence.ids), "<i4")
