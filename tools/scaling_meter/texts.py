"""Texts that are hard to read: repeated marks and half marks, and JSON that is deep, wide or long."""

from collections.abc import Callable, Mapping

DEPTH = 60
"""Of nested values; bodies may have twice as many levels."""

Grow = Callable[[int], str]


def repeated(piece: str, begin: str = "", end: str = "") -> Grow:
    """`piece` repeated to n bytes, between two texts."""
    size = len(piece.encode(errors="surrogatepass"))
    return lambda n: begin + piece * max(n // size, 1) + end


PIECES = ("a", "1", "1s", " ", "\\", "{", "<", "é")
"""What long texts are made of."""


def quoted(grow: Grow) -> Grow:
    """The same as a JSON string."""
    import json

    return lambda n: json.dumps(grow(n), ensure_ascii=False)


STRINGS: Mapping[str, Grow] = {repr(piece): quoted(repeated(piece)) for piece in PIECES} | {
    "surrogates": lambda n: '"' + "\\ud800" * (n // 6) + '"',
    "pairs": lambda n: '"' + "\\ud83d\\ude00" * (n // 12) + '"',
}
"""JSON strings"""

VALUES: Mapping[str, Grow] = {
    "digits": lambda n: "1" * n,
    "decimals": lambda n: "0." + "1" * n,
    "exponent": lambda n: "1e" + "1" * n,
    "numbers": lambda n: "[" + ",".join(["1"] * (n // 2)) + "]",
    "lists": lambda n: "[" + ",".join(["[]"] * (n // 3)) + "]",
    "objects": lambda n: "[" + ",".join(["{}"] * (n // 3)) + "]",
    "deep lists": lambda n: "[" + ",".join(["[" * DEPTH + "]" * DEPTH] * (n // (2 * DEPTH + 1))) + "]",
    "keys": lambda n: "{" + ",".join(f'"k{i}":1' for i in range(n // 10)) + "}",
    "equal keys": lambda n: "{" + ",".join(['"k":1'] * (n // 6)) + "}",
    "long keys": lambda n: '{"' + "a" * n + '":1}',
    "deep keys": lambda n: '{"a":' * DEPTH + '"' + "b" * n + '"' + "}" * DEPTH,
    "texts": lambda n: "[" + ",".join(['"a"'] * (n // 4)) + "]",
}
"""JSON values"""
