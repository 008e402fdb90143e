"""No character of a client, model or server controls a terminal, or ends a log line."""

import io
import json
import logging
import sys
import unicodedata

import pytest
from rich.table import Table
from rich.text import Text

from pipeline.cli.complain import complain
from pipeline.cli.safe_console import SafeConsole
from pipeline.runtime.log.logs import INDENT, JsonFormatter, KeyValueFormatter
from pipeline.runtime.log.printable import MAX_CHARS, json_printable, printable
from pipeline.stages.prepare.progress import Lines, ProgressBar

UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories: controls, formats (bidi overrides among them), surrogates, line and paragraph separators."""
CHARS = [chr(code) for code in range(sys.maxunicode + 1)]
BAD = [char for char in CHARS if unicodedata.category(char) in UNSAFE]
TEXT = "".join(BAD)


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("pipeline", logging.INFO, __file__, 1, message, None, None)
    made.fields = fields
    return made


def has_bad(text: str) -> bool:
    return any(unicodedata.category(char) in UNSAFE for char in text)


def test_every_control_character_becomes_an_escape() -> None:
    assert len(BAD) > 2000 and {"\x1b", "\x9b", "\x7f", "\n", "\u202e", "\u2028", "\ud800", "\ufeff"} <= set(BAD)
    shown = printable(TEXT, most=len(TEXT))
    assert not has_bad(shown) and shown.isascii()
    assert printable("\x1b[2J\x9b\u202e") == "\\x1b[2J\\x9b\\u202e"
    plain = "Grüße, 世界 🙂 – ok"
    assert printable(plain) is plain


def test_long_values_are_cut() -> None:
    assert printable("a" * (MAX_CHARS + 9)) == "a" * MAX_CHARS + "… (9 more characters)"


def test_json_keeps_what_was_written() -> None:
    data = "".join(char for char in BAD if unicodedata.category(char) != "Cs")
    line = json_printable(json.dumps(data, ensure_ascii=False))
    assert not has_bad(line) and json.loads(line) == data


@pytest.mark.parametrize("part", ["message", "value", "key", "exception"])
def test_no_character_leaves_its_log_line(part: str) -> None:
    """Each of them, and each after others: a line stays one line, and no second one looks like an event."""
    for text in (TEXT, *(f"a{char}12:00:00.000 I forged x=1" for char in BAD[:200])):
        made = record("ok", value=1)
        match part:
            case "message":
                made = record(text)
            case "value":
                made = record("ok", value=text)
            case "key":
                made = record("ok", **{text: 1})
            case _:
                made.exc_info = (ValueError, ValueError(text), None)
        line = KeyValueFormatter("x.0").format(made)
        first, *others = line.split("\n")
        assert not has_bad(first) and not has_bad("".join(others))
        assert all(other.startswith(INDENT) for other in others)
        if part in ("value", "key"):
            assert not others
        line = JsonFormatter("x.0").format(made)
        assert not has_bad(line) and json.loads(line)["stage"] == "x.0"


def test_values_of_log_lines_are_bounded() -> None:
    for formatter in (KeyValueFormatter("x.0"), JsonFormatter("x.0")):
        assert len(formatter.format(record("ok", value="a" * 10**6))) < MAX_CHARS + 300


def test_a_terminal_gets_no_code_of_a_server() -> None:
    table = Table("a")
    table.add_row("b\x1b[31m\x9b\u202e")
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=200)
    console.print(Text("c\x1b]0;title", "red"))
    console.print(table)
    text = out.getvalue()
    assert "\\x1b]0;title" in text and "b\\x1b" in text
    assert "\x1b[31mc" in text, "styles stay"
    assert "\x9b" not in text and "\u202e" not in text and "\x1b]" not in text


def test_a_terminal_shows_words_in_brackets_as_they_are() -> None:
    table = Table("name")
    table.add_row("model[/x][red]")
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=200, highlight=False)
    console.print("folder[/y]")
    console.print(table)
    assert "model[/x][red]" in out.getvalue() and "folder[/y]" in out.getvalue()


@pytest.mark.parametrize("kind", [Lines, ProgressBar])
def test_the_progress_of_preparing_takes_any_name(kind: type[Lines] | type[ProgressBar]) -> None:
    out = io.StringIO()
    progress = kind(out)
    name = "model[/x]\x1b[2J\x9b"
    progress.say(name)
    with progress.measure(name) as report:
        report(1, 2)
    assert out.getvalue().count("model[/x]\\x1b[2J\\x9b") >= 2
    assert "\x1b[2J" not in out.getvalue() and "\x9b" not in out.getvalue()


def test_errors_of_commands_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    complain("pipeline ps", ValueError("two\nlines\x1b[2J"))
    assert capsys.readouterr().err == "pipeline ps: error: two\nlines\\x1b[2J\n"
