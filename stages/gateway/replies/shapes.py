"""Which shape the reply to a call has."""

from pipeline.stages.gateway.replies import embeddings, responses, tokens_only
from pipeline.stages.gateway.requests import Call

LARGE_BYTES = 64 * 1024
"""Of records: from here on making the reply takes more than some 5 ms."""

Events = responses.Events | tokens_only.GenerateEvents


def body_of(call: Call) -> bytes:
    """The body of a response that is not streamed. The call has finished. Raises ApiError where there is none."""
    if call.ask.embedding is not None:
        return embeddings.embedded(call)
    return tokens_only.generated(call) if call.ask.is_tokens_only else responses.whole(call)


def is_large(call: Call) -> bool:
    """Whether its body is to be made in a thread, so that others are served meanwhile."""
    size = sum(len(one.records) for one in call.sequences) + sum(
        len(one.prompt_records) * one.submit.n for one in call.requests
    )
    return size > LARGE_BYTES


def told(call: Call, body: bytes) -> bytes:
    """The same, noted for recordings: it is given out now."""
    return call.told("whole", body)


def events(call: Call) -> Events:
    """Those of a response that is."""
    return tokens_only.GenerateEvents(call) if call.ask.is_tokens_only else responses.Events(call)
