"""No API key's prompts wait for many of another key's, and short prompts don't wait for long ones."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import LimitSettings, Settings
from pipeline.runtime import messages as m
from pipeline.stages.ingest import stage as ingest_stage
from pipeline.stages.ingest.prompts.ids import EncodedPrompt
from pipeline.stages.ingest.prompts.prompt_cost import cost_bytes, num_bytes
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from tests.rig import PATIENCE_S, Rig
from tests.slices import part_of
from tests.stages.ingest import models as tiny
from tests.stages.replays import replays_alike

LONG = "x" * ingest_stage.LONG_BYTES
VERY_LONG = "x" * ingest_stage.VERY_LONG_BYTES
SHORT = "x" * (ingest_stage.LONG_BYTES - 2000)
FACTS = tiny.facts(max_model_len=1_000_000)


def send(rig: Rig, request_id: int, prompt: str | m.Prompt, scope_id: str, **options: Any) -> None:
    submit = tiny.submit(prompt, request_id=request_id, **options)
    rig.send(msgspec.structs.replace(submit, scope_id=scope_id), "gateway.0")


def admitted(rig: Rig, num: int) -> list[int]:
    return [rig.receive("schedule", m.Admit).request_id for _ in range(num)]


class Encoding:
    """Encodings of prompts of `min_chars` or more wait until they are let go on, one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, min_chars: int) -> None:
        self.running: list[int] = []
        self._may = threading.Semaphore(0)
        self._changed = threading.Condition()
        really = PromptProcessor.encode

        def encode(processor: PromptProcessor, prompt: m.TextPrompt, *others: Any, **options: Any) -> EncodedPrompt:
            if len(prompt.text) >= min_chars:
                with self._changed:
                    self.running.append(len(prompt.text))
                    self._changed.notify_all()
                assert self._may.acquire(timeout=PATIENCE_S)
            return really(processor, prompt, *others, **options)

        monkeypatch.setattr(PromptProcessor, "encode", encode)

    def until_running(self, num: int) -> None:
        """Until so many have begun since the start."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.running) >= num, PATIENCE_S)

    def go_on(self, num: int) -> None:
        for _ in range(num):
            self._may.release()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        yield rig


def test_a_key_s_short_prompts_do_not_queue_before_another_key_s(rig: Rig) -> None:
    """Each takes up to 10 ms, in the loop."""
    for number in range(40):
        send(rig, number, SHORT, "a")
    send(rig, 100, "hi", "b")
    send(rig, 101, SHORT, "b")
    send(rig, 102, "hi", "a")
    assert rig.load().num_open == 43
    rig.start(FACTS)  # until then, they wait
    order = admitted(rig, 43)
    assert order.index(100) <= 1 and order.index(101) <= 4 and order.index(102) <= 4
    assert [one for one in order if one < 40] == list(range(40)), "equal ones of a key keep their order"


@pytest.mark.parametrize("text", [LONG, VERY_LONG], ids=["long", "very long"])
def test_a_key_s_long_prompts_do_not_queue_before_another_key_s(
    rig: Rig, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Encoding(monkeypatch, ingest_stage.LONG_BYTES)
    rig.start(FACTS)
    for number in range(6):
        send(rig, number, text, "a")
    encoding.until_running(1)
    send(rig, 100, text + "b", "b")
    encoding.until_running(2)
    assert encoding.running[1] == len(text) + 1, "it begins beside the first of the other key"
    send(rig, 200, text + "cc", "c")
    send(rig, 101, "short", "b")
    assert admitted(rig, 1) == [101], "short ones wait for no thread"
    encoding.go_on(2)
    encoding.until_running(3)
    assert encoding.running[2] == len(text) + 2, "the key that waited goes before the key that had its turn"
    encoding.go_on(6)
    assert sorted(admitted(rig, 8)) == [*range(6), 100, 200]


def test_without_keys_a_long_prompt_does_not_wait_for_very_long_ones(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding(monkeypatch, ingest_stage.VERY_LONG_BYTES)
    rig.start(FACTS)
    for number in range(3):
        send(rig, number, VERY_LONG, "")
    encoding.until_running(1)
    send(rig, 100, LONG, "")
    assert admitted(rig, 1) == [100]
    encoding.go_on(1)
    encoding.until_running(2)
    assert len(encoding.running) == 2, "one at a time: the others' cores are the executor's"
    encoding.go_on(2)
    assert admitted(rig, 3) == [0, 1, 2]


def test_cancelled_prompts_leave_the_queue_and_their_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding(monkeypatch, ingest_stage.LONG_BYTES)
    rig.start(FACTS)
    for number in range(3):
        send(rig, number, LONG, "a")
    encoding.until_running(1)
    for number in range(2):  # one that runs and one that waits
        rig.send(m.Abort(number, 0), "gateway.0")
        assert rig.receive("gateway", m.Rejected).request_id == number
    encoding.go_on(1)
    encoding.until_running(2)
    encoding.go_on(1)
    assert admitted(rig, 1) == [2]
    assert len(encoding.running) == 2


def test_prompts_with_a_grammar_wait_their_turn_like_others(rig: Rig) -> None:
    """The outcomes of their checks are cached, so all of them may go on at once."""
    rig.start(FACTS)
    grammar = m.Grammar("json_object")
    send(rig, 0, "first", "a", grammar=grammar)
    assert admitted(rig, 1) == [0]
    turns: list[int] = []
    arrived: list[int] = []
    """The turns before each time that the other key's request begins to wait: for its check, and behind it."""
    with pytest.MonkeyPatch.context() as patch:
        really, wait = ingest_stage.IngestStage._begin, ingest_stage.IngestStage._wait

        def begin(stage: Any, key: tuple[int, int], submit: m.Submit) -> None:
            turns.append(key[0])
            if key[0] == 1 and submit.options.grammar is not None:  # now more messages arrive
                for number in range(2, 20):
                    send(rig, number, SHORT, "a", grammar=grammar)
                send(rig, 100, "hi", "b", grammar=grammar)
            really(stage, key, submit)

        def begin_to_wait(stage: Any, key: tuple[int, int], submit: m.Submit) -> None:
            if key[0] == 100:
                arrived.append(len(turns))
            wait(stage, key, submit)

        patch.setattr(ingest_stage.IngestStage, "_begin", begin)
        patch.setattr(ingest_stage.IngestStage, "_wait", begin_to_wait)
        send(rig, 1, SHORT, "a", grammar=grammar)
        order = admitted(rig, 20)
    indices = [index for index, number in enumerate(turns) if number == 100]
    assert len(arrived) == 2 and all(index - when <= 2 for when, index in zip(arrived, indices, strict=True)), turns
    assert [one for one in order if one < 100] == list(range(1, 20))


