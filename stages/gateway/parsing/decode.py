"""Decodes JSON bodies into structs, and turns the decoder's errors into ApiError. Pure."""

import codecs
import contextlib
import gc
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pipeline.http_server.bodies.json_depth import PIECE_BYTES
from pipeline.stages.gateway import errors
from pipeline.stages.gateway.errors import invalid, unsupported
from pipeline.stages.gateway.parsing.bodies import B, has_no_effect
from pipeline.stages.gateway.parsing.integral_floats import with_integers

_utf8 = codecs.getincrementaldecoder("utf-8")


def decode(decoder: "msgspec.json.Decoder[B]", body: bytes, unsupported_fields: Mapping[str, tuple[Any, ...]]) -> B:
    """Decode a body. Raises ApiError if it is invalid, or if it has a field that is not supported."""
    _check_text(body)
    with without_gc():
        request = _decode(decoder, body)
    for name, values in unsupported_fields.items():
        if not has_no_effect(getattr(request, name), values):
            raise unsupported(name)
    return request


def _check_text(body: bytes) -> None:
    """The decoder skips the bytes of fields that it does not know, or that stay JSON, and these are text later. Raises
    ApiError."""
    if body.isascii():
        return
    decoder = _utf8()
    try:
        for begin in range(0, len(body), PIECE_BYTES):  # whole, it would take four times the memory, in one go
            decoder.decode(body[begin : begin + PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise invalid(None, "the body is not valid UTF-8", "invalid_json") from error


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection: a body or a message may decode to a million lists, and scanning these while they are
    created takes four times as long as creating them. They have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decode(decoder: "msgspec.json.Decoder[B]", body: bytes) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" in str(error) and (rewritten := with_integers(body, decoder.type)) not in (body, body.strip()):
            return _decode(decoder, rewritten)
        raise errors.of_validation(error, decoder.type, body) from error
    except msgspec.DecodeError as error:
        raise errors.of_malformed(error, body, json.loads) from error
    except RecursionError as error:
        raise invalid(None, "the body's JSON is nested too deeply", "invalid_json") from error
