"""Grammars of required calls in formats of model families: every output that one allows parses to valid calls."""

import json
from typing import Any

import jsonschema
import pytest

from tests.text.formats.calls import MUSE_NEXT, muse
from tests.text.formats.replies import REASONING, TOOLS, Reply, read
from tests.text.formats.test_grammars import FULL, PLAIN, Vocabulary, formats, walk

FIND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"enum": ["here", "over there"]},
        "text": {"type": "string", "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-c]+$"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "at": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}},
        "either": {"type": ["boolean", "null"]},
    },
    "required": ["text", "n", "at"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "required": ["x"]}},
}
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}},
    "required": ["b"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "list": {
            "type": "array",
            "items": {"type": "object", "properties": {"s": {"type": "string", "maxLength": 2}}, "required": ["s"]},
        }
    },
    "required": ["list"],
}
ODD: dict[str, Any] = {
    "type": "object",
    "anyOf": [
        {"properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False},
        {"properties": {"y": {"const": "<y>"}}, "required": ["y"], "additionalProperties": False},
    ],
}
"""More than a list of properties"""
SCHEMAS = {"find": FIND, "some": OPTIONAL, "nested": NESTED, "odd": ODD, "now": {"type": "object", "properties": {}}}
TOOLS_JSON = json.dumps(
    [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
        if name != "now"
    ]
    + [{"type": "function", "function": {"name": "now"}}]
)
TYPED = {name: json.dumps(schema) for name, schema in SCHEMAS.items()}
GLM47 = "<arg_key>{arg-key-1}</arg_key><arg_value>"
WAYS = [
    *((name, "") for name in sorted(set(TOOLS) - {"hermes", "generic", "llama3", "mistral"})),
    ("glm45", GLM47),
    ("phi4_mini_json", "<|tool_call|>"),
]


def check(reply: Reply, num: int | None = None) -> None:
    """Fail unless its calls are complete and match the tools."""
    assert len(reply.calls) == reply.num_ended >= 1
    assert num in (None, len(reply.calls))
    for name, arguments in reply.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("vocabulary", [FULL, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(("tools", "template"), WAYS)
def test_required_calls_match_the_tools(tools: str, template: str, vocabulary: Vocabulary) -> None:
    form = formats(tools, template=template, added=vocabulary.added)
    grammar = form.calls("required", "", TOOLS_JSON, parallel=True).lark()
    names = set()
    for seed in range(20):
        text = walk(grammar, seed, 300, vocabulary)
        reply = read(form.parser("required", TYPED), [text])
        if reply.num_ended < len(reply.calls):
            continue  # cut
        check(reply)
        assert (reply.content, reply.reasoning) == ("", "")
        names.update(name for name, _ in reply.calls)
        assert len(reply.calls) == 1 or tools != "openai"
    assert len(names) >= 4


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize(("tools", "template"), WAYS)
def test_a_named_choice_forces_one_call_of_that_function(tools: str, template: str, name: str) -> None:
    form = formats(tools, template=template)
    grammar = form.calls("named", name, TOOLS_JSON, parallel=True).lark()
    for seed in range(4):
        reply = read(form.parser("named", TYPED), walk(grammar, seed, 400))
        if reply.num_ended == len(reply.calls):
            check(reply, 1)
            assert reply.calls[0][0] == name


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("glm45", "<tool_call>some\n<arg_key>b</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=some>\n<parameter=b>\ntrue\n</parameter>\n</function>\n</tool_call>"),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=some>\n<parameter=b>true</parameter>\n</function>\n</seed:tool_call>",
        ),
        ("gemma4", "<|tool_call>call:some{b:true,c:false}<tool_call|>"),
        ("muse_glimmer", muse("some", b="true")),
        ("muse_glimmer", f"{muse('some', b='true')}{MUSE_NEXT}{muse('now')}"),
        ("functiongemma", "<start_function_call>call:some{b:true}<end_function_call>"),
        ("pythonic", "[some(a=true, b=false)]"),
        ("glm4", '\nsome\n{"b": true}'),
        ("openai", '<|channel|>commentary to=functions.some <|constrain|>json<|message|>{"b": true}'),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.some:0<|tool_call_argument_begin|>"
            '{"b": true}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        (
            "deepseek_v31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>some<｜tool▁sep｜>{"b": true}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
        ),
        ("granite", '<|tool_call|>[{"name": "some", "arguments": {"b": true}}]'),
    ],
)
def test_a_call_as_the_model_writes_it_is_allowed(tools: str, text: str) -> None:
    grammar = formats(tools).calls("required", "", TOOLS_JSON, parallel=True).lark()
    assert FULL.takes(grammar, text)
    assert not FULL.takes(grammar, text.replace("true", "1"))
    assert not FULL.takes(grammar, text.replace("some", "none"))


