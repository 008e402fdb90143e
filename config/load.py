"""Load settings from a TOML file and the command line, with errors in the user's words.

Sources override the defaults in order: the file, `--set section.key=value`, then the flags with a name of their own
(`--port`). Each source is checked by itself, so that an error can name it; all problems are reported at once.
"""

import math
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from pipeline.config import rules
from pipeline.config.closest import closest
from pipeline.config.keys import Key, needs, sections
from pipeline.config.renamed import RENAMED, new_value, warning_of, warning_of_value
from pipeline.config.settings import Settings

PRESETS_DIR = Path(__file__).parent / "presets"
MODELS = "models"
"""The name of the tables of several models: config/models.py."""
MAX_FILE_BYTES = 1024**2
"""Of a file of settings: --config may name a model's file by mistake."""

Origin = str
Given = dict[str, tuple[Origin, Any]]
"""Dotted key → the source of its value, and the value."""


class ConfigError(ValueError):
    """Invalid settings. `problems` has a line for each: the source, the key, and what would be right."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=3)


def load(
    path: Path | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    tables: Mapping[Origin, dict[str, Any]] | None = None,
    options: Sequence[tuple[Origin, str]] = (),
    warn: Callable[[str], None] = _warn,
) -> Settings:
    """Merge a file and the command line into settings.

    `path` is a TOML file or a preset's name, `sets` are texts `section.key=value`, `flags` maps dotted keys to the
    values of command-line options named after them, `options` are texts like `sets`, each after its source, and
    `tables` have the contents of a file, keyed by their source (a call in Python, for example). `warn` gets one text
    for each old name of a key or a value. Raises ConfigError
    with all problems.
    """
    files = [] if path is None else [(str(path), read_file(path))]
    for origin, table in files:
        if MODELS in table:
            takers = "only `pipeline serve` and `pipeline config` take these tables"
            raise ConfigError([f"{origin}: [{MODELS}.NAME]: several models: {takers}"])
    return merge(files, sets, flags, tables, options, warn)


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a file of settings, or of a preset. Raises ConfigError."""
    return _parse(find(path))


def merge(
    files: Sequence[tuple[Origin, dict[str, Any]]],
    sets: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    tables: Mapping[Origin, dict[str, Any]] | None = None,
    options: Sequence[tuple[Origin, str]] = (),
    warn: Callable[[str], None] = _warn,
) -> Settings:
    """As `load`, with the contents of files, of which later ones override earlier ones. Raises ConfigError."""
    tree = _Tree()
    given: Given = {}
    for origin, table in files:
        tree.begin_source()
        tree.read_table(origin, "", table, given)
    tree.begin_source()
    for text in sets:
        tree.read_text(f"--set {text}", text, given)
    for dotted, value in (flags or {}).items():
        tree.read_text(f"--{dotted.rpartition('.')[2].replace('_', '-')} {value}", f"{dotted}={value}", given)
    for origin, text in options:
        tree.read_text(origin, text, given)
    for origin, table in (tables or {}).items():
        tree.begin_source()
        tree.read_table(origin, "", table, given)
    if tree.problems:
        raise ConfigError(tree.problems)

    settings = msgspec.convert(_nested({dotted: value for dotted, (_, value) in given.items()}), Settings)
    if problems := rules.contradictions(settings):
        raise ConfigError([_with_origin(problem, given) for problem in problems])
    for text in tree.warnings:
        warn(text)
    return settings


def presets() -> dict[str, Path]:
    """The settings files that come with the package, by name."""
    return {file.stem: file for file in sorted(PRESETS_DIR.glob("*.toml"))}


def find(path: Path) -> Path:
    """The file for a path or a preset's name. Raises ConfigError if neither exists."""
    known = presets()
    try:
        if path.is_file():
            return path
        if str(path) not in known and path.exists():
            raise ConfigError([f"{path}: is not a file"])
    except OSError as error:  # such as a name that is too long
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    if str(path) in known:
        return known[str(path)]
    hint = closest(str(path), known) or "."
    raise ConfigError([f"{path}: no such file, and no preset of that name{hint} Presets are {', '.join(known)}."])


