"""`LLM`: batches, their order, their errors, and cleanup."""

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import LLM, SamplingParams
from pipeline.client.progress import BatchBar
from pipeline.errors import PromptError, ServerFailed, StartError, UserError
from tests.e2e.client.scripts import alive
from tests.e2e.conftest import tiny
from tests.e2e.embedded import family_of, load_of, until_idle
from tests.e2e.server import Server

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


# ------------------------------------------------------------------------------------------------------------ outputs


def test_outputs_have_the_shape_of_vllm_s(llm: LLM) -> None:
    (output,) = llm.generate("Hello", GREEDY)
    assert output.prompt == "Hello"
    assert output.finished
    assert output.prompt_token_ids
    (completion,) = output.outputs
    assert completion.index == 0
    assert completion.finished()
    assert completion.finish_reason == "length"
    assert completion.stop_reason is None
    assert len(completion.token_ids) == 4
    (again,) = llm.generate([output.prompt_token_ids], GREEDY)
    assert again.prompt is None
    assert again.outputs == output.outputs
    assert again.request_id != output.request_id


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    stop = llm.generate("a", GREEDY)[0].outputs[0].token_ids[1]
    prompts: list[Any] = ["a", [90, 91], {"prompt": "a"}, {"prompt_token_ids": (90, 91)}]
    outputs = llm.generate(
        prompts,
        [
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            SamplingParams(temperature=1, max_tokens=2, n=3, seed=7, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[stop], ignore_eos=True),
            SamplingParams(temperature=1, max_tokens=2, n=3, seed=7, ignore_eos=True),
        ],
    )
    assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [[1], [2] * 3, [2], [2] * 3]
    assert [one.index for one in outputs[1].outputs] == [0, 1, 2]
    assert outputs[1].outputs == outputs[3].outputs
    assert outputs[2].outputs[0].finish_reason == "stop"
    assert outputs[2].outputs[0].stop_reason == stop


def test_chats_use_the_model_s_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat, text, open_end = (
        llm.chat(messages, GREEDY)[0],
        llm.generate("system: Be brief.\nuser: Hi\nassistant:", GREEDY)[0],
        llm.chat([messages], GREEDY, add_generation_prompt=False)[0],
    )
    assert chat.prompt_token_ids == text.prompt_token_ids
    assert chat.outputs == text.outputs
    assert open_end.prompt_token_ids == llm.generate("system: Be brief.\nuser: Hi\n", GREEDY)[0].prompt_token_ids
    several = llm.chat(([{"role": "user", "content": str(i)}] for i in range(3)), GREEDY)
    assert len(several) == 3


def test_an_empty_list_returns_an_empty_list(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate(iter(())) == []
    assert llm.chat([]) == []


def test_thousands_of_prompts_keep_their_order_and_memory_is_bounded(llm: LLM) -> None:
    assert llm.server is not None
    server = psutil.Process(llm.server.pid)
    processes = [psutil.Process(), server, *server.children(recursive=True)]
    window = llm.info.max_open_requests
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    num_read = num_ended = furthest = 0

    def prompts() -> Iterator[str]:
        nonlocal num_read, furthest
        for i in range(4_000):
            num_read += 1
            furthest = max(furthest, num_read - num_ended)
            yield f"Prompt {i}"

    class Counted(BatchBar):
        def done(self) -> None:
            nonlocal num_ended
            num_ended += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.client.llm.BatchBar", Counted)
        outputs = llm.generate(prompts(), params)
    assert [output.prompt for output in outputs] == [f"Prompt {i}" for i in range(4_000)]
    assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)
    assert furthest <= window, "prompts are read only as the window allows"
    # torch keeps buffers for each number of tokens that a step has had, and which numbers come depends on the load. So
    # memory may grow at first, but it must stop growing.
    passes = []
    while not passes or (max(passes[-1].values()) >= 24 * 1024**2 and len(passes) < 4):
        before = [process.memory_info().rss for process in processes]
        llm.generate([f"Prompt {i}" for i in range(4_000)], params)
        grown = [process.memory_info().rss - was for process, was in zip(processes, before, strict=True)]
        passes.append({process.name(): num_bytes for process, num_bytes in zip(processes, grown, strict=True)})
    assert max(passes[-1].values()) < 24 * 1024**2, f"10,000 outputs are a few MiB, and nothing else stays: {passes}"
    until_idle(llm)


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_list_is_checked_before_anything_is_sent(llm: LLM) -> None:
    before = load_of(llm)["counters"]["prompt_tokens"]
    with pytest.raises(PromptError, match=re.escape("prompts[2] must be a text or a list of token ids, not None")):
        llm.generate(["a", "b", None], GREEDY)  # type: ignore[arg-type]
    with pytest.raises(
        PromptError, match=re.escape("prompts[1][0]: token id 9999 is out of vocabulary, the model's ids are 0..607")
    ):
        llm.generate([[1], [9999]], GREEDY)
    with pytest.raises(PromptError, match=re.escape("sampling_params has 1 entries for 2 prompts")):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(PromptError, match=re.escape("messages[1][0]['role'] must be one of")):
        llm.chat([[{"role": "user", "content": "a"}], [{"role": "robot", "content": "a"}]], GREEDY)
    with pytest.raises(PromptError, match="prompts can't be int"):
        llm.generate(3)  # type: ignore[arg-type]
    assert load_of(llm)["counters"]["prompt_tokens"] == before


