"""The streaming parser of tool calls in tags, which tool_parsers/xml_calls.py draws.

Values have no quotes: the tool's schema determines whether 5 is a number or a text. Texts are streamed.
An end tag within a text is part of it: it ends the value only before the next tag, or where the reply ends. No tag in
a string of a JSON value ends the value, unless the string has no end.
A value whose end tag is missing ends before another parameter of the tool, and where the call ends. Such tags may be
part of a text: they count if what follows them could follow a call.
"""

import re
from collections.abc import Collection, Mapping

import msgspec

from pipeline.text.formats.grammar.own_syntax import MAX_KEY_CHARS
from pipeline.text.formats.grammar.schema_types import STRING_ONLY, Types, as_json, escaped, property_types, quoted
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, CallObject
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import CallEnded, Event
from pipeline.text.formats.parsing.loose_json import of_python
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"[^<>\n]{1,256}")
"""The name of a parameter, where the tag that ends the value before it is missing"""
TEXTS = frozenset({"string", "array", "object"})
"""Types of values that may have text in them"""
MAX_LAST_PIECES = 256
"""Pieces of a value in which the end of a call may be: each has a character or more"""
MAX_SPACE_CHARS = 64
"""White space between the end tags of a call whose last value has no end tag, and behind a text's end tag: more of it
ends the text"""


_IN_STRING = re.compile(r'["\\]')
UNKNOWN, OUTSIDE, INSIDE, ESCAPED = range(4)
"""Where a place in a JSON value is: at its beginning, outside of strings, in one, or behind a backslash in one"""


class Tags(msgspec.Struct, frozen=True):
    start: str
    end: str
    before_name: str = ""
    after_name: str = ""
    before_key: str = "<arg_key>"
    after_key: str = "</arg_key>"
    before_value: str = ""
    """Between it and `after_key`, white space may stand."""
    after_value: str = "</arg_value>"
    call_end: str = ""
    """Before `end`"""
    has_lines: bool = False
    """A line break follows the key and precedes `after_value`; neither is part of the value."""


