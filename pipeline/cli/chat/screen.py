"""The output of a chat: answers, and on a terminal also remarks and colours."""

import contextlib
import re
import sys
import termios
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.cli.chat.connection import ChatAnswer
from pipeline.cli.complain import complain

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.cli.chat.wrapping import WordWrap

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters that could change the terminal's state. Tabs and line ends are allowed."""
_LOCAL_MODES = 3
"""The place of the flag ECHO in a terminal's attributes."""


class Screen:
    """Shows answers and remarks. `is_live` says whether output is a terminal."""

    def __init__(self, is_live: bool) -> None:
        self.is_live = is_live
        self._console: Console | None = None
        self._word_wrap: WordWrap | None = None
        self._is_line_begun = False

    def text(self, text: str) -> None:
        """Show a piece of an answer immediately."""
        shown = text
        if self.is_live:
            # The last column stays free: with it filled, the cursor's place is not the same in all terminals.
            shown = self._wrap.feed(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), self.console.width - 1)
        sys.stdout.write(shown)
        sys.stdout.flush()
        self._is_line_begun = not text.endswith("\n") if text else self._is_line_begun

    def end_line(self) -> None:
        """Start a new line if the current one has text."""
        if self._is_line_begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._is_line_begun = False
        if self._word_wrap is not None:
            self._word_wrap.reset()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While an answer is shown, a terminal does not mix it with what is typed ahead."""
        if not self.is_live:
            yield
            return
        fd = sys.stdin.fileno()
        before, silent = termios.tcgetattr(fd), termios.tcgetattr(fd)
        silent[_LOCAL_MODES] &= ~termios.ECHO
        termios.tcsetattr(fd, termios.TCSANOW, silent)
        try:
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSANOW, before)

    def remark(self, words: str) -> None:
        """Show a remark, in a terminal only."""
        if self.is_live:
            self.end_line()
            self._print(words, "dim")

    def error(self, words: str) -> None:
        """Show an error."""
        self.end_line()
        if self.is_live:
            self._print(f"error: {words}", "red")
        else:
            complain("pipeline chat", words)

    def _print(self, words: str, style: str) -> None:
        """In lines that fit. A path that is longer stays whole, so that it can be copied."""
        width = self.console.width
        for line in words.splitlines():
            fitting = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            self.console.print(fitting, style=style, markup=False, highlight=False, soft_wrap=True)

    @property
    def console(self) -> "Console":
        # Imported here: a pipe does not need it, and the import takes a quarter of the startup time.
        if self._console is None:
            from pipeline.cli.safe_console import SafeConsole

            self._console = SafeConsole()
        return self._console

    @property
    def _wrap(self) -> "WordWrap":
        if self._word_wrap is None:
            from pipeline.cli.chat.wrapping import WordWrap

            self._word_wrap = WordWrap()
        return self._word_wrap


def described(answer: ChatAnswer) -> str:
    """The speed of an answer: `42 tokens · first after 0.05 s · 104.2 tokens/s`."""
    num_tokens = answer.num_chunks if answer.num_tokens is None else answer.num_tokens
    about = "about " if answer.num_tokens is None else ""
    words = [f"{about}{num_tokens} token{'' if num_tokens == 1 else 's'}"]
    if answer.first_s is not None and answer.last_s is not None:
        words.append(f"first after {answer.first_s - answer.asked_s:.2f} s")
        if num_tokens > 1 and answer.last_s > answer.first_s:
            words.append(f"{(num_tokens - 1) / (answer.last_s - answer.first_s):.1f} tokens/s")
    return " · ".join(words)
