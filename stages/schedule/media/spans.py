"""Which items steps encode, and which rows of the encoder cache their positions read.

A row (of the batch) that computes positions of an item holds it from the step that computes the first of them to the
one that computes the last. Only a step that computes such a position encodes, so no one holds an item and waits:

    limit      of the positions that a row lacks, those that this step may compute: up to the first item that finds no
               room. Room is promised to rows in their order, so that what is granted fits. If the positions of a run
               see each other, one step computes all of them that are left
    advance    encode what is not in the cache, hold it, and name the slots that the step's positions read

Beside rows that decode, a short text before an item that is not encoded waits with it: items that arrive faster than
they are encoded must not slow down each step by their texts. Steps may then encode an item in parts. Its room is held
from the first part on, by no row. There is one such item at most; others wait until it is encoded, or its row is left.
What was encoded for a sequence that is preempted stays until another item begins: by then, a sequence that goes before
it needs one.
"""

from typing import Any, NamedTuple

import numpy as np

from pipeline.metrics.media_stats import EncoderCacheCounts
from pipeline.runtime.messages import NUM_PARTS, EncodeJob
from pipeline.stages.schedule.arrays import Bools, Int32s, Int64s, Put, Take
from pipeline.stages.schedule.media.encode_costs import EncodeCosts
from pipeline.stages.schedule.media.encoder_cache import EncoderCache
from pipeline.stages.schedule.media.request_media import RequestMedia
from pipeline.stages.schedule.policies.budget import MIN_CHUNK, NO_RUNS, Runs, first_run, uncut
from pipeline.stages.schedule.request import NO_ROW, Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

SHORT_TEXT = 64
"""Beside rows that decode, fewer positions than these wait for the item behind them. More are computed, so that less is
left when the item is encoded."""


class _Begun(NamedTuple):
    """An item that is encoded in part."""

    key: bytes
    num_rows: int
    sequence: Sequence
    """For which it is encoded."""
    row: int
    """NO_ROW if the sequence has left it."""
    generation: int
    num_done: int
    """Parts"""


class _Part(NamedTuple):
    """What the step that is being planned encodes of an item that it does not read."""

    row: int
    media: RequestMedia
    item: int
    """Its index."""
    num: int
    """Parts"""


