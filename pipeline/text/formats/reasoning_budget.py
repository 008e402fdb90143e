"""The limit of a reply's reasoning, in the marks of the model's format. Pure."""

import re
from collections.abc import Callable, Iterable

import numpy as np

from pipeline.runtime.messages import ReasoningBudget
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import ReasoningFormat, ReasoningStage

SPECIAL = b"\xff"
"""Stands before a special token in a mark: see `ReasoningBudget`."""
LINES = r"(?:\\n|\n)*"
"""Line ends as a template writes them, within a string or not."""


def budget_of(
    formats: ChatFormats,
    stage: ReasoningStage,
    num_tokens: int,
    message: str,
    encode: Callable[[str], list[int]],
    *,
    has_tools: bool = False,
) -> ReasoningBudget | None:
    """The budget of a reply that begins at this stage: at most `num_tokens` ids of reasoning, then `message` and the
    end mark as the template writes it. None if there will be no reasoning. `encode` makes ids of a text with special
    tokens that stands behind another text."""
    form = formats.reasoning
    if form is None or stage is ReasoningStage.OVER:
        return None
    specials = sorted((token.content for token in formats.added.values() if token.special), key=len, reverse=True)
    if form.messages is not None:
        closing = f"{form.end}{form.messages.begin}" + ("" if has_tools else form.messages.answer)
    else:
        closing = end_of(form, formats.template)
    return ReasoningBudget(
        num_tokens,
        _marks((start for start, _ in form.pairs), specials),
        _marks((*(end for _, end in form.pairs), *form.unclosed_before), specials),
        np.array(encode(message + closing), "<i4").tobytes(),
        stage is ReasoningStage.OPEN,
        form.messages is not None,
    )


def end_of(form: ReasoningFormat, template: str) -> str:
    """The end mark with the line ends around it, as the chat template writes them behind reasoning."""
    start, end = form.pair_of(template)
    found = [
        match[0]
        for match in re.finditer(f"{LINES}{re.escape(end)}{LINES}", template)
        if not template[: match.start()].endswith(start.rstrip())  # reasoning that is empty
    ]
    return max(found, key=len, default=end).replace("\\n", "\n")


def _marks(texts: Iterable[str], specials: list[str]) -> list[bytes]:
    """Texts in UTF-8, with their special tokens marked."""
    pattern = re.compile("|".join(map(re.escape, specials)) if specials else r"(?!)")
    return [b"".join(_pieces(text, pattern)) for text in dict.fromkeys(texts)]


def _pieces(text: str, specials: re.Pattern[str]) -> Iterable[bytes]:
    begin = 0
    for match in specials.finditer(text):
        yield text[begin : match.start()].encode()
        yield SPECIAL + match[0].encode()
        begin = match.end()
    yield text[begin:].encode()
