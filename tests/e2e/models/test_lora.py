"""LoRA adapters on a real server: chosen by name, beside each other, loaded while it runs, and known to stages that
have been started again."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.llm import LLM
from pipeline.config.settings import Settings
from pipeline.replay.compare import compare
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.stage import prepare
from tests.compiled import link_kernels
from tests.e2e.recovery.test_recovery import kill, pids, post
from tests.e2e.server import Server
from tests.lora.random_adapters import write_adapter

PROMPT = "Once upon a time there was a little fox who lived in a wood. Every morning, the fox"
NAMES = ("one", "two", "three")
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def folders(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different ranks, which change texts."""
    config, root = ModelConfig.load(smollm2_dir), tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, config, rank=rank, seed=rank, scale=0.04)
        for name, rank in zip((*NAMES, "late"), (4, 8, 16, 2), strict=True)
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    table = ", ".join(f'{name} = "{folders[name]}"' for name in NAMES)
    sets = (f"lora.adapters={{{table}}}", "lora.runtime_loading=true", "lora.max_loras=2", "lora.max_lora_rank=16")
    with Server(*sets, "supervisor.max_restarts=1000") as server:
        yield server


def complete(server: Server, model: str | None, **fields: Any) -> str:
    """The text of a completion."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    found = post(server, "/v1/completions", **body | ({} if model is None else {"model": model}))
    assert model is None or found["model"] == model
    return str(found["choices"][0]["text"])


def stream(server: Server, model: str | None, begun: threading.Event | None = None) -> str:
    """The text of a streamed completion. Sets `begun` after some events."""
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | ({} if model is None else {"model": model})).encode(),
        {"Content-Type": "application/json"},
    )
    text = ""
    with urllib.request.urlopen(request, timeout=120) as response:
        for number, line in enumerate(response):
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if number == 20 and begun is not None:
                begun.set()
    return text


@pytest.fixture(scope="module")
def streams(server: Server) -> dict[str | None, str]:
    """The texts of undisturbed streams."""
    return {name: stream(server, name) for name in (None, "one", "two")}


def names(server: Server) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as response:
        return [one["id"] for one in json.load(response)["data"]][1:]


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[str | None, str]:
    """The text with each adapter, and without one."""
    return {name: complete(server, name) for name in (None, *NAMES)}


def test_adapters_of_the_settings_are_served_by_name(server: Server, alone: dict[str | None, str]) -> None:
    assert names(server) == list(NAMES)
    assert len(set(alone.values())) == len(alone), "each adapter has another text"
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        complete(server, "none")
    refused.value.close()


def test_texts_are_the_same_beside_each_other(server: Server, alone: dict[str | None, str]) -> None:
    """Of three adapters at most two run at once; prompts are equal, but KV blocks are not shared between adapters."""
    wanted = [*alone, *alone, *alone]
    with ThreadPoolExecutor(len(wanted)) as threads:
        found = list(threads.map(lambda name: complete(server, name), wanted))
    assert found == [alone[name] for name in wanted]


def test_several_samples_and_grammars_work_with_an_adapter(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.0, "model": "two"}
    one, two = (post(server, "/v1/completions", **body)["choices"] for _ in range(2))
    assert one == two and len({choice["text"] for choice in one}) > 1
    assert complete(server, "two", guided_regex="[0-9]{5}", max_tokens=8, ignore_eos=False).isdigit()


def test_tools_are_called_with_an_adapter(server: Server) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [tool], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 60}
    reply = post(server, "/v1/chat/completions", **body, model="two")
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_embeddings_with_an_adapter(server: Server) -> None:
    found = {
        name: post(server, "/v1/embeddings", input=PROMPT, **({} if name is None else {"model": name}))["data"][0]
        for name in (None, "one", "two")
    }
    assert len({json.dumps(one["embedding"]) for one in found.values()}) == 3


def test_beam_search_with_an_adapter(server: Server) -> None:
    """Beside a search without one, and while the executor dies: what a beam that is sent again names is its adapter."""
    body = {"prompt": PROMPT, "max_tokens": 60, "n": 3, "use_beam_search": True, "ignore_eos": True}

    def search(name: str | None) -> list[str]:
        choices = post(server, "/v1/completions", **body | ({} if name is None else {"model": name}))["choices"]
        return [choice["text"] for choice in choices]

    expected = {name: search(name) for name in (None, "one", "two")}
    assert len({texts[0] for texts in expected.values()}) == 3 and len(set(expected["one"])) == 3
    begun = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        running = {name: threads.submit(search, name) for name in expected}
        threads.submit(stream, server, None, begun)
        assert begun.wait(60)
        kill(pids(server)["execute.0"])
        assert {name: future.result() for name, future in running.items()} == expected
    server.until(lambda health: health["status"] == "ok")
    server.look()


def test_the_python_client_names_an_adapter(server: Server, alone: dict[str | None, str]) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM.attach(server.zmq) as llm:
        for name, text in alone.items():
            (output,) = llm.generate(PROMPT, params, adapter=name, progress=False)
            assert output.outputs[0].text == text


@pytest.mark.parametrize("stage", ["execute", "schedule"])
def test_streams_go_on_when_a_stage_dies(server: Server, streams: dict[str | None, str], stage: str) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        running = {name: threads.submit(stream, server, name, begun) for name in streams}
        assert begun.wait(60)
        kill(pids(server)[f"{stage}.0"])
        assert {name: future.result() for name, future in running.items()} == streams
    server.until(lambda health: health["status"] == "ok")
    server.look()


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(server: Server, folders: dict[str, Path]) -> None:
    def call(path: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()

    call("/v1/load_lora_adapter", lora_name="late", lora_path=str(folders["late"]))
    assert names(server) == [*NAMES, "late"]
    text = complete(server, "late")
    assert text not in {complete(server, name) for name in (None, *NAMES)}
    kill(pids(server)["gateway.0"])
    server.until(lambda health: health["status"] == "ok")
    assert complete(server, "late") == text, "the gateway's successor knows it"
    call("/v1/unload_lora_adapter", lora_name="late")
    assert names(server) == list(NAMES)
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        complete(server, "late")
    refused.value.close()
    server.look()


def test_a_replay_has_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    """Of the executor. Its recording says which adapters there are; it has one of them from a row's options."""
    cache = link_kernels(tiny_model.parent / "cache")
    sets = [f"model={tiny_model}", f"cache_dir={cache}", "execute.kv_cache_bytes=16MiB", "execute.num_threads=1"]
    config = ModelConfig.load(prepare(Settings(model=str(tiny_model), cache_dir=str(cache))))
    folder, recording = write_adapter(tmp_path / "one", config, rank=4), tmp_path / "execute.rec"
    adapters = f'lora.adapters={{one = "{folder}"}}'
    with Server(*sets, adapters, options=("--record", f"execute={recording}")) as server:
        bodies: list[dict[str, Any]] = [{"n": 2, "temperature": 1.0, "seed": 5}, {"temperature": 0}]
        for name in (None, "one"):
            for body in bodies:
                complete(server, name, **body)
        server.until_idle()
    replay("execute", recording, tmp_path / "out", paced=False, inline=False)
    comparison = compare(tmp_path / "out", recording)
    assert comparison.are_same, comparison.difference
    assert comparison.num_same == sum(comparison.sent.values()) > 3


def test_metrics_name_the_adapters(server: Server) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stream, server, "three", begun)
        assert begun.wait(60)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        running.result()
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in line and 'running_lora_adapters="three"' in line
