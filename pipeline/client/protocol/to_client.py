"""Messages from the server to a client."""

from typing import Annotated

from msgspec import Meta

from pipeline.client.protocol.parts import Failure, Output, PackedIds, RequestId, WireMessage


class Welcome(WireMessage, frozen=True, tag="welcome"):
    """The answer to `hello`."""

    version: Annotated[int, Meta(description="The protocol version of this connection.")]
    server: Annotated[str, Meta(description="The server's name and version, for logs.")]
    model: Annotated[str, Meta(description="The served model.")]
    max_model_len: Annotated[int, Meta(description="Maximum length of prompt and output together, in tokens.")]
    vocab_size: Annotated[int, Meta(description="Token ids are below this.")]
    max_open_requests: Annotated[
        int,
        Meta(
            description="Maximum number of open sequences (not requests) of all clients of this gateway. A request "
            "that exceeds it fails with 503."
        ),
    ]
    max_message_bytes: Annotated[
        int, Meta(description="Largest message that the server reads. A larger one ends the connection.")
    ]
    max_credits: Annotated[int, Meta(description="Maximum credit of a request, in deltas.")]
    heartbeat_s: Annotated[float, Meta(description="An idle client must send `ping` at this interval.")]
    silence_s: Annotated[float, Meta(description="A peer that sends nothing for this long is considered dead.")]
    defaults: Annotated[
        dict[str, int | float],
        Meta(
            description="The fields of a request that the model has recommendations for, and their values: what the "
            "server uses if a request does not have them."
        ),
    ] = {}
    addresses: Annotated[
        list[str],
        Meta(
            description="The addresses of all gateways of this server, as they are bound; each has limits of its own. "
            "Empty if the server is older than this field."
        ),
    ] = []
    gateway: Annotated[int, Meta(description="Index in `addresses` of the gateway that answers.")] = 0
    poolings: Annotated[
        list[str],
        Meta(
            description="Which hidden states an embedding can be made of: last (the last token's), mean (the mean of "
            "all), and others. Empty if the server has no embeddings over ZeroMQ."
        ),
    ] = []
    tasks: Annotated[
        list[str],
        Meta(
            description="What the model can be asked for: generate, embed, token_embed, classify, token_classify, "
            "score. Empty if the server is older than this field."
        ),
    ] = []
    takes_sleep: Annotated[
        bool, Meta(description="Whether the server takes `set_sleep` and `ask_sleep`. False if it is older.")
    ] = False


class Accepted(WireMessage, frozen=True, tag="accepted"):
    """The request is valid and waits to run. Comes before its first `delta`."""

    request_id: RequestId
    prompt_token_ids: PackedIds
    seed: Annotated[
        int,
        Meta(ge=0, description="The seed of the sampling noise (u64).", extra_json_schema={"maximum": 2**64 - 1}),
    ]
    id: Annotated[
        str,
        Meta(
            description="The server's id of the request, as in HTTP replies: `cmpl-…` or `chatcmpl-…`. It ends with "
            "the client's name if `generate` has one. Empty if the server is older than this field."
        ),
    ] = ""
    prompt_pieces: Annotated[
        list[bytes],
        Meta(description="If `prompt_logprobs` were requested: the text bytes of each id of the prompt."),
    ] = []


class Delta(WireMessage, frozen=True, tag="delta"):
    """New output of a request. Uses one credit. Each sequence gets exactly one output with a finish_reason."""

    request_id: RequestId
    outputs: Annotated[
        list[Output],
        Meta(description="At most one per sequence. May be empty if there are records of the prompt."),
    ]
    prompt_records: Annotated[
        bytes,
        Meta(
            description="If `prompt_logprobs` were requested: records of the next ids of the prompt. The prompt's "
            "first id has none; see Records."
        ),
    ] = b""
    prompt_record_offset: Annotated[int, Meta(description="Number of the prompt's records before these.")] = 0
    prompt_record_pieces: Annotated[
        list[bytes], Meta(description="For each of these records, the text bytes of the ids in it.")
    ] = []


class Finished(WireMessage, frozen=True, tag="finished"):
    """Closes a request: everything has been sent. Uses no credit."""

    request_id: RequestId
    num_prompt_tokens: Annotated[int, Meta(description="Number of ids of the prompt.")]
    num_output_tokens: Annotated[
        int,
        Meta(
            description="Number of output ids of all sequences, including `received` ones and the sequences that "
            "`best_of` does not send."
        ),
    ]
    timings: Annotated[
        str | None,
        Meta(
            description="JSON text: the object in `timings` of an HTTP reply. Null if `generate` did not request it, "
            "or the client aborted."
        ),
    ] = None
    num_cached_tokens: Annotated[
        list[int],
        Meta(
            description="Number of prompt ids found in the prefix cache, for each sequence that got an id. The "
            "smallest is the number that the request did not compute: the other sequences also reuse what it computed. "
            "Empty if no sequence got an id, or if the server is older than this field."
        ),
    ] = []
    embedding: Annotated[
        bytes,
        Meta(
            description="If `generate` has `task` or `pooling`: float32, little-endian. An embedding, of length 1 (L2) "
            "if it is normalized; or a number for each label; of tasks for tokens, those of each token, one after the "
            "other. Else empty."
        ),
    ] = b""


class Failed(WireMessage, frozen=True, tag="failed"):
    """Closes a request with an error, before or after `accepted`. Uses no credit."""

    request_id: RequestId
    failure: Failure


class Pong(WireMessage, frozen=True, tag="pong"):
    """The answer to `ping`."""

    nonce: Annotated[
        int, Meta(ge=0, description="The nonce of the `ping`.", extra_json_schema={"maximum": 2**64 - 1})
    ] = 0


class SleepState(WireMessage, frozen=True, tag="sleep_state"):
    """The answer to `set_sleep` and `ask_sleep`."""

    nonce: Annotated[
        int, Meta(ge=0, description="The nonce of the question.", extra_json_schema={"maximum": 2**64 - 1})
    ]
    is_sleeping: Annotated[
        bool, Meta(description="Whether the executor is away, or about to leave or to come back.")
    ] = False
    failure: Annotated[
        Failure | None, Meta(description="Why the server does not do what was asked for; null if it did.")
    ] = None


class Error(WireMessage, frozen=True, tag="error"):
    """Ends the connection. The server aborts its open requests and closes it after this message."""

    failure: Failure


ServerMessage = Welcome | Accepted | Delta | Finished | Failed | Pong | SleepState | Error
