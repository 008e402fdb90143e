"""Runs steps on a GPU: launches a step when its message arrives, and collects its result when it is over.

    launch    row changes · copies · words of the step ──► graph, which writes the result to the host ──► event
    collect   ids, stops and logprobs of the oldest step in flight

A step is launched before the host knows the previous step's ids: they are in the rows on the GPU. Grammar masks need
them, so a step with grammars is launched in two parts: the model first, and sampling when the masks have arrived.
Speculative decoding needs them too: before ids are proposed for a step, all steps in flight are collected. The host
verifies what such a step samples, and sends the kept ids to the rows with the next step.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.runtime.messages import Step
from pipeline.stages.execute.cuda.device import Device, make_device
from pipeline.stages.execute.cuda.drafts.draft_model import DeviceDraftModel
from pipeline.stages.execute.cuda.drafts.eagle import DeviceEagleHead
from pipeline.stages.execute.cuda.graphs.captures import Captures
from pipeline.stages.execute.cuda.graphs.step_graphs import CapturedStepKind, SamplerKind, StepGraphs
from pipeline.stages.execute.cuda.graphs.step_shapes import PaddedStepShape, StepShapes
from pipeline.stages.execute.cuda.host_transfer import BlockCopier, HostTransfer
from pipeline.stages.execute.cuda.launched_step import LaunchedStep, ProposerStates, pooled_entries
from pipeline.stages.execute.cuda.loading import load_model
from pipeline.stages.execute.cuda.memory import require_row_memory, reserved_bytes
from pipeline.stages.execute.cuda.model.device_model import allocate_kv
from pipeline.stages.execute.cuda.ranks.device_ranks import Join, busy
from pipeline.stages.execute.cuda.results import ResultReader
from pipeline.stages.execute.cuda.rows.batches import Batch, BoolArray, batch_of, check_plan
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.cuda.rows.row_changes import RowChangeSender
from pipeline.stages.execute.cuda.rows.staging import Run, Staging
from pipeline.stages.execute.cuda.sampling_extras import SPIN_S, SamplingExtras
from pipeline.stages.execute.drafts.draft_model import draft_block_bytes
from pipeline.stages.execute.drafts.speculation import Proposer
from pipeline.stages.execute.kv import divide_swap, kv_dtype, plan_device_kv
from pipeline.stages.execute.program import LogitArray
from pipeline.stages.execute.prompt_logprobs import prompt_token_indices
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.ranks.layer_split import Part
from pipeline.stages.execute.row_changes import copies_of
from pipeline.stages.execute.rows import Take
from pipeline.stages.execute.runner import Runner
from pipeline.stages.execute.sampling_features import SamplingFeature
from pipeline.stages.execute.weights import Weights

Publish = Callable[[LaunchedStep, Sampled], None]

SEPARATE_SAMPLING = (
    SamplingFeature.LOGITS_PROCESSORS
    | SamplingFeature.GRAMMAR_MASK
    | SamplingFeature.LOGPROBS
    | SamplingFeature.PROMPT_LOGPROBS
    | SamplingFeature.EMBEDDING
)
"""Features whose sampling is launched separately from the captured step."""

PROCESSORS = SamplingFeature.LOGITS_PROCESSORS | SamplingFeature.GRAMMAR_MASK
"""Features that change logits before an id is sampled."""


class CudaRunner(Runner):
    """Owns the model, its memory and its rows. One thread creates it and calls it.

    `swap` is the memory of the swap space; `weights` replace those of the folder. With `join`, this is one of several
    ranks: all get the same steps, and rank 0 samples. Raises UserError if the model can't run with these settings.
    """

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        swap: memoryview | None = None,
        device: Device | None = None,
        weights: Weights | None = None,
        join: Join | None = None,
    ) -> None:
        super().__init__(settings, model_dir)
        self.device = device = device or make_device()
        max_num_seqs, max_num_samples = self._max_num_seqs, self._max_num_samples
        max_num_tokens = settings.schedule.max_step_tokens
        loaded = load_model(settings, model_dir, device, max_num_samples, weights, join)
        config, self.model, self.weight_formats = loaded.config, loaded.model, loaded.weight_formats
        self.ranks = ranks = loaded.ranks
        self.answers = ranks is None or ranks.is_first
        self._make_adapters(loaded.lora, self.model)
        self.layers, self.kernels = str(Part(range(config.num_layers))), "cuda"
        self.code = hashlib.sha256(f"{torch.__version__}\n{device.name}".encode()).hexdigest()[:12]
        memory = device.memory(reserved_bytes(settings, config))
        kv = plan_device_kv(settings, config, memory, draft_block_bytes(settings))
        swapped = None if swap is None else divide_swap(settings, config, swap, kv).blocks
        num_swap_blocks = 0 if swapped is None else len(swapped)
        if ranks is not None:
            kv, num_swap_blocks = ranks.agree_on(kv, num_swap_blocks)
        layout, kv_type = kv.layout, getattr(torch, kv_dtype(settings.execute))
        self.kv = allocate_kv(config, kv.num_blocks, kv_type, device.where, layout.layers_per_group)
        self.model.use(self.kv, kv.max_model_len, layout)
        self._block_copier = BlockCopier(device, self.kv, swapped)
        max_num_stops = settings.limits.max_stop_token_ids + len(config.eos_ids)
        num_groups = len(layout.groups)
        require_row_memory(max_num_seqs, kv.max_model_len, max_num_stops, num_groups)
        self._make_rows(config, kv, num_swap_blocks)
        # Split-K and cuBLAS sum in other orders for other numbers of rows. Nothing sleeps, so no blocks are saved.
        self.facts = msgspec.structs.replace(
            self.facts, max_num_top=settings.limits.max_logprobs, is_batch_invariant=False, block_bytes=0
        )
        self._device_rows = DeviceRows(device, self.rows, max_num_stops)
        self._staging = Staging(device, max_num_seqs, max_num_tokens, max_num_samples)
        self.shapes = StepShapes(max_num_seqs, max_num_tokens, max_num_samples)
        self.step_graphs = StepGraphs(
            *(device, self.model, self._device_rows.on_device, self._staging.words, self._staging.results),
            *(max_num_seqs, max_num_tokens, max_num_samples, num_groups),
            ranks=None if ranks is None else ranks.link,
        )
        self._row_changes = RowChangeSender(self._device_rows, self._staging, self.step_graphs)

        def make_proposer() -> Proposer | None:
            of_rows = self.rows, self._device_rows, kv, self._row_changes.flush
            if loaded.head is not None:
                return DeviceEagleHead(settings, loaded.head, device, *of_rows)
            return None if loaded.draft is None else DeviceDraftModel(settings, loaded.draft, device, *of_rows)

        self._make_changes(config, self.model.last_norm, make_proposer, self._device_rows)
        proposer = self._proposer
        self._eagle = proposer if isinstance(proposer, DeviceEagleHead) else None
        proposer_steps = proposer.steps if isinstance(proposer, DeviceEagleHead | DeviceDraftModel) else None
        speculates = self._device_rows, self.speculator
        self._results = ResultReader(self.rows, self.pool, self.failed, config.hidden_size, *speculates)
        self._extras: SamplingExtras | None = None
        """None on ranks that don't sample."""
        if self.answers:
            self._extras = SamplingExtras(
                *(device, self.model, self.step_graphs, self._device_rows),
                *(self.masks, max_num_samples, settings.limits.max_logprobs),
            )
        self._captures = Captures(
            *(device, self.shapes, self.step_graphs, self._block_copier, self._extras, proposer_steps, ranks),
            max_num_seqs,
            has_adapters=loaded.lora is not None,
        )
        self.launched_steps: deque[LaunchedStep] = deque()
        """Oldest first."""
        self.publish: Publish = lambda launched_step, sampled: None
        """Called for each step when it is collected, in order."""

    @property
    def name(self) -> str:
        return f"triton, {self.device.name}"

    def capture_graphs(self) -> None:
        """Compile all kernels and capture the first graphs, before the server is ready."""
        self._captures.capture_first()

    def capture_more(self) -> bool:
        """Capture one more graph, while the stage is idle. Returns False if nothing is left."""
        return self._captures.capture_more()

    def logits(self) -> LogitArray:
        """Logits of the last launched step, [max_num_samples, V] float32. Waits for it."""
        self.device.synchronize()
        array: LogitArray = self.model.logits.cpu().numpy()
        return array

    def barrier_wait_s(self) -> float:
        """How long this rank has waited for others to have a step; 0 if there are none."""
        return 0.0 if self.ranks is None else self.ranks.board.waited_s

    def drop_all(self, incarnation: int = 0) -> None:
        """Drop all rows. No step may be in flight. `incarnation` is that of the scheduler's successor."""
        if self.ranks is not None:
            self.ranks.board.announce(incarnation)
        self._changes.drop_all()

    def _close_device(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.device.close()

    # ------------------------------------------------------------------------------------------------------ launching

    def launch(self, step: Step, take: Take) -> LaunchedStep:
        """Launch a step and append it to `launched_steps`. If it needs grammar masks or proposes ids, this first waits
        for the previous steps and publishes them. Raises StepAbandonedError if not all ranks have got it."""
        if self.ranks is not None:
            self.ranks.begin(step.incarnation, step.step_id)
        began_s = time.perf_counter()
        self._changes.apply(step, take)
        num_copies, host_transfer = self._copy(step, take)
        rows, starts, counts = (take(array, np.int32) for array in (step.rows, step.starts, step.counts))
        samples = take(step.samples, np.uint8).view(np.bool_)
        assert len(rows) == len(starts) == len(counts) == len(samples)
        assert len(rows) <= self._max_num_seqs, f"{len(rows)} entries in a step, {self._max_num_seqs} at most"
        check_plan(self.rows, rows, starts, counts, samples)
        num_drafts = self._propose(rows, take(step.drafts, np.int32))
        launched_step = self._launch(step, rows, starts, counts, samples, num_drafts)
        launched_step.num_copies, launched_step.host_transfer = num_copies, host_transfer
        self.launched_steps.append(launched_step)
        launched_step.launch_s = time.perf_counter() - began_s
        return launched_step

    def step(self, step: Step, take: Take) -> Sampled:
        """Launch a step, and collect it and all before it."""
        self.launch(step, take)
        return self.drain()[-1]

    def _copy(self, step: Step, take: Take) -> tuple[int, HostTransfer | None]:
        """Enqueue the step's copies. Returns their number, and the transfer over the bus, if any."""
        sources, targets = copies_of(step, take, self.facts)
        if not len(sources):
            return 0, None
        return len(sources), self._block_copier.enqueue(sources, targets)

    def _propose(self, rows: IntArray, most: IntArray) -> LongArray | None:
        """Propose up to `most` ids for each row, and send them. Returns their numbers, None if there are none."""
        if self.speculator is None or not len(most) or not most.any():
            return None
        self.drain()
        most = np.where(self.rows.ended[rows], 0, most)
        num_drafts = self.speculator.propose(rows, most, time.monotonic)
        if not num_drafts.any():
            return None
        self._device_rows.propose(rows, num_drafts)
        return num_drafts

    def _launch(
        self,
        step: Step,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        samples: BoolArray,
        num_drafts: LongArray | None,
    ) -> LaunchedStep:
        requested_features = self.rows.requested_features
        pooled = (
            self.rows.features[rows] & SamplingFeature.EMBEDDING != 0
            if requested_features & SamplingFeature.EMBEDDING
            else None
        )
        # Pooled rows have no logits.
        batch = batch_of(rows, starts, counts, samples if pooled is None else samples & ~pooled, num_drafts)
        chosen, known = rows, starts + counts
        if np.count_nonzero(samples) != len(rows):
            chosen, known = rows[samples], known[samples]
        if num_drafts is not None:
            num_drafts = num_drafts[samples]
        if not self._staging.has_free:  # more steps in flight than the scheduler plans
            self.collect()
        slot = self._staging.take()
        launched_step = LaunchedStep(
            *(step.incarnation, step.step_id, slot, 0, chosen, self.rows.generations[chosen], known),
            pooled=None if pooled is None else pooled[samples],
            num_rows=len(rows),
            num_tokens=batch.num_tokens,
            num_drafts=num_drafts,
            is_token_only=not requested_features & SEPARATE_SAMPLING,
        )
        if num_drafts is not None and self.speculator is not None:
            proposer = self.speculator.proposer
            launched_step.draft_s, launched_step.draft_pass_s = proposer.draft_s, proposer.pass_s
        runs = self._row_changes.runs_of(batch)
        shape: PaddedStepShape | None = None
        if not len(rows):
            if runs:
                self._staging.fill(slot, batch, runs, one_each=True)
                self.step_graphs.apply()
        elif requested_features & SEPARATE_SAMPLING:
            shape = self._launch_separate_sampling(launched_step, batch, runs, pooled)
        else:
            shape = self._shape(batch, verifies=num_drafts is not None)
            captured = self.step_graphs.with_sampling(shape, filtered=bool(self._device_rows.filtered))
            self._staging.fill(slot, batch, runs, one_each=shape.one_each)
            captured.launch()
        if self._eagle is not None and shape is not None:
            states = self._eagle.states_of(self.step_graphs.hidden_states(shape), batch.num_tokens)
            launched_step.proposer_states = ProposerStates(
                rows, self.rows.generations[rows], starts, counts, batch.offsets, samples, states
            )
        if shape is not None:
            launched_step.num_samples = shape.num_samples
        slot.done.record()
        return launched_step

    def _shape(self, batch: Batch, *, verifies: bool) -> PaddedStepShape:
        if verifies:
            shape = self.shapes.verify(batch.num_tokens, len(batch.rows), len(batch.sampled))
        else:
            shape = self.shapes.of(batch.num_tokens, len(batch.rows), len(batch.sampled))
        has_adapters = self.adapters is not None and bool((self.rows.adapters[batch.rows] >= 0).any())
        return shape.with_adapters() if has_adapters else shape

    def _launch_separate_sampling(
        self, launched_step: LaunchedStep, batch: Batch, runs: list[Run], pooled: BoolArray | None
    ) -> PaddedStepShape:
        """Launch a step in which a row needs more than an id: the model's graph, then sampling. Returns its shape."""
        shape = self._shape(batch, verifies=launched_step.num_drafts is not None)
        requested_features, sampled = self.rows.requested_features, self.rows.features[batch.sample_rows]
        kind = SamplerKind(
            shape.num_samples,
            filtered=bool(self._device_rows.filtered),
            verifies=shape.verifies,
            has_processors=bool(requested_features & PROCESSORS),
            has_masks=bool((sampled & SamplingFeature.GRAMMAR_MASK).any()),
        )
        has_logprobs = bool((sampled & SamplingFeature.LOGPROBS).any())
        # All ranks do the same, because a new sampler runs once.
        sampler = None if has_logprobs else self.step_graphs.sampler(kind)
        captured = self.step_graphs.get(shape, CapturedStepKind.FORWARD_ONLY)
        self._staging.fill(launched_step.slot, batch, runs, one_each=shape.one_each)
        captured.launch()
        if kind.has_masks and self._extras is not None:
            self._send_masks(self._extras, launched_step, captured.step.num_samples)
        if sampler is not None:
            sampler()
        elif self._extras is not None:
            launched_step.logprobs = self._extras.sample_with_logprobs(
                batch.sample_rows, captured.step, self.rows, kind
            )
        else:
            self.step_graphs.sample_as(kind, captured.step)
        if requested_features & SamplingFeature.PROMPT_LOGPROBS and self._extras is None:
            token_indices = prompt_token_indices(self.rows, batch.rows, batch.starts, batch.counts, batch.offsets)[0]
            for begin in range(0, len(token_indices), self._max_num_samples):  # this rank's part of the logits
                part = token_indices[begin : begin + self._max_num_samples].astype(np.int32)
                self.model.score(self.step_graphs.hidden_states(shape), self.device.send(part))
        elif requested_features & SamplingFeature.PROMPT_LOGPROBS and self._extras is not None:
            launched_step.prompt_logprobs = self._extras.score_prompts(
                batch, self.rows, self.step_graphs.hidden_states(shape)
            )
        if pooled is not None:
            hidden_states = self.step_graphs.hidden_states(shape)
            launched_step.hidden_states = pooled_entries(
                *(launched_step, self.device, batch, self.rows.generations, pooled, hidden_states)
            )
        return shape

    def _send_masks(self, extras: SamplingExtras, launched_step: LaunchedStep, num_samples: int) -> None:
        """Send the grammar masks of a step to the device. They need the ids of the steps before it. Those are published
        while the masks are computed."""
        read = []
        while self.launched_steps:
            read.append(self._read_oldest(spin_s=SPIN_S))
        has_logits = slice(None) if launched_step.pooled is None else ~launched_step.pooled
        rows, num_drafts = launched_step.rows[has_logits], launched_step.num_drafts
        drafts = np.zeros(len(rows), np.int64) if num_drafts is None else num_drafts[has_logits]
        with busy(self.ranks):
            request = extras.request_masks(self.masks, rows, drafts, self.rows)
            for each in read:
                self.publish(*each)
            self.failed |= extras.send_masks(self.masks, request, num_samples)

    # ----------------------------------------------------------------------------------------------------- collecting

    def collect_done(self) -> list[Sampled]:
        """Collect and publish the steps that are over. Returns their results."""
        collected = []
        while self.launched_steps and self.launched_steps[0].is_over:
            collected.append(self.collect())
        return collected

    def drain(self) -> list[Sampled]:
        """Wait for all steps in flight, collect and publish them. Returns their results."""
        collected = []
        while self.launched_steps:
            collected.append(self.collect())
        return collected

    def collect(self) -> Sampled:
        """Wait for the oldest step in flight, collect and publish it."""
        launched_step, sampled = self._read_oldest()
        self.publish(launched_step, sampled)
        return sampled

    def _read_oldest(self, *, spin_s: float = 0.0) -> tuple[LaunchedStep, Sampled]:
        """Wait for the oldest step in flight and read its result."""
        if self.ranks is not None:
            self.ranks.wait_for(self.launched_steps[0])
        self.launched_steps[0].wait(spin_s)
        launched_step = self.launched_steps.popleft()
        sampled = self._results.read(launched_step)
        if self._eagle is not None and launched_step.proposer_states is not None:
            self._eagle.observe_step(launched_step.proposer_states, sampled)
            launched_step.proposer_states = None
        if self.ranks is not None:
            self.ranks.board.ended()
        launched_step.is_collected = True
        # Free pinned memory here: the thread of `Completions` may hold the last reference to the step, and freeing it
        # there could disturb a graph capture.
        launched_step.logprobs, launched_step.prompt_logprobs, launched_step.hidden_states = None, [], []
        self._staging.give(launched_step.slot)
        return launched_step, sampled
