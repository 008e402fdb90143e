"""What the stage drops when a neighbour's process is replaced, and requests that are submitted again."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.process import black_box
from pipeline.runtime.transport.outbox import Outbox
from pipeline.stages.ingest import stage as ingest_stage
from pipeline.stages.ingest.grammar_checker import GrammarChecker
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from tests.rig import Rig
from tests.stages.ingest import models as tiny
from tests.stages.ingest import test_reply_grammar as grammars
from tests.stages.ingest.test_fairness import LONG, Encoding
from tests.stages.ingest.test_stage import LONG_TEXT, release

chat_rig = grammars.rig


def rig_of(folder: Path) -> Rig:
    return Rig("ingest", Settings(gateway=GatewaySettings(replicas=2)), folder)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rig_of(tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts(max_model_len=100_000))
        yield rig


def submit_of(gateway: int, request_id: int, text: str = "hi") -> m.Submit:
    return msgspec.structs.replace(tiny.submit(text, request_id=request_id), gateway=gateway)


def test_a_suspect_is_prepared_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the long prompt that is in a thread, and all others wait for it, whose prompt is long too."""
    encoding = Encoding(monkeypatch, len(LONG))
    rig.suspect(2, 4)
    suspects = [submit_of(0, number, LONG) for number in (2, 4)]
    rig.send(submit_of(0, 1, LONG), "gateway.0")
    encoding.until_running(1)
    for one in (suspects[0], submit_of(0, 3), suspects[1], submit_of(0, 5)):
        rig.send(one, "gateway.0")
    rig.until(lambda load: load.num_open == 5)
    encoding.go_on(1)
    assert rig.receive("schedule", m.Admit).request_id == 1
    for num_running, suspect in enumerate(suspects, 2):
        encoding.until_running(num_running)
        rig.load()
        encoding.go_on(1)
        assert rig.receive("schedule", m.Admit).request_id == suspect.request_id
    assert [rig.receive("schedule", m.Admit).request_id for _ in range(2)] == [3, 5]


