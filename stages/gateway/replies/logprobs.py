"""Formats logprobs from the token outputs of ids. Pure.

    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}]}
    completions   {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [{token: logprob}]}
    prompt        [null, {"123": {"logprob", "rank", "decoded_token"}}, …]                              vLLM's

Each output id has one entry, including ids without text: the one that ended the sequence, and those of a stop string.
`bytes` are exact; if they are not complete characters, `token` has them escaped, as in OpenAI: `\\xf0\\x9f` in chats,
`bytes:\\xf0\\x9f` in completions. -inf becomes -9999.0, as in vLLM: JSON has no infinity.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Raw

from pipeline.runtime.token_outputs import logprob_bytes, logprob_dtype
from pipeline.stages.gateway.replies.large_json import PackedList
from pipeline.stages.gateway.replies.text_offsets import TextOffsets

IMPOSSIBLE = -9999.0
AT_ONCE = 256
"""Token outputs that are decoded at once: as objects they take twenty times the memory."""

_encoder = msgspec.json.Encoder()

Bytes = Annotated[list[int], Meta(description="UTF-8 of the token's text; null if unknown.")]


class TopLogprob(msgspec.Struct):
    """One of the top tokens at a position."""

    token: str
    logprob: float
    bytes: Bytes | None


class TokenLogprob(msgspec.Struct):
    """An output token."""

    token: str
    logprob: Annotated[float, Meta(description="Before temperature and filters.")]
    bytes: Bytes | None
    top_logprobs: Annotated[list[TopLogprob], Meta(description="The likeliest tokens, likeliest first.")]


class ChatLogprobs(msgspec.Struct):
    content: Annotated[list[TokenLogprob], Meta(description="One entry for each token.")]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Parallel lists, one entry for each token."""

    text_offset: Annotated[list[int], Meta(description="Number of characters of the choice's text before the token.")]
    token_logprobs: Annotated[list[float | None], Meta(description="null for the first token of a prompt.")]
    tokens: list[str]
    top_logprobs: Annotated[
        list[dict[str, float] | None], Meta(description="The likeliest tokens, and the token itself.")
    ]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: Annotated[int, Meta(description="1 is the likeliest; null if it is not one of the top tokens.")] | None
    decoded_token: str | None


class ScoredId(NamedTuple):
    """An id with its logprob and bytes at some position."""

    id: int
    logprob: float
    piece: bytes | None


class DecodedLogprobs(NamedTuple):
    """A token output, with the bytes of its ids."""

    token: ScoredId
    top: list[ScoredId]


def decode_logprobs(ids: Iterable[int], data: bytes, pieces: list[bytes], num_top: int) -> Iterator[DecodedLogprobs]:
    """Decode the token outputs of `ids`. `pieces` has, for each token output, the bytes of its id and of its top ids,
    or is empty."""
    width, num_bytes = 1 + num_top, logprob_bytes(num_top)
    ids = list(ids)
    for first in range(0, len(ids), AT_ONCE):
        some = ids[first : first + AT_ONCE]
        table = np.frombuffer(data[first * num_bytes : (first + len(some)) * num_bytes], logprob_dtype(num_top))
        scores = _finite(table["logprob"])
        top_ids, top_scores = table["top_ids"].tolist(), _finite(table["top_logprobs"])
        for index, (token_id, score) in enumerate(zip(some, scores, strict=True)):
            at = (first + index) * width
            each: list[bytes | None] = [*pieces[at : at + width]] or [None] * width
            named = zip(top_ids[index], top_scores[index], each[1:], strict=True)
            # -1 pads token outputs if the vocabulary is smaller than num_top.
            top = [ScoredId(top_id, top_score, piece) for top_id, top_score, piece in named if top_id >= 0]
            yield DecodedLogprobs(ScoredId(token_id, score, each[0]), top)


def decode_prompt_logprobs(
    ids: list[int], data: bytes, pieces: list[bytes], tops: list[bytes], num_top: int
) -> Iterator[DecodedLogprobs]:
    """Decode the logprobs of a prompt's ids from the second on, as far as they have arrived. `pieces` are the bytes of
    the ids, `tops` those of their top ids; both may be empty."""
    num = len(data) // logprob_bytes(num_top)
    each: list[bytes] = []
    for index in range(num) if pieces else ():
        each += (pieces[1 + index], *tops[index * num_top : (index + 1) * num_top])
    return decode_logprobs(ids[1 : 1 + num], data, each, num_top)


