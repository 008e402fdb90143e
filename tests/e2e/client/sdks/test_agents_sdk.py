"""The OpenAI Agents SDK with the real server, over /v1/responses and /v1/chat/completions.

The model rarely calls tools of its own accord, so `tool_choice` forces the calls; after a call the SDK resets it.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    FunctionTool,
    ItemHelpers,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    SQLiteSession,
    function_tool,
)
from agents.items import MessageOutputItem, ToolCallItem, ToolCallOutputItem
from openai import AsyncOpenAI, BadRequestError
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, Field

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of Greece?"
NO_TRACING = RunConfig(tracing_disabled=True)
GREEDY = ModelSettings(temperature=0, max_tokens=60, include_usage=True)
City = Literal["Athens", "Cairo", "Oslo"]


class Visit(BaseModel):
    city: City
    num_nights: int = Field(ge=1, le=9)


class Calls:
    """A function tool, and the arguments of its calls."""

    def __init__(self) -> None:
        self.arguments: list[tuple[str, int]] = []
        self.tool: FunctionTool = function_tool(self.plan_visit)

    def plan_visit(self, city: City, num_nights: int) -> str:
        """Plan a visit.

        Args:
            city: where to
            num_nights: how long
        """
        self.arguments.append((city, num_nights))
        return f"The hotel in {city} is booked."


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel], ids=["responses", "chat"])
def model(request: pytest.FixtureRequest, client: AsyncOpenAI) -> Model:
    kind: Callable[..., Model] = request.param
    return kind(MODEL, client)


async def run(
    agent: Agent[Any], streamed: bool, text: str = QUESTION, **options: Any
) -> RunResult | RunResultStreaming:
    """Run an agent to its end."""
    if not streamed:
        return await Runner.run(agent, text, run_config=NO_TRACING, **options)
    result = Runner.run_streamed(agent, text, run_config=NO_TRACING, **options)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    texts = [ItemHelpers.text_message_output(one) for one in result.new_items if isinstance(one, MessageOutputItem)]
    assert "".join(deltas) == "".join(texts)
    return result


both = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@both
async def test_an_agent_answers(model: Model, streamed: bool) -> None:
    agent = Agent("guide", instructions="Answer in one sentence.", model=model, model_settings=GREEDY)
    result = await run(agent, streamed)
    assert "Athens" in result.final_output
    (response,) = result.raw_responses
    assert response.usage.input_tokens > 20 and 1 < response.usage.output_tokens < 60


@both
@pytest.mark.parametrize("choice", ["required", "plan_visit"])
async def test_a_forced_call_is_run_and_its_output_is_answered(model: Model, streamed: bool, choice: str) -> None:
    calls = Calls()
    settings = GREEDY.resolve(ModelSettings(tool_choice=choice, parallel_tool_calls=False))
    agent = Agent("guide", instructions="Plan visits.", model=model, model_settings=settings, tools=[calls.tool])
    result = await run(agent, streamed, "Book a hotel in Athens.")
    call, output, answer = result.new_items
    assert isinstance(call, ToolCallItem) and isinstance(call.raw_item, ResponseFunctionToolCall)
    assert call.raw_item.name == "plan_visit"
    ((city, num_nights),) = calls.arguments
    assert json.loads(call.raw_item.arguments) == {"city": city, "num_nights": num_nights}
    assert isinstance(output, ToolCallOutputItem) and output.output == f"The hotel in {city} is booked."
    assert isinstance(answer, MessageOutputItem) and result.final_output
    assert len(result.raw_responses) == 2


@both
async def test_the_output_type_is_enforced(model: Model, streamed: bool) -> None:
    agent = Agent("guide", instructions="Plan visits.", model=model, model_settings=GREEDY, output_type=Visit)
    result = await run(agent, streamed, "Three nights in Athens.")
    assert isinstance(result.final_output, Visit)


async def test_a_session_repeats_the_conversation(model: Model) -> None:
    agent = Agent("guide", model=model, model_settings=GREEDY)
    session = SQLiteSession("visits")
    try:
        first = await run(agent, False, session=session)
        second = await run(agent, True, "And of Italy?", session=session)
        assert len(await session.get_items()) == 4
    finally:
        session.close()
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.total_tokens


async def test_stored_responses_continue_a_conversation(client: AsyncOpenAI) -> None:
    agent = Agent("guide", model=OpenAIResponsesModel(MODEL, client), model_settings=GREEDY)
    first = await run(agent, False)
    assert first.last_response_id is not None
    second = await run(agent, True, "And of Italy?", previous_response_id=first.last_response_id)
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.total_tokens


@both
async def test_errors_reach_the_caller(model: Model, streamed: bool) -> None:
    agent = Agent("guide", model=model, model_settings=ModelSettings(temperature=9))
    with pytest.raises(BadRequestError, match="'temperature' must be"):
        await run(agent, streamed)
