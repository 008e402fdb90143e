"""Lookups about prompts, and prompts echoed before the output."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import PromptOptions
from pipeline.shm.arrays import ShmRef
from pipeline.stages.ingest.prompts.prompt_echo import PromptEcho
from pipeline.stages.ingest.stage import MANY_IDS
from tests.rig import Rig
from tests.stages.detokenize.vocabularies import byte_fallback, byte_ids
from tests.stages.ingest import models as tiny

LETTERS = sorted(tiny.byte_tokenizer().get_vocab(), key=tiny.byte_tokenizer().get_vocab().__getitem__)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts())
        yield rig


def send(rig: Rig, prompt: m.Prompt, options: PromptOptions, max_tokens: int | None = 0) -> None:
    submit = m.Submit(1, 1, 0, 0.0, prompt, m.GenerationOptions(max_tokens=max_tokens), prompt_options=options)
    rig.send(submit, "gateway.0")


def accepted(rig: Rig, prompt: m.Prompt, options: PromptOptions) -> tuple[m.Accepted, list[int]]:
    """The reply to a prompt without output. Schedule must not get the request."""
    send(rig, prompt, options)
    reply = rig.receive("gateway", m.Accepted)
    ids = np.frombuffer(rig.bytes_of(reply.prompt_ids), np.int32).tolist()
    if isinstance(reply.prompt_ids, ShmRef):
        rig.send(m.Release([reply.prompt_ids.offset], [reply.prompt_ids.generation], "gateway.0"), "gateway.0")
    rig.until(lambda load: load.num_open == 0)
    assert rig.nothing("schedule", 0)
    return reply, ids


def ids_prompt(ids: list[int]) -> m.IdsPrompt:
    return m.IdsPrompt(np.array(ids, np.int32).tobytes())


class TestLookups:
    def test_of_a_text_return_its_ids_and_their_tokens(self, rig: Rig) -> None:
        options = PromptOptions(any_length=True, with_token_strs=True)
        reply, ids = accepted(rig, m.TextPrompt("a é"), options)
        assert reply.token_strs == ["a", "Ġ", "Ã", "©"]
        assert [LETTERS[i] for i in ids] == reply.token_strs
        assert reply.text is None

    def test_of_a_text_return_the_bytes_of_its_ids(self, rig: Rig) -> None:
        options = PromptOptions(any_length=True, with_pieces=True)
        reply, _ = accepted(rig, m.TextPrompt("a é"), options)
        assert reply.pieces == [b"a", b" ", b"\xc3", b"\xa9"] and reply.token_strs is None
        reply, ids = accepted(rig, tiny.chat("hi"), options)
        assert reply.pieces is not None and ids[0] == 256
        assert b"".join(reply.pieces) == b"<s>user:hi</s><s>assistant:", "special tokens as text"

    def test_of_a_chat_use_the_template(self, rig: Rig) -> None:
        reply, ids = accepted(rig, tiny.chat("hi"), PromptOptions(any_length=True, with_text=True))
        assert reply.text == "<s>user:hi</s><s>assistant:"
        assert ids[0] == 256
        assert reply.token_strs is None

    @pytest.mark.parametrize("length", [0, 63, 64, 65, 30_000])
    def test_may_have_any_length(self, rig: Rig, length: int) -> None:
        options = PromptOptions(any_length=True, with_token_strs=True)
        reply, ids = accepted(rig, m.TextPrompt("x" * length), options)
        assert (len(ids), reply.token_strs) == (length, ["x"] * length)

    @pytest.mark.parametrize("length", [0, 100, MANY_IDS + 1])
    def test_of_ids_return_their_text(self, rig: Rig, length: int) -> None:
        token_id = LETTERS.index("y")
        reply, ids = accepted(rig, ids_prompt([token_id] * length), PromptOptions(any_length=True, with_text=True))
        assert (reply.text, ids) == ("y" * length, [token_id] * length)

    def test_contain_special_tokens_and_invalid_characters(self, rig: Rig) -> None:
        ids = [256, LETTERS.index("h"), LETTERS.index("Ã"), 257, LETTERS.index("Ã")]
        reply, _ = accepted(rig, ids_prompt(ids), PromptOptions(any_length=True, with_text=True))
        assert reply.text == "<s>h\ufffd</s>\ufffd"

    @pytest.mark.parametrize("beyond", [258, 2**31 - 1])
    def test_of_ids_beyond_the_vocabulary_fail_and_name_the_first(self, rig: Rig, beyond: int) -> None:
        send(rig, ids_prompt([1, 2, 3, beyond, beyond]), PromptOptions(any_length=True, with_text=True))
        failure = rig.receive("gateway", m.Rejected).failure
        assert (failure.status, failure.param) == (400, "prompt[3]")
        assert str(beyond) in failure.message and "0..257" in failure.message

    def test_of_too_many_tokens_are_rejected(self, rig: Rig) -> None:
        send(rig, m.TextPrompt("x" * (m.MAX_SHOWN_IDS + 1)), PromptOptions(any_length=True))
        failure = rig.receive("gateway", m.Rejected).failure
        assert (failure.status, failure.code) == (400, "too_many_tokens")

    def test_get_a_reply_if_they_are_aborted(self, smollm2_dir: Path) -> None:
        with Rig("ingest", model_dir=smollm2_dir) as rig:
            rig.start(tiny.facts(vocab_size=49152))
            for request_id in (1, 2):  # the first occupies the only thread
                text = m.TextPrompt("a long story of the sea. " * 8000)
                options = PromptOptions(any_length=True)
                nothing = m.GenerationOptions(max_tokens=0)
                submit = m.Submit(request_id, 1, 0, 0.0, text, nothing, prompt_options=options)
                rig.send(submit, "gateway.0")
            rig.send(m.Abort(2, 1), "gateway.0")
            rejected = rig.receive("gateway", m.Rejected)
            assert (rejected.request_id, rejected.failure.code) == (2, "aborted")
            reply = rig.receive("gateway", m.Accepted)
            assert reply.request_id == 1
            assert isinstance(reply.prompt_ids, ShmRef)
            rig.send(m.Release([reply.prompt_ids.offset], [reply.prompt_ids.generation], "gateway.0"), "gateway.0")
            rig.until(lambda load: load.num_open == 0)
            assert rig.nothing("schedule", 0)


def test_special_tokens_around_a_text_are_optional(smollm2_dir: Path, tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = tiny.byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    with Rig("ingest", model_dir=tiny.folder(tmp_path, tokenizer=tokenizer)) as rig:
        rig.start(tiny.facts())
        counts = {}
        for add_special_tokens in (None, True, False):
            _, text = accepted(rig, m.TextPrompt("x"), PromptOptions(add_special_tokens, any_length=True))
            _, chat = accepted(rig, tiny.chat("x"), PromptOptions(add_special_tokens, any_length=True))
            counts[add_special_tokens] = (text.count(256), chat.count(256))
    assert counts == {None: (1, 2), True: (1, 3), False: (0, 2)}


class TestAnEcho:
    def test_without_output_may_fill_the_whole_context(self, rig: Rig) -> None:
        _, ids = accepted(rig, m.TextPrompt("x" * 64), PromptOptions())
        assert len(ids) == 64
        send(rig, m.TextPrompt("x" * 65), PromptOptions())
        assert rig.receive("gateway", m.Rejected).failure.code == "context_length_exceeded"

    def test_leaves_an_incomplete_character_to_the_output(self, rig: Rig) -> None:
        prompt = ids_prompt([LETTERS.index("a"), LETTERS.index("Ã")])
        send(rig, prompt, PromptOptions(with_text=True), max_tokens=3)
        assert rig.receive("gateway", m.Accepted).text == "a"
        assert tiny.options_of(rig.receive("schedule", m.Admit)).max_tokens == 3
        assert accepted(rig, prompt, PromptOptions(with_text=True))[0].text == "a\ufffd"

    def test_of_a_text_is_the_original_text(self) -> None:
        shown = PromptEcho(tiny.byte_tokenizer())
        assert shown.text(m.TextPrompt("  Ünï </s>"), [1], is_continued=True) == "  Ünï </s>"


def test_an_echo_with_byte_fallback_is_decoded_like_the_output() -> None:
    tokenizer = byte_fallback()
    letters = byte_ids(tokenizer)
    shown = PromptEcho(tokenizer)
    ids = [letters[byte] for byte in "né".encode()] + [letters[0xE2]]
    assert shown.text(ids_prompt(ids), ids, is_continued=False) == "né\ufffd"
    assert shown.text(ids_prompt(ids), ids, is_continued=True) == "né"
    assert shown.token_strs([letters[0xE2], 10**6]) == ["<0xE2>", ""]
