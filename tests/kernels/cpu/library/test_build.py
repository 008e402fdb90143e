"""Kernels are compiled once and cached."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.kernels.cpu import compile_ahead
from pipeline.kernels.cpu import compiler as compiler_module
from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.build import MAX_KEPT
from pipeline.kernels.cpu.compiler import find_compiler
from tests.kernels.cpu.library.bench import PATIENCE_S, SOURCE, Bench, answer, eventually, is_running

# --- compile once ---


def test_a_library_is_compiled_once_and_found_again(bench: Bench) -> None:
    library = bench.build()
    assert library.parent == bench.kernels
    assert answer(library) == 42
    assert bench.build() == library
    assert bench.num_compiled == 1
    assert bench.kept() == [library.name]


def test_log_lines_before_and_after_compiling(bench: Bench) -> None:
    bench.build()
    before, after = bench.log_lines
    assert before == "compiling the CPU kernels (portable), once: about 20 s"
    assert after.startswith("compiled the CPU kernels in ")
    bench.build()
    assert len(bench.log_lines) == 2


def change_source(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.source.write_text(SOURCE + "// more\n")


def change_header(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.write_header("#define ANSWER 43\n")


def add_header(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.source.with_name("another.h").write_text("")


def change_compiler(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copy(bench.folder / "compiler", bench.folder / "another")
    monkeypatch.setenv("CXX", str(copy))


def change_version(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.compile_with('exec c++ "$@"', version="a compiler, 1.1")


def change_compiler_options(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{bench.folder}/compiler -DMORE")


def change_flags(_: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "FLAGS", (*compiler_module.FLAGS, "-DMORE"))


def change_cpu(_: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa, "cpuinfo", lambda: "model name : another\nflags : fpu\n")


@pytest.mark.parametrize(
    "change",
    [
        change_source,
        change_header,
        add_header,
        change_compiler,
        change_version,
        change_compiler_options,
        change_flags,
        change_cpu,
    ],
)
def test_every_dependency_of_the_code_changes_the_library(
    change: Callable[[Bench, pytest.MonkeyPatch], None], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.build()
    change(bench, monkeypatch)
    after = bench.build()
    assert after != before
    assert bench.num_compiled == 2
    assert answer(after) == (43 if change is change_header else 42)


def test_an_emulated_instruction_set_has_its_own_library(bench: Bench) -> None:
    bench.write_header(
        "#if defined(ISA_AVX512) && defined(EMULATE)\n#define ANSWER 1\n#else\n#define ANSWER 2\n#endif\n"
    )
    plain, emulated = bench.build(), bench.build("avx512_bf16", emulate=True)
    assert (answer(plain), answer(emulated)) == (2, 1)
    with pytest.raises(ValueError, match="nothing to emulate"):
        bench.build("portable", emulate=True)


def test_each_library_reports_its_instruction_set(bench: Bench) -> None:
    bench.write_header(
        "#if defined(ISA_AVX512)\n#define ANSWER 512\n#elif defined(ISA_AVX2)\n#define ANSWER 2\n"
        "#elif defined(ISA_PORTABLE)\n#define ANSWER 0\n#endif\n"
    )
    answers = {isa: answer(bench.build(isa)) for isa in cpu_isa.available()}
    assert answers == {
        isa: {"amx": 512, "avx512_bf16": 512, "avx512": 512, "avx2": 2, "neon": 0, "portable": 0}[isa]
        for isa in cpu_isa.available()
    }


def test_libraries_of_one_process_share_no_state(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.source.write_text(
        "template <class T> T& counter() { static T count = 0; return count; }\n"
        'extern "C" int answer() { return ++counter<int>(); }\n'
    )
    monkeypatch.delenv("CXX")
    one = bench.build()
    monkeypatch.setenv("CXX", "c++ -DANOTHER")
    other = bench.build()
    assert one != other
    assert [answer(one), answer(one), answer(other)] == [1, 2, 1]


def test_the_most_recently_used_libraries_are_kept(bench: Bench) -> None:
    used = bench.build()
    os.utime(used, (1, 1))
    for i in range(MAX_KEPT + 2):
        for suffix in (".so", ".log"):
            old = bench.kernels / f"old{i}{suffix}"
            old.write_bytes(b"")
            os.utime(old, (1000 + i, 1000 + i))
    assert bench.build() == used  # used now, though compiled long ago
    bench.write_header("#define ANSWER 43\n")
    made = bench.build()
    libraries = {path.name for path in bench.kernels.glob("*.so")}
    assert libraries == {used.name, made.name, *(f"old{i}.so" for i in range(4, MAX_KEPT + 2))}
    assert len(list(bench.kernels.glob("*.log"))) == MAX_KEPT


# --- a first start ---


def test_a_first_start_takes_a_quick_library_and_the_next_one_the_optimized(bench: Bench) -> None:
    quick = bench.build(quick=True)
    assert quick.name.endswith("-quick.so") and answer(quick) == 42
    assert bench.log_lines[0].startswith("compiling the CPU kernels (portable), quickly, and better for the next start")
    assert bench.build(quick=True) == quick and bench.num_compiled == 1
    optimized = bench.build()
    assert optimized != quick and bench.num_compiled == 2
    assert bench.build(quick=True) == optimized and bench.num_compiled == 2


def test_a_quick_library_is_compiled_with_the_same_rounding_and_less_optimization(bench: Bench) -> None:
    compiler = find_compiler()
    for isa in compiler_module.ISA_FLAGS:
        options = compiler.options(isa, emulate=False)
        assert compiler.options(isa, emulate=False, quick=True) == (*options, *compiler_module.QUICK)
        assert "-ffp-contract=off" in options and not {"-ffast-math", "-Ofast"} & set(options)


def test_a_user_hears_that_the_compiler_still_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "PROGRESS_S", 0.05)
    gate = bench.wait_in_compiler()

    def hear(line: str) -> None:
        bench.log_lines.append(line)
        if line.startswith("still") and gate.exists():
            gate.write_text("go\n")
            gate.unlink()

    bench.say = hear
    assert answer(bench.build()) == 42
    assert any(re.fullmatch(r"still compiling the CPU kernels: \d+ s so far", line) for line in bench.log_lines)


def test_the_optimized_library_is_compiled_ahead_in_a_process_that_ends_with_its_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not done within a test's time: it is seen at work in its compiler, and killed."""
    bench.compile_with(f"echo $$ > {bench.folder}/pid\nexec sleep 600")
    process = compile_ahead.start("portable", bench.cache_root)
    assert process is not None
    try:
        compiler = bench.pid_in_compiler()
        assert os.getpriority(os.PRIO_PROCESS, compiler) == 19
        assert Path(f"/proc/{compiler}/oom_score_adj").read_text() == "1000\n"
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    eventually(lambda: not is_running(compiler))


def test_compiling_for_the_next_start_leaves_no_zombie(bench: Bench) -> None:
    bench.compile_with("exit 1")
    process = compile_ahead.start("portable", bench.cache_root)
    assert process is not None
    eventually(lambda: not Path(f"/proc/{process.pid}").exists())
