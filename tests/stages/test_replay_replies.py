"""The replay of a gateway sends the same tool calls and reasoning, including ids of calls."""

from pathlib import Path

from pipeline.config.settings import ChatSettings
from pipeline.replay import format as f
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.replays import entries, replays_alike

BODY = CHAT | {"tools": [{"type": "function", "function": {"name": "now"}}]}
TEXT = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_a_replay_of_the_gateway_sends_the_same_tool_calls_and_reasoning(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    chat = ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")
    with Gate(tmp_path, record=recording, chat=chat) as gate:
        for is_stream in (False, True):
            future = gate.post(BODY | {"stream": is_stream})
            submit = gate.submit()
            for begin in range(0, len(TEXT), 9):
                gate.delta(submit, TEXT[begin : begin + 9])
            gate.accept(submit, tail="assistant\n")
            gate.finish(submit, finish=m.Finish.STOP)
            assert "tool_calls" in future.result().text
        gate.rig.until(lambda load: load.num_open_requests == 0)
    replays_alike("gateway", recording)
    replies = [one.body for one in entries(recording) if isinstance(one, f.Sent) and one.peer.startswith("client ")]
    assert sum(one.count(b'"id":"call_') for one in replies) == 2
    assert any(b"reasoning_content" in one for one in replies)
