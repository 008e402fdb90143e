"""Runs llama.cpp's tokenizers, from the build of tools/compare_peers."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import UserError

SEPARATOR = "\n__ggml_vocab_test__\n"
PROGRAM = Path(__file__).with_name("tokenize.cpp")
LIBRARIES = ("src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a")
COMPILE_S, RUN_S = 120.0, 120.0


class Encoded(NamedTuple):
    """What llama.cpp makes of the texts with one pre-tokenizer."""

    adds_bos: bool
    adds_eos: bool
    ids: list[list[int]]
    """Of each text, without special tokens."""


class LlamaTokenizer:
    """llama.cpp's tokenizers. Raises UserError if `folder` has no build of llama.cpp or the program doesn't compile."""

    def __init__(self, folder: Path) -> None:
        build, source = folder / "build", folder / "source"
        if not (build / LIBRARIES[0]).is_file():
            raise UserError(f"{build} has no llama.cpp: run `tools/compare_peers --build-only --servers llama.cpp`")
        self._scratch = tempfile.TemporaryDirectory(prefix="tokenizer-vectors-")
        self._program = Path(self._scratch.name) / "tokenize"
        includes = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
        libraries = [str(build / name) for name in LIBRARIES]
        command = ["g++", "-O1", *includes, str(PROGRAM), "-o", str(self._program), *libraries, "-fopenmp", "-ldl"]
        _run(command, "", COMPILE_S)

    def encode(self, vocabulary: Path, texts: Sequence[str], names: Sequence[str] = ()) -> list[Encoded]:
        """The texts by each pre-tokenizer of `names`; by the file's own if there are none. Raises UserError."""
        lines = _run([str(self._program), str(vocabulary), *names], SEPARATOR.join(texts), RUN_S).splitlines()
        results = []
        for begin in range(0, len(lines), len(texts) + 1):
            _, _, bos, eos = lines[begin].split()
            ids = [[int(word) for word in line.split()] for line in lines[begin + 1 : begin + 1 + len(texts)]]
            results.append(Encoded(bos == "1", eos == "1", ids))
        return results


def _run(command: list[str], text: str, timeout_s: float) -> str:
    done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise UserError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    return done.stdout.decode()
