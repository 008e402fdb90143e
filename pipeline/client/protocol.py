"""The client wire: every message between a client and the gateway's ZeroMQ door, one union for each direction.

Published in docs/protocol.md for those who implement a client in another language, with a schema and test vectors that
tools/export_protocol.py makes from these types. It is versioned apart from the package and from the messages between
stages, and shares no struct with them: those may change, these may not.

A message is one ZeroMQ frame that holds one MessagePack array: the message's tag, then its fields in this order. Fields
are appended, never reordered or removed; a reader ignores what comes after the fields that it knows, and gives those
that are missing at the end their default.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

MAX_CREDITS = 1024
"""Deltas that one request may be granted ahead; more are cut to this."""
MAX_CLIENT_CHARS = 200
"""Of what a client calls itself."""
MAX_NAME_CHARS = 256
"""Of what a client calls a request."""
MAX_SALT_CHARS = 1024
"""Of what keeps a request's KV blocks apart from those of others."""
MAX_TIMEOUT_S = 1_000_000
"""What a request may be given to end in: 11 days."""

RequestId = Annotated[
    int,
    Meta(
        ge=0,
        description="Chosen by the client (u64): one that this connection has not used before.",
        extra_json_schema={"maximum": 2**64 - 1},
    ),
]
PackedIds = Annotated[bytes, Meta(description="Token ids, each 4 bytes: int32, little-endian.")]
JsonText = Annotated[str | None, Meta(description="JSON text.")]


