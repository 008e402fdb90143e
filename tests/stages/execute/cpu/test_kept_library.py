"""An executor that replaces another one computes with the same back end, whatever has happened to the library's file
and to the compiler. If it can't, it refuses."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.errors import UserError
from pipeline.kernels.cpu import build, compiler
from pipeline.kernels.cpu.isa import Isa, available
from pipeline.runtime import messages as m
from pipeline.shm import segment
from pipeline.stages.execute.cpu import backend
from pipeline.stages.execute.cpu.backend import Library, choose_library, library_of_draft
from pipeline.stages.execute.cpu.kept_library import KeptLibrary
from tests.rig import Rig
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import settings
from tests.stages.execute.native_driver import write

CONFIG = checkpoints.config_of()
SETTINGS = settings(dtype="bfloat16")


@pytest.fixture
def fd() -> Iterator[int]:
    """The supervisor's memory."""
    fd = segment.create_sparse("library", 0)
    yield fd
    os.close(fd)


@pytest.fixture
def first(fd: int) -> Library:
    """The library of the first executor."""
    library = choose_library(SETTINGS, CONFIG, KeptLibrary(fd))
    assert library is not None
    return library


def backend_of(library: Library) -> m.Backend:
    return m.Backend(library.isa, library.code, "bfloat16")


def fail(error: Exception) -> Callable[..., Path]:
    def build(*_: Any, **__: Any) -> Path:
        raise error

    return build


FULL = compiler.CompileError("No space left on device")


def test_a_successor_needs_neither_the_file_nor_a_compiler(
    fd: int, first: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build", fail(AssertionError("it compiles again")))
    library = choose_library(SETTINGS, CONFIG, KeptLibrary(fd, backend_of(first)))
    assert library is not None and (library.isa, library.code) == (first.isa, first.code)
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:pipeline-library" in maps, "it computes with the copy"


def test_what_was_kept_by_a_start_that_failed_is_replaced(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.write(fd, bytes(10_000_000))
    first = choose_library(SETTINGS, CONFIG, KeptLibrary(fd))
    assert first is not None
    monkeypatch.setattr(build, "build", fail(FULL))
    assert choose_library(SETTINGS, CONFIG, KeptLibrary(fd, backend_of(first))) is not None


@pytest.mark.parametrize("damage", [lambda fd: os.ftruncate(fd, 0), lambda fd: os.pwrite(fd, b"\0" * 64, 4096)])
def test_without_the_copy_the_same_level_is_compiled_and_no_other(
    damage: Callable[[int], object], fd: int, first: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(fd)
    kept = KeptLibrary(fd, backend_of(first))
    again = choose_library(SETTINGS, CONFIG, kept)
    assert again is not None and (again.isa, again.code) == (first.isa, first.code)
    damage(fd)
    tried: list[Isa] = []

    def build_fails(isa: Isa, *_: Any, **__: Any) -> Path:
        tried.append(isa)
        raise FULL

    monkeypatch.setattr(build, "build", build_fails)
    with pytest.raises(UserError, match=f"executor before computed with '{first.isa}', but No space left on device"):
        choose_library(SETTINGS, CONFIG, kept)
    assert tried == [first.isa], "neither a lower level nor torch"


def test_the_level_of_the_executor_before_is_taken_and_not_the_best(fd: int) -> None:
    lower = available()[-1]
    first = choose_library(settings(dtype="bfloat16", kernels=lower), CONFIG, KeptLibrary(fd))
    assert first is not None
    library = choose_library(SETTINGS, CONFIG, KeptLibrary(fd, backend_of(first)))
    assert library is not None and library.isa == lower


def test_a_level_that_another_host_lacks_is_refused(fd: int, first: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available", lambda: ["neon"])
    with pytest.raises(UserError, match=f"computed with '{first.isa}', but this CPU supports neon and torch"):
        choose_library(SETTINGS, CONFIG, KeptLibrary(fd, backend_of(first)))


def test_after_torch_comes_torch(fd: int) -> None:
    """As when the first executor found no compiler, and now there is one."""
    assert choose_library(SETTINGS, CONFIG, KeptLibrary(fd, m.Backend("torch"))) is None


def test_new_sources_are_for_a_new_server(
    fd: int, first: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Installed while the server runs: its streams go on with the kernels that they began with."""
    monkeypatch.setattr(build, "code_of", lambda isa: "0123456789ab")
    library = choose_library(SETTINGS, CONFIG, KeptLibrary(fd, backend_of(first)))
    assert library is not None and library.code == first.code
    assert "kernels of this server's start" in caplog.text


def test_a_draft_model_takes_the_library_of_the_model(
    first: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "build", fail(FULL))
    assert library_of_draft(SETTINGS, CONFIG, first) is first
    lacking = checkpoints.config_of(**checkpoints.VARIANTS["one kv head"])
    assert library_of_draft(SETTINGS, lacking, first) is None


def test_the_code_is_another_with_other_sources_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "program.cpp"
    source.write_text("int x;")
    codes = [build.code_of("avx2", source), build.code_of("avx512", source)]
    (tmp_path / "gemm.h").write_text("int y;")
    codes.append(build.code_of("avx2", source))
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-ffast-math"))
    codes.append(build.code_of("avx2", source))
    assert len(set(codes)) == 4
    assert codes[-1] == build.code_of("avx2", source)


# --- the stage


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, CONFIG)
    return folder


def facts_of(rig: Rig) -> m.ExecuteFacts:
    with rig:
        facts: m.ExecuteFacts = rig.receive("supervisor", m.Ready).facts
        return facts


def successor(folder: Path, fd: int, before: m.ExecuteFacts) -> Rig:
    rig = Rig("execute", SETTINGS, folder)
    rig.launch = msgspec.structs.replace(rig.launch, facts=before, library_fd=fd)
    return rig


def test_the_facts_have_the_back_end_and_a_successor_has_the_same(tiny: Path, fd: int) -> None:
    rig = Rig("execute", SETTINGS, tiny)
    rig.launch = msgspec.structs.replace(rig.launch, library_fd=fd)
    facts = facts_of(rig)
    isa = available()[0]
    assert facts.backend == m.Backend(isa, build.code_of(isa), "bfloat16", "bf16", "int12", "bfloat16")
    assert os.fstat(fd).st_size > 100_000, "it has left its library"
    assert facts_of(successor(tiny, fd, facts)) == facts


@pytest.mark.parametrize("other", [{"code": "0123456789ab"}, {"weights": "q8_0"}, {"activations": "int8"}])
def test_a_successor_that_would_compute_other_numbers_refuses_and_names_both(
    other: dict[str, str], tiny: Path, fd: int
) -> None:
    """Without the copy, as on another host."""
    facts = facts_of(Rig("execute", SETTINGS, tiny))
    before = msgspec.structs.replace(facts, backend=msgspec.structs.replace(facts.backend, **other))
    with pytest.raises(UserError, match="another back end") as refusal:
        facts_of(successor(tiny, fd, before))
    assert str(before.backend) in str(refusal.value) and str(facts.backend) in str(refusal.value)


def test_ranks_of_different_kinds_are_all_named() -> None:
    one, other = m.Backend("avx2", "0a", "bfloat16", "bf16", "int12", "int8"), m.Backend("avx512", "0b", "bfloat16")
    assert m.Backend.of_ranks([one, one]) == one
    assert m.Backend.of_ranks([one, other]) == m.Backend("avx2+avx512", "0a+0b", "bfloat16", "bf16", "int12", "int8")
    assert str(m.Backend()) == ""
