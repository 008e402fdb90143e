"""The client protocol: all messages between a client and a gateway's ZeroMQ endpoint, one union per direction.

docs/protocol.md documents it for clients in other languages. tools/export_protocol.py generates the schema and the test
vectors from these types. The protocol has a version of its own. It shares no struct with the messages between stages,
because those may change and these may not.

A message is one ZeroMQ frame with one MessagePack array: the message's tag, then its fields in order. Fields are
appended, never reordered or removed. A reader ignores additional fields at the end, and uses defaults for missing ones.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

MAX_CREDITS = 1024
"""Maximum number of deltas that a client can grant ahead; larger values are reduced to this."""
MAX_CLIENT_CHARS = 200
"""Maximum length of a client's name."""
MAX_NAME_CHARS = 256
"""Maximum length of a request's name."""
MAX_SALT_CHARS = 1024
"""Maximum length of a cache salt."""
MAX_TIMEOUT_S = 1_000_000
"""Maximum timeout of a request: 11 days."""

RequestId = Annotated[
    int,
    Meta(
        ge=0,
        description="The request_id of the `generate` message.",
        extra_json_schema={"maximum": 2**64 - 1},
    ),
]
PackedIds = Annotated[bytes, Meta(description="Token ids, each 4 bytes: int32, little-endian.")]
JsonText = Annotated[str | None, Meta(description="JSON text.")]


