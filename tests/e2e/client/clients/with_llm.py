"""llm, the command and the library, configured for the server in extra-openai-models.yaml."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from openai import BadRequestError
from pydantic import BaseModel, Field

QUESTION = "What is the capital of Greece?"


class Visit(BaseModel):
    city: Literal["Athens", "Cairo", "Oslo"]
    num_nights: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def home(url: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of llm's configuration and logs."""
    folder = tmp_path_factory.mktemp("llm")
    common = {"model_name": model, "api_base": f"{url}/v1"}
    models = [
        {"model_id": "here", "aliases": ["h"], "supports_schema": True, "supports_tools": True, **common},
        {"model_id": "here-completes", "completion": True, **common},
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is valid YAML
    return folder


@pytest.fixture
def library(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LLM_USER_PATH", str(home))
    import llm

    yield llm


def command(library: Any, *args: str) -> str:
    from llm.cli import cli

    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


def test_the_command_answers_and_continues_a_conversation(library: Any) -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "30")
    assert "Athens" in command(library, "prompt", "-m", "h", "-s", "Answer in one sentence.", QUESTION, *options)
    assert command(library, "prompt", "--continue", "Thank you!", "--no-stream", *options).strip()
    logged = json.loads(command(library, "logs", "list", "--json", "-n", "2"))
    assert [one["model"] for one in logged] == ["here", "here"]
    assert logged[0]["conversation_id"] == logged[1]["conversation_id"]
    assert all(one[tokens] > 0 for one in logged for tokens in ("input_tokens", "output_tokens")), "usage is read"


def test_the_command_returns_json_of_a_schema(library: Any) -> None:
    schema = json.dumps(Visit.model_json_schema())
    output = command(library, "prompt", "-m", "here", "--schema", schema, "Plan a visit.", "-o", "temperature", "0")
    Visit.model_validate_json(output)


def test_the_library_streams_and_counts_tokens(library: Any) -> None:
    response = library.get_model("here").prompt(QUESTION, temperature=0, max_tokens=30)
    pieces = list(response)
    assert len(pieces) > 3 and "Athens" in "".join(pieces) == response.text()
    usage = response.usage()
    assert usage.input > 0 and 0 < usage.output <= 30


def test_the_library_returns_an_object_of_a_schema(library: Any) -> None:
    response = library.get_model("here").prompt("Plan a visit.", schema=Visit, temperature=0)
    Visit.model_validate(json.loads(response.text()))


def test_its_options_are_accepted(library: Any) -> None:
    response = library.get_model("here").prompt(
        QUESTION,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        seed=7,
        stop="zzz",
        logit_bias={"28": -100},
        max_tokens=12,
    )
    assert "," not in response.text(), "id 28 is the comma"
    assert response.usage().output <= 12


def test_a_completion_continues_the_prompt(library: Any) -> None:
    model = library.get_model("here-completes")
    assert model.prompt("One, two, three, four,", temperature=0, max_tokens=6).text().startswith(" five")


def test_the_result_of_a_tool_is_used(library: Any) -> None:
    """A conversation continues after a tool call."""
    conversation = library.get_model("here").conversation()
    conversation.prompt("Hello.", temperature=0, max_tokens=5).text()
    result = library.ToolResult(name="weather", output="22 degrees", tool_call_id="call_1")
    reply = conversation.prompt("And now?", tool_results=[result], temperature=0, max_tokens=10)
    assert reply.text()


def test_tools_are_accepted_for_a_template_without_them(library: Any) -> None:
    tool = library.Tool.function(str.upper, name="upper")
    response = library.get_model("here").prompt("Say hello.", tools=[tool], temperature=0, max_tokens=5)
    assert response.text() or response.tool_calls()


def test_a_rejection_has_the_server_s_message(library: Any) -> None:
    response = library.get_model("here").prompt("Which?", max_tokens=100_000)
    with pytest.raises(BadRequestError, match="maximum context length") as refusal:
        response.text()
    assert refusal.value.param in ("max_tokens", "max_completion_tokens")