def test_no_one_waits_for_prompts_that_wait_themselves_before_a_suspect(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a thread, or for the check of a grammar, in their hundreds: only what is in work is waited for."""
    encoding = Encoding(monkeypatch, len(LONG))
    for number in range(1, 7):
        rig.send(submit_of(0, number, LONG), "gateway.0")
    encoding.until_running(1)
    checking = asyncio.Event()

    async def check(*_: object) -> str:
        await checking.wait()
        return "a"

    monkeypatch.setattr(GrammarChecker, "check", check)
    with_grammar = submit_of(0, 7)
    options = msgspec.structs.replace(with_grammar.options, grammar=m.Grammar("regex", "a+", "guided_regex"))
    rig.send(msgspec.structs.replace(with_grammar, options=options), "gateway.0")
    rig.until(lambda load: load.num_open == 7)
    rig.suspect(8)
    suspect = submit_of(0, 8, LONG + "x")
    for one in (suspect, submit_of(0, 9)):
        rig.send(one, "gateway.0")
    rig.until(lambda load: load.num_open == 9)
    encoding.go_on(1)
    assert rig.receive("schedule", m.Admit).request_id == 1
    encoding.until_running(2)
    assert encoding.running[1] == len(LONG) + 1, "the suspect is next"
    rig.load()
    assert len(encoding.running) == 2, "it is alone"
    encoding.go_on(1)
    assert [rig.receive("schedule", m.Admit).request_id for _ in range(2)] == [8, 9]
    encoding.go_on(5)
    ended = [rig.receive("schedule", m.Admit).request_id for _ in range(5)]
    assert sorted(ended) == [2, 3, 4, 5, 6], "threads that go on at once end in any order"


@pytest.mark.parametrize("whose", ["the suspect's", "another's"])
def test_a_suspect_that_is_aborted_holds_up_no_one(rig: Rig, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """Nor does one that waits for a prompt that is aborted, whose thread goes on for a while."""
    encoding = Encoding(monkeypatch, len(LONG))
    rig.suspect(1)
    suspect = submit_of(0, 1, LONG)
    first, others = (suspect, [submit_of(0, 2, LONG)]) if whose == "the suspect's" else (submit_of(0, 2, LONG), [])
    rig.send(first, "gateway.0")
    encoding.until_running(1)
    rig.send(m.Abort(first.request_id, 0), "gateway.0")
    assert rig.receive("gateway", m.Rejected).request_id == first.request_id
    for one in others or [suspect]:
        rig.send(one, "gateway.0")
    rig.until(lambda load: load.num_open == 1)
    rig.send(submit_of(0, 3), "gateway.0")
    if others:
        assert rig.receive("schedule", m.Admit).request_id == 3
    encoding.go_on(2)
    ids = [rig.receive("schedule", m.Admit).request_id for _ in range(1 if others else 2)]
    assert ids == ([2] if others else [1, 3])


def test_a_suspect_that_waits_for_a_check_is_prepared_alone_behind_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Encoding(monkeypatch, len(LONG))
    begun, checking = threading.Event(), threading.Event()

    async def check(*_: object) -> str:
        begun.set()
        while not checking.is_set():
            await asyncio.sleep(0.001)
        return "a"

    monkeypatch.setattr(GrammarChecker, "check", check)
    rig.suspect(1)
    suspect = submit_of(0, 1, LONG)
    options = msgspec.structs.replace(suspect.options, grammar=m.Grammar("regex", "a+", "guided_regex"))
    rig.send(msgspec.structs.replace(suspect, options=options), "gateway.0")
    rig.until(lambda _: begun.is_set())
    rig.send(submit_of(0, 2), "gateway.0")
    assert rig.receive("schedule", m.Admit).request_id == 2, "others go on meanwhile"
    checking.set()
    encoding.until_running(1)
    rig.send(submit_of(0, 3), "gateway.0")
    rig.until(lambda load: load.num_open >= 2)
    assert rig.nothing("schedule")
    encoding.go_on(1)
    assert [rig.receive("schedule", m.Admit).request_id for _ in range(2)] == [1, 3]


def test_requests_of_a_dead_gateway_that_wait_or_are_encoded_are_dropped(smollm2_dir: Path) -> None:
    with rig_of(smollm2_dir) as rig:
        rig.start(tiny.facts(max_model_len=1_000_000, vocab_size=49152))
        rig.send(submit_of(0, 1, LONG_TEXT), "gateway.0")  # occupies the encoding thread
        rig.until(lambda load: load.num_open == 1)
        rig.send(submit_of(1, 2, LONG_TEXT), "gateway.1")
        rig.until(lambda load: load.num_open == 2)
        rig.restart("gateway.1")
        admit = rig.receive("schedule", m.Admit)
        assert admit.request_id == 1
        accepted = rig.receive("gateway", m.Accepted)
        release(rig, admit.prompt_ids, "schedule.0")
        release(rig, accepted.prompt_ids, "gateway.0")
        rig.until(lambda load: load.num_open == 0)
        assert rig.nothing("schedule")
        assert rig.nothing("gateway.1")


def test_requests_that_wait_for_start_are_dropped_with_their_gateway(tmp_path: Path) -> None:
    with rig_of(tiny.folder(tmp_path)) as rig:
        for gateway in (0, 1):
            rig.send(submit_of(gateway, gateway), f"gateway.{gateway}")
        rig.until(lambda load: load.num_open == 2)
        rig.restart("gateway.0")
        assert rig.load().num_open == 1
        rig.start(tiny.facts())
        assert rig.receive("schedule", m.Admit).request_id == 1


@pytest.mark.parametrize(("dead", "kind"), [("schedule.0", m.Admit), ("gateway.1", m.Accepted)])
def test_what_was_not_sent_to_a_dead_process_is_dropped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, dead: str, kind: type
) -> None:
    send, send_all = Outbox.send, Outbox.send_all
    refused = threading.Event()

    def refuses(message: Any) -> bool:
        if isinstance(message, kind):
            refused.set()
        return isinstance(message, kind)

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "send", lambda outbox, message: not refuses(message) and send(outbox, message))
        patch.setattr(
            *(Outbox, "send_all"),
            lambda outbox, messages, **given: not refuses(messages[0]) and send_all(outbox, messages, **given),
        )
        rig.send(submit_of(1, 1), "gateway.1")
        rig.until(lambda load: refused.is_set() and load.num_open == 1)
        rig.restart(dead)
        assert rig.load().num_open == 0
    rig.send(submit_of(1, 2), "gateway.1")
    inbox = dead.removesuffix(".0")
    assert rig.receive(inbox).request_id == 2
    assert rig.nothing(inbox)


def test_slabs_that_only_a_dead_process_had_to_release_are_free(rig: Rig) -> None:
    rig.send(submit_of(0, 1, "x" * 5000), "gateway.0")
    accepted = rig.receive("gateway", m.Accepted)
    release(rig, accepted.prompt_ids, "gateway.0")
    assert rig.load().num_open == 1
    rig.restart("schedule.0")
    assert rig.load().num_open == 0


@pytest.mark.parametrize("thinks", ["yes", "no", "perhaps"])
def test_a_request_that_comes_again_with_its_compiled_grammar_has_the_same_options(chat_rig: Rig, thinks: str) -> None:
    requested = m.Grammar("json_schema", '{"enum": ["a"]}', "response_format")
    submit = grammars.submit(thinks, requested, tools=json.dumps(grammars.TOOLS))
    chat_rig.send(submit, "gateway.0")
    first, accepted = chat_rig.receive("schedule", m.Admit), chat_rig.receive("gateway", m.Accepted)
    assert accepted.compiled_grammar
    options = msgspec.structs.replace(submit.options, grammar=None, compiled_grammar=accepted.compiled_grammar)
    assert isinstance(accepted.prompt_ids, bytes)
    prompt = m.IdsPrompt(accepted.prompt_ids)  # the gateway keeps the ids instead of the chat
    again = msgspec.structs.replace(submit, prompt=prompt, options=options, prompt_options=m.PromptOptions())
    chat_rig.send(again, "gateway.0")
    repeated = chat_rig.receive("schedule", m.Admit)
    assert bytes(repeated.options) == bytes(first.options)
    assert chat_rig.receive("gateway", m.Accepted).compiled_grammar == accepted.compiled_grammar


def test_each_process_of_schedule_knows_that_grammars_come_before_the_first_is_checked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    checking = asyncio.Event()

    async def check(*_: object) -> str:
        await checking.wait()
        return "a"

    monkeypatch.setattr(GrammarChecker, "check", check)
    options = msgspec.structs.replace(submit_of(0, 1).options, grammar=m.Grammar("regex", "a+", "guided_regex"))
    with_grammar = [msgspec.structs.replace(submit_of(0, number), options=options) for number in (1, 2, 3)]
    rig.send(with_grammar[0], "gateway.0")
    assert rig.receive("schedule", m.ExpectGrammars) == m.ExpectGrammars()
    rig.send(with_grammar[1], "gateway.0")
    rig.until(lambda load: load.num_open == 2)
    with pytest.raises(TimeoutError):
        rig.receive("schedule", m.ExpectGrammars, timeout_s=0)
    rig.restart("schedule.0")
    rig.send(with_grammar[2], "gateway.0")
    assert rig.receive("schedule", m.ExpectGrammars) == m.ExpectGrammars()


def test_requests_without_a_grammar_are_accepted_without_one(rig: Rig) -> None:
    rig.send(submit_of(0, 1), "gateway.0")
    assert rig.receive("gateway", m.Accepted).compiled_grammar is None


def test_a_grammar_that_is_checked_for_a_dead_gateway_is_forgotten(rig: Rig) -> None:
    grammar = m.Grammar("regex", "a+", "guided_regex")
    again = submit_of(1, 1)
    again = msgspec.structs.replace(again, options=msgspec.structs.replace(again.options, grammar=grammar))
    rig.send(again, "gateway.1")  # the check takes as long as its process takes to start
    rig.until(lambda load: load.num_open == 1)
    rig.restart("gateway.1")
    assert rig.load().num_open == 0
    rig.send(again, "gateway.1")
    assert rig.receive("schedule", m.Admit).request_id == 1
    assert rig.nothing("schedule")


# --------------------------------------------------------------------------------------- the request that is in work


def boxed_rig(folder: Path, box: m.BlackBox) -> Rig:
    rig = Rig("ingest", model_dir=folder)
    rig.launch = msgspec.structs.replace(rig.launch, black_box=box)
    return rig


@pytest.fixture
def box() -> Iterator[m.BlackBox]:
    boxes = BlackBoxes(Settings())
    yield boxes.create("ingest.0", 1)
    boxes.close()


@pytest.mark.parametrize("size", [1, ingest_stage.LONG_BYTES])
def test_the_request_that_ends_the_process_is_named_and_its_neighbours_are_not(
    tmp_path: Path, box: m.BlackBox, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    cut = PromptProcessor.cut

    def fails(processor: PromptProcessor, ids: Any, submit: m.Submit) -> Any:
        if submit.request_id == 7:
            raise MemoryError("fatal")
        return cut(processor, ids, submit)

    monkeypatch.setattr(PromptProcessor, "cut", fails)
    with pytest.raises(MemoryError, match="fatal"), boxed_rig(tiny.folder(tmp_path), box) as rig:
        rig.start(tiny.facts(max_model_len=100_000))
        for request_id in (5, 6):
            rig.send(tiny.submit("b" * size, request_id=request_id), "gateway.0")
            assert rig.receive("gateway", m.Accepted).request_id == request_id
        rig.send(tiny.submit(tiny.chat("a"), request_id=8, max_tokens=10**9), "gateway.0")
        rig.receive("gateway", m.Rejected)
        rig.load()
        assert black_box.suspect_of(box) is None
        rig.send(tiny.submit("b" * size, request_id=7, attempt=3), "gateway.0")
        rig.receive("gateway")  # raises what the stage raised
    assert black_box.suspect_of(box) == (7, 3)
