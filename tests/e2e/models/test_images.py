"""Images in chats, end to end: a tiny SmolVLM on a CPU. Its text is that of transformers; other images in the batch and
the death of a stage do not change it."""

import base64
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.cli.replay.replaying import replay
from pipeline.media import config as media
from pipeline.media import images, processors
from pipeline.replay.compare import compare
from tests.compiled import link_kernels
from tests.e2e.observed import Metrics, gained
from tests.e2e.recovery.test_recovery import RESTARTED, assert_restarted, kill, pids, post
from tests.e2e.server import Server
from tests.stages.execute.vision.tiny_towers import ONEVISION, QWEN, TEXT, VARIANTS, Variant, make, normalized, save
from tests.stages.ingest.media.test_prompt_images import SMOLVLM

ROWS = 9  # of a tile
TILE = 48
MAX_TOKENS = 12
CHATS = "/v1/chat/completions"


class Family(NamedTuple):
    name: str
    """In `VARIANTS`; empty for LLaVA-OneVision."""
    image_processor: dict[str, Any]
    processor: dict[str, Any]


IDEFICS3 = Family(
    "idefics3",
    {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
    {"image_seq_len": ROWS},
)
FAMILIES = {
    "idefics3": IDEFICS3,
    "llava": Family("llava", {}, {"num_additional_image_tokens": 1}),
    "llava, siglip": Family("llava, siglip", {}, {}),
    "llava_onevision": Family("", {}, {}),
    "gemma3": Family("gemma3", {}, {"image_seq_length": ROWS}),
    "mistral3": Family("mistral3", {"size": {"longest_edge": TILE}}, {}),
    "llava, pixtral": Family("llava, pixtral, padded heads", {"size": {"longest_edge": TILE}}, {}),
}


def make_folder(folder: Path, family: Family = IDEFICS3) -> tuple[Any, Path]:
    """A tiny model in transformers, and its folder."""
    found = (VARIANTS | QWEN)[family.name] if family.name else ONEVISION
    text = {**found.changes.get("text_config", TEXT), "max_position_embeddings": 1024}
    read = {**found.processor, **family.image_processor}
    variant = Variant(found.kind, found.vision, {**found.changes, "text_config": text}, processor=read)
    model = make(variant)
    source = save(folder, variant, model)
    (source / "processor_config.json").write_text(json.dumps(family.processor))
    shown = {"gemma3": "<start_of_image>", **dict.fromkeys(QWEN, "<start_of_image><image><end_of_image>")}
    placeholder = shown.get(family.name, "<image>")
    (source / "chat_template.jinja").write_text(SMOLVLM.replace("<image>", placeholder), encoding="utf-8")
    image_id = json.loads((source / "config.json").read_bytes())["image_token_id"]
    model.config.image_token_id = model.model.image_token_id = image_id
    return model, source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return make_folder(tmp_path_factory.mktemp("images"))


def rules(source: Path) -> tuple[str, ...]:
    cache = link_kernels(source.parent / "cache")
    return f"model={source}", f"cache_dir={cache}", "execute.encoder_cache_bytes=1MiB"


@pytest.fixture(scope="module")
def server(model: tuple[Any, Path]) -> Iterator[Server]:
    with Server(*rules(model[1]), "supervisor.max_restarts=100") as server:
        yield server


def png(seed: int, size: tuple[int, int] = (90, 60)) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (size[1] // 10, size[0] // 10, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(values).resize(size).save(file, "PNG")
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat(*parts: str | bytes, **others: Any) -> dict[str, Any]:
    """A body with a user's message of texts and images."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image_url", "image_url": {"url": url(one)}}
        for one in parts
    ]
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **fields, **others}


def theirs(model: Any, folder: Path, prompt: list[int], *data: bytes) -> list[int]:
    """The ids that transformers generates."""
    config = media.load(folder)
    assert config is not None
    decoded = [images.decode(one) for one in data]
    pixels = normalized(np.concatenate([processors.process(one, config).pixels for one in decoded]))
    inputs: dict[str, Any] = {"pixel_values": pixels}
    match config:
        case media.Idefics3():
            inputs = {"pixel_values": pixels[None]}
        case media.LlavaOnevision():
            inputs = {
                "pixel_values": pixels[None],
                "image_sizes": torch.tensor([[one.height, one.width] for one in decoded]),
            }
        case media.Pixtral():
            inputs["image_sizes"] = torch.tensor([pixels.shape[2:]])
    ids = torch.tensor([prompt])
    if isinstance(config, media.Gemma3):
        inputs["token_type_ids"] = (ids == config.row_id).long()
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **inputs,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
    return [int(one) for one in found[0, len(prompt) :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, source = make_folder(tmp_path, FAMILIES[family])
    chats: list[tuple[str | bytes, ...]] = [("What is it? ", png(1)), (png(2, (40, 30)), "and?")]
    if family == "idefics3":
        chats.append((png(2, (40, 40)), "and", png(3), "differ in?"))
    with Server(*rules(source), "execute.kernels=torch", "execute.dtype=float32") as server:
        folder = next((tmp_path / "cache").rglob("media.json")).parent
        for parts in chats:
            found = post(server, CHATS, **chat(*parts))
            expected = theirs(model, folder, found["prompt_token_ids"], *(p for p in parts if isinstance(p, bytes)))
            assert found["choices"][0]["token_ids"] == expected
            assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"])
        first, other = (post(server, CHATS, **chat("What is it? ", png(seed))) for seed in (1, 4))
        assert first["prompt_token_ids"] == other["prompt_token_ids"], "only the pixels differ"
        assert first["choices"][0]["token_ids"] != other["choices"][0]["token_ids"]


def answer(server: Server, body: dict[str, Any]) -> tuple[list[int], int]:
    """The ids of the reply, and how many tokens of the prompt came from the prefix cache."""
    found = post(server, CHATS, **body)
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_image_that_comes_again_is_in_the_prefix_cache(server: Server) -> None:
    body = chat("Look: ", png(10), "What is it?")
    first, num_first = answer(server, body)
    again, num_again = answer(server, body)
    other, num_other = answer(server, chat("Look: ", png(11), "What is it?"))
    assert again == first != other
    assert num_again > 4 * ROWS > num_other
    assert num_first <= num_other


def test_images_are_counted(server: Server) -> None:
    before = Metrics(server)
    for _ in range(2):
        answer(server, chat("Count: ", png(12), "And?"))
    refused(server, chat("x", b"no image"))
    names = "ingest_images", "ingest_images_rejected", "encoder_rows", "encoder_cache_queries"
    assert [gained(server, before, f"pipeline_{name}_total") for name in names] == [3, 1, 5 * ROWS, 1]
    assert gained(server, before, "vllm:mm_cache_queries_total") == 3
    assert gained(server, before, "vllm:mm_cache_hits_total") == 1
    assert gained(server, before, "pipeline_ingest_image_decode_seconds_total") > 0
    assert gained(server, before, "pipeline_encoder_seconds_total") > 0


BODIES = [
    chat("Which? ", png(20)),
    chat(png(21, (30, 90)), png(20), "Same?"),
    chat("No image."),
    chat(png(22), "And?", n=2, temperature=1, seed=5),
    chat(png(20), "Which?", max_tokens=40),
]


def choices(server: Server, body: dict[str, Any]) -> list[list[int]]:
    return [one["token_ids"] for one in post(server, CHATS, **body)["choices"]]


@pytest.fixture(scope="module")
def alone(server: Server) -> list[list[list[int]]]:
    return [choices(server, body) for body in BODIES]


def test_other_images_in_the_batch_change_nothing(server: Server, alone: list[list[list[int]]]) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda body: choices(server, body), BODIES * 4))
    assert found == alone * 4
    server.until_idle()


@pytest.mark.parametrize("stage", RESTARTED)
def test_no_client_notices_the_death_of_a_stage(server: Server, alone: list[list[list[int]]], stage: str) -> None:
    before, killed, lock = pids(server), threading.Event(), threading.Lock()
    num_answers = 0

    def client(first: int) -> None:
        nonlocal num_answers
        for number in range(first, first + 3 * len(BODIES)):
            index = number % len(BODIES)
            body = BODIES[index]
            if killed.is_set() and number % 2:  # images that no cache of the new process has
                body = {**body, "cache_salt": f"{stage} {number}"}
            assert choices(server, body) == alone[index]
            with lock:
                num_answers += 1
                if num_answers >= 2 * len(BODIES) and not killed.is_set():
                    killed.set()
                    kill(before[f"{stage}.0"])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(client, first) for first in range(4)]:
            done.result()
    server.until(lambda health: health["status"] == "ok")
    assert_restarted(before, pids(server), stage)
    server.look()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Steps of fewer tokens than images have, and so few blocks that sequences are preempted."""
    _, source = make_folder(tmp_path_factory.mktemp("gemma"), FAMILIES["gemma3"])
    limits = "schedule.max_num_batched_tokens=16", "execute.kv_cache_bytes=64KiB", "schedule.max_num_seqs=4"
    with Server(*rules(source), "supervisor.max_restarts=100", *limits) as server:
        yield server


def num_preemptions(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        (found,) = re.findall(r"^vllm:num_preemptions_total\S* (\S+)", response.read().decode(), re.MULTILINE)
    return float(found)


def test_images_whose_positions_see_each_other(gemma: Server) -> None:
    """In any batch, behind a prefix hit, after preemption, and after the death of each stage."""
    samples = chat(png(22), "And?", n=4, temperature=1, seed=5, max_tokens=120)
    bodies = [BODIES[0], {**BODIES[1], "max_tokens": 60}, BODIES[2], samples]
    alone = [choices(gemma, body) for body in bodies]
    assert num_preemptions(gemma) > 0
    assert choices(gemma, {**samples, "n": 2}) == alone[3][:2]
    for least in (-1, 2 * ROWS):  # at first, others may have evicted it
        ids, num_cached = answer(gemma, bodies[1])
        assert [ids] == alone[1] and num_cached > least
    for stage in ("", *RESTARTED):
        before = pids(gemma)
        with ThreadPoolExecutor(8) as threads:
            asked = [{**body, "cache_salt": f"{stage} {turn % 2}"} for turn in range(3) for body in bodies]
            found = threads.map(lambda body: choices(gemma, body), asked)
            if stage:
                kill(before[f"{stage}.0"])
            assert list(found) == alone * 3
        if not stage:
            continue
        gemma.until(lambda health: health["status"] == "ok")
        assert_restarted(before, pids(gemma), stage)


@pytest.mark.parametrize(
    ("image", "param", "words"),
    [
        ("https://example.com/a.png", "image_url.url", "is an https: URL, and this server fetches none"),
        (url(b"<svg/>"), "image_url.url", "is in no format that is read here"),
        (url(png(1)[:-40]), "image_url.url", "is no valid PNG image"),
    ],
)
def test_a_bad_image_is_named(server: Server, image: str, param: str, words: str) -> None:
    body = chat("x")
    body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": image}})
    error = refused(server, body)
    assert error["param"] == f"messages[0].content[1].{param}" and words in error["message"]


def refused(server: Server, body: dict[str, Any]) -> Any:
    with pytest.raises(HTTPError) as error:
        post(server, CHATS, **body)
    assert error.value.code == 400
    return json.loads(error.value.read())["error"]


def test_a_photo_of_a_camera_is_answered(server: Server) -> None:
    """Its body is larger than that of a text may be."""
    pixels, file = np.random.default_rng(31).integers(0, 256, (1800, 1600, 3), np.uint8), BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90, subsampling=0)
    assert 8 * 1024**2 > len(file.getvalue()) > 4 * 1024**2
    assert len(answer(server, chat(file.getvalue(), "What is it?"))[0]) == MAX_TOKENS


def test_all_dialects_answer_alike(server: Server) -> None:
    data = base64.b64encode(png(30)).decode()
    one, two = ({"type": "text", "text": "Which?"}, {"type": "image", "source": {"type": "base64", "data": data}})
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0}
    options = {"num_predict": MAX_TOKENS, "temperature": 0, "top_k": 0, "top_p": 1}
    openai = post(server, CHATS, **chat(png(30), "Which?", ignore_eos=False))
    expected = openai["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": [two, one]}]
    found = post(server, "/v1/messages", model="source", messages=messages, **fields)
    assert "".join(block["text"] for block in found["content"]) == expected
    usage = found["usage"]
    num = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert num == openai["usage"]["prompt_tokens"]
    counted = post(server, "/v1/messages/count_tokens", model="source", messages=messages)
    assert counted["input_tokens"] == num
    said = {"role": "user", "content": "Which?", "images": [data]}
    found = post(server, "/api/chat", model="source", messages=[said], stream=False, options=options)
    assert found["message"]["content"] == expected and found["prompt_eval_count"] == num
    found = post(server, "/api/generate", model="source", prompt="Which?", images=[data], stream=False, options=options)
    assert found["response"] == expected
    parts = [{"type": "input_image", "image_url": url(png(30))}, {"type": "input_text", "text": "Which?"}]
    asked = {"model": "source", "input": [{"role": "user", "content": parts}]}
    found = post(server, "/v1/responses", **asked, max_output_tokens=MAX_TOKENS, temperature=0)
    assert found["output"][0]["content"][0]["text"] == expected and found["usage"]["input_tokens"] == num
    more = {"model": "source", "input": "And?", "previous_response_id": found["id"]}
    assert post(server, "/v1/responses", **more, max_output_tokens=4)["usage"]["input_tokens"] > num
    for route, body, param in (
        ("/api/chat", {"messages": [{**said, "images": ["YWJj"]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "Which?", "images": ["YWJj"]}, "images[0]"),
    ):
        with pytest.raises(HTTPError) as error:
            post(server, route, model="source", **body)
        assert f"the image '{param}' is in no format" in json.loads(error.value.read())["error"]


def test_lists_of_models_say_that_it_takes_images(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
        assert json.load(response)["data"][0]["input_modalities"] == ["text", "image"]
    assert "vision" in post(server, "/api/show", model="source")["capabilities"]


def test_tokenize_counts_the_rows_of_images(server: Server) -> None:
    body = chat("a", png(1))
    found = post(server, "/tokenize", messages=body["messages"])
    assert found["count"] == post(server, CHATS, **body)["usage"]["prompt_tokens"] > 5 * ROWS


STAGES = ("gateway", "ingest", "schedule", "execute")


@pytest.fixture(scope="module")
def recordings(model: tuple[Any, Path]) -> dict[str, Path]:
    """Of a server that has had images."""
    files = {stage: model[1].parent / f"{stage}.rec" for stage in STAGES}
    options = tuple(part for stage, path in files.items() for part in ("--record", f"{stage}={path}"))
    with Server(*rules(model[1]), options=options) as server:
        for body in (*BODIES, BODIES[0]):
            choices(server, body)
        server.until_idle()
    return files


@pytest.mark.parametrize("stage", STAGES)
def test_a_replay_of_a_stage_sends_the_same(recordings: dict[str, Path], tmp_path: Path, stage: str) -> None:
    replay(stage, recordings[stage], tmp_path / "out", paced=False, inline=True)
    comparison = compare(tmp_path / "out", recordings[stage])
    assert comparison.are_same, comparison.difference
    assert comparison.num_same == sum(comparison.sent.values()) > 3


def test_without_a_cache_for_rows_the_error_says_what_to_set(model: tuple[Any, Path]) -> None:
    with Server(*rules(model[1])[:2], "execute.encoder_cache_bytes=0") as server:
        error = refused(server, chat("x", png(1)))
        assert error["param"] == "messages[0].content[1]" and error["code"] == "unsupported"
        assert "takes none, because execute.encoder_cache_bytes is 0" in error["message"]
        assert choices(server, chat("No image."))
