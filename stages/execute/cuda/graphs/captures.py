"""What is captured and compiled before the server is ready, and what while it is idle.

    before    every kernel that a request can need, and the graphs of the first requests
    idle      the graphs of the other shapes, most useful first

A kernel takes a fifth of a second or more to compile, a graph some milliseconds to capture. So a request may have to
wait for a graph, but not for a kernel.

All ranks do the same in the same order, because collective operations come with the launches, also where these only
compile.
"""

from collections.abc import Iterable, Iterator

from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.drafts.draft_steps import DraftSteps
from pipeline.stages.execute.cuda.graphs.step_graphs import CapturedStepKind, SamplerKind, StepGraphs
from pipeline.stages.execute.cuda.graphs.step_shapes import PaddedStepShape, StepShapes
from pipeline.stages.execute.cuda.host_transfer import BlockCopier
from pipeline.stages.execute.cuda.ranks.device_ranks import DeviceRanks
from pipeline.stages.execute.cuda.sampling_extras import SamplingExtras

NUM_FIRST_VERIFYING = 3
"""Shapes of steps that verify proposed ids to capture before the server is ready: those for one row."""

WAYS = ((False, False), (False, True), (True, False), (True, True))
"""Of sampling, as (has logits processors or masks, filtered)."""


class Captures:
    """Owned by the runner. `extras` is None on ranks that don't sample."""

    def __init__(
        self,
        device: Device,
        shapes: StepShapes,
        graphs: StepGraphs,
        copier: BlockCopier,
        extras: SamplingExtras | None,
        proposer_steps: DraftSteps | None,
        ranks: DeviceRanks | None,
        max_num_seqs: int,
        *,
        has_adapters: bool,
    ) -> None:
        self._device, self._shapes, self._graphs, self._copier = device, shapes, graphs, copier
        self._extras, self._ranks, self._max_num_seqs = extras, ranks, max_num_seqs
        self._proposer_steps, self._has_adapters = proposer_steps, has_adapters
        self._others: Iterator[None] | None = None

    def capture_first(self) -> None:
        """Compile all kernels, and capture the graphs that first requests need: some decode sizes, and the smallest and
        the largest step with a prompt.

        Ranks capture all: they have no time of their own later, see `capture_more`.
        """
        if self._device.captures_graphs:
            with self._device.compiling():
                self._compile()
        for shape in self._first():
            self._graphs.get(shape, CapturedStepKind.SAMPLE)
        if self._proposer_steps is not None:
            self._proposer_steps.capture_first()
        if self._ranks is not None:
            if self._device.captures_graphs:
                for _ in self._capture_others():
                    pass
            self._ranks.board.agree([])
            self._ranks.board.loaded()
        self._device.synchronize()

    def capture_more(self) -> bool:
        """Capture one more graph, while the stage is idle. Returns False if nothing is left. With ranks, nothing is: a
        capture runs the step's collective operations, and the other ranks may be busy."""
        if not self._device.captures_graphs or self._ranks is not None:
            return False
        if self._others is None:
            self._others = self._capture_others()
        return next(self._others, self) is None

    def _first(self) -> list[PaddedStepShape]:
        shapes = self._shapes
        return [*shapes.first(), *shapes.first_mixes(), *shapes.verifying()[:NUM_FIRST_VERIFYING]]

    def _compile(self) -> None:
        """Make the launches of steps of all kinds."""
        for shape in (*self._shapes.compiled(), *self._shapes.verifying()):
            self._graphs.compile(shape, CapturedStepKind.SAMPLE)
            self._graphs.compile_scores(shape)
            if self._has_adapters:
                self._graphs.compile(shape.with_adapters(), CapturedStepKind.FORWARD_ONLY)
        for verifies in (False, True) if self._shapes.verifying() else (False,):
            for sampler in self._samplers([1], verifies=verifies):
                self._graphs.compile_sampler(sampler)
        if self._extras is not None:
            self._extras.compile()
        if self._proposer_steps is not None:
            self._proposer_steps.compile()
        self._copier.compile()

    def _samplers(self, sizes: Iterable[int], *, verifies: bool = False) -> Iterator[SamplerKind]:
        for size in sizes:
            for has_processors, filtered in WAYS:
                for has_masks in (False, True) if has_processors else (False,):
                    yield SamplerKind(size, filtered, verifies, has_processors, has_masks)

    def _capture_others(self) -> Iterator[None]:
        """Capture a graph in each iteration."""
        for shape, kind in self._steps():
            if not self._graphs.has(shape, kind):
                self._graphs.get(shape, kind)
                yield
        sizes = {shape.num_samples: None for shape in (*self._shapes.first(), *self._shapes.mixes(1))}
        for sampler in self._samplers(sizes):
            if not self._graphs.has_sampler(sampler):
                self._graphs.sampler(sampler)
                yield

    def _steps(self) -> list[tuple[PaddedStepShape, CapturedStepKind]]:
        """What is captured of each shape, most useful first."""
        shapes = self._shapes
        first, others = shapes.first(), shapes.others()
        mixed = list(dict.fromkeys((*shapes.mixes(1), *shapes.mixes(self._max_num_seqs))))
        steps = [
            *((shape, CapturedStepKind.SAMPLE) for shape in (*first, *others, *mixed, *shapes.verifying())),
            *((shape, CapturedStepKind.FORWARD_ONLY) for shape in (*first, *others, *mixed)),
        ]
        if self._has_adapters:
            steps += [
                (shape.with_adapters(), kind)
                for kind in (CapturedStepKind.SAMPLE, CapturedStepKind.FORWARD_ONLY)
                for shape in (*first, *others, *mixed)
            ]
        return steps
