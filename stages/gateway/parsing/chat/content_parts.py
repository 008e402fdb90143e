"""The parts of a message's content. Each dialect says with a table how its clients write them. Pure.

    a part as clients write it ──PartTypes of the dialect──► the text of the prompt, or an error that names the part

Text is read, and images (see images.py). Audio, videos and documents would enter here in the same way:

    bytes     what a part says of them (base64, a URL) goes into the request's `ChatImages`, which knows whether the
              model takes them
    prompt    `m.ChatMessage.image_offsets` has its place among the texts, which are the `parts`
    memory    it counts in `open_bytes.py::measure`
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from pipeline.stages.gateway.errors import ApiError, invalid, shown, unsupported


class Image(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "an image"
    """For errors, as in the others"""


class Audio(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "audio"


class Video(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "a video"


class Document(msgspec.Struct, frozen=True):
    """A file, or what a search has found."""

    name: ClassVar[str] = "a document"


Media = Image | Audio | Video | Document


class PartTypes:
    """How the clients of a dialect write parts, by their `type`."""

    def __init__(self, texts: Mapping[str, str], media: Mapping[str, type[Media]]) -> None:
        """`texts`: the field with the text, for types of text."""
        self._texts = texts
        self._media = media

    def text_of(self, at: str, part: Any, types: Sequence[str]) -> str:
        """The text of a part, which has a `type` and fields for its texts. `types` are those that are allowed where it
        is. Raises ApiError."""
        kind: str | None = part.type
        if kind is None or kind not in types:
            raise self._refusal(at, kind, types)
        text: str | None = getattr(part, self._texts[kind])
        if text is None:
            raise _required(f"{at}.{self._texts[kind]}")
        return text

    def _refusal(self, at: str, kind: str | None, types: Sequence[str]) -> ApiError:
        if kind is None:
            return _required(f"{at}.type")
        if kind in self._media:
            return not_text(at, self._media[kind], f'{{"type": "{types[0]}", "{self._texts[types[0]]}": "…"}}')
        return unsupported(f"{at}.type", f"'{shown(kind)}' is not {' or '.join(types)}: content must be text")


def not_text(at: str, kind: type[Media], instead: str) -> ApiError:
    """The error for the part at this path of the body. `instead`: what a client can send."""
    return invalid(at, f"'{at}' is {kind.name}, which can't be read here: send {instead}", "unsupported")


def _required(param: str) -> ApiError:
    return invalid(param, f"'{param}' is required")
