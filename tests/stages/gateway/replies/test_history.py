"""Every reply that we send is accepted as history, in each dialect, and renders the conversation that it was a part of:
with real templates, for text that has the marks of their formats anywhere, complete, cut and streamed."""

import json
import os
import random
import zlib
from typing import NamedTuple

import msgspec
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.reply import object_or_empty
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates, RenderedChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import FORMATS as REASONING_FORMATS
from pipeline.text.formats.reasoning import ReasoningStage
from pipeline.text.formats.tool_parsers.generic import call_text
from tests.stages.gateway.replies.dialects import DIALECTS, SCHEMA, Dialect, kept, parsed, prompt_of, user
from tests.stages.ingest.templates.chats import NOW_S
from tests.text.formats.replies import TOOLS, Reply, read
from tests.text.formats.test_templates import SOURCES, WITH_TOOLS, call, written

ALL = bool(os.environ.get("PIPELINE_ALL_CASES"))
NUM_REPLIES = 200 if ALL else 4
NAMES = ("weather", "time")
MAX_CHARS = 10**6
MARKS = sorted(
    {mark for one in TOOLS.values() for mark in one.marks} | {mark for one in REASONING_FORMATS for mark in one.marks}
)
"""Of all formats"""
FINISHES = (m.Finish.STOP, m.Finish.LENGTH, m.Finish.ABORT)
PLAIN = ("Hm", " so ", "\n", " ", "\n\n", '{"a": 1}', "“é”", "")


class Model(NamedTuple):
    formats: ChatFormats
    templates: ChatTemplates
    pieces: tuple[str, ...]
    """Parts of replies: calls and marks of the model's own formats"""

    @classmethod
    def of(cls, name: str) -> "Model":
        forced = {"deepseek-v3.1-official": "deepseek_v31"}.get(name, "auto")
        formats = ChatFormats.of(SOURCES[name], ChatSettings(tool_call_parser=forced))  # type: ignore[arg-type]
        template = ChatTemplate(SOURCES[name], {"bos_token": "<s>", "eos_token": "</s>"})
        templates = ChatTemplates({"default": template}, "", 5.0, shows_tools=formats.shows_tools)
        if name in WITH_TOOLS:
            calls = [written(name, {"role": "assistant", "content": "", "tool_calls": [call(i)]})[1] for i in (0, 1)]
        else:
            calls = [call_text(NAMES[i], call(i)["function"]["arguments"]) for i in (0, 1)]
        reasoning = formats.reasoning
        pairs = () if reasoning is None else reasoning.pairs[0]
        return cls(formats, templates, (*calls, *pairs))

    def rendered(self, prompt: m.ChatPrompt) -> RenderedChat:
        """The prompt's text, and how the reply begins. Raises TemplateFailure if the template refuses it."""
        return self.templates.render(
            prompt, max_chars=MAX_CHARS, now_s=NOW_S, is_short=False, reasoning=self.formats.reasoning
        )

    def outcome(self, prompt: m.ChatPrompt, *, may_refuse: bool) -> RenderedChat | str:
        """As `rendered`. `may_refuse`: the template may refuse the marks of its model in what an assistant has said, as
        gpt-oss's does. Then the outcome is its message."""
        try:
            return self.rendered(prompt)
        except TemplateFailure as error:
            if not may_refuse:
                raise
            return str(error)


def stage_of(outcome: RenderedChat | str) -> ReasoningStage | str | None:
    return outcome if isinstance(outcome, str) else outcome.reply_stage


def reply_text(model: Model, random: random.Random) -> str:
    """A reply as a model may write it: more or less what its formats are, and sometimes cut."""
    text = ""
    for _ in range(random.randrange(6)):
        text += random.choice((random.choice(PLAIN), random.choice(model.pieces or PLAIN), random.choice(MARKS)))
    return text if random.random() < 0.6 else text[: random.randrange(len(text) + 1)]


def client_text(random: random.Random) -> str:
    return " ".join(random.choice((*PLAIN, random.choice(MARKS), "Why?")) for _ in range(1 + random.randrange(4))) + "?"


def harmless(text: str) -> str:
    for mark in MARKS:
        text = text.replace(mark, "word")
    return text


def with_equal_ids(prompt: m.ChatPrompt) -> m.ChatPrompt:
    """Calls are numbered: each dialect has ids of its own."""
    ids: dict[str | None, str] = {}
    for message in prompt.messages:
        for one in message.tool_calls:
            ids[one.id] = f"call{len(ids):05}"
    messages = [
        msgspec.structs.replace(
            message,
            tool_calls=[msgspec.structs.replace(one, id=ids[one.id]) for one in message.tool_calls],
            tool_call_id=ids.get(message.tool_call_id),
        )
        for message in prompt.messages
    ]
    return msgspec.structs.replace(prompt, messages=messages)


def expected(dialect: Dialect, reply: Reply, text: str, asked: str, result: str, then: str) -> list[m.ChatMessage]:
    """The conversation, from what the model wrote."""
    if dialect.is_plain:
        return [m.ChatMessage("user", asked), m.ChatMessage("assistant", text), m.ChatMessage("user", then)]
    calls = reply.calls[: reply.num_ended] if dialect.loses_cut_calls else reply.calls
    made = [
        m.ToolCall(f"call{i:05}", name, bytes(object_or_empty(text)).decode() if dialect.has_objects else text)
        for i, (name, text) in enumerate(calls)
    ]
    content = None if made and not reply.content else reply.content
    said = m.ChatMessage("assistant", content, tool_calls=made, reasoning=reply.reasoning or None)
    results = [
        m.ChatMessage("tool", result, one.name if dialect.has_names else None, tool_call_id=one.id) for one in made
    ]
    return [m.ChatMessage("user", asked), said, *(results or [m.ChatMessage("user", then)])]


@pytest.mark.parametrize("name", SOURCES)
def test_each_reply_is_history(name: str) -> None:
    model, reasoning = Model.of(name), ChatFormats.of(SOURCES[name], ChatSettings()).reasoning
    some = random.Random(zlib.crc32(name.encode()))
    schemas = dict.fromkeys(NAMES, json.dumps(SCHEMA))
    for _ in range(NUM_REPLIES):
        asked, result, then = (client_text(some) for _ in range(3))
        text, finish = reply_text(model, some), some.choice(FINISHES)
        num = 1 + some.randrange(8)
        pieces = [text[i : i + num] for i in range(0, len(text), num)]
        for key, dialect in DIALECTS.items():
            for stream in (False, True):
                request = parsed(dialect, [user(asked)], NAMES, model.formats, stream)
                stage = model.rendered(prompt_of(request)).reply_stage
                tail = "" if stage is None or reasoning is None else reasoning.tail_of(stage)
                reply = read(model.formats.parser("auto", schemas, tail), [text])
                whole = kept(dialect, request, pieces, finish, model.formats, tail)
                turns = dialect.turns(whole, result)
                history = [user(asked), *turns, *([] if dialect.has_results(turns) else [user(then)])]
                prompt = with_equal_ids(prompt_of(parsed(dialect, history, NAMES, model.formats)))
                right = msgspec.structs.replace(prompt, messages=expected(dialect, reply, text, asked, result, then))
                found = model.outcome(prompt, may_refuse=dialect.is_plain)
                assert found == model.outcome(right, may_refuse=dialect.is_plain), (key, stream, text, whole)
                plain = expected(dialect, reply, text, *map(harmless, (asked, result, then)))
                other = model.outcome(msgspec.structs.replace(prompt, messages=plain), may_refuse=dialect.is_plain)
                assert stage_of(found) == stage_of(other)