def test_too_many_ids_are_refused_before_they_become_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would make a list of them, and of their offsets, while nothing else runs."""
    processor = tiny.prompts(tiny.byte_tokenizer(), tiny.facts(max_model_len=1000))
    monkeypatch.setattr("pipeline.stages.ingest.prompts.prompt_processor.as_int32", pytest.fail)
    monkeypatch.setattr("pipeline.stages.ingest.prompts.prompt_checks.MAX_SHOWN_IDS", 2000)
    for num, options, code in (
        (1001, m.PromptOptions(), "context_length_exceeded"),
        (2001, m.PromptOptions(any_length=True), "too_many_tokens"),
    ):
        with pytest.raises(RequestRejected) as refused:
            processor.encode(m.TextPrompt("x" * num), options)
        assert refused.value.failure.code == code and str(num) in refused.value.failure.message


@pytest.mark.parametrize("has_suspects", [False, True])
def test_fair_turns_are_replayed(tmp_path: Path, has_suspects: bool) -> None:
    """Two keys and everything that waits: short, long and very long prompts, slow templates, grammars, aborts, and
    suspects."""
    recording = tmp_path / "ingest.rec"
    (folder := tmp_path / "model").mkdir()
    settings = Settings(limits=LimitSettings(template_timeout_s=1.0))
    slow = "{% for i in range(3000) %}{% for j in range(30) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    rig = Rig("ingest", settings, tiny.folder(folder, slow), record=recording)
    if has_suspects:
        even = range(0, 2 * 3 * 4 * 5, 2)
        rig.suspect(*(one for one in even if one % 14 in (0, 4, 10)), *(one + 1 for one in even if one % 16 == 6))
    with rig:
        number = 0
        for wave in range(part_of(3, 2)):  # before the start and after it
            for scope in ("a", "a", "b", ""):
                schema = m.Grammar("json_schema", json.dumps({"const": f"{wave} {scope}"}))
                for prompt in ("hi", SHORT, LONG, VERY_LONG, tiny.chat("slow")):
                    grammar = m.Grammar("json_object") if number % 3 else schema
                    send(rig, number, prompt, scope)
                    send(rig, number + 1, prompt, scope, grammar=grammar)
                    if number % 7 == 0:
                        rig.send(m.Abort(number, 0), "gateway.0")
                    number += 2
            if wave == 0:
                rig.start(FACTS)
        for _ in range(number):
            rig.receive("gateway")
    comparison = replays_alike("ingest", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}


def texts_of(struct: type) -> list[str]:
    """The fields of a struct that a text, or several, can fill."""
    return [field.name for field in msgspec.structs.fields(struct) if "str" in str(field.type)]


@pytest.mark.parametrize("field", texts_of(m.ChatMessage))
def test_each_text_of_a_message_counts_in_what_the_prompt_costs(field: str) -> None:
    """Else a text in `name` is searched and tokenized as if it were short: while the others wait, in their turns."""
    plain = m.ChatMessage("user", "a")
    call = m.ToolCall("a", "a", "a")
    longer: dict[str, Any] = {"parts": ["a"] * 1000}
    longer["tool_calls"] = [msgspec.structs.replace(call, **{name: "a" * 1000}) for name in texts_of(m.ToolCall)]
    values = longer.get(field, "a" * 1000)
    full = msgspec.structs.replace(plain, **{field: values})
    costs = [num_bytes(m.ChatPrompt([message])) for message in (plain, full)]
    assert costs[1] - costs[0] > 990 * (len(values) if field == "tool_calls" else 1)


@pytest.mark.parametrize("char", ["\ufdfa", "\U00010000", "\ud800"])
def test_characters_that_become_several_tokens_count_more(char: str) -> None:
    """Else 19,999 of them are encoded while the others wait: in 50 to 170 ms instead of 10, depending on the model."""
    in_text, in_chat = (num_bytes(prompt) for prompt in (m.TextPrompt(char * 1000), tiny.chat(char * 1000)))
    assert in_chat >= in_text >= 3000
    for options in ({"bad_words": [char * 1000]}, {"prediction": char * 1000}):
        assert cost_bytes(tiny.submit("a", **options)) >= 3000


def test_allowed_ids_count_in_what_a_prompt_costs() -> None:
    """A request may have thousands of prompts, and as many ids as the vocabulary with each."""
    plain = tiny.submit("a")
    options = msgspec.structs.replace(plain.options, allowed_ids=bytes(4 * 150_000))
    costs = [cost_bytes(one) for one in (plain, msgspec.structs.replace(plain, options=options))]
    assert costs[1] - costs[0] > 2000
