"""Samples of steps, their results and images."""

import msgspec

from pipeline.runtime import messages as m
from pipeline.shm.arrays import ShmRef

KEY = bytes(range(16))
SLOTS = bytes.fromhex("0100000002000000")
REF = ShmRef("ingest.0", 64, 8192, 3)
OPTIONS = msgspec.Raw(msgspec.msgpack.encode(m.GenerationOptions(max_tokens=16)))

STEP_SAMPLES = {
    "submit with images": m.Submit(
        *(7, 1, 0, 1.5, m.ChatPrompt([m.ChatMessage("user", "hi", parts=["hi"], image_offsets=[0, 1])])),
        m.GenerationOptions(max_tokens=16),
        images=[m.EncodedImage(b"GIF89a", "messages[0].content[0]", "low"), m.EncodedImage(b"BM", "messages[0]")],
    ),
    "admit with media": m.Admit(
        7, 1, 0, 1.5, REF, OPTIONS, media=[m.MediaItem(KEY, [(3, 64), (68, 64)], [1, 2], REF, [2, 3, 8, 8])]
    ),
    "step with media": m.Step(
        *(1, 7, SLOTS, [], SLOTS, SLOTS, REF, SLOTS, SLOTS, b"\x01\x00"),
        encodes=[m.EncodeJob(KEY, SLOTS, [1, 2], REF, 7, [2, 3, 8, 8])],
        span_rows=SLOTS,
        span_starts=SLOTS,
        span_counts=SLOTS,
        span_slots=REF,
    ),
    "step_result": m.StepResult(1, 7, SLOTS, SLOTS, REF, b"\x00\x01", 0.25, 0.5),
    "step_result with copies": m.StepResult(1, 7, SLOTS, SLOTS, REF, b"\x00\x01", 0.25, 0.5, 0.125),
    "step_result with media": m.StepResult(1, 7, SLOTS, SLOTS, REF, b"\x00\x01", 0.25, 0.5, encode_s=0.125),
}