class XmlParser(CallParser):
    def __init__(self, tags: Tags, names: Mapping[str, str], hidden: Collection[str], *, num_before: int = 0) -> None:
        """`num_before` is the number of the reply's calls before this text."""
        starts = (tags.start, tags.before_name) if tags.before_name else (tags.start,)
        super().__init__(starts, hidden, num_before=num_before)
        self._tags = tags
        self._schemas = names
        self._types: Mapping[str, Types] = {}
        self._keys: set[str] = set()
        self._key = ""
        self._is_repeated = False
        """The current key has had a value before; this one is dropped."""
        self._is_text = False
        """The current value is a string, which is emitted chunk by chunk."""
        self._has_text = False
        """The current value may have text in it, and so an end tag."""
        self._value: list[str] = []
        self._string: int | None = None
        """Where the value so far ends, if it may be JSON"""
        self._hid_tag = False
        """A tag in a string of the value ended nothing."""
        self._hides_tags = True
        """No string so far had no end: else the reply would be read again for each."""
        self._is_over = False
        """The reply has ended: nothing follows the text that waits for more."""
        self._value_ends = (tags.after_value, tags.before_key, *([tags.call_end] if tags.call_end else []), tags.end)
        self._value_end = re.compile("|".join(map(re.escape, self._value_ends)))

    def finish(self) -> list[Event]:
        out: list[Event] = []
        if self._read == self._in_value:
            self._is_over = True
            text, self._rest = self._rest, ""
            at = self._again(text, 0, out) if self._hid_tag and self._is_whole(text) else 0
            while at < len(text):
                at = self._read(text, at, out)
        return out + super().finish()

    def close(self) -> list[Event]:
        """End the text, but not the reply: a call whose end is missing ends, too. Returns the remaining events."""
        out = self.finish()
        if self._is_converting:
            if self._read == self._in_value:
                self._end_value("", out, 0, drops_line=False)
            self._write("}" if self._keys else "{}", out)
            self._end_call(out)
        elif self._object.has_begun:
            out.append(CallEnded(self._num_calls - 1))
        return out

    # ---------------------------------------------------------------------------------------------- before the call

    def _outside(self, text: str, at: int, out: list[Event]) -> int:
        end = super()._outside(text, at, out)
        if self._read == self._after_mark:
            before = self._tags.before_name
            if not before or text.startswith(before, end - len(before)):
                self._read = self._in_name
        return end

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        """Between the start tag and the tag with the name."""
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        match starts_with(text, at, (self._tags.before_name,)):
            case None:
                self._no_call(out)
                return at
            case "":
                return self._hold(text, at)
            case mark:
                self._candidate.append(mark)
                self._read = self._in_name
                return at + len(mark)

    def _in_name(self, text: str, at: int, out: list[Event]) -> int:
        """The name, and what shows that it is one."""
        begin = at
        while begin < len(text) and text[begin] in SPACE:
            begin += 1
        name = _NAME.match(text, begin)
        end = name.end() if name else begin
        behind = end
        while behind < len(text) and text[behind] in SPACE:
            behind += 1
        if behind == len(text) and behind - at <= MAX_NAME_CHARS:
            return self._hold(text, at)
        tags = self._tags
        options = (tags.after_name,) if tags.after_name else (tags.before_key, tags.end, "{")
        match starts_with(text, behind, options) if name and end - begin <= MAX_NAME_CHARS else None:
            case None:
                self._no_call(out)
                return at
            case "":
                return self._hold(text, at)
        assert name is not None
        behind += len(tags.after_name)
        self._candidate.append(text[at:behind])
        self._key = name[0]  # until it is certain that the arguments are no JSON
        self._read = self._before_arguments
        return behind

    def _before_arguments(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        name = self._key
        if text[at] == "{":
            self._open(CallObject.of_arguments(self._num_calls, name))
            return at
        self._begin_call(name, out)
        self._types = property_types(self._schemas.get(name, ""))
        self._keys = set()
        self._read = self._in_arguments
        return at

    # -------------------------------------------------------------------------------------------------- in the call

    def _in_arguments(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in SPACE:
            return at + 1
        tags = self._tags
        match starts_with(text, at, (tags.before_key, *([tags.call_end] if tags.call_end else []), tags.end)):
            case "":
                return self._hold(text, at)
            case tags.before_key:
                self._read = self._in_key
                return at + len(tags.before_key)
        self._write("}" if self._keys else "{}", out)  # the call's end, or text that can't be part of it
        self._end_call(out)
        return at

    def _in_key(self, text: str, at: int, out: list[Event]) -> int:
        end = text.find(self._tags.after_key, at)
        if end < 0 and len(text) - at <= MAX_KEY_CHARS:
            return self._hold(text, at)
        if end < 0:
            self._write("}" if self._keys else "{}", out)
            self._end_call(out)
            return at
        self._key = text[at:end].strip()
        self._read = self._before_value if self._tags.before_value else self._begin_value
        return end + len(self._tags.after_key)

    def _before_value(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in SPACE:
            return at + 1
        match starts_with(text, at, (self._tags.before_value,)):
            case "":
                return self._hold(text, at)
            case None:
                self._write("}" if self._keys else "{}", out)
                self._end_call(out)
                return at
        self._read = self._begin_value
        return at + len(self._tags.before_value)

    def _begin_value(self, text: str, at: int, out: list[Event]) -> int:
        if self._tags.has_lines and text[at] == "\n":
            at += 1
        self._is_repeated = self._key in self._keys
        types = self._types.get(self._key)
        self._is_text = types == STRING_ONLY
        self._has_text = types is None or not types.isdisjoint(TEXTS)
        self._value = []
        may_be_json = self._hides_tags and self._has_text and not self._is_text
        self._string = UNKNOWN if may_be_json and not self._is_repeated else None
        self._hid_tag = False
        if not self._is_repeated:
            before, quote = ", " if self._keys else "{", '"' if self._is_text else ""
            self._write(f"{before}{quoted(self._key)}: {quote}", out)
            self._keys.add(self._key)
        self._read = self._in_value
        return at

    def _in_value(self, text: str, at: int, out: list[Event]) -> int:
        if self._string == UNKNOWN:
            self._string = OUTSIDE if text[at] in '[{"' else None
        begin = index = at
        state = self._string
        while (found := self._value_end.search(text, at)) is not None:
            before, (index, at) = index, found.span()
            if state is not None:
                state = _string_state(text, before, index, state)
                if len(found[0]) > 1 and state != OUTSIDE:
                    self._hid_tag = True
                    continue
                if len(found[0]) == 1 and self._hid_tag:  # a special token: the string has no end
                    return self._again(text, begin, out)
            has_tag = found[0] == self._tags.after_value
            match self._ends_with_tag(text, at) if has_tag else self._ends_without_tag(text, found):
                case True if has_tag:
                    return self._end_value(text[begin:index], out, at, drops_line=self._tags.has_lines)
                case True:
                    return self._end_value(text[begin:index], out, index, drops_line=True)
                case None:
                    held = index - (text[index - 1 : index] == "\n" and index > begin)
                    break
        else:
            held = self._held(text, at)
        if self._string is not None:
            self._string = _string_state(text, begin, held, self._string)
        self._take(text[begin:held], out)
        return self._hold(text, held)

    def _again(self, text: str, at: int, out: list[Event]) -> int:
        """Read a value again of which a string has no end: it is no JSON, so all tags count."""
        whole, index = "".join(self._value) + text[at:], 0
        self._value, self._string, self._hid_tag, self._hides_tags = [], None, False, False
        while index < len(whole):
            index = self._read(whole, index, out)
        return len(text)

    def _is_whole(self, rest: str) -> bool:
        """Whether the reply, of which `rest` has not been read, ends with a call's end: the model wrote the value to
        its end, too."""
        ends = (self._tags.call_end or self._tags.end, self._tags.end)
        return "".join([*self._value[-MAX_LAST_PIECES:], rest]).rstrip().endswith(ends)

    def _held(self, text: str, at: int) -> int:
        """Where the end of a value may begin, of which the text has no more than a part."""
        for index in range(max(at, len(text) - max(map(len, self._value_ends))), len(text)):
            rest = text[index:].removeprefix("\n")
            if any(mark.startswith(rest) for mark in self._value_ends):
                return index
        return len(text)

    def _end_value(self, rest: str, out: list[Event], end: int, *, drops_line: bool) -> int:
        self._take(rest.removesuffix("\n") if drops_line else rest, out)
        if not self._is_repeated:
            self._write('"' if self._is_text else self._converted("".join(self._value)), out)
        self._read = self._in_arguments
        return end

    def _ends_with_tag(self, text: str, at: int) -> bool | None:
        """Whether an end tag before `at` is no part of the value: another tag follows. None if that needs more
        text."""
        if not self._has_text:
            return True
        tags = self._tags
        end = at
        while end < len(text) and text[end] in SPACE:
            end += 1
        if end - at > MAX_SPACE_CHARS:
            return True
        call_end = [tags.call_end] if tags.call_end else []
        match starts_with(text, end, (tags.before_key, *call_end, tags.end, *self._starts)):
            case "":
                return True if self._is_over else None
            case None:
                return False
        return True

    def _ends_without_tag(self, text: str, found: "re.Match[str]") -> bool | None:
        """Whether a tag ends the value before it; None if that needs more text."""
        tags = self._tags
        end = found.end()
        if found[0] == tags.before_key:
            name = _KEY.match(text, end)
            behind = name.end() if name else end
            match starts_with(text, behind, (tags.after_key,)):
                case "":
                    return False if self._is_over else None
                case None:
                    return False
            key = name[0].strip() if name else ""
            return key not in self._keys and (key in self._types if self._types else _NAME.fullmatch(key) is not None)
        if len(found[0]) == 1:  # a special token
            return True
        while end < len(text) and text[end] in SPACE:
            end += 1
        if end - found.end() > MAX_SPACE_CHARS:
            return False
        follows = self._starts if found[0] == tags.end else (*self._starts, tags.end)
        match starts_with(text, end, follows):
            case "":
                return True if self._is_over else None
            case None:
                return False
        return True

    def _converted(self, value: str) -> str:
        """The JSON of a value. Models write lists and objects as JSON or as Python."""
        types = self._types.get(self._key)
        written = as_json(value, types)
        if written.startswith('"') and (types is None or types & {"array", "object"}):
            written = of_python(value) or written
        return written

    def _take(self, piece: str, out: list[Event]) -> None:
        if self._is_repeated or not piece:
            return
        if self._is_text:
            self._write(escaped(piece), out)
        else:
            self._value.append(piece)

    # ----------------------------------------------------------------------------------------------- after the call

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        """Up to the end tag, which may be missing."""
        if text[at] in SPACE:
            return at + 1
        tags = self._tags
        match starts_with(text, at, (*([tags.call_end] if tags.call_end else []), tags.end)):
            case "":
                return self._hold(text, at)
            case None:
                self._read = self._outside
                return at
            case tags.end:
                self._read = self._outside
                return at + len(tags.end)
            case mark:
                return at + len(mark)


def _string_state(text: str, at: int, end: int, state: int) -> int:
    """Where `text[end]` is in a JSON value, if `text[at]` is at `state`."""
    while at < end:
        if state == ESCAPED:
            state, at = INSIDE, at + 1
        elif state == OUTSIDE:
            if (at := text.find('"', at, end) + 1) == 0:
                return OUTSIDE
            state = INSIDE
        elif (found := _IN_STRING.search(text, at, end)) is None:
            return INSIDE
        else:
            state, at = OUTSIDE if found[0] == '"' else ESCAPED, found.end()
    return state
