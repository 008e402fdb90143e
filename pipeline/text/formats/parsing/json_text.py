"""Find the end of a JSON value in streamed text."""

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class JsonSpan:
    """Follows one value from its first character. It only tracks brackets and strings, and does not validate the
    JSON."""

    def __init__(self, first: str) -> None:
        self._is_scalar = first not in '"{['
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Continue at `text[at]`. Returns the offset after the value's text, and whether the value ends there."""
        if self._is_scalar:
            end = _SCALAR_END.search(text, at)
            return (len(text), False) if end is None else (end.start(), True)
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text), False
            at = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._is_escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth <= 0 and not self._in_string:
                return at, True
        return at, False
