"""A gateway gets the logprob records of exactly the ids that count, with the bytes of the ids in them."""

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.detokenize.output_processor import OutputProcessor
from tests.fakes import record
from tests.stages.detokenize.test_output_processor import HIDDEN_SIZE, VOCABULARY, ids_of, opening

ASKING = m.GenerationOptions(stop=["stop"], num_logprobs=1)
WORDS = ids_of("it has to stop here and now")
WIDTH = logprob_bytes(1)
NUM_COUNTED = len("it has to stop")


def token_outputs_of(ids: list[int], num_top: int = 1) -> bytes:
    return b"".join(record(one, num_top) for one in ids)


def entries_of(deltas: m.Deltas) -> list[tuple[list[int], bytes]]:
    """Ids and records of each entry."""
    ids = np.frombuffer(deltas.ids, "<i4").tolist()
    token_outputs = deltas.token_outputs or [b""] * len(deltas.num_ids)
    found, begin = [], 0
    for num, each in zip(deltas.num_ids, token_outputs, strict=True):
        found.append((ids[begin : begin + num], each))
        begin += num
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 100])
@pytest.mark.parametrize("report_every", [1, 3, 100])
def test_records_end_at_a_stop_string(size: int, report_every: int) -> None:
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(5, ASKING))
    ids: list[int] = []
    token_outputs = b""
    for turn, start in enumerate(range(0, len(WORDS), size)):
        part = WORDS[start : start + size]
        finish = m.Finish.LENGTH if start + size >= len(WORDS) else m.Finish.NONE
        processor.settle([5], [start], [len(part)], part, [finish], token_outputs=token_outputs_of(part))
        for gateway in processor.unsent() if turn % report_every == 0 or finish else ():
            for entry in entries_of(processor.deltas(gateway)):
                ids += entry[0]
                token_outputs += entry[1]
            processor.mark_sent(gateway)
    assert ids == WORDS[:NUM_COUNTED]
    assert token_outputs == token_outputs_of(WORDS[:NUM_COUNTED])


def test_repeated_ids_count_once_and_the_stop_id_counts() -> None:
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(5, m.GenerationOptions(num_logprobs=1)))
    processor.settle([5], [0], [4], WORDS[:4], [m.Finish.NONE], token_outputs=token_outputs_of(WORDS[:4]))
    processor.settle([5], [2], [6], WORDS[2:8], [m.Finish.STOP], token_outputs=token_outputs_of(WORDS[2:8]))
    assert entries_of(processor.deltas(0)) == [(WORDS[:8], token_outputs_of(WORDS[:8]))]


def test_an_embedding_is_a_record_of_the_hidden_size() -> None:
    processor = OutputProcessor(VOCABULARY)
    embedding = np.arange(HIDDEN_SIZE, dtype="<f4").tobytes()
    for seq, options in ((3, m.GenerationOptions(pooling=m.Pooling.MEAN)), (4, ASKING), (5, None)):
        processor.open(opening(seq, options))
    token_outputs = embedding + token_outputs_of(WORDS[1:2])
    processor.settle([3, 4, 5], [0, 0, 0], [1, 1, 1], WORDS[:3], [m.Finish.LENGTH] * 3, token_outputs=token_outputs)
    assert entries_of(processor.deltas(0)) == [
        (WORDS[:1], embedding),
        (WORDS[1:2], token_outputs_of(WORDS[1:2])),
        (WORDS[2:3], b""),
    ]


def test_only_sequences_that_request_logprobs_have_records() -> None:
    processor = OutputProcessor(VOCABULARY)
    for seq, options in ((3, None), (4, ASKING), (5, None)):
        processor.open(opening(seq, options))
    processor.settle([3, 5], [0, 0], [2, 1], WORDS[:3], [0, 0])
    assert processor.deltas(0).token_outputs == []
    processor.settle([3, 4, 5], [2, 0, 1], [1, 2, 1], WORDS[:4], [0, 0, 0], token_outputs=token_outputs_of(WORDS[1:3]))
    assert [token_outputs for _, token_outputs in entries_of(processor.deltas(0))] == [
        b"",
        b"",
        token_outputs_of(WORDS[1:3]),
    ]
    processor.mark_sent(0)
    processor.settle([3], [3], [1], WORDS[:1], [0])
    assert processor.deltas(0).token_outputs == []


def test_each_gateway_gets_its_own_sequences() -> None:
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(3, ASKING, gateway=0))
    processor.open(opening(4, None, gateway=1))
    processor.settle([3, 4], [0, 0], [1, 1], WORDS[:2], [0, 0], token_outputs=token_outputs_of(WORDS[:1]))
    assert processor.deltas(1).token_outputs == []
    assert entries_of(processor.deltas(0)) == [(WORDS[:1], token_outputs_of(WORDS[:1]))]


