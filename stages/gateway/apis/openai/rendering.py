"""POST /v1/chat/completions/render and /v1/completions/render: the prompt of a request, without running it.

The reply is a body for POST /inference/v1/generate, as in vLLM, with the text of the ids in `prompt`; for completions
a list with one body for each prompt.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.client.protocol.generation import GenerationFields
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion, read_chat, read_completion
from pipeline.stages.gateway.apis.tokens.parsing import GenerateSamplingParams
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.bodies import Body, StreamOptions
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits

Parse = Callable[[bytes, RequestLimits], ParsedRequest]


class Rendered(msgspec.Struct):
    """POST /v1/chat/completions/render"""

    request_id: Annotated[str, Meta(description="The client's own id of the request, or a random one.")]
    token_ids: Annotated[list[int], Meta(description="The prompt.")]
    sampling_params: GenerateSamplingParams
    model: str
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    prompt: Annotated[str, Meta(description="The text of the ids, with special tokens.")]
    """Pipeline's addition"""


_encoder = msgspec.json.Encoder()


class Rendering:
    """Renders one request. `read` decodes its body and `parse` checks it, as on the route that would run it. `is_list`:
    the reply is a list, with an entry for each prompt."""

    def __init__(self, read: Callable[[bytes], Body], parse: Parse, *, is_list: bool = False) -> None:
        self._is_list = is_list
        self._read = read
        self._parse = parse
        self._body: Body
        self._parsed: ParsedRequest
        self._max_model_len: int | None = None

    def parse(self, body: bytes, limits: RequestLimits) -> ParsedRequest:
        """Parse the body as a request about its prompts only. Raises ApiError."""
        self._parsed = parsed = self._parse(body, limits)
        self._body = self._read(body)
        self._max_model_len = limits.max_prompt_tokens
        if parsed.echo or parsed.echoed:
            raise invalid("echo", "'echo' cannot be rendered: there is no output")
        prompt_options = msgspec.structs.replace(
            parsed.prompt_options, any_length=True, with_text=True, with_pieces=False
        )
        return msgspec.structs.replace(
            parsed,
            n=1,
            options=msgspec.structs.replace(parsed.options, n=1, max_tokens=0),
            stream=False,
            include_usage=False,
            continuous_usage=False,
            hides_output=False,
            prompt_options=prompt_options,
        )

    def body_of(self, request: Request) -> bytes:
        """The response body of a finished request."""
        each = [self._rendered(request, prompt_request) for prompt_request in request.prompt_requests]
        return _encoder.encode(each if self._is_list else each[0])

    def _rendered(self, request: Request, prompt_request: PromptRequest) -> Rendered:
        assert prompt_request.prompt_ids is not None
        ids = prompt_request.prompt_ids.tolist()
        body, parsed = self._body, self._parsed
        name = request.parsed.request_id or parsed.dialect.id_prefix + request.id.rpartition("-")[2]
        index = request.prompt_requests.index(prompt_request)
        return Rendered(
            request_id=f"{name}-{index}" if len(request.prompt_requests) > 1 else name,
            token_ids=ids,
            sampling_params=self._params(body, len(ids)),
            model=parsed.model,
            stream=parsed.stream,
            stream_options=body.stream_options,
            cache_salt=parsed.options.cache_salt or None,
            priority=parsed.options.priority,
            prompt=prompt_request.prompt_text or "",
        )

    def _params(self, body: Body, num_ids: int) -> GenerateSamplingParams:
        """The client's parameters, with max_tokens filled in."""
        fields: dict[str, Any] = {name: getattr(body, name) for name in GenerationFields.__struct_fields__}
        max_tokens = self._parsed.options.max_tokens
        if max_tokens is None and self._max_model_len is not None:
            max_tokens = max(1, self._max_model_len - num_ids)
        return GenerateSamplingParams(**fields, max_tokens=max_tokens, logprobs=self._parsed.details.num_top)


def render_chat() -> Rendering:
    return Rendering(read_chat, parse_chat)


def render_completion() -> Rendering:
    return Rendering(read_completion, parse_completion, is_list=True)
