"""The parser that all formats of calls share: content, until a mark says that a call comes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from pipeline.text.formats.call_object import SPACE, CallObject, ObjectState
from pipeline.text.formats.events import Content, Event
from pipeline.text.formats.marks import Marks

Read = Callable[[str, int, list[Event]], int]
"""A state: reads on at a place of a text, and returns up to where; what is left is for the state that the parser is in
then, which may be another."""


class CallParser(ABC):
    """Reads one reply, in pieces. What follows a mark is a format's to say (`_marked`), and so is what may follow a
    call (`_behind`).

    White space around calls is nobody's: what stands before one, or between one and the reply's end, is left out.
    """

    def __init__(self, starts: Sequence[str], hidden: Collection[str] = (), names: Collection[str] = ()) -> None:
        """`starts` are the marks of calls; `hidden` are marks, these among them or not, that are not to be seen in
        content; `names` are the tools' names."""
        self._starts = starts
        self._hidden = hidden
        self._names = names
        self._marks = Marks.of(frozenset((*starts, *hidden)))
        self._read: Read = self._outside
        self._rest = ""
        """The end of what has come, where a state needs more to tell what it is."""
        self._space: list[str] = []
        """White space that is content if no call follows."""
        self._candidate: list[str] = []
        """What has been read of a call that may still be none, but for its object."""
        self._is_behind_call = False
        self._object = CallObject(0)
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """What has become certain with this text."""
        out: list[Event] = []
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            at = self._read(text, at, out)
        return out

    def finish(self) -> list[Event]:
        """What is left at the reply's end."""
        out: list[Event] = []
        rest, self._rest = self._rest, ""
        if self._read == self._behind:
            self._candidate.clear()
            rest = ""
        if not self._object.has_begun:
            rest = "".join(self._candidate) + self._object.raw + rest
        self._content(rest, out)
        if self._space and not self._is_behind_call:
            out.append(Content("".join(self._space)))
        self._space.clear()
        return out

    # --------------------------------------------------------------------------------------------------- states

    @abstractmethod
    def _marked(self, text: str, at: int, out: list[Event]) -> int:
        """Behind a mark, to the first character of an object."""

    @abstractmethod
    def _behind(self, text: str, at: int, out: list[Event]) -> int:
        """Behind a call."""

    def _outside(self, text: str, at: int, out: list[Event]) -> int:
        found = self._marks.find(text, at)
        if found is None:
            held = self._marks.held(text, at)
            self._content(text[at:held], out)
            return self._hold(text, held)
        self._content(text[at : found.start()], out)
        if found[0] in self._starts:
            self._candidate.append("" if found[0] in self._hidden else found[0])
            self._read = self._marked
        return found.end()

    def _in_object(self, text: str, at: int, out: list[Event]) -> int:
        had_begun = self._object.has_begun
        at = self._object.push(text, at, out)
        if self._object.has_begun and not had_begun:
            self._num_calls += 1
            self._space.clear()
            self._candidate.clear()
        if self._object.state is ObjectState.ENDED:
            self._is_behind_call = True
            self._object = CallObject(self._num_calls)
            self._read = self._behind
        elif self._object.state is ObjectState.BROKEN:
            self._no_call(out)
        return at

    # --------------------------------------------------------------------------------------------------- steps

    def _open(self, call: CallObject, text: str, at: int, out: list[Event]) -> int:
        self._object = call
        self._read = self._in_object
        return at

    def _no_call(self, out: list[Event]) -> None:
        """What seemed to be a call is content, and what follows is read as such."""
        raw = "".join(self._candidate) + self._object.raw
        self._candidate.clear()
        self._object = CallObject(self._num_calls)
        self._read = self._outside
        self._content(raw, out)

    def _seen(self, text: str) -> str:
        """A text without the marks that are not to be seen in content."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        return text

    def _hold(self, text: str, at: int) -> int:
        """Wait for more to read on at this place with."""
        self._rest = text[at:]
        return len(text)

    def _content(self, text: str, out: list[Event]) -> None:
        stripped = text.rstrip(SPACE)
        if stripped:
            out.append(Content("".join(self._space) + stripped))
            self._space.clear()
            self._is_behind_call = False
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])


class NoCalls(CallParser):
    """For a reply that has none."""

    def _marked(self, text: str, at: int, out: list[Event]) -> int:
        raise AssertionError("there is no mark that a call comes")

    _behind = _marked
