"""What is captured and compiled before the server is ready, and what while it is idle.

    before    every kernel that a request can need, and the graphs of the first requests
    idle      the graphs of the other shapes, most useful first

A kernel takes more than a second to compile, a graph a few milliseconds to capture. So a request may have to wait for a
graph, but not for a kernel.
"""

from collections.abc import Iterable, Iterator

from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.graphs import CapturedStepKind, SamplerKind, StepGraphs
from pipeline.stages.execute.cuda.host_transfer import BlockCopier
from pipeline.stages.execute.cuda.ranks import DeviceRanks
from pipeline.stages.execute.cuda.sampling_extras import SamplingExtras
from pipeline.stages.execute.cuda.step_shapes import PaddedStepShape, StepShapes

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
        ranks: DeviceRanks | None,
        max_num_seqs: int,
        *,
        has_adapters: bool,
    ) -> None:
        self._device, self._shapes, self._graphs, self._copier = device, shapes, graphs, copier
        self._extras, self._ranks, self._max_num_seqs = extras, ranks, max_num_seqs
        self._has_adapters = has_adapters
        self._others: Iterator[None] | None = None

    def capture_first(self) -> None:
        """Capture the graphs that first requests need: some decode sizes, and the smallest and the largest step with a
        prompt, which together compile the kernels of all steps. Compile what samples and copies in other ways.

        Ranks capture all: they have no time of their own later, see `capture_more`.
        """
        shapes = self._shapes
        prompts = [shapes.mix(size, 1, 1) for size in {shapes.mixed[0]: 0, shapes.mixed[-1]: 0}]
        for shape in (*shapes.first(), *prompts, *shapes.verifying()[:NUM_FIRST_VERIFYING]):
            self._graphs.get(shape, CapturedStepKind.SAMPLE)
        if self._device.captures_graphs:
            self._warm()
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

    def _warm(self) -> None:
        """Compile the kernels that are not in the captured steps."""
        for sampler in self._samplers([1]):
            self._graphs.sampler(sampler)
        if self._shapes.verifying():
            for sampler in self._samplers([1], verifies=True):
                self._graphs.sampler(sampler)
        if self._extras is not None:
            self._extras.warm()
        self._copier.warm()

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
