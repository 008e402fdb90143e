"""Limits on what open requests with images hold, so that those of texts find room beside them. Pure.

Encoding an image takes a hundred times as long as a short text, so requests with images wait, and many of them would
take all that may be open. They may have half of the sequences and prompt tokens, and their encoded images have a limit
of bytes of their own, gateway.max_open_media_bytes, apart from that of everything else:

    admit ──► take ──► accepted (ingest needs the images no more) ──► give, when nothing can need them again

A request with images is admitted if no other with images is open, whatever it needs.
"""

from typing import TYPE_CHECKING

import msgspec

from pipeline.stages.gateway.admission.end_rates import Amounts, EndRates
from pipeline.stages.gateway.admission.open_bytes import PROMPT_COPIES, images_bytes
from pipeline.stages.gateway.errors import overloaded

if TYPE_CHECKING:
    from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest

MEDIA_PART = 2
"""The part of the sequences and prompt tokens, a half, that requests with images may have."""
NO_LIMIT = 2**62
WORDS = {
    "sequences": ("sequences", "half of gateway.max_open_sequences"),
    "tokens": ("prompt tokens", "half of gateway.max_open_tokens"),
    "num_bytes": ("bytes", "gateway.max_open_media_bytes"),
}
"""What each of `Amounts` is called, and its setting."""


class MediaAdmission:
    """Counts the open requests with images of one gateway. Times are by time.monotonic()."""

    def __init__(self, max_sequences: int = NO_LIMIT, max_tokens: int = NO_LIMIT, max_bytes: int = NO_LIMIT) -> None:
        self.rescale(max_sequences, max_tokens, max_bytes)
        self.num_sequences = self.num_tokens = self.num_bytes = 0
        self._rates = EndRates()

    def rescale(self, max_sequences: int, max_tokens: int, max_bytes: int) -> None:
        """Limits of all requests' sequences and tokens, and of the images' bytes."""
        self.max_sequences, self.max_tokens = max_sequences // MEDIA_PART, max_tokens // MEDIA_PART
        self.max_bytes = max_bytes

    def check_room(self, num_bytes: int, now_s: float) -> None:
        """Call it before the body is read, which has so many bytes of images at least. Raises ApiError, 503."""
        self.admit(0, 0, num_bytes, now_s)

    def admit(self, num_sequences: int, num_tokens: int, num_bytes: int, now_s: float) -> None:
        """Raises ApiError, 503, if a request with images of this size can't be admitted now."""
        if not self.num_sequences:
            return
        self._admit("sequences", num_sequences, self.num_sequences, self.max_sequences, now_s)
        self._admit("tokens", num_tokens, self.num_tokens, self.max_tokens, now_s)
        self._admit("num_bytes", num_bytes, self.num_bytes, self.max_bytes, now_s)

    def _admit(self, name: str, num: int, used: int, most: int, now_s: float) -> None:
        if num > (left := max(0, most - used)):
            words, setting = WORDS[name]
            raise overloaded(
                f"{left} of {most} {words} are free for requests with images, and this one has {num} ({setting})",
                self._rates.retry_after_s(now_s, Amounts(**{name: min(num - left, used)})),
                by_size=name != "sequences",
            )

    def take(self, one: "PromptRequest", now_s: float) -> None:
        """A prompt request was opened, with images or without."""
        if not one.submit.images:
            return
        if not self.num_sequences:
            self._rates.begin(now_s)
        one.media_bytes = open_media_bytes(images_bytes(one.submit.images))
        self._change(one.submit.options.n, one.num_counted, one.media_bytes)

    def accepted(self, one: "PromptRequest", num_tokens: int) -> None:
        """Ingest has sent the ids of a prompt, in which `num_counted` is an estimate still."""
        if one.media_bytes:
            num_bytes = one.media_bytes // PROMPT_COPIES
            self._change(0, num_tokens - one.num_counted, num_bytes - one.media_bytes)
            one.media_bytes = num_bytes

    def give(self, one: "PromptRequest", now_s: float) -> None:
        """A prompt request is closed: it is not submitted again, so its images go. Idempotent."""
        if one.media_bytes:
            freed = Amounts(one.submit.options.n, one.num_counted, one.media_bytes)
            self._change(*(-num for num in freed))
            self._rates.end(now_s, freed)
            one.media_bytes, one.submit = 0, msgspec.structs.replace(one.submit, images=[])

    def _change(self, num_sequences: int, num_tokens: int, num_bytes: int) -> None:
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        self.num_bytes += num_bytes
        assert min(self.num_sequences, self.num_tokens, self.num_bytes) >= 0, "more was returned than taken"


def open_media_bytes(num_bytes: int) -> int:
    """What images of so many bytes take until ingest has accepted their request: it has them too."""
    return PROMPT_COPIES * num_bytes
