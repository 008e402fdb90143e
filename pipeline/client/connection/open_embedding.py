"""One open request for what the model's pooler makes: an embedding, or labels."""

from collections.abc import Awaitable, Callable

from pipeline.client.client import AsyncClient
from pipeline.client.connection.open_request import OpenRequest
from pipeline.client.connection.slots import Slots
from pipeline.client.connection.stream import Stream
from pipeline.client.errors import ConnectionLost
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.prompts import CheckedPrompt
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.pooling_outputs import Floats, PoolingOutput, PoolingRequestOutput
from pipeline.errors import ServerFailed, UserError

ABORTED = "the request was aborted, or its time was up, before its embedding was computed"


class OpenEmbedding(OpenRequest):
    """Opened and closed like other requests; its result is `pooled`."""

    def __init__(
        self,
        name: str,
        caller_id: str | None,
        client: AsyncClient,
        slots: Slots,
        prompt: CheckedPrompt,
        params: PoolingParams,
        loss_error: Callable[[ConnectionLost], Awaitable[UserError]],
        options: RequestOptions,
    ) -> None:
        """The parameters are those of `OpenRequest`."""
        super().__init__(name, caller_id, client, slots, prompt, SamplingParams(max_tokens=1), loss_error, options)
        self._pooling = params

    async def pooled(self) -> PoolingRequestOutput:
        """Wait for the embedding. Raises PromptError or ServerFailed."""
        if self._stream is None:
            raise ServerFailed(ABORTED)
        async with self._as_user_errors():
            numbers: Floats = await self._stream.embedded()
        if not numbers.size:
            raise ServerFailed(ABORTED)
        cached = self._stream.num_cached_tokens or 0
        if (self._pooling.task or "").startswith("token_"):
            numbers = numbers.reshape(len(self.prompt_ids), -1)
        return PoolingRequestOutput(self.name, PoolingOutput(numbers), list(self.prompt_ids), num_cached_tokens=cached)

    def _opened(self) -> Stream:
        options = self._options._asdict()
        return self._client.embed(self._prompt.prompt, self._pooling, name=self._caller_id, **options)
