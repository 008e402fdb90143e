"""What gateways receive, over random histories of sequences."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import token_output_bytes
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary
from tests.rig import raw
from tests.slices import part_of
from tests.stages.detokenize.test_stop_matcher import expected
from tests.stages.detokenize.vocabularies import byte_ids, byte_level, id_of

VOCABULARY = Vocabulary(byte_level())
BYTES = byte_ids(byte_level())
END = id_of(byte_level(), "<|end|>")


def ids_of(text: str) -> list[int]:
    return [BYTES[byte] for byte in text.encode()]


HIDDEN_SIZE = 3


def opening(
    seq: int, options: m.GenerationOptions | None = None, gateway: int = 0, tail: list[int] | None = None
) -> m.Open:
    options = options or m.GenerationOptions()
    ids = np.array(tail or [], np.int32).tobytes()
    width = token_output_bytes(options, HIDDEN_SIZE)
    return m.Open(seq, 1000 + seq, 2, seq % 3, gateway, ids, raw(options), token_output_bytes=width)


class FakeGateway:
    """Joins the entries of each sequence, and checks that they are consistent."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.closing: dict[int, tuple[int, str | int | None]] = {}
        self.begun: list[int] = []
        """Sequences whose first ids arrived with their times"""

    def take(self, deltas: m.Deltas) -> None:
        assert len(set(deltas.request_ids)) == len(deltas.request_ids)
        ids = np.frombuffer(deltas.ids, "<i4").tolist()
        for first in deltas.firsts:
            assert deltas.num_ids[first.index] > 0
            assert deltas.id_offsets[first.index] == 0
            self.begun.append(deltas.request_ids[first.index] - 1000)
            assert first.num_cached == self.begun[-1], "times of another sequence"
        for index, request_id in enumerate(deltas.request_ids):
            seq = request_id - 1000
            assert seq not in self.closing, "an entry after the closing one"
            assert (deltas.attempts[index], deltas.indexes[index]) == (2, seq % 3)
            assert deltas.text_offsets[index] == len(self.text.setdefault(seq, ""))
            assert deltas.id_offsets[index] == len(self.ids.setdefault(seq, []))
            self.text[seq] += deltas.texts[index]
            self.ids[seq] += ids[: deltas.num_ids[index]]
            ids = ids[deltas.num_ids[index] :]
            if deltas.finishes[index]:
                self.closing[seq] = (deltas.finishes[index], deltas.stop_reasons[index])
            else:
                assert deltas.stop_reasons[index] is None
                assert deltas.num_ids[index] > 0
        assert ids == []


def send_deltas(processor: OutputProcessor, client: FakeGateway) -> None:
    for gateway in processor.unsent():
        client.take(processor.deltas(gateway))
        processor.mark_sent(gateway)
    assert processor.unsent() == []


def run_one(
    ids: list[int], finish: int, options: m.GenerationOptions | None = None, cuts: list[int] | None = None
) -> tuple[FakeGateway, list[m.Abort]]:
    """One sequence, its ids grouped by `cuts`, sent after each message."""
    processor, client, aborts = OutputProcessor(VOCABULARY), FakeGateway(), []
    processor.open(opening(5, options))
    edges = [0, *sorted(cut for cut in cuts or [] if cut < len(ids)), len(ids)]
    for begin, end in pairwise(edges):
        closing = finish if end == len(ids) else m.Finish.NONE
        aborts += processor.settle([5], [begin], [end - begin], ids[begin:end], [closing])
        send_deltas(processor, client)
        if closing:
            break
    assert len(processor) == 0
    return client, aborts


OUTPUTS = st.lists(
    st.one_of(st.sampled_from(ids_of("ab \n")), st.sampled_from(BYTES), st.integers(0, byte_level().get_vocab_size())),
    min_size=1,
    max_size=24,
)
OPTIONS = st.builds(
    m.GenerationOptions,
    stop=st.lists(st.text("ab \n\ufffd", max_size=3), max_size=3),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    stop_token_ids=st.lists(st.sampled_from([END, BYTES[0x61]]), max_size=1),
)
FINISHES = st.sampled_from([m.Finish.STOP, m.Finish.LENGTH, m.Finish.ABORT, m.Finish.ERROR])


