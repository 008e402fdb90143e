"""The tool-call and reasoning formats of one model."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.config.settings import ChatSettings
from pipeline.runtime.model.model_folder import read_text
from pipeline.text.formats import added_tokens
from pipeline.text.formats.grammar.lark import AddedToken, CallRule, LarkBuilder, LarkGrammar
from pipeline.text.formats.parsing.calls import CallParser, NoCalls
from pipeline.text.formats.parsing.events import Content, Event
from pipeline.text.formats.parsing.messages import MessageParser, MessageSyntax, Part
from pipeline.text.formats.parsing.reply_marks import ReplyMarks, SpecialTokens
from pipeline.text.formats.parsing.text_scan import SPACE, skip_space, starts_with
from pipeline.text.formats.reasoning import FORMATS as REASONING_FORMATS
from pipeline.text.formats.reasoning import ReasoningFormat, ReasoningParser, ReasoningStage
from pipeline.text.formats.tool_format import ToolFormat, ToolSpec
from pipeline.text.formats.tool_parsers.apertus import Apertus
from pipeline.text.formats.tool_parsers.deepseek import DeepSeekV3, DeepSeekV31
from pipeline.text.formats.tool_parsers.gemma import FUNCTION_GEMMA, GEMMA4
from pipeline.text.formats.tool_parsers.generic import Generic
from pipeline.text.formats.tool_parsers.glm4 import Glm4
from pipeline.text.formats.tool_parsers.harmony import Harmony
from pipeline.text.formats.tool_parsers.hermes import Hermes
from pipeline.text.formats.tool_parsers.json_list import Granite, Phi4Mini
from pipeline.text.formats.tool_parsers.kimi_k2 import KimiK2
from pipeline.text.formats.tool_parsers.llama3 import Llama3
from pipeline.text.formats.tool_parsers.mistral import Mistral
from pipeline.text.formats.tool_parsers.muse_glimmer import MuseGlimmer
from pipeline.text.formats.tool_parsers.pythonic import Lfm2, Olmo3, Pythonic
from pipeline.text.formats.tool_parsers.xml_calls import GLM, QWEN, SEED, XmlFormat

LLAMA3 = Llama3()
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    Harmony(),
    MuseGlimmer(),
    KimiK2(),
    DeepSeekV3(),
    DeepSeekV31(),
    GEMMA4,
    FUNCTION_GEMMA,
    Apertus(),
    XmlFormat("glm45", GLM, ("glm47",), ("<|observation|>", "<|user|>")),
    XmlFormat("seed_oss", SEED),
    XmlFormat("qwen3_coder", QWEN, ("qwen3_xml",)),
    Granite(),
    Phi4Mini(),
    Hermes(),
    Mistral(),
    LLAMA3,
    Olmo3(),
    Lfm2(),
    Pythonic(),
    Glm4(),
)
"""The first format that detects a template is used."""
GENERIC = Generic()
"""The format for chat templates without one."""
FALLBACK = LLAMA3
"""The format for required calls if the settings turn formats off. It needs no mark, and a grammar enforces it."""
PIECE_CHARS = 4096
"""Longer text is parsed in pieces: a parser that looks for the end of something then never looks through all the rest
of a reply, for each of many beginnings."""

MAX_SCHEMA_BYTES = 2**31
"""More than any request has."""

BLANK = r"/\n*/"
ANY_ARGUMENTS = '{"type": "object"}'

_tools = msgspec.json.Decoder(list[ToolSpec])


class SchemasTooLarge(Exception):
    """The message is for the client."""


class ReplyParser:
    """Streaming parser of one reply."""

    def __init__(
        self,
        marks: ReplyMarks,
        reasoning: ReasoningParser | None,
        calls: CallParser | MessageParser,
        *,
        has_content: bool = True,
    ) -> None:
        """Without `has_content`, a grammar allows only calls, so what a cut reply has of a mark is no content."""
        self.marks = marks
        self._specials = SpecialTokens(marks) if marks.ids else None
        self._reasoning = reasoning
        self._calls = calls
        self._has_content = has_content
        self._late = ""
        """Content that may begin with the end mark of reasoning which a call has ended."""

    def push(self, text: str, special_spans: bytes = b"") -> list[Event]:
        """Add text, and the spans of the special tokens that begin in it, if `ChatFormats.needs_specials`; those of
        text that comes later may be among them. Returns the events that are now certain."""
        if self._specials is None:
            return self._read(text)
        return self.marks.shown(self._read(self._specials.push(text, special_spans)))

    def finish(self) -> list[Event]:
        """End the reply. Returns the remaining events."""
        return self.marks.shown(self._finish())

    def _without_late_end(self, events: list[Event]) -> list[Event]:
        """Drop the end mark of reasoning that a call had ended, if it is the first text behind the call."""
        if self._reasoning is None or not self._reasoning.late_ends:
            return events
        out: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._reasoning.late_ends:
                text, self._late = self._late + event.text, ""
                at = skip_space(text, 0)
                end = starts_with(text, at, self._reasoning.late_ends) if at < len(text) else ""
                if end == "":
                    self._late = text
                    continue
                self._reasoning.late_ends = ()
                text = text[at + len(end) :] if end else text
                out += [Content(text)] if text else []
            else:
                out.append(event)
        return out

    def _finish(self) -> list[Event]:
        out = self._read(self._specials.finish()) if self._specials is not None else []
        if self._reasoning is not None and (rest := self._reasoning.finish(out)):
            out += self._calls.push(rest)
        out = self._without_late_end([*out, *self._calls.finish()])
        if self._late.strip(SPACE):
            out.append(Content(self._late))
        return out if self._has_content else [event for event in out if not isinstance(event, Content)]

    def _read(self, text: str) -> list[Event]:
        if len(text) > PIECE_CHARS:
            pieces = (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))
            return [event for piece in pieces for event in self._read(piece)]
        out: list[Event] = []
        if self._reasoning is not None:
            text = self._reasoning.push(text, out)
        if text:
            out += self._calls.push(text)
        return self._without_late_end(out)


class ChatFormats(msgspec.Struct, frozen=True):
    """The formats of one model. `ChatFormats()` has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    template: str = ""
    """The model's chat template"""
    added: Mapping[str, AddedToken] = {}
    """Its tokenizer's added tokens, by their text"""
    special_ids: frozenset[int] = frozenset()
    """Ids of the model's special tokens"""

    @classmethod
    def load(cls, model_dir: str | Path, chat: ChatSettings) -> "ChatFormats":
        """The formats of a prepared model. The settings name them, or the chat template determines them. Raises OSError
        and msgspec.DecodeError. It takes time: for many added tokens, and for a long template."""
        added = added_tokens.load(Path(model_dir))
        template, for_tools = (
            read_text(path) if path.exists() else ""
            for path in (Path(model_dir) / name for name in ("chat_template.jinja", "chat_template.tool_use.jinja"))
        )
        return cls.of(template, chat, added, for_tools)

    @classmethod
    def of(
        cls, template: str, chat: ChatSettings, added: Iterable[AddedToken] = (), tool_template: str = ""
    ) -> "ChatFormats":
        """The formats of a model with this template and these added tokens. `tool_template` is the template for chats
        with tools, if the model has a separate one."""
        tools = _chosen((*TOOL_FORMATS, GENERIC), chat.tool_call_parser, tool_template or template)
        reasoning = _chosen(REASONING_FORMATS, chat.reasoning_parser, template)
        by_text = {token.content: token for token in added}
        special_ids = frozenset(token.id for token in by_text.values() if token.special)
        return cls(tools, reasoning, template, by_text, special_ids)

    @property
    def stops(self) -> list[int]:
        """Ids of tokens that end a reply in this format."""
        stops = () if self.tools is None else self.tools.stops
        return [self.added[mark].id for mark in stops if self._is_special(mark)]

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools, calls and results, or the text of messages has them."""
        return self.tools is None or self.tools.in_template

    def tools_of(self, choice: str) -> ToolFormat | None:
        """The format to parse calls in; `choice` is as in `ChatPrompt`."""
        if choice == "none":
            return None
        return self.tools or (FALLBACK if choice in ("required", "named") else None)

    def needs_specials(self, choice: str) -> bool:
        """Whether detokenize must keep special tokens in the text and say where they are, so that the parser sees its
        marks."""
        return any(map(self._is_special, self._marks(self.tools_of(choice))))

    def parser(
        self,
        choice: str = "none",
        names: Collection[str] = (),
        tail: str | None = None,
        *,
        shows_specials: bool = False,
    ) -> ReplyParser:
        """A parser of one reply. `names` are the tools' names, perhaps with the schemas of their arguments. `tail` is
        what the template writes behind the last message, or its last mark, or None if it is unknown. With
        `shows_specials`, special tokens stay in the content."""
        tools = self.tools_of(choice)
        ids = {mark: self.added[mark].id for mark in self._marks(tools) if self._is_special(mark)}
        marks = ReplyMarks(ids, shows_specials=shows_specials)
        schemas = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
        calls = NoCalls((), marks.hidden) if tools is None else tools.parser(schemas, marks)
        has_content = choice not in ("required", "named")
        if (syntax := self._messages(tools)) is not None:
            messages = self._message_parser(syntax, tools, calls, marks, tail, schemas)
            return ReplyParser(marks, None, messages, has_content=has_content)
        if self.reasoning is None:
            return ReplyParser(marks, None, calls, has_content=has_content)
        stage = self.reasoning.default_stage if tail is None else self.reasoning.stage_of(tail)
        # Where calls are required, a grammar makes the model end its reasoning.
        start = tools.call_start(names, marks) if tools is not None and choice == "auto" else None
        return ReplyParser(marks, _seen(self.reasoning, marks).parser(stage, start), calls, has_content=has_content)

    def calls(
        self, choice: str, name: str, tools: str, *, parallel: bool, max_bytes: int = MAX_SCHEMA_BYTES
    ) -> LarkGrammar:
        """The Lark grammar of tool calls: required ones, or those that `auto` allows. The arguments are as in
        `ChatPrompt`. Raises SchemasTooLarge if their schemas have more than `max_bytes` together, and ValueError if the
        tools are invalid, which the gateway rules out."""
        form = self.tools_of(choice)
        if form is None:
            raise ValueError("the model has no tool-call format")
        lark = LarkBuilder(self.template, self.added)
        chosen = name if choice == "named" else None
        functions = [one.function for one in _tools.decode(tools) if chosen in (None, one.function.name)]
        if not functions:
            raise ValueError(f"there is no tool named {name!r}")
        _check_size([one.parameters for one in functions], max_bytes)
        calls = [CallRule(one.name, lark.schema(one.schema), one.schema) for one in functions]
        return lark.grammar(form.grammar(lark, calls, parallel=parallel and chosen is None))

    def strict_calls(self, tools: str, *, parallel: bool, max_bytes: int = MAX_SCHEMA_BYTES) -> LarkGrammar | None:
        """The Lark grammar of a reply that may have calls, in which those of strict functions match their schemas. None
        if there are none, or if nothing in the format shows where a call begins. Raises SchemasTooLarge if their
        schemas have more than `max_bytes` together."""
        functions = [tool.function for tool in _tools.decode(tools)]
        if self.tools is None or not any(one.strict for one in functions):
            return None
        _check_size([one.parameters for one in functions if one.strict], max_bytes)
        lark = LarkBuilder(self.template, self.added)
        schemas = [(one.name, one.schema if one.strict else ANY_ARGUMENTS) for one in functions]
        calls = [CallRule(name, lark.schema(text), text) for name, text in schemas]
        written = self.tools.reply(lark, calls, parallel=parallel)
        return None if written is None else lark.grammar(written)

    def after_reasoning(self, grammar: str, tail: str) -> str:
        """The grammar of a reply with free reasoning, then an answer that matches `grammar`. `tail` is as
        in `parser`."""
        if self.reasoning is None or (stage := self.reasoning.stage_of(tail)) is ReasoningStage.OVER:
            return grammar
        lark = LarkBuilder(self.template, self.added)
        start, end = self.reasoning.pair_of(self.template)
        thought = f"{lark.until(end)} {lark.rule(BLANK)}"
        if self.reasoning.messages is not None:
            again = f"{lark.until(end)} {lark.sequence(self.reasoning.messages.begin)}"
            thought = f"({lark.sequence(start)} {again})*"
            if stage is ReasoningStage.OPEN:
                thought = f"{again} {thought}"
        elif stage is ReasoningStage.OPTIONAL:
            thought = f"({lark.sequence(start)} {thought})?"
        return _joined(lark.grammar(f"{thought} @answer").lark(), answer=grammar)

    def as_answer(self, grammar: str) -> str:
        """The grammar of a reply whose answer matches `grammar`: with what precedes an answer in this format."""
        if (syntax := self._messages(self.tools)) is None:
            return grammar
        lark = LarkBuilder(self.template, self.added)
        return _joined(lark.grammar(f"{lark.sequence(syntax.answer)} @text").lark(), text=grammar)

    def _messages(self, tools: ToolFormat | None) -> MessageSyntax | None:
        """How replies are written that are a series of messages."""
        found = None if tools is None else tools.messages
        return self.reasoning.messages if found is None and self.reasoning is not None else found

    def _message_parser(
        self,
        syntax: MessageSyntax,
        tools: ToolFormat | None,
        content: CallParser,
        marks: ReplyMarks,
        tail: str | None,
        names: Mapping[str, str],
    ) -> MessageParser:
        part = Part.HEADER
        if self.reasoning is not None and self.reasoning.messages is not None and tail is not None:
            stages = {ReasoningStage.OPEN: Part.REASONING, ReasoningStage.OVER: Part.CONTENT}
            part = stages.get(self.reasoning.stage_of(tail), part)
        return syntax.parser(
            content,
            marks,
            with_calls=tools is not None and tools.messages is syntax,
            with_reasoning=self.reasoning is not None,
            part=part,
            names=names,
        )

    def _is_special(self, mark: str) -> bool:
        return mark in self.added and self.added[mark].special

    def _marks(self, tools: ToolFormat | None) -> tuple[str, ...]:
        marks = () if tools is None else tools.marks
        return marks if self.reasoning is None else (*marks, *self.reasoning.marks)


def _seen(form: ReasoningFormat, marks: ReplyMarks) -> ReasoningFormat:
    """A reasoning format with what its parser looks for."""
    return msgspec.structs.replace(
        form,
        start=marks.of(form.start),
        end=marks.of(form.end),
        others=tuple((marks.of(start), marks.of(end)) for start, end in form.others),
        unclosed_before=marks.each(form.unclosed_before),
        wrappers=marks.each(form.wrappers),
    )


def _check_size(schemas: Iterable[Raw], max_bytes: int) -> None:
    """Refuse schemas before a grammar is made of them: that takes much longer than reading them."""
    num_bytes = sum(len(bytes(schema)) for schema in schemas)
    if num_bytes > max_bytes:
        raise SchemasTooLarge(
            f"the schemas of tools whose calls must match them have {num_bytes} bytes together, and the limit is "
            f"{max_bytes} (limits.max_grammar_bytes)"
        )


def _chosen(formats: Collection[Any], setting: str, template: str) -> Any:
    """The format that a setting names; with `auto`, the first that detects the template."""
    for one in formats:
        if setting in (one.name, *one.aliases) or (setting == "auto" and one.detects(template)):
            return one
    return None


def either(output: str, calls: str) -> str:
    """A grammar that matches either `output` or `calls`."""
    return _joined("start: @output | @calls\n", output=output, calls=calls)


def _joined(lark: str, **others: str) -> str:
    """A Lark grammar together with the grammars that it refers to by name."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, grammar in others.items():
        if grammar.lstrip().startswith("{"):
            first, *rest = msgspec.json.decode(grammar)["grammars"]
            grammars += [{**first, "name": name}, *rest]
        else:
            grammars.append({"lark_grammar": grammar, "name": name})
    return msgspec.json.encode({"grammars": grammars}).decode()
