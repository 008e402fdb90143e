"""Runs llama.cpp's vocabulary code from a shared library, as the package @node-llama-cpp/linux-x64 has it.

The program reads one file: after an abort in llama.cpp, its caller lives.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

LIBRARIES = ("libggml-base.so", "libggml.v*.so", "libllama.v*.so")
VOCAB_ONLY = 72
"""Place of `vocab_only` in `struct llama_model_params`. The library has no headers; a wrong place makes the load of a
file without tensors fail."""


class _ModelParams(ctypes.Structure):
    """At least as large as the library's, which is passed by value: the rest of it is not read."""

    _fields_ = [("bytes", ctypes.c_uint8 * 512)]


def describe(folder: Path, file: Path, texts: list[str]) -> dict[str, Any]:
    """What llama.cpp makes of a vocabulary: `ends` and `control`, which are ids, and the ids of each text with special
    tokens. Raises OSError if `folder` lacks the libraries, RuntimeError if llama.cpp can't load the file."""
    for pattern in LIBRARIES:
        found = sorted(folder.glob(pattern))
        if not found:
            raise OSError(f"{folder} has no {pattern}")
        library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
    pointer, token, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    library.llama_model_default_params.restype = _ModelParams
    params = library.llama_model_default_params()
    params.bytes[VOCAB_ONLY] = 1
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
    library.llama_model_load_from_file.restype = pointer
    library.llama_model_get_vocab.argtypes = [pointer]
    library.llama_model_get_vocab.restype = pointer
    library.llama_vocab_n_tokens.argtypes = [pointer]
    for function in (library.llama_vocab_is_eog, library.llama_vocab_is_control):
        function.argtypes, function.restype = [pointer, token], flag
    library.llama_tokenize.argtypes = [
        *(pointer, ctypes.c_char_p, token, ctypes.POINTER(token), token, flag, flag),
    ]
    model = library.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp can't load {file}")
    vocab = library.llama_model_get_vocab(model)
    ids = range(library.llama_vocab_n_tokens(vocab))
    encoded = []
    for text in texts:
        data = text.encode()
        room = (token * (4 * len(data) + 16))()
        count = library.llama_tokenize(vocab, data, len(data), room, len(room), False, True)
        encoded.append(list(room[:count]))
    return {
        "ends": [i for i in ids if library.llama_vocab_is_eog(vocab, i)],
        "control": [i for i in ids if library.llama_vocab_is_control(vocab, i)],
        "ids": encoded,
    }


if __name__ == "__main__":
    print(json.dumps(describe(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.stdin.read()))))