def bytes_of(token_id: int) -> bytes:
    piece = VOCABULARY.pieces(skip_special_tokens=False)[token_id]
    return piece.encode() if isinstance(piece, str) else piece


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_records_come_with_the_bytes_of_their_ids(num_top: int) -> None:
    options = m.GenerationOptions(num_logprobs=num_top, with_pieces=True)
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(3, None))
    processor.open(opening(4, options))
    processor.settle([3, 4], [0, 0], [1, 2], WORDS[:3], [0, 0], token_outputs=token_outputs_of(WORDS[1:3], num_top))
    deltas = processor.deltas(0)
    named = [one + i for one in WORDS[1:3] for i in ([0, *range(num_top)])]
    assert deltas.pieces == [[], [bytes_of(one) for one in named]]


@pytest.mark.parametrize("with_pieces", [False, True])
def test_prompt_records_are_sent_once_and_before_the_end(with_pieces: bool) -> None:
    options = m.GenerationOptions(num_prompt_logprobs=2, with_pieces=with_pieces)
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(3, None))
    processor.open(opening(4, options))
    reported_ids: list[int] = []
    parts = [(0, WORDS[:3]), (1, WORDS[1:6]), (6, WORDS[6:9])]
    for start, part in parts:
        ends = part is parts[-1][1]
        message = m.Settled(
            b"", b"", b"", b"", b"", prompt_seqs=[4], prompt_starts=[start], prompt_logprobs=[token_outputs_of(part, 2)]
        )
        processor.add_prompt_logprobs(message)
        if ends:
            processor.settle([4], [0], [1], WORDS[:1], [m.Finish.LENGTH])
        deltas = processor.deltas(0)
        assert deltas.prompt_indices == [0] and deltas.prompt_offsets == [len(reported_ids)]
        (token_outputs,), fresh = deltas.prompt_logprobs, WORDS[len(reported_ids) : start + len(part)]
        assert token_outputs == token_outputs_of(fresh, 2)
        assert deltas.prompt_pieces == [[bytes_of(one + i) for one in fresh for i in range(2)] if with_pieces else []]
        assert deltas.num_ids == [int(ends)] and deltas.finishes == [m.Finish.LENGTH if ends else m.Finish.NONE]
        reported_ids += fresh
        processor.mark_sent(0)
    assert reported_ids == WORDS[:9] and processor.unsent() == []


def test_prompt_records_that_wait_for_the_gateway_are_followed_by_others() -> None:
    """As while its edge is full: those that it has, those that wait, and new ones are counted together."""
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(4, m.GenerationOptions(num_prompt_logprobs=2)))

    def add(start: int, end: int) -> None:
        records = [token_outputs_of(WORDS[start:end], 2)]
        processor.add_prompt_logprobs(
            m.Settled(b"", b"", b"", b"", b"", prompt_seqs=[4], prompt_starts=[start], prompt_logprobs=records)
        )

    add(0, 3)
    processor.mark_sent(0)
    add(3, 5)
    add(4, 9)
    deltas = processor.deltas(0)
    assert deltas.prompt_offsets == [3] and deltas.prompt_logprobs == [token_outputs_of(WORDS[3:9], 2)]


def test_the_error_message_reaches_the_gateway() -> None:
    processor = OutputProcessor(VOCABULARY)
    for seq in (3, 4, 5):
        processor.open(opening(seq, None))
    error = m.Finish.ERROR
    processor.settle([5, 3, 4], [0, 0, 0], [0, 1, 0], WORDS[:1], [error, 0, error], errors=["no way", "none"])
    deltas = processor.deltas(0)
    assert deltas.finishes == [error, m.Finish.NONE, error] and deltas.errors == ["no way", "none"]


@pytest.mark.parametrize("min_tokens", [0, 9, 13, 14, 15, 100])
def test_a_stop_string_counts_if_it_ends_after_min_tokens(min_tokens: int) -> None:
    """Also if it begins before."""
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(5, m.GenerationOptions(stop=["stop"], min_tokens=min_tokens)))
    processor.settle([5], [0], [6], WORDS[:6], [m.Finish.NONE])
    processor.settle([5], [6], [len(WORDS) - 6], WORDS[6:], [m.Finish.LENGTH])
    text = "".join(processor.deltas(0).texts)
    assert text == ("it has to " if min_tokens < NUM_COUNTED else "it has to stop here and now")
