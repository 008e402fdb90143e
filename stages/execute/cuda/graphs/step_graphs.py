"""Captures steps as CUDA graphs: one call makes all launches of a step.

    SAMPLE           [ forward pass · sample · finish ]                      one graph: the common step
    others           [ forward pass ] ──► [ masks, logits processors · sample · finish ]

The kernels read the step from memory at fixed addresses: the host's words, rows, weights. So one graph serves every
step of its shape. What samples in another way than the common step has a graph of its own, which depends only on the
number of samples: so the forward pass of a shape is captured twice, not once for each way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from pipeline.kernels.triton import step as ends
from pipeline.kernels.triton.rows import RowState, StepArrays
from pipeline.kernels.triton.sampling import sample
from pipeline.stages.execute.cuda.device import Calls, Device
from pipeline.stages.execute.cuda.graphs.step_shapes import PaddedStepShape, decode_sizes
from pipeline.stages.execute.cuda.model.device_model import DeviceModel, HiddenStates
from pipeline.stages.execute.cuda.ranks.link import RankLink


class CapturedStepKind(Enum):
    """What a captured step does after the forward pass."""

    SAMPLE = "sample"
    """Sampling over the whole vocabulary."""
    FORWARD_ONLY = "forward_only"
    """Nothing: sampling is launched separately."""


@dataclass(frozen=True, slots=True)
class SamplerKind:
    """How a captured sampler samples."""

    num_samples: int
    """With padding."""
    filtered: bool
    """From the ids that top_k, top_p and min_p leave."""
    verifies: bool = False
    """The host verifies the ids before they are appended to their rows."""
    has_processors: bool = False
    """After the rows' logits processors."""
    has_masks: bool = False
    """After the rows' grammar masks. Requires `has_processors`, which applies both."""


ApplyProcessors = Callable[[StepArrays, bool], None]
"""Applies the logits processors of a step's rows to the model's logits and, if the second argument says so, the
grammar masks on the device."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step."""

    launch: Calls
    step: StepArrays
    shape: PaddedStepShape