def test_texts_without_quotes_obey_their_schemas() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "t": {"type": "string", "minLength": 1, "maxLength": 3},
            "p": {"type": "string", "pattern": "b+/"},
            "e": {"enum": ["x y", ""]},
        },
        "required": ["t", "p", "e"],
    }
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}])

    def text(t: str, p: str, e: str) -> str:
        each = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in (("t", t), ("p", p), ("e", e)))
        return f"<tool_call>f\n{''.join(each)}</tool_call>"

    for vocabulary in (FULL, PLAIN):
        grammar = formats("glm45", added=vocabulary.added).calls("named", "f", tools, parallel=False).lark()
        assert vocabulary.takes(grammar, text("é\n", "abb/c", "x y"))
        assert vocabulary.takes(grammar, text("a", "b/", ""))
        for wrong in (text("", "b/", ""), text("four", "b/", ""), text("a", "c/", ""), text("a", "b/", "z")):
            assert not vocabulary.takes(grammar, wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/text", "maxLength": 2},
        {"$ref": "#/$defs/text", "pattern": "^[a-c]{2}$"},
        {"$ref": "#/$defs/text", "enum": ["ab"]},
        {"$ref": "#/$defs/chain"},
        {"$ref": "#/$defs/chain", "description": "It is one of two."},
        {"$ref": "#/$defs/short"},
        {"type": "integer", "required": True, "maximum": 9},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("tools", ["glm45", "qwen3_coder", "seed_oss", "muse_glimmer", "gemma4", "functiongemma"])
def test_all_that_references_lead_to_is_enforced(tools: str, schema: dict[str, Any]) -> None:
    """Also what is beside a reference, and behind several."""
    definitions = {
        "text": {"type": "string"},
        "few": {"type": "string", "enum": ["ab", "c"]},
        "chain": {"$ref": "#/$defs/few"},
        "short": {"$ref": "#/$defs/text", "maxLength": 2},
    }
    parameters = {"type": "object", "properties": {"t": schema}, "required": ["t"], "additionalProperties": False}
    parameters |= {"$defs": definitions}
    if "required" in schema:  # as draft 3 has it
        del parameters["required"]
    sent = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    form = formats(tools, added=FULL.added)
    grammar = form.calls("required", "", sent, parallel=False).lark()
    num = 0
    for seed in range(8):
        reply = read(form.parser("required", {"f": json.dumps(parameters)}), [walk(grammar, seed, 200, FULL)])
        if reply.num_ended == len(reply.calls):
            num += 1
            arguments = json.loads(reply.calls[0][1])
            assert list(arguments) == ["t"]
            checked = schema | {"$defs": definitions}
            jsonschema.validate(arguments["t"], {key: value for key, value in checked.items() if key != "required"})
    assert num


# ------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("tools", "reasoning", "tail", "thought"),
    [
        ("openai", "openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"),
        ("openai", "openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", "Hm.<|end|><|start|>assistant"),
        ("muse_glimmer", "muse_glimmer", "<|start|>assistant", f" to=self<|message|>Hm.{MUSE_NEXT}"),
        ("muse_glimmer", "muse_glimmer", "<|start|>assistant to=self<|message|>", f"Hm.{MUSE_NEXT}"),
        ("gemma4", "gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>"),
        ("glm45", "glm45", "<|assistant|>", "<think>Hm.</think>\n"),
        ("granite", "granite", "<|end_of_role|>", "Here is my thought process: Hm. Here is my response:\n"),
    ],
)
def test_calls_and_answers_are_enforced_after_the_reasoning(
    tools: str, reasoning: str, tail: str, thought: str
) -> None:
    form = formats(tools, reasoning)
    grammar = form.after_reasoning(form.calls("named", "now", TOOLS_JSON, parallel=False).lark(), tail)
    call = walk(form.calls("named", "now", TOOLS_JSON, parallel=False).lark(), 1)
    assert FULL.takes(grammar, thought + call)
    assert not FULL.takes(grammar, thought + "now")
    answer = form.after_reasoning(form.as_answer("start: /[ab]{2}/"), tail)
    head = {"openai": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}.get(tools, "")
    assert FULL.takes(answer, f"{thought}{head}ab")
    assert not FULL.takes(answer, f"{thought}{head}abc")
    assert read(form.parser("auto", TYPED, tail), f"{thought}{head}ab").content.strip() == "ab"
    if REASONING[reasoning].default_stage.name == "OPTIONAL" and not tail.endswith("<|message|>"):
        assert FULL.takes(answer, f"{head}ab")


# ---------------------------------------------------------------------------------------------------------- strict

