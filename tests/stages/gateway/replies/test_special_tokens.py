"""A model that spells its special tokens with ordinary ones, in each dialect: from token ids to the client's reply."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.stages.gateway.admission.preemption import _start_again
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.text.special_spans import packed
from pipeline.text.vocabulary import Vocabulary
from tests.rig import raw
from tests.stages.detokenize.vocabularies import byte_ids, id_of
from tests.stages.gateway.apis.responses import bodies
from tests.stages.gateway.gate import CHAT, MODEL, Gate
from tests.stages.gateway.http.test_resumption import points_of, send, without_points
from tests.stages.gateway.replies import test_chat, test_messages
from tests.stages.replays import replays_alike

SPECIALS = ("<s>", "</s>", "<pad>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
SPELLED = f"a {' '.join(SPECIALS)} z"
FIND = {"name": "find", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FIND}]


def make_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


TOKENIZER = make_tokenizer()
BYTES = byte_ids(TOKENIZER)


def spelled(text: str) -> list[int]:
    return [BYTES[byte] for byte in text.encode()]


def special(text: str) -> list[int]:
    return [id_of(TOKENIZER, text)]


REPLY = [
    *(special("[THINK]") + spelled(SPELLED) + special("</s>") + special("[/THINK]")),
    *(spelled(f"\n{SPELLED}") + special("<pad>")),
    *(special("[TOOL_CALLS]") + spelled("find") + special("[ARGS]")),
    *(spelled('{"text": "') + spelled(SPELLED) + special("<s>") + spelled('"}')),
]
EXPECTED = (SPELLED, SPELLED, {"text": SPELLED})


class Played:
    """Plays the other stages: detokenize's part is real."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._seq = 0
        self._restart()

    def _restart(self) -> None:
        self._processor = OutputProcessor(Vocabulary.load(self._gate.folder / "tokenizer.json"))

    def open(self, submit: m.Submit, index: int = 0, outputs: Sequence[int] = ()) -> int:
        self._seq += 1
        ids = np.array(outputs, np.int32).tobytes()
        request = submit.request_id, submit.attempt, index
        self._processor.open(m.Open(self._seq, *request, 0, b"", raw(submit.options), outputs=ids), list(outputs))
        self.send()
        return self._seq

    def settle(self, seq: int, start: int, ids: Sequence[int], finish: m.Finish = m.Finish.NONE) -> None:
        self._processor.settle([seq], [start], [len(ids)], list(ids), [finish])
        self.send()

    def send(self) -> None:
        if self._processor.unsent():
            self._gate.rig.send(self._processor.deltas(0), "detokenize.0")
            self._processor.mark_sent(0)

    def answer(
        self, ids: Sequence[int], size: int = 1, *, num_known: int = 0, dies_at: Sequence[int] = (), index: int = 0
    ) -> m.Submit:
        """The stages' part of one request, `size` ids at once. detokenize is replaced after the ids `dies_at`; its
        successor believes that the gateway has three ids fewer than it has."""
        submit = self._gate.submit()
        self._gate.accept(submit, tail="")
        self.generate(submit, ids, size, num_known=num_known, dies_at=dies_at, index=index)
        return submit

    def generate(
        self,
        submit: m.Submit,
        ids: Sequence[int],
        size: int = 1,
        *,
        num_known: int = 0,
        dies_at: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        seq = self.open(submit, index, ids[:num_known])
        for start, end in pairwise([*range(num_known, len(ids), size), len(ids)]):
            begin = start
            if start in dies_at:
                self._restart()
                seq, begin = self.open(submit, index, ids[: start - 3]), start - 3
            self.settle(seq, begin, ids[begin:end], m.Finish.LENGTH if end == len(ids) else m.Finish.NONE)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    chat = ChatSettings(tool_call_parser="mistral", reasoning_parser="mistral")
    with Gate(folder, chat=chat) as gate:
        yield gate


# --------------------------------------------------------------------------------------------------------- dialects

Found = tuple[str, str, Any]
"""The reasoning, the content, and the arguments of the only call"""


def of_chat(text: str, *, streams: bool) -> Found:
    if streams:
        events = [json.loads(one.removeprefix("data: ")) for one in text.split("\n\n") if one and "[DONE]" not in one]
        reply = test_chat.joined([choice for event in events for choice in event["choices"]])
        ((_, arguments),) = reply["calls"]
        return reply["reasoning"], reply["content"], json.loads(arguments)
    message = json.loads(text)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    return message["reasoning"], message["content"], json.loads(call["function"]["arguments"])


def of_messages(text: str, *, streams: bool) -> Found:
    message = test_messages.joined(test_messages.events_in(text)) if streams else json.loads(text)
    thought, said, call = message["content"]
    return thought["thinking"], said["text"], call["input"]


def of_responses(text: str, *, streams: bool) -> Found:
    response = bodies.events_of(text)[-1]["response"] if streams else json.loads(text)
    thought, said, call = response["output"]
    return thought["content"][0]["text"], said["content"][0]["text"], json.loads(call["arguments"])


def of_ollama(text: str, *, streams: bool) -> Found:
    messages = [json.loads(line)["message"] for line in text.splitlines()]
    (call,) = [call for message in messages for call in message.get("tool_calls") or []]
    thought, said = ("".join(one.get(name) or "" for one in messages) for name in ("thinking", "content"))
    return thought, said, call["function"]["arguments"]


MESSAGES = {"tools": [{"name": "find", "input_schema": {"type": "object"}}], "max_tokens": 400}
DIALECTS: dict[str, tuple[dict[str, Any], Callable[..., Found]]] = {
    "/v1/chat/completions": (CHAT | {"tools": TOOLS}, of_chat),
    "/v1/messages": (CHAT | MESSAGES, of_messages),
    "/v1/responses": ({"model": MODEL, "input": "Hi", "tools": [{"type": "function", **FIND}]}, of_responses),
    "/api/chat": (CHAT | {"tools": TOOLS, "think": True}, of_ollama),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_what_is_spelled_comes_through_and_tokens_are_marks(gate: Gate, path: str) -> None:
    body, found = DIALECTS[path]
    for streams, size in ((False, 5), (True, 1), (True, 1000)):
        response = gate.post(body | {"stream": streams}, path)
        submit = Played(gate).answer(REPLY, size)
        assert submit.options.with_special_spans
        result = response.result()
        assert result.status_code == 200, result.text
        assert found(result.text, streams=streams) == EXPECTED


def test_every_choice_has_its_own(gate: Gate) -> None:
    for streams in (False, True):
        response = gate.post(CHAT | {"n": 2, "stream": streams, "return_token_ids": True})
        played, submit = Played(gate), gate.begin()
        replies = [special("[THINK]") + spelled("[/THINK]b"), spelled("[THINK]") + special("</s>") + spelled("</s>")]
        for index, ids in enumerate(replies):
            played.generate(submit, ids, index=index)
        parts: list[dict[str, str]] = [{"content": "", "reasoning": ""} for _ in replies]
        ids_of: list[list[int]] = [[], []]
        for data in re.findall(r"\{.*\}", response.result().text):
            for choice in json.loads(data)["choices"]:
                message = choice.get("message") or choice["delta"]
                ids_of[choice["index"]] += choice.get("token_ids") or []
                for name, text in parts[choice["index"]].items():
                    parts[choice["index"]][name] = text + (message.get(name) or "")
        assert parts == [
            {"content": "", "reasoning": "[/THINK]b"},
            {"content": "[THINK]</s>", "reasoning": ""},
        ]
        assert ids_of == replies


def test_special_tokens_are_shown_to_a_client_that_asks_for_them(gate: Gate) -> None:
    response = gate.post(CHAT | {"tools": TOOLS, "skip_special_tokens": False})
    Played(gate).answer(REPLY)
    expected = f"{SPELLED}</s>", f"{SPELLED}<pad>", {"text": f"{SPELLED}<s>"}
    assert of_chat(response.result().text, streams=False) == expected


@pytest.mark.parametrize("stop", ["K] z", "/THINK]\n", "[/THINK]\na"])
def test_stop_strings_end_the_text_where_they_did(gate: Gate, stop: str) -> None:
    """A mark whose end belongs to the stop string is gone with it."""
    thought = SPELLED[: SPELLED.index(stop)] if stop in SPELLED else SPELLED
    for streams in (False, True):
        response = gate.post(CHAT | {"stop": stop, "stream": streams})
        Played(gate).answer(REPLY)
        texts = re.findall(r'"(reasoning|content)":"((?:[^"\\]|\\.)*)"', response.result().text)
        assert "".join(text for name, text in texts if name == "reasoning") == thought
        assert not [text for name, text in texts if name == "content" and text]


def test_a_new_detokenize_repeats_what_the_gateway_has(gate: Gate) -> None:
    body, found = DIALECTS["/v1/chat/completions"]
    for index, token_id in enumerate(REPLY):
        if token_id in BYTES:
            continue
        for streams in (False, True):
            response = gate.post(body | {"stream": streams})
            Played(gate).answer(REPLY, dies_at=[one for one in (index, index + 1, index + 4) if one >= 3])
            assert found(response.result().text, streams=streams) == EXPECTED


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_continues_behind_each_of_its_points(gate: Gate, path: str) -> None:
    body, found = DIALECTS[path]
    body = body | {"stream": True}
    response = send(gate, path, body)
    submit, played = gate.submit(), Played(gate)
    gate.accept(submit, tail="")
    seq = played.open(submit)
    for start, end in pairwise([*range(0, len(REPLY), 7), len(REPLY)]):
        played.settle(seq, start, REPLY[start:end], m.Finish.LENGTH if end == len(REPLY) else m.Finish.NONE)
        gate.rig.load()  # it is written
    undisturbed = response.result().text
    ends = [match.end() for match in re.finditer(r"^: point .*\n\n", undisturbed, re.MULTILINE)]
    assert len(ends) > 8
    for end in ends[:-1]:
        received = undisturbed[:end]
        response = send(gate, path, body, points_of(received))
        submit = gate.submit()
        gate.accept(submit, tail="")
        assert submit.options.repeats_received
        Played(gate).generate(submit, REPLY, 7, num_known=len(bytes(submit.outputs[0])) // 4)  # type: ignore[arg-type]
        assert found(without_points(received + response.result().text), streams=True) == EXPECTED


def test_a_reply_that_is_generated_again_has_each_span_once() -> None:
    sequence = SequenceOutput()
    for _ in range(2):
        sequence.extend_special_spans(packed(1, 4, 7))
        sequence.extend_special_spans(packed(1, 4, 7) + packed(5, 4, 7))
        assert bytes(sequence.special_spans) == packed(1, 4, 7) + packed(5, 4, 7)
        _start_again(sequence, b"", is_resumed=False)
    assert sequence.take_special_spans() == b""


def test_a_replay_reads_the_same(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    chat = ChatSettings(tool_call_parser="mistral", reasoning_parser="mistral")
    with Gate(tmp_path, record=recording, chat=chat) as gate:
        for streams in (False, True):
            response = gate.post(CHAT | {"tools": TOOLS, "stream": streams})
            Played(gate).answer(REPLY, 9)
            assert of_chat(response.result().text, streams=streams) == EXPECTED
        gate.rig.until(lambda load: load.num_open_requests == 0)
    assert "clients" in replays_alike("gateway", recording).sent


def test_formats_whose_marks_are_ordinary_tokens_ask_for_no_spans(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as gate:
        response = gate.post(CHAT | {"tools": TOOLS})
        submit = Played(gate).answer(spelled(SPELLED) + special("</s>"))
        assert (submit.options.with_special_spans, submit.options.skip_special_tokens) == (False, True)
        assert msgspec.json.decode(response.result().content)["choices"][0]["message"]["content"] == SPELLED
