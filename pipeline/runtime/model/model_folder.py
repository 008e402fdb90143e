"""The model folder that prepare writes for the other stages.

model.json            `ModelConfig` in model_config.py
vision.json           `VisionConfig` in vision_config.py; missing if the model reads no images
tokenizer.json        for the `tokenizers` package
added_tokens.jsonl    its added tokens, for the gateway (pipeline/text/formats/added_tokens.py)
vocabulary.json       how large its vocabulary is (pipeline/runtime/model/vocabulary_size.py)
chat_template.jinja   missing if the model has none
chat_template.tool_use.jinja   for chats with tools, if the model has a separate template
media.json            how images are processed (pipeline/media/config.py); missing if the model reads none
notes.txt             lines about what the model's files say in two ways; missing if there are none
weights               safetensors files, named by `ModelConfig.weight_files` (absolute, or relative to the folder)
weight_files.json     what these files were, if they are those of a local folder (weight_headers.py)
in_place-1.json       named there too: the tensors that are read from a .gguf file (in_place.py)
weights.panels        the matrices as the CPU library reads them; execute writes it after the first start

A quantized matrix [rows, columns] is stored as U8 [rows, bytes per row], in the block format of .gguf files. The
format, such as "q8_0" or "q4_k", is in the file's metadata under `format_key(name of the tensor)`.
"""

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from pipeline.runtime.files.regular_files import open_regular, read_regular

CONVERTED = "converted.txt"
"""A line that says what the source's matrices became. Only in prepared folders in which some have another format."""
NOTES = "notes.txt"
"""Lines about what the model's files say in two ways, and which of them counts. Absent if there is nothing to say."""
VISION = "vision.json"
"""The vision tower. Absent if the model has none."""
PANELS = "weights.panels"
"""Belongs to execute, see stages/execute/cpu/native/panel_file.py. Ranks have files whose names begin with this one. A
folder is complete without them."""
STAMP = "complete.json"
"""The file that prepare writes last."""
MAX_FILE_BYTES = 256 * 1024**2
"""What prepare takes of a tokenizer.json."""
MAX_STAMP_BYTES = 16 * 1024**2


def notes_of(folder: Path) -> list[str]:
    """The lines of `NOTES` in a prepared folder."""
    path = folder / NOTES
    return read_text(path).splitlines() if path.is_file() else []


def read_file(path: Path) -> bytes:
    """A file of a prepared folder, besides weights, or of another user's in its place: opening a FIFO would wait for
    ever. Raises OSError if it is no regular file, or has more than 256 MiB."""
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_text(path: Path) -> str:
    """The same as text, with line feeds only. Raises UnicodeDecodeError too."""
    return read_file(path).decode().replace("\r\n", "\n").replace("\r", "\n")


def format_key(tensor: str) -> str:
    """The safetensors metadata key for the format of a quantized tensor."""
    return f"format:{tensor}"


def hold(folder: Path) -> BinaryIO | None:
    """Mark the folder as used, so that `pipeline cache prune` keeps it, until the file is closed or this process ends.
    Returns None if it can't be marked, as on a file system without locks."""
    try:
        file = os.fdopen(open_regular(folder / STAMP), "rb")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def is_held(folder: Path) -> bool:
    """Whether a process has marked the folder with `hold`."""
    return is_locked(folder / STAMP)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock of a file. False if there is none."""
    try:
        with os.fdopen(open_regular(path, os.O_RDWR | os.O_NOFOLLOW), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
