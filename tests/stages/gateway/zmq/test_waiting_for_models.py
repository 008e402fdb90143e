"""A client whose model is being loaded: its hello was in time, however long that takes."""

import asyncio
from typing import Any
from unittest.mock import Mock

from pipeline.stages.gateway.zmq import sweeper
from pipeline.stages.gateway.zmq.peer import ClientPeer
from pipeline.stages.gateway.zmq.sweeper import Sweeper


async def test_a_connection_without_hello_ends_and_one_whose_hello_waits_does_not() -> None:
    ended: list[Any] = []
    silent, waiting = Mock(opened_s=0.0), Mock(opened_s=0.0)
    peers: Any = {one: ClientPeer(one, 0.0) for one in (silent, waiting)}
    task = asyncio.create_task(asyncio.sleep(60))
    peers[waiting].waiting[-1] = task
    found = Sweeper(Mock(), peers, drop=Mock(), disconnect=ended.append)
    for peer in peers.values():
        found._check(peer, sweeper.HELLO_S + 1)
    task.cancel()
    assert ended == [peers[silent]]
