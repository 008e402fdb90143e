#!/usr/bin/env python3
"""Decodes mutated images: each ends with pixels of the right shape or an error of ours, and with nothing else.

    tools/fuzzing/fuzz_images.py                              1000 cases
    tools/fuzzing/fuzz_images.py --cases 20000 --seed 7
    tools/fuzzing/fuzz_images.py --seed 7 --only 123          one case again

Images in all formats and modes are mutated: bytes flipped, cut, inserted and moved, most of them in headers, numbers
replaced by extreme ones; the checksums of PNG chunks are often mended. Each is decoded and processed, by the
configuration of a random family, in a forked child with little memory (RLIMIT_AS) and time, as in ingest's media
process. A case fails if the child ends by a signal or not in time, if it is refused with "can't be decoded" (a fault of
ours) or for want of memory, if an error is not one short line or has an address, or if pixels or rows do not fit their
grid. Files of failed cases are kept in the folder that --out names.

The exit code is 1 if a case fails. A case depends on its number and the seed alone.
"""

import os
import random
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from pipeline.media.config import (  # noqa: E402
    Gemma3,
    Idefics3,
    Llava,
    LlavaOnevision,
    MediaConfig,
    PanAndScan,
    Pixtral,
    Qwen2VL,
)
from pipeline.media.decoder import decoded  # noqa: E402
from pipeline.media.jobs import Decoded, DecodeJob  # noqa: E402
from pipeline.media.limits import ImageLimits  # noqa: E402
from pipeline.runtime.workers.forked_jobs import limit_memory  # noqa: E402
from tools.fuzzing import mutations  # noqa: E402
from tools.fuzzing.cases import arguments, run_cases, wait  # noqa: E402

LIMITS = ImageLimits(max_bytes=2**20, max_pixels=1_000_000)
HEADER_BYTES = 64
MAX_CHARS = 200
FAULTS = ("can't be decoded", "takes too much memory to decode")

COMMON: dict[str, Any] = {
    "resample": 3,
    "scale": 1 / 255,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "placeholder": "<image>",
    "row_token": "<image>",
    "row_id": 1,
}
CONFIGS: tuple[MediaConfig, ...] = (
    Idefics3(
        **COMMON, longest_edge=128, tile=32, splits=True, tile_rows=4, fake_token="<fake>", global_token="<global>"
    ),
    Llava(**COMMON, pads_to_square=False, shortest_edge=28, size=None, crop=(28, 28), num_rows=4),
    Llava(**COMMON, pads_to_square=True, shortest_edge=None, size=(28, 28), crop=None, num_rows=4),
    LlavaOnevision(**COMMON, size=(28, 28), resolutions=((28, 28), (28, 56), (56, 28)), tile_side=2, max_tiles=2),
    Gemma3(**COMMON, size=(28, 28), num_rows=4, begin_token="<b>", end_token="<e>", pan_and_scan=PanAndScan(9, 4, 1.2)),
    Qwen2VL(**COMMON, min_pixels=784, max_pixels=50_000, patch=14, merge=2, temporal_patch=2),
    Pixtral(**COMMON, max_size=(140, 140), patch=14, merge=1, break_token="<b>", end_token="<e>"),
)


def main() -> int:
    args = arguments(__doc__, memory_mib=256, timeout_s=30.0)
    originals = list(images())

    def run(number: int) -> tuple[str, str]:
        return run_case(*case(number, args.seed, originals), args.memory_mib, args.timeout_s)

    def keep(number: int, target: Path) -> None:
        target.write_bytes(case(number, args.seed, originals)[0])

    return run_cases(args, run, keep, report_every=5000)


