"""The live sequences: what schedule has settled goes in, what the gateways have to be told comes out.

    open ──settle──► live ──settle with a finish──► gone
                      │                               ▲
                      └─stop string found──► judged ──┘  later ids are dropped; schedule, which is asked to end
                                                         it, closes it like any other

What a sequence has to tell waits in it until `sent`: entries that a full socket refused grow, and none is lost.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import logprob_bytes, logprob_dtype
from pipeline.stages.detokenize.stop_matcher import StopMatcher, StopStrings
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary

E = TypeVar("E", bytes, list[bytes])
ERROR = int(m.Finish.ERROR)


class OutputSequence:
    """One sequence, with what its gateway has not been told yet."""

    __slots__ = (
        "_has_stops",
        "_include_stop",
        "_min_tokens",
        "_num_settled",
        "_stop_id",
        "_stop_matcher",
        "_stop_token_ids",
        "_text",
        "attempt",
        "error",
        "finish",
        "first",
        "gateway",
        "id_offset",
        "ids",
        "index",
        "options",
        "prompt_offset",
        "prompt_records",
        "record_bytes",
        "records",
        "request_id",
        "stop_reason",
        "text_offset",
        "texts",
    )

    def __init__(
        self,
        opening: m.Open,
        outputs: list[int],
        options: m.TextOptions,
        stops: StopStrings,
        vocabulary: Vocabulary,
    ) -> None:
        """`outputs` are the opening's: ids that the client has already."""
        self.request_id = opening.request_id
        self.attempt = opening.attempt
        self.index = opening.index
        self.gateway = opening.gateway
        prompt_tail = np.frombuffer(opening.prompt_tail, "<i4").tolist()
        self._text = IncrementalDecoder(vocabulary, prompt_tail, skip_special_tokens=options.skip_special_tokens)
        self._stop_matcher = StopMatcher(stops, include_stop=options.include_stop)
        self._has_stops = bool(stops.firsts)
        self._min_tokens = options.min_tokens
        self._stop_token_ids = options.stop_token_ids
        self._include_stop = options.include_stop
        self._num_settled = 0
        self.texts: list[str] = []
        self.text_offset = 0
        self.ids: list[int] = []
        self.id_offset = 0
        self.options = options
        self.record_bytes = options.record_bytes
        self.records = bytearray()
        """Of `ids`, where they are asked for"""
        self.prompt_records = bytearray()
        """Likewise of the prompt's"""
        self.prompt_offset = 0
        """Records of the prompt before these"""
        self.error = ""
        """Why it ended, where that was an error and somebody said."""
        self.finish: int = m.Finish.NONE
        self.stop_reason: str | int | None = None
        self._stop_id: int | None = None
        """The id that stopped it, where it came with the opening."""
        self.first: m.FirstTimes | None = None
        """Goes with its first ids, like them until it was sent."""
        if outputs:
            self._resume(outputs, opening.finish)

    def _resume(self, outputs: list[int], finish: int) -> None:
        """Take ids whose text the client has already. What they leave half, a character or a stop string, goes on with
        the ids that follow."""
        self._num_settled = len(outputs)
        if finish == m.Finish.STOP:
            self._stop_id = outputs[-1]
        self._show(outputs, len(outputs) - (finish == m.Finish.STOP))
        self.sent()
        self.id_offset = len(outputs)

    def settle(self, start: int, ids: list[int], finish: int) -> None:
        """Take ids that begin at output id `start`; those that were taken before are skipped."""
        if start == self._num_settled and not finish and not self._has_stops:
            # Nearly every entry: ids that follow those before, and nothing that ends the text.
            self._num_settled += len(ids)
            self.texts += map(self._text.add, ids)
            self.ids += ids
            return
        assert start <= self._num_settled, f"ids {self._num_settled} to {start} of {self.request_id:x} never came"
        if start < self._num_settled:
            ids = ids[self._num_settled - start :]
        self._num_settled += len(ids)
        is_stopped_before = finish == m.Finish.STOP and not ids
        if is_stopped_before:
            assert self._stop_id is not None, f"nothing stops sequence {self.index} of {self.request_id:x}"
            ids = [self._stop_id]
        num_shown = len(ids)
        if finish == m.Finish.STOP:
            stop_id = ids[-1]
            asked_for = stop_id in self._stop_token_ids
            self.stop_reason = stop_id if asked_for else None
            if not (asked_for and self._include_stop):
                num_shown -= 1
        self.finish = finish
        self._show(ids, num_shown)
        if is_stopped_before:
            self.ids = []  # the client has it

    def _show(self, ids: list[int], num_shown: int) -> None:
        """Append the text of the first ids, and all ids: or those up to the one that completes a stop string."""
        text, matcher, texts = self._text, self._stop_matcher, self.texts
        num_silent = self._min_tokens - (self._num_settled - len(ids))
        for place in range(num_shown):
            texts.append(matcher.push(text.add(ids[place]), counts=place >= num_silent))
            if matcher.found is not None:
                self.ids += ids[: place + 1]
                self._judged()
                return
        self.ids += ids
        if self.finish:
            texts.append(matcher.push(text.finish(), counts=num_shown > num_silent))
            if matcher.found is not None:
                self._judged()
            else:
                texts.append(matcher.finish())

    def _judged(self) -> None:
        self.finish = m.Finish.STOP
        self.stop_reason = self._stop_matcher.found

    def record(self, num_before: int, records: bytes) -> None:
        """Take the records of settled ids, of which the first `num_before` are here already: those of ids that don't
        count, behind a stop string, are left out."""
        num = len(self.ids) - len(self.records) // self.record_bytes
        self.records += records[num_before * self.record_bytes : (num_before + num) * self.record_bytes]

    def record_prompt(self, start: int, records: bytes) -> None:
        """Take records of the prompt, of which `start` come before; those that were taken before are skipped."""
        width = logprob_bytes(self.options.prompt_num_top)
        num_known = self.prompt_offset + len(self.prompt_records) // width
        assert start <= num_known, f"records {num_known} to {start} of the prompt of {self.request_id:x} never came"
        self.prompt_records += records[(num_known - start) * width :]

    def sent(self) -> None:
        """The gateway has been told everything up to now."""
        self.text_offset += sum(map(len, self.texts))
        self.texts.clear()
        self.id_offset += len(self.ids)
        self.ids.clear()
        self.records.clear()
        if self.prompt_records:
            self.prompt_offset += len(self.prompt_records) // logprob_bytes(self.options.prompt_num_top)
            self.prompt_records.clear()
        self.first = None


