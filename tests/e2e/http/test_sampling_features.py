"""The whole server's sampling features and logprobs equal those of transformers with the same weights."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.server import Server
from tests.stages.prepare.checkpoints import save_folder, tiny_llama

PROMPT = [17, 230, 5, 44, 44, 301, 120, 9]
EXACT = 1e-4


class Tiny:
    """The server and the reference model."""

    def __init__(self, server: Server, model: Any) -> None:
        self._url = server.url
        self.model = model
        self.name = self._post("/v1/models")["data"][0]["id"]

    def post(self, path: str, **fields: Any) -> Any:
        return self._post(path, json.dumps({"model": self.name, **fields}).encode())

    def _post(self, path: str, body: bytes | None = None) -> Any:
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, body, headers), timeout=60) as response:
            return json.load(response)

    def complete(self, **fields: Any) -> Any:
        """A greedy completion of PROMPT, of six tokens."""
        plain = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post("/v1/completions", **{**plain, **fields})["choices"][0]

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """[len(ids), V]: the logprobs of the next id at each position."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].double(), -1).numpy()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    model = tiny_llama(initializer_range=0.15)
    folder = save_folder(tmp_path_factory.mktemp("models") / "tiny", model)
    sets = ["dtype=float32", "kernels=torch", "kv_cache_bytes=16MiB", "num_threads=1"]
    cache: Path = folder.parent / "cache"
    with Server(f"model={folder}", f"cache_dir={cache}", *(f"execute.{one}" for one in sets)) as server:
        yield Tiny(server, model)


def test_prompts_and_outputs_have_the_model_s_logprobs(tiny: Tiny) -> None:
    choice = tiny.complete(logprobs=3, prompt_logprobs=2)
    ids = choice["token_ids"]
    logprobs = tiny.logprobs(PROMPT + ids)
    assert ids == logprobs[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    found = choice["logprobs"]["token_logprobs"]
    expected = [logprobs[len(PROMPT) - 1 + index, token] for index, token in enumerate(ids)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)
    for index, top in enumerate(choice["logprobs"]["top_logprobs"]):
        most_likely = np.sort(logprobs[len(PROMPT) - 1 + index])[::-1][:3]
        # By their texts, which are equal for bytes of incomplete characters.
        assert 0 < len(top) <= 4 and all(min(abs(one - most_likely)) < EXACT for one in top.values())
    first, *entries = choice["prompt_logprobs"]
    assert first is None and len(entries) == len(PROMPT) - 1
    for index, entry in enumerate(entries):
        assert str(PROMPT[index + 1]) in entry and set(map(int, entry)) >= set(logprobs[index].argsort()[-2:].tolist())
        assert {one["rank"] for one in entry.values()} >= {1, 2}
        for token, one in entry.items():
            assert abs(one["logprob"] - logprobs[index, int(token)]) < EXACT


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_model_s_hidden_states(tiny: Tiny, pooling: str) -> None:
    texts = [PROMPT, PROMPT[:1], PROMPT * 6]
    vectors = tiny.post("/v1/embeddings", input=texts, pooling=pooling)["data"]
    for entry, ids in zip(vectors, texts, strict=True):
        with torch.inference_mode():
            states = tiny.model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        vector = states.mean(0) if pooling == "mean" else states[-1]
        np.testing.assert_allclose(entry["embedding"], vector / np.linalg.norm(vector), rtol=0, atol=EXACT)


def test_sampling_features_are_applied(tiny: Tiny) -> None:
    plain = tiny.complete()["token_ids"]
    assert tiny.complete(logit_bias={"77": 100})["token_ids"] == [77] * 6
    assert tiny.complete(logit_bias={str(plain[0]): -100})["token_ids"][0] != plain[0]
    assert set(tiny.complete(allowed_token_ids=[40, 50])["token_ids"]) <= {40, 50}
    ended = tiny.complete(logit_bias={"77": 100}, stop_token_ids=[77], min_tokens=3)
    assert 77 not in ended["token_ids"][:3] and len(ended["token_ids"]) in (3, 4) and ended["finish_reason"] == "stop"
    penalized = tiny.complete(repetition_penalty=10.0, max_tokens=12)["token_ids"]
    assert len(set(penalized)) == 12, "hardly any token repeats"


def test_a_request_without_any_allowed_token_fails_and_others_continue(tiny: Tiny) -> None:
    """At once, found by ingest, or later, found by the executor."""
    (letter,) = tiny.post("/tokenize", prompt="q")["tokens"]
    for features, words in (
        ({"allowed_token_ids": [77], "stop_token_ids": [77], "min_tokens": 2}, "leaves no first token"),
        ({"allowed_token_ids": [letter], "bad_words": ["qq"]}, "No token can be sampled"),
    ):
        with pytest.raises(urllib.error.HTTPError) as failed:
            tiny.complete(**features)
        with failed.value as response:
            error = json.load(response)["error"]
        assert (response.code, error["param"]) == (400, "allowed_token_ids") and words in error["message"]
    assert len(tiny.complete()["token_ids"]) == 6
