"""Every prompt becomes ids or a rejection with a clear error."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers import models as tokenizer_models

from pipeline.runtime import messages as m
from pipeline.stages.ingest.prompts import prompt_processor
from pipeline.stages.ingest.prompts.longest_id import longest_id_bytes
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from tests.fakes import inline
from tests.slices import part_of
from tests.stages.ingest import models as tiny


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptProcessor:
    folder = tiny.folder(tmp_path_factory.mktemp("tiny"))
    return prompt_processor.load(folder, tiny.facts(), Tokenizer.from_file(str(folder / "tokenizer.json")))


def rejected(prompts: PromptProcessor, submit: m.Submit) -> m.Failure:
    """The failure that rejects a request."""
    with pytest.raises(RequestRejected) as caught:
        ids_of(prompts, submit)
    return caught.value.failure


def ids_of(prompts: PromptProcessor, submit: m.Submit) -> tuple[list[int], int]:
    prompt = submit.prompt
    ids = np.frombuffer(inline(prompt.ids), np.int32) if isinstance(prompt, m.IdsPrompt) else prompts.encode(prompt).ids
    room = prompts.max_tokens(ids, submit)
    prompts.complete(submit.options, room)
    return ids.tolist(), room


def given_ids(*ids: int) -> m.IdsPrompt:
    return m.IdsPrompt(np.array(ids, np.int32).tobytes())


def test_a_chat_is_rendered_by_the_template_and_its_special_tokens_are_single_ids(prompts: PromptProcessor) -> None:
    ids, room = ids_of(prompts, tiny.submit(tiny.chat("hi")))
    text = tiny.byte_tokenizer().decode(ids, skip_special_tokens=False)
    assert text == "<s>user:hi</s><s>assistant:"
    assert (ids[0], ids.count(257), room) == (256, 1, 64 - len(ids))


def test_only_texts_get_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made = prompt_processor.load(tiny.folder(tmp_path, "{{ messages[0].content }}"), tiny.facts(), tokenizer)
    chat, text = made.encode(tiny.chat("a")).ids.tolist(), made.encode(m.TextPrompt("a")).ids.tolist()
    assert text == [256, *chat]


def test_without_max_tokens_the_output_may_fill_the_context(prompts: PromptProcessor) -> None:
    assert ids_of(prompts, tiny.submit("x" * 60))[1] == 4
    assert ids_of(prompts, tiny.submit("x" * 60, max_tokens=3))[1] == 3
    assert ids_of(prompts, tiny.submit("x" * 63))[1] == 1


def test_a_prompt_that_leaves_no_room_is_rejected_with_both_numbers(prompts: PromptProcessor) -> None:
    failure = rejected(prompts, tiny.submit("x" * 64))
    assert (failure.status, failure.param, failure.code) == (400, "prompt", "context_length_exceeded")
    assert "64 tokens" in failure.message
    assert "prompt has 64" in failure.message
    assert rejected(prompts, tiny.submit(tiny.chat("x" * 64))).param == "messages"
    assert "at least one output token" in failure.message
    embeds = rejected(prompts, tiny.submit("x" * 64, max_tokens=1, pooling=m.Pooling.LAST))
    assert embeds.message.endswith("prompt has 64: an embedding's input may have one less")


def test_the_models_max_new_tokens_is_only_a_default(tmp_path: Path) -> None:
    folder, tokenizer = tiny.folder(tmp_path), tiny.byte_tokenizer()
    prompts = prompt_processor.load(folder, tiny.facts(), tokenizer, max_new_tokens=7)
    assert ids_of(prompts, tiny.submit("x"))[1] == 7
    assert ids_of(prompts, tiny.submit("x" * 60))[1] == 4, "it never makes a request invalid"
    assert ids_of(prompts, tiny.submit("x", min_tokens=9))[1] == 9
    assert ids_of(prompts, tiny.submit("x", max_tokens=30))[1] == 30


def test_max_tokens_beyond_the_context_is_rejected(prompts: PromptProcessor) -> None:
    failure = rejected(prompts, tiny.submit("x" * 60, max_tokens=5))
    assert (failure.status, failure.param, failure.code) == (400, "max_tokens", "context_length_exceeded")
    assert "65: 60 in the prompt and 5 to generate" in failure.message
    assert rejected(prompts, tiny.submit("x", max_tokens=-1)).param == "max_tokens"


def test_max_tokens_beyond_the_context_is_lowered_if_the_request_allows_it(prompts: PromptProcessor) -> None:
    options = m.PromptOptions(lowers_max_tokens=True)
    for max_tokens, room in ((5, 4), (4, 4), (3, 3)):
        submit = msgspec.structs.replace(tiny.submit("x" * 60, max_tokens=max_tokens), prompt_options=options)
        assert ids_of(prompts, submit)[1] == room
    full = msgspec.structs.replace(tiny.submit("x" * 64, max_tokens=5), prompt_options=options)
    assert rejected(prompts, full).code == "context_length_exceeded"


def test_a_text_that_is_too_long_is_rejected_before_it_is_tokenized(prompts: PromptProcessor) -> None:
    failure = rejected(prompts, tiny.submit("x" * 10_000_000))
    assert failure.code == "context_length_exceeded"
    assert "at least" in failure.message


def test_rendered_chats_have_the_same_length_limit(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path, "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}")
    made = prompt_processor.load(folder, tiny.facts(), tiny.byte_tokenizer())
    assert rejected(made, tiny.submit(tiny.chat("hi"))).code == "context_length_exceeded"


@pytest.mark.parametrize("ids", [(-1,), (258,), (1, 2, 2**31 - 1), (-(2**31),)])
def test_ids_outside_the_vocabulary_are_rejected(prompts: PromptProcessor, ids: tuple[int, ...]) -> None:
    failure = rejected(prompts, tiny.submit(given_ids(*ids)))
    assert (failure.status, failure.param) == (400, f"prompt[{len(ids) - 1}]")
    assert f"token id {ids[-1]} is out of vocabulary, the model's ids are 0..257" in failure.message
    assert str(ids[-1]) in failure.message
    assert ids_of(prompts, tiny.submit(given_ids(0, 257)))[0] == [0, 257]


@pytest.mark.parametrize("stop_id", [-1, 258, 2**62])
def test_stop_ids_outside_the_vocabulary_are_rejected(prompts: PromptProcessor, stop_id: int) -> None:
    failure = rejected(prompts, tiny.submit("x", stop_token_ids=[0, stop_id]))
    assert (failure.status, failure.param) == (400, "stop_token_ids")


def test_the_executors_vocabulary_size_counts_not_the_tokenizers() -> None:
    made = tiny.prompts(tiny.byte_tokenizer(), tiny.facts(vocab_size=300))
    assert ids_of(made, tiny.submit(given_ids(299)))[0] == [299]
    assert rejected(tiny.prompts(tiny.byte_tokenizer(), tiny.facts(vocab_size=100)), tiny.submit("ÿ" * 3)).status == 400


@pytest.mark.parametrize("prompt", ["", given_ids(), m.ChatPrompt([])])
def test_an_empty_prompt_is_rejected(prompts: PromptProcessor, prompt: m.Prompt | str) -> None:
    failure = rejected(prompts, tiny.submit(prompt))
    assert failure.status == 400
    assert "empty" in failure.message


def test_a_model_without_a_template_rejects_chats_with_advice(tmp_path: Path) -> None:
    made = prompt_processor.load(tiny.folder(tmp_path, template=None), tiny.facts(), tiny.byte_tokenizer())
    failure = rejected(made, tiny.submit(tiny.chat("hi")))
    assert (failure.status, failure.param) == (400, "messages")
    assert "/v1/completions" in failure.message


def test_completions_work_with_an_invalid_template(tmp_path: Path) -> None:
    made = prompt_processor.load(tiny.folder(tmp_path, template="{% for %}"), tiny.facts(), tiny.byte_tokenizer())
    assert "not valid" in rejected(made, tiny.submit(tiny.chat("hi"))).message
    assert len(ids_of(made, tiny.submit("hi"))[0]) == 2


def test_an_error_raised_by_a_template_reaches_the_client(tmp_path: Path) -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
    made = prompt_processor.load(tiny.folder(tmp_path, source), tiny.facts(), tiny.byte_tokenizer())
    failure = rejected(made, tiny.submit(tiny.chat("hi", role="robot")))
    assert (failure.status, failure.param) == (400, "messages")
    assert "roles must alternate" in failure.message
    assert len(ids_of(made, tiny.submit(tiny.chat("hi")))[0]) == 2


def test_bos_and_eos_tokens_come_from_the_models_config(tmp_path: Path) -> None:
    made = prompt_processor.load(
        tiny.folder(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"),
        tiny.facts(),
        tiny.byte_tokenizer(),
    )
    ids = made.encode(tiny.chat("a")).ids.tolist()
    assert (ids[0], ids[-1], len(ids)) == (256, 257, 3)


@settings(max_examples=part_of(300, 75), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.one_of(
        st.text(st.characters()).map(m.TextPrompt),
        st.lists(
            st.builds(m.ChatMessage, st.text(st.characters()), st.text(st.characters()), st.none() | st.text()),
            max_size=4,
        ).map(m.ChatPrompt),
        st.lists(st.integers(-(2**31), 2**31 - 1), max_size=80).map(lambda ids: given_ids(*ids)),
    ),
    max_tokens=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
)
def test_every_request_ends_in_ids_that_fit_or_in_a_valid_rejection(
    prompts: PromptProcessor, prompt: m.Prompt, max_tokens: int | None, stop_token_ids: list[int]
) -> None:
    submit = tiny.submit(prompt, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    try:
        ids, room = ids_of(prompts, submit)
    except RequestRejected as rejection:
        assert rejection.failure.status == 400
        rejection.failure.message.encode()
    else:
        assert all(0 <= i < 258 for i in ids)
        assert (0 if max_tokens == 0 else 1) <= room <= 64 - len(ids)
        assert room == max_tokens or max_tokens is None


def test_the_size_limit_is_the_longest_token_if_no_byte_can_be_lost() -> None:
    byte_level = tiny.byte_tokenizer()
    assert longest_id_bytes(byte_level) == len("</s>")
    byte_level.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_id_bytes(byte_level) is None

    lowercasing = tiny.byte_tokenizer()
    lowercasing.normalizer = normalizers.NFKC()
    assert longest_id_bytes(lowercasing) is None

    words = Tokenizer(tokenizer_models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    assert longest_id_bytes(words) is None

    pieces = Tokenizer(tokenizer_models.BPE({"▁": 0, "▁hello": 1}, [], byte_fallback=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.decoder = decoders.ByteFallback()
    assert longest_id_bytes(pieces) == len("▁hello".encode())


def test_a_text_that_the_tokenizer_fails_on_is_rejected() -> None:
    made = tiny.prompts(Tokenizer(tokenizer_models.WordLevel({"a": 0}, "[UNK]")), tiny.facts())
    failure = rejected(made, tiny.submit("b"))
    assert (failure.status, failure.param) == (400, "prompt")


def test_smollm2_renders_a_chat_as_transformers_does(smollm2_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(smollm2_dir / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=(smollm2_dir / "chat_template.jinja").read_text(),
    )
    made = prompt_processor.load(
        smollm2_dir, tiny.facts(8192, 49152), Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "  Count to  10:\n\n 1 2 3"},
        {"role": "assistant", "content": "4 <5>"},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ours = made.encode(m.ChatPrompt([m.ChatMessage(**message) for message in messages])).ids
    assert ours.tolist() == expected


def resumed(outputs: list[list[int]], *, ignore_eos: bool = False, stop: tuple[int, ...] = ()) -> m.Submit:
    return tiny.submit("hi", max_tokens=4, n=len(outputs), stop_token_ids=list(stop), ignore_eos=ignore_eos)


def checked(prompts: PromptProcessor, outputs: list[list[int]], **options: Any) -> bytes:
    arrays = [np.array(ids, np.int32) for ids in outputs]
    return prompts.check_outputs(arrays, resumed(outputs, **options), 4)


def test_resumed_ids_end_a_sequence_where_the_executor_would_end_it(prompts: PromptProcessor) -> None:
    none, stop = m.Finish.NONE, m.Finish.STOP
    assert checked(prompts, [[1, 2], [1, 257], [], [257]]) == bytes([none, stop, none, stop])
    assert checked(prompts, [[1, 257, 5]], ignore_eos=True) == bytes([none])
    assert checked(prompts, [[1, 7]], stop=(7,)) == bytes([stop])
    assert checked(prompts, [[1, 7]], stop=(7,), ignore_eos=True) == bytes([stop])
    assert checked(prompts, []) == b""


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([[1, 2, 3, 4, 5]], r"received\[0\] has 5 ids, but at most 4 may be generated"),
        ([[1], [258]], r"received\[1\] has an unknown id: token id 258 is out of vocabulary, the model's ids are"),
        ([[-1]], r"token id -1"),
        ([[257, 1]], r"received\[0\] has ids after token id 257, which ends a sequence"),
    ],
)
def test_resumed_ids_that_no_stream_can_contain_are_rejected(
    prompts: PromptProcessor, outputs: list[list[int]], words: str
) -> None:
    with pytest.raises(RequestRejected, match=words) as caught:
        checked(prompts, outputs)
    assert (caught.value.failure.status, caught.value.failure.param) == (400, "received")


@pytest.mark.parametrize("field", ["bad_words", "prediction"])
def test_what_the_prompts_of_a_request_share_is_tokenized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Else a thousand prompts with a thousand bad words, in a body of 10 kB, are a million words."""
    facts = msgspec.structs.replace(tiny.facts(), num_speculative_tokens=5)
    processor = prompt_processor.load(tiny.folder(tmp_path), facts, tiny.byte_tokenizer())
    value: Any = [f"a{i}" for i in range(100)] if field == "bad_words" else "ab" * 100
    options = m.GenerationOptions(**{field: value})
    first = processor.complete(options, 8)
    assert first.bad_words_ids or first.predicted_ids
    monkeypatch.setattr(processor, "_tokenizer", None)
    again = processor.complete(msgspec.structs.replace(options, seed=2, **{field: value[:]}), 8)
    assert (again.bad_words_ids, again.predicted_ids) == (first.bad_words_ids, first.predicted_ids)


