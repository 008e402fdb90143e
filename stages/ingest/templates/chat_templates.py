"""The chat templates of a model: one for chats, and one for chats with tools if the model has two."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import UserError
from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.runtime.model.model_folder import read_text
from pipeline.stages.ingest.templates import conversation, reply_start, template_fallbacks
from pipeline.stages.ingest.templates.budget import STEPS_PER_S, Budget, OutOfTime
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure, TextTooLong
from pipeline.stages.ingest.templates.template_inspection import TemplateTraits
from pipeline.stages.ingest.templates.tools_as_text import with_tools_as_text
from pipeline.text.formats.reasoning import ReasoningFormat, ReasoningStage

DEFAULT = "default"
TOOL_USE = "tool_use"

SHORT_STEPS = 15_000
"""What a template may take in the loop: about 10 ms."""


PROBE = "Answer in one word."
"""A system message that shows whether a template takes them."""
PROBE_CHARS = 100_000


class NeedsTime(Exception):
    """The template takes longer than the loop may wait."""


class RenderedChat(NamedTuple):
    text: str
    masked: str | None = None
    """A second text of the same length, if it was asked for."""
    reply_stage: ReasoningStage | None = None
    """How the reply begins, if it was asked for."""


class ChatTemplates:
    """The templates of one model, by name. `failure` is the error if there is none."""

    def __init__(
        self, templates: Mapping[str, ChatTemplate], failure: str, timeout_s: float, *, shows_tools: bool = True
    ) -> None:
        """`shows_tools`: the templates get tools, calls and results. Otherwise, the text of messages has them."""
        self._shows_tools = shows_tools
        self._takes_system: bool | None = None
        self._preferences: dict[tuple[str, ChatTemplate], bool] = {}
        """By the name of a form; see `_prefers`."""
        self._templates = templates
        self._failure = failure
        self._timeout_s = timeout_s

    def text(self, prompt: ChatPrompt, *, max_chars: int, now_s: float | None, is_short: bool) -> str:
        """The prompt's text alone."""
        return self.render(prompt, max_chars=max_chars, now_s=now_s, is_short=is_short).text

    def render(
        self,
        prompt: ChatPrompt,
        *,
        max_chars: int,
        now_s: float | None,
        is_short: bool,
        masked: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> RenderedChat:
        """The prompt's text, no longer than `max_chars`; a second one of the same length, of `masked` variables, if
        `masked` returns any; and how the reply begins in this format of `reasoning`. Raises BadChat, TemplateFailure,
        TextTooLong, or OutOfTime if it takes longer than the settings allow.

        With `is_short` it takes a few milliseconds at most, or raises NeedsTime. The result depends on the prompt
        alone, except that a very slow machine may raise OutOfTime.
        """
        if not self._shows_tools:
            prompt = with_tools_as_text(prompt, takes_system=self._knows_system())
        template = self._template(prompt)
        prompt, traits = self._taken(prompt, template)
        variables = conversation.variables(prompt, traits)
        conversation.check_roles(prompt, template.source)
        marked = conversation.with_marks(prompt)
        budget = Budget(SHORT_STEPS) if is_short else self._budget(prompt)
        try:
            changed = masked(variables) if masked is not None else None  # before the template can change them
            if marked is not None:
                marks = conversation.variables(marked, traits)
                conversation.check_marks(
                    template.render(marks, max_chars=max_chars, budget=budget, now_s=now_s), marked
                )
            text = template.render(variables, max_chars=max_chars, budget=budget, now_s=now_s)
            other = None
            if changed is not None:
                other = template.render(changed, max_chars=max_chars, budget=budget, now_s=now_s)
            if other is not None and len(other) != len(text):
                raise BadChat(
                    "a message contains special tokens of the model, and the chat template changes with them, so they "
                    "can't be distinguished from its own: remove them, or set chat.allow_special_tokens_in_content",
                    "messages",
                )
            if prompt.continue_final_message:
                text = conversation.up_to_tag(text, prompt)
            stage = None
            if reasoning is not None:
                stage = reply_start.evident(text, variables, prompt, reasoning)
                if stage is None:
                    most = max_chars + reply_start.num_chars_added(prompt)
                    render = partial(template.render, max_chars=most, budget=budget, now_s=now_s)
                    stage = _reply_stage(text, variables, prompt, reasoning, render)
        except OutOfTime:
            if is_short:
                raise NeedsTime from None
            raise
        return RenderedChat(text, None if other is None else other[: len(text)], stage)

    def _budget(self, prompt: ChatPrompt) -> Budget:
        num_steps = int(STEPS_PER_S * self._timeout_s) + conversation.num_bytes(prompt)
        return Budget(num_steps, self._timeout_s, time.monotonic)

    def _knows_system(self) -> bool:
        """Whether the default template shows system messages. Found out by a try, once."""
        if self._takes_system is None:
            probe = ChatPrompt([ChatMessage("system", PROBE), ChatMessage("user", "Hi")])
            template = self._template(probe)
            self._takes_system = PROBE in (_tried(probe, template, template.traits) or "")
        return self._takes_system

    def _taken(self, prompt: ChatPrompt, template: ChatTemplate) -> tuple[ChatPrompt, TemplateTraits]:
        """The chat in a form that the template takes; see template_fallbacks.py. Each form is tried once."""
        plain = traits = template.traits
        if plain.parts and template_fallbacks.has_empty_reply(prompt):
            probe, parts = template_fallbacks.EMPTY_REPLY, template_fallbacks.with_empty_parts(plain)
            if self._prefers("empty parts", template, (probe, plain), (probe, parts)):
                traits = parts
        if template_fallbacks.has_later_system(prompt):
            probe, joined = template_fallbacks.LATER_SYSTEM, template_fallbacks.with_one_system(plain)
            if self._prefers("one system", template, (probe, plain), (probe, joined)):
                traits = template_fallbacks.with_one_system(traits)
        if template_fallbacks.has_several_calls(prompt):
            probe = template_fallbacks.SEVERAL_CALLS
            if self._prefers(
                "calls apart", template, (probe, plain), (template_fallbacks.with_calls_apart(probe), plain)
            ):
                prompt = template_fallbacks.with_calls_apart(prompt)
        if template_fallbacks.has_reasoned_call(prompt):
            probe = template_fallbacks.REASONED_CALL
            if self._prefers("one text", template, (probe, plain), (template_fallbacks.with_one_text(probe), plain)):
                prompt = template_fallbacks.with_one_text(prompt)
        return prompt, traits

    def _prefers(
        self,
        name: str,
        template: ChatTemplate,
        first: tuple[ChatPrompt, TemplateTraits],
        other: tuple[ChatPrompt, TemplateTraits],
    ) -> bool:
        """Whether the template takes the other form of a chat and not the first, or writes only there what the chat
        says last."""
        if (name, template) not in self._preferences:
            texts = [_tried(prompt, template, traits) or "" for prompt, traits in (first, other)]
            counts = [text.count(template_fallbacks.LAST_WORDS) for text in texts]
            self._preferences[name, template] = counts[0] < counts[1]
        return self._preferences[name, template]

    def _template(self, prompt: ChatPrompt) -> ChatTemplate:
        names = (TOOL_USE, DEFAULT) if conversation.has_tools(prompt) else (DEFAULT,)
        for name in names:
            if (template := self._templates.get(name)) is not None:
                return template
        raise TemplateFailure(self._failure)


def _tried(probe: ChatPrompt, template: ChatTemplate, traits: TemplateTraits) -> str | None:
    """The text of a short chat; None if the template refuses it."""
    variables = conversation.variables(probe, traits)
    try:
        return template.render(variables, max_chars=PROBE_CHARS, budget=Budget(SHORT_STEPS), now_s=0.0)
    except (TemplateFailure, TextTooLong, OutOfTime):
        return None


def _reply_stage(
    text: str,
    variables: dict[str, Any],
    prompt: ChatPrompt,
    reasoning: ReasoningFormat,
    render: Callable[[dict[str, Any]], str],
) -> ReasoningStage:
    """How the reply to a prompt begins, by another rendering. Raises OutOfTime."""
    marked = reply_start.with_sentinels(variables, prompt, reasoning)
    try:
        again = render(marked)
        if prompt.continue_final_message:
            again = conversation.up_to_tag(again, prompt)
    except (TemplateFailure, TextTooLong, BadChat):  # it takes messages as they are, but not with more text
        return reply_start.stage_of(text, prompt, reasoning)
    return reply_start.stage_of(reply_start.behind_sentinel(text, again, prompt, reasoning), prompt, reasoning)


def require_valid(folder: Path, given: str) -> None:
    """Raises UserError if the template in a prepared folder is invalid, which the setting `chat_template` gave: unlike
    the model's own, it was meant to work."""
    try:
        ChatTemplate(read_text(folder / "chat_template.jinja"))
    except TemplateFailure as error:
        problem = str(error).removeprefix("the model's chat template ")
        raise UserError(f"chat_template {given}: it {problem}") from error


def load(
    folder: Path, special_tokens: Mapping[str, str], timeout_s: float, *, shows_tools: bool = True
) -> ChatTemplates:
    """Load the templates in a prepared folder. `special_tokens` are variables of the templates, as `bos_token`. An
    invalid template fails the chats that need it. `shows_tools` is as in `ChatTemplates`."""
    templates = {}
    failure = "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
    for name, file in ((DEFAULT, "chat_template.jinja"), (TOOL_USE, f"chat_template.{TOOL_USE}.jinja")):
        if (path := folder / file).is_file():
            try:
                templates[name] = ChatTemplate(read_text(path), special_tokens)
            except TemplateFailure as error:
                failure = str(error)
    return ChatTemplates(templates, failure, timeout_s, shows_tools=shows_tools)
