"""Log probabilities as replies have them, from the records of ids. Pure.

    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}]}
    completions   {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [{token: logprob}]}
    prompt        [null, {"123": {"logprob", "rank", "decoded_token"}}, …]                              vLLM's

Each id that counts has one entry, also those that give no text: the one that ended the sequence, and those of a stop
string. `bytes` are exact; where they are no whole characters, `token` has them escaped, as OpenAI has it: `\\xf0\\x9f`
in chats, `bytes:\\xf0\\x9f` in completions. What is impossible is -9999.0, as vLLM has it: JSON has no infinity.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from pipeline.runtime.logprob_records import logprob_dtype
from pipeline.stages.gateway.replies.text_offsets import TextOffsets

IMPOSSIBLE = -9999.0

Bytes = Annotated[list[int], Meta(description="Of the token's text, in UTF-8; null where nobody knows them.")]


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: Bytes | None


class TokenLogprob(msgspec.Struct):
    """A token of the output."""

    token: str
    logprob: Annotated[float, Meta(description="By the model's own distribution, before temperature and filters.")]
    bytes: Bytes | None
    top_logprobs: Annotated[list[TopLogprob], Meta(description="The likeliest, likeliest first.")]


class ChatLogprobs(msgspec.Struct):
    content: Annotated[list[TokenLogprob], Meta(description="One entry for each token.")]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Parallel lists, one entry for each token."""

    text_offset: Annotated[list[int], Meta(description="Characters of the choice's text before the token.")]
    token_logprobs: Annotated[list[float | None], Meta(description="null for the first token of a prompt.")]
    tokens: list[str]
    top_logprobs: Annotated[
        list[dict[str, float] | None], Meta(description="Of the likeliest tokens, and of the token itself.")
    ]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: Annotated[int, Meta(description="1 is the likeliest; null where it is none of those that are told.")] | None
    decoded_token: str | None


class Named(NamedTuple):
    """An id, and what is known of it at some place."""

    id: int
    logprob: float
    piece: bytes | None


class Line(NamedTuple):
    """What a record tells, with the bytes of whom it names."""

    it: Named
    top: list[Named]


def lines(ids: Iterable[int], records: bytes, pieces: list[bytes], num_top: int) -> Iterator[Line]:
    """Of some ids. `pieces` has for each record those of its id and of the ids it names, or is empty."""
    table = np.frombuffer(records, logprob_dtype(num_top))
    scores = _finite(table["logprob"])
    top_ids, top_scores = table["top_ids"].tolist(), _finite(table["top_logprobs"])
    width = 1 + num_top
    for place, (token_id, score) in enumerate(zip(ids, scores, strict=True)):
        each: list[bytes | None] = [*pieces[place * width : (place + 1) * width]] or [None] * width
        named = zip(top_ids[place], top_scores[place], each[1:], strict=True)
        # -1 fills up where the model has fewer ids than were asked for.
        top = [Named(top_id, top_score, piece) for top_id, top_score, piece in named if top_id >= 0]
        yield Line(Named(token_id, score, each[0]), top)


def prompt_lines(ids: list[int], records: bytes, pieces: list[bytes], tops: list[bytes], num_top: int) -> list[Line]:
    """Of a prompt's ids from the second on, as far as there are records. `pieces` are those of the ids, `tops` of those
    that the records name; both may be empty."""
    num = len(records) // logprob_dtype(num_top).itemsize
    each: list[bytes] = []
    for place in range(num) if pieces else ():
        each += (pieces[1 + place], *tops[place * num_top : (place + 1) * num_top])
    return list(lines(ids[1 : 1 + num], records, each, num_top))


def _finite(scores: "np.ndarray[Any, np.dtype[np.float32]]") -> Any:
    """As nested lists of numbers."""
    bounded = np.maximum(np.nan_to_num(scores.astype(np.float64), nan=IMPOSSIBLE), IMPOSSIBLE)
    return bounded.tolist()


def of_chat(each: Iterable[Line], num_top: int, *, names_ids: bool) -> ChatLogprobs:
    """`num_top`: how many of the likeliest are shown; likewise below."""
    return ChatLogprobs(
        [
            TokenLogprob(
                _name(line.it, names_ids),
                line.it.logprob,
                _bytes(line.it),
                [TopLogprob(_name(one, names_ids), one.logprob, _bytes(one)) for one in line.top[:num_top]],
            )
            for line in each
        ]
    )


def of_text(each: Iterable[Line], num_top: int, offsets: TextOffsets, *, names_ids: bool) -> TextLogprobs:
    """`offsets` has had the text up to here, and the tokens before these."""
    told = TextLogprobs([], [], [], [])
    for line in each:
        told.text_offset.append(offsets.place(line.it.piece or b""))
        told.token_logprobs.append(line.it.logprob)
        told.tokens.append(_text_name(line.it, names_ids))
        top: dict[str, float] = {}
        for one in (*line.top[:num_top], line.it):
            top.setdefault(_text_name(one, names_ids), one.logprob)
        told.top_logprobs.append(top)
    return told


def add_first(told: TextLogprobs, token_id: int, piece: bytes, offsets: TextOffsets, *, names_ids: bool) -> None:
    """Append the first id of a prompt, of which there is no log probability."""
    told.text_offset.append(offsets.place(piece))
    told.token_logprobs.append(None)
    told.tokens.append(_text_name(Named(token_id, 0.0, piece), names_ids))
    told.top_logprobs.append(None)


def of_prompt(each: Iterable[Line], num_top: int, *, names_ids: bool = False) -> list[dict[str, PromptLogprob] | None]:
    """One entry for each id of the prompt; the first has none."""
    told: list[dict[str, PromptLogprob] | None] = [None]
    for line in each:
        ranks = {one.id: rank for rank, one in enumerate(line.top, 1)}
        told.append(
            {
                str(one.id): PromptLogprob(one.logprob, ranks.get(one.id), _name(one, names_ids))
                for one in (line.it, *line.top[:num_top])
            }
        )
    return told


def _name(one: Named, names_ids: bool) -> str:
    """In chats, and in `prompt_logprobs`."""
    if names_ids or one.piece is None:
        return f"token_id:{one.id}"
    return one.piece.decode(errors="backslashreplace")


def _text_name(one: Named, names_ids: bool) -> str:
    """In completions, where tokens are also the names of an object."""
    name = _name(one, names_ids)
    if names_ids or one.piece is None or _is_text(one.piece):
        return name
    return f"bytes:{name}"


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes(one: Named) -> list[int] | None:
    return None if one.piece is None else list(one.piece)