class StepGraphs:
    """Owned by the runner. Captures the steps of a shape on first use and keeps them."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        rows: RowState,
        words: Tensor,
        results: Tensor,
        max_num_rows: int,
        max_num_tokens: int,
        max_num_samples: int,
        num_groups: int = 1,
        ranks: RankLink | None = None,
        id_shift: int = 0,
    ) -> None:
        """`results` are those of `pipeline.kernels.triton.step.finish`, and `id_shift` is that of `prepare`."""
        self._device, self._model, self._rows, self._words = device, model, rows, words
        self._results = results
        self._ranks, self._id_shift = ranks, id_shift
        self._max_num_rows, self._max_num_samples = max_num_rows, max_num_samples
        where = device.where

        def ints(num: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num, dtype=dtype, device=where)

        self._entries = [ints(max_num_rows) for _ in range(4)]
        self._tokens = [ints(max_num_tokens), ints(max_num_tokens)]
        self._adapters = ints(max_num_tokens)
        self._slots = ints(num_groups * max_num_tokens, torch.int64).view(num_groups, max_num_tokens)
        self._tables = rows.blocks.view(len(rows.blocks), num_groups, -1)
        self._samples = [ints(max_num_samples) for _ in range(3)]
        self._stamps = ints(ends.STAMP_WORDS)
        self.sampled_ids = ints(max_num_samples)
        self.scratch = sample.SamplingScratch(max_num_samples, model.logits.shape[1], where)
        self.apply_processors: ApplyProcessors | None = None
        """None where they do not apply: on all ranks but the first, and to proposed ids."""
        self._captured: dict[tuple[PaddedStepShape, CapturedStepKind], CapturedStep] = {}
        self._samplers: dict[SamplerKind, Calls] = {}

    @property
    def num_captured(self) -> int:
        return len(self._captured) + len(self._samplers)

    def has(self, shape: PaddedStepShape, kind: CapturedStepKind) -> bool:
        return (shape, kind) in self._captured

    def get(self, shape: PaddedStepShape, kind: CapturedStepKind) -> CapturedStep:
        """The captured step of a shape. A new one first runs once on padding, which overwrites the words."""
        captured = self._captured.get((shape, kind))
        if captured is not None:
            return captured
        step = self._step(shape)
        calls = self._calls(step, shape, kind)
        if not shape.is_captured:
            return CapturedStep(calls, step, shape)
        self._clear_words()
        captured = CapturedStep(self._device.graph(calls), step, shape)
        self._captured[shape, kind] = captured
        return captured

    def compile(self, shape: PaddedStepShape, kind: CapturedStepKind) -> None:
        """Make the launches of a step. For `Device.compiling`."""
        self._calls(self._step(shape), shape, kind)()

    def compile_scores(self, shape: PaddedStepShape) -> None:
        """Make the launches for logprobs of prompts. For `Device.compiling`."""
        for size in decode_sizes(self._max_num_samples):
            self._model.score(self.hidden_states(shape), self._samples[0][:size])

    def compile_sampler(self, kind: SamplerKind) -> None:
        """Make the launches of a sampler. For `Device.compiling`."""
        self.sample_as(kind, self._sampled_by(kind))

    def _sampled_by(self, kind: SamplerKind) -> StepArrays:
        return self._step(PaddedStepShape(1, 1, kind.num_samples, one_each=True))

    def has_sampler(self, kind: SamplerKind) -> bool:
        return kind in self._samplers

    def sampler(self, kind: SamplerKind) -> Calls:
        """What samples after the forward pass of any step with so many samples. A new one first runs once on padding,
        which overwrites the words: get it before the step's words are sent."""
        sampler = self._samplers.get(kind)
        if sampler is None:
            step = self._sampled_by(kind)
            self._clear_words()
            step.sample_rows.fill_(len(self._rows.params) - 1)
            step.num_known.zero_()
            sampler = self._samplers[kind] = self._device.graph(lambda: self.sample_as(kind, step))
        return sampler

    def with_sampling(self, shape: PaddedStepShape, *, filtered: bool) -> CapturedStep:
        """The captured step of a shape with its sampling, without logits processors."""
        if not filtered:
            return self.get(shape, CapturedStepKind.SAMPLE)
        forward = self.get(shape, CapturedStepKind.FORWARD_ONLY)
        sampler = self.sampler(SamplerKind(shape.num_samples, filtered=True, verifies=shape.verifies))

        def launch() -> None:
            forward.launch()
            sampler()

        return replace(forward, launch=launch)

    def sample_as(self, kind: SamplerKind, step: StepArrays) -> None:
        """Launch sampling after the forward pass, without a graph. Of several ranks, only the first one samples."""
        if kind.has_processors and self.apply_processors is not None:
            self.apply_processors(step, kind.has_masks)
        self.sample(self._model.logits[: step.num_samples], step, filtered=kind.filtered)
        self.finish(step, verifies=kind.verifies)

    def hidden_states(self, shape: PaddedStepShape) -> HiddenStates:
        """The hidden states of the last launched step, which must have this shape."""
        return self._model.hidden_states(shape.num_tokens, decodes=shape.one_each, has_adapters=shape.has_adapters)

    def _clear_words(self) -> None:
        """Make the words those of a step without rows, whose result is no slot's."""
        self._words[: ends.words_of(self._max_num_rows, self._max_num_samples)].zero_()

    def finish(self, step: StepArrays, *, verifies: bool) -> None:
        """Write the sampled ids to the result and, unless the host verifies them first, to the rows."""
        ends.finish(
            self._results,
            self.sampled_ids[: step.num_samples],
            step,
            self._rows,
            self._words,
            self._stamps,
            appends=not verifies,
        )

    def sample(self, logits: Tensor, step: StepArrays, *, filtered: bool) -> None:
        """Sample ids. Of several ranks, only the first one does, and the others get the ids from it."""
        ids = self.sampled_ids[: step.num_samples]
        if self._ranks is None or self._ranks.is_first:
            self._sample(ids, logits, step, filtered=filtered)
        if self._ranks is not None:
            self._ranks.share_ids(ids)

    def _sample(self, ids: Tensor, logits: Tensor, step: StepArrays, *, filtered: bool) -> None:
        arrays = step.sample_rows, step.num_known, self.scratch
        sample.sample(ids, logits, self._rows.params, *arrays, filtered=filtered)

    def apply(self) -> None:
        """Apply only the row changes in the words."""
        ends.apply(self._rows, self._words)

    def _calls(self, step: StepArrays, shape: PaddedStepShape, kind: CapturedStepKind) -> Calls:
        def calls() -> None:
            self.apply()
            arrays = step, self._rows, self._words, self._stamps
            ends.prepare(*arrays, self._max_num_rows, shape.one_each, self._id_shift)
            self._model.forward(step, decodes=shape.one_each)
            if kind is CapturedStepKind.SAMPLE:
                self.sample_as(SamplerKind(step.num_samples, filtered=False, verifies=shape.verifies), step)

        return calls

    def _step(self, shape: PaddedStepShape) -> StepArrays:
        rows, starts, counts, offsets = (each[: shape.num_entries] for each in self._entries)
        ids, positions = (each[: shape.num_tokens] for each in self._tokens)
        adapters = self._adapters[: shape.num_tokens] if shape.has_adapters else None
        sampled, sample_rows, num_known = (each[: shape.num_samples] for each in self._samples)
        groups: tuple[StepArrays, ...] = ()
        for group in reversed(range(len(self._slots))):
            slots, table = self._slots[group, : shape.num_tokens], self._tables[:, group]
            arrays = rows, starts, counts, offsets, ids, positions, slots, sampled, sample_rows, num_known, table
            groups = (StepArrays(*arrays, adapters, others=groups if group == 0 else ()), *groups)
        return groups[0]
