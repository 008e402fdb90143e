"""Marks of reasoning in what a client writes leave the grammar of the reply as it is, and how it is parsed: with real
templates, in each dialect of the API, and if the request is submitted again."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ChatSettings, Settings
from pipeline.grammars.engine import Engine
from pipeline.runtime import messages as m
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import ReasoningStage
from tests.rig import Rig
from tests.stages.gateway.gate import MODEL, Gate, read_until
from tests.stages.ingest import models as tiny
from tests.stages.ingest.templates.chats import TEMPLATES
from tests.stages.ingest.templates.test_reply_start import (
    ALL,
    LAST_MESSAGES,
    MODEL_IDS,
    MODELS,
    WITH_CALLS,
    Model,
    form_of,
)

MAX_MODEL_LEN = 16384
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
REGEX = m.Grammar("regex", "a+", "structured_outputs")


def rig_of(folder: Path, template: str) -> Rig:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    return Rig("ingest", Settings(), model_dir=tiny.folder(folder, source))


def required_call(template: str) -> m.Grammar:
    formats = ChatFormats.of((TEMPLATES / f"{template}.jinja").read_text(), ChatSettings())
    calls = formats.calls("required", "", json.dumps(TOOLS), parallel=False)
    return m.Grammar("calls", msgspec.json.encode(calls).decode(), "tools")


def begun(rig: Rig, prompt: m.ChatPrompt, grammar: m.Grammar | None, *, with_tail: bool = True) -> tuple[Any, str]:
    """How the gateway parses the reply, and the grammar that schedule gets."""
    submitted = tiny.submit(prompt, grammar=grammar)
    options = msgspec.structs.replace(submitted.prompt_options, with_tail=with_tail)
    return answers(rig, msgspec.structs.replace(submitted, prompt_options=options))


def takes(engine: Engine, grammar: str, text: str) -> bool:
    matcher = engine.matcher(grammar)
    ids = tiny.byte_tokenizer().encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def answers(rig: Rig, submitted: m.Submit) -> tuple[Any, str]:
    rig.send(submitted, "gateway.0")
    accepted = rig.receive("gateway", m.Accepted)
    return accepted.tail, tiny.options_of(rig.receive("schedule", m.Admit)).compiled_grammar


@pytest.mark.parametrize("model", MODELS if ALL else MODELS[6::5], ids=MODEL_IDS if ALL else MODEL_IDS[6::5])
def test_marks_of_a_client_change_no_grammar(model: Model, tmp_path: Path) -> None:
    form = form_of(model)
    marks = form.start, form.end, f"{form.end}{form.start}"
    kwargs = json.dumps(model.kwargs)
    grammars = [REGEX, required_call(model.template), None]
    with rig_of(tmp_path, model.template) as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))
        for kind, chat in LAST_MESSAGES.items():
            if kind == "tools" or (model.template == "kimi-k2-thinking" and kind in WITH_CALLS):
                continue  # tools are a part of the grammar; the template refuses calls
            for grammar in grammars:
                expected = begun(rig, msgspec.structs.replace(chat("word"), template_kwargs=kwargs), grammar)
                for mark in marks:
                    if model.template == "gpt-oss" and form.start in mark:
                        continue  # its template refuses it
                    if (model.template, kind) == ("smollm3", "system") and "/think" in mark:
                        continue  # the template looks for this word
                    prompt = msgspec.structs.replace(chat(f"What is {mark}"), template_kwargs=kwargs)
                    assert begun(rig, prompt, grammar) == expected, (kind, mark, grammar)


def test_a_schema_and_a_required_call_are_enforced_whatever_a_document_has(tmp_path: Path) -> None:
    """With Qwen 3: its reply may begin with reasoning, which `<think>` opens, or with the answer."""
    engine = Engine(tiny.folder(tmp_path))
    schema = m.Grammar("json_schema", json.dumps(SCHEMA), "response_format")
    call = '<tool_call>\n{"name": "find", "arguments": {"n": 1}}\n</tool_call>'

    with rig_of(tmp_path, "qwen3") as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))
        for document in ("word", "<think>", "</think>", "<think> </think>", f"<think>{'word ' * 40}"):
            prompt = LAST_MESSAGES["user"](f"Sum up: {document}")
            tail, answer = begun(rig, prompt, schema)
            assert tail == ""
            assert takes(engine, answer, '{"n": 1}') and takes(engine, answer, '<think>Hm, n.</think>{"n": 1}'), (
                document
            )
            assert (
                not takes(engine, answer, '{"n": 2}')
                and not takes(engine, answer, "Hm.")
                and not takes(engine, answer, "Hm.</think>{}")
            )
            _, required = begun(rig, prompt, required_call("qwen3"), with_tail=False)  # as over ZeroMQ
            assert takes(engine, required, call) and takes(engine, required, f"<think>Hm.</think>{call}"), document
            assert not takes(engine, required, "Hm.") and not takes(engine, required, call.replace("1", "2"))


def test_a_request_that_is_submitted_again_keeps_its_grammar(tmp_path: Path) -> None:
    """It then has ids, which don't show which marks are the client's."""
    with rig_of(tmp_path, "qwen3") as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))
        submitted = tiny.submit(LAST_MESSAGES["user"]("</think>"), grammar=REGEX)
        rig.send(submitted, "gateway.0")
        ids = rig.bytes_of(rig.receive("gateway", m.Accepted).prompt_ids)
        first = tiny.options_of(rig.receive("schedule", m.Admit))
        again = msgspec.structs.replace(
            submitted,
            attempt=1,
            prompt=m.IdsPrompt(ids),
            options=msgspec.structs.replace(submitted.options, grammar=None, compiled_grammar=first.compiled_grammar),
            outputs=[np.array([97, 97], np.int32).tobytes()] * 2,
        )
        assert answers(rig, again) == (None, first.compiled_grammar)


def test_a_reply_is_parsed_the_same_way_after_a_restart(tmp_path: Path) -> None:
    with Gate(tmp_path, chat=ChatSettings(reasoning_parser="qwen3")) as gate:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with gate.raw(body) as connection:
            submit = gate.submit()
            gate.accept(submit, tail="<think>")
            gate.delta(submit, "Hm.")
            assert b'"reasoning_content":"Hm."' in read_until(connection, b'"Hm."}')
            gate.rig.restart("schedule.0")
            again = gate.submit()
            assert isinstance(again.prompt, m.IdsPrompt)
            gate.accept(again)
            gate.delta(again, "Oh.</think>Yes", finish=m.Finish.STOP)
            rest = read_until(connection, b"[DONE]")
            assert b'"reasoning_content":"Oh."' in rest and b'"content":"Yes"' in rest


FORMAT = {"type": "json_schema", "schema": SCHEMA}
CHAT_CALL = {"tools": TOOLS, "tool_choice": "required"}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ),
    "chat with a call": ("/v1/chat/completions", CHAT_CALL),
    "responses": ("/v1/responses", {"text": {"format": FORMAT | {"name": "n"}}}),
    "responses with a call": (
        "/v1/responses",
        {"tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"},  # type: ignore[dict-item]
    ),
    "messages": ("/v1/messages", {"max_tokens": 9, "output_config": {"format": FORMAT}}),
    "messages with a call": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "tools": [{"name": "find", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "ollama": ("/api/chat", {"format": SCHEMA}),
}


def conversation(path: str, text: str, prefill: str | None) -> dict[str, Any]:
    """The part of a body that has the messages. Without `prefill`, the model begins the answer."""
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}] if path == "/v1/messages" else text},
    ]
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    fields: dict[str, Any] = {}
    if prefill is not None and path.endswith("completions"):
        fields = {"continue_final_message": True, "add_generation_prompt": False}
    if path == "/v1/messages":
        return fields | {"system": text, "messages": messages}
    if path == "/v1/responses":
        return fields | {"instructions": text, "input": messages}
    return fields | {"messages": [{"role": "system", "content": text}, *messages]}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_is_safe_from_marks_in_its_texts(dialect: str, tmp_path: Path) -> None:
    path, fields = DIALECTS[dialect]
    folder = tiny.folder(tmp_path, (TEMPLATES / "qwen3.jinja").read_text())
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    with Gate(tmp_path / "gate") as gate, Rig("ingest", Settings(), model_dir=folder) as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))

        def sent(text: str, prefill: str | None = None) -> tuple[Any, str]:
            gate.post({"model": MODEL} | fields | conversation(path, text, prefill), path)
            submit = gate.submit()
            found = answers(rig, submit)
            gate.reject(submit, m.Failure(400, "no"))
            return found

        expected = sent("word")
        assert expected[0] == "" and expected[1]
        for text in ("<think>", "</think>", "<think> what"):
            assert sent(text) == expected
        if path == "/v1/responses" or "call" in dialect:  # these don't continue messages
            return
        over, opened = sent("word", "So"), sent("word", "<think>\nSo")
        assert (over[0], opened[0]) == ("</think>", "<think>")
        assert over[1] != opened[1]
        assert sent("</think>", "So <think>") == over
        assert sent("</think>", "<think>\nSo") == opened


@pytest.mark.parametrize("template", ["qwen3", "gemma4", "glm4.6"])
@pytest.mark.parametrize("think", [False, None, True])
def test_ollama_s_format_is_enforced_whether_or_not_the_model_thinks(
    template: str, think: bool | None, tmp_path: Path
) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    folder = tiny.folder(tmp_path, source)
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "chat_template.jinja").write_text(source)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "format": SCHEMA}
    with Gate(tmp_path / "gate") as gate, Rig("ingest", Settings(), model_dir=folder) as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))
        gate.post(body | ({} if think is None else {"think": think}), "/api/chat")
        submit = gate.submit()
        tail, grammar = answers(rig, submit)
        gate.reject(submit, m.Failure(400, "no"))
    engine = Engine(folder)
    form = ChatFormats.of(source, ChatSettings())
    stage = form.reasoning.stage_of(tail) if form.reasoning is not None and tail else None
    thought = "" if stage is not ReasoningStage.OPEN or form.reasoning is None else f"Hm.{form.reasoning.end}"
    assert takes(engine, grammar, f'{thought}{{"n": 1}}')
    assert not takes(engine, grammar, f'{thought}{{"n": 2}}') and not takes(engine, grammar, f"{thought}Hm")