def outcome(ids: list[int], finish: int, options: m.GenerationOptions) -> tuple[str, list[int], int, str | int | None]:
    """The client's final text, ids, finish and stop reason, computed from the whole text with a naive rule."""
    stopped_by_id = finish == m.Finish.STOP
    asked_for = stopped_by_id and ids[-1] in options.stop_token_ids
    shown = ids[:-1] if stopped_by_id and not (asked_for and options.include_stop_str_in_output) else ids
    text = IncrementalDecoder(VOCABULARY, [], skip_special_tokens=options.skip_special_tokens)
    lengths, whole = [], ""
    for token_id in shown:
        whole += text.add(token_id)
        lengths.append(len(whole))
    whole += text.finish()
    result, found = expected(options.stop, whole, options.include_stop_str_in_output)
    if found is None:
        return result, ids, finish, ids[-1] if asked_for else None
    end = len(result) + (0 if options.include_stop_str_in_output else len(found))
    num_ids = next((index for index, length in enumerate(lengths, 1) if length >= end), len(ids))
    return result, ids[:num_ids], m.Finish.STOP, found


@settings(max_examples=part_of(500, 125), deadline=None)
@given(OUTPUTS, FINISHES, OPTIONS, st.lists(st.integers(0, 24), max_size=6))
def test_the_text_depends_only_on_ids_and_options(ids, finish, options, cuts):
    client, _ = run_one(ids, finish, options, cuts)
    text, shown_ids, closing, reason = outcome(ids, finish, options)
    assert client.text[5] == text
    assert client.ids[5] == shown_ids
    assert client.closing[5] == (closing, reason)


@settings(max_examples=part_of(150, 40), deadline=None)
@given(plans=st.lists(st.tuples(OUTPUTS, FINISHES, OPTIONS), min_size=1, max_size=5), data=st.data())
def test_many_sequences_at_once_with_full_sockets_and_resent_ids(plans, data):
    """Messages mix entries of any sequences, the gateway's socket is sometimes full, and ids arrive twice."""
    num = len(plans)
    processor, clients = OutputProcessor(VOCABULARY), [FakeGateway(), FakeGateway()]
    for seq, (_, _, options) in enumerate(plans):
        processor.open(opening(seq, options, gateway=seq % 2))
    settled = [0] * num
    live = set(range(num))
    aborts = []
    while live:
        chosen = data.draw(st.just(sorted(live)) | st.lists(st.sampled_from(sorted(live)), min_size=1, unique=True))
        starts, counts, ids, finishes, firsts = [], [], [], [], []
        for seq in chosen:
            output, finish, _ = plans[seq]
            start = data.draw(st.integers(max(0, settled[seq] - 2), settled[seq]))
            end = min(len(output), settled[seq] + data.draw(st.sampled_from([24, 6, 2, 1, 0])))
            closing = finish if end == len(output) and end > settled[seq] else m.Finish.NONE
            if settled[seq] == 0 and end > 0:
                firsts.append(m.FirstTimes(len(starts), 1.0, 2.0, 3.0, num_cached=seq))
            starts.append(start)
            counts.append(end - start)
            ids += output[start:end]
            finishes.append(closing)
            settled[seq] = end
            if closing:
                live.discard(seq)
        aborts += processor.settle(chosen, starts, counts, ids, finishes, firsts)
        assert len(processor) == len(live)
        for gateway in processor.unsent():
            deltas = processor.deltas(gateway)
            if data.draw(st.booleans()):
                clients[gateway].take(deltas)
                processor.mark_sent(gateway)
    for gateway in processor.unsent():
        clients[gateway].take(processor.deltas(gateway))
        processor.mark_sent(gateway)
    for seq, (output, finish, options) in enumerate(plans):
        text, ids, closing, reason = outcome(output, finish, options)
        received = clients[seq % 2]
        assert (received.text[seq], received.ids[seq], received.closing[seq]) == (text, ids, (closing, reason))
        assert received.begun.count(seq) == 1
    assert len({abort.request_id for abort in aborts}) == len(aborts)
    for abort in aborts:
        *_, reason = outcome(*plans[abort.request_id - 1000])
        assert isinstance(reason, str)
        assert (abort.attempt, abort.index, abort.finish) == (2, (abort.request_id - 1000) % 3, m.Finish.STOP)


