"""Scores of pairs of texts: what a cross-encoder makes of both at once, or else the cosine of their embeddings. Pure.

cross-encoder     prompts: the pairs                           score: its logit, activated
embedding model   prompts: the first texts, then the second    score: cosine
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Raw

from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import LogitActivation, Task
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.build import check_task
from pipeline.stages.gateway.parsing.chat.conversation import pair_kwargs
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.pooling import PoolingFields, check_num_inputs, pooling_request, prefix_of
from pipeline.stages.gateway.replies.pooled import activated, cosine, numbers_of


class Pairing(NamedTuple):
    """How a request's prompts become scores."""

    num_first: int
    """Prompts that are first texts; 0 if each prompt is a pair."""
    activation: LogitActivation = "identity"
    """Of a cross-encoder's logit."""


def pairing_of(num_first: int, model: str | None, limits: RequestLimits, use_activation: bool | None) -> Pairing:
    """How this model scores. Raises ApiError if it can't."""
    if "score" not in limits.tasks and "embed" in limits.tasks:
        return Pairing(num_first)
    check_task("score", model, limits)
    assert limits.pooler.classifier is not None
    return Pairing(0, "identity" if use_activation is False else limits.pooler.classifier.activation)


class ScoringFields(PoolingFields, Protocol):
    """What requests for scores can ask."""

    instruction: str | None
    chat_template_kwargs: Raw


def score_request(
    fields: ScoringFields,
    dialect: Dialect,
    pairing: Pairing,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    limits: RequestLimits,
    *,
    request_id: str | None,
    prefixes: tuple[str, str] = ("", ""),
) -> ParsedRequest:
    """A request for the scores of one text with each of the others, or of two lists in pairs. `names` are the fields of
    the texts, and `prefixes` go before them if their embeddings are compared. Raises ApiError."""
    for name, texts in zip(names, (first, second), strict=True):
        if not texts:
            raise invalid(name, f"'{name}' must not be an empty array", "invalid_value")
    if len(first) not in (1, len(second)):
        message = (
            f"'{names[0]}' must have one text, or as many as '{names[1]}', which has {len(second)}: not {len(first)}"
        )
        raise invalid(names[0], message, "invalid_value")
    kwargs = pair_kwargs(fields.chat_template_kwargs, fields.instruction)
    if kwargs and pairing.num_first:
        message = "'instruction' and 'chat_template_kwargs' need a reranker that reads pairs of texts, not embeddings"
        raise invalid("instruction", message)
    # As sentence-transformers does; a template of pairs has it as the instruction.
    default = "" if limits.pooler.pairs is not None else prefix_of(limits)
    num = len(second) + pairing.num_first
    check_num_inputs(num, names[1], limits)

    def make(most: int | None) -> list[m.Prompt]:
        if pairing.num_first:
            texts = [prefixes[0] + text for text in first] + [prefixes[1] + text for text in second]
            return [m.TextPrompt(text) for text in texts]
        firsts = [default + text for text in first]
        firsts = firsts if len(first) > 1 else firsts * len(second)
        return [m.TextPrompt(one, other, kwargs) for one, other in zip(firsts, second, strict=True)]

    task: Task = "embed" if pairing.num_first else "score"
    return pooling_request(fields, task, dialect, make, names[1], limits, request_id=request_id)


def name_of_text(pairing: Pairing, names: tuple[str, str], index: int, num: int) -> str:
    """The field with the text of a prompt, of `num` prompts. `names` are as above."""
    if index < pairing.num_first:
        return f"{names[0]}[{index}]" if pairing.num_first > 1 else names[0]
    return f"{names[1]}[{index - pairing.num_first}]" if num - pairing.num_first > 1 else names[1]


def scores_of(request: Request, pairing: Pairing) -> list[float]:
    """The scores of a finished request, in the order of the second texts. Raises ApiError."""
    each = [numbers_of(sequence) for sequence in request.sequences]
    if not pairing.num_first:
        return [float(activated(logits, pairing.activation)[0]) for logits in each]
    first, second = each[: pairing.num_first], each[pairing.num_first :]
    firsts = first if len(first) > 1 else first * len(second)
    return [cosine(one, other) for one, other in zip(firsts, second, strict=True)]
