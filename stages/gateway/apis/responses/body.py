"""The body of POST /v1/responses, and the fields of it that are not supported."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.conversation import Kwargs, ReasoningEffort
from pipeline.client.protocol.generation import OBJECT, GenerationFields, JsonSchemaFormat
from pipeline.client.protocol.request import CacheSalt, MaxTokens, Priority, Timeout
from pipeline.stages.gateway.apis.responses.items import InputItem
from pipeline.stages.gateway.parsing.bodies import UNSUPPORTED_FIELDS
from pipeline.stages.gateway.parsing.field_names import FieldNames

MAX_METADATA = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED)

MetadataKey = Annotated[str, Meta(max_length=MAX_KEY_CHARS)]
MetadataValue = Annotated[str, Meta(max_length=MAX_VALUE_CHARS)]
Metadata = Annotated[
    dict[MetadataKey, MetadataValue],
    Meta(max_length=MAX_METADATA, description="The response repeats it."),
]


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """The format of a custom tool's input. The model reads it; it is not enforced."""

    type: Annotated[str, Meta(description="text or grammar")]
    syntax: str | None = None
    definition: str | None = None


class FunctionTool(msgspec.Struct, omit_defaults=True):
    """A function or a custom tool that the model may call"""

    type: Annotated[str, Meta(description="function or custom")]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    parameters: Annotated[
        Raw, Meta(description="A JSON Schema of its arguments: an object.", extra_json_schema=OBJECT)
    ] = Raw()
    strict: bool | None = None
    format: Annotated[CustomFormat, Meta(description="Of a custom tool's input.")] | None = None


class ResponseTool(FunctionTool, omit_defaults=True):
    """An entry of `tools`"""

    type: Annotated[
        str,
        Meta(description="function, custom or namespace. The model does not get tools of other types."),
    ]
    tools: Annotated[list[FunctionTool], Meta(description="The tools of a namespace.")] | None = None


class AllowedTool(msgspec.Struct, omit_defaults=True):
    """Names an entry of `tools`"""

    type: str
    name: str | None = None
    server_label: str | None = None


class FunctionChoice(msgspec.Struct, omit_defaults=True):
    """Requires a call of one tool, or restricts the tools"""

    type: Annotated[str, Meta(description="function, custom or allowed_tools")]
    name: Annotated[str, Meta(description="Of the function or custom tool.")] | None = None
    mode: Annotated[str, Meta(description="Of allowed_tools: auto or required")] | None = None
    tools: Annotated[list[AllowedTool], Meta(description="Of allowed_tools: those that the model gets.")] | None = None


class TextFormat(JsonSchemaFormat, kw_only=True):
    """`format` of `text`"""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})]


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"], Meta(description="No effect.")] | None = None


class ReasoningConfig(msgspec.Struct):
    effort: ReasoningEffort | None = None
    summary: (
        Annotated[str, Meta(description="Only auto: there is no summary, the item has the reasoning itself.")] | None
    ) = None
    generate_summary: Annotated[str, Meta(description="As summary.")] | None = None


class ResponseStreamOptions(msgspec.Struct):
    include_obfuscation: Annotated[bool, Meta(description="Only false.")] | None = None


class ResponsesBody(GenerationFields, kw_only=True):
    """POST /v1/responses"""

    model: Annotated[str, Meta(description="The model's name in /v1/models; default the served model.")] | None = None
    input: (
        Annotated[str | list[InputItem], Meta(description="A user's message, or items of a conversation.")] | None
    ) = None
    instructions: Annotated[str, Meta(description="A system message before everything else.")] | None = None
    tools: Annotated[list[ResponseTool], Meta(description="Tools that the model may call.")] | None = None
    tool_choice: (
        Annotated[str | FunctionChoice, Meta(description="none, auto, required, a function by name, or allowed_tools.")]
        | None
    ) = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one function call.")] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[MaxTokens, Meta(description="Maximum number of tokens to generate.")] | None = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, description="With include: this many top logprobs for each token.")] | None
    ) = None
    include: (
        Annotated[list[str], Meta(description=f"{INCLUDE_LOGPROBS}; {INCLUDE_ENCRYPTED} has no effect.")] | None
    ) = None
    metadata: Metadata | None = None
    truncation: (
        Annotated[
            Literal["auto", "disabled"], Meta(description="auto: a prompt that is too long loses its first tokens.")
        ]
        | None
    ) = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Annotated[bool, Meta(description="Whether the response is kept; default true.")] | None = None
    previous_response_id: Annotated[str, Meta(description="Continue the conversation of a stored response.")] | None = (
        None
    )
    background: (
        Annotated[bool, Meta(description="true: the response goes on if the client disconnects; GET returns it.")]
        | None
    ) = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Kwargs = Raw()
    request_id: str | None = None
    """Accepted by /abort_requests; the header X-Request-Id takes precedence."""
    priority: Priority | None = None
    """vLLM's"""
    cache_salt: CacheSalt | None = None
    """vLLM's"""
    timeout_s: Timeout | None = None
    """Pipeline's"""


OWN_FIELDS = frozenset(ResponsesBody.__struct_fields__)
RESPONSES_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    name: values for name, values in UNSUPPORTED_FIELDS.items() if name not in OWN_FIELDS
} | {
    # OpenAI
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "prediction": (),
    "prompt": (),
    # Fields of chats, which have other names here
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "reasoning_effort": (),
    "best_of": (1,),
    "echo": (False,),
}
"""As `bodies.UNSUPPORTED_FIELDS`"""


renamed = FieldNames(
    (
        (r"tools\[(\d+)\]\.function\b", r"tools[\1]"),
        (r"response_format\.json_schema\b", "text.format"),
        (r"response_format\b", "text.format"),
        (r"tool_choice\.function\b", "tool_choice"),
        (r"messages\b", "input"),
        (r"prompt\b", "input"),
        (r"max_tokens\b", "max_output_tokens"),
        (r"reasoning_effort\b", "reasoning.effort"),
    )
).renamed
"""The error with the field's name in this API, also where the message quotes it."""
