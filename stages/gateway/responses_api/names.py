"""Errors with the field names of POST /v1/responses.

A response is run as a chat, so later stages, and checks that both routes share, name a chat's fields.
"""

import re

from pipeline.stages.gateway.errors import ApiError

_NAMES = (
    (re.compile(r"tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"response_format\.json_schema\b"), "text.format"),
    (re.compile(r"response_format\b"), "text.format"),
    (re.compile(r"tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"messages\b"), "input"),
    (re.compile(r"prompt\b"), "input"),
    (re.compile(r"max_tokens\b"), "max_output_tokens"),
    (re.compile(r"reasoning_effort\b"), "reasoning.effort"),
)
"""A chat's fields at the start of a path, and a response's."""


def renamed(error: ApiError) -> ApiError:
    """The error with the field's name in this API, also where the message quotes it."""
    param = _param(error.param)
    message = re.sub(r"'([a-z_]+[^' ]*)'", lambda match: f"'{_param(match[1])}'", error.message)
    if (param, message) == (error.param, error.message):
        return error
    retry_after_s = 1 if error.retry_after_s is None else error.retry_after_s
    return ApiError(error.status, message, param, error.code, retry_after_s)


def _param(param: str | None) -> str | None:
    for pattern, name in _NAMES:
        if param is not None and (match := pattern.match(param)):
            return match.expand(name) + param[match.end() :]
    return param
