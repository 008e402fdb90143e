"""Turns settled ids of live sequences into text for the gateways.

    open ──settle──► live ──settle with a finish──► gone
     │ ▲              │                               ▲
     │ │              └─stop string found──► stopped ─┘  later ids are dropped; schedule gets an `Abort` and closes
     ▼ │                                                 the sequence like any other
    resuming  ids that the client already has are decoded in parts, one in a wake; what comes meanwhile waits

Output waits in its sequence until `mark_sent`: if a full socket refuses it, the next message has it too.
"""

import functools
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import logprob_bytes, logprob_dtype
from pipeline.runtime.process.black_box import CRUMB_BYTES, Breadcrumb
from pipeline.stages.detokenize.stop_matcher import StopMatcher, StopStrings
from pipeline.text import special_spans
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary

E = TypeVar("E", bytes, list[bytes])
ERROR = int(m.Finish.ERROR)
NO_IDS: frozenset[int] = frozenset()
PART_IDS = 4096
"""Ids of resumed sequences that are decoded in a wake, while the output of all others waits: 1 to 5 ms."""
Ids = np.ndarray[Any, np.dtype[np.int32]]


class OutputSequence:
    """One sequence, with the output that its gateway has not got yet."""

    __slots__ = (
        "_decoder",
        "_has_stops",
        "_include_stop",
        "_min_tokens",
        "_num_chars",
        "_num_settled",
        "_received",
        "_special_ids",
        "_stop_id",
        "_stop_matcher",
        "_stop_token_ids",
        "attempt",
        "drafts",
        "error",
        "finish",
        "first",
        "gateway",
        "id_offset",
        "ids",
        "index",
        "later",
        "options",
        "prompt_offset",
        "prompt_records",
        "received_finish",
        "record_bytes",
        "records",
        "request_id",
        "special_spans",
        "stop_reason",
        "text_offset",
        "texts",
    )

    def __init__(
        self,
        opening: m.Open,
        outputs: Ids,
        options: m.GenerationOptions,
        stops: StopStrings,
        vocabulary: Vocabulary,
    ) -> None:
        """`outputs` are ids of the opening that the client already has: call `resume` until they are decoded."""
        self.request_id = opening.request_id
        self.attempt = opening.attempt
        self.index = opening.index
        self.gateway = opening.gateway
        prompt_tail = np.frombuffer(opening.prompt_tail, "<i4").tolist()
        self._decoder = IncrementalDecoder(vocabulary, prompt_tail, skip_special_tokens=options.skip_special_tokens)
        self._stop_matcher = StopMatcher(stops, include_stop=options.include_stop_str_in_output)
        self._has_stops = bool(stops.firsts)
        self._min_tokens = options.min_tokens
        self._stop_token_ids = options.stop_token_ids
        self._include_stop = options.include_stop_str_in_output
        self._special_ids = vocabulary.special_ids if options.with_special_spans else NO_IDS
        self._num_chars = 0
        """Characters of text so far, without those that are held back; it is counted only with `_special_ids`."""
        self.special_spans = bytearray()
        """Of the special tokens in `ids`, if the options ask for them."""
        self._num_settled = 0
        self.texts: list[str] = []
        self.text_offset = 0
        self.ids: list[int] = []
        self.id_offset = 0
        self.options = options
        self.record_bytes = opening.record_bytes
        self.records = bytearray()
        """Logprob records of `ids`, if the request asks for them."""
        self.prompt_records = bytearray()
        """Logprob records of the prompt."""
        self.prompt_offset = 0
        """Number of prompt records before these."""
        self.error = ""
        """The reason, if it finished with `error`."""
        self.finish: int = m.Finish.NONE
        self.stop_reason: str | int | None = None
        self._stop_id: int | None = None
        """The stop id, if it came with the opening."""
        self.first: m.FirstTimes | None = None
        """Sent with the first ids."""
        self.drafts: m.DraftCounts | None = None
        """The newest counts."""
        self._received, self.received_finish = outputs, opening.finish
        self.later: list[Callable[[], list[m.Abort]]] = []
        """What came while it was resuming."""

    @property
    def num_received(self) -> int:
        """Ids that the client already has and that are not decoded."""
        return len(self._received)

    def resume(self, most: int) -> None:
        """Decode the next ids whose text the client already has; it is sent only if the options say so. The ids that
        follow continue an incomplete character or stop string."""
        part, self._received = self._received[:most].tolist(), self._received[most:]
        self._num_settled += len(part)
        num_shown = len(part)
        if self.received_finish == m.Finish.STOP and not len(self._received):
            self._stop_id = part[-1]
            num_shown -= 1
        self._decode(part, num_shown)
        if self.finish:
            self._num_settled += len(self._received)
            self._received = self._received[:0]
        if self.options.repeats_received:
            self.ids.clear()
        else:
            self.mark_sent()
        self.id_offset = self._num_settled

    def settle(self, start: int, ids: list[int], finish: int) -> None:
        """Decode ids from output id `start` on. Ids that were decoded before are skipped."""
        if start == self._num_settled and not finish and not self._has_stops:
            # Nearly every entry: the next ids, and nothing that ends the text.
            self._num_settled += len(ids)
            if self._special_ids:
                self._add(ids)
            else:
                self.texts += map(self._decoder.add, ids)
            self.ids += ids
            return
        assert start <= self._num_settled, (
            f"ids {self._num_settled} to {start} of request {self.request_id:x} are missing"
        )
        if start < self._num_settled:
            ids = ids[self._num_settled - start :]
        self._num_settled += len(ids)
        is_stopped_before = finish == m.Finish.STOP and not ids
        if is_stopped_before:
            assert self._stop_id is not None, f"sequence {self.index} of request {self.request_id:x} has no stop id"
            ids = [self._stop_id]
        num_shown = len(ids)
        if finish == m.Finish.STOP:
            stop_id = ids[-1]
            is_requested = stop_id in self._stop_token_ids
            self.stop_reason = stop_id if is_requested else None
            if not (is_requested and self._include_stop):
                num_shown -= 1
        self.finish = finish
        self._decode(ids, num_shown)
        if is_stopped_before:
            self.ids = []  # the client already has it

    def _add(self, ids: list[int]) -> None:
        """Decode ids of a sequence without stop strings, and note the special tokens."""
        add, specials = self._decoder.add, self._special_ids
        for token_id in ids:
            self.texts.append(text := add(token_id))
            if token_id in specials:
                self._note(token_id, text)
            self._num_chars += len(text)

    def _note(self, token_id: int, text: str) -> None:
        """Note a special token whose `text` comes next. It may have text before it that was incomplete."""
        num_before = self._num_chars + self._stop_matcher.num_held + len(text)
        if num_chars := min(len(self._decoder.piece(token_id)), len(text)):
            self.special_spans += special_spans.packed(num_before - num_chars, num_chars, token_id)

    def _decode(self, ids: list[int], num_shown: int) -> None:
        """Append all ids, and the text of the first `num_shown`. Stop at the id that completes a stop string."""
        decoder, matcher, texts, specials = self._decoder, self._stop_matcher, self.texts, self._special_ids
        num_silent = self._min_tokens - (self._num_settled - len(ids))
        for place in range(num_shown):
            text = decoder.add(ids[place])
            if specials and ids[place] in specials:
                self._note(ids[place], text)
            texts.append(shown := matcher.push(text, counts=place >= num_silent))
            if specials:
                self._num_chars += len(shown)
            if matcher.found is not None:
                self.ids += ids[: place + 1]
                self._stop()
                return
        self.ids += ids
        if self.finish:
            texts.append(matcher.push(decoder.finish(), counts=num_shown > num_silent))
            if matcher.found is not None:
                self._stop()
            else:
                texts.append(matcher.finish())

    def _stop(self) -> None:
        self.finish = m.Finish.STOP
        self.stop_reason = self._stop_matcher.found

    def add_records(self, num_before: int, records: bytes) -> None:
        """Add the records of settled ids, without the first `num_before`, which are here already, and without those of
        ids after a stop string."""
        num = len(self.ids) - len(self.records) // self.record_bytes
        self.records += records[num_before * self.record_bytes : (num_before + num) * self.record_bytes]

    def add_prompt_records(self, start: int, records: bytes) -> None:
        """Add records of the prompt, `start` of which come before. Records that were added before are skipped."""
        width = logprob_bytes(self.options.num_prompt_logprobs)
        num_known = self.prompt_offset + len(self.prompt_records) // width
        assert start <= num_known, f"prompt records {num_known} to {start} of request {self.request_id:x} are missing"
        self.prompt_records += records[(num_known - start) * width :]

    def mark_sent(self) -> None:
        """The gateway got all output up to now."""
        self.text_offset += sum(map(len, self.texts))
        self.texts.clear()
        self.id_offset += len(self.ids)
        self.ids.clear()
        self.special_spans.clear()
        self.records.clear()
        if self.prompt_records:
            self.prompt_offset += len(self.prompt_records) // logprob_bytes(self.options.num_prompt_logprobs)
            self.prompt_records.clear()
        self.first = self.drafts = None


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
        """Such ids that may still be decoded in this wake."""
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
        """Decode some of the ids that clients already have. Call it once in a wake. Returns an `Abort` for schedule for
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
        records: bytes = b"",
        errors: Iterable[str] = (),
        drafts: Collection[m.DraftCounts] = (),
    ) -> list[m.Abort]:
        """Handle a `Settled`, except for prompt records. Returns an `Abort` for schedule for each sequence with a stop
        string."""
        aborts: list[m.Abort] = []
        self._settled_s = self._settled_s if settled_s is None else settled_s
        first_of = {first.place: first for first in firsts} if firsts else {}
        names = bool(self._names_until_s) and time.monotonic() < self._names_until_s
        end = recorded = 0
        drafts_of = {counts.place: counts for counts in drafts} if drafts else {}
        reasons = iter(errors)
        sequence: OutputSequence | None = None
        try:
            for place, (seq, start, count, finish) in enumerate(zip(seqs, starts, counts, finishes, strict=True)):
                begin, end = end, end + count
                if self._resuming and seq in self._resuming:
                    sequence = self._resuming[seq]
                    recorded += (size := sequence.record_bytes * count)
                    later = functools.partial(
                        self.settle,
                        *([seq], [start], [count], ids[begin:end], [finish]),
                        [msgspec.structs.replace(first_of[place], place=0)] if place in first_of else (),
                        records=records[recorded - size : recorded],
                        errors=[next(reasons, "")] if finish == ERROR else (),
                        drafts=[msgspec.structs.replace(drafts_of[place], place=0)] if place in drafts_of else (),
                    )
                    sequence.later.append(later)
                    continue
                sequence = self._live.pop(seq, None) if finish else self._live.get(seq)
                assert sequence is not None, f"sequence {seq} is not open"
                if first_of:
                    sequence.first = first_of.get(place, sequence.first)
                if drafts_of:
                    sequence.drafts = drafts_of.get(place, sequence.drafts)
                if finish == ERROR:
                    sequence.error = next(reasons, "")
                if width := sequence.record_bytes:
                    records_begin, recorded = recorded, recorded + width * count
                    num_before = sequence.id_offset + len(sequence.ids) - start
                if sequence.finish:
                    continue  # stopped; its gateway knows
                if names:
                    self._breadcrumb.at(sequence.request_id, sequence.attempt)
                sequence.settle(start, ids[begin:end], finish)
                if width:
                    sequence.add_records(num_before, records[records_begin:recorded])
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
        assert recorded == len(records), f"{len(records)} bytes of records came, {recorded} were expected"
        return aborts

    def add_prompt_records(self, message: m.Settled) -> None:
        """Handle the prompt records of a `Settled`. Call it before `settle`, which may close the sequences."""
        for seq, start, records in zip(message.prompt_seqs, message.prompt_starts, message.prompt_records, strict=True):
            if seq in self._resuming:
                later = functools.partial(self._add_prompt_records, seq, start, records)
                self._resuming[seq].later.append(later)
            else:
                self._add_prompt_records(seq, start, records)

    def _add_prompt_records(self, seq: int, start: int, records: bytes) -> list[m.Abort]:
        sequence = self._live[seq]
        if not sequence.finish:
            with self._breadcrumb.at(sequence.request_id, sequence.attempt):
                sequence.add_prompt_records(start, records)
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
        firsts, errors, drafts, special_places, spans = [], [], [], [], []
        has_records = False
        # One loop instead of a comprehension for each list: beside a running step, the caches are cold, and each piece
        # of code costs more to load than to run.
        for place, sequence in enumerate(sequences):
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
                firsts.append(msgspec.structs.replace(sequence.first, place=place))
            if sequence.drafts is not None:
                drafts.append(msgspec.structs.replace(sequence.drafts, place=place))
            if sequence.finish == ERROR:
                errors.append(sequence.error)
            if sequence.special_spans:
                special_places.append(place)
                spans.append(bytes(sequence.special_spans))
            if sequence.records or sequence.prompt_records:  # seldom
                has_records = True
        prompts = [(place, one) for place, one in enumerate(sequences) if one.prompt_records] if has_records else []
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
            records=_or_none([bytes(sequence.records) for sequence in sequences]) if has_records else [],
            pieces=_or_none([self._pieces(sequence) for sequence in sequences]) if has_records else [],
            prompt_places=[place for place, _ in prompts] if prompts else [],
            prompt_offsets=[sequence.prompt_offset for _, sequence in prompts] if prompts else [],
            prompt_records=[bytes(sequence.prompt_records) for _, sequence in prompts] if prompts else [],
            prompt_pieces=[self._prompt_pieces(sequence) for _, sequence in prompts] if prompts else [],
            errors=errors,
            drafts=drafts,
            special_places=special_places,
            special_spans=spans,
        )

    def _pieces(self, sequence: OutputSequence) -> list[bytes]:
        """The bytes of each of its ids and of the likeliest ids in its records."""
        if not (sequence.options.with_pieces and sequence.records):
            return []
        names = np.frombuffer(bytes(sequence.records), logprob_dtype(sequence.options.num_logprobs))["top_ids"].tolist()
        pairs = zip(sequence.ids, names, strict=True)
        return [self._bytes_of(named) for token_id, top_ids in pairs for named in (token_id, *top_ids)]

    def _prompt_pieces(self, sequence: OutputSequence) -> list[bytes]:
        if not sequence.options.with_pieces:
            return []
        records = np.frombuffer(bytes(sequence.prompt_records), logprob_dtype(sequence.options.num_prompt_logprobs))
        return list(map(self._bytes_of, records["top_ids"].reshape(-1).tolist()))

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
