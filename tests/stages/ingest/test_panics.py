"""A prompt that makes the tokenizer panic, or has impossible ids, is a 400 that names it, and the stage continues."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import PromptOptions
from pipeline.stages.ingest import stage as ingest_stage
from pipeline.stages.ingest.prompts.bad_words import BadWord, as_ids
from tests.rig import Rig
from tests.stages.ingest import models as tiny

LONG = "b" * ingest_stage.LONG_BYTES + tiny.PANICS
"""Long enough for the encoding thread."""

MAX_MODEL_LEN = 100_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig("ingest", model_dir=tiny.folder(tmp_path, tokenizer=tiny.panicking_tokenizer())) as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))
        yield rig


def rejected(rig: Rig, submit: m.Submit) -> m.Failure:
    """The reply to the request. Also checks that the next request is served."""
    rig.send(submit, "gateway.0")
    rejected = rig.receive("gateway", m.Rejected)
    assert rejected.request_id == submit.request_id
    rig.until(lambda load: load.num_open == 0)
    rig.send(tiny.submit("hello</s>", request_id=99), "gateway.0")
    assert rig.receive("gateway", m.Accepted).request_id == 99
    ids = np.frombuffer(rig.bytes_of(rig.receive("schedule", m.Admit).prompt_ids), np.int32).tolist()
    assert ids == tiny.byte_tokenizer().encode("hello</s>").ids
    return rejected.failure


PROMPTS = {
    "short": (tiny.submit(tiny.PANICS), "prompt"),
    "long": (tiny.submit(LONG), "prompt"),
    "chat": (tiny.submit(tiny.chat(tiny.PANICS + "</s>")), "messages"),
    "long chat": (tiny.submit(tiny.chat("b" * ingest_stage.LONG_BYTES, tiny.PANICS)), "messages"),
    "lookup": (
        msgspec.structs.replace(
            tiny.submit(tiny.PANICS, max_tokens=0), prompt_options=PromptOptions(any_length=True, with_token_strs=True)
        ),
        "prompt",
    ),
    "cut": (msgspec.structs.replace(tiny.submit(LONG), prompt_options=PromptOptions(truncate=5)), "prompt"),
    "bad words": (tiny.submit("hi", bad_words=["x", tiny.PANICS]), "bad_words"),
    "bad words of a long prompt": (
        tiny.submit("b" * ingest_stage.LONG_BYTES, bad_words=[tiny.PANICS]),
        "bad_words",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_panic_is_a_400_that_names_the_field(rig: Rig, name: str) -> None:
    submit, param = PROMPTS[name]
    for _ in range(2):
        failure = rejected(rig, submit)
        assert (failure.status, failure.param) == (400, param)
        assert "tokenized" in failure.message and "retry-limit-in-match over" in failure.message


@pytest.mark.parametrize("length", [1, ingest_stage.LONG_BYTES])
@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1])
def test_ids_beyond_int32_are_a_400_that_names_the_prompt(tmp_path: Path, token_id: int, length: int) -> None:
    folder = tiny.folder(tmp_path)
    (folder / "tokenizer.json").write_text(tiny.with_id(tiny.byte_tokenizer(), "z", token_id))
    with Rig("ingest", model_dir=folder) as rig:
        rig.start(tiny.facts(max_model_len=MAX_MODEL_LEN))
        failure = rejected(rig, tiny.submit("b" * length + "z"))
        assert (failure.status, failure.param) == (400, "prompt")
        assert "above 2147483647" in failure.message
        failure = rejected(rig, tiny.submit("hi", bad_words=["z"]))
        assert (failure.status, failure.param) == (400, "bad_words")


def test_bad_words_that_make_the_tokenizer_panic_are_named() -> None:
    with pytest.raises(BadWord, match=r"can't be tokenized: .*retry-limit-in-match over"):
        as_ids(tiny.panicking_tokenizer(), [tiny.PANICS], 258)


def test_ids_without_a_token_have_no_text(tmp_path: Path) -> None:
    """A model may have more ids than its tokenizer, and a tokenizer may skip ids."""
    folder = tiny.folder(tmp_path)
    (folder / "tokenizer.json").write_text(tiny.with_id(tiny.byte_tokenizer(), "z", 2**31 - 1))
    with Rig("ingest", model_dir=folder) as rig:
        rig.start(tiny.facts(vocab_size=2**31 - 1))
        hole = tiny.byte_tokenizer().token_to_id("z")
        ids = [257, hole, 300, 2**31 - 2, 256]
        options = PromptOptions(any_length=True, with_text=True, with_token_strs=True, with_pieces=True)
        prompt = m.IdsPrompt(np.array(ids, np.int32).tobytes())
        rig.send(msgspec.structs.replace(tiny.submit(prompt, max_tokens=0), prompt_options=options), "gateway.0")
        answer = rig.receive("gateway", m.Accepted)
        assert answer.text == "</s><s>"
        assert answer.token_strs == ["</s>", "", "", "", "<s>"]
        assert answer.pieces == [b"</s>", b"", b"", b"", b"<s>"]
