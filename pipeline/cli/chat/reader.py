"""Reads questions from a terminal or a pipe."""

import sys

PROMPT, MORE = "> ", "… "
FENCE = '"""'


class LineReader:
    """Reads questions. In a terminal a question may span several lines; in a pipe each line is one."""

    def __init__(self, is_live: bool) -> None:
        self._is_live = is_live
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        if is_live:
            import readline  # noqa: F401 - from now on `input` edits lines and remembers them

    def question(self) -> str | None:
        """The next question that is not blank, or None at the end of input. Raises KeyboardInterrupt at Ctrl-C."""
        while (text := self._typed() if self._is_live else self._piped()) is not None:
            if text.strip():
                return text.strip()
        return None

    def _piped(self) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def _typed(self) -> str | None:
        """One line, or several: after a backslash at the end of a line, or between two lines of three quotes."""
        try:
            line = input(PROMPT)
            if line.startswith(FENCE):
                return self._fenced(line.removeprefix(FENCE))
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input(MORE)
            return line
        except EOFError:
            sys.stdout.write("\n")
            return None

    def _fenced(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(FENCE):
            lines.append(line)
            line = input(MORE)
        return "\n".join([*lines, line.rstrip().removesuffix(FENCE)])
