"""Turns settled ids of live sequences into text for the gateways.

    open ──settle──► live ──settle with a finish──► gone
     │ ▲              │                               ▲
     │ │              └─stop string found──► stopped ─┘  later ids are dropped; schedule gets an `Abort` and closes
     ▼ │                                                 the sequence like any other
    resuming  ids that the client already has are decoded in parts, one in a turn; what comes meanwhile waits

Output waits in its sequence until `mark_sent`: if a full socket refuses it, the next message has it too.
"""

import functools
import time
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.process.black_box import CRUMB_BYTES, Breadcrumb
from pipeline.runtime.token_outputs import logprob_dtype
from pipeline.stages.detokenize.output_sequence import ERROR, Ids, OutputSequence
from pipeline.stages.detokenize.stop_matcher import StopStrings
from pipeline.text.vocabulary import Vocabulary

E = TypeVar("E", bytes, list[bytes])
PART_IDS = 4096
"""Ids of resumed sequences that are decoded in a turn, while the output of all others waits: 1 to 5 ms."""


class OutputProcessor:
    """Owns the live sequences of this process."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        breadcrumb: Breadcrumb | None = None,
        *,
        names_until_s: float = 0.0,
        part_ids: int = PART_IDS,
    ) -> None:
        """An error names the request in the `breadcrumb`. Setting it for each sequence would cost as much as decoding
        an id, so it is set when the error comes. A signal leaves no time for that, so until `names_until_s`, by
        time.monotonic(), it is set for each sequence."""
        self._names_until_s = names_until_s
        self._vocabulary = vocabulary
        self._breadcrumb = breadcrumb or Breadcrumb(memoryview(bytearray(CRUMB_BYTES)))
        self._options = msgspec.msgpack.Decoder(m.GenerationOptions)
        self._last_options = b"", m.GenerationOptions()
        """Those of the last opening, packed and decoded."""
        self._stops: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()
        """Of live sequences, which share them: an automaton of long strings takes a while to build."""
        self._live: dict[int, OutputSequence] = {}
        self._unsent: defaultdict[int, dict[int, OutputSequence]] = defaultdict(dict)
        """By gateway, then by `seq`."""
        self._resuming: dict[int, OutputSequence] = {}
        """Sequences with ids to decode that their clients already have, by `seq`; they take turns."""
        self._part_ids = self._room = part_ids
        """Such ids that may still be decoded in this turn."""
        self._bytes = vocabulary.pieces(skip_special_tokens=False)
        """The bytes of each id, for logprobs."""
        self._settled_s = 0.0
        """When schedule sent the last message."""

    def __len__(self) -> int:
        return len(self._live)

    def open(self, opening: m.Open, outputs: Sequence[int] | Ids = ()) -> list[m.Abort]:
        """Open a sequence with the `outputs` of its opening, which `resume` decodes if there are many. Returns an
        `Abort` for schedule if their text has a stop string."""
        assert opening.seq not in self._live, f"sequence {opening.seq} was opened twice"
        options = self._options_of(opening)
        key = tuple(options.stop)
        if (stops := self._stops.get(key)) is None:
            stops = self._stops[key] = StopStrings(key)
        received = np.asarray(outputs, np.int32)
        sequence = self._live[opening.seq] = OutputSequence(opening, received, options, stops, self._vocabulary)
        if not len(received):
            return []
        self._resuming[opening.seq] = sequence
        return self._resume(opening.seq) if len(self._resuming) == 1 and len(received) <= self._room else []

    @property
    def is_resuming(self) -> bool:
        """Whether `resume` has ids to decode."""
        return bool(self._resuming)

    def resume(self) -> list[m.Abort]:
        """Decode some of the ids that clients already have. Call it once in a turn. Returns an `Abort` for schedule for
        each sequence with a stop string."""
        aborts: list[m.Abort] = []
        self._room = self._part_ids
        while self._resuming and self._room > 0:
            aborts += self._resume(next(iter(self._resuming)))
        return aborts

    def _resume(self, seq: int) -> list[m.Abort]:
        """Decode a part of one sequence. It then is behind the others, or handles what came meanwhile."""
        sequence = self._resuming.pop(seq)
        num = min(sequence.num_received, self._room)
        self._room -= num
        with self._breadcrumb.at(sequence.request_id, sequence.attempt):
            sequence.resume(num)
        if sequence.num_received:
            self._resuming[seq] = sequence
            return []
        if sequence.finish or sequence.texts:
            self._unsent[sequence.gateway][seq] = sequence
        aborts = [_abort_of(sequence)] if sequence.finish and not sequence.received_finish else []
        later, sequence.later = sequence.later, []
        for handle in later:
            aborts += handle()
        return aborts

    def _options_of(self, opening: m.Open) -> m.GenerationOptions:
        """Decode the options, which the sequences of a request share. They are opened one after the other."""
        packed = bytes(opening.options)
        if packed != self._last_options[0]:
            decoded = self._options.decode(packed)
            if decoded.bad_words_ids:  # only the executor needs them, and as objects they are large
                decoded = msgspec.structs.replace(decoded, bad_words_ids=[])
            self._last_options = packed, decoded
        return self._last_options[1]

    def clear(self) -> None:
        """Forget all sequences and their pending output."""
        self._live.clear()
        self._unsent.clear()
        self._resuming.clear()

    @property
    def num_unsent(self) -> int:
        """Sequences with output that their gateway has not got."""
        return sum(map(len, self._unsent.values()))

    def request_ids(self, seqs: list[int]) -> list[int]:
        """The request ids of these sequences."""
        return [self._live[seq].request_id for seq in seqs]

    def settle(
        self,
        seqs: list[int],
        starts: list[int],
        counts: list[int],
        ids: list[int],
        finishes: list[int],
        firsts: Collection[m.FirstTimes] = (),
        settled_s: float | None = None,
        token_outputs: bytes = b"",
        errors: Iterable[str] = (),
        drafts: Collection[m.DraftCounts] = (),
    ) -> list[m.Abort]:
        """Handle a `Settled`, except for prompt logprobs. Returns an `Abort` for schedule for each sequence with a stop
        string."""
        aborts: list[m.Abort] = []
        self._settled_s = self._settled_s if settled_s is None else settled_s
        first_of = {first.index: first for first in firsts} if firsts else {}
        names = bool(self._names_until_s) and time.monotonic() < self._names_until_s
        end = recorded = 0
        drafts_of = {counts.index: counts for counts in drafts} if drafts else {}
        reasons = iter(errors)
        sequence: OutputSequence | None = None
        try:
            for index, (seq, start, count, finish) in enumerate(zip(seqs, starts, counts, finishes, strict=True)):
                begin, end = end, end + count
                if self._resuming and seq in self._resuming:
                    sequence = self._resuming[seq]
                    recorded += (size := sequence.token_output_bytes * count)
                    later = functools.partial(
                        self.settle,
                        *([seq], [start], [count], ids[begin:end], [finish]),
                        [msgspec.structs.replace(first_of[index], index=0)] if index in first_of else (),
                        token_outputs=token_outputs[recorded - size : recorded],
                        errors=[next(reasons, "")] if finish == ERROR else (),
                        drafts=[msgspec.structs.replace(drafts_of[index], index=0)] if index in drafts_of else (),
                    )
                    sequence.later.append(later)
                    continue
                sequence = self._live.pop(seq, None) if finish else self._live.get(seq)
                assert sequence is not None, f"sequence {seq} is not open"
                if first_of:
                    sequence.first = first_of.get(index, sequence.first)
                if drafts_of:
                    sequence.drafts = drafts_of.get(index, sequence.drafts)
                if finish == ERROR:
                    sequence.error = next(reasons, "")
                if width := sequence.token_output_bytes:
                    token_outputs_begin, recorded = recorded, recorded + width * count
                    num_before = sequence.id_offset + len(sequence.ids) - start
                if sequence.finish:
                    continue  # stopped; its gateway knows
                if names:
                    self._breadcrumb.at(sequence.request_id, sequence.attempt)
                sequence.settle(start, ids[begin:end], finish)
                if width:
                    sequence.add_token_outputs(num_before, token_outputs[token_outputs_begin:recorded])
                if sequence.finish and not finish:
                    aborts.append(_abort_of(sequence))
                if sequence.ids or sequence.finish:
                    self._unsent[sequence.gateway][seq] = sequence
        except BaseException:
            if sequence is not None:
                self._breadcrumb.at(sequence.request_id, sequence.attempt)
            raise
        if names:
            self._breadcrumb.clear()
        assert end == len(ids), f"{len(ids)} ids came, {end} were expected"
        assert recorded == len(token_outputs), (
            f"{len(token_outputs)} bytes of token outputs came, {recorded} were expected"
        )
        return aborts

    def add_prompt_logprobs(self, message: m.Settled) -> None:
        """Handle the prompt logprobs of a `Settled`. Call it before `settle`, which may close the sequences."""
        for seq, start, logprobs in zip(
            message.prompt_seqs, message.prompt_starts, message.prompt_logprobs, strict=True
        ):
            if seq in self._resuming:
                later = functools.partial(self._add_prompt_logprobs, seq, start, logprobs)
                self._resuming[seq].later.append(later)
            else:
                self._add_prompt_logprobs(seq, start, logprobs)

    def _add_prompt_logprobs(self, seq: int, start: int, logprobs: bytes) -> list[m.Abort]:
        sequence = self._live[seq]
        if not sequence.finish:
            with self._breadcrumb.at(sequence.request_id, sequence.attempt):
                sequence.add_prompt_logprobs(start, logprobs)
            self._unsent[sequence.gateway][seq] = sequence
        return []

    def unsent(self) -> list[int]:
        """The gateways with pending output."""
        return [gateway for gateway, sequences in self._unsent.items() if sequences]

    def deltas(self, gateway: int, now_s: float = 0.0) -> m.Deltas:
        """The pending output of a gateway."""
        sequences = self._unsent[gateway].values()
        request_ids, attempts, indexes, texts, text_offsets = [], [], [], [], []
        ids, id_offsets, num_ids, finishes, stop_reasons = array("i"), [], [], [], []
        firsts, errors, drafts, special_indices, spans = [], [], [], [], []
        has_token_outputs = False
        # One loop instead of a comprehension for each list: beside a running step, the caches are cold, and each piece
        # of code costs more to load than to run.
        for index, sequence in enumerate(sequences):
            request_ids.append(sequence.request_id)
            attempts.append(sequence.attempt)
            indexes.append(sequence.index)
            texts.append("".join(sequence.texts))
            text_offsets.append(sequence.text_offset)
            ids.extend(sequence.ids)
            id_offsets.append(sequence.id_offset)
            num_ids.append(len(sequence.ids))
            finishes.append(int(sequence.finish))
            stop_reasons.append(sequence.stop_reason)
            if sequence.first is not None:
                firsts.append(msgspec.structs.replace(sequence.first, index=index))
            if sequence.drafts is not None:
                drafts.append(msgspec.structs.replace(sequence.drafts, index=index))
            if sequence.finish == ERROR:
                errors.append(sequence.error)
            if sequence.special_spans:
                special_indices.append(index)
                spans.append(bytes(sequence.special_spans))
            if sequence.token_outputs or sequence.prompt_logprobs:  # seldom
                has_token_outputs = True
        prompts = (
            [(index, one) for index, one in enumerate(sequences) if one.prompt_logprobs] if has_token_outputs else []
        )
        return m.Deltas(
            request_ids=request_ids,
            attempts=attempts,
            indexes=indexes,
            texts=texts,
            text_offsets=text_offsets,
            ids=ids.tobytes(),
            id_offsets=id_offsets,
            num_ids=num_ids,
            finishes=finishes,
            stop_reasons=stop_reasons,
            firsts=firsts,
            settled_s=self._settled_s,
            sent_s=now_s,
            token_outputs=_or_none([bytes(sequence.token_outputs) for sequence in sequences])
            if has_token_outputs
            else [],
            pieces=_or_none([self._pieces(sequence) for sequence in sequences]) if has_token_outputs else [],
            prompt_indices=[index for index, _ in prompts] if prompts else [],
            prompt_offsets=[sequence.prompt_offset for _, sequence in prompts] if prompts else [],
            prompt_logprobs=[bytes(sequence.prompt_logprobs) for _, sequence in prompts] if prompts else [],
            prompt_pieces=[self._prompt_pieces(sequence) for _, sequence in prompts] if prompts else [],
            errors=errors,
            drafts=drafts,
            special_indices=special_indices,
            special_spans=spans,
        )

    def _pieces(self, sequence: OutputSequence) -> list[bytes]:
        """The bytes of each of its ids and of the likeliest ids in its token outputs."""
        if not (sequence.options.with_pieces and sequence.token_outputs):
            return []
        names = np.frombuffer(bytes(sequence.token_outputs), logprob_dtype(sequence.options.num_logprobs))[
            "top_ids"
        ].tolist()
        pairs = zip(sequence.ids, names, strict=True)
        return [self._bytes_of(named) for token_id, top_ids in pairs for named in (token_id, *top_ids)]

    def _prompt_pieces(self, sequence: OutputSequence) -> list[bytes]:
        if not sequence.options.with_pieces:
            return []
        token_outputs = np.frombuffer(
            bytes(sequence.prompt_logprobs), logprob_dtype(sequence.options.num_prompt_logprobs)
        )
        return list(map(self._bytes_of, token_outputs["top_ids"].reshape(-1).tolist()))

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._bytes[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def mark_sent(self, gateway: int) -> None:
        """The gateway's socket accepted `deltas`, or the gateway has died."""
        for sequence in self._unsent[gateway].values():
            sequence.mark_sent()
        self._unsent[gateway].clear()


def _or_none(each: list[E]) -> list[E]:
    """The list, or an empty one if all entries are empty."""
    return each if any(each) else []


def _abort_of(sequence: OutputSequence) -> m.Abort:
    """Asks schedule to end a sequence whose text has a stop string."""
    return m.Abort(sequence.request_id, sequence.attempt, sequence.index, m.Finish.STOP)
