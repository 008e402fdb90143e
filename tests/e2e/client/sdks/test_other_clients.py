"""Third-party clients of OpenAI's, Anthropic's and Ollama's APIs, with the real server and model.

Each script in tests/e2e/client/clients uses one client and checks its replies. The Python ones have a separate
environment.
"""

import os
from pathlib import Path

import pytest

from tests.e2e.client.packages import node_with, python_with, run
from tests.e2e.client.sdks.test_openai_client import MODEL
from tests.e2e.server import Server

CLIENTS = Path(__file__).parent.parent / "clients"
RUN_S = 120.0
NOT_INHERITED = (
    "ANTHROPIC_",
    "OPENAI_",
    "OLLAMA_",
    "LANGCHAIN_",
    "LANGSMITH_",
    "LLM_",
    "INSTRUCTOR_",
    "TIKTOKEN_",
    "PYTEST_",
    "PYTHON",
    "NODE_",
)
"""Prefixes of environment variables that change a client's behavior."""


@pytest.fixture(scope="module")
def client_python() -> Path:
    return python_with(CLIENTS / "requirements.txt")


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node_with(CLIENTS, tmp_path_factory.mktemp("node") / "clients")


def environ(server: Server, model_dir: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return inherited | {"PIPELINE_URL": server.url, "PIPELINE_MODEL": MODEL, "PIPELINE_MODEL_DIR": str(model_dir)}


@pytest.mark.parametrize("file", ["with_langchain.py", "with_instructor.py", "with_llm.py"])
def test_python_clients_work(file: str, client_python: Path, server: Server, smollm2_dir: Path) -> None:
    own = ["-c", "pytest.ini", "--rootdir", str(CLIENTS), "--confcutdir", str(CLIENTS)]
    run([str(client_python), "-m", "pytest", *own, file], CLIENTS, RUN_S, environ(server, smollm2_dir))
    server.until_idle()


@pytest.mark.parametrize(
    "file", ["with_openai.mjs", "with_anthropic.mjs", "with_ollama.mjs", "with_eventsource_parser.mjs"]
)
def test_javascript_clients_work(file: str, node_folder: Path, server: Server, smollm2_dir: Path) -> None:
    run(["node", "--test", "--test-reporter=spec", file], node_folder, RUN_S, environ(server, smollm2_dir))
    server.until_idle()
