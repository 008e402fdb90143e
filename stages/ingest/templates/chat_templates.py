"""The chat templates of a model: one for chats, and one for chats with tools if the model has two."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.stages.ingest.templates import conversation
from pipeline.stages.ingest.templates.budget import STEPS_PER_S, Budget, OutOfTime
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure, TextTooLong
from pipeline.stages.ingest.templates.tools_as_text import with_tools_as_text

DEFAULT = "default"
TOOL_USE = "tool_use"

SHORT_STEPS = 15_000
"""What a template may take in the loop: about 10 ms."""


PROBE = "Answer in one word."
"""A system message that shows whether a template takes them."""
PROBE_CHARS = 100_000


class NeedsTime(Exception):
    """The template takes longer than the loop may wait."""


class ChatTemplates:
    """The templates of one model, by name. `failure` is the error if there is none."""

    def __init__(
        self, templates: Mapping[str, ChatTemplate], failure: str, timeout_s: float, *, shows_tools: bool = True
    ) -> None:
        """`shows_tools`: the templates get tools, calls and results. Otherwise, the text of messages has them."""
        self._shows_tools = shows_tools
        self._takes_system: bool | None = None
        self._templates = templates
        self._failure = failure
        self._timeout_s = timeout_s

    def text(self, prompt: ChatPrompt, *, max_chars: int, now_s: float | None, is_short: bool) -> str:
        """The prompt's text: the first of `texts`."""
        return self.texts(prompt, max_chars=max_chars, now_s=now_s, is_short=is_short)[0]

    def texts(
        self,
        prompt: ChatPrompt,
        *,
        max_chars: int,
        now_s: float | None,
        is_short: bool,
        masked: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    ) -> tuple[str, str | None]:
        """The prompt's text, no longer than `max_chars`, and a second one of the same length, of `masked` variables, if
        `masked` returns any. Raises BadChat, TemplateFailure, TextTooLong, or OutOfTime if it takes longer than the
        settings allow.

        With `is_short` it takes a few milliseconds at most, or raises NeedsTime. The result depends on the prompt
        alone, except that a very slow machine may raise OutOfTime.
        """
        if not self._shows_tools:
            prompt = with_tools_as_text(prompt, takes_system=self._knows_system())
        template = self._template(prompt)
        variables = conversation.variables(prompt, template.traits)
        conversation.check_roles(prompt, template.source)
        marked = conversation.with_marks(prompt)
        if is_short:
            budget = Budget(SHORT_STEPS)
        else:
            num_steps = int(STEPS_PER_S * self._timeout_s) + conversation.num_chars(prompt)
            budget = Budget(num_steps, self._timeout_s, time.monotonic)
        try:
            changed = masked(variables) if masked is not None else None  # before the template can change them
            if marked is not None:
                marks = conversation.variables(marked, template.traits)
                conversation.check_marks(
                    template.render(marks, max_chars=max_chars, budget=budget, now_s=now_s), marked
                )
            text = template.render(variables, max_chars=max_chars, budget=budget, now_s=now_s)
            other = None
            if changed is not None:
                other = template.render(changed, max_chars=max_chars, budget=budget, now_s=now_s)
        except OutOfTime:
            if is_short:
                raise NeedsTime from None
            raise
        if other is not None and len(other) != len(text):
            raise BadChat(
                "a message contains special tokens of the model, and the chat template changes with them, so they "
                "can't be distinguished from its own: remove them, or set chat.allow_special_tokens_in_content",
                "messages",
            )
        if prompt.continue_final_message:
            text = conversation.up_to_tag(text, prompt)
        return text, None if other is None else other[: len(text)]

    def _knows_system(self) -> bool:
        """Whether the default template shows system messages. Found out by a try, once."""
        if self._takes_system is None:
            probe = ChatPrompt([ChatMessage("system", PROBE), ChatMessage("user", "Hi")])
            template = self._template(probe)
            variables = conversation.variables(probe, template.traits)
            try:
                text = template.render(variables, max_chars=PROBE_CHARS, budget=Budget(SHORT_STEPS), now_s=0.0)
                self._takes_system = PROBE in text
            except (TemplateFailure, TextTooLong, OutOfTime):
                self._takes_system = False
        return self._takes_system

    def _template(self, prompt: ChatPrompt) -> ChatTemplate:
        names = (TOOL_USE, DEFAULT) if conversation.has_tools(prompt) else (DEFAULT,)
        for name in names:
            if (template := self._templates.get(name)) is not None:
                return template
        raise TemplateFailure(self._failure)


def load(folder: Path, bos_token: str, eos_token: str, timeout_s: float, *, shows_tools: bool = True) -> ChatTemplates:
    """Load the templates in a prepared folder. An invalid template fails the chats that need it. `shows_tools` is as
    in `ChatTemplates`."""
    templates = {}
    failure = "this model has no chat template: use /v1/completions"
    for name, file in ((DEFAULT, "chat_template.jinja"), (TOOL_USE, f"chat_template.{TOOL_USE}.jinja")):
        if (path := folder / file).is_file():
            try:
                templates[name] = ChatTemplate(path.read_text(encoding="utf-8"), bos_token, eos_token)
            except TemplateFailure as error:
                failure = str(error)
    return ChatTemplates(templates, failure, timeout_s, shows_tools=shows_tools)
