"""Which shape the reply to a call has."""

from pipeline.stages.gateway import embeddings, responses, tokens_only
from pipeline.stages.gateway.requests import Call

Events = responses.Events | tokens_only.GenerateEvents


def whole(call: Call) -> bytes:
    """The body of a response that is not streamed. The call has finished. Raises ApiError where there is none."""
    if call.ask.embedding is not None:
        return embeddings.embedded(call)
    return tokens_only.generated(call) if call.ask.is_tokens_only else responses.whole(call)


def events(call: Call) -> Events:
    """Those of a response that is."""
    return tokens_only.GenerateEvents(call) if call.ask.is_tokens_only else responses.Events(call)
