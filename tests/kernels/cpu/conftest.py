"""The CPU library for every instruction set of this machine."""

import ctypes
from pathlib import Path

import pytest

from pipeline.kernels.cpu import native_library
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu import recording
from tests.kernels.cpu.compile import library_of
from tests.kernels.cpu.samplers import EMULATED


@pytest.fixture(scope="session", params=[*available(), *EMULATED])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The whole library, from the user's cache or compiled into it."""
    isa = request.param
    path = build(EMULATED[isa], print, emulate=True) if isa in EMULATED else library_of(isa)
    return native_library.load(path)


@pytest.fixture
def is_emulated(request: pytest.FixtureRequest) -> bool:
    """Whether `library` computes without the instructions of its set, which takes many times as long."""
    return request.node.callspec.params["library"] in EMULATED


@pytest.fixture(scope="session")
def sampler_cache() -> Path:
    """A cache for the libraries of samplers.py, which all checkouts share: a library's key covers its sources. One
    process compiles each of them once, without a warning."""
    cache = Path.home() / ".cache" / "pipeline-tests" / "samplers"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache


@pytest.fixture(
    params=[
        ("bf16", "int12"),
        ("q8_0", "int12"),
        ("q4_0", "int12"),
        ("q4_1", "int12"),
        ("q5_0", "int12"),
        ("q5_1", "int12"),
        ("q4_k", "int12"),
        ("q5_k", "int12"),
        ("q6_k", "int12"),
        ("fp8", "int12"),
        ("q4_0", "int8"),
        ("q4_1", "int8"),
        ("q5_0", "int8"),
        ("q5_1", "int8"),
        ("q4_k", "int8"),
        ("q4_k", "blocks"),
        ("q5_k", "blocks"),
        ("q6_k", "blocks"),
        ("q5_k", "int8"),
        ("q6_k", "int8"),
    ],
    ids=lambda param: "-".join(param),
)
def format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Format:
    """A format of weights, with each precision of activations."""
    name, activations = request.param
    monkeypatch.setattr(recording, "ACTIVATIONS", activations)
    return name
