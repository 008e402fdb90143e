"""No text holds up ingest's loop, whatever the tokenizer makes of it."""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from pipeline.stages.ingest import loop_texts
from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from tests.rig import Rig
from tests.stages.ingest import models as tiny
from tests.stages.ingest.test_fairness import FACTS, admitted, send
from tests.stages.replays import replays_alike


def splitting(*patterns: str) -> Tokenizer:
    tokenizer = tiny.byte_tokenizer()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return tokenizer


def of_long_words() -> Tokenizer:
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2, "1": 3, "##1": 4}
    return Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=10**6))


@pytest.mark.parametrize(
    "tokenizer",
    [
        splitting(*PRE_TOKENIZERS["superbpe"].splits),
        splitting(*PRE_TOKENIZERS["tiny_aya"].splits),
        splitting(r"(a|aa)+$"),
        of_long_words(),
    ],
    ids=["digits", "digits before a word's end", "exponential", "words"],
)
def test_slow_tokenizers_are_noticed(tokenizer: Tokenizer) -> None:
    assert loop_texts.longest(tokenizer) < 6000


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "gpt-4o"])
def test_others_encode_what_they_did_in_the_loop(name: str) -> None:
    tokenizer = splitting(*PRE_TOKENIZERS[name].splits)
    # A busy machine makes all of them slow: one look at a quieter moment is enough.
    assert any(loop_texts.longest(tokenizer) == loop_texts.LONG_BYTES for _ in range(20))


def test_a_slow_text_holds_up_no_other(tmp_path: Path) -> None:
    tokenizer = splitting(*PRE_TOKENIZERS["superbpe"].splits)
    recording = tmp_path / "ingest.rec"
    digits = "1" * (loop_texts.LONG_BYTES // 2)
    with Rig("ingest", model_dir=tiny.folder(tmp_path, tokenizer=tokenizer), record=recording) as rig:
        rig.start(FACTS)
        send(rig, 1, digits, "a")
        assert admitted(rig, 1) == [1], "the tokenizer is known to be slow now, if it was not before"
        send(rig, 2, digits, "a")
        send(rig, 3, "hi", "b")
        assert admitted(rig, 2) == [3, 2]
    replays_alike("ingest", recording)
