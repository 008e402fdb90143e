"""Word wrap of text that arrives piece by piece. Pure.

A piece is shown at once, also if it ends inside a word. If the word's rest does not fit the line, the part that is
shown is erased and the whole word moves to the next line.
"""

from rich.cells import get_character_cell_size

TAB_COLUMNS = 8
ERASE_TO_END = "\x1b[K"


def _erase(num_columns: int) -> str:
    """Move left and clear the rest of the line."""
    return f"\x1b[{num_columns}D{ERASE_TO_END}" if num_columns else ""


class WordWrap:
    """Breaks lines between words. Spaces and tabs at a break are dropped; other line ends stay."""

    def __init__(self) -> None:
        self._column = 0
        """Columns of the line that are shown."""
        self._word = ""
        """The unfinished word at the end of the line, which is shown."""
        self._word_columns = 0

    def reset(self) -> None:
        """A new line has begun."""
        self._column = 0
        self._end_word()

    def feed(self, text: str, width: int) -> str:
        """What to write to a terminal of `width` columns to show more text."""
        return "".join([self._one(character, width) for character in text])

    def _one(self, character: str, width: int) -> str:
        if character == "\n":
            self.reset()
            return "\n"
        if character in " \t":
            return self._space(character, width)
        num = get_character_cell_size(character)
        if num == 2:
            return self._wide(character, width)
        return self._letter(character, num, width)

    def _space(self, character: str, width: int) -> str:
        self._end_word()
        num = 1 if character == " " else TAB_COLUMNS - self._column % TAB_COLUMNS
        if self._column + num > width:
            return ""  # the next word breaks the line
        self._column += num
        return " " * num

    def _wide(self, character: str, width: int) -> str:
        """Chinese, Japanese and Korean text has no spaces, and its lines may break before any character."""
        self._end_word()
        broken = self._column + 2 > width
        self._column = 2 if broken else self._column + 2
        return f"\n{character}" if broken else character

    def _letter(self, character: str, num: int, width: int) -> str:
        moved = ""
        if self._column + num > width:
            if self._word_columns + num > width:  # a word longer than a line
                self._end_word()
            moved = f"{_erase(self._word_columns)}\n{self._word}"
            self._column = self._word_columns
        self._word += character
        self._word_columns += num
        self._column += num
        return moved + character

    def _end_word(self) -> None:
        self._word = ""
        self._word_columns = 0
