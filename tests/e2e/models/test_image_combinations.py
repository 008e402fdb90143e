"""Images beside everything else that a request or a server may have: the ids are those of a server without it, or those
of transformers."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pipeline.media import config as media
from pipeline.media import images, processors
from pipeline.runtime.model.model_config import ModelConfig
from tests.e2e.models.test_images import BODIES, CHATS, MAX_TOKENS, chat, choices, make_folder, png, rules
from tests.e2e.recovery.test_recovery import post
from tests.e2e.recovery.test_sleep import sleep, wake_up
from tests.e2e.recovery.test_swap import counted
from tests.e2e.server import Server
from tests.lora.random_adapters import merge, write_adapter
from tests.stages.execute.drafts.test_eagle import write_head
from tests.stages.execute.vision.tiny_towers import normalized

LONG = [chat("Which? ", png(40 + i), max_tokens=150) for i in range(12)]
"""Together, they do not fit into the memory of some servers."""
SMALL = (
    *("execute.kv_cache_bytes=320KiB", "execute.encoder_cache_bytes=24KiB", "schedule.prefix_caching=false"),
    "schedule.encode_max_slowdown=1000",
)
"""80 blocks, and rows of two images. Images don't wait for those that decode, or too few decode at once."""
FLOATS = "execute.kernels=torch", "execute.dtype=float32"
WIDTH = 3


class Combination(NamedTuple):
    """A server that must answer as the one without anything."""

    sets: tuple[str, ...]
    options: tuple[str, ...] = ()
    bodies: list[dict[str, Any]] = BODIES
    metric: str = ""
    """What it has counted then."""


SPECULATES = "speculative.adaptive=false", "speculative.num_speculative_tokens=3"
DRAFTS = "vllm:spec_decode_num_draft_tokens_total"
COMBINATIONS = {
    "tensor parallel": Combination((), ("--tp", "2")),
    "pipeline parallel": Combination(("execute.num_threads=1",), ("--pp", "2")),
    "n-grams": Combination((*SPECULATES, "speculative.method=ngram", "speculative.prompt_lookup_min=1"), metric=DRAFTS),
    "draft model": Combination(
        (*SPECULATES, "speculative.method=draft_model", "speculative.draft={model}"), metric=DRAFTS
    ),
    "eagle": Combination((*SPECULATES, "speculative.method=eagle", "speculative.draft={head}"), metric=DRAFTS),
    "recomputation": Combination(SMALL, bodies=LONG, metric="pipeline_schedule_recomputed_prompt_tokens_total"),
    "swap space": Combination(
        (*SMALL, "execute.swap_bytes=1MiB", "schedule.preemption=swap"),
        bodies=LONG,
        metric="pipeline_schedule_blocks_swapped_in_total",
    ),
    "replicas": Combination(("gateway.replicas=2", "ingest.replicas=2", "detokenize.replicas=2")),
    "steps in flight": Combination(("schedule.max_steps_in_flight=3",)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return make_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def server(model: tuple[Any, Path]) -> Iterator[Server]:
    with Server(*rules(model[1]), "gateway.enable_sleep_mode=true") as server:
        yield server


def prepared(root: Path) -> Path:
    """The folder that a server has made."""
    return next((root / "cache").rglob("media.json")).parent


def together(server: Server, bodies: list[dict[str, Any]]) -> list[list[list[int]]]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: choices(server, body), bodies))


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, list[list[int]]]:
    """By the body, what the server without anything answers to each alone."""
    return {str(body): choices(server, body) for body in (*BODIES, *LONG)}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_ids_are_those_of_a_server_without_it(
    name: str, model: tuple[Any, Path], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    combination, source = COMBINATIONS[name], model[1]
    head = write_head(tmp_path / "head", hidden_size=64, vocab_size=608) if name == "eagle" else None
    sets = [one.format(model=source, head=head) for one in combination.sets]
    with Server(*rules(source), *sets, options=combination.options) as server:
        for bodies in (combination.bodies, combination.bodies[::-1]):
            assert together(server, bodies) == [expected[str(body)] for body in bodies]
        if combination.metric:
            assert counted(server, combination.metric) > 0
        server.until_idle()


def test_a_sleep_changes_nothing(server: Server, expected: dict[str, list[list[int]]]) -> None:
    with ThreadPoolExecutor(1) as client:
        for _ in range(2):
            found = client.submit(together, server, LONG)
            server.until(lambda health: health["running"] > 2)
            sleep(server)
            assert not found.done()
            wake_up(server)
            assert found.result() == [expected[str(body)] for body in LONG]
    server.until_idle()


def test_masks_of_grammars_are_the_same_in_a_batch(server: Server) -> None:
    bodies = [chat("Digits of ", png(seed), guided_regex="[0-9]{5}", ignore_eos=False) for seed in (1, 2, 3)]
    alone = [post(server, CHATS, **body)["choices"][0]["message"]["content"] for body in bodies]
    assert all(re.fullmatch("[0-9]{5}", one) for one in alone)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda body: post(server, CHATS, **body), [*bodies, *BODIES, *bodies]))
    texts = [one["choices"][0]["message"]["content"] for one in found]
    assert texts[: len(bodies)] == texts[-len(bodies) :] == alone


