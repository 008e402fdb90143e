"""Resuming a sequence whose first ids the client has: the text continues, also inside characters and stop strings."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.runtime import messages as m
from pipeline.stages.detokenize.output_processor import PART_IDS, OutputProcessor
from tests.slices import part_of
from tests.stages.detokenize.test_output_processor import (
    BYTES,
    END,
    FINISHES,
    OPTIONS,
    OUTPUTS,
    VOCABULARY,
    ids_of,
    opening,
    outcome,
)


def offsets_by_id(ids: list[int], options: m.GenerationOptions) -> list[int]:
    """The number of characters that an uninterrupted client has with each number of ids, while its sequence runs."""
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(5, options))
    shown = [0]
    for index, token_id in enumerate(ids):
        processor.settle([5], [index], [1], [token_id], [m.Finish.NONE])
        if processor.unsent():
            deltas = processor.deltas(0)
            shown.append(deltas.text_offsets[0] + len(deltas.texts[0]))
            processor.mark_sent(0)
        else:
            shown.append(shown[-1])  # matched by a stop string
    return shown


@settings(max_examples=part_of(600, 150), deadline=None)
@given(OUTPUTS, FINISHES, OPTIONS, st.integers(0, 24), st.sampled_from([1, 2, 7, PART_IDS]))
@example(ids_of("a☔b"), m.Finish.LENGTH, m.GenerationOptions(), 2, 1)  # inside a character
@example(ids_of("xENDy"), m.Finish.LENGTH, m.GenerationOptions(stop=["END"]), 2, 1)  # inside a stop string
@example(
    [*ids_of("ab"), END],
    m.Finish.STOP,
    m.GenerationOptions(stop_token_ids=[END], include_stop_str_in_output=True),
    3,
    2,
)
@example([*ids_of("ab"), BYTES[0xE2]], m.Finish.LENGTH, m.GenerationOptions(), 3, PART_IDS)
def test_a_sequence_cut_anywhere_resumes_with_the_same_text(
    ids: list[int], finish: m.Finish, options: m.GenerationOptions, cut: int, part_ids: int
) -> None:
    """Also if new ids come while those that the client has are decoded in parts."""
    text, shown_ids, closing, reason = outcome(ids, finish, options)
    cut = min(cut, len(shown_ids))
    if finish in (m.Finish.ABORT, m.Finish.ERROR):
        cut = min(cut, len(ids) - 1)  # a client that has all ids does not resume
    known, rest = ids[:cut], ids[cut:]
    ended = finish if not rest else m.Finish.NONE
    processor = OutputProcessor(VOCABULARY, part_ids=part_ids)
    begun = msgspec.structs.replace(opening(5, options), outputs=np.array(known, np.int32).tobytes(), finish=ended)
    aborts = processor.open(begun, known)
    texts, received_ids, offset = "", [], -1
    end: tuple[int, str | int | None] = (0, None)

    def take() -> None:
        nonlocal texts, offset, end
        for gateway in processor.unsent():
            deltas = processor.deltas(gateway)
            assert end[0] == m.Finish.NONE, "an entry after the closing one"
            offset = deltas.text_offsets[0] if offset < 0 else offset
            assert deltas.text_offsets[0] == offset + len(texts)
            assert deltas.id_offsets[0] == cut + len(received_ids)
            texts += deltas.texts[0]
            received_ids.extend(np.frombuffer(deltas.ids, "<i4").tolist())
            end = deltas.finishes[0], deltas.stop_reasons[0]
            processor.mark_sent(gateway)

    take()
    for index, token_id in enumerate(rest[:-1]):
        aborts += processor.settle([5], [cut + index], [1], [token_id], [m.Finish.NONE])
        aborts += processor.resume()
        take()
    last = rest[-1:]
    processor.settle([5], [len(ids) - len(last)], [len(last)], last, [finish])
    while processor.is_resuming:
        aborts += processor.resume()
    take()
    assert end == (closing, reason)
    assert received_ids == shown_ids[cut:]
    assert text[:offset] + texts == text
    if cut < len(shown_ids):
        assert offset == offsets_by_id(known, options)[cut]
    assert len(aborts) <= 1
    assert len(processor) == 0


def test_long_resumed_sequences_are_decoded_in_turns_beside_the_others() -> None:
    processor = OutputProcessor(VOCABULARY)
    processor.open(opening(4))
    long = ids_of("abcdefgh") * PART_IDS
    for seq in (5, 6):
        options = m.GenerationOptions(stop=["hi"])
        processor.open(msgspec.structs.replace(opening(seq, options), outputs=b"", finish=m.Finish.NONE), long)
    processor.settle([5, 6, 4], [len(long), len(long), 0], [1, 1, 1], ids_of("iix"), [m.Finish.NONE] * 3)
    assert [processor.deltas(0).request_ids, processor.num_unsent] == [[1004], 1]  # the others wait for nothing
    processor.mark_sent(0)
    aborts, num_wakes = [], 0
    while processor.is_resuming:
        left = [one.num_received for one in processor._live.values()]
        aborts += processor.resume()
        num_wakes += 1
        done = np.subtract(left, [one.num_received for one in processor._live.values()])
        assert done.sum() == PART_IDS
    assert num_wakes == 16
    assert sorted(abort.request_id for abort in aborts) == [1005, 1006]
    deltas = processor.deltas(0)
    assert (deltas.texts, deltas.num_ids, deltas.text_offsets) == ([""] * 2, [1] * 2, [len(long) - 1] * 2)


def details_while_resuming(part_ids: int) -> dict[int, tuple[Any, ...]]:
    """By request id: what the gateway gets of two sequences that get an id each and fail then, one of which has ids to
    decode first."""
    options, known = m.GenerationOptions(num_logprobs=0, num_prompt_logprobs=0), ids_of("abcdef")
    width = opening(4, options).token_output_bytes
    outputs = [bytes([number]) * width for number in range(4)]
    processor = OutputProcessor(VOCABULARY, part_ids=part_ids)
    processor.open(opening(4, options))
    processor.open(opening(5, options), known)
    if part_ids < len(known):
        assert processor.is_resuming
    prompts = [bytes([7]) * width, bytes([8]) * width]
    nothing = m.Settled(b"", b"", b"", b"", b"", prompt_seqs=[4, 5], prompt_starts=[0, 0], prompt_logprobs=prompts)
    processor.add_prompt_logprobs(nothing)
    processor.settle(
        [4, 5],
        [0, len(known)],
        [1, 1],
        ids_of("xy"),
        [m.Finish.NONE] * 2,
        firsts=[m.FirstTimes(0, 1.0, 2.0, 3.0, 4), m.FirstTimes(1, 5.0, 6.0, 7.0, 8)],
        token_outputs=b"".join(outputs[:2]),
        drafts=[m.DraftCounts(0, 1, 2), m.DraftCounts(1, 3, 4)],
    )
    processor.settle(
        [4, 5],
        [1, len(known) + 1],
        [1, 1],
        ids_of("zz"),
        [m.Finish.ERROR] * 2,
        token_outputs=b"".join(outputs[2:]),
        errors=["first", "second"],
    )
    while processor.is_resuming:
        processor.resume()
    deltas = processor.deltas(0)
    found: dict[int, tuple[Any, ...]] = {}
    for index, request_id in enumerate(deltas.request_ids):
        counts = [msgspec.structs.replace(one, index=0) for one in deltas.drafts if one.index == index]
        times = [msgspec.structs.replace(one, index=0) for one in deltas.firsts if one.index == index]
        found[request_id] = (
            *(deltas.texts[index], deltas.num_ids[index], deltas.finishes[index], deltas.token_outputs[index]),
            *(deltas.errors[index], deltas.prompt_logprobs[deltas.prompt_indices.index(index)], counts, times),
        )
    return found


def test_what_comes_while_a_sequence_resumes_is_handled_completely_then() -> None:
    found = details_while_resuming(part_ids=2)
    assert found == details_while_resuming(part_ids=PART_IDS)
    *_, error, prompt, counts, times = found[1005]
    assert (error, len(prompt) > 0) == ("second", True)
    assert (counts, times) == ([m.DraftCounts(0, 3, 4)], [m.FirstTimes(0, 5.0, 6.0, 7.0, 8)])


@pytest.mark.parametrize("part_ids", [1, 2, PART_IDS])
def test_nothing_behind_a_stop_string_is_shown_however_many_ids_the_client_claims_to_have(part_ids: int) -> None:
    """It may be no client of ours: the ids come with the request."""
    processor = OutputProcessor(VOCABULARY, part_ids=part_ids)
    known = ids_of("abcdefbcd")
    options = m.GenerationOptions(stop=["bc"], repeats_received=True)
    claimed = msgspec.structs.replace(opening(5, options), outputs=np.array(known, np.int32).tobytes())
    aborts = processor.open(claimed, known)
    while processor.is_resuming:
        aborts += processor.resume()
    deltas = processor.deltas(0)
    assert (deltas.texts, deltas.finishes, deltas.stop_reasons) == (["a"], [m.Finish.STOP], ["bc"])
    assert (deltas.num_ids, deltas.id_offsets, len(aborts)) == ([0], [len(known)], 1)
