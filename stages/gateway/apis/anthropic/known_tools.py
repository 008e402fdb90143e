"""Tools of the Messages API that have a type of their own instead of a schema. Pure.

    bash, text_editor, computer, memory    the client runs them: functions with the schemas of its clients
    web_search, code_execution …           only Anthropic runs them: they are left out of the prompt

Sources: the types of the Python package anthropic, and the schemas of the tools in the npm package @ai-sdk/anthropic
"""

import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from pipeline.stages.gateway.apis.anthropic.bodies import OWN_TYPES, ToolParam

_OWN = re.compile(OWN_TYPES)


class KnownTool(NamedTuple):
    """A tool that the client runs, and that the model knows by its description and schema."""

    description: str
    input_schema: Raw


def is_left_out(kind: str) -> bool:
    """Whether a type of tools is Anthropic's, and no client runs it, or there is no schema of its input."""
    return kind not in KNOWN and _OWN.fullmatch(kind) is not None


def _object(required: str, **properties: Any) -> Raw:
    return Raw(msgspec.json.encode({"type": "object", "properties": properties, "required": required.split()}))


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _one_of(words: str, description: str) -> dict[str, Any]:
    return {"type": "string", "enum": words.split(), "description": description}


def _integers(num: int, description: str) -> dict[str, Any]:
    return {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": num,
        "maxItems": num,
        "description": description,
    }


_BASH = KnownTool(
    "Runs a command in a bash session, which keeps its state between calls.",
    _object(
        "",
        command=_text("The command to run. Required unless restart is true."),
        restart={"type": "boolean", "description": "true: starts the session again."},
    ),
)

_PATH = _text("Absolute path of the file or directory.")
_RANGE = _integers(2, "Of view: the first and the last line to show, counted from 1; -1 is the end of the file.")
_FILE_TEXT = _text("Of create: the content of the new file.")
_LINE = {"type": "integer", "description": "Of insert: the text is inserted behind this line; 0 is the beginning."}
_OLD = _text("Of str_replace: the text to replace, which the file has exactly once.")


def _editor(commands: str, insert: str) -> KnownTool:
    """`insert`: the argument with the text to insert."""
    properties = {
        "command": _one_of(commands, "The command to run."),
        "path": _PATH,
        "file_text": _FILE_TEXT,
        "old_str": _OLD,
        "new_str": _text(f"Of str_replace{' and insert' if insert == 'new_str' else ''}: the new text."),
        "insert_line": _LINE,
        "view_range": _RANGE,
    }
    if insert != "new_str":
        properties[insert] = _text("Of insert: the text to insert.")
    return KnownTool("Views and edits files.", _object("command path", **properties))


_MEMORY = KnownTool(
    "Keeps notes in files below /memories, which later conversations can read.",
    _object(
        "command",
        command=_one_of("view create str_replace insert delete rename", "The command to run."),
        path=_text("Path of the file or directory, of all commands but rename."),
        view_range=_RANGE,
        file_text=_FILE_TEXT,
        old_str=_OLD,
        new_str=_text("Of str_replace: the new text."),
        insert_line=_LINE,
        insert_text=_text("Of insert: the text to insert."),
        old_path=_text("Of rename: the path so far."),
        new_path=_text("Of rename: the new path."),
    ),
)

_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click screenshot cursor_position"
)
_NEWER_ACTIONS = f"{_ACTIONS} left_mouse_down left_mouse_up triple_click hold_key scroll wait"


def _computer(actions: str) -> KnownTool:
    properties: dict[str, Any] = {
        "action": _one_of(actions, "What to do."),
        "coordinate": _integers(2, "x and y of the place on the screen, in pixels from the upper left corner."),
        "text": _text("Of type: the text. Of key and hold_key: the keys, such as ctrl+s."),
    }
    if "scroll" in actions.split():
        properties |= {
            "start_coordinate": _integers(2, "Of left_click_drag: where it begins."),
            "scroll_direction": _one_of("up down left right", "Of scroll."),
            "scroll_amount": {"type": "integer", "description": "Of scroll: the number of clicks of the wheel."},
            "duration": {"type": "number", "description": "Of wait and hold_key: seconds."},
        }
    if "zoom" in actions.split():
        properties["region"] = _integers(4, "Of zoom: x and y of its upper left and of its lower right corner.")
    return KnownTool(
        "Controls the mouse and the keyboard of a computer, and takes screenshots.", _object("action", **properties)
    )


_OLD_COMMANDS, _COMMANDS = "view create str_replace insert undo_edit", "view create str_replace insert"

KNOWN: dict[str, KnownTool] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _editor(_OLD_COMMANDS, "new_str"),
    "text_editor_20250124": _editor(_OLD_COMMANDS, "new_str"),
    "text_editor_20250429": _editor(_COMMANDS, "new_str"),
    "text_editor_20250728": _editor(_COMMANDS, "insert_text"),
    "memory_20250818": _MEMORY,
    "computer_20241022": _computer(_ACTIONS),
    "computer_20250124": _computer(_NEWER_ACTIONS),
    "computer_20251124": _computer(f"{_NEWER_ACTIONS} zoom"),
}
"""By type"""


def known(tool: ToolParam) -> KnownTool:
    """What the model sees of a tool whose type is one of `KNOWN`"""
    kind = tool.type or ""
    if kind == "computer_20251124" and not tool.enable_zoom:
        kind = "computer_20250124"
    description, schema = KNOWN[kind]
    if kind.startswith("computer") and tool.display_width_px and tool.display_height_px:
        description += f" The screen has {tool.display_width_px} x {tool.display_height_px} pixels."
    return KnownTool(description, schema)