# ------------------------------------------------------------------------------------------- beside transformers


@pytest.fixture(scope="module")
def adapters(model: tuple[Any, Path], server: Server) -> dict[str, Path]:
    """Needs the prepared folder, which the server makes."""
    root = model[1].parent
    config = ModelConfig.load(prepared(root))
    return {f"lora{seed}": write_adapter(root / f"lora{seed}", config, seed=seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def floats(model: tuple[Any, Path], adapters: dict[str, Path]) -> Iterator[Server]:
    """With adapters, in float32."""
    table = ", ".join(f'{name} = "{folder}"' for name, folder in adapters.items())
    with Server(*rules(model[1]), *FLOATS, f"lora.adapters={{{table}}}") as server:
        yield server


def inputs_of(source: Path, prompt: list[int], data: bytes) -> dict[str, torch.Tensor]:
    config = media.load(prepared(source.parent))
    assert config is not None
    ids = torch.tensor([prompt])
    pixels = normalized(processors.process(images.decode(data), config).pixels)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def generated(model: Any, source: Path, prompt: list[int], data: bytes, **options: Any) -> list[int]:
    with torch.inference_mode():
        found = model.generate(
            **inputs_of(source, prompt, data),
            **{"max_new_tokens": MAX_TOKENS, "min_new_tokens": MAX_TOKENS, "do_sample": False, **options},
        )
    return [int(one) for one in found[0, len(prompt) :]]


def test_each_adapter_reads_images_as_the_model_with_its_weights(
    model: tuple[Any, Path], floats: Server, adapters: dict[str, Path]
) -> None:
    """The prefix cache has the same images under the same ids, with other adapters."""
    source, data = model[1], png(50)
    names = [None, *adapters]
    bodies = [chat("Look: ", data, "What?", **({"model": name} if name else {})) for name in names]
    alone = [post(floats, CHATS, **body) for body in bodies]
    assert together(floats, bodies * 2) == [[one["choices"][0]["token_ids"]] for one in alone] * 2
    config = ModelConfig.load(prepared(source.parent))
    for name, found in zip(names, alone, strict=True):
        theirs = make_folder(source.parent / f"again {name}")[0] if name else model[0]
        if name:
            weights = {key.replace(".text_model.", "."): value for key, value in theirs.state_dict().items()}
            merge(SimpleNamespace(state_dict=lambda weights=weights: weights), config, adapters[name])
        expected = generated(theirs, source, found["prompt_token_ids"], data)
        assert found["choices"][0]["token_ids"] == expected
    assert len({str(one["choices"][0]["token_ids"]) for one in alone}) == len(names)


def test_logprobs_of_the_prompt_are_those_of_transformers(model: tuple[Any, Path], floats: Server) -> None:
    data = png(51)
    body = chat("Look: ", data, "What?", prompt_logprobs=0, max_tokens=1)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda each: post(floats, CHATS, **each), [body, BODIES[1], body]))
    found = answers[0]
    prompt = found["prompt_token_ids"]
    with torch.inference_mode():
        logits = model[0](**inputs_of(model[1], prompt, data)).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    expected = [float(logprobs[i - 1, prompt[i]]) for i in range(1, len(prompt))]
    for one in (answers[0], answers[2]):
        ours = [each[str(token)]["logprob"] for token, each in zip(prompt[1:], one["prompt_logprobs"][1:], strict=True)]
        np.testing.assert_allclose(ours, expected, atol=2e-4)


def test_beams_are_those_of_transformers(model: tuple[Any, Path], floats: Server) -> None:
    datas = [png(52), png(53)]
    fields = {"n": WIDTH, "use_beam_search": True, "temperature": 0}
    bodies = [chat("Look: ", data, **fields) for data in datas]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda body: post(floats, CHATS, **body), [*bodies, *BODIES[:2]]))
    for data, found in zip(datas, answers, strict=False):
        options = {"num_beams": WIDTH, "length_penalty": 1.0, "early_stopping": False}
        expected = generated(model[0], model[1], found["prompt_token_ids"], data, **options)
        assert found["choices"][0]["token_ids"] == expected
        assert len({str(one["token_ids"]) for one in found["choices"]}) == WIDTH
