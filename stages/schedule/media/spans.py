"""Which items steps encode, and which rows of the encoder cache their positions read.

A row (of the batch) that computes positions of an item holds it from the step that computes the first of them to the
one that computes the last. Only a step that computes such a position encodes, so no one holds an item and waits:

    limit      of the positions that a row lacks, those that this step may compute: up to the first item that finds no
               room. Room is promised to rows in their order, so that what is granted fits
    advance    encode what is not in the cache, hold it, and name the slots that the step's positions read
"""

from typing import Any

import numpy as np

from pipeline.metrics.media_stats import EncoderCacheCounts
from pipeline.runtime.messages import EncodeJob
from pipeline.stages.schedule.arrays import Bools, Int32s, Int64s, Put, Take
from pipeline.stages.schedule.media.encode_costs import EncodeCosts
from pipeline.stages.schedule.media.encoder_cache import EncoderCache
from pipeline.stages.schedule.media.request_media import RequestMedia
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


class MediaSpans:
    """Owns the encoder cache, and what the step that is being planned encodes and reads of it."""

    def __init__(self, config: SchedulerConfig, rows: RowTracker, put: Put, view: Take) -> None:
        self.is_on = config.num_encoder_rows > 0
        self.cache = EncoderCache(config.num_encoder_rows)
        self.costs = EncodeCosts(config.prompt_max_slowdown)
        self._max_chunk = config.max_chunk
        self._rows, self._put, self._view = rows, put, view
        self._held: dict[int, tuple[int, list[bytes]]] = {}
        """By row: the generation that holds items, and their keys."""
        self._promised: dict[bytes, int] = {}
        """Items that this step may encode, and their rows."""
        self._pinned: set[bytes] = set()
        """Items that stay in the cache until the step is planned: rows of it need them."""
        self._decodes = False
        """Whether rows decode that encodes delay."""
        self._jobs: list[EncodeJob] = []
        self._num_rows_encoded = 0
        self._spans: list[tuple[int, int, int]] = []
        self._slots: list[Int32s] = []

    # ---------------------------------------------------------------------------------------------------- a plan

    def begin_plan(self, order: Int64s, starts: Int64s, need: Int64s) -> Int64s:
        """The plan of a step begins. Returns `limit_all` of all rows."""
        self._promised.clear()
        self._pinned.clear()
        self._release_left()
        self._decodes = bool(np.count_nonzero((need == 1) & ~self._pending(order, starts)))
        return self.limit_all(order, starts, need)

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
            key, num_rows = media.items[index].key, media.num_rows[index]
            if not (self._pin(key) if key in self.cache else key in self._promised or self._promise(key, num_rows)):
                return max(0, media.firsts[index] - start)
        return need

    def _pin(self, key: bytes) -> bool:
        """Keep an item in the cache, unless its rows are promised to others."""
        self._pinned.add(key)
        if self.cache.num_available(self._pinned) >= sum(self._promised.values()):
            return True
        self._pinned.discard(key)
        return False

    def _promise(self, key: bytes, num_rows: int) -> bool:
        """Promise an item rows, if there is room and time. Beside rows that decode, a step encodes one
        item at most, and none before they have caught up with what earlier items took."""
        if self._decodes and (self._promised or self._jobs or self.costs.debt_s > 0):
            return False
        if self.cache.num_available(self._pinned) - sum(self._promised.values()) < num_rows:
            return False
        self._promised[key] = num_rows
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
        item = media.items[index]
        self.cache.num_queries += 1
        if item.key in self.cache:
            self.cache.num_hits += 1
            self.cache.hold(item.key)
        else:
            slots = self.cache.add(item.key, self._promised.pop(item.key), self._pinned)
            sequence = self._rows.sequences[row]
            assert sequence is not None
            pixels = self._put(self._view(media.pixels[index], np.uint8))
            job = EncodeJob(item.key, self._put(slots), item.grid, pixels, sequence.request.request_id, item.shape)
            self._jobs.append(job)
            self._num_rows_encoded += len(slots)
        self._pinned.add(item.key)  # this step reads it, also if the row needs it no longer

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

    def take_num_encoded(self) -> int:
        """Rows that the planned step encodes."""
        num, self._num_rows_encoded = self._num_rows_encoded, 0
        return num

    def take_fields(self) -> dict[str, Any]:
        """The fields of the planned step."""
        if not self._spans:
            return {}
        jobs, self._jobs = self._jobs, []
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
        """What it takes to encode again what these rows need if they are computed again from the beginning."""
        seconds = np.zeros(len(rows))
        for index in np.flatnonzero(self._rows.media_ends[rows]).tolist():
            media = self._media_of(int(rows[index]))
            assert media is not None
            lacking = {one.key: num for one, num in zip(media.items, media.num_rows, strict=True)}
            seconds[index] = self.costs.row_s * sum(num for key, num in lacking.items() if key not in self.cache)
        return seconds

    def executor_lost(self) -> None:
        """The executor is gone, and with it the rows."""
        for _, held in self._held.values():
            for key in held:
                self.cache.release(key)
        self._held.clear()
        self.cache.forget_all()
        self.costs.forgive()

    def _release_left(self) -> None:
        """Release what rows held that their sequences have left."""
        rows = self._rows
        for row, (generation, held) in list(self._held.items()):
            if not rows.active[row] or rows.generation[row] != generation:
                for key in held:
                    self.cache.release(key)
                del self._held[row]

    def _pending(self, rows: Int64s, starts: Int64s) -> Bools:
        """Which rows have items that they have not computed."""
        pending: Bools = starts < self._rows.media_ends[rows]
        return pending

    def _media_of(self, row: int) -> RequestMedia | None:
        sequence = self._rows.sequences[row]
        assert sequence is not None
        return sequence.request.media

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self._release_left()
        assert not (self._jobs or self._spans or self._slots), "a step was planned without what it encodes"
        self.cache.check([key for _, held in self._held.values() for key in held])
        for row, (_, held) in self._held.items():
            computed, media = int(self._rows.num_computed_tokens[row]), self._media_of(row)
            assert media is not None and self._rows.flags[row] & RowFlag.MEDIA
            begun = [media.items[i].key for i in media.between(computed, computed + 1) if media.firsts[i] < computed]
            assert held == begun, f"row {row} holds items that it has not begun, or that it has computed"
