"""Runs a step on a CPU: applies its changes, runs the program, samples."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from pipeline.config.settings import Settings
from pipeline.kernels.cpu import compile_ahead
from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import NO_ID, SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, LongArray, StepInputs
from pipeline.runtime.messages import Step
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan
from pipeline.stages.execute.cores import threads_of
from pipeline.stages.execute.cpu import backend
from pipeline.stages.execute.cpu.drafts.load import load_proposer
from pipeline.stages.execute.cpu.encodes import MediaFacts, load_encodes
from pipeline.stages.execute.cpu.kept_library import NOTHING_KEPT, KeptLibrary
from pipeline.stages.execute.cpu.native.panel_file import PanelLocation
from pipeline.stages.execute.cpu.precision import with_activations
from pipeline.stages.execute.cpu.program import NOTHING_ENCODED, MasksLate, Program, ProgramPlan
from pipeline.stages.execute.cpu.ranks.group import Outcome
from pipeline.stages.execute.cpu.ranks.pp_stage import PPStage
from pipeline.stages.execute.cpu.results import NOTHING, Computed, Results, pool_tokens, score_prompts, with_embeddings
from pipeline.stages.execute.cpu.states import StateSlots
from pipeline.stages.execute.drafts.draft_model import captured_layers, draft_block_bytes
from pipeline.stages.execute.grammar_masks.masks import LATE_MS
from pipeline.stages.execute.kv import divide_swap, layout_of, plan_kv, require_room, state_slot_bytes
from pipeline.stages.execute.models.limits import require_supported
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.program import LogitArray
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.ranks.context import ALONE, RankContext, StepAbandonedError
from pipeline.stages.execute.ranks.layer_split import Part, kv_layout_of, split, with_most_layers
from pipeline.stages.execute.ranks.share import most_kv_heads
from pipeline.stages.execute.row_changes import copies_of
from pipeline.stages.execute.rows import BoolArray, Take
from pipeline.stages.execute.runner import Runner
from pipeline.stages.execute.sampling_features import SamplingFeature
from pipeline.stages.execute.vision.coordinates import angles_of
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights

Clock = Callable[[], float]


class CpuRunner(Runner):
    """Owns the model, its memory and its rows; `swap` is the memory of the swap space, and `make` makes the empty
    program. `context` is what it knows of itself as a rank: all get the same steps, and rank 0 of the last stage
    samples. `kept` is what the executor before has left; `compiling` is called before and after a library may be
    compiled. Raises UserError if the model can't run with these settings."""

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        swap: memoryview | None = None,
        context: RankContext = ALONE,
        make: Callable[[backend.Library | None, ProgramPlan], Program] = backend.make_program,
        kept: KeptLibrary = NOTHING_KEPT,
        compiling: Callable[[bool], object] = lambda _: None,
    ) -> None:
        super().__init__(settings, model_dir)
        self._config = config = ModelConfig.load(model_dir)
        self.answers, self.generates = context.answers, config.generates
        require_supported(settings, config)
        library = backend.choose_library(settings, config, kept, compiling)
        self._library, self._cache_root = library, backend.cache_root(settings)
        self._compiling: subprocess.Popen[bytes] | None = None
        num_ranks = context.num_ranks
        self._ranks = ranks = None if num_ranks == 1 else backend.join(library, settings, config, context)
        weights = Weights(model_dir, config, FLOAT_FORMATS[settings.execute.dtype], keeps_floats=library is not None)
        settings = with_activations(settings, weights, library)
        self.activations = settings.execute.activations
        keeps = library and settings.execute.keep_packed_weights
        panels = PanelLocation.of(model_dir, weights.files, context) if keeps else None
        max_num_tokens = backend.max_num_prefill_tokens(settings, config, library, weights.are_quantized)
        parts = [Part(range(config.num_layers))]
        if context.num_stages > 1:
            parts = split(settings.execute, weights.layer_bytes(config.num_layers), weights.head_bytes(config))
        self._part = part = parts[context.stage]
        self.layers, self.rank_name = str(part), str(context) if settings.execute.num_ranks > 1 else ""
        # All ranks have as many blocks as the one whose blocks are the largest.
        largest = msgspec.structs.replace(config, num_kv_heads=most_kv_heads(config, num_ranks))
        layout = with_most_layers(layout_of(settings, config), parts)
        slot_bytes = max(state_slot_bytes(config, part.layers, num_ranks) for part in parts)
        media = MediaFacts.of(settings, model_dir)
        most_tokens = max(max_num_tokens, media.max_whole_run)
        kv = plan_kv(settings, largest, most_tokens, draft_block_bytes(settings), layout, slot_bytes)
        if not config.causal:  # its longest text, whatever config.json says
            max_num_tokens = min(max_num_tokens, max(kv.max_model_len, settings.schedule.encoder_step_tokens))
        require_room(settings, weights.least_bytes(config) // settings.execute.num_ranks)
        swapped = None if swap is None else divide_swap(settings, largest, swap, kv)
        self._make_rows(largest, kv, *((0, 0) if swapped is None else map(len, swapped)))
        self._encodes = load_encodes(settings, model_dir, config, library, context, media)
        self.facts = msgspec.structs.replace(self.facts, max_num_prefill_tokens=max_num_tokens, **media._asdict())
        max_num_seqs, max_num_samples = self._max_num_seqs, self._max_num_samples
        num_tokens, max_num_blocks = max_num_tokens + media.tokens_beyond, -(-kv.max_model_len // BLOCK_SIZE)
        sizes = num_tokens, max_num_seqs, max_num_blocks, len(kv.layout.groups), max_num_samples
        angles = angles_of(config, kv.max_model_len, num_tokens) if media.num_encoder_rows else None
        self.inputs = StepInputs(*sizes, config.causal, media.max_whole_run > 0, angles, type_rows=config.type_rows)
        self.sampling_inputs = SamplingInputs(max_num_samples, config.vocab_size, self.masks.words)
        if ranks is not None:
            self.sampling_inputs.ids = ranks.allocate_ids(max_num_samples)
        self._link = backend.link(library, context, self.inputs, config)
        self._pipeline = None if self._link is None else PPStage(self._link, context, self.rows)
        self.scores = ScoreInputs(max_num_seqs)
        plan = ProgramPlan(
            settings=settings,
            config=config,
            inputs=self.inputs,
            sampling_inputs=self.sampling_inputs,
            scores=self.scores,
            kv=replace(kv, layout=kv_layout_of(kv.layout, part), touches=not kept.wakes),
            num_threads=threads_of(settings),
            swap=swapped and swapped.blocks,
            encoded=NOTHING_ENCODED if self._encodes is None else self._encodes.memory,
            panels=panels,
            lora=LoraPlan.of(settings),
            ranks=ranks,
            part=part,
            link=self._link,
        )
        self.program = make(library, plan)
        self._make_adapters(plan.lora, self.program)
        self.program.capture(captured_layers(settings))
        build_program(config, weights, self.program, part)
        self.program.finish_loading()
        self._make_changes(
            config,
            self.program.last_norm if part.is_last else None,
            lambda: load_proposer(
                settings, self.rows, kv, plan.num_threads, (config, weights, self.program, self._library)
            ),
        )
        self.kernels: str = "torch" if library is None else library.isa
        self.code = backend.code_of_torch() if library is None else library.code
        self.weight_formats = "+".join(weights.taken if context.num_stages == 1 else weights.formats)
        self.states = StateSlots(self.program, kv.num_state_slots, swapped) if config.has_states else None
        self._results = Results(self.rows, self.failed, self.speculator, samples=part.is_last)
        self._clock: Clock = time.monotonic

    def _drop_drafts(self, rows: IntArray) -> None:
        super()._drop_drafts(rows)
        if self._pipeline is not None:
            self._pipeline.drop(rows)

    @property
    def name(self) -> str:
        """The back end, for logs."""
        return self.program.name

    def logits(self) -> LogitArray:
        """Logits of the last step's samples; see `Program.logits`."""
        return self.program.logits()

    def drop_all(self, incarnation: int = 0) -> None:
        """Drop all rows. `incarnation` is that of the scheduler's successor."""
        if self._ranks is not None:
            self._ranks.announce(incarnation)
        self._changes.drop_all()
        if self._pipeline is not None:
            self._pipeline.announce(incarnation)

    def barrier_wait_s(self) -> float:
        """How long this rank has waited for others of its stage; 0 if there are none."""
        return 0.0 if self._ranks is None else self._ranks.waited_s()

    def pipeline_wait_s(self) -> float:
        """How long this rank has waited for other stages of the pipeline; 0 if there are none."""
        return 0.0 if self._link is None else self._link.waited_s()

    def start(self) -> None:
        """Also compile the optimized library, if this server had no time for it. This server and its next executors go
        on with the one they have."""
        super().start()
        if self.answers and self._library is not None and self._library.is_quick and self._compiling is None:
            self._compiling = compile_ahead.start(self._library.isa, self._cache_root)

    def _close_device(self) -> None:
        if self._compiling is not None:
            compile_ahead.end(self._compiling)
        for one in (self.program, self._encodes, self._link):
            if one is not None:
                one.close()

    def step(self, step: Step, take: Take, clock: Clock = time.monotonic) -> Sampled:
        """Compute one step. Errors of the model or of an invalid plan propagate and end the stage. `clock` times the
        copies. Raises StepAbandonedError if the step's scheduler has died, and not all ranks may have got the step."""
        if self._ranks is not None and not self._ranks.begin(step.incarnation, step.step_id):
            raise StepAbandonedError(f"step {step.step_id} of scheduler {step.incarnation}")
        if self._pipeline is not None:
            self._pipeline.begin(step.incarnation, step.step_id)
        self._changes.apply(step, take)
        self._clock = clock
        num_copies, copy_s = self._copy(step, take, clock)
        rows, starts, counts = (take(array, np.int32) for array in (step.rows, step.starts, step.counts))
        samples = take(step.samples, np.uint8).view(np.bool_)
        assert len(rows) == len(starts) == len(counts) == len(samples)
        drafts = take(step.drafts, np.int32)
        if self._pipeline is not None:
            self._pipeline.await_ids(rows)
        if self.states is not None:
            self.states.fill(self.inputs, step, take, starts, counts, self.rows.ended[rows])
        if (encodes := self._encodes) is not None:
            with self._busy():
                encodes.encode(step, take, clock)
        sampled = self._step_rows(rows, starts, counts, samples, drafts, num_copies, copy_s)
        sampled = sampled if encodes is None else sampled._replace(encode_s=encodes.seconds)
        if self._pipeline is not None:
            self._pipeline.end(rows[samples], sampled.ids)
            sampled = sampled._replace(elsewhere_s=self._pipeline.elsewhere_s)
        return sampled

    def _step_rows(
        self,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        samples: BoolArray,
        drafts: IntArray,
        num_copies: int,
        copy_s: float,
    ) -> Sampled:
        """Compute the entries whose rows have not ended."""
        ended = self.rows.ended[rows]
        sampled, running = rows[samples], None
        if np.count_nonzero(ended):
            kept = ~ended
            running = kept[samples]
            drafts = drafts[kept] if len(drafts) else drafts
            rows, starts, counts, samples = rows[kept], starts[kept], counts[kept], samples[kept]
        totals = len(rows), int(np.add.reduce(counts)), num_copies, copy_s
        computed = self._compute(rows, starts, counts, samples, drafts) if len(rows) else NOTHING
        return self._results.make(sampled, running, computed, *totals)

    def _copy(self, step: Step, take: Take, clock: Clock) -> tuple[int, float]:
        """Make the step's copies. Returns the number and the seconds of those of blocks. Without, the clock is not
        read."""
        if self.states is not None:
            self.states.copy(step, take)
        sources, targets = copies_of(step, take, self.facts)
        if not len(sources):
            return 0, 0.0
        began = clock()
        self.program.copy_blocks(sources, targets)
        return len(sources), clock() - began

    def _compute(
        self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray, most_drafts: IntArray
    ) -> Computed:
        """Run the program over entries that have not ended. If there are `most_drafts`, propose up to this many ids for
        each, and verify them."""
        self.rows.begin(rows, starts, counts, samples)
        num_drafts: LongArray | None = None
        if len(most_drafts) and self.speculator is not None:
            proposed = self.speculator.propose(rows, most_drafts, self._clock)
            if proposed.any():
                num_drafts, counts = proposed, (counts + proposed).astype(np.int32)
        if np.count_nonzero(counts == 1) == len(rows):
            entry, positions = rows, starts
        else:
            repeated = np.repeat(np.arange(len(rows)), counts)
            positions = np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated] + starts[repeated]
            entry = rows[repeated]
        ids = self.rows.ids[entry, positions]
        spans = () if (encodes := self._encodes) is None else encodes.put(ids, positions, entry, rows, starts, counts)
        num_blocks = int(np.maximum.reduce(self.rows.num_blocks[rows]))
        requested_features = self.rows.requested_features
        pooled = (
            self.rows.features[rows] & SamplingFeature.EMBEDDING != 0
            if requested_features & SamplingFeature.EMBEDDING
            else None
        )
        # Pooled rows have no logits.
        is_sampled = samples if pooled is None else samples & ~pooled
        table, *others = (blocks[rows, :num_blocks] for blocks in self.rows.group_blocks)
        logprobs = self.sampling_inputs.logprobs
        num_samples = is_sampled if num_drafts is None else is_sampled * (1 + num_drafts)
        self.inputs.fill(ids, starts, counts, table, num_samples, others, *spans)
        if self._config.type_rows is not None:
            has_types = self._config.token_types > 1
            self.inputs.fill_types(self.rows.types_of(entry, positions) if has_types else 0)
        if self.adapters is not None:
            self.inputs.fill_adapters(self.rows.adapters[rows])
        if num_drafts is None:
            self.rows.fill_sampling_inputs(self.sampling_inputs, rows[is_sampled])
            ids = self._run(rows[is_sampled])
            computed = Computed(ids, logprobs.memory, logprobs.widths)
        else:
            computed = self._run_and_verify(rows[is_sampled], num_drafts[is_sampled])
        if self._proposer is not None and self._proposer.reads_hidden_states:
            kept = counts.copy()
            if (verified := computed.verified) is not None:
                kept[is_sampled] -= (verified.num_drafts + 1 - verified.num_ids).astype(np.int32)
            self._proposer.observe(rows, starts, kept, self.inputs.offsets[: len(rows)], self.program.hidden_states())
        if not self._part.is_last:
            return NOTHING
        if requested_features & SamplingFeature.PROMPT_LOGPROBS:
            prompt_logprobs = score_prompts(self.rows, rows, self.program, self.inputs, self.scores)
            computed = computed._replace(prompt_logprobs=prompt_logprobs)
        if pooled is not None:
            embeddings = pool_tokens(self.pool, self.rows, rows, samples, pooled, self.inputs, self.program.residual())
            computed = with_embeddings(computed, pooled[samples], embeddings)
        return computed

    def _run_and_verify(self, rows: IntArray, num_drafts: LongArray) -> Computed:
        """Run the program, which samples an id after each of the ids that were proposed for these rows, and keep what
        equals the proposals."""
        assert self.speculator is not None
        num_each = 1 + num_drafts
        sampled = np.repeat(rows, num_each)
        offset = np.arange(len(sampled)) - np.repeat(num_each.cumsum() - num_each, num_each)
        num_known = (self.rows.num_ids[sampled] + offset).astype(np.int32)
        self.rows.fill_sampling_inputs(self.sampling_inputs, sampled, num_known)
        ids = self._run(rows, num_drafts)
        logprobs = self.sampling_inputs.logprobs
        verified = self.speculator.verify(rows, num_drafts, ids, logprobs.memory, logprobs.widths, self.failed)
        return Computed(verified.last_ids, verified.token_outputs, verified.token_output_sizes, verified=verified)

    def _run(self, rows: IntArray, num_drafts: LongArray | None = None) -> IntArray:
        """Run the program, which samples for these rows and behind the ids that were proposed for them, with grammar
        masks. Returns the ids. Rows whose mask can't be computed are marked as failed; on ranks, they have no ids."""
        ranks = self._ranks
        if not self._part.is_last:
            self._run_program()
            assert self._pipeline is not None
            self._pipeline.send(self.program.residual())
            return NOTHING.ids
        if ranks is None or ranks.rank == 0:
            ids = self._sample(rows, num_drafts)
            self._find_nan(rows, num_drafts, ids)
            if ranks is not None:
                if self.failed:
                    assert ranks.ids is not None
                    ids[np.isin(rows, list(self.failed))] = NO_ID
                    ranks.ids[: len(ids)] = ids
                ranks.publish(Outcome.DONE)
            return ids
        self._run_program()
        while ranks.await_outcome() is Outcome.AGAIN:
            self.program.sample_again()
        assert ranks.ids is not None
        return ranks.ids[: self.inputs.num_samples].copy()

    def _find_nan(self, rows: IntArray, num_drafts: LongArray | None, ids: IntArray) -> None:
        """Tell `Results` about rows without an id."""
        if np.count_nonzero(ids == NO_ID):
            sampled = rows if num_drafts is None else np.repeat(rows, 1 + num_drafts)
            self._results.find_nan(ids, sampled, self.program.logits())

    def _sample(self, rows: IntArray, num_drafts: LongArray | None) -> IntArray:
        """The same on one rank, or on rank 0 of several."""
        if not len(self.sampling_inputs.masked):
            return self._run_program()
        masks = self.masks
        with self._busy():
            masks.request(rows, self.rows.ids, self.rows.num_ids, num_drafts)
        try:
            run = self._run_program
            while True:
                self.program.wait_for(masks.word_address if masks.ticket else 0, masks.ticket, LATE_MS)
                try:
                    ids = run()
                    break
                except MasksLate:
                    if self._ranks is not None:
                        self._ranks.publish(Outcome.AGAIN)
                    with self._busy():
                        masks.wait()
                    run = self.program.sample_again
        finally:
            self.program.wait_for(0, 0, 0)
        first = rows if num_drafts is None else np.repeat(rows, 1 + num_drafts)
        with self._busy():
            failed = masks.take_failed()
        for index, why in failed.items():
            self.failed[int(first[index])] = why
        return ids

    def _run_program(self) -> IntArray:
        """Run the program, over the hidden states of the stage before if there is one."""
        if self._pipeline is not None:
            self._pipeline.receive(self.program.residual())
        return self.program.run()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Other ranks don't call this one late while it waits for masks."""
        with ExitStack() as stack:
            for group in (self._ranks, self._link):
                if group is not None:
                    stack.enter_context(group.busy())
            yield
