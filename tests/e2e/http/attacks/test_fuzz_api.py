"""tools/fuzz_api: a slice of it, and that it finds faults."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import LimitSettings
from pipeline.stages.gateway.apidocs.openapi import document
from tests.compiled import link_kernels
from tests.slices import ALL_CASES, part_of
from tools.fuzz_api import __main__ as fuzz_api
from tools.fuzz_api import messages
from tools.fuzz_api.cases import Case, Cases
from tools.fuzz_api.http import problem_of
from tools.fuzz_api.values import MOST
from tools.fuzzing.replies import Reply

CASES = part_of(200, 100)


def test_a_slice_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has PyTorch, and with the CPU library: two imports take longer than the cases."""
    command = ["fuzz_api", "--cases", str(CASES), "--seed", "3", "--deadline", "120"]
    if not ALL_CASES:
        command += ["--set", "execute.kernels=auto", "--set", f"cache_dir={link_kernels(tmp_path / 'cache')}"]
    monkeypatch.setattr(sys, "argv", command)
    code = fuzz_api.main()
    shown = capfd.readouterr()
    assert code == 0, shown.out + shown.err
    lines = shown.out.splitlines()
    assert all(len(line) <= 80 for line in lines if "/s, " in line and "problems" in line)
    last = lines[-1]
    assert last.startswith(f"{CASES} cases in ")
    assert {"200", "400", "zmq pong"} <= {part.partition(" × ")[2] for part in last.partition(": ")[2].split(", ")}


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    return document("tiny", LimitSettings(), has_keys=False)


def test_a_case_depends_on_its_number_and_the_seed_alone(description: dict[str, Any]) -> None:
    one, other = Cases(description, 7), Cases(json.loads(json.dumps(description)), 7)
    cases = [one.case(number).encoded() for number in range(300)]
    assert cases == [other.case(number).encoded() for number in range(300)]
    assert len(set(cases)) > 200 and cases != [Cases(description, 8).case(number).encoded() for number in range(300)]
    assert messages.messages(7, 20) == messages.messages(7, 20) != messages.messages(7, 40)


def test_cases_cover_every_route_and_many_are_cheap_and_valid(description: dict[str, Any]) -> None:
    maker = Cases(description, 1)
    cases = [maker.case(number) for number in range(3000)]
    paths = {path for path in description["paths"] if "{" not in path}
    assert paths <= {case.path.partition("?")[0] for case in cases}
    chats = [case.body for case in cases if case.path == "/v1/chat/completions"]
    valid = []
    for body in chats:
        try:
            valid.append(json.loads(body))
        except (ValueError, RecursionError):  # some are as deep as the stack, on which plugins of pytest are, too
            continue
    assert len(chats) / 2 < len(valid) < len(chats)
    counts = [body["max_tokens"] for body in valid if type(body) is dict and type(body.get("max_tokens")) is int]
    assert sum(count <= MOST for count in counts) > len(counts) / 2


OPENAI = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'
ANTHROPIC = b'{"type":"error","error":{"type":"t","message":"m"},"request_id":"r"}'
JSON = {"content-type": "application/json"}
FULL = b"1 of 1024 sequences are free, and this request needs 3: n, or best_of, for each prompt"
BUSY = b"the pattern could not be checked in time: try again"
LATE = b"the request timed out after 0.5 s, before its first token"
SLOW = b"the request timed out after 60 s, before its first token"


@pytest.mark.parametrize(
    ("path", "reply", "words"),
    [
        ("/v1/completions", Reply(1, 500, JSON, OPENAI), "status 500"),
        ("/v1/completions", Reply(1, 502, JSON, OPENAI), "status 502"),
        ("/health", Reply(1, 503, JSON, OPENAI), "status 503"),
        ("/v1/completions", Reply(1, 503, JSON, OPENAI), "status 503"),
        ("/v1/completions", Reply(1, 503, JSON, OPENAI.replace(b'"m"', b'"%b"' % FULL)), ""),
        ("/v1/completions", Reply(1, 503, JSON, OPENAI.replace(b'"m"', b'"%b"' % BUSY)), ""),
        ("/v1/completions", Reply(1, 504, JSON, OPENAI), "status 504"),
        ("/v1/completions", Reply(1, 504, JSON, OPENAI.replace(b'"m"', b'"%b"' % LATE)), ""),
        ("/v1/completions", Reply(1, 504, JSON, OPENAI.replace(b'"m"', b'"%b"' % SLOW)), "status 504"),
        ("/v1/completions", Reply(1, 400, JSON, OPENAI), ""),
        ("/v1/completions", Reply(1, 400, JSON, ANTHROPIC), "another form"),
        ("/v1/messages", Reply(1, 400, JSON, ANTHROPIC), ""),
        ("/v1/messages/x", Reply(1, 404, JSON, OPENAI), "another form"),
        ("/api/chat", Reply(1, 400, JSON, b'{"error":"m"}'), ""),
        ("/api/chat", Reply(1, 400, JSON, OPENAI), "another form"),
        ("/v1/completions", Reply(1, 417, {"content-type": "text/plain"}, b"Unknown Expect"), "not JSON"),
        ("/v1/completions", Reply(1, 200, JSON, b"{"), "not application/json"),
        ("/v1/completions", Reply(1, 200, {"content-type": "text/event-stream"}, b"data: x"), "not complete"),
        ("/v1/chat/completions", Reply(1, 200, JSON, b'{"error":{"code":"stage_died"}}'), "within a reply"),
    ],
)
def test_faults_are_recognized(path: str, reply: Reply, words: str) -> None:
    found = problem_of(Case("POST", path, {}, b""), reply, took_s=1.0)
    assert (words in found) if words else not found, found