def test_a_prediction_becomes_ids_if_they_are_used(tmp_path: Path) -> None:
    options = m.GenerationOptions(prediction="ab" * 100)
    for num, expected in ((0, b""), (5, np.array(tiny.byte_tokenizer().encode("ab" * 32).ids, np.int32).tobytes())):
        facts = msgspec.structs.replace(tiny.facts(), num_speculative_tokens=num)
        made = prompt_processor.load(tiny.folder(tmp_path), facts, tiny.byte_tokenizer())
        completed = made.complete(options, 9)
        assert (completed.prediction, completed.predicted_ids) == ("", expected)


def test_a_prediction_lets_other_threads_run_and_only_what_fits_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Tokenizer.encode` holds Python's lock: with a prediction of 4 MB, ingest did nothing else for 8 s."""
    given: list[str] = []

    class Batches:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> list[Any]:
            given.extend(texts)
            return tokenizer.encode_batch_fast(texts, **options)

    facts = msgspec.structs.replace(tiny.facts(), num_speculative_tokens=5)
    tokenizer = tiny.byte_tokenizer()
    made = prompt_processor.load(tiny.folder(tmp_path), facts, tokenizer)
    monkeypatch.setattr(made, "_tokenizer", Batches())
    longest = longest_id_bytes(tokenizer)
    assert longest is not None
    completed = made.complete(m.GenerationOptions(prediction="ab" * 100_000), 9)
    assert [len(text) for text in given] == [facts.max_model_len * longest]
    assert completed.predicted_ids == np.array(tokenizer.encode("ab" * 32).ids, np.int32).tobytes()


def test_no_call_in_a_stage_holds_the_lock_while_it_tokenizes() -> None:
    """Of the tokenizer's calls, only those of batches let other threads run."""
    root = Path(__file__).resolve().parents[4]
    found = [
        f"{path.relative_to(root)}: {match[0]}"
        for folder in ("ingest", "detokenize", "gateway", "schedule", "execute")
        for path in (root / "stages" / folder).rglob("*.py")
        for match in re.finditer(r"tokenizer\.(encode|decode)\(.*", path.read_text())
    ]
    assert not found, "use encode_batch or encode_batch_fast"
