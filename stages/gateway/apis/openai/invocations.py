"""Bodies of POST /invocations, which SageMaker sends: those of a chat, of completions or of embeddings. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from pipeline.stages.gateway.apis.embeddings.parsing import parse_embeddings
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits

IDS = {"type": "array", "items": {"type": "integer"}}
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": ["string", "integer"]}, IDS]}}]}
"""JSON schema of fields that are not decoded"""


class InvocationBody(msgspec.Struct, kw_only=True):
    """POST /invocations: a body of another route, where `model` may be left out."""

    messages: Annotated[
        Raw, Meta(description="With it: a body of /v1/chat/completions.", extra_json_schema={"type": "array"})
    ] = Raw()
    prompt: Annotated[Raw, Meta(description="Else, with it: a body of /v1/completions.", extra_json_schema=TEXTS)] = (
        Raw()
    )
    input: Annotated[Raw, Meta(description="Else, with it: a body of /v1/embeddings.", extra_json_schema=TEXTS)] = Raw()
    model: str | None = None


PARSERS = {"messages": parse_chat, "prompt": parse_completion, "input": parse_embeddings}
"""By the field that selects the parser; the first that the body has, and that is not null, is used, as in vLLM."""

_bodies = msgspec.json.Decoder(dict[str, Raw])


def parse_invocation(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /invocations. Raises ApiError."""
    try:
        fields = _bodies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse_chat(body, limits)  # which says what is wrong
    for name, parser in PARSERS.items():
        if bytes(fields.get(name, b"null")) != b"null":
            if bytes(fields.get("model", b"null")) == b"null":
                fields["model"] = Raw(msgspec.json.encode(limits.model))
                body = msgspec.json.encode(fields)
            return parser(body, limits)
    message = "the body must have one of 'messages' (a chat), 'prompt' (completions) and 'input' (embeddings)"
    raise invalid(None, message, "invalid_value")
