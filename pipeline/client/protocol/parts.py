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
JsonText = Annotated[str | None, Meta(description="JSON text.")]


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
