"""Chooses the shape of a reply by the request's route."""

from pipeline.stages.gateway.infill import reply as infill
from pipeline.stages.gateway.infill.reply import InfillEvents
from pipeline.stages.gateway.ollama import reply as ollama
from pipeline.stages.gateway.ollama.reply import OllamaLines
from pipeline.stages.gateway.replies import embeddings, responses, tokens_only
from pipeline.stages.gateway.replies.anthropic import messages
from pipeline.stages.gateway.replies.anthropic.events import MessageEvents
from pipeline.stages.gateway.request import Request
from pipeline.stages.gateway.responses_api import reply
from pipeline.stages.gateway.responses_api.reply import ResponseEvents

LARGE_BYTES = 64 * 1024
"""Size of records, or of what the request keeps for its reply, from which building it takes more than about 5 ms."""

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON_LINES = "application/x-ndjson"

LARGE_CHARS = 10_000
"""Text from which parsing it for calls and reasoning may take more than about 5 ms."""

Events = responses.Events | tokens_only.GenerateEvents | MessageEvents | ResponseEvents | OllamaLines | InfillEvents


def body_of(request: Request) -> bytes:
    """The response body of a finished request. Raises ApiError if there is none."""
    if request.parsed.ollama is not None:
        return ollama.whole(request)
    if request.parsed.is_infill:
        return infill.whole(request)
    if request.parsed.embedding is not None:
        return embeddings.embedded(request)
    if request.parsed.is_messages:
        return messages.whole(request)
    if request.parsed.response is not None:
        return reply.whole(request)
    return tokens_only.generated(request) if request.parsed.is_tokens_only else responses.whole(request)


def is_large(request: Request) -> bool:
    """Whether to build the body in a thread, so that the event loop is not blocked: it is long, or what it repeats or
    stores of the request is."""
    size = sum(len(one.records) for one in request.sequences) + sum(
        len(one.prompt_records) * one.submit.options.n for one in request.prompt_requests
    )
    num_parsed = sum(one.num_chars for one in request.choices) if request.parsed.reply is not None else 0
    return size > LARGE_BYTES or num_parsed > LARGE_CHARS or request.num_bytes > LARGE_BYTES


def log_output(request: Request, body: bytes) -> bytes:
    """Record a response body that is about to be sent. Returns it."""
    return request.log_output("whole", body)


def events(request: Request) -> Events:
    """The events of a streamed response."""
    if request.parsed.ollama is not None:
        return OllamaLines(request)
    if request.parsed.is_infill:
        return InfillEvents(request)
    if request.parsed.is_messages:
        return MessageEvents(request)
    if request.parsed.response is not None:
        return ResponseEvents(request)
    return tokens_only.GenerateEvents(request) if request.parsed.is_tokens_only else responses.Events(request)


def stream_type(request: Request) -> str:
    """The media type of a streamed response."""
    return EVENT_STREAM if request.parsed.ollama is None else JSON_LINES
