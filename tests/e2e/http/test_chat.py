"""`pipeline chat` with a model, an embedded server and a running one; and what an `LLM` shows in a terminal."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.client.scripts import ROOT, alive
from tests.e2e.conftest import SMALL, tiny
from tests.e2e.embedded import family_of
from tests.e2e.server import Server
from tests.terminal import CTRL_D, Terminal

CHAT = [sys.executable, "-m", "pipeline", "chat"]


def own(folder: Path) -> list[str]:
    """Options for an embedded server with the tiny model."""
    sets = (
        {"supervisor.max_restarts": 0}
        | {f"execute.{key}": value for key, value in SMALL.items()}
        | {"cache_dir": tiny(folder)["cache_dir"]}
    )
    return ["--model", str(folder), *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]


def test_an_embedded_server_starts_and_ends_with_the_chat(tiny_model: Path) -> None:
    command = [*CHAT, *own(tiny_model), "--max-tokens", "8", "--temperature", "0"]
    with Terminal(command, ROOT) as terminal:
        terminal.wait_for_prompt(timeout_s=90)
        assert "starting" in terminal.text, "the start is shown"
        _, *family = family_of(terminal.process.pid, 7)
        terminal.enter("Hello", "8 tokens")
        terminal.wait_for_prompt()
        (execute,) = [process for process in family if process.cmdline()[0] == "pipeline: execute.0"]
        execute.kill()
        terminal.enter("Still there?", "execute.0 died: was killed by SIGKILL")
        assert terminal.end() == 1
        assert not alive(family)


def test_ctrl_d_ends_the_chat_and_its_server(tiny_model: Path) -> None:
    with Terminal([*CHAT, *own(tiny_model)], ROOT) as terminal:
        terminal.wait_for_prompt(timeout_s=90)
        family = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert not alive(family)


def test_a_failed_start_prints_the_server_s_error() -> None:
    done = subprocess.run([*CHAT, "--model", "/no/such"], cwd=ROOT, input="Hi\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "pipeline chat: error: the server can't start: prepare: model '/no/such': no such folder or file"
    )
    assert done.stderr.count("\n") == 1


def test_a_running_server_answers_each_line_of_a_pipe(server: Server) -> None:
    done = subprocess.run(
        [*CHAT, "--url", server.url, "--temperature", "0", "--max-tokens", "40"],
        cwd=ROOT,
        input="What is the capital of Greece?\n/reset\nWhat is the capital of Greece?\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == second
    assert "Athens" in first


def test_a_stopped_answer_is_aborted_in_the_server(server: Server) -> None:
    with Terminal([*CHAT, "--url", server.url], ROOT) as terminal:
        terminal.wait_for_prompt()
        terminal.type("Write a very long story about the sea.\r")
        server.until(lambda health: health["running"] > 0)
        terminal.interrupt("stopped")
        server.until_idle()
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_a_full_context_is_reported_and_can_be_reset(server: Server) -> None:
    with Terminal([*CHAT, "--url", server.url, "--max-tokens", "8180"], ROOT) as terminal:
        terminal.wait_for_prompt()
        terminal.enter("Hello", "the conversation is too long for the model: /reset, then /retry asks again")


def test_an_llm_shows_its_start_and_its_progress_on_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pipeline import LLM, SamplingParams
llm = LLM(**{tiny(tiny_model) | {"model": str(tiny_model)}!r})
print("served")
llm.generate((str(i) for i in range(5)), progress=False)
llm.generate(["silent"], use_tqdm=False)
print("silent so far")
llm.generate([str(i) for i in range(300)], SamplingParams(max_tokens=3, ignore_eos=True))
llm.generate((str(i) for i in range(40)), SamplingParams(max_tokens=3, ignore_eos=True))
""")
    with Terminal([sys.executable, str(script)], tmp_path) as terminal:
        assert "starting" in terminal.wait_for("served", timeout_s=90)
        assert "prompts" not in terminal.wait_for("silent so far").partition("silent so far")[0]
        shown = terminal.wait_for("300/300")
        terminal.wait_for("40/40")
        assert "tokens/s" in shown
        assert terminal.end() == 0