class OutputProcessor:
    """All sequences of this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._options = msgspec.msgpack.Decoder(m.TextOptions)
        self._stops: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()
        """Those of live sequences: long ones take a while to build, and sequences share them."""
        self._live: dict[int, OutputSequence] = {}
        self._unsent: defaultdict[int, dict[int, OutputSequence]] = defaultdict(dict)
        """By gateway, then by `seq`."""
        self._bytes = vocabulary.pieces(skip_special_tokens=False)
        """What records name ids by"""
        self._settled_s = 0.0
        """When schedule sent the newest that was taken."""

    def __len__(self) -> int:
        return len(self._live)

    def open(self, opening: m.Open, outputs: list[int] | None = None) -> list[m.Abort]:
        """Begin a sequence; `outputs` are the opening's. Returns what schedule has to end because a stop string is in
        their text already."""
        assert opening.seq not in self._live, f"sequence {opening.seq} was opened twice"
        options = self._options.decode(opening.text)
        key = tuple(options.stop)
        if (stops := self._stops.get(key)) is None:
            stops = self._stops[key] = StopStrings(key)
        sequence = self._live[opening.seq] = OutputSequence(opening, outputs or [], options, stops, self._vocabulary)
        if not sequence.finish:
            return []
        self._unsent[sequence.gateway][opening.seq] = sequence
        return [] if opening.finish else [_end_of(sequence)]

    @property
    def num_unsent(self) -> int:
        """Sequences with something that their gateway has not taken."""
        return sum(map(len, self._unsent.values()))

    def requests(self, seqs: list[int]) -> list[int]:
        """Whose they are."""
        return [self._live[seq].request_id for seq in seqs]

    def settle(
        self,
        seqs: list[int],
        starts: list[int],
        counts: list[int],
        ids: list[int],
        finishes: list[int],
        firsts: Iterable[m.FirstTimes] = (),
        settled_s: float = 0.0,
        records: bytes = b"",
        errors: Iterable[str] = (),
    ) -> list[m.Abort]:
        """Take what is in a `Settled`, but for records of prompts. Returns what schedule has to end because a stop
        string was found."""
        aborts: list[m.Abort] = []
        self._settled_s = settled_s
        first_of = {first.place: first for first in firsts}
        end = recorded = 0
        reasons = iter(errors)
        for place, (seq, start, count, finish) in enumerate(zip(seqs, starts, counts, finishes, strict=True)):
            begin, end = end, end + count
            assert seq in self._live, f"sequence {seq} was never opened, or closed before"
            sequence = self._live.pop(seq) if finish else self._live[seq]
            sequence.first = first_of.get(place, sequence.first)
            if finish == ERROR:
                sequence.error = next(reasons, "")
            if width := sequence.record_bytes:
                told, recorded = recorded, recorded + width * count
                num_before = sequence.id_offset + len(sequence.ids) - start
            if sequence.finish:
                continue  # judged; its gateway was told so
            sequence.settle(start, ids[begin:end], finish)
            if width:
                sequence.record(num_before, records[told:recorded])
            if sequence.finish and not finish:
                aborts.append(_end_of(sequence))
            if sequence.ids or sequence.finish:
                self._unsent[sequence.gateway][seq] = sequence
        assert end == len(ids), f"{len(ids)} ids came for {end}"
        assert recorded == len(records), f"{len(records)} bytes of records came for {recorded}"
        return aborts

    def record_prompts(self, message: m.Settled) -> None:
        """Take what a `Settled` has of prompts; before the rest, which may end their sequences."""
        for seq, start, records in zip(message.prompt_seqs, message.prompt_starts, message.prompt_records, strict=True):
            sequence = self._live[seq]
            if not sequence.finish:
                sequence.record_prompt(start, records)
                self._unsent[sequence.gateway][seq] = sequence

    def unsent(self) -> list[int]:
        """The gateways that have to be told something."""
        return [gateway for gateway, sequences in self._unsent.items() if sequences]

    def deltas(self, gateway: int, now_s: float = 0.0) -> m.Deltas:
        """All that a gateway has to be told."""
        sequences = self._unsent[gateway].values()
        is_told = any(sequence.records or sequence.prompt_records for sequence in sequences)  # seldom
        prompts = [(place, one) for place, one in enumerate(sequences) if one.prompt_records] if is_told else []
        return m.Deltas(
            request_ids=[sequence.request_id for sequence in sequences],
            attempts=[sequence.attempt for sequence in sequences],
            indexes=[sequence.index for sequence in sequences],
            texts=["".join(sequence.texts) for sequence in sequences],
            text_offsets=[sequence.text_offset for sequence in sequences],
            ids=np.array([token_id for sequence in sequences for token_id in sequence.ids], "<i4").tobytes(),
            id_offsets=[sequence.id_offset for sequence in sequences],
            num_ids=[len(sequence.ids) for sequence in sequences],
            finishes=[int(sequence.finish) for sequence in sequences],
            stop_reasons=[sequence.stop_reason for sequence in sequences],
            firsts=[
                msgspec.structs.replace(sequence.first, place=place)
                for place, sequence in enumerate(sequences)
                if sequence.first is not None
            ],
            settled_s=self._settled_s,
            sent_s=now_s,
            records=_or_none([bytes(sequence.records) for sequence in sequences]) if is_told else [],
            pieces=_or_none([self._pieces(sequence) for sequence in sequences]) if is_told else [],
            prompt_places=[place for place, _ in prompts],
            prompt_offsets=[sequence.prompt_offset for _, sequence in prompts],
            prompt_records=[bytes(sequence.prompt_records) for _, sequence in prompts],
            prompt_pieces=[self._prompt_pieces(sequence) for _, sequence in prompts],
            errors=[sequence.error for sequence in sequences if sequence.finish == ERROR],
        )

    def _pieces(self, sequence: OutputSequence) -> list[bytes]:
        """Of each of its ids and of those that its record names."""
        if not (sequence.options.with_pieces and sequence.records):
            return []
        names = np.frombuffer(bytes(sequence.records), logprob_dtype(sequence.options.num_top))["top_ids"].tolist()
        pairs = zip(sequence.ids, names, strict=True)
        return [self._bytes_of(named) for token_id, top_ids in pairs for named in (token_id, *top_ids)]

    def _prompt_pieces(self, sequence: OutputSequence) -> list[bytes]:
        if not sequence.options.with_pieces:
            return []
        records = np.frombuffer(bytes(sequence.prompt_records), logprob_dtype(sequence.options.prompt_num_top))
        return list(map(self._bytes_of, records["top_ids"].reshape(-1).tolist()))

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._bytes[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def sent(self, gateway: int) -> None:
        """The gateway's socket took `deltas`."""
        for sequence in self._unsent[gateway].values():
            sequence.sent()
        self._unsent[gateway].clear()


def _or_none(each: list[E]) -> list[E]:
    """What entries have, or nothing where none has anything."""
    return each if any(each) else []


def _end_of(sequence: OutputSequence) -> m.Abort:
    """What asks schedule to end a sequence whose text has a stop string."""
    return m.Abort(sequence.request_id, sequence.attempt, sequence.index, m.Finish.STOP)
