"""A model's chat template: a chat in, text out, within bounds.

A template is a program that came with the model, and its input comes from a client. Any error of it becomes an error
for that client alone, and its cost is bounded (see sandbox.py).
"""

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

import jinja2

from pipeline.stages.ingest.templates.budget import Budget, OutOfTime, ValueTooLarge, active
from pipeline.stages.ingest.templates.sandbox import TemplateEnvironment
from pipeline.stages.ingest.templates.template_inspection import inspect_template

MAX_WORDS_CHARS = 500

MAX_SOURCE_CHARS = 2**18

MAX_TIME_PATTERN_CHARS = 256
"""A conversion such as `%999d` makes up to 256 times as many characters as its pattern has."""


class TemplateFailure(Exception):
    """The template refused the messages or failed on them; the message is for the client."""


class TextTooLong(Exception):
    """The template wrote more than `max_chars`."""


class ChatTemplate:
    """A compiled template. Raises TemplateFailure if `source` isn't valid.

    `special_tokens` are variables, as `bos_token`. `traits` are the message formats that it expects.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._specials = {"bos_token": "", "eos_token": ""} if special_tokens is None else dict(special_tokens)
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateFailure(f"the model's chat template is longer than {MAX_SOURCE_CHARS} characters")
        try:
            environment = TemplateEnvironment()
            self.source = source
            self.traits = inspect_template(environment, source)
            self._template = environment.from_string(source)
        except Exception as error:
            # Compiling is recursive, so an untrusted template may raise MemoryError, RecursionError and others besides
            # syntax errors. The stage must survive them.
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise TemplateFailure(f"the model's chat template is not valid: {_words(error)}{line}") from error

    def render(
        self, variables: Mapping[str, Any], *, max_chars: int, budget: Budget, now_s: float | None = None
    ) -> str:
        """The prompt's text. Raises TemplateFailure, OutOfTime, or TextTooLong as soon as it is longer than
        `max_chars`.

        `now_s` is the time for templates that write the date, Unix seconds; by default the clock's.
        """
        pieces: list[str] = []
        num_chars = 0
        active.budget = budget
        try:
            names = {**self._specials, "strftime_now": partial(_strftime, now_s), **variables}
            for piece in self._template.generate(names):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TextTooLong
        except (TextTooLong, OutOfTime):
            raise
        except ValueTooLarge as error:
            raise TemplateFailure(f"the chat template exceeds its limits: {error}") from error
        except Exception as error:  # a template may raise anything
            raise TemplateFailure(f"the chat template refused the messages: {_words(error)}") from error
        return "".join(pieces)


def _words(error: Exception) -> str:
    """The message for the client. A template may quote the client's text, so it is shortened and made valid UTF-8."""
    name, text = type(error).__name__, str(error)
    if not text:
        text = name
    elif not isinstance(error, jinja2.TemplateError):
        text = f"{name}: {text}"
    return text[:MAX_WORDS_CHARS].encode(errors="replace").decode()


def _strftime(now_s: float | None, pattern: str) -> str:
    if isinstance(pattern, str) and len(pattern) > MAX_TIME_PATTERN_CHARS:
        raise ValueTooLarge(
            f"it writes the time in a pattern of {len(pattern)} characters, the limit is {MAX_TIME_PATTERN_CHARS}"
        )
    now = datetime.now() if now_s is None else datetime.fromtimestamp(now_s)
    return now.strftime(pattern)
