"""Streaming conversion of a value in a syntax that resembles JSON to JSON: Gemma's and Python's.

{text:<|"|>a<|"|>,at:{x:1},tags:[<|"|>b<|"|>]}          Gemma: names without quotes, and quotes of its own
{'text': 'a', "at": {"x": 1}, 'tags': [True, None]}     Python
{"text": "a", "at": {"x": 1}}                           JSON, in both

Of Python's strings, prefixes, triple quotes and strings in a row are read; an f-string is the text that it is written
as. Tuples are arrays.
"""

import re
from collections.abc import Mapping
from enum import Enum, auto

import msgspec

from pipeline.text.formats.grammar.schema_types import STRING_ONLY, Types, as_json, escaped, quoted
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with

_PLAIN = re.compile(r'[^"\'\\]+')
_BARE_END = re.compile(r"[,}\])]")
_KEY_END = re.compile(r"[:,{}\[\]]")
_PREFIX = re.compile("[rRbBuUfF]{0,2}")
_HEX = {"x": 2, "u": 4, "U": 8}
_OCTAL = re.compile(r"[0-7]{1,3}")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\\": "\\"}
MAX_BARE_CHARS = 1024
MAX_GROUPS = 32
"""Open parentheses that may be tuples: what is in them waits"""
_CLOSING = {"{": "}", "[": "]", "(": ")", "tuple": ")"}
NO_TYPES: Mapping[str, Types] = {}


class Expected(Enum):
    VALUE = auto()
    KEY = auto()
    COLON = auto()
    NEXT = auto()
    """A comma, or the end of the object or array"""
    MARKED_TEXT = auto()
    """The inside of a string in the format's own quotes"""
    TEXT = auto()
    """The inside of a string in JSON's or Python's quotes"""
    AFTER_TEXT = auto()
    """After a string of Python: another one may continue it."""
    NOTHING = auto()


