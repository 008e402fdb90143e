"""The images of requests: decoded one after the other, before their prompt is prepared."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from pipeline.media import config as media
from pipeline.media.placeholders import Run
from pipeline.metrics.media_stats import ImageCounts
from pipeline.runtime.messages import ChatPrompt, Failure, MediaItem, Prompt, Submit
from pipeline.runtime.replay_context import ReplayContext
from pipeline.shm.arrays import Array
from pipeline.stages.ingest.media.image_cache import DecodedImage
from pipeline.stages.ingest.media.image_decoder import ImageDecoder
from pipeline.stages.ingest.media.prompt_images import PromptImages
from pipeline.stages.ingest.prompts.rejection import RequestRejected


class RecordedImage(msgspec.Struct, array_like=True, frozen=True):
    """A decoded image in a recording: a replay has no process that decodes."""

    key: bytes
    pixels: bytes
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    text: str
    run_lengths: tuple[int, ...]


class RecordedOutcome(msgspec.Struct, array_like=True, frozen=True):
    images: list[RecordedImage]
    failure: Failure | None = None


_outcomes = msgspec.msgpack.Decoder(RecordedOutcome)


class RequestImages:
    """Of the model in a prepared folder, which may read none."""

    def __init__(self, model_dir: Path, title: str) -> None:
        self._config = media.load(model_dir)
        self._decoder = None if self._config is None else ImageDecoder(model_dir, title)
        self.max_rows = 0
        """Rows of embeddings that one image may have, from `Start` on; 0 if the server encodes none."""

    async def outcome(self, submit: Submit, context: ReplayContext) -> list[DecodedImage] | RequestRejected:
        """What becomes of a request's images. A replay has those of the recording."""
        found: list[DecodedImage] | RequestRejected
        try:
            found = [] if context.is_replaying else await self.decode(submit)
        except RequestRejected as rejection:
            found = rejection.with_traceback(None)
        data = encode_outcome(found) if context.is_recording else b""
        recorded = await context.await_external("decoded", submit.request_id, data)
        return decode_outcome(recorded) if context.is_replaying else found

    async def decode(self, submit: Submit) -> list[DecodedImage]:
        """The images of a request. Raises RequestRejected."""
        found = []
        for image in submit.images:
            if self._decoder is None or self.max_rows == 0:
                message = f"'{image.param}' is an image, and this model reads text only"
                raise RequestRejected(Failure(400, message, image.param, "unsupported"))
            decoded = await self._decoder.decode(image.data, image.param, detail=image.detail, scope=submit.scope_id)
            if (num_rows := sum(decoded.run_lengths)) > self.max_rows:
                message = (
                    f"the image '{image.param}' takes {num_rows} rows of embeddings, and the server has room for "
                    f"{self.max_rows}: raise execute.encoder_cache_bytes, or send a smaller image"
                )
                raise RequestRejected(Failure(400, message, image.param, "image_too_large"))
            found.append(decoded)
        return found

    def counts(self) -> ImageCounts | None:
        """None if the server takes no images."""
        return self._decoder.counts() if self._decoder is not None and self.max_rows else None

    def in_prompt(self, prompt: Prompt, images: Sequence[DecodedImage]) -> PromptImages:
        """Puts the images into this prompt."""
        assert self._config is not None, "images were decoded for a model that reads none"
        return PromptImages(self._config, images, is_chat=isinstance(prompt, ChatPrompt))

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()


def media_items(
    images: Sequence[DecodedImage],
    runs: Sequence[Sequence[Run]],
    put: Callable[["np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"], Array],
) -> list[MediaItem]:
    """The images of a prompt for schedule; `put` publishes an array."""
    return [
        MediaItem(
            image.key,
            [(run.offset, run.length) for run in where],
            list(image.grid),
            put(image.pixels),
            list(image.pixels.shape),
        )
        for image, where in zip(images, runs, strict=True)
    ]


def encode_outcome(outcome: Sequence[DecodedImage] | RequestRejected) -> bytes:
    """Encode what became of a request's images for a recording."""
    if isinstance(outcome, RequestRejected):
        return msgspec.msgpack.encode(RecordedOutcome([], outcome.failure))
    images = [
        RecordedImage(one.key, one.pixels.tobytes(), one.pixels.shape, one.grid, one.text, one.run_lengths)
        for one in outcome
    ]
    return msgspec.msgpack.encode(RecordedOutcome(images))


def decode_outcome(data: bytes) -> list[DecodedImage] | RequestRejected:
    outcome = _outcomes.decode(data)
    if outcome.failure is not None:
        return RequestRejected(outcome.failure)
    return [
        DecodedImage(
            one.key, np.frombuffer(one.pixels, np.uint8).reshape(one.shape), one.grid, one.text, one.run_lengths
        )
        for one in outcome.images
    ]
