"""Where special tokens are in a text: known by id, wherever messages, stop strings and restarts cut it."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.runtime import messages as m
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.special_spans import unpacked
from pipeline.text.vocabulary import Vocabulary
from tests.slices import part_of
from tests.stages.detokenize.test_output_processor import BYTES, END, VOCABULARY, ids_of, opening
from tests.stages.detokenize.vocabularies import byte_fallback, byte_level, id_of

START = id_of(byte_level(), "<|start|>")
TEXTS = {END: "<|end|>", START: "<|start|>"}
SPELLED = ids_of("<|end|>")
OUTPUTS = st.lists(
    st.sampled_from([[END], [START], SPELLED, *([one] for one in ids_of("ab <|>d")), [BYTES[0xE2]], [BYTES[0x98]]]),
    min_size=1,
    max_size=12,
).map(lambda each: [one for some in each for one in some])
OPTIONS = st.builds(
    m.GenerationOptions,
    stop=st.lists(st.sampled_from(["<|end|>", "end|>a", "|>", "<|x", "a<|end|>b", "ab", "d|", "\ufffd<"]), max_size=2),
    include_stop_str_in_output=st.booleans(),
    min_tokens=st.integers(0, 6),
    skip_special_tokens=st.just(False),
    with_special_spans=st.just(True),
)


def expected(ids: Sequence[int], vocabulary: Vocabulary = VOCABULARY) -> list[tuple[int, int, int]]:
    """The spans in the text of all ids, without stop strings."""
    decoder, text, spans = IncrementalDecoder(vocabulary, [], skip_special_tokens=False), "", []
    for token_id in ids:
        text += decoder.add(token_id)
        if token_id in vocabulary.special_ids:
            piece = str(decoder.piece(token_id))
            assert text.endswith(piece)
            spans.append((len(text) - len(piece), len(piece), token_id))
    return spans


class Client:
    """Takes messages as the gateway does."""

    def __init__(self) -> None:
        self.sequence = SequenceOutput()
        self.text = ""
        self.spans: list[tuple[int, int, int]] = []
        self.finish = m.Finish.NONE

    def take(self, processor: OutputProcessor) -> None:
        for gateway in processor.unsent():
            deltas = processor.deltas(gateway)
            for spans in deltas.special_spans:
                assert deltas.special_indices == [0]
                self.sequence.extend_special_spans(spans)
            self.sequence.extend(deltas.texts[0], deltas.text_offsets[0], deltas.ids, deltas.id_offsets[0])
            self.text += self.sequence.take_text()
            self.spans += unpacked(self.sequence.take_special_spans())
            self.finish = m.Finish(deltas.finishes[0])
            processor.mark_sent(gateway)
            # All that is needed to read the text is there.
            ids = np.frombuffer(bytes(self.sequence.ids), "<i4").tolist()
            assert [one for one in expected(ids) if one[0] < len(self.text)] == [
                one for one in self.spans if one[0] < len(self.text)
            ]


def generate(processor: OutputProcessor, ids: list[int], begin: int, cuts: Sequence[int], client: Client) -> None:
    """Settle the ids from `begin` on, grouped by `cuts`, until the sequence ends."""
    edges = [begin, *sorted(cut for cut in cuts if begin < cut < len(ids)), len(ids)]
    for start, end in pairwise(edges):
        finish = m.Finish.LENGTH if end == len(ids) else m.Finish.NONE
        processor.settle([5], [start], [end - start], ids[start:end], [finish])
        client.take(processor)
        if client.finish:
            return


@settings(max_examples=part_of(200, 50), deadline=None)
@given(OUTPUTS, OPTIONS, st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40), st.booleans())
@example(
    [*ids_of("a"), END, *SPELLED],
    m.GenerationOptions(skip_special_tokens=False, with_special_spans=True),
    [],
    40,
    False,
)
def test_spans_are_those_of_the_ids_wherever_the_output_is_cut(
    ids: list[int], options: m.GenerationOptions, cuts: list[int], restart: int, repeats: bool
) -> None:
    """detokenize is replaced after `restart` ids. The gateway has all that it has said before, and with `repeats` gets
    it again."""
    processor, client = OutputProcessor(VOCABULARY), Client()
    processor.open(opening(5, options))
    if restart < len(ids):
        for index in range(restart):
            processor.settle([5], [index], [1], [ids[index]], [m.Finish.NONE])
            client.take(processor)
        if client.finish:
            return
        packed, processor = np.array(ids[:restart], np.int32).tobytes(), OutputProcessor(VOCABULARY)
        options = msgspec.structs.replace(options, repeats_received=repeats)
        processor.open(msgspec.structs.replace(opening(5, options), outputs=packed), ids[:restart])
        client.take(processor)
    generate(processor, ids, min(restart, len(ids) - 1) if restart < len(ids) else 0, cuts, client)
    for offset, num_chars, token_id in client.spans:
        shown = client.text[offset : offset + num_chars]
        assert TEXTS[token_id].startswith(shown)
        assert shown == TEXTS[token_id] or options.stop
    if not options.stop:
        assert client.spans == expected(ids)


def test_a_special_token_behind_half_a_character_and_in_other_vocabularies() -> None:
    fallback = Vocabulary(byte_fallback())
    end, the = (id_of(byte_fallback(), text) for text in ("</s>", "▁the"))
    half = id_of(byte_fallback(), "<0xE2>")
    processor, client = OutputProcessor(fallback), []
    processor.open(opening(5, m.GenerationOptions(skip_special_tokens=False, with_special_spans=True)))
    processor.settle([5], [0], [5], [the, half, end, the, end], [m.Finish.LENGTH])
    deltas = processor.deltas(0)
    assert deltas.texts == ["the\ufffd</s> the</s>"]
    client = list(unpacked(deltas.special_spans[0]))
    assert client == [(4, 4, end), (12, 4, end)] == expected([the, half, end, the, end], fallback)


def test_only_requests_that_ask_get_spans() -> None:
    for options in (m.GenerationOptions(), m.GenerationOptions(skip_special_tokens=False, stop=["x"])):
        processor = OutputProcessor(VOCABULARY)
        processor.open(opening(5, options))
        processor.settle([5], [0], [2], [END, END], [m.Finish.LENGTH])
        assert processor.deltas(0).special_spans == []


def test_each_sequence_of_a_message_has_its_own_spans() -> None:
    processor = OutputProcessor(VOCABULARY)
    for seq in range(4):
        processor.open(opening(seq, m.GenerationOptions(skip_special_tokens=False, with_special_spans=seq != 2)))
    processor.settle([0, 1, 2, 3], [0] * 4, [1, 2, 1, 2], [BYTES[97], BYTES[97], END, END, START, END], [0] * 4)
    deltas = processor.deltas(0)
    assert deltas.texts == ["a", "a<|end|>", "<|end|>", "<|start|><|end|>"]
    spans = {
        index: list(unpacked(each)) for index, each in zip(deltas.special_indices, deltas.special_spans, strict=True)
    }
    assert spans == {1: [(1, 7, END)], 3: [(0, 9, START), (9, 7, END)]}
    processor.mark_sent(0)
    processor.settle([0], [1], [1], [END], [m.Finish.LENGTH])
    deltas = processor.deltas(0)
    assert (deltas.special_indices, list(unpacked(deltas.special_spans[0]))) == ([0], [(1, 7, END)])
