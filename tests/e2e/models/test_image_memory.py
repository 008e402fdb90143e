"""The memory of a server does not grow with the images that clients send, besides the pixels that ingest caches."""

import random
from io import BytesIO
from pathlib import Path
from urllib.error import HTTPError

import psutil
from PIL import Image

from tests.compiled import link_kernels
from tests.e2e.models.test_images import CHATS, chat, make_folder, png
from tests.e2e.observed import Metrics
from tests.e2e.recovery.test_recovery import post
from tests.e2e.server import Server
from tests.slices import part_of

NUM_ROUNDS = part_of(6, 3)
NUM_HOSTILE, NUM_TINY, AT_ONCE = part_of(40, 5), part_of(1000, 60), 20
MAX_GROWTH = 4 * 1024**2
"""Of a process between the first round and the last; 1 MiB is usual in the gateway. A round's bodies have 8 MiB, or 60
with all cases."""


def tiny(number: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (1 + number % 7, 1 + number // 7 % 5), (number % 256, number // 256 % 256, 1)).save(file, "PNG")
    return file.getvalue()


def hostile(number: int, generator: random.Random) -> bytes:
    begin = png(3, (900, 600))
    match number % 5:
        case 0:
            return generator.randbytes(2_900_000)
        case 1:
            return begin[:20] + generator.randbytes(2_000_000)
        case 2:
            return b"\xff\xd8\xff" + generator.randbytes(1_000_000)
        case 3:
            changed = bytearray(begin)
            for _ in range(30):
                changed[generator.randrange(len(changed))] = generator.randrange(256)
            return bytes(changed)
    file = BytesIO()
    Image.new("RGB", (4000, 4000), (number, 2, generator.randrange(256))).save(file, "PNG")
    return file.getvalue()


def status_of(server: Server, *images: bytes) -> int:
    try:
        post(server, CHATS, **chat(*images, "a", max_tokens=1))
    except HTTPError as error:
        return error.code
    return 200


def own_bytes(server: Server) -> dict[str, int]:
    """By process, without what ingest keeps of pixels."""
    found = {one["name"]: psutil.Process(one["pid"]).memory_full_info().uss for one in server.health()["stages"]}
    found["ingest.0"] -= int(Metrics(server).get("pipeline_image_cache_bytes"))
    return {name: found[name] for name in ("gateway.0", "ingest.0", "detokenize.0")}


def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    _, source = make_folder(tmp_path)
    generator, number = random.Random(1), 0
    with Server(f"model={source}", f"cache_dir={link_kernels(tmp_path / 'cache')}") as server:
        after = []
        for _ in range(NUM_ROUNDS):
            sent = [[hostile(index, generator)] for index in range(NUM_HOSTILE)]
            for _ in range(NUM_TINY // AT_ONCE):
                sent.append([tiny(number + index) for index in range(AT_ONCE)])
                number += AT_ONCE
            for images in sent:
                assert status_of(server, *images) in (200, 400)
            after.append(own_bytes(server))
        server.until_idle()
    growth = {name: after[-1][name] - first for name, first in after[0].items()}
    assert max(growth.values()) < MAX_GROWTH, growth
