"""The chat templates of a folder in Hugging Face layout: one for chats, and one for chats with tools if it has two.

They are those of transformers' `AutoTokenizer`. A template may be a file, or in tokenizer_config.json, as a text, a
list of objects with `name` and `template`, or an object with the templates by name. Older models for texts and images
have it only in a file of their processor. Of several, transformers takes `tool_use` for chats with tools, else
`default`; others (`rag`) are only used by name, and a server's clients can't name one.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.stages.prepare.files import MAX_JSON_BYTES, MAX_TEMPLATE_BYTES, decode_json, find, read, shown
from pipeline.stages.prepare.sources.layout import DEFAULT_TEMPLATE, TEMPLATE, TOOL_TEMPLATE
from pipeline.stages.prepare.sources.source import ModelError

KEY = "chat_template"
DEFAULT, TOOL_USE = "default", "tool_use"
TOKENIZER = "tokenizer_config.json"
PROCESSORS = ("processor_config.json", "chat_template.json")
"""Files of a processor that may have the template. The first of them counts, as in `AutoProcessor`."""
PREPARED = {DEFAULT: "chat_template.jinja", TOOL_USE: "chat_template.tool_use.jinja"}
"""Names of the templates in a prepared folder."""


class Templates(NamedTuple):
    """Texts by name, and lines about those that don't count."""

    by_name: dict[str, str]
    notes: list[str]


def templates_of(source: Path, tokenizer_config: dict[str, Any]) -> Templates:
    """The templates of a folder. Raises ModelError if one of those that count is invalid."""
    files = {DEFAULT: (DEFAULT_TEMPLATE, TEMPLATE), TOOL_USE: (TOOL_TEMPLATE,)}
    found = {
        kind: text_of(path)
        for kind, names in files.items()
        if (path := next((path for name in names if (path := find(source, name))), None)) is not None
    }
    unnamed = _others_beside(source)
    if DEFAULT in found:
        is_additional = find(source, DEFAULT_TEMPLATE) is not None
        where = DEFAULT_TEMPLATE if is_additional else TEMPLATE
        return Templates(found, unnamed + _differing(source, found, where, tokenizer_config))
    where, named = TOKENIZER, _named(tokenizer_config.get(KEY), source / TOKENIZER)
    notes = unnamed
    if not named and (others := _of_processor(source)):
        where, named = others
        notes.append(f"the chat template is that of {where}, because the tokenizer has none")
    if unused := sorted(set(named) - {DEFAULT, TOOL_USE}):
        notes.append(
            f"{where}: the chat templates named {shown(unused)} are not used"
            + ("" if DEFAULT in named else ", and none is named 'default': set chat_template, or chats are refused")
        )
    found = {**{kind: named[kind] for kind in (DEFAULT, TOOL_USE) if kind in named}, **found}
    if where == TOKENIZER and DEFAULT in found:
        notes += _differing(source, found, TOKENIZER, tokenizer_config)
    return Templates(found, notes)


def write(templates: dict[str, str], source: Path, target: Path) -> None:
    """Write templates to a prepared folder. Raises ModelError, naming `source`, if one is too long."""
    for kind, text in templates.items():
        data = text.encode()
        if len(data) > MAX_TEMPLATE_BYTES:
            raise ModelError(
                f"{source}: the chat template has {len(data)} bytes; at most {MAX_TEMPLATE_BYTES} are allowed"
            )
        (target / PREPARED[kind]).write_bytes(data)


def text_of(path: Path) -> str:
    """A template's file. Raises ModelError if it is too long or not UTF-8."""
    try:
        return read(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error


def _named(value: Any, path: Path) -> dict[str, str]:
    """The templates in a JSON file's value, by name. Raises ModelError if it is of another kind."""
    match value:
        case None:
            return {}
        case str():
            return {DEFAULT: value}
        case list():
            pairs = [(one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None) for one in value]
        case dict():
            pairs = list(value.items())
        case _:
            pairs = [(None, None)]
    if all(isinstance(name, str) and isinstance(template, str) for name, template in pairs):
        return dict(pairs)  # type: ignore[arg-type]
    raise ModelError(
        f"{path}: chat_template must be a template, or several by name: a list of objects with 'name' and 'template', "
        "or an object"
    )


def _of_processor(source: Path) -> tuple[str, dict[str, str]] | None:
    """The name of a processor's file that has templates, and these. Raises ModelError if it is invalid."""
    for name in PROCESSORS:
        path = find(source, name)
        value = None if path is None else decode_json(path, MAX_JSON_BYTES, dict[str, Any]).get(KEY)
        if named := _named(value, source / name):
            return name, named
    return None


def _differing(source: Path, found: dict[str, str], where: str, tokenizer_config: dict[str, Any]) -> list[str]:
    """Lines about other templates than those that count, `found` with the default of the file `where`: in a file that
    comes after it, or of the processor. Such files aren't needed, so they may be invalid."""
    order = (DEFAULT_TEMPLATE, TEMPLATE, TOKENIZER)
    others: list[tuple[str, dict[str, str]]] = []
    for name in order[order.index(where) + 1 :]:
        with suppress(ModelError):
            if name == TOKENIZER:
                others.append((name, _named(tokenizer_config.get(KEY), source / name)))
            elif (path := find(source, name)) is not None:
                others.append((name, {DEFAULT: text_of(path)}))
    with suppress(ModelError):
        if (of_processor := _of_processor(source)) is not None:
            others.append(of_processor)
    lines = []
    for name, templates in others:
        if templates.get(DEFAULT, found[DEFAULT]) != found[DEFAULT]:
            lines.append(f"the chat template is that of {where}; the one in {name} differs and is not used")
        if TOOL_USE in templates and templates[TOOL_USE] != found.get(TOOL_USE):
            lines.append(f"the chat template for tools in {name} is not used, because that of {where} counts")
    return lines


def _others_beside(source: Path) -> list[str]:
    """A line about named templates in files that no chat can have."""
    folder = (source / DEFAULT_TEMPLATE).parent
    try:
        names = sorted(path.stem for path in folder.iterdir() if path.suffix == ".jinja")
    except OSError:  # there is none
        return []
    unused = [name for name in names if name not in (DEFAULT, TOOL_USE)]
    return [f"{folder.name}: the chat templates named {shown(unused)} are not used"] if unused else []
