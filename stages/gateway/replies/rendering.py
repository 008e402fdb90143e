"""POST /v1/chat/completions/render and /v1/completions/render: what a request would be to the model.

The reply is a body for POST /inference/v1/generate, as vLLM has it, and what the ids say, in `prompt`; for completions
a list of such, one for each prompt. Nothing is computed from it.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.bodies import Body, StreamOptions
from pipeline.stages.gateway.parsing.parse import Ask, Limits
from pipeline.stages.gateway.parsing.sampling_fields import SamplingFields
from pipeline.stages.gateway.replies.tokens_only import SamplingParams
from pipeline.stages.gateway.requests import Call, Request

Parse = Callable[[bytes, Limits], Ask]


class Rendered(msgspec.Struct):
    """POST /v1/chat/completions/render"""

    request_id: Annotated[str, Meta(description="The client's own name for it, or one that is drawn.")]
    token_ids: Annotated[list[int], Meta(description="The prompt.")]
    sampling_params: SamplingParams
    model: str
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    prompt: Annotated[str, Meta(description="What the ids say, special tokens shown.")]
    """Ours"""


_encoder = msgspec.json.Encoder()


class Rendering:
    """Of one call. `read` decodes its body, `parse` checks it, as on the route that would compute it."""

    def __init__(self, read: Callable[[bytes], Body], parse: Parse) -> None:
        self._read = read
        self._parse = parse
        self._body: Body
        self._ask: Ask
        self._max_model_len: int | None = None

    def parse(self, body: bytes, limits: Limits) -> Ask:
        """As a call about its prompts alone. Raises ApiError."""
        self._ask = ask = self._parse(body, limits)
        self._body = self._read(body)
        self._max_model_len = limits.max_prompt_tokens
        if ask.echo:
            raise invalid("echo", "'echo' can't be rendered: there is no output to come behind the prompt")
        options = msgspec.structs.replace(ask.prompt_options, any_length=True, with_text=True, with_pieces=False)
        return msgspec.structs.replace(
            ask,
            n=1,
            best_of=None,
            max_tokens=0,
            stream=False,
            include_usage=False,
            continuous_usage=False,
            hides_output=False,
            prompt_options=options,
        )

    def body_of(self, call: Call) -> bytes:
        """The body of the response. The call has finished."""
        each = [self._rendered(call, request) for request in call.requests]
        return _encoder.encode(each[0] if self._ask.is_chat else each)

    def _rendered(self, call: Call, request: Request) -> Rendered:
        assert request.prompt_ids is not None
        ids = request.prompt_ids.tolist()
        body, ask = self._body, self._ask
        name = call.ask.request_id or f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{call.id.rpartition('-')[2]}"
        place = call.requests.index(request)
        return Rendered(
            request_id=f"{name}-{place}" if len(call.requests) > 1 else name,
            token_ids=ids,
            sampling_params=self._params(body, len(ids)),
            model=ask.model,
            stream=ask.stream,
            stream_options=body.stream_options,
            cache_salt=ask.cache_salt or None,
            priority=ask.priority,
            prompt=request.prompt_text or "",
        )

    def _params(self, body: Body, num_ids: int) -> SamplingParams:
        """As the client gave them, and as many tokens as there may be."""
        fields: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
        max_tokens = self._ask.max_tokens
        if max_tokens is None and self._max_model_len is not None:
            max_tokens = max(1, self._max_model_len - num_ids)
        return SamplingParams(**fields, max_tokens=max_tokens, logprobs=self._ask.details.num_top)
