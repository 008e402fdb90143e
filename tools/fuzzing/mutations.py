"""Mutations of valid model files, all drawn from one `random.Random`."""

import copy
import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 31, 255, 256, 65535, 10**9, 10**18, 10**30),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63)),
)
DIGITS = "@digits"
"""Stands for a number with more digits than Python reads."""
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), True, False, None, DIGITS),
    *("", "x" * 3000, "../x", "/dev/zero", "a\0b", "line\nline", "\ud800", "F16", "F64", "U8", "default", "llama3"),
    *([], {}, [1], ["x"], [-8, 0], [1, 2.5], {"a": {}}, {"content": 1}),
)
"""Replacements for JSON values."""
DEEP = 3000
WIDTHS = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))


def spoil_bytes(data: bytes, rng: random.Random, reach: int) -> bytes:
    """Mutate some of the first `reach` bytes, or truncate or extend the file."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(max(1, min(reach, len(out))))
        match rng.randrange(7):
            case 0:
                del out[at:]
            case 1 | 2 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 3 if at < len(out):
                out[at] = rng.choice((0, 1, 8, 9, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF))
            case 4:
                size, code = rng.choice(WIDTHS)
                out[at : at + size] = struct.pack(f"<{code}", rng.choice(NUMBERS) % 256**size)
            case 5:
                other = rng.randrange(max(1, min(reach, len(out))))
                out[at:at] = out[other : other + rng.randrange(1, 64)]
            case _:
                if rng.random() < 0.5:
                    del out[at : at + rng.randrange(1, 64)]
                else:
                    out += bytes(rng.randrange(1, 100))
    return bytes(out)


def spoil_json(data: bytes, rng: random.Random) -> bytes:
    """Mutate a few values or keys of a JSON document."""
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder, key = _some_path(document, rng)
        if holder is None:
            break
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2 if isinstance(holder, dict):
                other = rng.choice(list(holder))
                holder[other] = holder.pop(key)
            case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += rng.choice((-8, -4, -1, 1, 2, 8))
            case 4 if isinstance(holder[key], list) and holder[key]:
                holder[key] = holder[key] + [rng.choice(holder[key])]
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(document).replace(json.dumps(DIGITS), "9" * 5000)
    if rng.random() < 0.1:
        at = text.find(":", rng.randrange(len(text))) + 1
        text = text[:at] + "[" * DEEP + "]" * DEEP + "," + text[at:]
    if rng.random() < 0.1 and text.startswith("{") and len(text) > 2:  # a duplicate key
        key = next(iter(json.loads(data)))
        text = f"{{{json.dumps(key)}: {json.dumps(rng.choice(VALUES))}, {text[1:]}"
    return text.encode()


def _some_path(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container and the key or index of one of its values, at any depth."""
    holder, key = None, None
    here = document
    while isinstance(here, dict | list) and here:
        holder = here
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        here = here[key]
        if rng.random() < 0.25:
            break
    return holder, key


def spoil_safetensors(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    if rng.random() < 0.4:
        return spoil_bytes(data, rng, 8 + length if rng.random() < 0.8 else len(data))
    header = spoil_json(data[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
    return struct.pack("<Q", stated) + header + data[8 + length :]


NAME = re.compile(rb"(?:tokenizer|llama|general|blk|output|token_embd)[\w.]+")
GGUF_ARRAY, GGUF_TYPES = 9, 14


def spoil_gguf(data: bytes, rng: random.Random) -> bytes:
    """Mutate types, counts, lengths and numbers next to the names of keys and tensors, or any bytes of the header."""
    end = data.find(b"output_norm") + 64
    if rng.random() < 0.4:
        return spoil_bytes(data, rng, rng.choice((24, end, len(data))))
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(NAME.finditer(out, 0, end)))
        match rng.randrange(6):
            case 0:  # the length of the name
                out[name.start() - 8 : name.start()] = struct.pack("<Q", rng.choice(NUMBERS) % 2**64)
            case 1:  # another type
                out[name.end() : name.end() + 4] = struct.pack("<I", rng.randrange(GGUF_TYPES))
            case 2:  # turns the value into an array
                count = rng.choice(NUMBERS) % 2**64
                out[name.end() : name.end()] = struct.pack("<IIQ", GGUF_ARRAY, rng.randrange(GGUF_TYPES), count)
            case 3:  # arrays of arrays
                out[name.end() : name.end() + 4] = struct.pack("<IIQ", GGUF_ARRAY, GGUF_ARRAY, 1) + DEEP * struct.pack(
                    "<IQ", GGUF_ARRAY, 1
                )
            case 4:  # the name of another entry
                out[name.start() : name.end()] = rng.choice(NAME.findall(data, 0, end))[: len(name[0])].ljust(
                    len(name[0]), b"x"
                )
            case _:  # a number after it
                at = name.end() + rng.choice((4, 8, 12, 16, 20))
                size, code = rng.choice(WIDTHS)
                out[at : at + size] = struct.pack(f"<{code}", rng.choice(NUMBERS) % 256**size)
    return bytes(out)


def spoil_kind(path: Path, rng: random.Random, outside: Path) -> None:
    """Replace a file of the model by something else."""
    path.unlink()
    kinds: tuple[Callable[[], Any], ...] = (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to(outside),
        lambda: path.write_bytes(b""),
        lambda: None,
    )
    rng.choice(kinds)()


def spoil(model: Path, rng: random.Random, outside: Path) -> str:
    """Mutate one or two files of a model. Returns their names."""
    files = sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else [model]
    names = []
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
        names.append(path.name)
        data = path.read_bytes()
        if rng.random() < 0.08:
            spoil_kind(path, rng, outside)
        elif path.suffix == ".json":
            path.write_bytes(spoil_json(data, rng) if rng.random() < 0.75 else spoil_bytes(data, rng, len(data)))
        else:
            path.write_bytes((spoil_safetensors if path.suffix == ".safetensors" else spoil_gguf)(data, rng))
    return ", ".join(names)
