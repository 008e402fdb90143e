"""The names of the formats, and those that the settings take."""

import msgspec
import pytest

from pipeline.config.sections.requests import ReasoningParser, ToolCallParser
from pipeline.config.settings import ChatSettings
from pipeline.text.formats.chat_formats import GENERIC, TOOL_FORMATS, ChatFormats
from pipeline.text.formats.reasoning import FORMATS


def taken(setting: object) -> set[str]:
    schemas, _ = msgspec.json.schema_components([setting])
    return set(schemas[0]["enum"]) - {"auto", "none"}


def test_the_settings_take_the_names_of_all_formats() -> None:
    tools = [name for one in (*TOOL_FORMATS, GENERIC) for name in (one.name, *one.aliases)]
    reasoning = [name for one in FORMATS for name in (one.name, *one.aliases)]
    assert (taken(ToolCallParser), taken(ReasoningParser)) == (set(tools), set(reasoning))
    assert (len(set(tools)), len(set(reasoning))) == (len(tools), len(reasoning))


@pytest.mark.parametrize(
    ("setting", "name"), [("llama3_json", "llama3"), ("glm47", "glm45"), ("harmony", "openai"), ("granite4", "hermes")]
)
def test_a_format_is_selected_by_vllms_name_too(setting: str, name: str) -> None:
    found = ChatFormats.of("", ChatSettings(tool_call_parser=setting)).tools  # type: ignore[arg-type]
    assert found is not None and found.name == name
