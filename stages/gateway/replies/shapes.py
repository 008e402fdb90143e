"""Which shape the reply to a call has."""

from pipeline.stages.gateway.replies import embeddings, responses, tokens_only
from pipeline.stages.gateway.request import Request

LARGE_BYTES = 64 * 1024
"""Of records: from here on making the reply takes more than some 5 ms."""

Events = responses.Events | tokens_only.GenerateEvents


def body_of(request: Request) -> bytes:
    """The body of a response that is not streamed. The call has finished. Raises ApiError where there is none."""
    if request.parsed.embedding is not None:
        return embeddings.embedded(request)
    return tokens_only.generated(request) if request.parsed.is_tokens_only else responses.whole(request)


def is_large(request: Request) -> bool:
    """Whether its body is to be made in a thread, so that others are served meanwhile."""
    size = sum(len(one.records) for one in request.sequences) + sum(
        len(one.prompt_records) * one.submit.n for one in request.prompt_requests
    )
    return size > LARGE_BYTES


def log_output(request: Request, body: bytes) -> bytes:
    """The same, noted for recordings: it is given out now."""
    return request.log_output("whole", body)


def events(request: Request) -> Events:
    """Those of a response that is."""
    return tokens_only.GenerateEvents(request) if request.parsed.is_tokens_only else responses.Events(request)
