"""Many streams with log probabilities that are formatted at once take turns of the loop."""

import asyncio
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.replies import part_turns
from pipeline.stages.gateway.replies.part_turns import NUM_PARTS, PartTurns
from pipeline.stages.gateway.replies.token_details import TokenDetailFormatter
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate
from tests.stages.gateway.replies.choices.scored import token_outputs, with_tops

NUM_STREAMS = 16
NUM_IDS = 400
TOP = 20
RESPONSE = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": TOP}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each turn of the loop formats. Its time is used up by the first one."""
    monkeypatch.setattr(part_turns, "MAX_TURN_S", 1e-9)
    found, is_open = [0], [False]
    take_part = TokenDetailFormatter.take_part

    def close() -> None:
        is_open[0] = False

    def noted(formatter: TokenDetailFormatter) -> Any:
        if not is_open[0]:
            is_open[0] = True
            found.append(0)
            asyncio.get_running_loop().call_soon(close)
        found[-1] += 1
        return take_part(formatter)

    monkeypatch.setattr(TokenDetailFormatter, "take_part", noted)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": TOP, "stream": True}),
        ("/v1/completions", COMPLETION | {"logprobs": TOP, "stream": True}),
        ("/v1/responses", RESPONSE | {"stream": True}),
        ("/v1/responses", RESPONSE | {"stream": True, "background": True}),
    ],
)
def test_streams_that_have_much_wait_for_turns_of_the_loop(
    gate: Gate, parts: list[int], path: str, body: dict[str, Any]
) -> None:
    streams = [gate.post(body, path) for _ in range(NUM_STREAMS)]
    data = token_outputs(*[-0.5] * NUM_IDS, top=[(rank, -1.0 - rank) for rank in range(TOP)])
    pieces = with_tops([b"a"] * NUM_IDS, *[b"b"] * TOP)
    for submit in [gate.begin() for _ in range(NUM_STREAMS)]:
        gate.delta(submit, "a" * NUM_IDS, NUM_IDS, token_outputs=data, pieces=pieces, finish=m.Finish.LENGTH)
    for stream in streams:
        text = stream.result().text
        assert text.count("-0.5") >= NUM_IDS
    assert sum(parts) >= NUM_STREAMS * (NUM_IDS * (1 + TOP) // 1024 - 1)
    assert max(parts) <= 2 * (1 + NUM_PARTS)


async def test_a_key_that_has_many_parts_does_not_delay_another_ones() -> None:
    turns, order = PartTurns(), list[str]()

    async def format_as(scope: str) -> None:
        await turns.take(scope)
        order.append(scope)

    turns._used_s = part_turns.MAX_TURN_S
    tasks = [asyncio.ensure_future(format_as("a")) for _ in range(30)]
    await asyncio.sleep(0)
    tasks[1].cancel()  # its client has left
    await format_as("b")
    assert order.count("a") <= 2 * NUM_PARTS
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order.count("a") == 29 and not turns._queue and turns.has_time
