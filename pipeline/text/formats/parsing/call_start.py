"""Where a call begins within reasoning that the model forgot to end.

Qwen 3.5 and GLM write calls before `</think>`, and vLLM and SGLang read them as calls. A mark alone may be a thought
about the format, so what follows it must begin a call of one of the request's tools.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS
from pipeline.text.formats.parsing.text_scan import skip_space, starts_with

MAX_SPACE_CHARS = 64
"""White space between two parts; more of it is no call"""


class CallStart:
    """How a format begins a call: its mark, some texts, a tool's name, and one of some texts. White space may stand
    between all of them, but not within quotes."""

    def __init__(
        self, mark: str, before_name: Sequence[str], after_name: Sequence[str], names: Collection[str]
    ) -> None:
        self.mark = mark
        self._before_name, self._after_name = before_name, after_name
        self._names, self._sorted = frozenset(names), sorted(names)
        self._lengths = sorted(set(map(len, names)))

    def follows(self, text: str, at: int) -> bool | None:
        """Whether a call's beginning stands at `at`, behind its mark. None if that needs more text."""
        for part in self._before_name:
            match self._find(text, at, (part,)):
                case bool() | None as result:
                    return result
                case end:
                    at = end
        begin, at = at, skip_space(text, at)
        if at - begin > MAX_SPACE_CHARS:
            return False
        is_possible = at == len(text)
        rest = text[at : at + MAX_NAME_CHARS]
        index = bisect_left(self._sorted, rest)
        is_possible |= index < len(self._sorted) and self._sorted[index].startswith(rest)
        for length in self._lengths:  # a name may begin with another one
            if rest[:length] in self._names:
                end = self._find(text, at + length, self._after_name)
                if not isinstance(end, bool) and end is not None:
                    return True
                is_possible |= end is None
        return None if is_possible else False

    def _find(self, text: str, at: int, options: Sequence[str]) -> int | bool | None:
        """The end of an option at `at`. False if there is none, None if that needs more text."""
        index = skip_space(text, at)
        if index - at > MAX_SPACE_CHARS:
            return False
        found = starts_with(text, index, options)
        return False if found is None else None if found == "" else index + len(found)
