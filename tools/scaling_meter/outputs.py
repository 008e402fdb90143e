"""Cases for what comes behind ingest: bad words in the executor, and resumed streams in detokenize."""

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models

from pipeline.kernels.sampling.logits_processor_inputs import pack_runs
from pipeline.kernels.sampling.logits_processors import forbidden_by
from pipeline.runtime import messages as m
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.stages.ingest.prompts.bad_words import MAX_IDS
from pipeline.text.vocabulary import Vocabulary
from tools.scaling_meter.case import MAX_BODY, Case

ID_BYTES = 4
VOCAB_SIZE = 1 << 17
STEP_MS = 20.0
"""For one row of a step, or one turn, which all sequences share"""

WORDS: Mapping[str, Callable[[int], list[list[int]]]] = {
    "short": lambda n: [[i % VOCAB_SIZE, i * 7 % VOCAB_SIZE] for i in range(n // 2)],
    "that nearly match": lambda n: [[2 + i, *[1] * 254, i] for i in range(n // 256)],
    "of each length": lambda n: [[1] * i for i in range(1, int((2 * n) ** 0.5))],
}
"""Of about n ids in all"""
STOPS: Mapping[str, list[str]] = {
    "without stop strings": [],
    "with nearly a stop string": ["a" * 255 + chr(98 + i) for i in range(16)],
}


def cases() -> Iterator[Case]:
    for name, words in WORDS.items():
        yield Case("bad words", f"{name}, packed", _packed(words), MAX_IDS * ID_BYTES, STEP_MS)
        yield Case("bad words", f"{name}, in a step", _searched(words), MAX_IDS * ID_BYTES, STEP_MS)
    for name, stops in STOPS.items():
        yield Case("resumed stream", name, _resumed(stops), MAX_BODY, STEP_MS)


def _packed(words: Callable[[int], list[list[int]]]) -> Callable[[int], Callable[[], object]]:
    def make(n: int) -> Callable[[], object]:
        runs = words(n // ID_BYTES)
        return lambda: pack_runs(runs, VOCAB_SIZE)

    return make


def _searched(words: Callable[[int], list[list[int]]]) -> Callable[[int], Callable[[], object]]:
    output = np.ones(4096, np.int32)

    def make(n: int) -> Callable[[], object]:
        runs, num_runs = pack_runs(words(n // ID_BYTES), VOCAB_SIZE)
        return lambda: forbidden_by(runs, num_runs, output)

    return make


def _resumed(stops: list[str]) -> Callable[[int], Callable[[], object]]:
    """One wake with sequences of 1,000 ids, and the next."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(tokenizer)
    options = msgspec.Raw(msgspec.msgpack.encode(m.GenerationOptions(stop=stops)))
    outputs = np.zeros(1000, np.int32)

    def make(n: int) -> Callable[[], object]:
        openings = [m.Open(seq, seq, 1, 0, 0, b"", options) for seq in range(1 + n // (ID_BYTES * len(outputs)))]

        def work() -> None:
            processor = OutputProcessor(vocabulary)
            for opening in openings:
                processor.open(opening, outputs)
            processor.resume()

        return work

    return make
