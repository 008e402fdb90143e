"""Requests with images: ingest decodes them, and schedule gets their pixels and where their rows are."""

from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken

from pipeline.media import config as media
from pipeline.media import images, processors
from pipeline.media.config import MediaConfig
from pipeline.runtime import messages as m
from tests.media.model_files import IDEFICS3, TOKENS
from tests.rig import Rig
from tests.stages.ingest import models as tiny
from tests.stages.ingest.media.test_prompt_images import SMOLVLM
from tests.stages.replays import replays_alike

PARAM = "messages[0].content[0]"


def png(seed: int = 0, size: tuple[int, int] = (60, 50)) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def folder(path: Path) -> tuple[Path, MediaConfig]:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    config = IDEFICS3.read(path / "model")
    config = msgspec.structs.replace(config, row_id=tokenizer.token_to_id("<image>"))
    media.save(config, path)
    return tiny.folder(path, SMOLVLM, tokenizer), config


def facts(num_encoder_rows: int = 1000) -> m.ExecuteFacts:
    return msgspec.structs.replace(tiny.facts(max_model_len=2000, vocab_size=400), num_encoder_rows=num_encoder_rows)


def submit(*data: bytes, request_id: int = 1, **options: Any) -> m.Submit:
    message = m.ChatMessage("user", "hi", parts=["hi"], image_offsets=[0] * len(data))
    sent = tiny.submit(m.ChatPrompt([message]), request_id=request_id, **options)
    return msgspec.structs.replace(sent, images=[m.EncodedImage(each, PARAM) for each in data])


def test_schedule_gets_the_pixels_and_the_runs(tmp_path: Path) -> None:
    path, config = folder(tmp_path)
    with Rig("ingest", model_dir=path) as rig:
        rig.start(facts())
        rig.send(submit(png(), png(1), max_tokens=5), "gateway.0")
        accepted, admit = rig.receive("gateway", m.Accepted), rig.receive("schedule", m.Admit)
        ids = np.frombuffer(rig.bytes_of(admit.prompt_ids), np.int32)
        assert np.array_equal(ids, np.frombuffer(rig.bytes_of(accepted.prompt_ids), np.int32))
        assert len({item.key for item in admit.media}) == 2
        covered = []
        for item, data in zip(admit.media, (png(), png(1)), strict=True):
            expected = processors.process(images.decode(data), config)
            assert rig.bytes_of(item.pixels) == expected.pixels.tobytes()
            assert tuple(item.shape) == expected.pixels.shape
            assert item.shape == list(expected.pixels.shape)
            assert tuple(item.grid) == expected.grid
            assert [length for _, length in item.runs] == list(expected.run_lengths)
            covered += [at for offset, length in item.runs for at in range(offset, offset + length)]
        assert covered == np.flatnonzero(ids == config.row_id).tolist()


def test_texts_go_on_while_images_are_decoded_and_an_aborted_request_is_answered(tmp_path: Path) -> None:
    path, _ = folder(tmp_path)
    with Rig("ingest", model_dir=path) as rig:
        rig.start(facts())
        rig.send(submit(png(), request_id=1), "gateway.0")
        rig.send(m.Abort(1, 0), "gateway.0")
        rig.send(tiny.submit(m.ChatPrompt([m.ChatMessage("user", "x", parts=["x"])]), request_id=2), "gateway.0")
        answers = {rig.receive("gateway").request_id for _ in range(2)}
        assert answers == {1, 2}
        assert rig.receive("schedule", m.Admit).request_id == 2


@pytest.mark.parametrize(
    ("data", "rows", "words"),
    [
        (b"<svg/>", 1000, "the image 'messages[0].content[0]' is in no format that is read here"),
        (png(), 0, "'messages[0].content[0]' is an image, and this model reads text only"),
        (
            png(),
            100,
            "takes 272 rows of embeddings, and the server has room for 100",
        ),
    ],
)
def test_the_gateway_hears_why_an_image_is_refused(data: bytes, rows: int, words: str, tmp_path: Path) -> None:
    path, _ = folder(tmp_path)
    with Rig("ingest", model_dir=path) as rig:
        rig.start(facts(rows))
        rig.send(submit(png(5) if rows == 1000 else data, data), "gateway.0")
        rejected = rig.receive("gateway")
        assert isinstance(rejected, m.Rejected)
        assert words in rejected.failure.message
        assert (rejected.failure.status, rejected.failure.param) == (400, PARAM)
        assert rig.nothing("schedule")


def test_a_model_without_media_json_refuses_images(tmp_path: Path) -> None:
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(facts())
        rig.send(submit(png()), "gateway.0")
        assert "reads text only" in rig.receive("gateway", m.Rejected).failure.message


def test_a_request_that_is_submitted_again_with_its_ids_has_the_same_runs(tmp_path: Path) -> None:
    path, _ = folder(tmp_path)
    with Rig("ingest", model_dir=path) as rig:
        rig.start(facts())
        sent = submit(png(), png(1), max_tokens=5)
        rig.send(sent, "gateway.0")
        first = rig.receive("schedule", m.Admit)
        ids = rig.bytes_of(first.prompt_ids)
        rig.send(msgspec.structs.replace(sent, attempt=1, prompt=m.IdsPrompt(ids)), "gateway.0")
        again = rig.receive("schedule", m.Admit)
        assert rig.bytes_of(again.prompt_ids) == ids
        assert [(one.key, one.runs) for one in again.media] == [(one.key, one.runs) for one in first.media]
        other = np.frombuffer(ids, np.int32)[:-300].tobytes()
        rig.send(msgspec.structs.replace(sent, attempt=2, prompt=m.IdsPrompt(other)), "gateway.0")
        assert rig.receive("gateway", m.Rejected).failure.param == "prompt"


def test_a_chat_with_images_is_not_cut(tmp_path: Path) -> None:
    path, _ = folder(tmp_path)
    with Rig("ingest", model_dir=path) as rig:
        rig.start(facts())
        cut = msgspec.structs.replace(submit(png()), prompt_options=m.PromptOptions(truncate=50))
        rig.send(cut, "gateway.0")
        assert rig.receive("gateway", m.Rejected).failure.param == "truncate_prompt_tokens"


def test_a_recording_has_the_images(tmp_path: Path) -> None:
    path, _ = folder(tmp_path)
    recording = tmp_path / "ingest.rec"
    with Rig("ingest", model_dir=path, record=recording) as rig:
        rig.start(facts())
        rig.send(submit(png(), request_id=1), "gateway.0")
        rig.send(submit(b"x", request_id=2), "gateway.0")
        rig.send(tiny.submit("hi", request_id=3), "gateway.0")
        assert {rig.receive("gateway").request_id for _ in range(3)} == {1, 2, 3}
        rig.receive("schedule", m.Admit)
    replays_alike("ingest", recording)
