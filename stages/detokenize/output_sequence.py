"""The output of one live sequence: ids become text, up to a stop string or stop id."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.detokenize.stop_matcher import StopMatcher, StopStrings
from pipeline.text import special_spans
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary

ERROR = int(m.Finish.ERROR)
NO_IDS: frozenset[int] = frozenset()
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
        "prompt_logprobs",
        "prompt_offset",
        "received_finish",
        "request_id",
        "special_spans",
        "stop_reason",
        "text_offset",
        "texts",
        "token_output_bytes",
        "token_outputs",
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
        self.token_output_bytes = opening.token_output_bytes
        self.token_outputs = bytearray()
        """Token outputs of `ids`, if the request asks for them."""
        self.prompt_logprobs = bytearray()
        """Logprobs of the prompt."""
        self.prompt_offset = 0
        """Number of prompt logprobs before these."""
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
        for index in range(num_shown):
            text = decoder.add(ids[index])
            if specials and ids[index] in specials:
                self._note(ids[index], text)
            texts.append(shown := matcher.push(text, counts=index >= num_silent))
            if specials:
                self._num_chars += len(shown)
            if matcher.found is not None:
                self.ids += ids[: index + 1]
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

    def add_token_outputs(self, num_before: int, token_outputs: bytes) -> None:
        """Add the token outputs of settled ids, without the first `num_before`, which are here already, and without
        those of ids after a stop string."""
        num = len(self.ids) - len(self.token_outputs) // self.token_output_bytes
        self.token_outputs += token_outputs[
            num_before * self.token_output_bytes : (num_before + num) * self.token_output_bytes
        ]

    def add_prompt_logprobs(self, start: int, logprobs: bytes) -> None:
        """Add logprobs of the prompt, `start` of which come before. Token outputs that were added before are
        skipped."""
        width = logprob_bytes(self.options.num_prompt_logprobs)
        num_known = self.prompt_offset + len(self.prompt_logprobs) // width
        assert start <= num_known, f"prompt logprobs {num_known} to {start} of request {self.request_id:x} are missing"
        self.prompt_logprobs += logprobs[(num_known - start) * width :]

    def mark_sent(self) -> None:
        """The gateway got all output up to now."""
        self.text_offset += sum(map(len, self.texts))
        self.texts.clear()
        self.id_offset += len(self.ids)
        self.ids.clear()
        self.special_spans.clear()
        self.token_outputs.clear()
        if self.prompt_logprobs:
            self.prompt_offset += len(self.prompt_logprobs) // logprob_bytes(self.options.num_prompt_logprobs)
            self.prompt_logprobs.clear()
        self.first = self.drafts = None
