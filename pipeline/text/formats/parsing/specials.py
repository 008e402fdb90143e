"""Remove marks that stand around a text."""

from pipeline.text.formats.parsing.marks import Marks


class SpecialTokenFilter:
    """Removes marks from streamed text."""

    def __init__(self, marks: frozenset[str]) -> None:
        self._marks = Marks.of(marks)
        self._rest = ""

    def push(self, text: str) -> str:
        text, shown, at = self._rest + text, [], 0
        while found := self._marks.find(text, at):
            shown.append(text[at : found.start()])
            at = found.end()
        held = self._marks.held(text, at)
        self._rest = text[held:]
        shown.append(text[at:held])
        return "".join(shown)

    def finish(self) -> str:
        rest, self._rest = self._rest, ""
        return rest
