"""`pipeline chat` with a fake server with scripted answers: in a terminal, and through a pipe."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.cli.chat.command import also_running
from pipeline.cli.chat.connection import ChatAnswer
from pipeline.cli.chat.conversation import ChatHistory
from pipeline.cli.chat.screen import described
from pipeline.config.settings import Settings
from pipeline.errors import StartError
from pipeline.metrics.stats import ServerStats
from tests.cli.fake_chat import FakeChat
from tests.cli.fake_server import FakeServer
from tests.terminal import CTRL_C, CTRL_D, Terminal

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def chat(server: FakeChat | str, *args: str) -> list[str]:
    url = server if isinstance(server, str) else server.url
    return [sys.executable, "-m", "pipeline", "chat", "--url", url, *args]


def piped(text: str, server: FakeChat | str, *args: str) -> tuple[int, str, str]:
    """Chat in this process. Returns exit code, standard output and standard error."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr("sys.stdin", io.StringIO(text))
        code = main(chat(server, *args)[3:])
    return code, out.getvalue(), err.getvalue()


# -------------------------------------------------------------------------------------------------------- in a terminal


def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    saved, markdown = tmp_path / "talk.json", tmp_path / "talk.md"
    with FakeChat() as server, Terminal(chat(server, "--system", "Be kind."), ROOT, columns=200) as terminal:
        terminal.wait_for(f"fake-model at {server.url} · /help, Ctrl-D ends")
        terminal.enter("Hello there", "2: Hello there")
        terminal.wait_for("7 tokens · first after")
        terminal.enter("And again", "4: And again")
        terminal.enter("/system Be brief.", "system prompt: Be brief.")
        terminal.enter("third", "6: third")
        terminal.enter(f"/save {saved}", f"saved as {saved}")
        terminal.enter(f"/save {saved}", f"saved as {saved}", times=2)
        terminal.enter(f"/save {markdown}", f"saved as {markdown}")
        terminal.enter(f"/save {ROOT / 'README.md'}", "README.md exists; use another name")
        terminal.enter("/save /no/such/folder/x", "can't be written: No such file or directory")
        terminal.enter("/save", "/save: needs a file name")
        terminal.enter("/clear", "conversation cleared")
        terminal.enter("/system off", "no system prompt")
        terminal.enter("first again", "1: first again")
        terminal.enter("/retry", "1: first again", times=2)
        terminal.enter("/help", "/quit          end the chat, like Ctrl-D")
        terminal.enter("/nonsense", "unknown command: /nonsense; /help lists them")
        terminal.enter("/etc/passwd is what?", "3: /etc/passwd is what?")
        terminal.type("/quit\r")
        assert terminal.end() == 0
    assert [turn["role"] for turn in json.loads(saved.read_text())] == ["system", *["user", "assistant"] * 3]
    assert json.loads(saved.read_text())[0]["content"] == "Be brief."
    assert "## user\n\nHello there\n" in markdown.read_text()
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert server.bodies[1]["messages"][2] == {"role": "assistant", "content": "2: Hello there "}


def test_everything_fits_80_columns_and_words_are_not_broken() -> None:
    words = "a sentence of several words that is longer than the eighty columns of an old terminal, twice over " * 2
    with FakeChat() as server, Terminal(chat(server), ROOT, columns=80) as terminal:
        terminal.wait_for("Ctrl-D ends")
        terminal.enter("/help", "Ctrl-C stops an answer.")
        terminal.wait_for_prompt()
        begin = len(terminal.text)
        terminal.type(f"{words}\r")
        terminal.wait_for("tokens/s")
        terminal.wait_for_prompt()
        text = terminal.text
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    help_lines = text[:begin].splitlines()
    assert max(map(len, help_lines)) <= 80 and any("/system TEXT" in line for line in help_lines)
    answer = text[text.index("1: a sentence", begin) :].splitlines()
    assert max(map(len, answer)) < 80
    assert " ".join(" ".join(answer[:3]).split()) == f"1: {words}".strip()


