"""Tool calls that are the items of a list, `[{…}, {…}]`."""

from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.text_scan import SPACE


class ListParser(CallParser):
    _in_list = False

    def _open_list(self) -> None:
        self._in_list = True
        self._candidate.append("[")

    def _after_item(self, text: str, at: int) -> int | None:
        """In a list, after a call: reads what separates or ends the items. Returns None if it is anything else."""
        match text[at]:
            case ",":
                self._candidate.append(",")
                self._read = self._before_object
            case "]":
                self._in_list = False
                self._candidate.clear()
            case char if char in SPACE:
                self._candidate.append(char)
            case _:
                return None
        return at + 1
