"""Tool calls that are the items of a list, `[{…}, {…}]`.

Models forget a comma, a brace or the bracket at the end, or write one too many: none of these is content. What the end
of the reply leaves of an item isn't, either.
"""

from collections.abc import Sequence

from pipeline.text.formats.parsing.call_object import CallObject
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with


class ListParser(CallParser):
    _list_ends: Sequence[str] = ()
    """Marks that may follow a list"""
    _in_list = False
    _is_next = False
    """Behind an item, where another one may begin"""

    def finish(self) -> list[Event]:
        if self._is_next and self._read in (self._before_item, self._in_object) and not self._object.has_begun:
            self._rest = ""
            self._object = CallObject(self._num_calls)
            self._end_list()
        return super().finish()

    def _open_list(self) -> None:
        self._in_list = True
        self._candidate.append("[")

    def _end_list(self) -> None:
        self._in_list = self._is_next = False
        self._candidate.clear()

    def _after_item(self, text: str, at: int) -> int | None:
        """In a list, after a call: reads what separates or ends the items. Returns None if it is anything else."""
        match text[at]:
            case ",":
                self._candidate.append(",")
                self._read, self._is_next = self._before_item, True
            case "]":
                self._end_list()
            case "{":
                self._read, self._is_next = self._before_item, True
                return at
            case "}":
                pass
            case char if char in SPACE:
                self._candidate.append(char)
            case _:
                return self._before_end_mark(text, at)
        return at + 1

    def _before_item(self, text: str, at: int, out: list[Event]) -> int:
        end = self._before_end_mark(text, at)
        if text[at] == "]":
            self._end_list()
            end = at + 1
        if not self._in_list:
            self._read = self._after_call
        return self._before_object(text, at, out) if end is None else end

    def _before_end_mark(self, text: str, at: int) -> int | None:
        """End the list if one of its marks follows. Returns None if not."""
        match starts_with(text, at, self._list_ends):
            case None:
                return None
            case "":
                return self._hold(text, at)
        self._end_list()
        return at

    def _no_call(self, out: list[Event]) -> None:
        self._in_list = self._is_next = False
        super()._no_call(out)
