"""What a body says about its model: which one, and how long it stays loaded. Pure."""

import re
from typing import Any

import msgspec

from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.decode import decode

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"-?(?:\d{1,12}(?:\.\d{0,9})?(?:ns|us|µs|ms|s|m|h))+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
MAX_KEEP_S = 1e9


class ModelFields(msgspec.Struct):
    """The fields of all APIs' bodies that are about the model."""

    model: Any = None
    name: Any = None
    """Ollama's older name of `model`."""
    keep_alive: Any = None
    """Ollama's"""
    ttl: Any = None
    """LM Studio's: seconds without a request after which the model is unloaded."""
    lora_name: Any = None
    """Of an adapter that is to be loaded."""
    stream: Any = None
    background: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def has_input(self) -> bool:
        """Whether it asks for output, in Ollama's API."""
        return any(bytes(one) not in (b"", b"null", b'""', b"[]") for one in (self.prompt, self.messages, self.input))


_decoder = msgspec.json.Decoder(ModelFields)


def model_fields_of(body: bytes) -> ModelFields:
    """Read a body. Raises ApiError, 400, if it is no JSON object."""
    return decode(_decoder, body, {})


def keep_s(value: Any) -> float | None:
    """Seconds of a number, or of a duration as Go writes it (`5m`, `1h30m`, `-1`); below 0 for ever, None if it is not
    given. Raises ApiError."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(max(-1, min(value, MAX_KEEP_S)))  # an int may be larger than any float
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,12}", value, re.ASCII):
        return max(-1.0, min(float(value), MAX_KEEP_S))
    if isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))
        return -1.0 if value.startswith("-") else min(seconds, MAX_KEEP_S)
    raise invalid("keep_alive", "'keep_alive' and 'ttl' need seconds or a duration such as \"5m\"; -1 is for ever")
