"""A model's chat template: messages in, text out, in a sandbox.

The environment is the one that templates are written for, that of transformers' `apply_chat_template`
(https://huggingface.co/docs/transformers/chat_templating): blocks trimmed, loop controls, and the same few functions.
A template is a program that came with the model and what it is given came from a client, so whatever it does wrong is
an answer to that client and nothing more.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pipeline.messages import ChatMessage

MAX_WORDS_CHARS = 500


class TemplateFailure(Exception):
    """The template refused the messages or failed on them; the words are for the client."""


class TextTooLong(Exception):
    """The template wrote more than `max_chars`."""


class ChatTemplate:
    """A compiled template. Raises TemplateFailure where `source` isn't valid."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self._bos_token = bos_token
        self._eos_token = eos_token
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            # Compiling computes what is constant and descends into what is nested, so a template from anywhere may
            # raise MemoryError, RecursionError and others besides its syntax errors. The stage must outlive it.
            raise TemplateFailure(f"the model's chat template is not valid: {_words(error)}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        max_chars: int,
        now_s: float | None = None,
    ) -> str:
        """The prompt's text. Raises TemplateFailure, or TextTooLong as soon as it is longer than `max_chars`.

        `now_s` is what a template that writes the date takes for the time, Unix seconds; without it, the clock's.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=[_plain(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
                strftime_now=partial(_strftime, now_s),
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TextTooLong
        except TextTooLong:
            raise
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise TemplateFailure(f"the chat template refused the messages: {_words(error)}") from error
        return "".join(pieces)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Plain dicts and strings: templates index them, and the sandbox knows them."""
    plain = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _words(error: Exception) -> str:
    """What the client is told. A template may quote the client, so this is cut, and made fit for the wire."""
    name, text = type(error).__name__, str(error)
    if not text:
        text = name
    elif not isinstance(error, jinja2.TemplateError):
        text = f"{name}: {text}"
    return text[:MAX_WORDS_CHARS].encode(errors="replace").decode()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = PublicNamespace
    environment.globals["raise_exception"] = _raise_exception
    return environment


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PublicNamespace(Namespace):
    """`namespace()` without names that begin with an underscore: templates are downloaded, and Python's own names on an
    object are the way out of a sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may call a name `self`
        names = dict(*args[1:], **kwargs)
        for name in names:
            _require_public(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.TemplateError(f"a namespace takes no name that begins with an underscore, as {str(name)!r} does")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime(now_s: float | None, pattern: str) -> str:
    now = datetime.now() if now_s is None else datetime.fromtimestamp(now_s)
    return now.strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
