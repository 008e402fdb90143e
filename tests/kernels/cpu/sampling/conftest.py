"""The sampler for every instruction set."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.cpu.samplers import ISAS, load
from tests.kernels.cpu.sampling.native import Native


@pytest.fixture(scope="session")
def compiled(sampler_cache: Path) -> Callable[[str], Native]:
    made: dict[str, Native] = {}

    def get(isa: str) -> Native:
        if isa not in made:
            made[isa] = Native(load(isa, sampler_cache))
        return made[isa]

    return get


@pytest.fixture(scope="session", params=ISAS)
def native(request: pytest.FixtureRequest, compiled: Callable[[str], Native]) -> Native:
    return compiled(request.param)
