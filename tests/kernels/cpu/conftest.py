"""The CPU library at every level that this machine can compute."""

import ctypes
import os
from pathlib import Path

import pytest

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available


@pytest.fixture(scope="session", params=[*available(), "emulated"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The whole program, from the user's cache or compiled into it; "emulated" is AVX-512 without its instructions."""
    emulate = request.param == "emulated"
    return native.load(build("avx512_bf16" if emulate else request.param, print, emulate=emulate))


@pytest.fixture(scope="session")
def sampler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the libraries of samplers.py, each compiled once by one of the processes, without a warning."""
    root = tmp_path_factory.getbasetemp()
    cache = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "samplers"
    cache.mkdir(exist_ok=True)
    return cache
