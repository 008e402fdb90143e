from collections.abc import AsyncIterator

import pytest

from pipeline.client.client import AsyncClient
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import address_of


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        yield client
