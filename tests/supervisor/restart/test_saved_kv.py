"""A new executor finds what the one before has saved, if that was put to sleep, and nothing else."""

import os
from collections.abc import Iterator

import pytest

from pipeline.config.settings import Settings
from pipeline.supervisor.shared.resources import SharedResources


@pytest.fixture
def resources() -> Iterator[SharedResources]:
    found = SharedResources(Settings(), [], [], None)
    try:
        found.create_arenas()
        found.create_rings()
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(("has_saved_kv", "num_bytes"), [(True, 8192), (False, 0)])
def test_what_an_executor_saved_in_part_is_not_for_its_successor(
    resources: SharedResources, has_saved_kv: bool, num_bytes: int
) -> None:
    """One that is killed while it saves leaves a file of full size, whose header may be missing."""
    fd = resources.launch("execute", "x", []).saved_kv_fd
    os.ftruncate(fd, 8192)
    resources.has_saved_kv = has_saved_kv
    assert resources.launch("execute", "x", []).saved_kv_fd == fd
    assert os.fstat(fd).st_size == num_bytes
