#!/usr/bin/env python3
"""Keep banned words out of docs, docstrings, comments, string literals and identifiers.

    tools/check_words.py             check; each finding is a line `file:line: word`
    tools/check_words.py --update    lower the counts in tools/check_words.txt after mending

The words belong to an old private vocabulary of this project; CONTRIBUTING.md says what to write instead. Two kinds of
exceptions exist:

- A line that contains `words: ok` is not checked. Use it, in a comment or in `<!-- -->`, for quotations, for what a
  model wrote, and for old names that clients still use.
- `tools/check_words.txt` lists files that are not yet mended, each with its number of findings. The check fails if a
  file has more findings than listed, and if it has fewer, so that the numbers only go down. `--update` writes the
  numbers of today, also for files that have moved, and refuses to raise their sum.
"""

import argparse
import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LISTED = "tools/check_words.txt"
MARKER = "words: ok"

BANNED = re.compile(
    r"""\b(?:
        who(?:so)?ever | whom(?:so)?ever | nobody | somebody | lest
      | told | wish(?:e[sd]|ing)? | desks?
      | who(?:se|\ is)?\ (?:is\ )?alone | who\ (?:waits|wants|asks|comes|came|finds|takes|reads)
      | (?:make|makes|made|making)\ way | way\ (?:is|was)\ made
      | in\ whose\ stead | in\ (?:its|their)\ stead | in\ vain | (?:is|are)\ no\ more\ needed
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)

_INDEX = "index, offset, slot, position, path or context, whichever it is"
_NOTIFIED = "notified, informed or reported"
IDENTIFIERS = {
    "place": _INDEX,
    "places": _INDEX,
    "neutral": "default, or what has no effect",
    "told": _NOTIFIED,
    "untold": _NOTIFIED,
    "door": "listener, address or protocol",
    "doors": "listeners, addresses or protocols",
    "desk": "pending replies",
    "wish": "option or feature",
    "wishes": "options or features",
    "nobody": "none, or padding",
    "somebody": "other",
    "whoever": "any",
    "aboard": "suspects",
    "guilty": "poison",
    "accuse": "count crashes",
    "hurry": "expedite",
    "steer": "control",
    "unsettle": "revert",
}
"""Words of identifiers, split at _ and CamelCase, and what to write instead. The name of a test is a sentence: it is
checked like other text."""
CLASSES = frozenset(
    [
        "Aside",
        "Awaited",
        "Bed",
        "Crossing",
        "Cut",
        "Desk",
        "Door",
        "Doors",
        "Events",
        "Flight",
        "Gatherer",
        "Gone",
        "Judge",
        "Kept",
        "Lives",
        "Made",
        "Manner",
        "Means",
        "Ours",
        "Outgoing",
        "Parting",
        "Pin",
        "Reach",
        "Refusals",
        "Refuse",
        "Refused",
        "Said",
        "Shown",
        "Siblings",
        "Silence",
        "Spread",
        "Tape",
        "Tell",
        "Theirs",
        "Told",
        "Used",
        "Want",
        "Way",
        "Whole",
        "Wishes",
    ]
)
"""Names of classes that say nothing without a noun."""
FUNCTIONS = {"spell": "write or name it", "took": "end_turn, or what was taken"}
PRODUCT = re.compile(r"_?Pipeline[A-Z]")
"""Of classes: all of them are the pipeline's."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

FOLDERS = ("config", "docs", "kernels", "pipeline", "shm", "stages", "tests", "tools")
TEXT_SUFFIXES = (".md", ".toml", ".h", ".cpp", ".mjs")
"""Files that are checked as a whole; of Python files the comments and strings are checked."""
SKIPPED = ("tests/data", "tools/node_client/node_modules")
EXEMPT = ("tools/check_words.py", "tests/tools/checks/test_check_words.py")
"""Files that name the banned words."""


class Finding(NamedTuple):
    """A banned word, and the line on which it stands, or, for a string of several parts, on which that begins."""

    line: int
    word: str


def findings_in(root: Path = ROOT) -> dict[str, list[Finding]]:
    """The findings of each file below `root` that has any, by its path."""
    found = {}
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        if name in EXEMPT:
            continue
        findings = list(check_text(text, is_python := _is_python(path, text)))
        if is_python:
            findings += [Finding(1, word) for word in banned_in(path.stem)]
        if findings:
            found[name] = sorted(findings)
    return found


def check_text(text: str, is_python: bool) -> Iterator[Finding]:
    """The findings of one file's text. Raises SyntaxError if it is meant to be Python and is not."""
    excepted = {number for number, line in enumerate(text.splitlines(), 1) if MARKER in line}
    nodes = _nodes(text) if is_python else []
    for first, last, part in _python_parts(text, nodes) if is_python else _lines(text):
        if excepted.isdisjoint(range(first, last + 1)):
            for match in BANNED.finditer(part):
                line = min(last, first + part.count("\n", 0, match.start()))
                yield Finding(line, match[0].lower())
    for line, name, node in _names(nodes):
        if line not in excepted:
            for word in banned_in(name, type(node).__name__):
                yield Finding(line, word)


@functools.cache
def banned_in(name: str, kind: str = "Name") -> tuple[str, ...]:
    """What is banned in an identifier that a node of this type defines, each with what to write instead."""
    if name.startswith("test_"):
        return tuple(match[0] for match in BANNED.finditer(name.replace("_", " ")))
    if kind == "ClassDef" and name.strip("_") in CLASSES:
        return (f"{name}: add a noun",)
    if kind == "ClassDef" and PRODUCT.match(name):
        return (f"{name}: say what it is without the product's name",)
    words = {word.lower() for word in _WORD.findall(name.replace("in_place", ""))}
    found = [f"{name}: write {IDENTIFIERS[word]}" for word in sorted(words & IDENTIFIERS.keys())]
    if kind in ("FunctionDef", "AsyncFunctionDef") and (instead := FUNCTIONS.get(name.strip("_"))):
        found.append(f"{name}: write {instead}")
    return tuple(found)


def faults(found: dict[str, list[Finding]], listed: dict[str, int]) -> list[str]:
    """What is wrong, a line each: words in files that have more of them than listed, and counts that are too high."""
    lines = []
    for name in sorted(found.keys() | listed.keys()):
        findings, count = found.get(name, []), listed.get(name, 0)
        if len(findings) > count:
            lines += [f"{name}:{line}: banned word: {word}" for line, word in findings]
            if count:
                lines.append(f"{name}: {len(findings)} banned words, {LISTED} allows {count}")
        elif len(findings) < count:
            lines.append(
                f"{name}: {len(findings)} banned words, {LISTED} says {count}; run tools/check_words.py --update"
            )
    return lines


def read_listed(root: Path = ROOT) -> dict[str, int]:
    """The counts of files that are not yet mended: lines `count path`."""
    path = root / LISTED
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


def update(found: dict[str, list[Finding]], root: Path = ROOT) -> str | None:
    """Write the counts of today. Returns an error, and writes nothing, if their sum is higher than before."""
    counts = {name: len(findings) for name, findings in found.items()}
    before, after = sum(read_listed(root).values()), sum(counts.values())
    if after > before:
        return f"{after} banned words, but {LISTED} allows {before}: write them differently"
    (root / LISTED).write_text("".join(f"{count} {name}\n" for name, count in sorted(counts.items())))
    return None


def _lines(text: str) -> Iterator[tuple[int, int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield number, number, line


def _nodes(text: str) -> list[ast.AST]:
    """All nodes, as ast.walk has them, which is slower."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                if value._fields:
                    nodes.append(value)
            elif isinstance(value, list):
                nodes += [one for one in value if isinstance(one, ast.AST)]
    return nodes


def _names(nodes: list[ast.AST]) -> Iterator[tuple[int, str, ast.AST]]:
    """Line and name of what is defined: classes, functions, parameters, variables and attributes."""
    for node in nodes:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name, node
            case ast.arg():
                yield node.lineno, node.arg, node
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id, node
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr, node


def _python_parts(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, int, str]]:
    """First line, last line and text of each comment and of each string. Of f-strings the code in {} is left out.

    Nearly all files have no banned word, and Python's tokenizer takes seconds for all of them: it reads only files in
    which something behind a `#` is banned."""
    if any(BANNED.search(line, line.index("#")) for line in text.splitlines() if "#" in line):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.end[0], token.string
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.end_lineno or node.lineno, node.value


def _files(root: Path) -> Iterator[Path]:
    """Checked files, without those that only a link leads to."""
    yield from sorted(path for path in root.glob("*.md"))
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            links = any(parent.is_symlink() for parent in (path, *path.parents) if root in parent.parents)
            skipped = any(name.startswith(f"{skipped_folder}/") for skipped_folder in SKIPPED)
            if (
                path.is_file()
                and not links
                and not skipped
                and (path.suffix in (".py", *TEXT_SUFFIXES) or _is_script(path))
            ):
                yield path


def _is_script(path: Path) -> bool:
    if path.suffix:
        return False
    with path.open("rb") as file:
        return file.readline().startswith(b"#!")


def _is_python(path: Path, text: str) -> bool:
    return path.suffix == ".py" or (not path.suffix and "python" in text.partition("\n")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--update", action="store_true", help=f"write today's counts to {LISTED}; their sum may not rise"
    )
    args = parser.parse_args()
    found = findings_in()
    if args.update and (error := update(found)):
        print(error)
    wrong = faults(found, read_listed())
    num_left = sum(len(findings) for findings in found.values())
    print("\n".join(wrong) if wrong else f"no new banned words; {num_left} left in {len(found)} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