def test_an_eos_id_counts_but_its_text_is_hidden():
    client, _ = run_one([*ids_of("hi"), END], m.Finish.STOP, m.GenerationOptions(skip_special_tokens=False))
    assert (client.text[5], client.ids[5]) == ("hi", [*ids_of("hi"), END])
    assert client.closing[5] == (m.Finish.STOP, None)


def test_a_requested_stop_id_is_the_stop_reason_and_visible_on_request():
    [stop_id] = ids_of("!")
    for include_stop, text in ((False, "hi"), (True, "hi!")):
        options = m.GenerationOptions(stop_token_ids=[stop_id], include_stop_str_in_output=include_stop)
        client, _ = run_one(ids_of("hi!"), m.Finish.STOP, options)
        assert (client.text[5], client.closing[5]) == (text, (m.Finish.STOP, stop_id))


def test_a_stop_string_sends_one_abort_to_schedule_and_drops_later_ids():
    processor, client = OutputProcessor(VOCABULARY), FakeGateway()
    processor.open(opening(5, m.GenerationOptions(stop=["b c"])))
    aborts = processor.settle([5], [0], [6], ids_of("ab cde"), [m.Finish.NONE])
    assert aborts == [m.Abort(1005, 2, 2, m.Finish.STOP)]
    send_deltas(processor, client)
    assert (client.text[5], client.ids[5], client.closing[5]) == ("a", ids_of("ab c"), (m.Finish.STOP, "b c"))
    assert processor.settle([5], [6], [2], ids_of("ff"), [m.Finish.NONE]) == []
    assert len(processor) == 1
    assert processor.settle([5], [8], [0], [], [m.Finish.STOP]) == []
    assert len(processor) == 0
    assert processor.unsent() == []


def test_a_stop_string_completed_by_the_last_id_needs_no_abort():
    client, aborts = run_one(ids_of("ab"), m.Finish.LENGTH, m.GenerationOptions(stop=["b"]))
    assert aborts == []
    assert (client.text[5], client.closing[5]) == ("a", (m.Finish.STOP, "b"))


def test_text_that_may_begin_a_stop_string_is_held_back_but_its_ids_are_sent():
    processor, client = OutputProcessor(VOCABULARY), FakeGateway()
    processor.open(opening(5, m.GenerationOptions(stop=["xyz"])))
    processor.settle([5], [0], [3], ids_of("axy"), [m.Finish.NONE])
    send_deltas(processor, client)
    assert (client.text[5], client.ids[5]) == ("a", ids_of("axy"))
    processor.settle([5], [3], [1], ids_of("x"), [m.Finish.NONE])
    send_deltas(processor, client)
    assert client.text[5] == "axy"
    processor.settle([5], [4], [0], [], [m.Finish.LENGTH])
    send_deltas(processor, client)
    assert (client.text[5], client.closing[5]) == ("axyx", (m.Finish.LENGTH, None))


def test_broken_invariants_of_schedule_raise_an_error():
    processor = OutputProcessor(VOCABULARY)
    with pytest.raises(AssertionError, match="is not open"):
        processor.settle([5], [0], [1], [7], [m.Finish.NONE])
    processor.open(opening(5))
    with pytest.raises(AssertionError, match="opened twice"):
        processor.open(opening(5))
    with pytest.raises(AssertionError, match="are missing"):
        processor.settle([5], [1], [1], [7], [m.Finish.NONE])
    with pytest.raises(AssertionError, match="2 ids came, 1 were expected"):
        processor.settle([5], [0], [1], [7, 8], [m.Finish.NONE])


def test_bad_words_are_not_kept() -> None:
    """Only the executor needs them, and thirty thousand ids are a megabyte of objects."""
    processor = OutputProcessor(VOCABULARY)
    options = m.GenerationOptions(max_tokens=5, bad_words_ids=[[1, 2], [3]], stop_token_ids=[7])
    processor.open(opening(1, options))
    kept = processor._live[1].options
    assert kept == msgspec.structs.replace(options, bad_words_ids=[])
