"""Request bodies of Anthropic's Messages API, and the fields of it that are not supported.

Fields in neither a struct nor the table are ignored: metadata, service_tier, citations, cache_control of tools, of the
system prompt and of the whole request ... They don't change the text; `container` belongs to tools that are left out.
Null means a field's default everywhere.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.sampling import STOP, ShortText, Temperature, TopK, TopP

ROLES = ("user", "assistant", "system")
MAX_ID_CHARS = 256
MAX_TOOL_NAME_CHARS = 128
OWN_TYPES = r"[a-z][a-z0-9_]*_20[0-9]{6}|mcp_toolset|tool_search_tool_(bm25|regex)"
"""Types of Anthropic's own tools: almost all end in a date, their version."""
OBJECT = {"type": "object"}
"""JSON schema of fields that are not decoded"""

CallId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]


class CacheControl(msgspec.Struct):
    """The end of the block's message is a place where the prefix cache keeps the state of a model with recurrent
    layers."""

    type: Annotated[str, Meta(description="ephemeral")]
    ttl: Annotated[str, Meta(description="No effect.")] | None = None


class TextBlockParam(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlockParam(msgspec.Struct, tag_field="type", tag="thinking"):
    """In an assistant's message: its reasoning."""

    thinking: str
    signature: Annotated[str, Meta(description="No effect.")] | None = None


class RedactedThinkingBlockParam(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """In an assistant's message. It is accepted and ignored: nothing here can decrypt it."""

    data: str | None = None


class ToolUseBlockParam(msgspec.Struct, tag_field="type", tag="tool_use"):
    """In an assistant's message: a tool call."""

    id: CallId
    name: str
    input: Annotated[Raw, Meta(extra_json_schema=OBJECT)]
    cache_control: CacheControl | None = None


class ImageSource(msgspec.Struct):
    type: Annotated[str, Meta(description="base64; the server fetches no URLs.")]
    media_type: Annotated[str, Meta(description="No effect: the first bytes of the image count.")] | None = None
    data: Annotated[str, Meta(description="Base64 of a JPEG, PNG, WebP, GIF (the first frame) or BMP.")] | None = None


class ImageBlockParam(msgspec.Struct, tag_field="type", tag="image"):
    """In a user's message, or in the result of a tool: an image, for models that take them."""

    source: ImageSource | None = None
    cache_control: CacheControl | None = None


class DocumentBlockParam(msgspec.Struct, tag_field="type", tag="document"):
    """Not supported."""


class SearchResultBlockParam(msgspec.Struct, tag_field="type", tag="search_result"):
    """Not supported."""


class ToolReferenceBlockParam(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """In the result of a tool that finds tools: the model sees the name."""

    tool_name: str


class LeftOutBlockParam(msgspec.Struct):
    """In an assistant's message: a call of a tool that Anthropic ran, or its result. It is ignored."""


class ServerToolUseBlockParam(LeftOutBlockParam, tag_field="type", tag="server_tool_use"):
    """Ignored."""


class WebSearchToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="web_search_tool_result"):
    """Ignored."""


class WebFetchToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="web_fetch_tool_result"):
    """Ignored."""


class CodeExecutionToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="code_execution_tool_result"):
    """Ignored."""


class BashCodeExecutionToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="bash_code_execution_tool_result"):
    """Ignored."""


class TextEditorCodeExecutionToolResultBlockParam(
    LeftOutBlockParam, tag_field="type", tag="text_editor_code_execution_tool_result"
):
    """Ignored."""


class ToolSearchToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="tool_search_tool_result"):
    """Ignored."""


class AdvisorToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="advisor_tool_result"):
    """Ignored."""


class McpToolUseBlockParam(LeftOutBlockParam, tag_field="type", tag="mcp_tool_use"):
    """Ignored."""


class McpToolResultBlockParam(LeftOutBlockParam, tag_field="type", tag="mcp_tool_result"):
    """Ignored."""


class McpToolListingBlockParam(LeftOutBlockParam, tag_field="type", tag="mcp_tool_listing"):
    """Ignored."""


ResultBlockParam = (
    TextBlockParam | ToolReferenceBlockParam | ImageBlockParam | DocumentBlockParam | SearchResultBlockParam
)


class ToolResultBlockParam(msgspec.Struct, tag_field="type", tag="tool_result"):
    """In a user's message: the result of a tool call."""

    tool_use_id: CallId
    content: str | list[ResultBlockParam] | None = None
    is_error: Annotated[bool, Meta(description='true: the model sees "Error: " before the content.')] | None = None
    cache_control: CacheControl | None = None