class MediaSpans:
    """Owns the encoder cache, and what the step that is being planned encodes and reads of it."""

    def __init__(self, config: SchedulerConfig, rows: RowTracker, put: Put, view: Take) -> None:
        self.is_on = config.num_encoder_rows > 0
        self.cache = EncoderCache(config.num_encoder_rows)
        self.costs = EncodeCosts(config.encode_max_slowdown)
        self._max_chunk, self._max_whole_run = config.max_chunk, config.max_whole_run
        self._rows, self._put, self._view = rows, put, view
        self._held: dict[int, tuple[int, list[bytes]]] = {}
        """By row: the generation that holds items, and their keys."""
        self._promised: dict[bytes, int] = {}
        """Items that this step may encode, and their rows."""
        self._pinned: set[bytes] = set()
        """Items that stay in the cache until the step is planned: rows of it need them."""
        self._decodes = False
        """Whether rows decode that encodes delay."""
        self._begun: _Begun | None = None
        self._part: _Part | None = None
        self._has_delayed = self._is_forgiven = False
        """Whether this plan delays an item for rows that decode; whether the next one may not."""
        self._jobs: list[EncodeJob] = []
        self._num_rows_encoded = 0.0
        self._spans: list[tuple[int, int, int]] = []
        self._slots: list[Int32s] = []

    # ---------------------------------------------------------------------------------------------------- a plan

    def begin_plan(self, order: Int64s, starts: Int64s, need: Int64s) -> Int64s:
        """The plan of a step begins. Returns `limit_all` of all rows."""
        self._promised.clear()
        self._pinned.clear()
        self._part = None
        self._release_left()
        decodes = bool(np.count_nonzero((need == 1) & ~self._pending(order, starts)))
        self._decodes = decodes and not self._is_forgiven
        self._has_delayed = self._is_forgiven = False
        return self.limit_all(order, starts, need)

    def forgive(self) -> bool:
        """Nothing else can be computed. Returns whether an item was delayed, which the next plan will not do."""
        self._is_forgiven = self._has_delayed
        return self._is_forgiven

    def limit_all(self, order: Int64s, starts: Int64s, need: Int64s) -> Int64s:
        """How many of the positions that rows `need` from `starts` on may be computed by this step, in their order."""
        pending = self._pending(order, starts) & (need > 0)
        if not np.count_nonzero(pending):
            return need
        need = need.copy()
        for index in np.flatnonzero(pending).tolist():
            need[index] = self.limit(int(order[index]), int(starts[index]), int(need[index]))
        return need

    def limit(self, row: int, start: int, need: int) -> int:
        """The same for one row."""
        media = self._media_of(row)
        if media is None or start >= media.end:
            return need
        need = min(need, self._max_chunk)
        for index in media.between(start, start + need):
            if not self._may_read(row, media, index):
                before = max(0, media.firsts[index] - start)
                if self._decodes and 0 < before < SHORT_TEXT:
                    self._has_delayed = True
                    return 0
                return before
        return uncut(need, self.runs_of(row, start, need))

    # ---------------------------------------------------------------------------------- runs that are not cut

    def runs_of(self, row: int, start: int, need: int) -> Runs:
        """The runs among `need` positions of a row from `start` on that are not cut."""
        if not self._max_whole_run or start >= self._rows.media_ends[row]:
            return NO_RUNS
        media = self._media_of(row)
        return NO_RUNS if media is None else media.runs(start, start + need)

    def runs_of_all(self, rows: Int64s, starts: Int64s, need: Int64s) -> list[Runs] | None:
        """The same for each of some rows; None if there are none."""
        if not self._max_whole_run or not np.count_nonzero(self._pending(rows, starts)):
            return None
        columns = (each.tolist() for each in (rows, starts, need))
        return [self.runs_of(*each) for each in zip(*columns, strict=True)]

    def uncut(self, row: int, start: int, end: int) -> int:
        """The last end of a chunk of a row from `start` on, up to `end`, that is within no run; `start` without one."""
        return start + uncut(max(0, end - start), self.runs_of(row, start, end - start))

    def least_chunks(self, rows: Int64s, starts: Int64s) -> Int64s:
        """Positions that each row computes at least, if it lacks as many: the run that it is in, or MIN_CHUNK."""
        least = np.full(len(rows), MIN_CHUNK, np.int64)
        pending = self._pending(rows, starts) & self._rows.active[rows]  # some may have been preempted by this plan
        for index in np.flatnonzero(pending).tolist() if self._max_whole_run else ():
            least[index] = max(MIN_CHUNK, first_run(self.runs_of(int(rows[index]), int(starts[index]), 1)))
        return least

    # ------------------------------------------------------------------------------------------------------ the plan

    def _may_read(self, row: int, media: RequestMedia, index: int) -> bool:
        """Whether this step may compute positions of an item."""
        key = media.items[index].key
        if key in self._promised:
            return True
        if key in self.cache and (self._begun is None or key != self._begun.key):
            return self._pin(key)
        return self._promise(row, media, index)

    def _num_available(self) -> int:
        """Rows that no one holds or was promised, and that this step does not need."""
        num_promised = sum(self._promised.values())
        if (part := self._part) is not None and self._begun is None:
            num_promised += part.media.num_rows[part.item]
        return self.cache.num_available(self._pinned) - num_promised

    def _pin(self, key: bytes) -> bool:
        """Keep an item in the cache, unless its rows are promised to others."""
        self._pinned.add(key)
        if self._num_available() >= 0:
            return True
        self._pinned.discard(key)
        return False

    def _promise(self, row: int, media: RequestMedia, index: int) -> bool:
        """Promise an item rows, if there is room and time. Beside rows that decode, a step encodes one item at most,
        and as much of it as they put up with."""
        key, num_rows, begun = media.items[index].key, media.num_rows[index], self._begun
        left: _Begun | None = None
        if begun is not None and begun.key != key:
            if begun.row != NO_ROW:
                return False
            left, begun = begun, None
        if begun is None and self._num_available() + (0 if left is None else left.num_rows) < num_rows:
            return False
        if self._decodes:
            self._has_delayed = True
            if self._promised or self._jobs or self._part is not None:
                return False
            num_left = NUM_PARTS - (0 if begun is None else begun.num_done)
            if (num := self.costs.parts(num_rows, num_left)) < num_left:
                if num:
                    if left is not None:
                        self._drop_begun()
                    self._part = _Part(row, media, index, num)
                return False
        if left is not None:
            self._drop_begun()
        self._promised[key] = num_rows if begun is None else 0
        return True

    def advance(self, rows: Int64s, starts: Int64s, counts: Int64s) -> None:
        """These rows compute positions in this step."""
        for index in np.flatnonzero(self._pending(rows, starts) & (counts > 0)).tolist():
            self._advance(int(rows[index]), int(starts[index]), int(starts[index] + counts[index]))

    def _advance(self, row: int, start: int, end: int) -> None:
        media = self._media_of(row)
        assert media is not None
        _, held = self._held.setdefault(row, (int(self._rows.generation[row]), []))
        for index in media.between(start, end):
            key = media.items[index].key
            if key not in held:
                held.append(key)
                self._hold(row, media, index)
        for span in media.spans(start, end):
            slots = self.cache.slots_of(media.items[span.item].key)
            self._spans.append((row, span.start, span.num))
            self._slots.append(slots[span.first_row : span.first_row + span.num])
        still = [media.items[index].key for index in media.between(end, end + 1) if media.firsts[index] < end]
        for key in [key for key in held if key not in still]:
            held.remove(key)
            self.cache.release(key)
        if not held:
            del self._held[row]

    def _hold(self, row: int, media: RequestMedia, index: int) -> None:
        """Hold an item for a row, and encode it if it is not in the cache."""
        key = media.items[index].key
        self.cache.num_queries += 1
        if (begun := self._begun) is not None and key == begun.key:  # the row holds it from now on
            self._promised.pop(key, None)
            self._begun = None
            self._encode(row, media, index, begun.num_done, NUM_PARTS)
        elif key in self.cache:
            self.cache.num_hits += 1
            self.cache.hold(key)
        else:
            self.cache.add(key, self._promised.pop(key), self._pinned)
            self._encode(row, media, index, 0, NUM_PARTS)
        self._pinned.add(key)  # this step reads it, also if the row needs it no longer

    def counts(self) -> EncoderCacheCounts:
        """Of the cache, and since the start."""
        cache = self.cache
        return EncoderCacheCounts(
            num_free=cache.num_free,
            num_cached=cache.num_kept,
            num_held=cache.num_held,
            num_queries=cache.num_queries,
            num_hits=cache.num_hits,
            num_rows_encoded=cache.num_rows_encoded,
            encode_s=self.costs.encode_s,
        )

    def _encode(self, row: int, media: RequestMedia, index: int, first: int, end: int) -> None:
        """Let the step compute these parts of an item that has its rows."""
        item, sequence = media.items[index], self._rows.sequences[row]
        assert sequence is not None
        pixels = b"" if first else self._put(self._view(media.pixels[index], np.uint8))
        slots = self._put(self.cache.slots_of(item.key))
        request_id = sequence.request.request_id
        self._jobs.append(EncodeJob(item.key, slots, item.grid, pixels, request_id, item.shape, first, end))
        self._num_rows_encoded += media.num_rows[index] * (end - first) / NUM_PARTS

    def take_encoded(self) -> tuple[float, float | None]:
        """Rows that the planned step encodes, and the predicted seconds; None if no rows decode that wait for it."""
        if (part := self._part) is not None and self._media_of(part.row) is part.media:
            key, num_rows, begun = part.media.items[part.item].key, part.media.num_rows[part.item], self._begun
            sequence = self._rows.sequences[part.row]
            assert sequence is not None
            if begun is None:
                self.cache.add(key, num_rows, self._pinned)
            first = 0 if begun is None else begun.num_done
            generation = int(self._rows.generation[part.row])
            self._begun = _Begun(key, num_rows, sequence, part.row, generation, first + part.num)
            self._encode(part.row, part.media, part.item, first, first + part.num)
        self._part = None
        num, self._num_rows_encoded = self._num_rows_encoded, 0.0
        if not num:
            return 0.0, 0.0
        return num, self.costs.spend(num) if self._decodes else None

    def take_fields(self) -> dict[str, Any]:
        """The fields of the planned step."""
        jobs, self._jobs = self._jobs, []
        if not self._spans:
            return {"encodes": jobs} if jobs else {}
        rows, starts, counts = (np.array(column, np.int32) for column in zip(*self._spans, strict=True))
        slots = np.concatenate(self._slots)
        self._spans.clear()
        self._slots.clear()
        put = self._put
        return {
            "encodes": jobs,
            "span_rows": put(rows),
            "span_starts": put(starts),
            "span_counts": put(counts),
            "span_slots": put(slots),
        }

    # ------------------------------------------------------------------------------------------------- elsewhere

    def recompute_s(self, rows: Int64s) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """What it takes to encode again what these rows need if they are computed again from the beginning. What is
        encoded in part counts, too: else its row, which has computed little, would be preempted before all others."""
        seconds, begun = np.zeros(len(rows)), self._begun
        for index in np.flatnonzero(self._rows.media_ends[rows]).tolist():
            media = self._media_of(row := int(rows[index]))
            assert media is not None
            lacking = {one.key: num for one, num in zip(media.items, media.num_rows, strict=True)}
            num_rows: float = sum(num for key, num in lacking.items() if key not in self.cache)
            if begun is not None and begun.row == row:
                num_rows += begun.num_rows * begun.num_done / NUM_PARTS
            seconds[index] = self.costs.row_s * num_rows
        return seconds

    def executor_lost(self) -> None:
        """The executor is gone, and with it the rows."""
        for _, held in self._held.values():
            for key in held:
                self.cache.release(key)
        self._held.clear()
        self._drop_begun()
        self.cache.forget_all()
        self.costs.credit_s = 0.0

    def _release_left(self) -> None:
        """Release what rows held that their sequences have left."""
        rows = self._rows
        for row, (generation, held) in list(self._held.items()):
            if not rows.active[row] or rows.generation[row] != generation:
                for key in held:
                    self.cache.release(key)
                del self._held[row]
        if (begun := self._begun) is None:
            return
        if begun.row != NO_ROW and not (rows.active[begun.row] and rows.generation[begun.row] == begun.generation):
            self._begun = begun = begun._replace(row=NO_ROW)
        if begun.row == NO_ROW and begun.sequence.finish:
            self._drop_begun()

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self.cache.discard(self._begun.key)
            self._begun = None

    def _pending(self, rows: Int64s, starts: Int64s) -> Bools:
        """Which rows have items that they have not computed."""
        pending: Bools = starts < self._rows.media_ends[rows]
        return pending

    def _media_of(self, row: int) -> RequestMedia | None:
        sequence = self._rows.sequences[row]
        return None if sequence is None else sequence.request.media

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self._release_left()
        assert not (self._jobs or self._spans or self._slots), "a step was planned without what it encodes"
        begun = [] if self._begun is None else [self._begun.key]
        self.cache.check([key for _, held in self._held.values() for key in held] + begun)
        for row, (_, held) in self._held.items():
            computed, media = int(self._rows.num_computed_tokens[row]), self._media_of(row)
            assert media is not None and self._rows.flags[row] & RowFlag.MEDIA
            begun = [media.items[i].key for i in media.between(computed, computed + 1) if media.firsts[i] < computed]
            assert held == begun, f"row {row} holds items that it has not begun, or that it has computed"
