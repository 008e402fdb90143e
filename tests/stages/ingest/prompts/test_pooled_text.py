"""Texts and pairs for a pooler are encoded and truncated as by the library, which does it as transformers."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pipeline.config.settings import LimitSettings
from pipeline.runtime import messages as m
from pipeline.stages.ingest.prompts.pooled_layout import TokenTypesError
from pipeline.stages.ingest.prompts.pooled_text import NUM_KEPT, PooledTexts, Truncation
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates
from tests.slices import part_of

WORDS = "abcdefghij"
VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {word: 3 + index for index, word in enumerate(WORDS)}
SPECIALS = [("[CLS]", 1), ("[SEP]", 2)]
POST_PROCESSORS: dict[str, Any] = {
    "bert": processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=SPECIALS
    ),
    "plain types": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=SPECIALS
    ),
    "nothing": processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[]),
}

MAX_IDS = 20


def tokenizer_of(post_processor: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = post_processor
    return tokenizer


texts = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


@settings(max_examples=part_of(400, 100), deadline=None)
@given(
    name=st.sampled_from(sorted(POST_PROCESSORS)),
    text=texts,
    pair=st.one_of(st.none(), texts),
    room=st.one_of(st.none(), st.integers(0, 12)),
    side=st.sampled_from(["left", "right"]),
    adds=st.booleans(),
)
def test_ids_and_types_are_those_of_the_library(
    name: str, text: str, pair: str | None, room: int | None, side: str, adds: bool
) -> None:
    tokenizer = tokenizer_of(POST_PROCESSORS[name])
    reference = Tokenizer.from_str(tokenizer.to_str())
    num_added = tokenizer.num_special_tokens_to_add(pair is not None) if adds else 0
    most = None if room is None else max(1, room + num_added)
    if most is not None:
        if not adds:
            # The library makes room for special tokens even if it adds none.
            reference.post_processor = POST_PROCESSORS["nothing"]
        reference.enable_truncation(most, strategy="longest_first", direction=side)
    expected = reference.encode(text, pair, add_special_tokens=adds)
    assume(adds or pair is None)  # only with special tokens is it known where a pair's second text begins
    assume(expected.type_ids[:1] != [1])  # nothing before the second text, which is refused
    encoder, cut = PooledTexts(tokenizer, MAX_IDS), Truncation(most, side == "right")
    for _ in range(2):  # a pair's first text is encoded, then known
        found = encoder.encode(m.TextPrompt(text, pair), cut, add_special_tokens=adds)
        assert found.ids.tolist() == expected.ids
        types = expected.type_ids
        assert found.segment_start == (types.index(1) if 1 in types else 0)


def test_types_that_are_not_those_of_two_texts_are_refused() -> None:
    for pair in ("$A:1 $B", "$A $B:1 $A", "$A $B:2"):
        tokenizer = tokenizer_of(processors.TemplateProcessing(single="$A", pair=pair, special_tokens=[]))
        with pytest.raises(TokenTypesError):
            PooledTexts(tokenizer, MAX_IDS).encode(
                m.TextPrompt("a", "b"), Truncation(None, True), add_special_tokens=True
            )


class CountingTokenizer:
    """A tokenizer that counts the texts that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.texts += texts
        return self._tokenizer.encode_batch_fast(texts, **options)

    def post_process(self, *arguments: Any) -> Any:
        return self._tokenizer.post_process(*arguments)


class TestFirstTexts:
    def test_a_query_is_encoded_once_for_all_documents(self) -> None:
        tokenizer = CountingTokenizer(tokenizer_of(POST_PROCESSORS["bert"]))
        encoder: Any = PooledTexts(tokenizer, MAX_IDS)  # type: ignore[arg-type]
        for most in (None, 6):
            for document in ("b", "c", "d"):
                found = encoder.encode(m.TextPrompt("a", document), Truncation(most, True), add_special_tokens=True)
                assert found.ids.tolist() == [1, 3, 2, VOCABULARY[document], 2]
        assert tokenizer.texts == ["a", "b", "c", "d"] * 2

    def test_each_client_has_its_own(self) -> None:
        tokenizer = CountingTokenizer(tokenizer_of(POST_PROCESSORS["bert"]))
        encoder: Any = PooledTexts(tokenizer, MAX_IDS)  # type: ignore[arg-type]
        for scope in ("one", "other"):
            encoder.encode(m.TextPrompt("a", "b"), Truncation(None, True), scope, add_special_tokens=True)
        assert tokenizer.texts == ["a", "b"] * 2

    def test_some_are_kept_and_no_more_of_each_than_a_prompt_can_have(self) -> None:
        tokenizer = CountingTokenizer(tokenizer_of(POST_PROCESSORS["bert"]))
        encoder: Any = PooledTexts(tokenizer, MAX_IDS)  # type: ignore[arg-type]
        for number in (*range(NUM_KEPT + 1), 0):
            query = "a " * (1000 + number)
            found = encoder.encode(m.TextPrompt(query, "b"), Truncation(8, False), add_special_tokens=True)
            assert found.ids.tolist() == [1, 3, 3, 3, 3, 2, 4, 2]
        assert len(tokenizer.texts) == 2 * (NUM_KEPT + 2)
        kept = encoder._first_texts.values()
        assert len(kept) == NUM_KEPT and all(len(one.ids) == MAX_IDS and one.ids.base is None for one in kept)

    def test_one_that_is_too_long_is_refused_before_it_has_python_objects(self) -> None:
        tokenizer = CountingTokenizer(tokenizer_of(POST_PROCESSORS["bert"]))
        encoder: Any = PooledTexts(tokenizer, MAX_IDS)  # type: ignore[arg-type]
        numbers: list[int] = []

        def refuse(num_ids: int) -> None:
            numbers.append(num_ids)
            raise ValueError

        for _ in range(2):
            with pytest.raises(ValueError):
                encoder.encode(
                    m.TextPrompt("a " * 1000, "b"), Truncation(None, True), add_special_tokens=True, check_num=refuse
                )
        assert numbers == [1004, 1004] and len(tokenizer.texts) == 3
        assert all(not len(one.ids) for one in encoder._first_texts.values())


