"""Templates of real models: their assistant messages parse back, and their format is detected."""

import json
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import ReasoningStage
from pipeline.text.formats.tool_format import shows_tools
from tests.stages.ingest.templates.chats import TEMPLATES, by_transformers
from tests.text.formats.replies import Reply, read

SOURCES = {path.name.removesuffix(".jinja"): path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
FORMATS = {
    "apertus": ("apertus", "apertus"),
    "command-r7b": ("generic", None),
    "deepseek-r1-distill": ("generic", "deepseek_r1"),
    "deepseek-v3.1": ("deepseek_v31", "deepseek_v3"),
    "deepseek-v3.1-official": ("generic", "deepseek_v3"),
    "gemma2": ("generic", None),
    "gemma3": ("pythonic", None),
    "gemma4": ("gemma4", "gemma4"),
    "glm4.6": ("glm45", "glm45"),
    "glm4.7-flash": ("glm45", "glm45"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "granite3.3": ("granite", "granite"),
    "granite4.0": ("hermes", None),
    "hermes2": ("hermes", None),
    "hermes3.tool_use": ("hermes", None),
    "kimi-k2": ("kimi_k2", None),
    "kimi-k2-thinking": ("kimi_k2", "kimi_k2"),
    "laguna": ("glm45", "qwen3"),
    "lfm2": ("lfm2", None),
    "lfm2.5": ("lfm2", "qwen3"),
    "llama3.1": ("llama3", None),
    "llama3.2": ("llama3", None),
    "llama4": ("llama3", None),
    "muse-glimmer": ("muse_glimmer", "muse_glimmer"),
    "ministral3": ("mistral", "mistral"),
    "mistral-nemo": ("mistral", None),
    "mistral3": ("mistral", None),
    "phi3.5": ("generic", None),
    "qwen2.5": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3-coder": ("qwen3_coder", None),
    "qwen3.5": ("qwen3_coder", "qwen3"),
    "seed-oss": ("seed_oss", "seed_oss"),
    "smollm3": ("generic", "qwen3"),
}
SHOW_NO_CALLS = ("deepseek-v3.1", "granite3.3", "kimi-k2-thinking", "lfm2")
"""Templates that don't write the calls of a message after the prompt before it, or that transformers refuses then."""
KWARGS = {"gemma4": {"enable_thinking": True}, "glm4.7-flash": {"enable_thinking": False}}
"""With these, the prompt ends where the template writes an answer without reasoning."""
FORCED = {"deepseek-v3.1-official": "deepseek_v31"}
"""Templates that show calls but no tools"""
WITH_TOOLS = [
    *FORCED,
    *(name for name, (tools, _) in FORMATS.items() if tools != "generic" and name not in SHOW_NO_CALLS),
]
ONE_CALL = ("gpt-oss", "llama3.1", "llama3.2")
"""Their templates accept only one call in a message."""
ENDS = (
    *("<|im_end|>\n", "<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>", "<end_of_turn>\n", "<|end_of_text|>\n"),
    *("<seed:eos>", "<｜end▁of▁sentence｜>", "<|tool_response>", "<|call|>", "</tool_call>"),
    *("<|tools_suffix|>", "</assistant>\n"),
)
ARGUMENTS = ['{"city": "Ürgüp </tool_call>", "days": [1, {"x": "}"}]}', "{}"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
ASKED = [{"role": "user", "content": "How is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("weather", "time")
]


def formats(name: str) -> ChatFormats:
    return ChatFormats.of(SOURCES[name], ChatSettings(tool_call_parser=FORCED.get(name, "auto")))  # type: ignore[arg-type]


def call(index: int) -> dict[str, Any]:
    function = {"name": TOOLS[index]["function"]["name"], "arguments": ARGUMENTS[index]}  # type: ignore[index]
    return {"id": f"call1234{index}", "type": "function", "function": function}


def written(name: str, message: dict[str, Any]) -> tuple[str, str]:
    """The prompt before an assistant's message, and the message as the template renders it."""
    kwargs = KWARGS.get(name, {})
    before = by_transformers(SOURCES[name], ASKED, tools=TOOLS, add_generation_prompt=True, kwargs=dict(kwargs))
    whole = by_transformers(SOURCES[name], [*ASKED, message], tools=TOOLS, kwargs=dict(kwargs))
    assert whole.startswith(before.rstrip())
    output = whole[len(before.rstrip()) :]
    for end in ENDS:
        if output.endswith(end):
            return before, output if end == "</tool_call>" else output.removesuffix(end)
    raise AssertionError(f"{name} ends a message in {output[-20:]!r}")


def test_each_format_is_detected_from_its_template() -> None:
    found = {name: ChatFormats.of(source, ChatSettings()) for name, source in SOURCES.items()}
    assert {
        name: (one.tools and one.tools.name, one.reasoning and one.reasoning.name) for name, one in found.items()
    } == FORMATS


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- for tool in tools or [] %}{% endfor %}", True),
        ("{% if 'tools' in message %}{{ message['tools'] }}{{ message.tools }}{% endif %} tools", False),
        ("{% set tools = item['tools'] %}{% for tool in tools %}{% endfor %}", False),
        ("{{ message.tool_calls }}", False),
    ],
)
def test_a_template_shows_tools_if_it_uses_the_variable(template: str, found: bool) -> None:
    assert shows_tools(template) == found
    detected = ChatFormats.of(f"{template}<|observation|>", ChatSettings()).tools
    assert detected is not None and detected.name == ("glm4" if found else "generic")


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("num_calls", [1, 2])
def test_rendered_calls_parse_back(name: str, num_calls: int) -> None:
    if num_calls > 1 and name in ONE_CALL:
        num_calls = 1
    calls = [call(index) for index in range(num_calls)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    before, output = written(name, message)
    for pieces in ([output], output):
        schemas = {"weather": json.dumps(SCHEMA), "time": ""}
        reply = read(formats(name).parser("auto", schemas, before), pieces)
        assert reply.content.strip() == ""
        assert [(tool, json.loads(text)) for tool, text in reply.calls] == [
            (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls
        ]
        assert reply.num_ended == num_calls


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_rendered_reasoning_parses_back(name: str) -> None:
    message = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.\n\nOh.", "tool_calls": [call(0)]}
    before, output = written(name, message)
    reply = read(formats(name).parser("auto", {"weather": json.dumps(SCHEMA)}, before), [output])
    assert reply == Reply("So.", "Hm.\n\nOh.", reply.calls, 1)
    assert [(tool, json.loads(text)) for tool, text in reply.calls] == [("weather", json.loads(ARGUMENTS[0]))]


@pytest.mark.parametrize(
    ("name", "kwargs", "stage"),
    [
        ("qwen3", {}, ReasoningStage.OPTIONAL),
        ("qwen3", {"enable_thinking": False}, ReasoningStage.OVER),
        ("qwen3.5", {}, ReasoningStage.OPEN),
        ("qwen3.5", {"enable_thinking": False}, ReasoningStage.OVER),
        ("deepseek-r1-distill", {}, ReasoningStage.OPEN),
        ("deepseek-v3.1", {}, ReasoningStage.OVER),
        ("deepseek-v3.1", {"thinking": True}, ReasoningStage.OPEN),
    ],
)
def test_the_end_of_a_prompt_determines_where_its_reply_begins(
    name: str, kwargs: dict[str, Any], stage: ReasoningStage
) -> None:
    prompt = by_transformers(SOURCES[name], ASKED, add_generation_prompt=True, kwargs=kwargs)
    reasoning = formats(name).reasoning
    assert reasoning is not None
    assert reasoning.stage_of(prompt) == stage


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ tools }}", True),
        ("{% if tools %}", True),
        ("{% set tools = 1 %}{{ tools }}", False),
        ("{{ 'tools' }}", False),
        ("tools", False),
        ("{% if x {{ tools }}", True),
        ("{{ x {% if tools %}", True),
        ("{{ tools", False),
        ("{%%}{{ tools }}", True),
        ("{{ x }} {% tools {{ y }}", False),
        ("{%" * 200_000, False),
        ("{{" * 200_000 + "{% if tools %}", True),
        ("{%{{" * 100_000, False),
    ],
)
def test_code_that_shows_tools(template: str, shown: bool) -> None:
    assert shows_tools(template) == shown
