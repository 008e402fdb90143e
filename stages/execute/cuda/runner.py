"""Steps on a GPU: each message is turned into launches at once; what came of them is collected when they are over.

    launch    changes of rows · copies · words of the step ──► graph ──► result on its way back, behind an event
    collect   ids, stops and records of the oldest step in flight, as the scheduler is told of them

A step may be launched before the ids of the last one are known here: they are in the rows on the GPU. A step in which a
grammar has its say needs them, so it is launched in two parts: the model first, and when the masks have come, which
takes the ids of the step before, the draw.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.logprob_inputs import ByteArray
from pipeline.kernels.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray
from pipeline.kernels.triton.rows import NUM_FIELDS
from pipeline.kernels.triton.step import DEAD, STAMP_WORDS
from pipeline.runtime.messages import ExecuteFacts, Finish, Step
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.program import LogitArray
from pipeline.stages.execute.cuda.device import Device, make_device
from pipeline.stages.execute.cuda.graphs import CapturedStep, CapturedStepKind, StepGraphs
from pipeline.stages.execute.cuda.host_transfer import NUM_STAGING_BUFFERS, PACKED_BYTES, BlockCopier, HostTransfer
from pipeline.stages.execute.cuda.launched_step import BoolArray, LaunchedStep, PooledHiddenStates
from pipeline.stages.execute.cuda.model import DeviceModel, HiddenStates, allocate_kv
from pipeline.stages.execute.cuda.rows import LIST_MEMORY_WORDS, DeviceRows
from pipeline.stages.execute.cuda.sampling_extras import DeviceMasks, SamplingExtras
from pipeline.stages.execute.cuda.staging import EMPTY, Batch, Run, Staging, num_words, split_runs
from pipeline.stages.execute.cuda.step_shapes import PaddedStepShape, StepShapes
from pipeline.stages.execute.grammar_masks.masks import Masks
from pipeline.stages.execute.kv import divide_swap, plan_device_kv
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.pooling import Pool
from pipeline.stages.execute.prompt_logprobs import NO_BYTES
from pipeline.stages.execute.rows import NOT_YET, RowTable, Take
from pipeline.stages.execute.runner import RowChanges, Sampled, copies_of
from pipeline.stages.execute.sampling_features import SamplingFeature, no_token_error
from pipeline.stages.execute.weights import Weights

Publish = Callable[[LaunchedStep, Sampled], None]

SEPARATE_SAMPLING = (
    SamplingFeature.LOGITS_PROCESSORS
    | SamplingFeature.GRAMMAR_MASK
    | SamplingFeature.LOGPROBS
    | SamplingFeature.PROMPT_LOGPROBS
    | SamplingFeature.EMBEDDING
)
"""What makes a step one that no graph holds whole."""


GRAPHS_BYTES = 512 * 1024**2
"""For what graphs and libraries take while steps are recorded; by the rules of CUDA's own allocator, hardly a tenth."""