def test_two_long_texts_that_are_cut_cost_no_more_than_their_length() -> None:
    """The library joins each part of one with each part of the other: 70 GB for these."""
    encoder = PooledTexts(tokenizer_of(POST_PROCESSORS["template"]), MAX_IDS)
    long = "a b " * 50_000
    found = encoder.encode(m.TextPrompt(long, long), Truncation(9, True), add_special_tokens=True)
    assert found.ids.tolist() == [1, 3, 4, 3, 2, 3, 4, 3, 2]


FACTS = m.ExecuteFacts(num_blocks=64, block_size=16, max_model_len=8, vocab_size=13, hidden_size=4)
POOLED = m.GenerationOptions(max_tokens=1, pooling=m.Pooling.CLS)


def processor_of(*, generates: bool = False, has_token_types: bool = True) -> PromptProcessor:
    return PromptProcessor(
        tokenizer_of(POST_PROCESSORS["template"]),
        FACTS,
        ChatTemplates({}, "no template", 1.0),
        LimitSettings(),
        generates=generates,
        has_token_types=has_token_types,
    )


def submit_of(text: str, pair: str | None = None, **options: Any) -> m.Submit:
    return m.Submit(1, 1, 0, 0.0, m.TextPrompt(text, pair), POOLED, prompt_options=m.PromptOptions(**options))


class TestPromptProcessor:
    def test_an_input_may_be_as_long_as_the_model_takes(self) -> None:
        submit = submit_of("a b c d e f")
        ids = processor_of().encode_pooled(submit).ids
        assert len(ids) == 8 and processor_of().max_tokens(ids, submit) == 1
        with pytest.raises(RequestRejected, match="an embedding's input may have one less"):
            processor_of(generates=True).max_tokens(ids, submit)

    def test_a_longer_one_is_refused_unless_it_may_be_cut(self) -> None:
        with pytest.raises(RequestRejected, match=r"maximum context length is 8 .* has 9: truncate_prompt_tokens"):
            processor_of().encode_pooled(submit_of("a b c d e f g"))
        cut = processor_of().encode_pooled(submit_of("a b c d e f g", truncate=-1, truncates_right=True))
        assert cut.ids.tolist() == [1, 3, 4, 5, 6, 7, 8, 2]
        left = processor_of(generates=True).encode_pooled(submit_of("a b c d e f g", truncate=-1))
        assert left.ids.tolist() == [1, 5, 6, 7, 8, 9, 2]

    def test_a_pair_has_types_if_the_model_has(self) -> None:
        submit = submit_of("a b", "c")
        assert processor_of().encode_pooled(submit).segment_start == 4
        assert processor_of(has_token_types=False).encode_pooled(submit).segment_start == 0

    def test_a_pair_that_is_cut(self) -> None:
        submit = submit_of("a b c d e f", "g h", truncate=7, truncates_right=True)
        encoded = processor_of().encode_pooled(submit)
        assert (encoded.ids.tolist(), encoded.segment_start) == ([1, 3, 4, 2, 9, 10, 2], 4)

    def test_less_than_the_special_tokens_is_refused(self) -> None:
        with pytest.raises(RequestRejected, match="'truncate_prompt_tokens' must be at least 3") as error:
            processor_of().encode_pooled(submit_of("a", "b", truncate=2))
        assert error.value.failure.param == "truncate_prompt_tokens"

    def test_an_invalid_text_is_refused(self) -> None:
        with pytest.raises(RequestRejected, match="lone surrogate"):
            processor_of().encode_pooled(submit_of("a", "\ud800"))
