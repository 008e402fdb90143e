"""`truncate` keeps the last ids of a prompt, or the first, and ignores the rest."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.config.settings import LimitSettings
from pipeline.runtime import messages as m
from pipeline.stages.ingest.prompts import prompt_processor
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from tests.fakes import inline
from tests.stages.ingest import models as tiny

LIMITS = LimitSettings(max_prompt_bytes=4096)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptProcessor:
    folder = tiny.folder(tmp_path_factory.mktemp("tiny"))
    return prompt_processor.load(folder, tiny.facts(), Tokenizer.from_file(str(folder / "tokenizer.json")), LIMITS)


def cut(
    prompts: PromptProcessor,
    prompt: m.Prompt | str,
    truncate: int,
    *,
    max_tokens: int | None = None,
    right: bool = False,
) -> tuple[list[int], int]:
    options = m.PromptOptions(truncate=truncate, truncates_right=right)
    submitted = msgspec.structs.replace(tiny.submit(prompt, max_tokens=max_tokens), prompt_options=options)
    given = submitted.prompt
    ids = (
        np.frombuffer(inline(given.ids), np.int32)
        if isinstance(given, m.IdsPrompt)
        else prompts.encode(given, options).ids
    )
    ids = prompts.cut(ids, submitted)
    return ids.tolist(), prompts.max_tokens(ids, submitted)


def test_truncate_keeps_the_last_ids(prompts: PromptProcessor) -> None:
    whole = prompts.encode(m.TextPrompt("abcdef")).ids.tolist()
    assert cut(prompts, "abcdef", 2) == (whole[-2:], 62)
    assert cut(prompts, "abcdef", 10)[0] == whole
    chat = prompts.encode(tiny.chat("hi")).ids.tolist()
    assert cut(prompts, tiny.chat("hi"), 3)[0] == chat[-3:]
    assert cut(prompts, m.IdsPrompt(np.arange(9, dtype=np.int32).tobytes()), 4)[0] == [5, 6, 7, 8]


def test_truncation_on_the_right_keeps_the_first_ids(prompts: PromptProcessor) -> None:
    whole = prompts.encode(m.TextPrompt("abcdef")).ids.tolist()
    assert cut(prompts, "abcdef", 2, right=True) == (whole[:2], 62)
    assert cut(prompts, "abcdef", 10, right=True)[0] == whole
    ids = m.IdsPrompt(np.arange(90, dtype=np.int32).tobytes())
    assert cut(prompts, ids, -1, right=True, max_tokens=60)[0] == [0, 1, 2, 3]


def test_minus_one_leaves_room_for_the_output(prompts: PromptProcessor) -> None:
    for max_tokens, kept in ((None, 63), (1, 63), (10, 54), (0, 64), (63, 1)):
        ids, room = cut(prompts, "x" * 500, -1, max_tokens=max_tokens)
        assert (len(ids), room) == (kept, 1 if max_tokens is None else max_tokens)


def test_very_long_texts_and_chats_are_truncated(prompts: PromptProcessor) -> None:
    assert len(cut(prompts, "x" * 4000, 5)[0]) == 5
    assert len(cut(prompts, tiny.chat("x" * 4000), 5)[0]) == 5


def test_a_text_beyond_the_limit_is_rejected_even_with_truncate(prompts: PromptProcessor) -> None:
    for prompt in ("é" * 2049, tiny.chat("x" * 4096)):
        with pytest.raises(RequestRejected, match="the limit is 4096") as caught:
            cut(prompts, prompt, 5)
        assert caught.value.failure.code == "prompt_too_large"


@pytest.mark.parametrize("truncate", [65, -2])
def test_truncate_beyond_the_models_length_is_rejected(prompts: PromptProcessor, truncate: int) -> None:
    with pytest.raises(RequestRejected, match="1 to 64") as caught:
        cut(prompts, "x", truncate)
    assert (caught.value.failure.status, caught.value.failure.param) == (400, "truncate_prompt_tokens")


def test_the_kept_ids_must_leave_room_for_output(prompts: PromptProcessor) -> None:
    for truncate, max_tokens in ((64, None), (60, 5)):
        with pytest.raises(RequestRejected) as caught:
            cut(prompts, "x" * 100, truncate, max_tokens=max_tokens)
        assert caught.value.failure.code == "context_length_exceeded"


def test_truncated_ids_are_checked_too(prompts: PromptProcessor) -> None:
    with pytest.raises(RequestRejected) as caught:
        cut(prompts, m.IdsPrompt(np.array([1, 999, 3], np.int32).tobytes()), 1)
    assert caught.value.failure.param == "prompt[1]"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (m.GenerationOptions(bias_ids=[1, 258], bias_values=[1.0, 1.0]), "logit_bias"),
        (m.GenerationOptions(allowed_ids=np.array([-1, 2], np.int32).tobytes()), "allowed_token_ids"),
        (m.GenerationOptions(allowed_ids=np.array([2, 258], np.int32).tobytes()), "allowed_token_ids"),
        (m.GenerationOptions(stop_token_ids=[2**63]), "stop_token_ids"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_rejected(
    prompts: PromptProcessor, options: m.GenerationOptions, param: str
) -> None:
    with pytest.raises(RequestRejected, match=r"out of vocabulary, the model's ids are 0\.\.257") as caught:
        prompts.complete(options, 5)
    assert (caught.value.failure.status, caught.value.failure.param) == (400, param)


def test_the_executor_gets_bad_words_as_ids(prompts: PromptProcessor, tmp_path: Path) -> None:
    submitted = tiny.submit("x", bad_words=["ab"]).options
    ids = prompts.encode(m.TextPrompt("ab")).ids.tolist()
    completed = msgspec.structs.replace(submitted, max_tokens=5, bad_words=[], bad_words_ids=[ids])
    assert prompts.complete(submitted, 5) == completed
    with pytest.raises(RequestRejected) as caught:
        prompts.complete(msgspec.structs.replace(submitted, bad_words=[""]), 5)
    assert caught.value.failure.param == "bad_words"


@pytest.mark.parametrize(
    ("options", "words", "is_left"),
    [
        ({"allowed": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 1}, [], False),
        ({"allowed": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 0}, [], True),
        ({"allowed": [5, 6], "stop_token_ids": [5], "min_tokens": 1}, [], True),
        ({"allowed": [97, 98]}, ["a", "b"], False),
        ({"allowed": [97, 98]}, ["a", "bb"], True),
        ({"allowed": [97, 5], "stop_token_ids": [5], "min_tokens": 3}, ["a"], False),
    ],
)
def test_options_that_exclude_every_first_token_are_rejected(
    prompts: PromptProcessor, options: dict[str, Any], words: list[str], is_left: bool
) -> None:
    """Otherwise the sequence would end with a server error at once."""
    begun = [prompts.encode(m.TextPrompt(word)).ids.tolist() for word in "ab"]
    ids = {97: begun[0][0], 98: begun[1][0]}
    allowed = np.array([ids.get(one, one) for one in options.pop("allowed")], np.int32).tobytes()
    submitted = m.GenerationOptions(allowed_ids=allowed, bad_words=words, **options)
    if is_left:
        assert prompts.complete(submitted, 5).allowed_ids == allowed
        return
    with pytest.raises(RequestRejected, match="leaves no first token") as caught:
        prompts.complete(submitted, 5)
    failure = caught.value.failure
    assert (failure.status, failure.param, failure.code) == (400, "allowed_token_ids", "nothing_left")
