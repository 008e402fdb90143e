"""The encoder cache on a CPU: rows of embeddings that a vision tower makes of a step's images, and the positions that
read them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.patches import PixelArray
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.media import support
from pipeline.runtime.messages import MAX_RUNS_BEYOND, NUM_PARTS, EncodeJob, Step
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.execute.cores import threads_of
from pipeline.stages.execute.cpu.backend import Library
from pipeline.stages.execute.cpu.program import EncodedRows
from pipeline.stages.execute.cpu.vision import Encoding, MediaItem, VisionEncoder
from pipeline.stages.execute.ranks.context import RankContext
from pipeline.stages.execute.rows import Take
from pipeline.stages.execute.vision.coordinates import RowCoordinates


class MediaFacts(NamedTuple):
    """The fields of `ExecuteFacts`."""

    num_encoder_rows: int = 0
    max_whole_run: int = 0

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> "MediaFacts":
        """What all ranks know. Without rows, this server takes no images of the model (see `support.encodes`). Raises
        UserError if the encoder cache has no room for a row."""
        vision, num_bytes = VisionConfig.load(folder), settings.execute.encoder_cache_bytes
        if vision is None or not support.encodes(settings, folder):
            return cls()
        if (num_rows := num_bytes // (vision.row_width * 4)) < 1:
            raise UserError(f"execute.encoder_cache_bytes = {num_bytes}: a row takes {vision.row_width * 4} bytes")
        return cls(num_rows, support.max_whole_run(folder))

    @property
    def tokens_beyond(self) -> int:
        """Tokens that a step may have beyond its limit, so that runs are whole."""
        return MAX_RUNS_BEYOND * self.max_whole_run


class _Begun(NamedTuple):
    """An item that is computed."""

    key: bytes
    made: FloatArray
    """Its rows."""
    encoding: Encoding


class Encodes:
    """Owns the rows and the tower. Schedule says which rows are written and read."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        vision: VisionConfig,
        num_rows: int,
        num_threads: int,
        library: Library | None,
        *,
        is_causal: bool = True,
        turns: bool = False,
    ) -> None:
        """`library` is that of the language model. If positions of an image see those behind them, which is not
        `is_causal`, a step has all positions of a run that are not computed. `turns`: tokens have coordinates. Raises
        UserError as `VisionEncoder`."""
        self._is_causal = is_causal
        self.rows: FloatArray | None = None
        """[rows, row_width]; None on a rank that does not encode: it only knows which positions are not its own."""
        self._encoder: VisionEncoder | None = None
        if num_rows:
            self.rows = np.zeros((num_rows, vision.row_width), np.float32)
            self._encoder = VisionEncoder(settings, folder, vision, num_threads, library)
        self._num_layers = len(vision.layer_rows.layers)
        self._coordinates = RowCoordinates(settings.schedule.max_num_seqs, vision.projector.merge) if turns else None
        self._begun: _Begun | None = None
        self.seconds = 0.0
        """That the last step's items took."""
        self._spans: dict[int, list[tuple[int, IntArray]]] = {}
        """Of this step, by row: the first position of each span, and the rows of the cache from there on."""

    @property
    def memory(self) -> EncodedRows:
        """The rows, for the language model's program."""
        return EncodedRows(self.rows, self._num_layers)

    def encode(self, step: Step, take: Take, clock: Callable[[], float]) -> None:
        """Encode the step's items, and note its spans and rows. Without items, the clock is not read."""
        self._spans.clear()
        self.seconds = 0.0
        if step.span_rows:
            self._note_spans(step, take)
        if self._coordinates is not None:
            for add in step.adds:
                self._coordinates.add(add.row, add.grids)
        if not step.encodes:
            return
        # On a rank that does not encode, this frees what the step brings.
        jobs = [(take(job.slots, np.int32), take(job.pixels, np.uint8), job) for job in step.encodes]
        if self.rows is None or self._encoder is None:
            return
        began = clock()
        for slots, pixels, job in jobs:
            self._run(self._encoder, self.rows, slots, pixels, job)
        self.seconds = clock() - began

    def _note_spans(self, step: Step, take: Take) -> None:
        slots, end = take(step.span_slots, np.int32), 0
        spans = (take(one, np.int32).tolist() for one in (step.span_rows, step.span_starts, step.span_counts))
        for row, start, num in zip(*spans, strict=True):
            self._spans.setdefault(row, []).append((start, slots[end : end + num]))
            end += num
        assert end == len(slots), "spans of another number of rows than are named"

    def _run(
        self, encoder: VisionEncoder, rows: FloatArray, slots: IntArray, pixels: PixelArray, job: EncodeJob
    ) -> None:
        """Compute parts of an item, and write its rows behind the last."""
        if not job.first_part:
            made = np.empty((len(slots), rows.shape[1]), np.float32)
            whole = pixels if job.end_part == NUM_PARTS else pixels.copy()  # a step's memory is its own
            item = MediaItem(whole.reshape(job.shape), tuple(job.grid))
            self._begun = _Begun(job.key, made, encoder.begin([item], [made]))
        begun = self._begun
        assert begun is not None and begun.key == job.key, "a step goes on with an item that was not begun"
        if begun.encoding.run(job.end_part):
            rows[slots] = begun.made
            self._begun = None

    def put(
        self,
        ids: IntArray,
        positions: IntArray | LongArray,
        entry: IntArray,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
    ) -> tuple[IntArray | None, LongArray | None]:
        """Replace the ids of spans by ~i for row i of the cache, on every rank: that of the placeholder's embedding
        must not write it over the row of the first one. `ids` and `positions` are those of all entries, in order, and
        `entry` their rows. Returns `key_ends` and `coordinates` for `StepInputs.fill`."""
        coordinates = None if self._coordinates is None else self._coordinates.of(entry, positions)
        if not self._spans:
            return None, coordinates
        key_ends: IntArray | None = None if self._is_causal else (positions + 1).astype(np.int32)
        begin = 0
        for row, start, num in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            for first, slots in self._spans.get(row, ()):
                at = begin + first - start
                assert begin <= at and at + len(slots) <= begin + num, f"row {row} does not compute all of a span"
                ids[at : at + len(slots)] = ~slots
                if key_ends is not None:
                    key_ends[at : at + len(slots)] = first + len(slots)
            begin += num
        return key_ends, coordinates

    def close(self) -> None:
        """Free threads and memory."""
        if self._encoder is not None:
            self._encoder.close()


def load_encodes(
    settings: Settings,
    folder: Path,
    config: ModelConfig,
    library: Library | None,
    context: RankContext,
    facts: MediaFacts,
) -> Encodes | None:
    """The tower and its rows on the first rank of all, which embeds what they stand for; None if this server takes no
    images. Raises UserError as `VisionEncoder`."""
    vision = VisionConfig.load(folder)
    if vision is None or not facts.num_encoder_rows:
        return None
    num_own = 0 if context.rank or context.stage else facts.num_encoder_rows
    how = {"is_causal": not facts.max_whole_run, "turns": config.rope_axes is not None}
    return Encodes(settings, folder, vision, num_own, threads_of(settings), library, **how)