def _parse(file: Path) -> dict[str, Any]:
    data = _read(file)
    try:
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        return tomllib.loads(text.replace("\r\n", "\n").replace("\r", "\n"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: is not UTF-8 text (byte {error.start})"]) from error
    except RecursionError as error:
        raise ConfigError([f"{file}: is not valid settings: it is nested too deeply"]) from error
    except ValueError as error:  # a TOMLDecodeError, or a number with more digits than Python reads
        raise ConfigError([f"{file}: is not valid TOML: {error}"]) from error


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{file}: can't be read: {error.strerror}"]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{file}: is larger than {MAX_FILE_BYTES} bytes, so these are no settings"])
    return data


class _Tree:
    """All keys of the settings, and the problems found while values are checked against them."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: dict[str, None] = {}
        """One for each old name that was given, in order."""
        self._names: dict[str, str] = {}
        """Dotted key → the name that this source gave it by."""
        tables = sections()
        self._sections = {table.name for table in tables}
        self._keys = {key.dotted: key for table in tables for key in table.keys}

    def begin_source(self) -> None:
        """A later source may give a key by another name than an earlier one; one source may not use both."""
        self._names.clear()

    def read_table(self, origin: Origin, prefix: str, table: dict[str, Any], given: Given) -> None:
        """Take the values of a table and of those in it."""
        for name, value in table.items():
            dotted = f"{prefix}.{name}" if prefix else name
            if "." in name:
                within = f" in [{prefix}]" if prefix else ""
                self.problems.append(f'{origin}: "{name}"{within}: in quotes this is one name; write it without them')
            elif dotted not in self._sections:
                self._take(origin, dotted, value, given)
            elif isinstance(value, dict):
                self.read_table(origin, dotted, value, given)
            else:
                self.problems.append(f"{origin}: {dotted}: is a section, written [{dotted}], got {_shown(value)}")

    def read_text(self, origin: Origin, text: str, given: Given) -> None:
        """Take one `section.key=value`, the value in TOML or as a bare text."""
        dotted, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not dotted:
            self.problems.append(f"{origin}: needs the form section.key=value")
        elif dotted in self._sections:
            self.problems.append(f"{origin}: {dotted} is a section; one key of it is set by {dotted}.key=value")
        else:
            key = self._keys.get(RENAMED.get(dotted, dotted))
            self._take(origin, dotted, value if key is None else _from_text(value, key), given)

    def _take(self, origin: Origin, name: str, value: Any, given: Given) -> None:
        dotted = RENAMED.get(name, name)
        key = self._keys.get(dotted)
        if key is None:
            self.problems.append(f"{origin}: {self._unknown(dotted, isinstance(value, dict))}")
            return
        if name != dotted:
            self.warnings[warning_of(name)] = None
        if self._names.setdefault(dotted, name) != name:
            old = next(old for old, new in RENAMED.items() if new == dotted)
            self.problems.append(f"{origin}: {dotted}: is set twice, also by its old name {old}; remove {old}")
            return
        if (new := new_value(dotted, value)) != value:
            self.warnings[warning_of_value(dotted, value)] = None
        try:
            given[dotted] = (origin, _converted(new, key))
        except (ValueError, OverflowError) as error:
            inside = _problem_inside(dotted, error)
            self.problems.append(f"{origin}: {inside or f'{dotted}: needs {needs(key)}, got {_shown(value)}'}")

    def _unknown(self, dotted: str, is_table: bool) -> str:
        section, _, name = dotted.rpartition(".")
        if is_table:
            section, name = dotted, ""
        if section not in self._sections:
            return f"there is no section [{section}]{closest(section, self._sections) or self._same(name)}"
        return f"{dotted}: there is no such key{self._same(name) or closest(dotted, self._keys)}"

    def _same(self, name: str) -> str:
        """Keys of this name in other sections."""
        matches = [dotted for dotted in self._keys if dotted.rpartition(".")[2] == name]
        return f"; did you mean {' or '.join(matches)}?" if matches else ""


def _with_origin(problem: str, given: Given) -> str:
    """A problem between keys, with the place where its first key was given."""
    dotted = problem.partition(":")[0]
    return f"{given[dotted][0]}: {problem}" if dotted in given else problem


# ----------------------------------------------------------------------------------------------------------- values

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_in_bytes(text: str) -> int:
    """Bytes of a text such as `512MiB` (1024-based), `64kB` (1000-based). Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, letter, binary = match.groups()
    factor: int = (1024 if binary else 1000) ** _POWERS[letter.lower()]
    return round(float(number) * factor)


def _converted(value: Any, key: Key) -> Any:
    """A value converted to its key's type. Raises ValueError (as msgspec.ValidationError) if it does not fit."""
    if key.is_size and isinstance(value, str):
        value = size_in_bytes(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not finite")
    return msgspec.convert(value, key.annotation)


def _from_text(text: str, key: Key) -> Any:
    """A value from the command line: TOML if it parses as TOML, else the text itself, or for a list the texts between
    its commas. Keys that take a text need no quotes, even if the text would be a number in TOML."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if isinstance(key.type, inspect.ListType | inspect.VarTupleType) and not text.startswith("["):
            return [entry.strip() for entry in text.split(",")]
        return text
    kinds = key.type.types if isinstance(key.type, inspect.UnionType) else (key.type,)
    if not isinstance(value, str) and any(isinstance(kind, inspect.StrType) for kind in kinds) and len(kinds) == 1:
        return text
    return value


_LOCATION = re.compile(r"(?P<what>.*) - at `\$(?P<location>\[\d+\].*)`", re.DOTALL)
"""msgspec's error about a field of an entry of a list of tables."""


def _problem_inside(dotted: str, error: Exception) -> str:
    """What is wrong with an entry of a list of tables, such as `keys[0].rpm: expected `int` >= 0`; else empty."""
    match = _LOCATION.fullmatch(str(error))
    if match is None or dotted != "keys":
        return ""
    what = match["what"]
    if match["location"].endswith(".digest"):  # the message would have the pattern
        what = "needs the key's SHA-256, 64 hexadecimal digits: printf %s KEY | sha256sum"
    elif match["location"].endswith(".name"):
        what = "needs 1 to 64 letters, digits and . _ @ -, the first one a letter or digit"
    return f"{dotted}{match['location']}: {what[0].lower()}{what[1:]}"


def _shown(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'the text "{value}"'
        case int() if value.bit_length() > 1024:  # Python doesn't write numbers of any length
            return "a number far beyond that"
        case int() | float():
            return f"the number {value}"
        case dict():
            return "a table"
        case list():
            return "a list"
        case _:
            return f"{type(value).__name__} {value}"


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        table = tree
        *path, name = dotted.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return tree
