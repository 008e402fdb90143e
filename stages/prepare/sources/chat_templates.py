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
    if DEFAULT in found:
        return Templates(found, _differing(source, found[DEFAULT], TEMPLATE))
    where, named = TOKENIZER, _named(tokenizer_config.get(KEY), source / TOKENIZER)
    notes: list[str] = []
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
        notes += _differing(source, found[DEFAULT], TOKENIZER)
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


def _differing(source: Path, default: str, where: str) -> list[str]:
    """A line if the processor has another template than the tokenizer."""
    with suppress(ModelError):  # the file isn't needed
        found = _of_processor(source)
        if found is not None and found[1].get(DEFAULT, default) != default:
            return [f"the chat template is that of {where}; the one in {found[0]} differs and is not used"]
    return []
