"""Marks that are special tokens, as parsers see them.

A parser must see such a mark only where the model wrote its token. The same characters written with ordinary tokens are
text: an answer about HTML has `<s>` in it, and one about this model has `</think>`. So in the text that parsers read,
each of these marks is one character that no text has, a surrogate: decoders of UTF-8 never return one.

    detokenize             Hm.</think>The mark is </think>.      the first one is a span, see special_spans.py
    SpecialTokens.push     Hm.�The mark is </think>.             � stands for U+D801
    parser, ReplyMarks.of  looks for U+D801
    ReplyMarks.shown       replaces those that are left

Marks that the model's vocabulary has not as special tokens remain as they are.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial

from pipeline.text.formats.grammar.schema_types import escaped
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from pipeline.text.special_spans import SPAN_BYTES, unpacked

NO_MARKS: Mapping[str, int] = {}
FIRST = 0xD800
CHARACTERS = "\ud800-\udfff"
"""For a class of a regular expression"""
_CHARACTER = re.compile(f"[{CHARACTERS}]")


class ReplyMarks:
    """The marks of one model's formats that are special tokens, with their ids. With `shows_specials`, special tokens
    are shown: marks that are not part of a call or around reasoning, and all other ones."""

    def __init__(self, ids: Mapping[str, int] = NO_MARKS, *, shows_specials: bool = False) -> None:
        self.ids = ids
        self.shows_specials = shows_specials
        self._characters = {mark: chr(FIRST + index) for index, mark in enumerate(ids)}
        self._by_id = {ids[mark]: character for mark, character in self._characters.items()}
        self._texts = {character: mark for mark, character in self._characters.items()}
        self.hidden = frozenset() if shows_specials else frozenset(self._texts)
        """What parsers remove from content."""

    def of(self, mark: str) -> str:
        """What a parser looks for: the character of a mark, or a text with the characters of the marks in it."""
        if (character := self._characters.get(mark)) is not None:
            return character
        for text, character in self._characters.items():
            mark = mark.replace(text, character)
        return mark

    def each(self, marks: Iterable[str]) -> tuple[str, ...]:
        """The same for several."""
        return tuple(map(self.of, marks))

    def of_token(self, token_id: int, text: str) -> str:
        """What a parser reads for a special token with this text. Its id is needed if the decoder changes its text, and
        its text if the tokenizer's file has ids that the tokenizer does not use."""
        if (character := self._characters.get(text) or self._by_id.get(token_id)) is not None:
            return character
        return text if self.shows_specials else ""

    def shown(self, events: list[Event]) -> list[Event]:
        """Events without characters of marks."""
        if not (self.ids and any(map(_has_characters, events))):
            return events
        return [one for event in events if (one := self._shown(event)) is not None]

    def _shown(self, event: Event) -> Event | None:
        match event:
            case Content(text) | Reasoning(text):
                text = self._written(text)
                return type(event)(text) if text else None
            case Arguments(index, text):
                text = self._written(text, is_json=True)
                return Arguments(index, text) if text else None
            case CallBegun(index, name, call_id):
                return CallBegun(index, self._written(name), self._written(call_id))
        return event

    def _written(self, text: str, *, is_json: bool = False) -> str:
        return _CHARACTER.sub(partial(self._text_of, is_json=is_json), text)

    def _text_of(self, found: "re.Match[str]", *, is_json: bool) -> str:
        if not self.shows_specials:
            return ""
        text = self._texts[found[0]]
        return escaped(text) if is_json else text


def _has_characters(event: Event) -> bool:
    if isinstance(event, CallBegun):
        return _CHARACTER.search(event.name + event.id) is not None
    return not isinstance(event, CallEnded) and _CHARACTER.search(event.text) is not None


class SpecialTokens:
    """Replaces the special tokens in streamed text by what parsers read."""

    def __init__(self, marks: ReplyMarks) -> None:
        self._marks = marks
        self._spans = bytearray()
        self._offset = 0
        """Of what comes next, in the text."""
        self._rest = ""
        """The beginning of a special token; the end of it has not arrived."""

    def push(self, text: str, spans: bytes | bytearray) -> str:
        """Add text, and the `spans` of special tokens that were not added before; see special_spans.py. Their offsets
        are those of the whole text. Returns the text that a parser reads."""
        self._spans += spans
        if not self._spans:
            self._offset += len(text)
            return text
        text, self._rest = self._rest + text, ""
        seen: list[str] = []
        at = num_read = 0
        for offset, num_chars, token_id in unpacked(self._spans):
            begin = offset - self._offset
            if begin >= len(text):
                break
            if (end := begin + num_chars) > len(text):
                self._rest = text[begin:]
                text = text[:begin]
                break
            num_read += SPAN_BYTES
            seen += (text[at:begin], self._marks.of_token(token_id, text[begin:end]))
            at = end
        seen.append(text[at:])
        self._offset += len(text)
        self._spans = self._spans[num_read:]
        return "".join(seen)

    def finish(self) -> str:
        """The beginning of a special token that a stop string has cut, if special tokens are shown."""
        rest, self._rest = self._rest, ""
        return rest if self._marks.shows_specials else ""