STRICT = json.dumps(
    [
        {"type": "function", "function": {"name": "some", "strict": True, "parameters": OPTIONAL}},
        {"type": "function", "function": {"name": "free", "parameters": OPTIONAL}},
    ]
)


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "some", "arguments": {"b": true}}\n</tool_call>'),
        ("glm45", "<tool_call>some\n<arg_key>b</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"),
        ("gemma4", "<|tool_call>call:some{b:true}<tool_call|>"),
        ("granite", '<|tool_call|>[{"name": "some", "arguments": {"b": true}}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "some", "arguments": {"b": true}}]'),
    ],
)
def test_calls_of_strict_functions_match_their_schemas_if_the_model_makes_any(tools: str, call: str) -> None:
    written = formats(tools).strict_calls(STRICT, parallel=True)
    assert written is not None
    grammar = written.lark()
    for text in ("", "Plain {text}.\n", call, f"I look.\n{call}"):
        assert FULL.takes(grammar, text)
    wrong = call.replace("true", "1")
    assert not FULL.takes(grammar, wrong)
    assert not FULL.takes(grammar, f"I look. {wrong}")
    if tools != "glm45" and tools != "gemma4":
        assert FULL.takes(grammar, wrong.replace("some", "free"))
    assert formats(tools).strict_calls(TOOLS_JSON, parallel=True) is None
    if tools != "hermes":
        assert formats(tools, added={}).strict_calls(STRICT, parallel=True) is None


@pytest.mark.parametrize("vocabulary", [FULL, PLAIN], ids=["tokens", "texts"])
@pytest.mark.parametrize(
    ("tools", "call", "only_first"),
    [
        ("hermes", '<tool_call>\n{"name": "some", "arguments": {"b": true}}\n</tool_call>', False),
        ("generic", '<tool_call>\n{"name": "some", "arguments": {"b": true}}\n</tool_call>', False),
        ("generic", '{"name": "some", "arguments": {"b": true}}', True),
        ("llama3", '{"name": "some", "parameters": {"b": true}}', True),
        ("phi4_mini_json", 'functools[{"name": "some", "arguments": {"b": true}}]', False),
        ("pythonic", "[some(b=true)]", True),
        ("glm4", 'some\n{"b": true}', True),
    ],
)
def test_strict_calls_without_a_token_before_them(
    tools: str, call: str, only_first: bool, vocabulary: Vocabulary
) -> None:
    """`only_first`: these calls begin a reply."""
    form = formats(tools, template="functools[" if tools == "phi4_mini_json" else "", added=vocabulary.added)
    written = form.strict_calls(STRICT, parallel=True)
    assert written is not None
    grammar = written.lark()
    before = () if only_first else ("I look.\n",)
    for text in ("", "Plain {text} [here].\n", "some text", call, *(one + call for one in before)):
        assert vocabulary.takes(grammar, text), text
        found = read(form.parser("auto", TYPED), text)
        assert len(found.calls) == text.endswith(call)
    wrong = call.replace("true", "1")
    for text in (wrong, *(one + wrong for one in before)):
        assert not vocabulary.takes(grammar, text), text
    assert form.strict_calls(TOOLS_JSON, parallel=True) is None


def test_strict_calls_of_gpt_oss_follow_any_number_of_messages() -> None:
    written = formats("openai", "openai_gptoss").strict_calls(STRICT, parallel=True)
    assert written is not None
    grammar = formats("openai", "openai_gptoss").after_reasoning(written.lark(), "<|start|>assistant")
    call = '<|channel|>commentary to=functions.some <|constrain|>json<|message|>{"b": true}'
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for before in ("", thought, thought + said, said + thought):
        assert FULL.takes(grammar, before + call)
        assert FULL.takes(grammar, f"{before}<|channel|>final<|message|>Yes.")
        assert not FULL.takes(grammar, before + call.replace("true", "1"))


def test_strict_calls_of_muse_glimmer_follow_any_number_of_messages() -> None:
    form = formats("muse_glimmer", "muse_glimmer")
    written = form.strict_calls(STRICT, parallel=True)
    assert written is not None
    grammar = form.after_reasoning(written.lark(), "<|start|>assistant")
    call = muse("some", b="true")
    said, thought = f" to=user<|message|>I look.{MUSE_NEXT}", f" to=self<|message|>Hm.{MUSE_NEXT}"
    for before in ("", thought, thought + said, said + thought):
        for calls in (call, call + MUSE_NEXT + call):
            assert FULL.takes(grammar, before + calls)
            assert len(read(form.parser("auto", TYPED, "<|start|>assistant"), before + calls).calls) == calls.count(
                "=some"
            )
        assert FULL.takes(grammar, f"{before} to=user<|message|>Yes.")
        assert not FULL.takes(grammar, before + call.replace("true", "1"))
