"""What the messages of both directions consist of: types of fields, and structs inside of messages."""

from typing import Annotated

import msgspec
from msgspec import Meta

RequestId = Annotated[
    int,
    Meta(
        ge=0,
        description="The request_id of the `generate` message.",
        extra_json_schema={"maximum": 2**64 - 1},
    ),
]
PackedIds = Annotated[bytes, Meta(description="Token ids, each 4 bytes: int32, little-endian.")]


class WireMessage(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """Base of all messages. Subclasses define the tag."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error, with the fields of OpenAI's errors."""

    status: Annotated[int, Meta(description="The corresponding HTTP status: 400, 401, 404, 408, 429, 500, 503 or 504.")]
    message: Annotated[str, Meta(description="A message for humans: the error, and which values are valid.")]
    param: Annotated[
        str | None, Meta(description="The invalid field, such as `temperature` or `messages[0].role`.")
    ] = None
    code: Annotated[str | None, Meta(description="A code for programs, such as `context_length_exceeded`.")] = None
    retry_after_s: Annotated[
        int | None, Meta(description="At status 429 and 503: the server's estimate of when to try again, in seconds.")
    ] = None


class Output(msgspec.Struct, array_like=True, frozen=True):
    """New text and ids of one sequence."""

    index: Annotated[int, Meta(description="Index of the sequence, below n. With `best_of`, 0 is the best.")]
    text: Annotated[str, Meta(description="New text of the sequence.")]
    token_ids: PackedIds
    text_offset: Annotated[
        int, Meta(description="Number of characters (code points) of the sequence's text before this output.")
    ]
    token_offset: Annotated[int, Meta(description="Number of the sequence's output ids before these.")]
    finish_reason: Annotated[
        str | None, Meta(description="stop, length or abort if the sequence has ended, else null.")
    ] = None
    stop_reason: Annotated[
        str | int | None, Meta(description="The stop string, or the id of stop_token_ids, that ended the sequence.")
    ] = None
    records: Annotated[
        bytes, Meta(description="If `logprobs` were requested: a record of each of token_ids; see Records.")
    ] = b""
    pieces: Annotated[
        list[bytes],
        Meta(description="For each record, the text bytes of its id, then those of the ids in the record."),
    ] = []