def test_a_long_error_is_whole_in_lines_that_fit() -> None:
    nowhere = f"/no/such/folder/{'x' * 100}"
    with FakeChat() as server, Terminal(chat(server), ROOT, columns=60) as terminal:
        terminal.enter(f"/save {nowhere}", "can't be written: No such file or directory")
        terminal.enter("too long", "length is 9")
        terminal.wait_for_prompt()
        text = terminal.text
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    lines = text[text.index("error: ") :].splitlines()
    assert any(nowhere in line for line in lines), "a path that is copied has no line ends"
    assert max(len(line) for line in lines if nowhere not in line) <= 60


def test_a_question_can_span_several_lines() -> None:
    with FakeChat() as server, Terminal(chat(server), ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.type("one\\\rtwo\r")
        terminal.wait_for("first after")
        terminal.type('"""three\rfour\rfive"""\r')
        terminal.wait_for("first after", times=2)
        terminal.wait_for_prompt()
        terminal.type('"""lost\r')
        terminal.wait_for_prompt("… ")
        terminal.interrupt("Ctrl-D or /quit ends the chat")
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert server.bodies[0]["messages"][-1]["content"] == "one\ntwo"
    assert server.bodies[1]["messages"][-1]["content"] == "three\nfour\nfive"


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    with FakeChat() as server, Terminal(chat(server), ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.enter("for ever", "on on on")
        terminal.type("typed ahead")
        terminal.wait_for("on", times=terminal.text.count("on") + 20)
        assert "ahead" not in terminal.text, "it is not mixed with the answer"
        terminal.type(CTRL_C)
        terminal.wait_for("stopped")
        assert server.left.wait(10), "the client disconnects"
        terminal.wait_for("tokens/s")
        terminal.enter("and now", "3: and now")
        assert server.bodies[1]["messages"][1]["content"].startswith("on on on"), "the history keeps the partial answer"
        terminal.wait_for_prompt()
        terminal.interrupt("Ctrl-D or /quit ends the chat")
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_errors_are_readable_and_the_question_can_be_retried() -> None:
    with FakeChat() as server, Terminal(chat(server, "--max-tokens", "5"), ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.enter("too long", "the conversation is too long for the model: /reset")
        terminal.enter("go wrong", "error: a stage died")
        terminal.enter("break off", "error: lost the connection to the server")
        terminal.wait_for("/retry asks again once the server is back")
        terminal.enter("html", "error: the server answered 502: <h1>Bad gateway</h1>")
        terminal.enter("plain", "error: the server answered with application/json instead of a stream")
        terminal.enter("garbage", "error: the server sent an invalid event: {not json")
        terminal.enter("cut", "the answer was cut at 5 tokens (/max-tokens)")
        terminal.enter("fine", "3: fine")
        assert "Traceback" not in terminal.text
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert server.bodies[-1]["messages"][0]["content"] == "cut", "questions without an answer are not kept"


def test_a_full_context_is_reported() -> None:
    with FakeChat() as server, Terminal(chat(server), ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.enter("cut", "the model's context is full; /reset starts a new conversation")
        terminal.enter("too long", "/reset, then /retry asks again")
        terminal.enter("/reset", "conversation cleared")
        terminal.enter("/retry", "too long for the model", times=2)


def test_a_question_can_be_retried_after_a_server_restart() -> None:
    with FakeChat() as server, Terminal(chat(server), ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.enter("Hello", "1: Hello")
        port = int(server.url.rsplit(":", 1)[1])
        server.close()
        terminal.enter("Are you there", f"error: no server at {server.url}")
        with FakeChat(port):
            terminal.enter("/retry", "3: Are you there")
            terminal.wait_for_prompt()
            terminal.type(CTRL_D)
            assert terminal.end() == 0


def test_an_answer_cannot_send_control_sequences_to_the_terminal() -> None:
    with FakeChat() as server, Terminal(chat(server), ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.enter("control", "�[2Jbell� and")
        assert b"\x1b[2J" not in terminal.raw
        assert b"\x07" not in terminal.raw


# --------------------------------------------------------------------------------------------------------- in a pipe


def test_each_line_of_a_pipe_is_a_question_and_only_answers_are_printed() -> None:
    with FakeChat() as server:
        text = "one\n\n  \ntwo\n/reset\n/tmp is a folder\n"
        done = subprocess.run(chat(server), cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "1: one \n3: two \n1: /tmp is a folder \n", "")
        assert piped("", server) == (0, "", "")


def test_options_are_sent_with_every_question() -> None:
    args = ("--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "12", "--seed", "3", "--api-key", "secret")
    with FakeChat() as server:
        assert piped("one\ntwo", server, *args, "--model", "another")[0] == 0
    for body in server.bodies:
        assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 12, 3)
        assert body["model"] == "another"
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_chat_is_tamer_than_the_api_unless_the_model_or_the_user_says_otherwise() -> None:
    with FakeChat() as server:
        server.recommended = {}
        assert piped("one", server)[0] == 0
        server.recommended = {"temperature": 0.2, "top_k": 40}
        assert piped("one\n/temperature 1.5\n/max-tokens 7\ntwo\n/max-tokens off\nthree", server)[0] == 0
        _, _, err = piped("/temperature 3\n", server)
    sent = [(body.get("temperature"), body.get("top_p"), body.get("max_tokens")) for body in server.bodies]
    assert sent == [(0.7, 0.95, None), (None, 0.95, None), (1.5, 0.95, 7), (1.5, 0.95, None)]
    assert err == "pipeline chat: error: /temperature: needs a number from 0 to 2, got '3'\n"


def test_control_characters_are_unchanged_in_a_pipe() -> None:
    with FakeChat() as server:
        assert piped("control\n", server)[1] == "\x1b[2Jbell\x07 and\ttab\n"


def test_a_question_without_an_answer_makes_the_exit_code_1() -> None:
    with FakeChat() as server:
        code, out, err = piped("too long\nfine\n", server)
        assert (code, out) == (1, "1: fine \n")
        assert err == ("pipeline chat: error: the server answered 400: this model's maximum context length is 9\n")
        code, out, err = piped("break off\nfine\n", server)
        assert (code, out) == (1, "half an \n"), "a lost server gets no more questions"
        assert err.startswith("pipeline chat: error: lost the connection to the server: ")


def test_a_missing_server_is_a_clear_error() -> None:
    with FakeChat() as server:
        url = server.url
    code, out, err = piped("one\n", url)
    assert (code, out) == (1, "")
    assert err.startswith(f"pipeline chat: error: no server at {url} (Connection refused); start one with")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--url", "http://x", "--set", "gateway.port=1"),
            "--url: --config and --set are for a server that this command starts",
        ),
        (("--url", "http://x", "--chat-template", "f"), "--url: --chat-template is for a server that this command"),
        (("--port", "0"), "--port: needs a whole number of at least 1, got '0'"),
        (("--port", "8000", "--url", "http://x"), "not allowed with argument --port"),
        (("--url", "localhost"), "--url: needs http:// or https:// in front, got 'localhost'"),
        (("--temperature", "3"), "--temperature: needs a number from 0 to 2, got '3'"),
        (("--top-p", "0"), "--top-p: needs a number above 0 and at most 1, got '0'"),
        (("--max-tokens", "0"), "--max-tokens: needs a whole number of at least 1, got '0'"),
        (("--seed", "-1"), "--seed: "),
        (("--set", "gateway.prot=1"), "gateway.prot: there is no such key; did you mean gateway.port?"),
    ],
)
def test_invalid_options_are_clear_errors(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["chat", *args])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert words in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ which server


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the default address of a server; questions are piped."""

    def set_address(url: str) -> None:
        monkeypatch.setattr("pipeline.cli.chat.command.DEFAULT_URL", url)
        monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))

    return set_address


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of the servers that are started; each start fails."""
    settings: list[Settings] = []

    class EmbeddedServer:
        def __init__(self, given: Settings, environ: dict[str, str]) -> None:
            assert len(environ["PIPELINE_API_KEYS"]) > 30  # a random key of its own
            settings.append(given)
            raise StartError("not today")

    monkeypatch.setattr("pipeline.cli.chat.command.EmbeddedServer", EmbeddedServer)
    return settings


def test_a_running_server_is_used(
    at: Callable[[str], None], started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeChat() as server:
        at(server.url)
        assert main(["chat"]) == 0
    assert capsys.readouterr().out == "1: one \n"
    assert started == []


def test_without_a_running_server_a_private_one_is_started(
    at: Callable[[str], None], started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeChat() as server:
        at(server.url)
    assert main(["chat"]) == 1
    assert capsys.readouterr().err == "pipeline chat: error: not today\n"
    assert (started[0].gateway.host, started[0].gateway.port) == ("127.0.0.1", 0)
    assert started[0].model == Settings().model


@pytest.mark.parametrize(
    "args",
    [("--model", "m.gguf"), ("--set", "max_model_len=64"), ("--config", "small-memory"), ("--chat-template", "f")],
)
def test_a_model_or_settings_start_a_server_with_them(
    args: tuple[str, ...], at: Callable[[str], None], started: list[Settings]
) -> None:
    with FakeChat() as server:
        at(server.url)
        assert main(["chat", *args, "--set", "log_level=error"]) == 1
    assert server.bodies == []
    assert len(started) == 1
    assert started[0].log_level == "info", "the chat waits for the log line at readiness"


def test_another_service_at_the_default_address_is_an_error(
    at: Callable[[str], None], started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        server.models = {"hello": "world"}
        at(server.url)
        assert main(["chat"]) == 1
    assert "use --url for another server, or --model to start one" in capsys.readouterr().err
    assert started == []


# --------------------------------------------------------------------------------------------------------- its parts


def test_servers_at_other_ports_are_named_before_another_starts() -> None:
    other = ServerStats("1-x", 1, "0.1", "m", "http://127.0.0.1:8123", "serving", 1.0, 1.0, [], 0, 0, 0)
    assert also_running([other]).startswith(
        "no server at http://127.0.0.1:8000; running are http://127.0.0.1:8123 (--port 8123); starting one"
    )
    assert also_running([]) == "no server at http://127.0.0.1:8000; starting one for this chat"


def test_a_failed_question_is_not_part_of_the_conversation() -> None:
    conversation = ChatHistory("s")
    conversation.with_question("a")
    assert [turn.content for turn in conversation.turns] == ["s"]
    assert conversation.take_back() == "a"
    conversation.with_question("a")
    conversation.answered("b")
    assert [turn.content for turn in conversation.turns] == ["s", "a", "b"]
    conversation.with_question("c")
    assert conversation.take_back() == "c"
    assert [turn.content for turn in conversation.turns] == ["s", "a", "b"], "an earlier answer stays"


def test_the_status_line_shows_the_known_counts_and_speeds() -> None:
    assert described(ChatAnswer(0.0)) == "about 0 tokens"
    assert described(ChatAnswer(1.0, 1.5, 1.5, 1, 1)) == "1 token · first after 0.50 s"
    assert described(ChatAnswer(1.0, 1.5, 2.5, 3, 11)) == "11 tokens · first after 0.50 s · 10.0 tokens/s"
    assert described(ChatAnswer(1.0, 1.5, 2.5, 11)) == "about 11 tokens · first after 0.50 s · 10.0 tokens/s"
