"""What a response repeats of its request. Pure."""

import msgspec


class CalledTool(msgspec.Struct, frozen=True):
    """How the output names a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """A request of POST /v1/responses, besides its prompt and its sampling options."""

    background: bool = False
    store: bool = False
    """Whether the response is kept."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    effort: str | None = None
    summary: str | None = None
    safety_identifier: str | None = None
    text: str = '{"format":{"type":"text"}}'
    """JSON, like the next two"""
    tool_choice: str = '"auto"'
    tools: str = "[]"
    top_logprobs: int = 0
    truncation: str = "disabled"
    user: str | None = None
    called: dict[str, CalledTool] = {}
    """By the name of the chat's function: tools that the output names in another way"""
    conversation_bytes: int = 0
    """Size of the items of its conversation, which are kept until the response is stored; 0 if it is not."""
