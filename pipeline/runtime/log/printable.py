"""Text of clients, models and other servers, made safe for one line of a log or a terminal."""

MAX_CHARS = 4096
"""Of a value that is shown."""


def printable(text: str, keep: str = "", most: int = MAX_CHARS) -> str:
    r"""The text without the characters that `str.isprintable` excludes: control characters and escape codes (C0, C1,
    DEL), marks that change the direction of text, invisible ones, line separators and lone surrogates. Each becomes an
    escape such as `\x1b` or `\u202e`, except those in `keep`. A longer text than `most` characters is cut."""
    text = bounded(text, most)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def bounded(text: str, most: int = MAX_CHARS) -> str:
    """At most `most` characters of the text, and how many were left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def json_printable(text: str) -> str:
    """The same for a line of JSON: each of those characters becomes JSON's escape, so a reader gets what was written.
    Raises nothing: lone surrogates, which UTF-8 can't express, become escapes too."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[i]:02x}{data[i + 1]:02x}" for i in range(0, len(data), 2))
