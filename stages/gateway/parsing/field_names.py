"""Errors with a route's own field names.

Requests of several APIs are run as chats, so later stages, and checks that routes share, name a chat's fields. Pure.
"""

import re
from collections.abc import Sequence

from pipeline.stages.gateway.errors import ApiError

_QUOTED = re.compile(r"'([a-z_][^' ]*)'")


class FieldNames:
    """Patterns of a chat's fields at the start of a path, and the names that a route has for them."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self._names = [(re.compile(pattern), name) for pattern, name in names]

    def renamed(self, error: ApiError) -> ApiError:
        """The error with the field's name in this API, also where the message quotes it."""
        param = error.param and self._of(error.param)
        message = _QUOTED.sub(lambda match: f"'{self._of(match[1])}'", error.message)
        if (param, message) == (error.param, error.message):
            return error
        retry_after_s = 1 if error.retry_after_s is None else error.retry_after_s
        return ApiError(error.status, message, param, error.code, retry_after_s)

    def _of(self, param: str) -> str:
        for pattern, name in self._names:
            if match := pattern.match(param):
                param = match.expand(name) + param[match.end() :]
        return param