class WireMessage(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """Base of all messages. Subclasses define the tag."""


# -------------------------------------------------------------------------------------------------- parts of messages


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error, with the fields of OpenAI's errors."""

    status: Annotated[int, Meta(description="The corresponding HTTP status: 400, 401, 404, 408, 500, 503 or 504.")]
    message: Annotated[str, Meta(description="A message for humans: the error, and which values are valid.")]
    param: Annotated[
        str | None, Meta(description="The invalid field, such as `temperature` or `messages[0].role`.")
    ] = None
    code: Annotated[str | None, Meta(description="A code for programs, such as `context_length_exceeded`.")] = None
    retry_after_s: Annotated[
        int | None, Meta(description="At status 503: the server's estimate of when to try again, in seconds.")
    ] = None


class ToolCall(msgspec.Struct, array_like=True, frozen=True):
    """A tool call in an assistant message that the client returns."""

    id: Annotated[str, Meta(description="The `tool_call_id` of the tool's message.")]
    name: Annotated[str, Meta(description="The function's name.")]
    arguments: Annotated[str, Meta(description="JSON text: an object.")]


class ChatMessage(msgspec.Struct, array_like=True, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(description="system, developer, user, assistant or tool.")]
    content: Annotated[
        str | list[str] | None,
        Meta(description="The text, or the texts of the parts. Null in an assistant message that has only tool calls."),
    ]
    name: Annotated[str | None, Meta(description="The speaker's name, for templates that show it.")] = None
    tool_calls: Annotated[list[ToolCall], Meta(description="The assistant's tool calls.")] = []
    tool_call_id: Annotated[
        str | None, Meta(description="In a tool's message: the id of the call that it answers.")
    ] = None
    reasoning: Annotated[str | None, Meta(description="The assistant's reasoning, for templates that show it.")] = None


class TextPrompt(msgspec.Struct, array_like=True, frozen=True, tag_field="kind", tag="text"):
    """A text to continue. The server tokenizes it and adds the special tokens that the model begins with."""

    text: Annotated[str, Meta(description="The text.")]


class TokensPrompt(msgspec.Struct, array_like=True, frozen=True, tag_field="kind", tag="tokens"):
    """Token ids to continue. The server adds no special tokens."""

    token_ids: PackedIds


class ChatPrompt(msgspec.Struct, array_like=True, frozen=True, tag_field="kind", tag="chat"):
    """A chat to answer. The server applies the model's chat template."""

    messages: Annotated[list[ChatMessage], Meta(description="At least one, in order.")]
    add_generation_prompt: Annotated[bool, Meta(description="Whether the template opens the assistant's turn.")] = True
    continue_final_message: Annotated[
        bool, Meta(description="The output continues the last message. Requires add_generation_prompt to be false.")
    ] = False
    tools: Annotated[
        JsonText, Meta(description="JSON text: the array of tools, as in the HTTP API. Null without tools.")
    ] = None
    tool_choice: Annotated[
        str, Meta(description="none, auto, required or named. named requires a call of `tool_name`.")
    ] = "auto"
    tool_name: Annotated[str, Meta(description="The tool to call if tool_choice is named.")] = ""
    parallel_tool_calls: Annotated[bool, Meta(description="Whether the output may have more than one call.")] = True
    documents: Annotated[JsonText, Meta(description="JSON text: an array, for templates that show documents.")] = None
    chat_template_kwargs: Annotated[
        JsonText, Meta(description="JSON text: an object with further variables for the template.")
    ] = None


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class StructuredOutputs(msgspec.Struct, array_like=True, frozen=True):
    """A constraint that the output must match, as in `structured_outputs` of the HTTP API."""

    kind: Annotated[
        str,
        Meta(description="json (a JSON Schema), json_object (any), regex, choice, grammar or structural_tag."),
    ]
    source: Annotated[
        str,
        Meta(
            description="JSON text of a schema (json), of an array of strings (choice) or of a structural tag; a "
            "pattern (regex); a grammar in Lark or EBNF. Empty for json_object."
        ),
    ] = ""


class Params(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are sampled and where text ends. Names, meanings and limits are those of the HTTP API."""

    n: Annotated[int, Meta(description="Sequences to generate, 1 to 128.")] = 1
    temperature: Annotated[float | None, Meta(description="0 to 2; 0 is greedy. Null is the model's default.")] = 1.0
    top_p: Annotated[float | None, Meta(description="Above 0, at most 1. Null is the model's default.")] = 1.0
    top_k: Annotated[int | None, Meta(description="0 and -1 are off. Null is the model's default.")] = 0
    min_p: Annotated[float | None, Meta(description="0 to 1. Null is the model's default.")] = 0.0
    seed: Annotated[int | None, Meta(description="-2^63 to 2^64 - 1. With null the server chooses one.")] = None
    max_tokens: Annotated[
        int | None,
        Meta(
            description="Maximum output ids of each sequence. Null: as many as fit the context, up to the `max_tokens` "
            "of the model's defaults."
        ),
    ] = None
    stop: Annotated[list[str], Meta(description="Strings that end the text: at most 16, of 1 to 256 characters.")] = []
    stop_token_ids: Annotated[list[int], Meta(description="Ids that end a sequence: at most 128.")] = []
    ignore_eos: Annotated[bool, Meta(description="Continue after the model's end of sequence.")] = False
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    include_stop_str_in_output: Annotated[bool, Meta(description="The text keeps the stop string.")] = False
    best_of: Annotated[
        int | None,
        Meta(
            description="Number of sequences to generate, n to 128. When all have ended, the server sends the n with "
            "the highest mean log probability per output id, best first. With null or n, it streams all sequences."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Meta(
            description="0.01 to 100. Above 1 makes ids of the prompt and the output less likely. Null is the model's "
            "default."
        ),
    ] = 1.0
    presence_penalty: Annotated[float, Meta(description="-2 to 2. Above 0 makes ids of the output less likely.")] = 0.0
    frequency_penalty: Annotated[
        float, Meta(description="-2 to 2. Like presence_penalty, multiplied by the number of occurrences.")
    ] = 0.0
    logit_bias: Annotated[
        dict[str, float],
        Meta(
            description="A map from token ids, as decimal strings, to the values that are added to their logits: -100 "
            "to 100."
        ),
    ] = {}
    allowed_token_ids: Annotated[
        list[int] | None, Meta(description="Only these ids are sampled; at least one. Null allows all.")
    ] = None
    bad_words: Annotated[
        list[str], Meta(description="Texts of 1 to 256 characters that the output must not contain.")
    ] = []
    min_tokens: Annotated[
        int, Meta(description="No stop id or stop string ends a sequence before it has this many output ids.")
    ] = 0
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(description="Keep this many of the prompt's last ids. -1 keeps as many as fit, null keeps all."),
    ] = None
    logprobs: Annotated[
        int | None,
        Meta(
            description="Return the log probability of each output id, and of this many of the most likely ids at its "
            "position; see Records. Null returns none."
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Meta(
            description="The same for all ids of the prompt except the first. The server computes them with the first "
            "sequence, so you get none if `received` has all ids of that sequence."
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="A constraint that the output must match. Null is none.")
    ] = None
    logprob_token_ids: Annotated[
        list[int],
        Meta(
            description="At most 128 ids. If there are any, records of output ids have the log probabilities of these "
            "ids, in this order, instead of the most likely ones."
        ),
    ] = []
    truncation_side: Annotated[
        str | None,
        Meta(
            description="Where truncate_prompt_tokens removes ids: `left` (the default) keeps the last ones, `right` "
            "the first ones."
        ),
    ] = None
    use_beam_search: Annotated[
        bool,
        Meta(
            description="The sequences are the best n that a beam search of width n finds, the best first. Each is "
            "sent when the search is over."
        ),
    ] = False
    length_penalty: Annotated[
        float,
        Meta(
            description="With use_beam_search, -10 to 10: a sequence's score is the sum of its log probabilities, "
            "divided by length ** length_penalty."
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | str,
        Meta(
            description="With use_beam_search: true ends the search when it has found n sequences, false when no beam "
            "has a better score, `never` when no beam can get one."
        ),
    ] = False
    prediction: Annotated[
        str | None,
        Meta(
            description="A text that most of the output may equal. Speculative decoding with `speculative.method = "
            "ngram` proposes ids of it. It changes no output."
        ),
    ] = None


class SamplingDefaults(msgspec.Struct, array_like=True, frozen=True):
    """The values that a null in `params` stands for: the model's, or neutral ones."""

    temperature: Annotated[float, Meta(description="0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(description="1 is off.")] = 1.0
    top_k: Annotated[int, Meta(description="0 is off.")] = 0
    min_p: Annotated[float, Meta(description="0 is off.")] = 0.0
    repetition_penalty: Annotated[float, Meta(description="1 is off.")] = 1.0
    max_tokens: Annotated[int | None, Meta(description="Null: as many as fit the context.")] = None


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


# ------------------------------------------------------------------------------------------------------- to the server


class Hello(WireMessage, frozen=True, tag="hello"):
    """The first message of a connection: the protocol versions that the client supports. The server answers with
    `welcome`, or with `error` if it supports none of them."""

    min_version: Annotated[int, Meta(description="The oldest protocol version that the client supports.")]
    max_version: Annotated[int, Meta(description="The newest one.")]
    client: Annotated[str, Meta(description="The client's name and version, for logs. Cut to 200 characters.")] = ""
    api_key: Annotated[
        str | None,
        Meta(
            description="One of the server's API keys. Required at tcp:// addresses of servers that have keys. "
            "Requests are scoped to their key: other keys can't abort them and don't share their prefix "
            "cache."
        ),
    ] = None

    def __repr__(self) -> str:
        return f"Hello({self.min_version}, {self.max_version}, {self.client!r})"  # no key in a traceback


class Generate(WireMessage, frozen=True, tag="generate"):
    """Generate from a prompt. The server answers with `accepted`, `delta` … and one closing message: `finished` or
    `failed`.

    With `received`, generation continues after the ids that the client already has; see Resuming.
    """

    request_id: Annotated[
        int,
        Meta(
            ge=0,
            description="Chosen by the client (u64). Use each id only once per connection.",
            extra_json_schema={"maximum": 2**64 - 1},
        ),
    ]
    model: Annotated[str, Meta(description="The model's name. Empty selects the served model.")]
    prompt: Prompt
    params: Params
    credits: Annotated[
        int, Meta(ge=0, description="Number of deltas that the server may send before you grant more; see Credits.")
    ]
    received: Annotated[
        list[PackedIds],
        Meta(description="Output ids that the client already has, one entry per sequence. Empty for a new request."),
    ] = []
    name: Annotated[
        str | None,
        Meta(
            description="The client's name for the request, for the server's log and `POST /abort_requests`: 1 to 256 "
            "printable ASCII characters without spaces."
        ),
    ] = None
    timings: Annotated[bool, Meta(description="Whether `finished` has the request's timings.")] = False
    priority: Annotated[
        int,
        Meta(
            description="Signed, 32 bits. With the policy `priority`, requests with lower values run first. Other "
            "policies accept only 0."
        ),
    ] = 0
    cache_salt: Annotated[
        str | None,
        Meta(
            description="1 to 1,024 characters. Only prompts with the same salt and the same API key share blocks in "
            "the prefix cache."
        ),
    ] = None
    timeout_s: Annotated[
        float | None,
        Meta(
            description="Above 0, up to 1,000,000: the maximum time from the request's arrival to its end; see "
            "Deadlines. Null uses the server's setting."
        ),
    ] = None
    pooling: Annotated[
        str | None,
        Meta(
            description="One of `poolings` in `welcome`: compute an embedding instead of output. `finished` has it, "
            "and there is no delta. Not for chats. Of `params`, only truncate_prompt_tokens "
            "and truncation_side have an effect."
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        Meta(description="With `pooling`: length to which the embedding is cut; null keeps the model's hidden size."),
    ] = None


class Abort(WireMessage, frozen=True, tag="abort"):
    """End a request now. The server answers with a last delta and a closing message. If the request is closed or
    unknown, it doesn't answer."""

    request_id: RequestId


class Credit(WireMessage, frozen=True, tag="credit"):
    """Grant a request more deltas. No effect on a closed or unknown request."""

    request_id: RequestId
    num_deltas: Annotated[int, Meta(ge=0, description="Number of additional deltas.")]


class Ping(WireMessage, frozen=True, tag="ping"):
    """A heartbeat. The server answers with `pong`. It disconnects a client that sends nothing for `silence_s`."""

    nonce: Annotated[
        int, Meta(ge=0, description="Returned in `pong` (u64).", extra_json_schema={"maximum": 2**64 - 1})
    ] = 0


class Bye(WireMessage, frozen=True, tag="bye"):
    """The client disconnects. The server aborts its open requests without an answer."""


ClientMessage = Hello | Generate | Abort | Credit | Ping | Bye


# ------------------------------------------------------------------------------------------------------- to the client


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
        SamplingDefaults,
        Meta(description="What null means in `params`. A server older than this field refuses these nulls."),
    ] = SamplingDefaults()
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
            "all). Empty if the server has no embeddings over ZeroMQ."
        ),
    ] = []


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
        Meta(description="If `generate` has `pooling`: float32, little-endian; of length 1 (L2). Else empty."),
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


class Error(WireMessage, frozen=True, tag="error"):
    """Ends the connection. The server aborts its open requests and closes it after this message."""

    failure: Failure


ServerMessage = Welcome | Accepted | Delta | Finished | Failed | Pong | Error