ContentBlockParam = (
    TextBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
    | ServerToolUseBlockParam
    | WebSearchToolResultBlockParam
    | WebFetchToolResultBlockParam
    | CodeExecutionToolResultBlockParam
    | BashCodeExecutionToolResultBlockParam
    | TextEditorCodeExecutionToolResultBlockParam
    | ToolSearchToolResultBlockParam
    | AdvisorToolResultBlockParam
    | McpToolUseBlockParam
    | McpToolResultBlockParam
    | McpToolListingBlockParam
    | ImageBlockParam
    | DocumentBlockParam
    | SearchResultBlockParam
)


class InputMessage(msgspec.Struct):
    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentBlockParam]


class ToolParam(msgspec.Struct):
    """A tool that the client runs. Tools that only Anthropic runs are left out of the prompt."""

    name: Annotated[str, Meta(description=f"1 to {MAX_TOOL_NAME_CHARS} letters, digits, _ and -, unique.")] | None = (
        None
    )
    input_schema: Annotated[
        Raw, Meta(description="A JSON Schema of the tool's input, an object.", extra_json_schema=OBJECT)
    ] = Raw()
    description: str | None = None
    type: (
        Annotated[
            str,
            Meta(
                description="custom, or a type of Anthropic's, which needs no input_schema: bash_20250124 …",
                extra_json_schema={"pattern": f"^(custom|{OWN_TYPES})$"},
            ),
        ]
        | None
    ) = None
    display_width_px: Annotated[int, Meta(description="Of computer: the model sees it.")] | None = None
    display_height_px: Annotated[int, Meta(description="Of computer: the model sees it.")] | None = None
    enable_zoom: Annotated[bool, Meta(description="Of computer_20251124: there is an action zoom.")] | None = None


class ToolChoiceAuto(msgspec.Struct, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: Annotated[bool, Meta(description="true: at most one call in a reply.")] | None = None


class ToolChoiceAny(msgspec.Struct, tag_field="type", tag="any"):
    """The model must call tools."""

    disable_parallel_tool_use: Annotated[bool, Meta(description="true: exactly one call.")] | None = None


class ToolChoiceTool(msgspec.Struct, tag_field="type", tag="tool"):
    """The model must call this tool, once."""

    name: str
    disable_parallel_tool_use: Annotated[bool, Meta(description="No effect: there is one call.")] | None = None


class ToolChoiceNone(msgspec.Struct, tag_field="type", tag="none"):
    """The model does not see the tools."""


Display = Annotated[Literal["summarized", "omitted"], Meta(description="omitted: the reply has no thinking blocks.")]


class ThinkingEnabled(msgspec.Struct, tag_field="type", tag="enabled"):
    """The template gets enable_thinking = true."""

    budget_tokens: Annotated[
        int, Meta(ge=1, lt=2**31, description="The most tokens of reasoning; then it is ended, and the answer follows.")
    ]
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, tag_field="type", tag="adaptive"):
    """The template's default."""

    display: Display | None = None


class ThinkingDisabled(msgspec.Struct, tag_field="type", tag="disabled"):
    """The template gets enable_thinking = false, and the reply has no thinking blocks."""


class OutputFormat(msgspec.Struct):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["json_schema"]})]
    schema: Annotated[Raw, Meta(description="A JSON Schema that the reply matches.", extra_json_schema=OBJECT)] = Raw()


class OutputConfig(msgspec.Struct):
    effort: (
        Annotated[
            Literal["low", "medium", "high", "xhigh", "max"],
            Meta(description="The template gets it as reasoning_effort."),
        ]
        | None
    ) = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: Annotated[str, Meta(description="The model's name in /v1/models.")]
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: Annotated[str | list[TextBlockParam], Meta(description="The system prompt.")] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31, description="Maximum number of tokens to generate.")]
    stop_sequences: Annotated[list[ShortText], STOP] | None = None
    stream: bool | None = None
    temperature: Annotated[Temperature, Meta(description="0 is greedy. By default the model's, else 1.")] | None = None
    top_p: Annotated[TopP, Meta(description="By default the model's, else 1.")] | None = None
    top_k: Annotated[TopK, Meta(description="-1 and 0 are off. By default the model's, else off.")] | None = None


KEEP_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}

MESSAGES_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "compaction": (),
    "context_management": ({}, {"edits": []}, {"edits": [KEEP_ALL_THINKING]}),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "thread": (),
}
"""Fields of the API that are not supported, and the values besides null that have no effect, as in
`bodies.UNSUPPORTED_FIELDS`."""
