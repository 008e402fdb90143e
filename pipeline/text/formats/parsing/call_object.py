"""Streaming parser of a tool call written as a JSON object: `{"name": …, "arguments": {…}}`."""

from collections.abc import Callable, Collection
from enum import Enum

import msgspec

from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Event
from pipeline.text.formats.parsing.json_text import JsonSpan

SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")
BARE_KEYS = ("name", "type", "function", "id", *ARGUMENTS)
"""The only keys allowed in a call that no mark precedes."""
MAX_NAME_CHARS = 256


class ObjectState(Enum):
    OPEN = "incomplete"
    ENDED = "complete"
    BROKEN = "not a call; no events were emitted"


class CallObject:
    """Parses one call. The call *begins* once its name and the first character of its arguments are known. From then
    on it emits events. Before that, its text is kept, because it may not be a call. `bare_names` are the tool names
    that a call without a mark may use; None if a mark precedes it.

        START ─{─► KEY ─string─► COLON ─:─► VALUE ─value─► NEXT ─}─► ended
                    ▲                                      │
                    └──────────────────,───────────────────┘
    """

    def __init__(self, index: int, bare_names: Collection[str] | None = None) -> None:
        self.state = ObjectState.OPEN
        self.has_begun = False
        self._index = index
        self._bare_names = bare_names
        self._raw: list[str] = []
        self._name: str | None = None
        self._id = ""
        self._key = ""
        self._span: JsonSpan | None = None
        self._value: list[str] = []
        """Chunks of the current key, or of a value that is buffered."""
        self._arguments: str | None = None
        """Complete arguments that preceded the name."""
        self._has_arguments = False
        self._is_streamed = False
        """The current value is emitted chunk by chunk."""
        self._read: Callable[[str, int, list[Event]], int] = self._start

    @classmethod
    def of_arguments(cls, index: int, name: str, call_id: str = "") -> "CallObject":
        """A call whose name, and perhaps id, precede the object: the object holds the arguments."""
        call = cls(index)
        call._name, call._id = name, call_id
        call._read = call._bare_arguments
        return call

    @property
    def raw(self) -> str:
        """The text read so far of a call that has not begun."""
        return "".join(self._raw)

    def push(self, text: str, at: int, out: list[Event]) -> int:
        """Continue at `text[at]`. Returns the offset after the call's text."""
        while self.state is ObjectState.OPEN and at < len(text):
            begin, at = at, self._read(text, at, out)
            if not self.has_begun:
                self._raw.append(text[begin:at])
        return at

    def _start(self, text: str, at: int, out: list[Event]) -> int:
        match text[at]:
            case "{":
                self._read = self._before_key
            case char if char not in SPACE:
                return self._break(at, out)
        return at + 1

    def _before_key(self, text: str, at: int, out: list[Event]) -> int:
        match text[at]:
            case '"':
                self._span = JsonSpan('"')
                self._value = []
                self._read = self._in_key
                return at
            case "}":
                return self._end(at + 1, out)
            case char if char not in SPACE:
                return self._break(at, out)
        return at + 1

    def _in_key(self, text: str, at: int, out: list[Event]) -> int:
        assert self._span is not None
        end, is_whole = self._span.read(text, at)
        self._value.append(text[at:end])
        if is_whole:
            key = _decoded("".join(self._value))
            self._key = key if isinstance(key, str) else ""
            self._read = self._colon
            if self._bare_names is not None and self._key not in BARE_KEYS:
                return self._break(end, out)
        return end

    def _colon(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] == ":":
            self._read = self._before_value
        elif text[at] not in SPACE:
            return self._break(at, out)
        return at + 1

    def _before_value(self, text: str, at: int, out: list[Event]) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        if char in ",}]:":
            return self._break(at, out)
        self._span = JsonSpan(char)
        self._value = []
        is_arguments = self._key in ARGUMENTS and not self._has_arguments
        self._is_streamed = is_arguments and char == "{" and self._name is not None
        if self._is_streamed:
            self._begin(out)
        self._read = self._in_value
        return at

    def _bare_arguments(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in SPACE:
            return at + 1
        if text[at] != "{":
            return self._break(at, out)
        self._span = JsonSpan("{")
        self._is_streamed = True
        self._begin(out)
        self._read = self._in_bare_arguments
        return at

    def _in_bare_arguments(self, text: str, at: int, out: list[Event]) -> int:
        end, is_whole = self._stream_arguments(text, at, out)
        return self._end(end, out) if is_whole else end

    def _in_value(self, text: str, at: int, out: list[Event]) -> int:
        if self._is_streamed:
            end, is_whole = self._stream_arguments(text, at, out)
        else:
            assert self._span is not None
            end, is_whole = self._span.read(text, at)
            if self._key == "name" or (self._key in ARGUMENTS and not self._has_arguments):
                self._value.append(text[at:end])
        if is_whole:
            self._read = self._next
            if not self._is_streamed and not self._accept("".join(self._value), out):
                return self._break(end, out)
        return end

    def _stream_arguments(self, text: str, at: int, out: list[Event]) -> tuple[int, bool]:
        assert self._span is not None
        end, is_whole = self._span.read(text, at)
        if end > at:
            out.append(Arguments(self._index, text[at:end]))
        self._has_arguments = True
        return end, is_whole

    def _accept(self, value: str, out: list[Event]) -> bool:
        """Take a complete buffered value. Returns whether it is valid in a call."""
        if self.has_begun:
            return True
        if self._key == "name":
            name = _decoded(value)
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
                return False
            if self._bare_names is not None and name not in self._bare_names:
                return False
            self._name = name
        elif self._key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._arguments = _arguments_of(value)
            if self._arguments is None:
                return False
        if self._name is not None and self._arguments is not None:
            self._begin(out)
        return True

    def _next(self, text: str, at: int, out: list[Event]) -> int:
        match text[at]:
            case ",":
                self._read = self._before_key
            case "}":
                return self._end(at + 1, out)
            case char if char not in SPACE:
                return self._break(at, out)
        return at + 1

    def _begin(self, out: list[Event]) -> None:
        assert self._name is not None
        self.has_begun = True
        self._raw.clear()
        out.append(CallBegun(self._index, self._name, self._id))
        if self._arguments is not None:
            out.append(Arguments(self._index, self._arguments))

    def _end(self, end: int, out: list[Event]) -> int:
        if not self.has_begun and self._name is not None:  # a call without arguments
            self._arguments = "{}"
            self._begin(out)
        self.state = ObjectState.ENDED if self.has_begun else ObjectState.BROKEN
        if self.has_begun:
            out.append(CallEnded(self._index))
        return end

    def _break(self, at: int, out: list[Event]) -> int:
        """The text is not valid here. A call that has begun ends: its arguments are complete."""
        return self._end(at, out) if self.has_begun else self._give_up(at)

    def _give_up(self, at: int) -> int:
        self.state = ObjectState.BROKEN
        return at


def _arguments_of(value: str) -> str | None:
    """The JSON text of buffered arguments: an object, a string that holds one, or null for no arguments. None if the
    value is anything else."""
    if value.startswith("{"):
        return value
    decoded = _decoded(value)
    if isinstance(decoded, str) and isinstance(_decoded(decoded), dict):
        return decoded
    return "{}" if value == "null" else None


def _decoded(text: str) -> object:
    """Decode JSON. Returns an Ellipsis if it is invalid, because None is a valid value."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ...