def _finite(scores: "np.ndarray[Any, np.dtype[np.float32]]") -> Any:
    """Convert to nested lists of finite numbers."""
    bounded = np.maximum(np.nan_to_num(scores.astype(np.float64), nan=IMPOSSIBLE), IMPOSSIBLE)
    return bounded.tolist()


def with_sampled(decoded: DecodedLogprobs) -> DecodedLogprobs:
    """The token output with its own id before the top ones, each once, as in vLLM if the client has named these."""
    return decoded._replace(top=[*{one.id: one for one in (decoded.token, *decoded.top)}.values()])


def of_chat(each: Iterable[DecodedLogprobs], num_top: int, *, names_ids: bool) -> ChatLogprobs:
    """`num_top`: top logprobs to return; the same below."""
    return ChatLogprobs([_token_logprob(decoded, num_top, names_ids=names_ids) for decoded in each])


def packed_of_chat(each: Iterable[DecodedLogprobs], num_top: int, *, names_ids: bool) -> ChatLogprobs:
    """The same as JSON, for `encode_large`: it takes a third of the memory."""
    content: Any = PackedList(
        _encoder.encode(_token_logprob(decoded, num_top, names_ids=names_ids)) for decoded in each
    )
    return ChatLogprobs(content)


def packed(value: object) -> Raw:
    """A value as JSON, for a reply that is encoded later."""
    return Raw(_encoder.encode(value))


def _token_logprob(decoded: DecodedLogprobs, num_top: int, *, names_ids: bool) -> TokenLogprob:
    return TokenLogprob(
        _name(decoded.token, names_ids),
        decoded.token.logprob,
        _bytes(decoded.token),
        [TopLogprob(_name(one, names_ids), one.logprob, _bytes(one)) for one in decoded.top[:num_top]],
    )


def of_text(
    each: Iterable[DecodedLogprobs],
    num_top: int,
    offsets: TextOffsets,
    *,
    names_ids: bool,
    is_packed: bool = False,
    hidden_ids: Collection[int] = (),
) -> TextLogprobs:
    """`offsets` has seen the text up to here and the tokens before these. `is_packed`: each entry of `top_logprobs` is
    JSON. The text has nothing of `hidden_ids`."""
    result = TextLogprobs([], [], [], [])
    for decoded in each:
        piece = b"" if decoded.token.id in hidden_ids else decoded.token.piece or b""
        result.text_offset.append(offsets.offset_of(piece))
        result.token_logprobs.append(decoded.token.logprob)
        result.tokens.append(_text_name(decoded.token, names_ids))
        top: dict[str, float] = {}
        for one in (*decoded.top[:num_top], decoded.token):
            top.setdefault(_text_name(one, names_ids), one.logprob)
        result.top_logprobs.append(_encoder.encode(top) if is_packed else top)  # type: ignore[arg-type]
    return result


def add_first(result: TextLogprobs, token_id: int, piece: bytes, offsets: TextOffsets, *, names_ids: bool) -> None:
    """Append the first id of a prompt, which has no logprob."""
    result.text_offset.append(offsets.offset_of(piece))
    result.token_logprobs.append(None)
    result.tokens.append(_text_name(ScoredId(token_id, 0.0, piece), names_ids))
    result.top_logprobs.append(None)


def of_prompt(each: Iterable[DecodedLogprobs], num_top: int, *, names_ids: bool = False) -> PackedList:
    """One entry for each id of the prompt; the first is null."""
    return PackedList(itertools.chain([b"null"], _of_prompt(each, num_top, names_ids)))


def _of_prompt(each: Iterable[DecodedLogprobs], num_top: int, names_ids: bool) -> Iterator[bytes]:
    for decoded in each:
        ranks = {one.id: rank for rank, one in enumerate(decoded.top, 1)}
        yield _encoder.encode(
            {
                str(one.id): PromptLogprob(one.logprob, ranks.get(one.id), _name(one, names_ids))
                for one in (decoded.token, *decoded.top[:num_top])
            }
        )


def _name(one: ScoredId, names_ids: bool) -> str:
    """The token in chats and in `prompt_logprobs`."""
    if names_ids or one.piece is None:
        return f"token_id:{one.id}"
    return one.piece.decode(errors="backslashreplace")


def _text_name(one: ScoredId, names_ids: bool) -> str:
    """The token in completions, where it is also a key of an object."""
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


def _bytes(one: ScoredId) -> list[int] | None:
    return None if one.piece is None else list(one.piece)
