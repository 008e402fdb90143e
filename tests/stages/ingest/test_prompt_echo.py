"""What a client asks about its prompt alone, and the text that is to stand before its output."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import PromptOptions
from pipeline.shm.arrays import ShmRef
from pipeline.stages.ingest.prompt_echo import PromptEcho
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


def ask(rig: Rig, prompt: m.Prompt, options: PromptOptions, max_tokens: int | None = 0) -> None:
    submit = m.Submit(1, 1, 0, 0.0, prompt, m.GenerationOptions(max_tokens=max_tokens), prompt_options=options)
    rig.send(submit, "gateway.0")


def accepted(rig: Rig, prompt: m.Prompt, options: PromptOptions) -> tuple[m.Accepted, list[int]]:
    """The answer to a prompt from which nothing is generated. Schedule must never hear of it."""
    ask(rig, prompt, options)
    answer = rig.receive("gateway", m.Accepted)
    ids = np.frombuffer(rig.bytes_of(answer.prompt_ids), np.int32).tolist()
    if isinstance(answer.prompt_ids, ShmRef):
        rig.send(m.Release([answer.prompt_ids.offset], [answer.prompt_ids.generation]), "gateway.0")
    rig.until(lambda load: load.num_open == 0)
    assert rig.nothing("schedule", 0)
    return answer, ids


def ids_prompt(ids: list[int]) -> m.IdsPrompt:
    return m.IdsPrompt(np.array(ids, np.int32).tobytes())


class TestLookups:
    def test_of_a_text_give_its_ids_and_what_they_are_called(self, rig: Rig) -> None:
        options = PromptOptions(any_length=True, with_token_strs=True)
        answer, ids = accepted(rig, m.TextPrompt("a é"), options)
        assert answer.token_strs == ["a", "Ġ", "Ã", "©"]
        assert [LETTERS[i] for i in ids] == answer.token_strs
        assert answer.text is None

    def test_of_a_text_give_the_bytes_that_its_ids_stand_for(self, rig: Rig) -> None:
        options = PromptOptions(any_length=True, with_pieces=True)
        answer, _ = accepted(rig, m.TextPrompt("a é"), options)
        assert answer.pieces == [b"a", b" ", b"\xc3", b"\xa9"] and answer.token_strs is None
        answer, ids = accepted(rig, tiny.chat("hi"), options)
        assert answer.pieces is not None and ids[0] == 256
        assert b"".join(answer.pieces) == b"<s>user:hi</s><s>assistant:", "special tokens as they are written"

    def test_of_a_chat_go_through_its_template(self, rig: Rig) -> None:
        answer, ids = accepted(rig, tiny.chat("hi"), PromptOptions(any_length=True, with_text=True))
        assert answer.text == "<s>user:hi</s><s>assistant:"
        assert ids[0] == 256
        assert answer.token_strs is None

    @pytest.mark.parametrize("length", [0, 63, 64, 65, 30_000])
    def test_are_of_any_length(self, rig: Rig, length: int) -> None:
        options = PromptOptions(any_length=True, with_token_strs=True)
        answer, ids = accepted(rig, m.TextPrompt("x" * length), options)
        assert (len(ids), answer.token_strs) == (length, ["x"] * length)

    @pytest.mark.parametrize("length", [0, 100, MANY_IDS + 1])
    def test_of_ids_give_their_text(self, rig: Rig, length: int) -> None:
        place = LETTERS.index("y")
        answer, ids = accepted(rig, ids_prompt([place] * length), PromptOptions(any_length=True, with_text=True))
        assert (answer.text, ids) == ("y" * length, [place] * length)

    def test_show_special_tokens_and_what_is_no_character(self, rig: Rig) -> None:
        ids = [256, LETTERS.index("h"), LETTERS.index("Ã"), 257, LETTERS.index("Ã")]
        answer, _ = accepted(rig, ids_prompt(ids), PromptOptions(any_length=True, with_text=True))
        assert answer.text == "<s>h\ufffd</s>\ufffd"

    @pytest.mark.parametrize("beyond", [258, 2**31 - 1])
    def test_of_ids_beyond_the_vocabulary_name_the_first(self, rig: Rig, beyond: int) -> None:
        ask(rig, ids_prompt([1, 2, 3, beyond, beyond]), PromptOptions(any_length=True, with_text=True))
        failure = rig.receive("gateway", m.Rejected).failure
        assert (failure.status, failure.param) == (400, "prompt[3]")
        assert str(beyond) in failure.message and "0..257" in failure.message

    def test_of_too_many_tokens_are_refused(self, rig: Rig) -> None:
        ask(rig, m.TextPrompt("x" * (m.MAX_SHOWN_IDS + 1)), PromptOptions(any_length=True))
        failure = rig.receive("gateway", m.Rejected).failure
        assert (failure.status, failure.code) == (400, "too_many_tokens")

    def test_that_are_aborted_are_answered(self, smollm2_dir: Path) -> None:
        with Rig("ingest", model_dir=smollm2_dir) as rig:
            rig.start(tiny.facts(vocab_size=49152))
            for request_id in (1, 2):  # the first keeps the one thread
                text = m.TextPrompt("a long story of the sea. " * 8000)
                options = PromptOptions(any_length=True)
                nothing = m.GenerationOptions(max_tokens=0)
                submit = m.Submit(request_id, 1, 0, 0.0, text, nothing, prompt_options=options)
                rig.send(submit, "gateway.0")
            rig.send(m.Abort(2, 1), "gateway.0")
            rejected = rig.receive("gateway", m.Rejected)
            assert (rejected.request_id, rejected.failure.code) == (2, "aborted")
            answer = rig.receive("gateway", m.Accepted)
            assert answer.request_id == 1
            assert isinstance(answer.prompt_ids, ShmRef)
            rig.send(m.Release([answer.prompt_ids.offset], [answer.prompt_ids.generation]), "gateway.0")
            rig.until(lambda load: load.num_open == 0)
            assert rig.nothing("schedule", 0)


def test_the_tokens_around_a_text_may_be_asked_for_or_not(smollm2_dir: Path, tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = tiny.byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    with Rig("ingest", model_dir=tiny.folder(tmp_path, tokenizer=tokenizer)) as rig:
        rig.start(tiny.facts())
        counts = {}
        for asked in (None, True, False):
            _, text = accepted(rig, m.TextPrompt("x"), PromptOptions(asked, any_length=True))
            _, chat = accepted(rig, tiny.chat("x"), PromptOptions(asked, any_length=True))
            counts[asked] = (text.count(256), chat.count(256))
    assert counts == {None: (1, 2), True: (1, 3), False: (0, 2)}


class TestAnEcho:
    def test_of_no_output_fits_the_whole_context_and_no_more(self, rig: Rig) -> None:
        _, ids = accepted(rig, m.TextPrompt("x" * 64), PromptOptions())
        assert len(ids) == 64
        ask(rig, m.TextPrompt("x" * 65), PromptOptions())
        assert rig.receive("gateway", m.Rejected).failure.code == "context_length_exceeded"

    def test_leaves_a_broken_character_to_the_output_that_completes_it(self, rig: Rig) -> None:
        prompt = ids_prompt([LETTERS.index("a"), LETTERS.index("Ã")])
        ask(rig, prompt, PromptOptions(with_text=True), max_tokens=3)
        assert rig.receive("gateway", m.Accepted).text == "a"
        assert tiny.options_of(rig.receive("schedule", m.Admit)).max_tokens == 3
        assert accepted(rig, prompt, PromptOptions(with_text=True))[0].text == "a\ufffd"

    def test_of_a_text_is_what_was_written(self) -> None:
        shown = PromptEcho(tiny.byte_tokenizer())
        assert shown.text(m.TextPrompt("  Ünï </s>"), [1], is_continued=True) == "  Ünï </s>"


def test_byte_fallback_vocabularies_are_shown_like_the_output_is() -> None:
    tokenizer = byte_fallback()
    letters = byte_ids(tokenizer)
    shown = PromptEcho(tokenizer)
    ids = [letters[byte] for byte in "né".encode()] + [letters[0xE2]]
    assert shown.text(ids_prompt(ids), ids, is_continued=False) == "né\ufffd"
    assert shown.text(ids_prompt(ids), ids, is_continued=True) == "né"
    assert shown.token_strs([letters[0xE2], 10**6]) == ["<0xE2>", ""]
