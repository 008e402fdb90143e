"""A model from the hub, served by the real server: a Qwen3 with a sliding window in some layers."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.server import Server
from tests.stages.prepare import checkpoints
from tests.stages.prepare.fake_hub import COMMIT, FakeHub, Repo

NUM_TOKENS = 24
PROMPTS = ["The quick brown fox", "x = [1, 2,  3]\n    if x:\n        return 42", "The quick brown fox, 12 345 dogs."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = checkpoints.tiny(
        "qwen3", head_dim=32, use_sliding_window=True, sliding_window=11, max_window_layers=1, initializer_range=0.125
    )
    return checkpoints.save_folder(tmp_path / "tiny", model, tokenizer_config={"eos_token": "</s>"})


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repos["org/tiny-qwen3"] = Repo({COMMIT: {path.name: path.read_bytes() for path in folder.iterdir()}})
    yield hub
    hub.close()


@torch.inference_mode()
def greedy(folder: Path, text: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    begin = len(ids)
    while len(ids) < begin + NUM_TOKENS:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[begin:]


def test_a_hub_id_is_served_under_its_name_with_the_output_of_transformers(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    sets = (
        *("model=org/tiny-qwen3", f"cache_dir={tmp_path / 'cache'}", "execute.dtype=float32", "execute.num_threads=1"),
        *("execute.kernels=torch", f"execute.kv_cache_bytes={2**22}", "schedule.max_num_batched_tokens=16"),
    )
    with Server(*sets) as server:
        assert f"downloading org/tiny-qwen3 at {COMMIT[:12]}: done" in server.log()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == ["org/tiny-qwen3"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for prompt in (*PROMPTS, PROMPTS[0]):
            reply = client.completions.create(
                model="org/tiny-qwen3",
                prompt=prompt,
                temperature=0,
                max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True},
            )
            assert reply.choices[0].text == tokenizer.decode(greedy(folder, prompt), skip_special_tokens=True)


def test_a_model_missing_on_the_hub_is_an_error_that_names_it(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    with Server("model=org/none", f"cache_dir={tmp_path / 'cache'}", until_ready=False) as server:
        line = server.wait_for_line("has no model org/none", 60.0)
        assert f"{hub.url} has no model org/none, or it is private: check the name" in line
        assert server.process.wait(30.0) == 1
        assert "Traceback" not in server.log()
