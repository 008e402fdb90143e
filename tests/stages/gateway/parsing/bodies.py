"""Helpers that parse request bodies or return their errors."""

import json
from typing import Any

import pytest

from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from tests.stages.gateway.gate import CHAT, COMPLETION

LIMITS = RequestLimits(model="tiny", max_sequences=64)


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps(CHAT | fields).encode(), LIMITS)


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps(COMPLETION | fields).encode(), LIMITS)


def refused(body: Any, parse: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)
    return error.value
