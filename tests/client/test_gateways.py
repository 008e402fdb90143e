"""Which gateways of a server a client uses."""

import asyncio

import msgspec
import pytest

from pipeline.client.client import ServerInfo
from pipeline.client.connection.slots import Slots
from pipeline.client.connection.zmq_address import others_of
from pipeline.client.inputs.pooling_params import PoolingParams

INFO = ServerInfo("m", 1, 1, 1, 1, 1, "pipeline/0", 1)


def info(addresses: list[str], gateway: int = 0) -> ServerInfo:
    return msgspec.structs.replace(INFO, addresses=addresses, gateway=gateway)


IPC = ["ipc://@pipeline/8000/zmq", "ipc://@pipeline/8000/zmq.1"]
TCP = ["tcp://0.0.0.0:8001", "tcp://0.0.0.0:8002", "tcp://0.0.0.0:8003"]


@pytest.mark.parametrize(
    ("address", "facts", "others"),
    [
        (IPC[0], info(IPC), [(1, IPC[1])]),
        (IPC[1], info(IPC, 1), [(0, IPC[0])]),
        ("tcp://gpu1:8002", info(TCP, 1), [(0, "tcp://gpu1:8001"), (2, "tcp://gpu1:8003")]),
        ("tcp://[::1]:8001", info(TCP), [(1, "tcp://[::1]:8002"), (2, "tcp://[::1]:8003")]),
        ("tcp://gpu1:9001", info(TCP), []),  # a forwarded port
        (IPC[0], info([]), []),  # an older server
        (IPC[0], info(IPC[:1]), []),
    ],
)
def test_other_gateways_are_reached_as_the_first_one(
    address: str, facts: ServerInfo, others: list[tuple[int, str]]
) -> None:
    assert others_of(address, facts.addresses, facts.gateway) == others


async def test_the_load_counts_slots_that_are_taken_or_waited_for() -> None:
    slots = Slots(2)
    await slots.take(2)
    waiting = asyncio.create_task(slots.take(1))
    await asyncio.sleep(0)
    assert slots.load == 3
    slots.give(2)
    await waiting
    assert slots.load == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dimensions": 0}, "dimensions must be from 1 to"),
        ({"dimensions": "2"}, "dimensions must be an integer, not '2'"),
        ({"pooling": "sum"}, "pooling must be last or .* or weighted_mean, not 'sum'"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be from -1"),
        ({"truncation_side": "middle"}, "truncation_side must be left or right, not 'middle'"),
        ({"normalize": 2}, "normalize must be None, True or False, not 2"),
        ({"normalize": False, "use_activation": True}, "are one parameter"),
        ({"task": "plugin"}, "task must be embed or .* or score, not 'plugin'"),
        ({"prompt_name": 1}, "prompt_name must be a string, not int"),
    ],
)
def test_invalid_pooling_parameters_are_errors(fields: dict[str, object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        PoolingParams(**fields)  # type: ignore[arg-type]
