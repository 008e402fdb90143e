"""Clients in other languages."""

from pathlib import Path

import pytest

from tests.e2e.client.packages import node_with

NODE_CLIENT = Path(__file__).parents[3] / "tools" / "node_client"


@pytest.fixture(scope="session")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JavaScript client's folder, with its packages installed."""
    return node_with(NODE_CLIENT, tmp_path_factory.mktemp("node") / "node_client")