class CudaRunner:
    """The model, its memory and its rows; `swap` is memory for blocks of swap space, and `weights` are taken in place
    of those that the folder names. Raises UserError, in the user's words, where the model can't be run so. One thread
    makes it and calls it."""

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        swap: memoryview | None = None,
        device: Device | None = None,
        weights: Weights | None = None,
    ) -> None:
        config = ModelConfig.load(model_dir)
        self._settings = settings
        self.device = device = device or make_device()
        dtype: torch.dtype = getattr(torch, settings.execute.dtype)
        self._max_num_seqs = max_num_seqs = settings.schedule.max_num_seqs
        max_num_tokens = settings.schedule.max_num_batched_tokens
        quantization = settings.quantization if settings.quantization in ("int8", "int4") else None
        self.model = DeviceModel(
            *(device, config, dtype, max_num_tokens, max_num_seqs, quantization),
            early=settings.execute.programmatic_dependent_launch,
        )
        weights = weights or Weights(model_dir, config, dtype)
        build_program(config, weights, self.model)
        self.weight_formats = "+".join(weights.taken)
        kv = plan_device_kv(settings, config, device.memory(_still_to_take(settings, config)))
        self.kv = allocate_kv(config, kv.num_blocks, dtype, device.where)
        self.model.use(self.kv, kv.max_model_len)
        swapped = None if swap is None else divide_swap(settings, config, swap)
        self._block_copier = BlockCopier(device, self.kv, swapped)
        num_swap_blocks = 0 if swapped is None else len(swapped)
        self.facts = ExecuteFacts(
            kv.num_blocks, BLOCK_SIZE, kv.max_model_len, config.vocab_size, num_swap_blocks, config.hidden_size
        )
        max_num_stops = settings.limits.max_stop_token_ids + len(config.eos_ids)
        require_places(max_num_seqs, kv.max_model_len, max_num_stops)
        self.rows = RowTable(max_num_seqs, kv.max_model_len, kv.num_blocks, config.vocab_size)
        self._device_rows = DeviceRows(device, self.rows, max_num_stops)
        self._staging = Staging(device, max_num_seqs, max_num_tokens)
        self.shapes = StepShapes(max_num_seqs, max_num_tokens)
        self.step_graphs = StepGraphs(
            device, self.model, self._device_rows.on_device, self._staging.words, max_num_seqs, max_num_tokens
        )
        self.masks = Masks(model_dir, max_num_seqs, config.vocab_size, settings.limits.grammar_timeout_s)
        self._pool = Pool(self.model.last_norm, config.rms_norm_eps)
        self._changes = RowChanges(self.rows, self.masks, self._pool, config.eos_ids, self._device_rows)
        self.failed = self._changes.failed
        first, others = self.shapes.first(), self.shapes.others()
        mixed = [self.shapes.mix(size, 1, 1) for size in self.shapes.mixed]
        self._to_capture = [
            *((shape, CapturedStepKind.SAMPLE) for shape in (*first, *others, *mixed)),
            *((shape, CapturedStepKind.SAMPLE_FILTERED) for shape in (*first, *others)),
            *((shape, CapturedStepKind.FORWARD_ONLY) for shape in first),
        ]
        self._warming: Iterator[None] | None = None
        """The compilation of sampling extras, once started."""
        self._places = np.arange(max_num_seqs, dtype=np.int32)
        self.launched_steps: deque[LaunchedStep] = deque()
        """Oldest first."""
        self.publish: Publish = lambda launched_step, sampled: None
        """Called for each step when it is collected, in order."""

    @property
    def name(self) -> str:
        return f"triton, {self.device.name}"

    @cached_property
    def sampling_extras(self) -> SamplingExtras:
        """Made with its memory: before the server is ready, or when it is needed for the first time."""
        limits = self._settings.limits
        return SamplingExtras(
            *(self.device, self.model, self.step_graphs, self._device_rows, self._max_num_seqs, limits.max_logprobs)
        )

    def capture_graphs(self) -> None:
        """Record the first shapes, so that the first requests find them: of steps that decode, and of prompts the
        smallest and the largest, between which hardly a kernel is compiled for one and not for the others."""
        prompts = (self.shapes.mix(size, 1, 1) for size in {self.shapes.mixed[0]: 0, self.shapes.mixed[-1]: 0})
        for shape in (*self.shapes.first(), *prompts):
            self.step_graphs.get(shape, CapturedStepKind.SAMPLE)
        _ = (
            self.sampling_extras
        )  # whose memory would else be missed in the middle of a request, if somebody has taken it
        self.device.synchronize()

    def capture_more(self) -> bool:
        """Prepare for one more kind of step, when there is nothing else to do: what requests have not asked for yet is
        there when they do. Returns whether there was any left."""
        if not self.device.captures_graphs:
            return False
        for shape, kind in self._to_capture:
            if not self.step_graphs.has(shape, kind):
                self.step_graphs.get(shape, kind)
                return True
        if self._warming is None:
            self._warming = self.sampling_extras.warm(
                self.step_graphs.get(self.shapes.decode(1), CapturedStepKind.FORWARD_ONLY).step
            )
        return next(self._warming, self) is None

    def logits(self) -> LogitArray:
        """Those of the samples of the last step that was launched, [most samples, V] float32; waits for it."""
        self.device.synchronize()
        array: LogitArray = self.model.logits.cpu().numpy()
        return array

    def close(self) -> None:
        """Give back what is the host's, and end the process that computes masks."""
        try:
            self.device.close()  # raises the GPU's error, where there was one
        finally:
            self.masks.close()

    # ------------------------------------------------------------------------------------------------------ launching

    def launch(self, step: Step, take: Take) -> LaunchedStep:
        """Launch a step, which `launched_steps` ends with then. Waits for the steps before it where a grammar needs
        their ids; those are published first."""
        began_s = time.perf_counter()
        self._changes.apply(step, take)
        num_copies, host_transfer = self._copy(step, take)
        rows, starts, counts = (take(array, np.int32) for array in (step.rows, step.starts, step.counts))
        samples = take(step.samples, np.uint8).view(np.bool_)
        assert len(rows) == len(starts) == len(counts) == len(samples)
        self._check(rows, starts, counts, samples)
        launched_step = self._launch(step, rows, starts, counts, samples)
        launched_step.num_copies, launched_step.host_transfer = num_copies, host_transfer
        self.launched_steps.append(launched_step)
        launched_step.launch_s = time.perf_counter() - began_s
        return launched_step

    def step(self, step: Step, take: Take) -> Sampled:
        """Launch a step and collect it, and those before it."""
        self.launch(step, take)
        return self.drain()[-1]

    def _copy(self, step: Step, take: Take) -> tuple[int, HostTransfer | None]:
        """Give the step's copies to the streams. Returns how many, and the way of those over the bus."""
        sources, targets = copies_of(step, take, self.facts)
        if not len(sources):
            return 0, None
        return len(sources), self._block_copier.enqueue(sources, targets)

    def _check(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> None:
        """What can be checked of a plan without the ids that are still on the GPU."""
        table = self.rows
        assert len(rows) <= self._max_num_seqs, f"{len(rows)} entries in a step, {self._max_num_seqs} at most"
        ends, expected = starts + counts, table.num_computed[rows]
        # All at once, for this is done for every step; what is wrong, or new, is looked at where something is. As
        # unsigned numbers, those below 0 are too large.
        fine = (expected == starts) & (starts.view(np.uint32) < ends.view(np.uint32))
        fine &= ends <= table.num_blocks[rows] * BLOCK_SIZE
        fine &= ends <= table.max_model_len - samples
        if not fine.all():
            assert table.taken[rows].all(), f"rows computed that are not taken: {rows[~table.taken[rows]]}"
            assert (counts > 0).all() and (starts >= 0).all(), f"entries at {starts} compute {counts}"
            wrong = (expected != NOT_YET) & (expected != starts)
            assert not wrong.any(), f"rows {rows[wrong]} start at {starts[wrong]}, computed are {expected[wrong]}"
            assert (ends <= table.num_blocks[rows] * BLOCK_SIZE).all(), "tokens computed without a block for them"
            assert (ends <= table.max_model_len - samples).all(), "computed or sampled beyond max_model_len"
        table.num_computed[rows] = ends

    def _launch(
        self, step: Step, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray
    ) -> LaunchedStep:
        requested_features = self.rows.requested_features
        pooled = (
            self.rows.features[rows] & SamplingFeature.EMBEDDING != 0
            if requested_features & SamplingFeature.EMBEDDING
            else None
        )
        num, num_tokens = len(rows), int(np.add.reduce(counts))
        offsets = self._places[:num] if num == num_tokens else np.cumsum(counts, dtype=np.int32) - counts
        chosen, known = rows, starts + counts
        if pooled is None and np.count_nonzero(samples) == num:
            sampled = self._places[:num]
        else:
            # The head computes nothing for a row that is pooled.
            sampled = np.flatnonzero(samples if pooled is None else samples & ~pooled).astype(np.int32)
            chosen, known = rows[samples], known[samples]
        batch = Batch(rows, starts, counts, offsets, sampled, num_tokens)
        if not self._staging.has_free:  # nobody plans so far ahead, but it would be no error
            self.collect()
        slot = self._staging.take()
        launched_step = LaunchedStep(
            *(step.incarnation, step.step_id, slot, 0, chosen, self.rows.generations[chosen], known),
            pooled=None if pooled is None else pooled[samples],
            num_rows=num,
            num_tokens=num_tokens,
            is_token_only=not requested_features & SEPARATE_SAMPLING,
        )
        runs = self._send_ahead(batch)
        if not len(rows):
            if runs:
                self._staging.fill(slot, batch, runs, one_each=True)
                self.step_graphs.apply()
        elif requested_features & SEPARATE_SAMPLING:
            self._launch_separate_sampling(launched_step, batch, runs, pooled)
        else:
            kind = CapturedStepKind.SAMPLE_FILTERED if self._device_rows.filtered else CapturedStepKind.SAMPLE
            shape = self._shape(batch)
            captured = self.step_graphs.get(shape, kind)
            self._staging.fill(slot, batch, runs, one_each=shape.one_each)
            captured.launch()
            self._fetch(launched_step, captured)
        slot.done.record()
        return launched_step

    def _shape(self, batch: Batch) -> PaddedStepShape:
        if batch.num_tokens == len(batch.rows) == len(batch.sampled):
            return self.shapes.decode(len(batch.rows))
        return self.shapes.mix(batch.num_tokens, len(batch.rows), len(batch.sampled))

    def _send_ahead(self, batch: Batch) -> list[Run]:
        """The changes that go with a step; those for which it has no room are made before it."""
        runs, self._device_rows.runs = self._device_rows.runs, []
        room = self._staging.room(batch)
        while num_words(runs) > room:
            first, runs = split_runs(runs, self._staging.room(EMPTY))
            slot = self._staging.take()
            self._staging.fill(slot, EMPTY, first, one_each=True)
            self.step_graphs.apply()
            # Long prompts by the hundred: this wait is nothing beside what it takes to compute them.
            slot.done.record()
            slot.done.synchronize()
            self._staging.give(slot)
        return runs

    def _fetch(self, launched_step: LaunchedStep, captured: CapturedStep) -> None:
        """Send the result on its way."""
        launched_step.num_samples = captured.step.num_samples
        launched_step.slot.result_of(launched_step.num_samples).copy_(captured.result, non_blocking=True)

    def _launch_separate_sampling(
        self, launched_step: LaunchedStep, batch: Batch, runs: list[Run], pooled: BoolArray | None
    ) -> None:
        """A step in which somebody wants more than an id."""
        shape = self._shape(batch)
        captured = self.step_graphs.get(shape, CapturedStepKind.FORWARD_ONLY)
        self._staging.fill(launched_step.slot, batch, runs, one_each=shape.one_each)
        captured.launch()
        sampled_ids, requested_features = batch.rows[batch.sampled], self.rows.requested_features
        masked: DeviceMasks | None = None
        if (
            requested_features & SamplingFeature.GRAMMAR_MASK
            and (self.rows.features[sampled_ids] & SamplingFeature.GRAMMAR_MASK).any()
        ):
            self.drain()
            masked, failed = self.sampling_extras.mask(self.masks, sampled_ids, self.rows, captured.step.num_samples)
            self.failed |= failed
        filtered = bool(self._device_rows.filtered)
        launched_step.logprobs = self.sampling_extras.sample(
            sampled_ids, captured.step, self.rows, masked, filtered=filtered
        )
        self._fetch(launched_step, captured)
        if requested_features & SamplingFeature.PROMPT_LOGPROBS:
            launched_step.prompt_logprobs = self.sampling_extras.score_prompts(
                batch, self.rows, self.step_graphs.hidden_states(shape)
            )
        if pooled is not None:
            self._pool_entries(launched_step, batch, pooled, self.step_graphs.hidden_states(shape))

    def _pool_entries(
        self, launched_step: LaunchedStep, batch: Batch, pooled: BoolArray, hidden_states: HiddenStates
    ) -> None:
        for i in np.flatnonzero(pooled).tolist():
            row, begin = int(batch.rows[i]), int(batch.offsets[i])
            tokens = self.device.fetch(hidden_states.of(begin, begin + int(batch.counts[i])))
            place = np.flatnonzero(launched_step.rows == row).tolist()
            generation = int(self.rows.generations[row])
            launched_step.hidden_states.append(
                PooledHiddenStates(row, generation, int(batch.starts[i]), tokens, place[0] if place else -1)
            )

    # ----------------------------------------------------------------------------------------------------- collecting

    def collect_done(self) -> list[Sampled]:
        """Collect the steps that are over, and publish them. Returns what came of them."""
        collected = []
        while self.launched_steps and self.launched_steps[0].is_over:
            collected.append(self._collect())
        return collected

    def drain(self) -> list[Sampled]:
        """Collect all steps in flight, and publish them."""
        collected = []
        while self.launched_steps:
            self.launched_steps[0].wait()
            collected.append(self._collect())
        return collected

    def collect(self) -> Sampled:
        """Collect the oldest step in flight, waiting for it, and publish it."""
        self.launched_steps[0].wait()
        return self._collect()

    def _collect(self) -> Sampled:
        launched_step = self.launched_steps.popleft()
        num_samples, slot = launched_step.num_samples, launched_step.slot
        if num_samples:
            launched_step.start_ns, launched_step.end_ns = slot.times.tolist()
        num_drawn = (
            len(launched_step.rows) if launched_step.pooled is None else int(np.count_nonzero(~launched_step.pooled))
        )
        begin = STAMP_WORDS + num_samples
        sampled_ids = slot.result_array[STAMP_WORDS : STAMP_WORDS + num_drawn].copy()
        stopped = slot.result_array[begin : begin + num_drawn]
        if launched_step.is_token_only and not np.count_nonzero(stopped) and not np.count_nonzero(sampled_ids < 0):
            sampled = self._plain_result(launched_step, sampled_ids)
        else:
            sampled = self._sampled(launched_step, sampled_ids, stopped.astype(np.bool_))
        launched_step.is_collected = True
        # The thread of completions may be the last to know the flight: what is pinned is let go of here, for that is
        # noted in streams, and one of them may be recorded just then.
        launched_step.logprobs, launched_step.prompt_logprobs, launched_step.hidden_states = None, [], []
        self._staging.give(launched_step.slot)
        self.publish(launched_step, sampled)
        return sampled

    def _plain_result(self, launched_step: LaunchedStep, sampled_ids: IntArray) -> Sampled:
        """The result of a step without sampling extras in which no row ended: the common case."""
        return Sampled(
            *(launched_step.rows, launched_step.generations, sampled_ids, np.zeros(len(sampled_ids), np.uint8)),
            num_rows=launched_step.num_rows,
            num_tokens=launched_step.num_tokens,
            num_copies=launched_step.num_copies,
            copy_s=0.0 if launched_step.host_transfer is None else launched_step.host_transfer.seconds,
        )

    def _sampled(self, launched_step: LaunchedStep, sampled_ids: IntArray, stopped: BoolArray) -> Sampled:
        """What came of a step, of which `sampled_ids` and `stopped` are the ids that were drawn."""
        rows, num = launched_step.rows, len(launched_step.rows)
        ids = np.zeros(num, np.int32)
        finishes = np.full(num, Finish.NONE, np.uint8)
        is_sampled = np.ones(num, np.bool_) if launched_step.pooled is None else ~launched_step.pooled
        ids[is_sampled] = sampled_ids
        finishes[is_sampled] = np.where(stopped, Finish.STOP, Finish.NONE)
        is_mine = self.rows.taken[rows] & (self.rows.generations[rows] == launched_step.generations)
        failing = ids == NO_ID
        errors: tuple[str, ...] = ()
        if failing.any():
            errors = tuple(self._why(launched_step, i, bool(is_mine[i])) for i in np.flatnonzero(failing).tolist())
            finishes[failing] = Finish.ERROR
        dead = ids == DEAD
        ended = (failing | dead | (finishes == Finish.STOP)) & is_mine
        self.rows.ended[rows[ended]] = True
        if self.rows.requested_features & SamplingFeature.GRAMMAR_MASK:
            grown = is_mine & ~failing & ~dead
            self.rows.ids[rows[grown], launched_step.known[grown]] = ids[grown]
            self.rows.num_ids[rows[grown]] = launched_step.known[grown] + 1
        ids[dead] = NO_ID
        token_outputs = self._token_outputs(launched_step, ids)
        num_dead = int(np.count_nonzero(dead))
        return Sampled(
            *(rows, launched_step.generations, ids, finishes),
            num_rows=launched_step.num_rows - num_dead,
            num_tokens=launched_step.num_tokens - num_dead,
            num_copies=launched_step.num_copies,
            copy_s=0.0 if launched_step.host_transfer is None else launched_step.host_transfer.seconds,
            token_outputs=token_outputs,
            prompt_logprobs=joined(
                [part for token_outputs in launched_step.prompt_logprobs for part in token_outputs.split()]
            ),
            errors=errors,
        )

    def _why(self, launched_step: LaunchedStep, i: int, is_mine: bool) -> str:
        """Why there is no id for a sample."""
        row, table = int(launched_step.rows[i]), self.rows
        if not is_mine:
            return "The sequence was dropped"
        num_output = int(launched_step.known[i] - table.num_prompt[row])
        why = no_token_error(
            table.logits_processors[row], num_output, bool(table.features[row] & SamplingFeature.GRAMMAR_MASK)
        )
        return self.failed.pop(row, why)

    def _token_outputs(self, launched_step: LaunchedStep, ids: IntArray) -> ByteArray:
        """The records of a step's ids, one after the other: log probabilities and embeddings."""
        if launched_step.logprobs is None and not launched_step.hidden_states:
            return NO_BYTES
        parts: dict[int, ByteArray] = {}
        if launched_step.logprobs is not None:
            places = np.arange(len(ids)) if launched_step.pooled is None else np.flatnonzero(~launched_step.pooled)
            records = zip(places.tolist(), launched_step.logprobs.split(), strict=True)
            parts = {place: record for place, record in records if ids[place] >= 0}
        for entry in launched_step.hidden_states:
            if not self.rows.taken[entry.row] or self.rows.generations[entry.row] != entry.generation:
                # Dropped since, and what was summed of it too. Nobody reads its record, which is awaited all the same.
                if entry.place >= 0:
                    parts[entry.place] = np.zeros(4 * self.facts.hidden_size, np.uint8)
                continue
            tokens = entry.hidden_states.numpy()
            self._pool.add(entry.row, entry.start, tokens)
            if entry.place >= 0:
                pooling, num_tokens = self.rows.pooling[entry.row], entry.start + len(tokens)
                parts[entry.place] = self._pool.take(entry.row, pooling, num_tokens, tokens[-1]).view(np.uint8)
        return joined([parts[place] for place in sorted(parts)])


def _still_to_take(settings: Settings, config: ModelConfig) -> int:
    """Bytes of the GPU's memory for what is made behind the KV blocks: rows, lists, rooms for copies, graphs."""
    max_model_len = min(config.max_position, settings.max_model_len or config.max_position)
    row_words = max_model_len + max_model_len // BLOCK_SIZE + NUM_FIELDS + settings.limits.max_stop_token_ids
    rows_bytes = 4 * (settings.schedule.max_num_seqs + 1) * row_words
    # Copies of the logits for logprobs, and token counts for penalties.
    sampling_extras_bytes = 2 * 4 * settings.schedule.max_num_seqs * config.vocab_size
    pooled_bytes = 4 * settings.schedule.max_num_batched_tokens * config.hidden_size
    angles_bytes = 4 * max_model_len * config.head_dim
    return (
        rows_bytes
        + sampling_extras_bytes
        + pooled_bytes
        + angles_bytes
        + 4 * LIST_MEMORY_WORDS
        + NUM_STAGING_BUFFERS * PACKED_BYTES
        + GRAPHS_BYTES
    )


def require_places(max_num_seqs: int, max_model_len: int, max_num_stops: int) -> None:
    """Places in the memory of rows are int32. Raises UserError where that has more."""
    row_words = max_model_len - (-max_model_len // BLOCK_SIZE) + NUM_FIELDS + max_num_stops
    most = (2**31 - 1 - LIST_MEMORY_WORDS) // row_words - 1  # and one that stands for padding
    if max_num_seqs > most:
        raise UserError(
            f"schedule.max_num_seqs is {max_num_seqs}, but a GPU keeps at most {most} sequences of "
            f"{max_model_len} tokens: lower schedule.max_num_seqs or max_model_len"
        )


def joined(parts: Sequence[ByteArray]) -> ByteArray:
    """One behind the other."""
    return np.concatenate(parts) if parts else NO_BYTES