class Message(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """What every message is. Subclasses give a tag."""


# -------------------------------------------------------------------------------------------------- parts of messages


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error, in the shape of OpenAI's."""

    status: Annotated[int, Meta(description="The HTTP status it maps to: 400, 401, 404, 408, 413, 500, 503, 504.")]
    message: Annotated[str, Meta(description="For people: what is wrong, and what would be right.")]
    param: Annotated[str | None, Meta(description="The field to blame, as `temperature` or `messages[0].role`.")] = None
    code: Annotated[str | None, Meta(description="For programs, as `context_length_exceeded`.")] = None
    retry_after_s: Annotated[
        int | None, Meta(description="At status 503: in how many seconds there may be room, as the server expects.")
    ] = None


class ToolCall(msgspec.Struct, array_like=True, frozen=True):
    """A call of a tool, in a message of the assistant that the client gives back."""

    id: Annotated[str, Meta(description="What the message of the tool names as `tool_call_id`.")]
    name: Annotated[str, Meta(description="Of the function.")]
    arguments: Annotated[str, Meta(description="JSON text: an object.")]


class ChatMessage(msgspec.Struct, array_like=True, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(description="system, developer, user, assistant or tool.")]
    content: Annotated[
        str | list[str] | None,
        Meta(
            description="Its text, or the texts of its parts; null in a message of the assistant that has tool calls "
            "alone."
        ),
    ]
    name: Annotated[str | None, Meta(description="Who speaks, for templates that show it.")] = None
    tool_calls: Annotated[list[ToolCall], Meta(description="What the assistant called.")] = []
    tool_call_id: Annotated[str | None, Meta(description="In a message of a tool: the call that it answers.")] = None
    reasoning: Annotated[
        str | None, Meta(description="What the assistant thought before, for templates that show it.")
    ] = None


class TextPrompt(msgspec.Struct, array_like=True, frozen=True, tag_field="kind", tag="text"):
    """A text to continue. The server tokenizes it and adds the special tokens that the model begins with."""

    text: Annotated[str, Meta(description="The text.")]


class TokensPrompt(msgspec.Struct, array_like=True, frozen=True, tag_field="kind", tag="tokens"):
    """Token ids to continue, taken as they are."""

    token_ids: PackedIds


class ChatPrompt(msgspec.Struct, array_like=True, frozen=True, tag_field="kind", tag="chat"):
    """A chat to answer. The server applies the model's chat template."""

    messages: Annotated[list[ChatMessage], Meta(description="In order; at least one.")]
    add_generation_prompt: Annotated[bool, Meta(description="Whether the template opens the assistant's turn.")] = True
    continue_final_message: Annotated[
        bool, Meta(description="The output goes on with the last message; not together with add_generation_prompt.")
    ] = False
    tools: Annotated[
        JsonText, Meta(description="JSON text: the array of tools, as the HTTP API has it; null where there are none.")
    ] = None
    tool_choice: Annotated[
        str, Meta(description="none, auto, required, or named, which takes `tool_name`: what the output must be.")
    ] = "auto"
    tool_name: Annotated[str, Meta(description="Of the tool that is to be called.")] = ""
    parallel_tool_calls: Annotated[bool, Meta(description="Whether more than one tool may be called at once.")] = True
    documents: Annotated[JsonText, Meta(description="JSON text: an array, for templates that show them.")] = None
    chat_template_kwargs: Annotated[
        JsonText, Meta(description="JSON text: an object of further names for the template.")
    ] = None


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class StructuredOutputs(msgspec.Struct, array_like=True, frozen=True):
    """What the output is to match, as `structured_outputs` of the HTTP API."""

    kind: Annotated[
        str,
        Meta(description="json (a JSON Schema), json_object (any), regex, choice, grammar or structural_tag."),
    ]
    source: Annotated[
        str,
        Meta(
            description="JSON text of a schema (json), of an array of strings (choice) or of a structural tag; a "
            "pattern (regex); a grammar in Lark's or EBNF notation. Empty for json_object."
        ),
    ] = ""


class Params(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are drawn and text is cut. Names, meanings and limits are those of the HTTP API."""

    n: Annotated[int, Meta(description="Sequences to generate, 1 to 128.")] = 1
    temperature: Annotated[float, Meta(description="0 to 2; 0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(description="Above 0, at most 1.")] = 1.0
    top_k: Annotated[int, Meta(description="0 and -1 are off.")] = 0
    min_p: Annotated[float, Meta(description="0 to 1.")] = 0.0
    seed: Annotated[int | None, Meta(description="-2^63 to 2^64 - 1; null has the server draw one.")] = None
    max_tokens: Annotated[
        int | None, Meta(description="Output ids of each sequence at most; null: as many as fit the model.")
    ] = None
    stop: Annotated[list[str], Meta(description="Strings that end the text: at most 16, of 1 to 256 characters.")] = []
    stop_token_ids: Annotated[list[int], Meta(description="Ids that end a sequence: at most 128.")] = []
    ignore_eos: Annotated[bool, Meta(description="Go on where the model would end.")] = False
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    include_stop_str_in_output: Annotated[bool, Meta(description="The text ends behind the stop string.")] = False
    best_of: Annotated[
        int | None,
        Meta(
            description="n to 128: sequences to generate, of which the n with the highest log probability per output "
            "id are sent, the best first, when all have ended. Null, and n, send all as they come."
        ),
    ] = None
    repetition_penalty: Annotated[
        float, Meta(description="0.01 to 100. Above 1 makes ids of the prompt and the output less likely.")
    ] = 1.0
    presence_penalty: Annotated[float, Meta(description="-2 to 2. Above 0 makes ids of the output less likely.")] = 0.0
    frequency_penalty: Annotated[
        float, Meta(description="-2 to 2. As presence_penalty, as many times as they occur.")
    ] = 0.0
    logit_bias: Annotated[
        dict[str, float],
        Meta(
            description="A map from token ids, written as decimal strings, to what is added to their logits: -100 to "
            "100."
        ),
    ] = {}
    allowed_token_ids: Annotated[
        list[int] | None, Meta(description="No other ids are drawn: at least one; null allows all.")
    ] = None
    bad_words: Annotated[list[str], Meta(description="Texts that the output never has: of 1 to 256 characters.")] = []
    min_tokens: Annotated[int, Meta(description="Output ids before which nothing ends a sequence.")] = 0
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Keep this many of the prompt's last ids; -1: as many as fit; null keeps all.")
    ] = None
    logprobs: Annotated[
        int | None,
        Meta(
            description="Outputs have the log probability of each id, and of so many of the likeliest in its place; "
            "see Records. Null has none."
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Meta(
            description="The same of the prompt's ids, all but the first. They come with the first sequence, and so "
            "not where `received` has the whole of it."
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="What the output is to match; null is anything.")
    ] = None


class Output(msgspec.Struct, array_like=True, frozen=True):
    """What is new of one sequence."""

    index: Annotated[int, Meta(description="Which of the request's n sequences.")]
    text: Annotated[str, Meta(description="Text that follows what came before.")]
    token_ids: PackedIds
    text_offset: Annotated[int, Meta(description="Characters (code points) of the sequence's text before this.")]
    token_offset: Annotated[int, Meta(description="Output ids of the sequence before these.")]
    finish_reason: Annotated[
        str | None, Meta(description="stop, length or abort where the sequence has ended; null where it goes on.")
    ] = None
    stop_reason: Annotated[
        str | int | None, Meta(description="The stop string, or the id of stop_token_ids, that ended it.")
    ] = None
    records: Annotated[
        bytes, Meta(description="Where `logprobs` were asked for: a record of each of token_ids; see Records.")
    ] = b""
    pieces: Annotated[
        list[bytes],
        Meta(description="For each record the bytes of text that its id stands for, then those of the ids it names."),
    ] = []


# ------------------------------------------------------------------------------------------------------- to the server


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a connection: the protocol versions that the client speaks. Answered with `welcome`, or with
    `error` where the server speaks none of them."""

    min_version: Annotated[int, Meta(description="The oldest version that the client speaks.")]
    max_version: Annotated[int, Meta(description="The newest.")]
    client: Annotated[str, Meta(description="What the client calls itself, for logs; cut to 200 characters.")] = ""
    api_key: Annotated[
        str | None,
        Meta(
            description="One of the server's API keys. Required at tcp:// addresses of servers that have any. Requests "
            "are scoped to it: those of other keys do not abort them, nor share the prefix cache."
        ),
    ] = None

    def __repr__(self) -> str:
        return f"Hello({self.min_version}, {self.max_version}, {self.client!r})"  # no key in a traceback


class Generate(Message, frozen=True, tag="generate"):
    """Generate from a prompt. Answered with `accepted`, `delta` … and one closing: `finished` or `failed`.

    With `received`, what is generated goes on behind ids that the client has already: see Resuming.
    """

    request_id: RequestId
    model: Annotated[str, Meta(description="The model's name; empty takes the one that is served.")]
    prompt: Prompt
    params: Params
    credits: Annotated[int, Meta(ge=0, description="Deltas that the server may send before it is granted more.")]
    received: Annotated[
        list[PackedIds],
        Meta(description="Output ids that the client has already, one entry a sequence; empty for a fresh request."),
    ] = []
    name: Annotated[
        str | None,
        Meta(
            description="The client's own name for it, in the server's log and for `POST /abort_requests`: 1 to 256 "
            "visible ASCII characters without spaces."
        ),
    ] = None
    timings: Annotated[bool, Meta(description="Whether `finished` is to say where its time went.")] = False
    priority: Annotated[
        int,
        Meta(
            description="Lower goes first, where the server's policy is `priority`; elsewhere only 0 is taken. 32 bits."
        ),
    ] = 0
    cache_salt: Annotated[
        str | None,
        Meta(
            description="1 to 1,024 characters: only prompts with the same salt, and the same API key, share what is "
            "computed of them."
        ),
    ] = None
    timeout_s: Annotated[
        float | None,
        Meta(
            description="Above 0, to 1,000,000: how long it may take from its arrival to its end; see Deadlines. Null "
            "takes the server's own."
        ),
    ] = None


class Abort(Message, frozen=True, tag="abort"):
    """End a request now. Its closing is the answer; for a request that is closed or unknown there is none."""

    request_id: RequestId


class Credit(Message, frozen=True, tag="credit"):
    """Grant a request more deltas. For a request that is closed or unknown it does nothing."""

    request_id: RequestId
    num_deltas: Annotated[int, Meta(ge=0, description="How many more.")]


class Ping(Message, frozen=True, tag="ping"):
    """A sign of life, answered with `pong`. A client that has said nothing for `silence_s` is dropped."""

    nonce: Annotated[int, Meta(ge=0, description="Comes back (u64).", extra_json_schema={"maximum": 2**64 - 1})] = 0


class Bye(Message, frozen=True, tag="bye"):
    """The client leaves: what it has open is aborted, unanswered."""


ClientMessage = Hello | Generate | Abort | Credit | Ping | Bye


# ------------------------------------------------------------------------------------------------------- to the client


class Welcome(Message, frozen=True, tag="welcome"):
    """The answer to `hello`."""

    version: Annotated[int, Meta(description="The version that is spoken from here on.")]
    server: Annotated[str, Meta(description="The server's name and version, for logs.")]
    model: Annotated[str, Meta(description="The model that is served.")]
    max_model_len: Annotated[int, Meta(description="Longest prompt and output together, in tokens.")]
    vocab_size: Annotated[int, Meta(description="Token ids are below this.")]
    max_open_requests: Annotated[
        int, Meta(description="Sequences this gateway has open at most, of all its clients; one more fails with 503.")
    ]
    max_message_bytes: Annotated[int, Meta(description="Largest message the server reads; a larger one ends the peer.")]
    max_credits: Annotated[int, Meta(description="Deltas that a request can be granted ahead.")]
    heartbeat_s: Annotated[float, Meta(description="A client that has nothing else to say sends `ping` this often.")]
    silence_s: Annotated[float, Meta(description="A peer that says nothing for this long is taken for gone.")]


class Accepted(Message, frozen=True, tag="accepted"):
    """The request is valid and waits to be computed. Comes before its first `delta`."""

    request_id: RequestId
    prompt_token_ids: PackedIds
    seed: Annotated[
        int,
        Meta(ge=0, description="What the noise is keyed with (u64).", extra_json_schema={"maximum": 2**64 - 1}),
    ]
    id: Annotated[
        str,
        Meta(
            description="The server's name for it, as a reply over HTTP has it: `cmpl-…` or `chatcmpl-…`, which ends "
            "in the client's own name where it gave one. Empty from a server that is older than this field."
        ),
    ] = ""
    prompt_pieces: Annotated[
        list[bytes],
        Meta(
            description="Where `prompt_logprobs` were asked for: the bytes of text that each id of the prompt stands "
            "for."
        ),
    ] = []


class Delta(Message, frozen=True, tag="delta"):
    """What is new of a request; takes one credit. Each sequence has exactly one output with a finish_reason."""

    request_id: RequestId
    outputs: Annotated[
        list[Output],
        Meta(description="At most one for each sequence; none, perhaps, where there are records of the prompt."),
    ]
    prompt_records: Annotated[
        bytes,
        Meta(
            description="Where `prompt_logprobs` were asked for: records of further ids of the prompt, the first of "
            "which has none; see Records."
        ),
    ] = b""
    prompt_record_offset: Annotated[int, Meta(description="Records of the prompt before these.")] = 0
    prompt_record_pieces: Annotated[
        list[bytes], Meta(description="For each of these records the bytes of text of the ids that it names.")
    ] = []


class Finished(Message, frozen=True, tag="finished"):
    """Closes a request: all of it has been sent. Takes no credit."""

    request_id: RequestId
    num_prompt_tokens: Annotated[int, Meta(description="Ids of the prompt.")]
    num_output_tokens: Annotated[
        int,
        Meta(description="Output ids of all sequences, with those received before, and those that `best_of` left out."),
    ]
    timings: Annotated[
        str | None,
        Meta(
            description="JSON text: the object that a reply over HTTP has in its field `timings`. Null where "
            "`generate` did not ask for it, or the client aborted."
        ),
    ] = None
    num_cached_tokens: Annotated[
        list[int],
        Meta(
            description="Ids of the prompt that were found in the prefix cache, by each sequence that got an id. The "
            "least of them is what the request was spared: the others find what that sequence computed. Empty where "
            "none got any, and from a server that is older than this field."
        ),
    ] = []


class Failed(Message, frozen=True, tag="failed"):
    """Closes a request with an error, before or after it was accepted. Takes no credit."""

    request_id: RequestId
    failure: Failure


class Pong(Message, frozen=True, tag="pong"):
    """The answer to `ping`."""

    nonce: Annotated[int, Meta(ge=0, description="The ping's.", extra_json_schema={"maximum": 2**64 - 1})] = 0


class Error(Message, frozen=True, tag="error"):
    """The connection ends: the server drops it after this message, and aborts what it had open."""

    failure: Failure


ServerMessage = Welcome | Accepted | Delta | Finished | Failed | Pong | Error