def test_an_error_of_the_server_names_the_prompt_s_index(llm: LLM) -> None:
    long = "word " * 400
    with pytest.raises(PromptError, match=r"prompts\[17\]: this model's maximum context length is 256") as caught:
        llm.generate([*(["short"] * 17), long, *(["short"] * 50)], GREEDY)
    assert (caught.value.index, caught.value.status, caught.value.code) == (17, 400, "context_length_exceeded")
    with pytest.raises(PromptError, match=r"^prompt: this model's maximum context length"):
        llm.generate(long, GREEDY)
    until_idle(llm)
    assert len(llm.generate(["still", "there"], GREEDY)) == 2


def test_an_oversized_conversation_is_an_error_with_its_index(llm: LLM) -> None:
    small = [{"role": "user", "content": "a"}]
    large = [{"role": role, "content": "x" * 3_000_000} for role in ("user", "assistant")]
    words = r"the request has 60002\d\d bytes; this server accepts at most 4194304$"
    with pytest.raises(PromptError, match=rf"^messages\[1\]: {words}") as caught:
        llm.chat([small, large, small], GREEDY)
    assert (caught.value.index, caught.value.status, caught.value.code) == (1, 413, "body_too_large")
    with pytest.raises(PromptError, match=rf"^messages: {words}"):
        llm.chat(large, GREEDY)
    with pytest.raises(PromptError, match=r"^messages: .*surrogates not allowed"):
        llm.chat([{"role": "user", "content": "a", "name": "\ud800"}], GREEDY)
    until_idle(llm)
    assert len(llm.chat([small, small], GREEDY)) == 2


def test_an_iterator_that_raises_ends_generate_and_aborts_open_requests(llm: LLM) -> None:
    class OwnError(Exception):
        pass

    def prompts() -> Iterator[str]:
        yield from ("a", "b")
        raise OwnError

    with pytest.raises(OwnError):
        llm.generate(prompts(), SamplingParams(max_tokens=200, ignore_eos=True))
    until_idle(llm)


def test_threads_can_share_one_llm(llm: LLM) -> None:
    results: dict[int, list[str | None]] = {}

    def work(number: int) -> None:
        outputs = llm.generate((f"{number}.{i}" for i in range(1200)), SamplingParams(max_tokens=1))
        results[number] = [output.prompt for output in outputs]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [f"{number}.{i}" for i in range(1200)] for number in range(3)}


