"""The base of all tool-call parsers: text is content until a mark announces a call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from pipeline.text.formats.parsing.call_object import SPACE, CallObject, ObjectState
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event
from pipeline.text.formats.parsing.marks import Marks

Read = Callable[[str, int, list[Event]], int]
"""A state: reads from an offset of a text and returns the offset where the next state continues."""


class CallParser(ABC):
    """Streaming parser of one reply. A format defines what may follow a call (`_after_call`), and if it is not just the
    call's object, what may follow a mark (`_after_mark`).

    White space before a call, and between a call and the end of the reply, is dropped.
    """

    def __init__(
        self, starts: Sequence[str], hidden: Collection[str] = (), names: Collection[str] = (), *, num_before: int = 0
    ) -> None:
        """`starts` are the marks that announce calls, `hidden` the marks to remove from content, `names` the tools'
        names, `num_before` the number of the reply's calls that precede the text."""
        self._starts = starts
        self._hidden = hidden
        self._names = names
        self._marks = Marks.of(frozenset((*starts, *hidden)))
        self._read: Read = self._outside
        self._rest = ""
        """The end of the text so far, if a state needs more text to decide."""
        self._space: list[str] = []
        """White space that is content if no call follows."""
        self._candidate: list[str] = []
        """Text read for a possible call, without its object. It becomes content if there is no call."""
        self._follows_call = False
        self._object = CallObject(num_before)
        self._num_calls = num_before
        self._is_converting = False
        """In a call that the format itself converts to JSON, instead of a `CallObject`."""

    def push(self, text: str) -> list[Event]:
        """Add text. Returns the events that are now certain."""
        out: list[Event] = []
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            at = self._read(text, at, out)
        return out

    def finish(self) -> list[Event]:
        """End the reply. Returns the remaining events."""
        out: list[Event] = []
        rest, self._rest = self._rest, ""
        if self._read == self._after_call:
            self._candidate.clear()
            rest = ""
        if self._is_converting:
            return out
        if not self._object.has_begun:
            rest = "".join(self._candidate) + self._object.raw + rest
        self._content(rest, out)
        if self._space and not self._follows_call:
            out.append(Content("".join(self._space)))
        self._space.clear()
        return out

    # --------------------------------------------------------------------------------------------------- states

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        """Between a mark and the call's object."""
        return self._before_object(text, at, out)

    @abstractmethod
    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        """After a call."""

    def _outside(self, text: str, at: int, out: list[Event]) -> int:
        found = self._marks.find(text, at)
        if found is None:
            held = self._marks.held(text, at)
            self._content(text[at:held], out)
            return self._hold(text, held)
        self._content(text[at : found.start()], out)
        if found[0] in self._starts:
            self._candidate.append("" if found[0] in self._hidden else found[0])
            self._read = self._after_mark
        return found.end()

    def _in_object(self, text: str, at: int, out: list[Event]) -> int:
        had_begun = self._object.has_begun
        at = self._object.push(text, at, out)
        if self._object.has_begun and not had_begun:
            self._num_calls += 1
            self._space.clear()
            self._candidate.clear()
        if self._object.state is ObjectState.ENDED:
            self._follows_call = True
            self._object = CallObject(self._num_calls)
            self._read = self._after_call
        elif self._object.state is ObjectState.BROKEN:
            self._no_call(out)
        return at

    # --------------------------------------------------------------------------------------------------- steps

    def _before_object(self, text: str, at: int, out: list[Event], bare_names: Collection[str] | None = None) -> int:
        """Only white space may precede the call's object; anything else makes the text content."""
        if text[at] == "{":
            self._open(CallObject(self._num_calls, bare_names))
            return at
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        self._no_call(out)
        return at

    def _begin_call(self, name: str, out: list[Event]) -> None:
        """Begin a call whose arguments the format converts to JSON. From here on, its text is no content."""
        self._is_converting = True
        self._space.clear()
        self._candidate.clear()
        out.append(CallBegun(self._num_calls, name))
        self._num_calls += 1

    def _write(self, arguments: str, out: list[Event]) -> None:
        """Emit a piece of the converted arguments."""
        if arguments:
            out.append(Arguments(self._num_calls - 1, arguments))

    def _end_call(self, out: list[Event]) -> None:
        """End a call that `_begin_call` began."""
        self._is_converting = False
        self._follows_call = True
        self._object = CallObject(self._num_calls)
        out.append(CallEnded(self._num_calls - 1))
        self._read = self._after_call

    def _open(self, call: CallObject) -> None:
        self._object = call
        self._read = self._in_object

    def _no_call(self, out: list[Event]) -> None:
        """The candidate is not a call: it becomes content, and so does the text that follows."""
        raw = "".join(self._candidate) + self._object.raw
        self._candidate.clear()
        self._object = CallObject(self._num_calls)
        self._read = self._outside
        self._content(raw, out)

    def _without_hidden(self, text: str) -> str:
        for mark in self._hidden:
            text = text.replace(mark, "")
        return text

    def _hold(self, text: str, at: int) -> int:
        """Wait for more text, and continue at `text[at]`."""
        self._rest = text[at:]
        return len(text)

    def _content(self, text: str, out: list[Event]) -> None:
        stripped = text.rstrip(SPACE)
        if stripped:
            out.append(Content("".join(self._space) + stripped))
            self._space.clear()
            self._follows_call = False
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])


class NoCalls(CallParser):
    """Parses replies without calls."""

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        raise AssertionError("a reply without marks has no calls")
