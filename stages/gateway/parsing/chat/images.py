"""The images of a chat, as clients send them: base64, in a data: URL or alone, or a URL to be fetched. Pure.

Images are not decoded here. What a client says of their format is ignored: ingest looks at their first bytes.
"""

import binascii
from collections.abc import Collection

from yarl import URL

from pipeline.config.settings import LimitSettings
from pipeline.media.limits import IMAGE_ROLES, LIMITS
from pipeline.media.support import TEXT_ONLY
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.media.urls import checked_url

DETAILS = ("auto", "low", "high")
MAX_HEADER_CHARS = 256
"""Of a data: URL, up to the comma."""
PIECE_CHARS = 256 * 1024
"""Decoded at a time, because nothing else runs in the process meanwhile: 0.3 ms. A multiple of 4"""


class LinkedImage(m.EncodedImage, frozen=True, kw_only=True):
    """One that is to be fetched: it has no data yet."""

    url: URL


class ChatImages:
    """Collects the images of one chat, in order."""

    def __init__(
        self,
        why_none: str = TEXT_ONLY,
        max_images: int = LimitSettings().max_images,
        allowed_domains: Collection[str] = (),
        why_no_urls: str = "this server fetches none",
    ) -> None:
        """`why_none`: as in `RequestLimits.why_no_images`. `allowed_domains`: those of URLs that are fetched;
        `why_no_urls` says it if there are none."""
        self._why_no_urls = why_no_urls
        self._why_none = why_none
        self._max_images = max_images
        self._allowed_domains = allowed_domains
        self.found: list[m.EncodedImage] = []

    def check(self, at: str, role: str, instead: str) -> None:
        """Check that the part at this path, in a message of this role, may be an image. `instead`: what a client can
        send to a model that reads none. Raises ApiError."""
        if self._why_none:
            send = f": send {instead}" if self._why_none == TEXT_ONLY else ""
            raise invalid(at, f"'{at}' is an image, and {self._why_none}{send}", "unsupported")
        if role not in IMAGE_ROLES:
            message = f"'{at}' is an image in a message of role {role}: images must be in messages of role "
            raise invalid(at, message + " or ".join(IMAGE_ROLES), "unsupported")
        if len(self.found) >= self._max_images:
            message = f"'{at}' is one image too many: a request can have {self._max_images} (limits.max_images)"
            raise invalid(at, message, "invalid_value")

    def add_url(self, at: str, url: str, detail: str | None = None, detail_at: str = "") -> None:
        """Add the image of a data: URL, the field `at`. Raises ApiError."""
        if detail is not None and detail not in DETAILS:
            raise invalid(detail_at, f"'{detail_at}' must be one of {', '.join(DETAILS)}", "invalid_value")
        head = url[: MAX_HEADER_CHARS + 1]
        scheme = head.partition(":")[0].lower()
        if scheme in ("http", "https") and self._allowed_domains:
            try:
                checked = checked_url(url, self._allowed_domains)
            except ValueError as error:
                raise invalid(at, f"'{at}' {error}", "invalid_value") from None
            self.found.append(LinkedImage(data=b"", param=at, detail=_detail(detail), url=checked))
            return
        if scheme in ("http", "https"):
            message = f"'{at}' is an {scheme}: URL, and {self._why_no_urls}: send a data: URL, {_EXAMPLE}"
            raise invalid(at, message, "unsupported")
        comma = head.find(",")
        if scheme != "data" or comma < 0 or not head[:comma].lower().endswith(";base64"):
            raise invalid(at, f"'{at}' must be a data: URL with base64, {_EXAMPLE}", "invalid_value")
        self._add(at, url, comma + 1, _detail(detail))

    def add_base64(self, at: str, text: str) -> None:
        """Add the image whose base64 the field `at` is. Raises ApiError."""
        self._add(at, text, 0, "")

    def _add(self, at: str, text: str, start: int, detail: str) -> None:
        if (num_bytes := (len(text) - start) // 4 * 3) > LIMITS.max_bytes + 3:
            message = f"the image '{at}' has about {num_bytes} bytes; the limit is {LIMITS.max_bytes}"
            raise invalid(at, message, "invalid_image")
        if num_bytes == 0 or (len(text) - start) % 4:
            raise _no_base64(at)
        self.found.append(m.EncodedImage(_decoded(at, text, start), at, detail))


_EXAMPLE = "such as data:image/png;base64,iVBORw0…"


def _detail(given: str | None) -> str:
    return "" if given is None or given == "auto" else given


def _decoded(at: str, text: str, start: int) -> bytes:
    """Decode what is behind `start`. Raises ApiError."""
    pieces = []
    for begin in range(start, len(text), PIECE_CHARS):
        piece = text[begin : begin + PIECE_CHARS]
        try:
            data = binascii.a2b_base64(piece, strict_mode=True)
        except ValueError:
            raise _no_base64(at) from None
        if begin + PIECE_CHARS < len(text) and len(data) != PIECE_CHARS // 4 * 3:  # padding before the end
            raise _no_base64(at)
        pieces.append(data)
    return b"".join(pieces)


def _no_base64(at: str) -> ApiError:
    message = f"the image '{at}' must be base64: letters, digits, + and /, padded with = to a multiple of 4 characters"
    return invalid(at, message, "invalid_value")