class LooseValue:
    """Reads one value. `quote` is the format's own quotation mark, or empty. With `is_python`, strings have Python's
    escapes and may have single quotes. `types` are those of the value's properties if it is an object, or with the key
    "" those of the value itself."""

    def __init__(self, quote: str = "", *, is_python: bool = False, types: Mapping[str, Types] = NO_TYPES) -> None:
        self.is_broken = False
        self._quote = quote
        self._is_python = is_python
        self._types = types
        self._stack: list[str] = []
        """The open `{`, `[`, `(` and `tuple`, which is a `(` with a comma behind its first value"""
        self._groups: list[list[str]] = []
        """What has been read in each open `(`"""
        self._out: list[str] = []
        self._is_first = True
        """The innermost of them has no members yet."""
        self._expected = Expected.VALUE
        self._is_key = False
        self._key = ""
        self._delimiter = ""
        self._is_raw = False
        self._held: list[str] | None = None
        """A string whose text is kept, because it becomes a key or another type."""
        self._num_searched = 0
        """Characters of the text that waits for more in which the end of a key or bare value is not."""

    @property
    def is_whole(self) -> bool:
        return self._expected is Expected.NOTHING

    def push(self, text: str, at: int) -> tuple[int, str]:
        """Continue at `text[at]`. Returns where to go on, and the JSON of what has been read. If that is not the
        text's end, and the value is neither whole nor broken, more text is needed."""
        out = self._out = []
        while at < len(text) and not self.is_whole and not self.is_broken:
            end = self._step(text, at, self._sink)
            if end is None:
                break
            at = end
            self._num_searched = 0
        return at, "".join(out)

    def closing(self) -> str:
        """What makes the JSON so far valid, after a value that is broken."""
        match self._expected:
            case Expected.COLON:
                tail = "null"
            case Expected.VALUE if not self._in_array or self._stack[-1] == "(":
                tail = "null"
            case Expected.TEXT | Expected.MARKED_TEXT | Expected.AFTER_TEXT if not self._is_key:
                tail = '"' if self._held is None else quoted("".join(self._held))
            case _:
                tail = ""
        ends = ("" if one == "(" else "}" if one == "{" else "]" for one in reversed(self._stack))
        return "".join((*(piece for group in self._groups for piece in group), tail, *ends))

    @property
    def _sink(self) -> list[str]:
        """Where the JSON goes."""
        return self._groups[-1] if self._groups else self._out

    def _step(self, text: str, at: int, out: list[str]) -> int | None:
        """Read something. None if that needs more text."""
        match self._expected:
            case Expected.TEXT:
                return self._in_text(text, at, out)
            case Expected.MARKED_TEXT:
                return self._in_marked_text(text, at, out)
        char = text[at]
        if char in SPACE:
            return at + 1
        match self._expected:
            case Expected.COLON:
                if char != ":":
                    return self._break(at)
                self._expected = Expected.VALUE
                return at + 1
            case Expected.NEXT:
                return self._next(char, at, out)
            case Expected.AFTER_TEXT:
                begun = self._begin_string(text, at)
                if begun == at:
                    self._text_ended(out)
                return begun
            case Expected.KEY:
                return self._end(at, out) if char == "}" else self._begin_key(text, at, out)
        if self._in_array and char == _CLOSING[self._stack[-1]]:
            return self._end(at, out)
        return self._begin_value(text, at, out)

    @property
    def _in_array(self) -> bool:
        return bool(self._stack) and self._stack[-1] != "{"

    def _next(self, char: str, at: int, out: list[str]) -> int:
        if char == ",":
            if self._stack[-1] == "(":
                self._stack[-1] = "tuple"
                group = self._groups.pop()
                self._sink.extend(("[", *group))
            self._expected = Expected.VALUE if self._in_array else Expected.KEY
            return at + 1
        if char == _CLOSING[self._stack[-1]]:
            return self._end(at, out)
        return self._break(at)

    def _end(self, at: int, out: list[str]) -> int:
        """End an object or array. A comma before its end is ignored."""
        match self._stack.pop():
            case "(":
                group = self._groups.pop()
                self._sink.extend(group or ["[]"])
            case "{":
                out.append("}")
            case _:
                out.append("]")
        self._value_ended()
        return at + 1

    def _value_ended(self) -> None:
        self._is_first = False
        self._expected = Expected.NEXT if self._stack else Expected.NOTHING

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    # ------------------------------------------------------------------------------------------------ keys and values

    def _begin_key(self, text: str, at: int, out: list[str]) -> int | None:
        self._is_key = True
        begun = self._begin_string(text, at)
        if begun is None or begun > at:
            self._held = []
            return begun
        end = _KEY_END.search(text, at + self._num_searched, at + MAX_BARE_CHARS)
        if end is None:
            self._num_searched = len(text) - at
            return None if len(text) - at <= MAX_BARE_CHARS else self._break(at)
        if end[0] != ":":
            return self._break(at)
        self._write_key(text[at : end.start()].strip(), out)
        return end.start()

    def _write_key(self, key: str, out: list[str]) -> None:
        out.append(f"{'' if self._is_first else ', '}{quoted(key)}: ")
        self._is_first = False
        self._key = key
        self._expected = Expected.COLON

    def _begin_value(self, text: str, at: int, out: list[str]) -> int | None:
        self._is_key = False
        char = text[at]
        if char in "{[":
            self._begin_member(out)
            self._stack.append(char)
            out.append(char)
            self._is_first = True
            self._expected = Expected.KEY if char == "{" else Expected.VALUE
            return at + 1
        if char == "(" and self._is_python:
            if len(self._groups) == MAX_GROUPS:
                return self._break(at)
            self._begin_member(out)
            self._stack.append(char)
            self._groups.append([])
            self._is_first = True
            return at + 1
        if (begun := self._begin_string(text, at)) is None:
            return None
        if begun > at:
            self._begin_member(out)
            types = self._own_types()
            self._held = [] if types is not None and "string" not in types else None
            if self._held is None:
                out.append('"')
            return begun
        end = _BARE_END.search(text, at + self._num_searched, at + MAX_BARE_CHARS)
        if end is None:
            self._num_searched = len(text) - at
            return None if len(text) - at <= MAX_BARE_CHARS else self._break(at)
        if end.start() == at:
            return self._break(at)
        self._begin_member(out)
        types = self._own_types()
        out.append(as_json(text[at : end.start()].strip(), types if types == STRING_ONLY else None))
        self._value_ended()
        return end.start()

    def _begin_member(self, out: list[str]) -> None:
        if self._in_array and not self._is_first:
            out.append(", ")

    def _own_types(self) -> Types:
        """The types of the value that begins, if its schema is known."""
        depth = len(self._stack)
        while depth and self._stack[depth - 1] == "(":
            depth -= 1
        if not depth:
            return self._types.get("")
        return self._types.get(self._key) if depth == 1 and self._stack[0] == "{" else None

    def _begin_string(self, text: str, at: int) -> int | None:
        """Returns the offset after a string's quotation mark, or `at` if there is none; None if more text is needed."""
        if self._quote:
            match starts_with(text, at, (self._quote,)):
                case "":
                    return None
                case str(mark):
                    self._expected = Expected.MARKED_TEXT
                    return at + len(mark)
        if not self._is_python:
            if text[at] != '"':
                return at
            self._delimiter = '"'
            self._expected = Expected.TEXT
            return at + 1
        prefix = _PREFIX.match(text, at)
        assert prefix is not None
        begin = prefix.end()
        quotes = text[begin : begin + 3]
        if not quotes:
            return None
        if quotes[0] not in "\"'":
            return at
        if len(quotes) < 3 and quotes == quotes[0] * len(quotes):
            return None
        self._delimiter = quotes if quotes == quotes[0] * 3 else quotes[0]
        self._is_raw = "r" in prefix[0].lower()
        self._expected = Expected.TEXT
        return begin + len(self._delimiter)

    # ------------------------------------------------------------------------------------------------------- strings

    def _in_marked_text(self, text: str, at: int, out: list[str]) -> int | None:
        end = text.find(self._quote, at)
        if end >= 0:
            self._take(text[at:end], out)
            self._string_ended(out)
            return end + len(self._quote)
        held = next(
            (
                index
                for index in range(max(at, len(text) - len(self._quote) + 1), len(text))
                if self._quote.startswith(text[index:])
            ),
            len(text),
        )
        self._take(text[at:held], out)
        return held if held > at else None

    def _in_text(self, text: str, at: int, out: list[str]) -> int | None:
        char = text[at]
        if char == self._delimiter[0]:
            num = len(self._delimiter)
            quotes = text[at : at + num]
            if quotes == self._delimiter:
                self._string_ended(out)
                return at + num
            if self._delimiter.startswith(quotes):
                return None
        if char == "\\":
            return self._in_raw_escape(text, at, out) if self._is_raw else self._in_escape(text, at, out)
        plain = _PLAIN.match(text, at)
        end = plain.end() if plain else at + 1  # a quotation mark that does not end the string
        self._take(text[at:end], out)
        return end

    def _in_raw_escape(self, text: str, at: int, out: list[str]) -> int | None:
        if at + 1 == len(text):
            return None
        self._take(text[at : at + 2], out)
        return at + 2

    def _in_escape(self, text: str, at: int, out: list[str]) -> int | None:
        if at + 1 == len(text):
            return None
        kind = text[at + 1]
        if (num_digits := _HEX.get(kind) if self._is_python or kind == "u" else None) is not None:
            digits = text[at + 2 : at + 2 + num_digits]
            if not re.fullmatch("[0-9a-fA-F]*", digits):
                self._take("\\", out)
                return at + 1
            if len(digits) < num_digits:
                return None
            return self._take_code(int(digits, 16), text, at + 2 + num_digits, at, out)
        if self._is_python and kind in "01234567":
            octal = _OCTAL.match(text, at + 1)
            assert octal is not None
            if octal.end() == len(text) and len(octal[0]) < 3:
                return None
            self._take(chr(int(octal[0], 8)), out)
            return octal.end()
        if kind in "\"'/" or kind in ESCAPES:
            keeps = kind == "/" and self._is_python
            self._take("\\/" if keeps else ESCAPES.get(kind, kind), out)
            return at + 2
        self._take("\\", out)
        return at + 1

    def _take_code(self, code: int, text: str, end: int, at: int, out: list[str]) -> int | None:
        """A character by its number; two escapes may spell one."""
        if 0xD800 <= code < 0xDC00:
            low = text[end : end + 6]
            if len(low) < 6 and "\\u".startswith(low[:2]):
                return None
            if re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", low):
                code = ord(msgspec.json.decode(f'"{text[at:end]}{low}"'))
                end += 6
        is_character = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
        self._take(chr(code) if is_character else "\N{REPLACEMENT CHARACTER}", out)
        return end

    def _take(self, piece: str, out: list[str]) -> None:
        if not piece:
            return
        if self._held is not None:
            self._held.append(piece)
        else:
            out.append(escaped(piece))

    def _string_ended(self, out: list[str]) -> None:
        if self._is_key:
            self._write_key("".join(self._held or ()), out)
            self._held = None
        elif self._is_python:
            self._expected = Expected.AFTER_TEXT
        else:
            self._text_ended(out)

    def _text_ended(self, out: list[str]) -> None:
        out.append('"' if self._held is None else as_json("".join(self._held), self._own_types()))
        self._held = None
        self._value_ended()


def of_python(text: str) -> str | None:
    """The JSON of a list or dict in Python's syntax; None if it is anything else."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return None
    value = LooseValue(is_python=True)
    end, written = value.push(text, 0)
    return written if value.is_whole and end == len(text) else None