def images() -> Iterator[bytes]:
    """Images of all formats, in their modes and with what else may be in their files."""
    rng = np.random.default_rng(1)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 4), np.uint8))
    photo = coarse.resize((64, 48), Image.Resampling.BICUBIC)
    frames = [photo.rotate(90 * turn).convert("RGB") for turn in range(3)]
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(rng.integers(0, 65536, (9, 7), np.uint16))
    variants: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("RGB", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True, "exif": exif, "icc_profile": bytes(300)}),
        ("CMYK", "JPEG", {"restart_marker_rows": 1}),
        ("L", "JPEG", {"quality": 20}),
        ("RGB", "PNG", {"exif": exif}),
        ("RGBA", "PNG", {"icc_profile": bytes(300)}),
        ("P", "PNG", {"transparency": 1}),
        ("LA", "PNG", {}),
        ("1", "PNG", {}),
        ("RGB", "WEBP", {"exif": exif}),
        ("RGBA", "WEBP", {"lossless": True, "icc_profile": bytes(300)}),
        ("P", "GIF", {"transparency": 0}),
        ("RGB", "BMP", {}),
        ("P", "BMP", {}),
        ("1", "BMP", {}),
    )
    for mode, kind, options in variants:
        yield encoded(photo.convert(mode), kind, **options)
    for kind in ("GIF", "WEBP", "PNG"):
        yield encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    yield encoded(deep, "PNG", transparency=3)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def case(number: int, seed: int, originals: list[bytes]) -> tuple[bytes, MediaConfig]:
    """The mutated image of a case, and how it is processed."""
    rng = random.Random(f"{seed}:{number}")
    original = originals[number % len(originals)]
    reach = rng.choice((HEADER_BYTES, 4 * HEADER_BYTES, len(original)))
    data = mutations.spoil_bytes(original, rng, reach)
    if rng.random() < 0.75:  # else nearly all end at a checksum
        data = with_checksums(data)
    return data, rng.choice(CONFIGS)


def with_checksums(data: bytes) -> bytes:
    """A PNG with the right checksum of each chunk; other data as it is."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        (length,) = struct.unpack_from(">I", out, at)
        end = at + 8 + length
        if end + 4 > len(out):
            break
        struct.pack_into(">I", out, end, zlib.crc32(out[at + 4 : end]))
        at = end + 4
    return bytes(out)


def run_case(data: bytes, config: MediaConfig, memory_mib: int, timeout_s: float) -> tuple[str, str]:
    """The result of a case, and what is to be said of it."""
    memory, answer = os.memfd_create("image"), os.memfd_create("answer")
    try:
        os.pwrite(memory, data, 0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                limit_memory(memory_mib * 2**20)
                found = decoded(DecodeJob(0, len(data), LIMITS, 0.0), memory, config)
                os.pwrite(answer, msgspec.msgpack.encode(found), 0)
                code = 0
            finally:
                os._exit(code)
        result = wait(pid, timeout_s)
        if result != 0:
            return "failed", f"not finished within {timeout_s:g} s" if result is None else f"ended with code {result}"
        found = msgspec.msgpack.decode(os.pread(answer, 2**20, 0), type=Decoded)
        why = wrong(found, os.fstat(memory).st_size, config)
        if why:
            return "failed", why
        return ("refused", found.error) if found.error else ("accepted", str(found.shape))
    finally:
        os.close(memory)
        os.close(answer)


def wrong(answer: Decoded, num_bytes: int, config: MediaConfig) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if answer.error:
        if answer.error in FAULTS:
            return answer.error
        if len(answer.error) > MAX_CHARS or not answer.error.isprintable() or re.search("0x|PIL|object", answer.error):
            return f"an error that is not for clients: {answer.error!r}"
        return ""
    if len(answer.shape) != 4 or answer.shape[1] != 3 or int(np.prod(answer.shape)) != num_bytes:
        return f"pixels of shape {answer.shape} in {num_bytes} bytes"
    if answer.text.count(config.row_token) != len(answer.run_lengths) or min(answer.run_lengths) < 1:
        return f"runs of {answer.run_lengths} rows for {answer.text!r}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