def test_it_works_inside_a_running_event_loop_as_in_a_notebook(llm: LLM) -> None:
    async def cell() -> None:
        assert len(llm.generate(["a", "b"], GREEDY)) == 2
        assert len(await asyncio.to_thread(llm.generate, ["a", "b"], GREEDY)) == 2

    asyncio.run(cell())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/no/such/model"}, "the server can't start: prepare: model '/no/such/model': no such"),
        ({"shedule": {"max_num_seqs": 8}}, "LLM(): there is no section [shedule]; did you mean schedule?"),
        (
            {"schedule": {"max_num_seqs": 0}},
            "LLM(): schedule.max_num_seqs: needs a whole number from 1 to 4096, got the number 0",
        ),
        (
            {"max_model_len": "long"},
            'LLM(): max_model_len: needs a whole number from 0 to 2147483647, got the text "long"',
        ),
        ({"config": "no-such-preset"}, "no-such-preset: no such file, and no preset of that name"),
        ({"gateway": {"zmq": "off"}}, "gateway.zmq: can't be off"),
        ({"address": "ipc://@x", "max_model_len": 8}, "`address` cannot be combined with"),
        ({"address": "nonsense"}, "address: 'nonsense' is not a ZeroMQ address"),
    ],
)
def test_a_start_that_cannot_succeed_raises_a_clear_error(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        LLM(**settings)
    assert words in str(caught.value)


def test_missing_memory_raises_the_server_s_error(tiny_model: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(StartError, match=r"execute\.kv_cache_bytes"):
        LLM(**tiny(tiny_model, kv_cache_bytes=9_000_000_000_000))
    assert not alive([process for process in psutil.Process().children(recursive=True) if process not in before])


def test_a_port_in_use_raises_the_server_s_error(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127\\.0\\.0\\.1:{port}: Address already in use"):
            LLM(**tiny(tiny_model), gateway={"port": port})


def test_attaching_to_a_missing_server_raises_an_error() -> None:
    started = time.monotonic()
    with pytest.raises(ServerFailed, match=r"can't attach: no server answered at ipc://@pipeline/absent within 0\.5 s"):
        LLM.attach("ipc://@pipeline/absent", timeout_s=0.5)
    assert time.monotonic() - started < 5


# --------------------------------------------------------------------------------------------------------------- life


def test_an_attached_llm_reconnects_to_a_restarted_server(tiny_model: Path, llm: LLM) -> None:
    address = f"ipc://@pipeline/test-{os.getpid()}/zmq"
    sets = [f"{key}={value}" for key, value in tiny(tiny_model).items() if key != "execute"]
    sets += [f"execute.{key}={value}" for key, value in tiny(tiny_model)["execute"].items()]
    with (
        Server(*sets, f"gateway.zmq={address}") as server,
        LLM(address=address, timeout_s=0.5, reconnect_timeout_s=0.1) as attached,
    ):
        attached.generate("Hello", GREEDY)
        server.stop()
        with pytest.raises(ServerFailed, match=r"none answered within 0\.1 s|can't attach: no server answered"):
            attached.generate("Hello", GREEDY)
        with Server(*sets, f"gateway.zmq={address}"):
            assert attached.generate("Hello", GREEDY)[0].outputs == llm.generate("Hello", GREEDY)[0].outputs


def test_two_llms_run_and_close_independently(tiny_model: Path, llm: LLM) -> None:
    with LLM(**tiny(tiny_model)) as other:
        assert llm.server is not None
        assert other.server is not None
        family = family_of(other.server.pid, 6)
        assert other.generate("Hello", GREEDY)[0].outputs == llm.generate("Hello", GREEDY)[0].outputs
        attached = LLM.attach(other.address)
        assert attached.server is None
        assert attached.generate("Hello", GREEDY)[0].outputs == llm.generate("Hello", GREEDY)[0].outputs
        attached.close()
        assert other.generate("Hello", GREEDY), "closing an attached LLM does not stop the server"
    assert not alive(family)
    for closed in (other, attached):
        with pytest.raises(UserError, match="this LLM is closed"):
            closed.generate("Hello")
        closed.close()
    assert llm.generate("Hello", GREEDY)


def test_an_unreferenced_llm_ends_its_server(tiny_model: Path) -> None:
    one = LLM(**tiny(tiny_model))
    assert one.server is not None
    family = family_of(one.server.pid, 6)
    one.generate("Hello", GREEDY)
    del one
    assert not alive(family)


@pytest.mark.parametrize("victim", ["supervisor", "execute", "gateway"])
def test_a_server_that_dies_ends_generate_with_an_error(tiny_model: Path, victim: str) -> None:
    with LLM(**tiny(tiny_model), supervisor={"max_restarts": 0}) as one:
        assert one.server is not None
        family = family_of(one.server.pid, 6)
        (process,) = [each for each in family if each.cmdline()[0] == f"pipeline: {victim}.0"]

        def prompts() -> Iterator[str]:
            yield from ["Once upon a time"] * 100
            process.kill()
            yield from ["Once upon a time"] * 2000

        with pytest.raises(ServerFailed, match=r"SIGKILL|died") as caught:
            one.generate(prompts(), SamplingParams(max_tokens=200, ignore_eos=True))
        if victim != "supervisor":
            assert f"{victim}" in str(caught.value)
        with pytest.raises(ServerFailed):
            one.generate("Hello")
    assert not alive(family)
