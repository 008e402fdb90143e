"""`LLM` and `AsyncLLM` put their server to sleep, and wake it."""

import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import LLM, AsyncLLM, SamplingParams
from pipeline.client.embedded.server_log import http_address
from pipeline.errors import UserError
from tests.e2e.conftest import tiny
from tests.e2e.embedded import load_of, until

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def sleeper(tiny_model: Path) -> Iterator[LLM]:
    """vLLM's argument is accepted."""
    with LLM(**tiny(tiny_model), enable_sleep_mode=True) as llm:
        yield llm


def test_a_batch_waits_for_a_server_that_sleeps(sleeper: LLM) -> None:
    expected = sleeper.generate(["a", "b"], GREEDY)
    assert not sleeper.is_sleeping()
    sleeper.sleep(level=1)
    sleeper.sleep()
    assert sleeper.is_sleeping()
    assert load_of(sleeper)["status"] == "sleeping"
    found: list[Any] = []
    batch = threading.Thread(target=lambda: found.extend(sleeper.generate(["a", "b"], GREEDY)))
    batch.start()
    until(lambda: load_of(sleeper)["waiting"] == 2, "both requests wait")
    sleeper.wake_up()
    assert not sleeper.is_sleeping()
    batch.join()
    assert [one.outputs for one in found] == [one.outputs for one in expected]


def test_a_request_wakes_it_if_it_was_asked_for_that(sleeper: LLM) -> None:
    expected = sleeper.generate("a", GREEDY)[0].outputs
    sleeper.sleep(wake_on_request=True)
    assert sleeper.generate("a", GREEDY)[0].outputs == expected
    assert not sleeper.is_sleeping()


async def test_a_stream_goes_on_after_a_sleep(tiny_model: Path) -> None:
    async with AsyncLLM(**tiny(tiny_model)) as llm:
        await llm.sleep()  # before its first request
        await llm.wake_up()
        (expected,) = [output.outputs[0].text async for output in llm.generate("a", LONG, output_kind="final")]
        text = ""
        async for output in llm.generate("a", LONG, output_kind="delta"):
            if not text:
                await llm.sleep()
                assert await llm.is_sleeping()
                await llm.wake_up()
                assert not await llm.is_sleeping()
            text += output.outputs[0].text
        assert text == expected


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"level": 2}, "level must be 1"),
        ({"level": True}, "level must be 1"),
        ({"mode": "abort"}, "mode must be 'keep'"),
        ({"wake_on_request": "yes"}, "wake_on_request must be True or False"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(sleeper: LLM, options: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        sleeper.sleep(**options)
    with pytest.raises(UserError, match="tags must be None"):
        sleeper.wake_up(["weights"])
    assert not sleeper.is_sleeping()


def test_one_that_is_attached_does_the_same_if_the_server_lets_clients_do_that(sleeper: LLM, tiny_model: Path) -> None:
    """`sleeper` has vLLM's `enable_sleep_mode`."""
    expected = sleeper.generate("a", GREEDY)[0].outputs
    with LLM.attach(sleeper.address) as other:
        other.sleep()
        assert other.is_sleeping() and sleeper.is_sleeping()
        other.wake_up()
        assert not other.is_sleeping()
        assert other.generate("a", GREEDY)[0].outputs == expected
        with pytest.raises(UserError, match="level must be 1"):
            other.sleep(level=2)
    with LLM(**tiny(tiny_model)) as owner, LLM.attach(owner.address) as other:
        with pytest.raises(UserError, match="enable_sleep_mode"):
            other.sleep()
        assert not other.is_sleeping()


def test_a_server_that_dies_meanwhile_is_reported_at_once(tiny_model: Path) -> None:
    with LLM(**tiny(tiny_model)) as llm:
        assert llm.server is not None
        supervisor = psutil.Process(llm.server.pid)
        until(lambda: load_of(llm)["status"] == "ok", "it serves")
        (executor,) = [one for one in supervisor.children(recursive=True) if "execute.0" in " ".join(one.cmdline())]
        executor.suspend()  # it never says that it has saved its cache
        is_sleeping = f"{http_address(llm.server.log())}/is_sleeping"

        def kill() -> None:
            until(lambda: b"true" in urllib.request.urlopen(is_sleeping, timeout=10).read(), "it falls asleep")
            supervisor.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(UserError, match="has ended"):
            llm.sleep()
        killer.join()


def test_a_closed_one_says_so(tiny_model: Path) -> None:
    llm = LLM(**tiny(tiny_model))
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.sleep()
