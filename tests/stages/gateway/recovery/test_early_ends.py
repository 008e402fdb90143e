"""Open replies end early if the operator replaces the server and says so (`pipeline restart --finish`)."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.open_requests.early_ends import SENTENCE_END
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of

CLOSING = " [This server restarts.]"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate


def drain(gate: Gate, at: m.FinishAt, closing_text: str = "", deadline_s: float = 30.0) -> None:
    gate.rig.send(m.Drain(deadline_s, is_leaving=True, has_successor=True, finish=at, closing_text=closing_text))
    gate.rig.load()


@pytest.mark.parametrize(
    "text", ["It ends.", "Really?", 'He said "no."', "a list:\n", "\u7d42\u308f\u308a\u3002", "Wait\u2026 "]
)
def test_these_texts_end_with_a_sentence_or_a_line(text: str) -> None:
    assert SENTENCE_END.search(text)


@pytest.mark.parametrize("text", ["It", "3.1", "a.b", "", "no, "])
def test_these_do_not(text: str) -> None:
    assert not SENTENCE_END.search(text)


def test_a_reply_ends_with_its_sentence_and_the_stages_forget_it(gate: Gate) -> None:
    response = gate.post(CHAT | {"stream": True})
    submit = gate.begin()
    gate.delta(submit, "One. Two")
    drain(gate, "sentence", CLOSING)
    gate.delta(submit, " and three")
    gate.delta(submit, ".")
    events = events_of(response.result().text)
    texts = [one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"]]
    assert "".join(texts) == f"One. Two and three.{CLOSING}"
    assert [one["choices"][0]["finish_reason"] for one in events if one["choices"]][-1] == "length"
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
    gate.rig.receive("supervisor", m.Drained)


def test_samples_end_one_after_the_other(gate: Gate) -> None:
    response = gate.complete(COMPLETION | {"n": 2})
    submit = gate.begin()
    drain(gate, "sentence")
    gate.delta(submit, "One.", index=0)
    gate.delta(submit, " More.", index=0)
    gate.delta(submit, "Two", index=1)
    assert gate.rig.nothing("schedule", 0)
    gate.delta(submit, "!", index=1)
    choices = response.result().json()["choices"]
    assert [(one["text"], one["finish_reason"]) for one in choices] == [("One.", "length"), ("Two!", "length")]
    gate.rig.receive("schedule", m.Abort)


def test_a_reply_with_a_grammar_goes_on_to_its_end(gate: Gate) -> None:
    response = gate.post(CHAT | {"response_format": {"type": "json_object"}})
    submit = gate.begin()
    drain(gate, "sentence", CLOSING)
    gate.delta(submit, '{"a": "One.')
    gate.delta(submit, '"}', finish=m.Finish.STOP)
    choice = response.result().json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": "One."}', "stop")


def test_what_has_output_ends_now_and_the_rest_is_to_be_sent_again(gate: Gate) -> None:
    begun, waiting = gate.complete(COMPLETION), gate.complete(COMPLETION)
    submits = [gate.begin(), gate.begin()]
    gate.delta(submits[0], "Half a")
    gate.rig.load()
    drain(gate, "now", CLOSING, deadline_s=0.05)
    results = [one.result() for one in (begun, waiting)]
    done = next(one for one in results if one.status_code == 200)
    assert (done.json()["choices"][0]["text"], done.json()["choices"][0]["finish_reason"]) == (
        f"Half a{CLOSING}",
        "length",
    )
    failed = next(one for one in results if one.status_code != 200)
    assert failed.status_code == 503 and "send the request again" in failed.text


def test_a_gateway_whose_server_was_replaced_gives_its_sockets_free_at_once(gate: Gate) -> None:
    """Requests on its connections are served, and clients that are kept alive connect again."""
    response = gate.complete(COMPLETION)
    submit = gate.begin()
    with socket.create_connection(gate.address, timeout=30) as kept:
        kept.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        drain(gate, "request")
        assert kept.recv(4096) == b""
    with pytest.raises(ConnectionRefusedError), socket.create_connection(gate.address, timeout=30):
        pass
    gate.delta(submit, "fine", finish=m.Finish.LENGTH)
    assert response.result().json()["choices"][0]["text"] == "fine"
    gate.rig.receive("supervisor", m.Drained)
